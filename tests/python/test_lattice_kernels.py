"""The kernels of lattice at their edges."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from chunk_accuracy import (
    assert_as_right,
    assert_as_right_as_the_formula,
    by_formula,
    mean_square,
    start_of,
)
from girih import ops
from graphs import capture
from kernel_accuracy import DEVICE, DTYPES, LAYOUTS, LENGTHS, Inputs, gates, in_pieces, run
from padding import Padded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HALVES = DTYPES[1:]
OBJECTIVES = ["decode", "encode", "similarity"]


def draw(
    *,
    B=2,
    T=70,
    H=32,
    G=1,
    D=64,
    M=64,
    dtype=torch.bfloat16,
    gate_dtype=torch.float32,
    pattern="mild",
    resumed=True,
    sequences=None,
    chunk=16,
    seed=0,
    **options,
):
    """On the CPU. G queries a memory; a state in mid-chunk for each of B, or of `sequences` packed ones. Keys
    and values of unit length: the step sizes of a chunk stay below 1."""
    generator = torch.Generator().manual_seed(seed)
    N = B if sequences is None else sequences

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    def unit(*shape, dim=-1):
        return F.normalize(torch.randn(shape, generator=generator), dim=dim)

    data = {"q": normal(B, T, H * G, M), "k": unit(B, T, H, M).to(dtype), "v": unit(B, T, H, D).to(dtype)}
    data["gamma"] = (torch.rand(B, T, H, generator=generator) / chunk).to(gate_dtype)
    if pattern:
        data["g"] = gates(pattern, (B, T, H), generator).to(gate_dtype)
    first = unit(N, H, D, M, dim=-2)
    state = {"first": first}
    of_outputs = {"first": normal(N, H, D, M, dtype=torch.float32)}
    of_outputs["step"] = normal(N, H, D, M, dtype=torch.float32)
    if pattern:
        of_outputs["decay"] = normal(N, H, dtype=torch.float32)
    if resumed:
        step = 0.1 * normal(N, H, D, M, dtype=torch.float32)
        state["step"] = (step - first * (first * step).sum(-2, keepdim=True)) * (chunk > 1)
        if pattern:
            state["decay"] = -torch.rand(N, H, generator=generator) * (chunk > 1)
    grads = {"o": normal(B, T, H * G, D)} | of_outputs
    return Inputs("lattice", data, state, grads, {"chunk": chunk} | options)


def test_which_path_a_call_takes():
    def path(**how):
        inputs = draw(resumed=False, **how)
        state = inputs.state["first"]
        return ops.explain("lattice", **inputs.data, **inputs.options, state=state, device="cuda").path

    assert path() == path(chunk=8, D=128, M=20) == path(dtype=torch.float16, chunk=64) == "tensor cores"
    assert path(chunk=7) == path(M=129) == path(D=136) == path(dtype=torch.float32) == "aten"
    assert path(chunk=1, normalize=False) == path(chunk=1, shrinkage=0.1) == "aten"


@pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("T", LENGTHS)
def test_every_length(T, dtype, resumed):
    assert_as_right_as_the_formula(draw(B=3, T=T, dtype=dtype, resumed=resumed))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("chunk", [8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64])
def test_every_chunk(chunk, objective):
    for dtype in HALVES:
        assert_as_right_as_the_formula(draw(T=150, chunk=chunk, dtype=dtype, objective=objective))


@pytest.mark.parametrize("chunk", [2, 7])
def test_chunks_too_short_for_the_kernels(chunk):
    assert_as_right_as_the_formula(draw(T=20, chunk=chunk))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("D, M", [(8, 64), (20, 72), (72, 20), (128, 64), (64, 128), (128, 128), (4, 3)])
def test_every_width(D, M, chunk, objective):
    for dtype in HALVES:
        assert_as_right_as_the_formula(draw(B=1, D=D, M=M, dtype=dtype, chunk=chunk, objective=objective))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("chunk", [16, 40])
@pytest.mark.parametrize("pattern", [None, "open", "closed", "mixed", "sudden", "uniform"])
def test_gates_from_0_to_minus_20(pattern, chunk, objective):
    inputs = draw(T=130, pattern=pattern, chunk=chunk, objective=objective)
    if pattern in (None, "open"):
        assert_as_right_as_the_formula(inputs)
        return
    # Of a memory that gates have emptied unit() divides by next to nothing: finite, and of bounded reads.
    inputs = inputs.map(lambda x: x.to(DEVICE))
    found = run(inputs)
    assert all(x.isfinite().all() for x in found.values())
    bound = inputs.data["q"].float().abs().sum(-1, keepdim=True).amax(1, keepdim=True)
    assert (found["o"].float().abs() <= 1.1 * bound).all()


@pytest.mark.parametrize("gate_dtype", [*DTYPES, torch.float64], ids=str)
def test_gates_of_any_dtype(gate_dtype):
    assert_as_right_as_the_formula(draw(gate_dtype=gate_dtype))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("G", [2, 3])
def test_grouped_queries(G, objective):
    assert_as_right_as_the_formula(draw(G=G, objective=objective))


@pytest.mark.parametrize("absent", ["do", "states", "all but one"])
def test_absent_gradients(absent):
    inputs = draw()
    kept = {"do": ["first", "step", "decay"], "states": ["o"], "all but one": ["step"]}[absent]
    grads = {name: grad for name, grad in inputs.grads.items() if name in kept}
    assert_as_right_as_the_formula(replace(inputs, grads=grads))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout):
    inputs = draw(B=3, T=67, D=24, M=17)
    pad = Padded(*LAYOUTS[layout], device=DEVICE)
    assert_as_right_as_the_formula(inputs, found=run(inputs.map(pad)))
    pad.assert_untouched()


@pytest.mark.parametrize("chunk", [16, 64])
def test_padding_at_full_tiles(chunk):
    inputs = draw(T=128, chunk=chunk)
    pad = Padded(*LAYOUTS["dense"], device=DEVICE)
    assert_as_right_as_the_formula(inputs, found=run(inputs.map(pad)))
    pad.assert_untouched()


@pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])
@pytest.mark.parametrize("chunk", [16, 33])
@pytest.mark.parametrize(
    "bounds", [[0, 150], [0, 0, 64, 64, 128, 150, 150], [0, 1, 2, 65, 129, 150], [9, 70, 140]], ids=str
)
def test_packed_sequences(bounds, chunk, resumed):
    inputs = draw(B=1, T=150, chunk=chunk, resumed=resumed, sequences=len(bounds) - 1)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32 if len(bounds) % 2 else torch.int64)
    pad = Padded(*LAYOUTS["aligned"], device=DEVICE)
    found = run(inputs.map(pad), cu_seqlens=cu_seqlens.to(DEVICE))
    assert_as_right_as_the_formula(inputs, cu_seqlens, found)
    pad.assert_untouched()


@pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])
@pytest.mark.parametrize(
    "bounds", [[0, 99, -5, 20], [40, 30, 20, 10], [-7, -2, 1, 2**31 - 1], [7, 7, 7, 7]], ids=str
)
def test_bounds_that_make_no_sense_reach_nothing_outside(bounds, resumed):
    inputs = draw(B=1, T=40, sequences=3, resumed=resumed)
    pad = Padded(*LAYOUTS["aligned"], device=DEVICE)
    found = run(inputs.map(pad), cu_seqlens=torch.tensor(bounds, device=DEVICE))
    assert not any(x.isnan().any() for x in found.values() if x.is_floating_point())
    pad.assert_untouched()


def test_bounds_of_rows():
    """`cu_seqlens [B, 2]`: a row's tokens between its bounds give what they give alone, others nothing."""
    inputs = draw(B=3, T=150, resumed=False).map(lambda x: x.to(DEVICE))
    bounds = [(0, 150), (20, 97), (60, 60)]
    of_tokens = {"o"} | {f"d{name}" for name in inputs.data}
    found = run(inputs, cu_seqlens=torch.tensor(bounds, device=DEVICE))
    for row, (low, high) in enumerate(bounds):
        alone = run(inputs.map(lambda x, row=row: x[row : row + 1]).rows(slice(low, high)))
        for name, x in alone.items():
            mine = found[name][row : row + 1]
            if name in of_tokens:
                assert not mine[:, :low].any() and not mine[:, high:].any(), name
                mine = mine[:, low:high]
            assert mine.equal(x), name


