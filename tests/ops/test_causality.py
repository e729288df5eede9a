"""Outputs and gradients at a token do not depend on later tokens."""

import pytest
import torch
from cases import CASES, HALF_TOLERANCES, operator, precision
from comparison import assert_within
from draws import sizes
from hypothesis import given
from hypothesis import strategies as st

in_half_precision = True


@pytest.mark.parametrize("case", CASES, ids=str)
@given(data=st.data(), t=st.integers(0, 12), seed=st.integers(0, 5))
def test_outputs_do_not_depend_on_later_tokens(case, device, data, t, seed):
    dtype, tolerance, _ = precision(case, device)
    drawn = data.draw(sizes(case), "sizes")
    inputs, other = (case.draw(12, dtype=dtype, device=device, seed=s, **drawn) for s in (seed, seed + 100))
    changed = inputs.map_tokens(lambda x, n: x.clone())
    for name, x in changed.data.items():
        if rows := case.token_rows(name):
            x[:, t * rows :] = other.data[name][:, t * rows :]
    assert_within(operator(changed)["o"][:, :t], operator(inputs)["o"][:, :t], tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
@given(data=st.data(), t=st.integers(1, 12))
def test_later_tokens_have_zero_gradients(case, device, data, t):
    dtype, _, _ = precision(case, device)
    drawn = data.draw(sizes(case), "sizes")
    inputs = case.draw(12, dtype=dtype, device=device, **drawn).requiring_grad()
    tokens = {name: case.token_rows(name) for name in inputs.data if case.token_rows(name)}
    grads = torch.autograd.grad(operator(inputs)["o"][:, :t].sum(), [inputs.data[name] for name in tokens])
    # On the tensor cores a gate's gradient is a difference of sums over tokens of input * gradient: only the
    # rounding of these sums is left.
    terms = max(
        (grad * inputs.data[name]).abs().max().item() for name, grad in zip(tokens, grads, strict=True)
    )
    for (name, rows), grad in zip(tokens.items(), grads, strict=True):
        bound = 0.0
        if dtype in HALF_TOLERANCES:
            is_gate = case.data[name][1] == "gate"
            bound = torch.finfo(dtype).eps * terms if is_gate else 1e-4 * grad.abs().max().item()
        assert (grad[:, t * rows :].abs() <= bound).all(), name
