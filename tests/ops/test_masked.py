"""A masked token (k = v = 0, no write, no decay) has no effect, so padding needs no unpadding."""

import math
from dataclasses import replace

import pytest
import torch
from cases import RECURRENT, gradients, operator, precision
from comparison import assert_within
from draws import sizes
from hypothesis import given
from hypothesis import strategies as st

in_half_precision = True

CHUNK_DEFINING = [case for case in RECURRENT if "position" in case.state]
PER_TOKEN = [case for case in RECURRENT if "position" not in case.state and case.op != "short_conv"]


def mask_tokens(inputs, mask):
    """Makes the tokens of `mask` [T] no-ops; q is unchanged."""
    abc = inputs.case.op == "gsa" and "g" not in inputs.data

    def blank(name, x):
        rows = inputs.case.token_rows(name)
        if name == "q" or not rows:
            return x
        value = -math.inf if abc and name == "s" else 0.0
        row_mask = mask.repeat_interleave(rows).reshape(1, -1, *[1] * (x.dim() - 2))
        return x.masked_fill(row_mask, value)

    return replace(inputs, data={name: blank(name, x) for name, x in inputs.data.items()})


def drop_tokens(inputs, mask):
    return inputs.map_tokens(lambda x, rows: x[:, ~mask.repeat_interleave(rows)])


@pytest.mark.parametrize("case", PER_TOKEN, ids=str)
@given(data=st.data(), mask=st.lists(st.booleans(), min_size=1, max_size=20), resumed=st.booleans())
def test_masked_tokens_have_no_effect(case, device, data, mask, resumed):
    dtype, tolerance, grad_tolerance = precision(case, device)
    mask = torch.tensor(mask, device=device)
    drawn = data.draw(sizes(case), "sizes")
    inputs = case.draw(len(mask), resumed=resumed, dtype=dtype, device=device, **drawn).requiring_grad()
    outs, want = operator(mask_tokens(inputs, mask)), operator(drop_tokens(inputs, mask))
    outs["o"] = outs["o"][:, ~mask]
    assert_within(outs, want, tolerance)
    assert_within(gradients(outs, inputs), gradients(want, inputs), grad_tolerance)


@pytest.mark.parametrize("case", RECURRENT, ids=str)
@given(data=st.data(), padding=st.integers(0, 9), T=st.integers(0, 9))
def test_left_padding_has_no_effect(case, device, data, padding, T):
    """Chunk-defining cases start at position (-padding) mod C, so that the first unpadded token starts a
    chunk."""
    dtype, tolerance, _ = precision(case, device)
    drawn = data.draw(sizes(case), "sizes")
    inputs = case.draw(padding + T, dtype=dtype, device=device, seed=T, **drawn)
    mask = torch.arange(padding + T, device=device) < padding
    alone = inputs.part(padding, padding + T)
    padded = mask_tokens(inputs, mask)
    if case in CHUNK_DEFINING:
        start = {name: x for name, x in operator(inputs.part(0, 0)).items() if name != "o"}
        start["position"] = torch.full_like(start["position"], -padding % case.chunk)
        padded = replace(padded, state_fields=start)
    outs = operator(padded)
    outs["o"] = outs["o"][:, padding:]
    assert_within(outs, operator(alone), tolerance)
