"""`X_step` is `X` on one token, with its state written in place."""

from dataclasses import replace

import pytest
import torch
from cases import RECURRENT, operator, precision, step
from comparison import assert_within


def concrete(inputs):
    """The inputs' state as tensors that no one else holds."""
    state = {name: x.detach().clone() for name, x in operator(inputs.part(0, 0)).items() if name != "o"}
    return replace(inputs, given=state)


@pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])
@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_steps_are_the_forward(case, resumed, device):
    dtype, tolerance, _ = precision(case, device)
    inputs = concrete(case.draw(9, resumed=resumed, dtype=dtype, device=device))
    want = operator(inputs)
    places = {name: x.data_ptr() for name, x in inputs.given.items()}
    rows = [step(inputs.part(t, t + 1)) for t in range(9)]
    assert_within({"o": torch.cat(rows, 1), **inputs.given}, want, tolerance)
    assert places == {name: x.data_ptr() for name, x in inputs.given.items()}


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_a_step_at_bf16_keeps_an_fp32_state(case, device):
    inputs = concrete(
        case.draw(1, resumed=True, dtype=torch.bfloat16, gate_dtype=torch.float32, device=device)
    )
    kinds = {name: x.dtype for name, x in inputs.given.items()}
    assert step(inputs).dtype == torch.bfloat16
    assert kinds == {name: x.dtype for name, x in inputs.given.items()}
