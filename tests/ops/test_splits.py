"""A state carries everything: a sequence may be split at any token, also mid-chunk, forward and backward."""

import pytest
import torch
from cases import RECURRENT, cotangents, gradients, operator, precision
from comparison import assert_within
from draws import sizes
from hypothesis import given
from hypothesis import strategies as st

in_half_precision = True


def fields(outs):
    return {name: x for name, x in outs.items() if name != "o"}


@pytest.mark.parametrize("case", RECURRENT, ids=str)
@given(data=st.data())
def test_two_parts_equal_the_whole(case, device, data):
    dtype, tolerance, grad_tolerance = precision(case, device)
    T = data.draw(st.integers(0, 20) | st.sampled_from([63, 64, 65, 100]), "T")
    a = data.draw(st.integers(0, T), "a")
    resumed = data.draw(st.booleans(), "resumed")
    drawn = data.draw(sizes(case), "sizes")
    if case.op == "trellis" and dtype == torch.float32:
        drawn["M"] = max(5, drawn["M"])  # a norm of fewer entries is ill-conditioned
    if case.op == "delta_product" and dtype in (torch.float16, torch.bfloat16) and drawn["D"] < 4:
        # Keys of one channel are all parallel: 16 bits lose a few percent over a chunk.
        drawn |= {"D": 4, "V": 4} if drawn["D"] == drawn["V"] else {"D": 4}
    whole = case.draw(T, resumed=resumed, dtype=dtype, device=device, seed=T, **drawn).requiring_grad()

    want = operator(whole)
    first = operator(whole.part(0, a))
    second = operator(whole.part(a, T, fields(first)))
    joined = second | {"o": torch.cat([first["o"], second["o"]], 1)}
    assert_within(joined, want, tolerance)
    grads = cotangents(want)
    assert_within(gradients(joined, whole, grads), gradients(want, whole, grads), grad_tolerance)
