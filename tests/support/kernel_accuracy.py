"""Calls of an operator with all gradients, compared in accuracy with the same formula in PyTorch."""

from dataclasses import dataclass, field, replace

import rounded_formula
import torch
import torch.nn.functional as F
from girih import ops

DEVICE = "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 127, 129]
# Elements of padding, order of the dimensions in memory, number of padded dimensions.
LAYOUTS = {
    "dense": (1, (0, 1, 2, 3), 1),
    "aligned": (8, (0, 1, 2, 3)),
    "odd": (1, (0, 1, 2, 3)),
    "heads outside": (8, (0, 2, 1, 3)),
    "tokens inside": (8, (0, 2, 3, 1)),
    "batch inside": (3, (3, 2, 1, 0)),
}


@dataclass(frozen=True)
class Inputs:
    """Tensors by name: inputs, the fields of the state, and one gradient for every output."""

    op: str
    data: dict
    state: dict
    grads: dict
    options: dict = field(default_factory=dict)

    def map(self, f):
        parts = ({name: f(x) for name, x in part.items()} for part in (self.data, self.state, self.grads))
        return Inputs(self.op, *parts, self.options)

    def slice_tokens(self, part):
        """The inputs restricted to these tokens."""
        sliced = {name: x[:, part] for name, x in self.data.items()}
        return replace(self, data=sliced, grads=self.grads | {"o": self.grads["o"][:, part]})


def gates(pattern, shape, generator):
    """Log gates. "ordinary": as layers compute them; "mild" and "full": 2 and 16 times as strong; others:
    constant, per token, per token and slot, down to -20, or above 0 for some tokens."""
    if divisor := {"ordinary": 16, "mild": 8, "full": 1}.get(pattern):
        return F.logsigmoid(torch.randn(shape, generator=generator)) / divisor
    if pattern == "steady":  # the decay of 64 tokens is 2^-12.7: the fp16 kernels factor decays down to 2^-13
        return torch.full(shape, -0.138)
    # The decay of every 64 tokens is 2^-12.5, nearly all of it at one token, which differs between slots.
    if pattern == "once":
        token = torch.arange(shape[1]).view(-1, *[1] * len(shape[2:]))
        leap_token = torch.randint(64, shape[2:], generator=generator)
        return torch.where(token % 64 == leap_token, -8.6, -1e-3).repeat(shape[0], *[1] * len(shape[1:]))
    if pattern == "growing":  # the decay of a chunk is 2^-7; its second half grows by 2^10
        token = torch.arange(shape[1]).view(-1, *[1] * len(shape[2:])).expand(shape)
        return torch.where(token % 64 < 32, -0.38, 0.22)
    if pattern == "open":
        return torch.zeros(shape)
    if pattern == "closed":
        return torch.full(shape, -20.0)
    if pattern == "mixed":
        choice = torch.tensor([0.0, -1e-4, -0.03, -0.5, -3.0, -20.0])
        return choice[torch.randint(len(choice), shape, generator=generator)]
    if pattern == "sudden":  # a rare -20 among weak gates, at another token for every slot
        return torch.where(torch.rand(shape, generator=generator) < 0.02, -20.0, -0.01)
    if pattern == "rising":  # 3 to 6 tokens above 0, then a decay, at other tokens for every slot
        token = torch.arange(shape[1]).view(-1, *[1] * len(shape[2:]))
        first, length = (
            torch.randint(*bounds, shape[2:], generator=generator) for bounds in ((0, 16), (3, 7))
        )
        return torch.where((token + first) % 16 < length, 0.3, -3.0).repeat(shape[0], *[1] * len(shape[1:]))
    return -20 * torch.rand(shape, generator=generator)


def initial_state(inputs):
    """The operator's state with these fields, None without fields; the position in the chunk varies."""
    if not inputs.state:
        return None
    if inputs.op == "delta_product":
        s, position = inputs.state["s"], None
        if inputs.options.get("between_chunks"):
            position = torch.arange(3, 3 + 5 * len(s), 5, device=s.device) % inputs.options["chunk"]
        return ops.DeltaProductState(s, position)
    return (ops.GSAState if inputs.op == "gsa" else ops.GLAState)(**inputs.state)


