"""Packed sequences are a loop over sequences."""

import pytest
import torch
from cases import CASES, RECURRENT, cotangents, gradients, operator, precision, recurrence
from comparison import assert_within
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("case", CASES, ids=str)
@given(data=st.data())
def test_packed_sequences_are_a_loop_over_sequences(case, device, data):
    dtype, tolerance, grad_tolerance = precision(case, device)
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4), "lengths")
    if case.op == "cat_attention":
        lengths = [n // 2 * case.chunk for n in lengths]
    resumed = case.has_state and data.draw(st.booleans(), "resumed")
    cu_dtype = data.draw(st.sampled_from([torch.int32, torch.int64]), "cu dtype")
    inputs = case.draw(0, lengths=lengths, resumed=resumed, dtype=dtype, device=device, seed=sum(lengths))
    inputs = inputs.requiring_grad()
    exact = inputs.map(lambda x: x.detach().double()).requiring_grad()
    outs, want = operator(inputs, **inputs.cu(cu_dtype)), recurrence(exact)
    assert_within(outs, want, tolerance)
    grads = cotangents(outs)
    want_grads = gradients(want, exact, {name: x.double() for name, x in grads.items()})
    assert_within(gradients(outs, inputs, grads), want_grads, grad_tolerance)


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_sequences_longer_than_a_chunk(case, device):
    dtype, tolerance, _ = precision(case, device)
    inputs = case.draw(0, lengths=[65, 0, 1, 31], resumed=True, dtype=dtype, device=device)
    assert_within(operator(inputs), recurrence(inputs.map(torch.Tensor.double)), tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bounds_that_make_no_sense_read_nothing_outside(case, device):
    """They cannot be checked without waiting for the device: they must not crash it either."""
    dtype, _, _ = precision(case, device)
    inputs = case.draw(0, lengths=[2 * case.chunk] * 3, resumed=case.has_state, dtype=dtype, device=device)
    (name, bounds), *_ = inputs.cu().items()
    for bad in ([0, 99, -5, 6], [-7, 3, 2, 1000], [0, 1, 1, 2]):
        bounds.copy_(torch.tensor(bad))
        assert all(x.isfinite().all() for x in operator(inputs, **{name: bounds}).values())
