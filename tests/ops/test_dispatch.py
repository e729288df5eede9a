"""Schema, fake tensors, autograd and AOT dispatch of the registered operators (torch.library.opcheck)."""

import pytest
import torch
from cases import CASES, ONE_EACH, RECURRENT, float_of, operator, step
from torch.overrides import TorchFunctionMode

in_half_precision = True


class RegisteredCalls(TorchFunctionMode):
    """Records calls of `torch.ops.girih`: the flat arguments that `girih.ops` passes."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if isinstance(function, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
            self.calls.append((function, args, kwargs or {}))
        return function(*args, **kwargs or {})


def registered_call(function, *args):
    with RegisteredCalls() as recorder:
        function(*args)
    (call,) = recorder.calls
    packet, args, kwargs = call
    leaves = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in args]
    return getattr(packet, "default", packet), tuple(leaves), kwargs


# Every other case starts from a state.
ALTERNATING = [(case, case.has_state and i % 2 == 0) for i, case in enumerate(CASES)]


@pytest.mark.parametrize("case, resumed", ALTERNATING, ids=[str(case) for case in CASES])
def test_opcheck(case, resumed, device):
    inputs = case.draw(5, resumed=resumed, dtype=float_of(device), device=device)
    op, args, kwargs = registered_call(operator, inputs.requiring_grad())
    assert op.name() == f"girih::{case.op}"
    torch.library.opcheck(op, args, kwargs)


@pytest.mark.parametrize("case", [c for c in ONE_EACH if c.has_state], ids=str)
def test_opcheck_packed(case, device):
    inputs = case.draw(0, lengths=[3, 0, 2], dtype=float_of(device), device=device)
    torch.library.opcheck(*registered_call(operator, inputs.requiring_grad()))


@pytest.mark.parametrize("case", [c for c in ONE_EACH if c.has_state], ids=str)
def test_opcheck_with_bounds(case, device):
    inputs = case.draw(5, dtype=float_of(device), device=device).requiring_grad()
    bounds = torch.tensor([[0, 3], [2, 5]], dtype=torch.int32, device=device)
    call = registered_call(lambda inputs: operator(inputs, cu_seqlens=bounds), inputs)
    torch.library.opcheck(*call)


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_opcheck_step(case, device):
    inputs = case.draw(1, resumed=True, dtype=float_of(device), device=device)
    op, args, kwargs = registered_call(step, inputs)
    assert op.name() == f"girih::{case.op}_step"
    torch.library.opcheck(op, args, kwargs)
