"""Numerical differentiation in float64 of outputs and states by every floating input and initial state."""

import pytest
from cases import CASES, ONE_EACH, RECURRENT, operator
from torch.autograd import gradcheck

MATRIX = [(case, False) for case in CASES] + [(case, True) for case in RECURRENT]
SMALL = {"B": 1, "H": 1, "Q": 1, "D": 2, "V": 2, "M": 2, "X": 2}


def check(inputs, **how):
    inputs = inputs.requiring_grad()

    def call(*tensors):
        outs = operator(inputs.with_floats(dict(zip(inputs.floats, tensors, strict=True))))
        return tuple(x for x in outs.values() if x.is_floating_point())

    assert gradcheck(call, tuple(inputs.floats.values()), **how)


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_every_entry(case):
    check(case.draw(4, resumed=case.has_state, calm=True, **SMALL))


@pytest.mark.parametrize("calm", [True, False], ids=["calm", "wild"])
@pytest.mark.parametrize(
    "case, resumed", MATRIX, ids=[f"{c}-{'resumed' if r else 'start'}" for c, r in MATRIX]
)
def test_a_random_direction(case, resumed, calm):
    """`wild`: gates down to -20, targets and values of any length."""
    check(case.draw(6, resumed=resumed, calm=calm), fast_mode=True)
