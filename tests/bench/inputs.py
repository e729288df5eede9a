"""Random inputs of a shape on the GPU, and the call of the operator on them."""

import torch
from girih import ops
from shapes import IN_FP32, cases


def fill(kind, sizes, dtype, device):
    """Fills a tensor as tests/support/cases.py does, on the device, with gates as in the layers."""
    dtype = torch.float32 if kind in IN_FP32 else dtype
    if kind == "gate":
        return torch.nn.functional.logsigmoid(torch.randn(sizes, device=device)) / 8
    if kind in ("weight", "beta", "step"):
        return torch.rand(sizes, device=device, dtype=dtype)
    normal = torch.randn(sizes, device=device, dtype=dtype)
    if kind == "unit":
        return torch.nn.functional.normalize(normal, dim=-1)
    return normal


def draw(shape, device="cuda"):
    """The keywords of the operator at this shape: from the start of a sequence, or a step from a state."""
    torch.manual_seed(0)
    case, sizes = shape.case, shape.sizes

    def tensor(letters, kind):
        x = fill(kind, [sizes[letter] for letter in letters], shape.dtype, device)
        return x / case.chunk if kind == "step" else x  # the steps of a chunk sum to less than 1

    data = {name: tensor(*spec) for name, spec in case.data.items()}
    start = case.state if shape.is_step else case.memory
    state_dtype = shape.dtype if case.op == "short_conv" else torch.float32
    leaves = {
        f"state_{name}": tensor(*spec).to(state_dtype) for name, spec in start.items() if name != "position"
    }
    position = None
    if shape.is_step and "position" in start:
        position = torch.zeros(sizes["N"], dtype=torch.int64, device=device)
    return cases.arguments(cases.Inputs(case, data, leaves, position, resumed=shape.is_step))


def call(shape):
    """The operator as a function of the keywords. Its state is dropped, because a training step does not use
    it."""
    if shape.is_step:
        return getattr(ops, f"{shape.op}_step")
    operator = getattr(ops, shape.op)
    return (lambda **keywords: operator(**keywords)[0]) if shape.case.has_state else operator
