"""Packed sequences equal a loop over sequences."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import PACKED, RECURRENT, cotangents, gradients, operator, precision, recurrence
from comparison import assert_within
from draws import sizes
from hypothesis import given
from hypothesis import strategies as st

in_half_precision = True


@pytest.mark.parametrize("case", PACKED, ids=str)
@given(data=st.data())
def test_packed_sequences_equal_a_loop_over_sequences(case, device, data):
    dtype, tolerance, grad_tolerance = precision(case, device)
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4), "lengths")
    if case.op == "cat_attention":
        lengths = [n // 2 * case.chunk for n in lengths]
    resumed = case.has_state and data.draw(st.booleans(), "resumed")
    cu_dtype = data.draw(st.sampled_from([torch.int32, torch.int64]), "cu dtype")
    drawn = data.draw(sizes(case), "sizes") | {"B": 1}
    how = {"resumed": resumed, "dtype": dtype, "device": device, "seed": sum(lengths)}
    inputs = case.draw(0, lengths=lengths, **how, **drawn).requiring_grad()
    exact = inputs.map(lambda x: x.detach().double()).requiring_grad()
    outs, want = operator(inputs, **inputs.cu(cu_dtype)), recurrence(exact)
    assert_within(outs, want, tolerance)
    grads = cotangents(outs)
    want_grads = gradients(want, exact, {name: x.double() for name, x in grads.items()})
    assert_within(gradients(outs, inputs, grads), want_grads, grad_tolerance)


def row_tokens(inputs, i, a, b):
    """Tokens a to b of row i, from the state of row i."""
    part = inputs.part(a, b, {name: x[i : i + 1] for name, x in inputs.state.items()})
    token_rows = inputs.case.token_rows
    return replace(
        part, data={name: x[i : i + 1] if token_rows(name) else x for name, x in part.data.items()}
    )


@pytest.mark.parametrize("bounds", [[[0, 9], [2, 7], [4, 4]], [[0, 1], [8, 9], [3, 9]]], ids=str)
@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_one_sequence_per_row_within_bounds(case, bounds, device):
    """`cu_seqlens [B, 2]`: tokens outside the bounds have no effect, and their outputs are 0."""
    dtype, tolerance, grad_tolerance = precision(case, device)
    inputs = case.draw(9, B=3, resumed=True, dtype=dtype, device=device).requiring_grad()
    exact = inputs.map(lambda x: x.detach().double()).requiring_grad()
    outs = operator(inputs, cu_seqlens=torch.tensor(bounds, device=device))
    rows = [recurrence(row_tokens(exact, i, a, b)) for i, (a, b) in enumerate(bounds)]
    want = {name: torch.cat([row[name] for row in rows]) for name in rows[0] if name != "o"}
    padded = [F.pad(row["o"].flatten(2), (0, 0, a, 9 - b)) for row, (a, b) in zip(rows, bounds, strict=True)]
    want["o"] = torch.cat(padded).view_as(outs["o"])
    assert_within(outs, want, tolerance)
    grads = cotangents(outs)
    want_grads = gradients(want, exact, {name: x.double() for name, x in grads.items()})
    assert_within(gradients(outs, inputs, grads), want_grads, grad_tolerance)


def skip_cpu(device):
    """Skips the CPU, which checks integers and raises an error (test_operator_edges.py)."""
    if device == "cpu":
        pytest.skip("the CPU raises an error")


@pytest.mark.parametrize("T", [9, 1])
@pytest.mark.parametrize("case", [case for case in RECURRENT if "position" in case.state], ids=str)
def test_positions_outside_a_chunk_are_clamped(case, T, device):
    skip_cpu(device)
    dtype, _, _ = precision(case, device)
    inputs = case.draw(T, resumed=True, dtype=dtype, device=device)
    found, want = (
        operator(
            replace(inputs, state_fields=inputs.state | {"position": torch.tensor(position, device=device)})
        )
        for position in ([-7, 3 * case.chunk + 1], [0, case.chunk - 1])
    )
    assert_within(found, want, 0.0)


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_sequences_longer_than_a_chunk(case, device):
    dtype, tolerance, _ = precision(case, device)
    inputs = case.draw(0, lengths=[65, 0, 1, 31], resumed=True, dtype=dtype, device=device)
    assert_within(operator(inputs), recurrence(inputs.map(torch.Tensor.double)), tolerance)


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_invalid_bounds_read_no_memory_outside(case, device):
    """Bounds on a device cannot be checked without a synchronisation, so they must be safe."""
    skip_cpu(device)
    dtype, _, _ = precision(case, device)
    inputs = case.draw(0, lengths=[2 * case.chunk] * 3, resumed=case.has_state, dtype=dtype, device=device)
    (name, bounds), *_ = inputs.cu().items()
    for bad in ([0, 99, -5, 6], [-7, 3, 2, 1000], [0, 1, 1, 2]):
        bounds.copy_(torch.tensor(bad))
        assert all(x.isfinite().all() for x in operator(inputs, **{name: bounds}).values())
