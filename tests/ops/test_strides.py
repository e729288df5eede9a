"""Results depend on values, not on strides."""

import pytest
import torch
from cases import CASES, gradients, operator, precision
from comparison import assert_within
from draws import sizes
from hypothesis import given
from hypothesis import strategies as st

in_half_precision = True


def lay_out(x, layout):
    """The same values with other strides; `expanded` repeats the first row of the batch."""
    if layout == "expanded":
        return x[:1].detach().expand_as(x)
    if layout == "reversed":
        order = range(x.dim())[::-1]
        return x.permute(*order).contiguous().permute(*order)
    if layout == "spread":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    if layout == "inside":
        return torch.nn.functional.pad(x, (1, 2) * x.dim(), value=torch.nan)[(slice(1, -2),) * x.dim()]
    return x.contiguous()


LAYOUTS = ["contiguous", "expanded", "reversed", "spread", "inside"]


@pytest.mark.parametrize("case", CASES, ids=str)
@given(data=st.data())
def test_strides_do_not_matter(case, device, data):
    dtype, tolerance, grad_tolerance = precision(case, device)
    drawn = data.draw(sizes(case), "sizes")
    inputs = case.draw(9, resumed=case.has_state, dtype=dtype, device=device, **drawn)
    layouts = {name: data.draw(st.sampled_from(LAYOUTS), name) for name in inputs.floats}
    strided = inputs.with_floats(
        {n: lay_out(x, layouts[n]).requires_grad_() for n, x in inputs.floats.items()}
    )
    plain = strided.map(lambda x: x.detach().contiguous()).requiring_grad()
    outs, want = operator(strided), operator(plain)
    assert_within(outs, want, tolerance)
    assert_within(gradients(outs, strided), gradients(want, plain), grad_tolerance)