def test_nothing_is_left_unwritten():
    """With every new tensor full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for T, M in ((0, 8), (1, 8), (65, 20), (130, 64)):
            found = run(draw(T=T, D=M, M=M).map(lambda x: x.to(DEVICE)))
            assert all(x.isfinite().all() for x in found.values())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("packed", [False, True])
def test_a_hundred_runs_have_the_same_bits(packed):
    B, sequences = (1, 4) if packed else (2, None)
    inputs = draw(B=B, T=330, sequences=sequences).map(lambda x: x.to(DEVICE))
    cu_seqlens = torch.tensor([0, 3, 200, 201, 330], device=DEVICE) if packed else None
    first = run(inputs, cu_seqlens=cu_seqlens)
    for _ in range(100):
        found = run(inputs, cu_seqlens=cu_seqlens)
        assert all(torch.equal(found[name], first[name]) for name in first)


def test_backward_twice():
    """What forward keeps is not used up."""
    inputs = draw().map(lambda x: x.to(DEVICE).requires_grad_())
    o, _ = ops.lattice(**inputs.data, **inputs.options, state=start_of(inputs))
    leaves = [*inputs.data.values(), *inputs.state.values()]
    first, second = (
        torch.autograd.grad(o, leaves, inputs.grads["o"].detach(), retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_long_sequences_in_one_call_and_in_pieces():
    inputs = draw(B=1, T=2048, resumed=False).map(lambda x: x.to(DEVICE))
    exact, rounded = run(inputs.map(torch.Tensor.double)), by_formula(inputs)
    assert_as_right(run(inputs), exact, rounded, 2048, [mean_square])
    assert_as_right(in_pieces(inputs, 777), exact, rounded, 2048, [mean_square])


@torch.no_grad()
def test_columns_stay_of_unit_length():
    inputs = draw(B=1, H=1, T=65536, resumed=False, pattern=None).map(lambda x: x.to(DEVICE))
    _, state = ops.lattice(**inputs.data, **inputs.options, state=inputs.state["first"])
    assert (state.first.norm(dim=-2) - 1).abs().max() < 1e-3


def stepped(inputs, T):
    """Token by token from a state, which is written in place: o and the state."""
    state = start_of(inputs.map(torch.Tensor.clone))
    rows = []
    for t in range(T):
        token = {name: x[:, t : t + 1] for name, x in inputs.data.items()}
        rows.append(ops.lattice_step(**token, **inputs.options, state=state))
    return {"o": torch.cat(rows, 1)} | {name: x for name, x in state._asdict().items() if x is not None}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("pattern", [None, "mild"])
@pytest.mark.parametrize("objective", OBJECTIVES)
@torch.no_grad()
def test_steps_are_the_sequence(objective, pattern, G, dtype):
    for D, M, chunk in ((64, 64, 16), (30, 17, 1), (136, 150, 3)):
        inputs = draw(T=20, D=D, M=M, G=G, chunk=chunk, pattern=pattern, objective=objective, dtype=dtype)
        inputs = inputs.map(lambda x: x.to(DEVICE))
        found = stepped(inputs, 20)
        exact = inputs.map(torch.Tensor.double)
        o, state = ops.lattice(**exact.data, **inputs.options, state=start_of(exact))
        want = {"o": o} | {name: x for name, x in state._asdict().items() if x is not None}
        assert found.keys() == want.keys()
        for name, x in want.items():
            close = max(4 * torch.finfo(dtype).eps, 1e-4) if name == "o" else 1e-4
            if name == "position":
                assert torch.equal(found[name], x)
            else:
                scale = max(1, x.abs().max())
                torch.testing.assert_close(found[name].double(), x, rtol=close, atol=close * scale)


@torch.no_grad()
def test_a_step_in_a_graph():
    inputs = draw(T=1).map(lambda x: x.to(DEVICE))
    state, again = (start_of(inputs.map(torch.Tensor.clone)) for _ in range(2))
    graph, o = capture(lambda: ops.lattice_step(**inputs.data, **inputs.options, state=state))
    for x, first in zip(state, start_of(inputs), strict=True):
        x.copy_(first)
    for _ in range(40):
        graph.replay()
        want = ops.lattice_step(**inputs.data, **inputs.options, state=again)
        assert torch.equal(o, want)
        assert all(torch.equal(a, b) for a, b in zip(state, again, strict=True))