def run(inputs, source=ops, cu_seqlens=None):
    """o, the final state's tensors and the gradients of all inputs, by name. `source`: the module of the
    operator."""
    inputs = inputs.map(lambda x: x.detach())
    leaves = inputs.data | {f"state_{name}": x for name, x in inputs.state.items()}
    for x in leaves.values():
        x.requires_grad_()
    call = getattr(source, inputs.op)
    o, state = call(**inputs.data, **inputs.options, state=initial_state(inputs), cu_seqlens=cu_seqlens)
    outs = {"o": o} | {name: x for name, x in zip(state._fields, state, strict=True) if x is not None}
    output_grads = [(outs[name], grad) for name, grad in inputs.grads.items() if outs[name].requires_grad]
    found = torch.autograd.grad(
        [out for out, _ in output_grads],
        list(leaves.values()),
        [grad for _, grad in output_grads],
        allow_unused=True,
        materialize_grads=True,
    )
    named = {f"d{name}": x for name, x in zip(leaves, found, strict=True)}
    return {name: x.detach() for name, x in outs.items()} | named


def run_formula(run, inputs, **options):
    """`run` with the formula in PyTorch, for each chunk length."""
    return [run(inputs, rounded_formula.in_chunks(chunk), **options) for chunk in rounded_formula.CHUNKS]


def assert_accurate(found, exact, rounded, terms):
    """The error against float64, as a maximum and as a root mean square, is at most twice the error of the
    formula in PyTorch at the same dtype (`rounded`, one result per chunk length), plus one rounding of the
    result. An fp32 sum of n terms errs by about sqrt(n) roundings, which depend on its order; where terms of
    size 1 cancel, n roundings of 1 may be left."""
    assert all(found.keys() == exact.keys() == near.keys() for near in rounded)
    cancellation = torch.finfo(torch.float32).eps * terms
    for name, want in exact.items():
        got = found[name]
        if not got.is_floating_point():
            assert torch.equal(got, want) and all(torch.equal(got, near[name]) for near in rounded), name
            continue
        assert got.dtype == rounded[0][name].dtype and got.shape == want.shape, name
        if not want.numel():
            continue
        rounding = max(torch.finfo(got.dtype).eps, torch.finfo(torch.float32).eps * terms**0.5)
        for measure in (lambda x: x.abs().max(), lambda x: x.square().mean().sqrt()):
            error = measure(got.double() - want).item()
            formula_error = max(measure(near[name].double() - want).item() for near in rounded)
            allowed = 2 * formula_error + rounding * measure(want).item() + cancellation
            assert error <= allowed, f"{name}: off by {error:.3g}, the formula by {formula_error:.3g}"


def assert_accurate_as_formula(inputs, cu_seqlens=None, found=None):
    """Checks `run` on these inputs, or `found`, its result on the same values in another layout."""
    inputs = inputs.map(lambda x: x.to(DEVICE))
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(DEVICE)
    found = run(inputs, cu_seqlens=cu_seqlens) if found is None else found
    exact = run(inputs.map(torch.Tensor.double), cu_seqlens=cu_seqlens)
    rounded = run_formula(run, inputs, cu_seqlens=cu_seqlens)
    _, T, _, D = inputs.data["q"].shape
    assert_accurate(found, exact, rounded, T + D)


def run_in_segments(inputs, length):
    """As `run`, but segment by segment, each from the state that the previous segment returned."""
    inputs = inputs.map(lambda x: x.detach().requires_grad_())
    state, outputs = initial_state(inputs), []
    T, n = inputs.data["q"].shape[1], inputs.options.get("n", 1)
    for a in range(0, T, length):
        rows = {name: n if x.shape[1] == T * n else 1 for name, x in inputs.data.items()}
        part = {name: x[:, a * rows[name] : (a + length) * rows[name]] for name, x in inputs.data.items()}
        o, state = getattr(ops, inputs.op)(**part, **inputs.options, state=state)
        outputs.append(o)
    outs = {"o": torch.cat(outputs, 1)} | {m: x for m, x in state._asdict().items() if x is not None}
    leaves = inputs.data | {f"state_{name}": x for name, x in inputs.state.items()}
    found = torch.autograd.grad(
        [outs[name] for name in inputs.grads], list(leaves.values()), list(inputs.grads.values())
    )
    named = {f"d{name}": x for name, x in zip(leaves, found, strict=True)}
    return {name: x.detach() for name, x in outs.items()} | named
