"""Edge cases of the kernels of lattice."""

from dataclasses import replace
from types import SimpleNamespace

import kernel_accuracy
import pytest
import recurrences
import rounded_chunks
import torch
import torch.nn.functional as F
from chunk_accuracy import (
    SANITIZED,
    assert_accurate,
    assert_accurate_as_formula,
    initial_state,
    mean_square,
    run_formula,
)
from draws import STRUCTURES
from girih import ops
from girih.ops import LatticeState
from graphs import capture
from kernel_accuracy import DEVICE, DTYPES, LAYOUTS, LENGTHS, Inputs, gates, run, run_in_segments
from long_sequences import assert_same_at_the_end
from padding import Padded
from rounded_chunks import on_sphere
from rounded_formula import map_sequences

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HALVES = DTYPES[1:]
OBJECTIVES = ["decode", "encode", "similarity"]
# Calls that begin at the start of a chunk have kernels of their own.
start_and_resumed = pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])


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
    """Inputs on the CPU. G queries per memory; a state in mid-chunk for each of B rows, or for each of
    `sequences` packed sequences. Keys and values have unit length, and the step sizes of a chunk sum to less
    than 1."""
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
    state_grads = {"first": normal(N, H, D, M, dtype=torch.float32)}
    state_grads["step"] = normal(N, H, D, M, dtype=torch.float32)
    if pattern:
        state_grads["decay"] = normal(N, H, dtype=torch.float32)
    if resumed:
        step = 0.1 * normal(N, H, D, M, dtype=torch.float32)
        state["step"] = (step - first * (first * step).sum(-2, keepdim=True)) * (chunk > 1)
        if pattern:
            state["decay"] = -torch.rand(N, H, generator=generator) * (chunk > 1)
    grads = {"o": normal(B, T, H * G, D)} | state_grads
    return Inputs("lattice", data, state, grads, {"chunk": chunk} | options)


def test_selected_path():
    def path(**how):
        inputs = draw(resumed=False, **how)
        state = inputs.state["first"].to(torch.promote_types(torch.float32, inputs.data["q"].dtype))
        return ops.explain("lattice", **inputs.data, **inputs.options, state=state, device="cuda").path

    assert path() == path(chunk=8, D=128, M=20) == path(dtype=torch.float16, chunk=64) == "tensor cores"
    assert path(chunk=7) == path(dtype=torch.float32) == "fp32"
    assert path(chunk=1, normalize=False) == path(chunk=1, shrinkage=0.1) == "fp32"
    assert path(M=129) == path(D=136, dtype=torch.float32) == path(dtype=torch.float64) == "aten"


@start_and_resumed
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("T", LENGTHS)
def test_every_length(T, dtype, resumed):
    assert_accurate_as_formula(draw(B=3, T=T, dtype=dtype, resumed=resumed))


@start_and_resumed
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("chunk", [8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64])
def test_every_chunk(chunk, objective, resumed):
    for dtype in HALVES:
        assert_accurate_as_formula(
            draw(T=150, chunk=chunk, dtype=dtype, objective=objective, resumed=resumed)
        )


@start_and_resumed
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("D, M", [(8, 64), (20, 72), (72, 20), (128, 64), (64, 128), (128, 128), (4, 3)])
def test_every_width(D, M, chunk, objective, resumed):
    B = 8 if D * M < 100 else 1  # a mean square of few numbers is random
    for dtype in HALVES:
        assert_accurate_as_formula(
            draw(B=B, D=D, M=M, dtype=dtype, chunk=chunk, objective=objective, resumed=resumed)
        )


@start_and_resumed
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("chunk", [16, 40])
@pytest.mark.parametrize("pattern", [None, "open", "closed", "mixed", "sudden", "uniform"])
def test_gates_from_0_to_minus_20(pattern, chunk, objective, resumed):
    inputs = draw(T=130, pattern=pattern, chunk=chunk, objective=objective, resumed=resumed)
    if pattern in (None, "open"):
        assert_accurate_as_formula(inputs)
        return
    # unit() divides by almost nothing for a memory that gates emptied: results are finite, and reads bounded.
    inputs = inputs.map(lambda x: x.to(DEVICE))
    found = run(inputs)
    assert all(x.isfinite().all() for x in found.values())
    bound = inputs.data["q"].float().abs().sum(-1, keepdim=True).amax(1, keepdim=True)
    assert (found["o"].float().abs() <= 1.1 * bound).all()


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("chunk", [16, 40])
def test_repeated_tokens(chunk, structure, objective):
    inputs = draw(chunk=chunk, objective=objective)
    for name in ("k", "v"):
        inputs.data[name] = STRUCTURES[structure](inputs.data[name]).contiguous()
    assert_accurate_as_formula(inputs)


@pytest.mark.parametrize("gate_dtype", [*DTYPES, torch.float64], ids=str)
def test_gates_of_any_dtype(gate_dtype):
    assert_accurate_as_formula(draw(gate_dtype=gate_dtype))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("G", [2, 3])
def test_grouped_queries(G, objective):
    assert_accurate_as_formula(draw(G=G, objective=objective))


@start_and_resumed
@pytest.mark.parametrize("absent", ["do", "states", "all but one"])
def test_absent_gradients(absent, resumed):
    inputs = draw(resumed=resumed)
    grad_names = {"do": ["first", "step", "decay"], "states": ["o"], "all but one": ["step"]}[absent]
    grads = {name: grad for name, grad in inputs.grads.items() if name in grad_names}
    assert_accurate_as_formula(replace(inputs, grads=grads))


@start_and_resumed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, resumed):
    inputs = draw(B=3, T=67, D=24, M=17, resumed=resumed)
    pad = Padded(*LAYOUTS[layout], device=DEVICE)
    assert_accurate_as_formula(inputs, found=run(inputs.map(pad)))
    pad.assert_untouched()


@start_and_resumed
@pytest.mark.parametrize("chunk", [16, 64])
def test_padding_at_full_tiles(chunk, resumed):
    inputs = draw(T=128, chunk=chunk, resumed=resumed)
    pad = Padded(*LAYOUTS["dense"], device=DEVICE)
    assert_accurate_as_formula(inputs, found=run(inputs.map(pad)))
    pad.assert_untouched()


@start_and_resumed
@pytest.mark.parametrize("chunk", [16, 33])
@pytest.mark.parametrize(
    "bounds", [[0, 150], [0, 0, 64, 64, 128, 150, 150], [0, 1, 2, 65, 129, 150], [9, 70, 140]], ids=str
)
def test_packed_sequences(bounds, chunk, resumed):
    inputs = draw(B=1, T=150, chunk=chunk, resumed=resumed, sequences=len(bounds) - 1)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32 if len(bounds) % 2 else torch.int64)
    pad = Padded(*LAYOUTS["aligned"], device=DEVICE)
    found = run(inputs.map(pad), cu_seqlens=cu_seqlens.to(DEVICE))
    assert_accurate_as_formula(inputs, cu_seqlens, found)
    pad.assert_untouched()


@start_and_resumed
@pytest.mark.parametrize(
    "bounds", [[0, 99, -5, 20], [40, 30, 20, 10], [-7, -2, 1, 2**31 - 1], [7, 7, 7, 7]], ids=str
)
@pytest.mark.parametrize("chunk", [16, 7])
def test_invalid_bounds_access_no_memory_outside(bounds, chunk, resumed):
    inputs = draw(B=1, T=40, sequences=3, chunk=chunk, resumed=resumed)
    pad = Padded(*LAYOUTS["aligned"], device=DEVICE)
    found = run(inputs.map(pad), cu_seqlens=torch.tensor(bounds, device=DEVICE))
    assert not any(x.isnan().any() for x in found.values() if x.is_floating_point())
    pad.assert_untouched()


@pytest.mark.parametrize("chunk", [16, 7])
def test_bounds_of_rows(chunk):
    """`cu_seqlens [B, 2]`: a row's tokens between its bounds give the same bits alone; other tokens give
    zeros."""
    inputs = draw(B=3, T=150, chunk=chunk, resumed=False).map(lambda x: x.to(DEVICE))
    bounds = [(0, 150), (20, 97), (60, 60)]
    token_results = {"o"} | {f"d{name}" for name in inputs.data}
    found = run(inputs, cu_seqlens=torch.tensor(bounds, device=DEVICE))
    for row, (low, high) in enumerate(bounds):
        alone = run(inputs.map(lambda x, row=row: x[row : row + 1]).slice_tokens(slice(low, high)))
        for name, x in alone.items():
            row_result = found[name][row : row + 1]
            if name in token_results:
                assert not row_result[:, :low].any() and not row_result[:, high:].any(), name
                row_result = row_result[:, low:high]
            assert row_result.equal(x), name


@start_and_resumed
@pytest.mark.parametrize("chunk", [16, 7])
def test_every_output_is_written(chunk, resumed):
    """New tensors are filled with NaN, and all results are finite."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for T, M in ((0, 8), (1, 8), (65, 20), (130, 64)):
            found = run(draw(T=T, D=M, M=M, chunk=chunk, resumed=resumed).map(lambda x: x.to(DEVICE)))
            assert all(x.isfinite().all() for x in found.values())
    finally:
        torch.use_deterministic_algorithms(False)


@start_and_resumed
@pytest.mark.parametrize("packed", [False, True])
def test_a_hundred_runs_have_the_same_bits(packed, resumed):
    B, sequences = (1, 4) if packed else (2, None)
    inputs = draw(B=B, T=330, sequences=sequences, resumed=resumed).map(lambda x: x.to(DEVICE))
    cu_seqlens = torch.tensor([0, 3, 200, 201, 330], device=DEVICE) if packed else None
    first = run(inputs, cu_seqlens=cu_seqlens)
    for _ in range(100):
        found = run(inputs, cu_seqlens=cu_seqlens)
        assert all(torch.equal(found[name], first[name]) for name in first)


def test_backward_twice():
    """backward does not modify the saved tensors."""
    inputs = draw().map(lambda x: x.to(DEVICE).requires_grad_())
    o, _ = ops.lattice(**inputs.data, **inputs.options, state=initial_state(inputs))
    leaves = [*inputs.data.values(), *inputs.state.values()]
    first, second = (
        torch.autograd.grad(o, leaves, inputs.grads["o"].detach(), retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_long_sequences_in_one_call_and_in_pieces():
    inputs = draw(B=1, T=2048, resumed=False).map(lambda x: x.to(DEVICE))
    exact, rounded = run(inputs.map(torch.Tensor.double)), run_formula(inputs)
    assert_accurate(run(inputs), exact, rounded, 2048, [mean_square])
    assert_accurate(run_in_segments(inputs, 777), exact, rounded, 2048, [mean_square])


@torch.no_grad()
def test_columns_stay_of_unit_length():
    inputs = draw(B=1, H=1, T=65536, resumed=False, pattern=None).map(lambda x: x.to(DEVICE))
    _, state = ops.lattice(**inputs.data, **inputs.options, state=inputs.state["first"])
    assert (state.first.norm(dim=-2) - 1).abs().max() < 1e-3


@pytest.mark.large
def test_more_than_2_31_elements():
    """Outputs and gradients have more than 2^31 elements too."""
    end = draw(B=1, T=100, H=32, pattern=None, resumed=False)
    assert_same_at_the_end(end.map(torch.Tensor.cuda), 2**20 + 100 - 64, 110)


def run_steps(inputs, T):
    """Steps token by token with a state that is written in place: o and the state."""
    state = initial_state(inputs.map(torch.Tensor.clone))
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
def test_steps_equal_the_sequence(objective, pattern, G, dtype):
    for D, M, chunk in ((64, 64, 16), (30, 17, 1), (136, 150, 3)):
        inputs = draw(T=20, D=D, M=M, G=G, chunk=chunk, pattern=pattern, objective=objective, dtype=dtype)
        inputs = inputs.map(lambda x: x.to(DEVICE))
        found = run_steps(inputs, 20)
        exact = inputs.map(torch.Tensor.double)
        o, state = ops.lattice(**exact.data, **inputs.options, state=initial_state(exact))
        want = {"o": o} | {name: x for name, x in state._asdict().items() if x is not None}
        assert found.keys() == want.keys()
        for name, x in want.items():
            close = max(4 * torch.finfo(dtype).eps, 1e-4) if name == "o" else 1e-4
            if name == "position":
                assert torch.equal(found[name], x)
            else:
                scale = max(1, x.abs().max())
                torch.testing.assert_close(found[name].double(), x, rtol=close, atol=close * scale)


def run_recurrence(q, k, v, gamma, g=None, *, chunk, state, cu_seqlens=None, **options):
    """The recurrence, in fp32 for 16-bit inputs. Calls that start in mid-chunk use the chunk form, because
    the earlier steps stay tangent to the first memory when that memory is perturbed."""
    options |= {"chunk": chunk}
    if cu_seqlens is not None:
        if not isinstance(state, tuple):
            zeros = torch.zeros_like(state)
            decay = None if g is None else zeros[..., 0, 0]
            state = LatticeState(
                state, zeros, decay, torch.zeros(len(state), dtype=torch.int64, device=q.device)
            )
        return map_sequences(run_recurrence, q, k, v, gamma, g, state=state, cu_seqlens=cu_seqlens, **options)
    first = state[0] if isinstance(state, tuple) else state
    data = [None if x is None else x.to(first.dtype) for x in (q, k, v, gamma, g)]
    if isinstance(state, LatticeState) and chunk > 1:
        o, state = rounded_chunks.lattice(*data, state=state, **options)
    else:
        first = on_sphere(first) if options.get("normalize", True) else first
        o, state = recurrences.lattice(*data, state=first, **options)
    return o.to(q.dtype), LatticeState(*state)


RECURRENCE = SimpleNamespace(lattice=run_recurrence)


def draw_fp32(*, T=40, H=3, D=24, M=20, dtype=torch.float32, chunk=1, resumed=False, **how):
    return draw(T=T, H=H, D=D, M=M, dtype=dtype, chunk=chunk, resumed=resumed and chunk > 1, **how)


def perturb_by_rounding(x, seed):
    generator = torch.Generator().manual_seed(seed)
    moves = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.device)
    return x.double() * (1 + torch.finfo(x.dtype).eps * (moves - 0.5))


def assert_fp32_accurate(inputs, cu_seqlens=None, found=None):
    """The errors of the fp32 kernels are at most twice the errors of the recurrence and of the CPU's chunk
    form in fp32. Shrinkage nearly empties columns, and gradients divide by the lengths of columns: there the
    reference also includes errors of float64 on inputs perturbed by a rounding."""
    inputs = inputs.map(lambda x: x.to(DEVICE))
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(DEVICE)
    call = inputs.data | inputs.options | {"state": initial_state(inputs), "cu_seqlens": cu_seqlens}
    assert ops.explain("lattice", **call).path == "fp32"
    found = run(inputs, cu_seqlens=cu_seqlens) if found is None else found
    if SANITIZED:
        return
    exact = run(inputs.map(torch.Tensor.double), RECURRENCE, cu_seqlens)
    on_cpu = inputs.map(torch.Tensor.cpu), ops, None if cu_seqlens is None else cu_seqlens.cpu()
    chunk_form = {name: x.to(DEVICE) for name, x in run(*on_cpu).items()}
    rounded = [run(inputs, RECURRENCE, cu_seqlens), chunk_form]
    for seed in range(3 if inputs.options.get("shrinkage") else 0):
        near = run(inputs.map(lambda x, seed=seed: perturb_by_rounding(x, seed)), RECURRENCE, cu_seqlens)
        rounded.append({name: x.to(found[name].dtype) for name, x in near.items()})
    D, M = inputs.state["first"].shape[-2:]
    kernel_accuracy.assert_accurate(found, exact, rounded, inputs.data["q"].shape[1] + D + M)


FP32_CHUNKS = [1, 2, 7, 16, 40]


@start_and_resumed
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("pattern", [None, "mild"])
@pytest.mark.parametrize("chunk", FP32_CHUNKS)
def test_fp32_chunks(chunk, pattern, objective, resumed):
    for dtype in DTYPES if chunk < 8 else DTYPES[:1]:
        how = {"chunk": chunk, "pattern": pattern, "objective": objective, "dtype": dtype}
        assert_fp32_accurate(draw_fp32(resumed=resumed, **how))


@pytest.mark.parametrize("T", [0, 1, 7, 8, 9, 63, 64, 65, 129])
@pytest.mark.parametrize("chunk", [1, 7])
def test_fp32_lengths(T, chunk):
    assert_fp32_accurate(draw_fp32(T=T, chunk=chunk, resumed=True))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("D, M", [(1, 64), (3, 1), (64, 64), (100, 64), (64, 100), (128, 128)])
@pytest.mark.parametrize("chunk", [1, 3])
def test_fp32_widths(D, M, chunk, objective):
    # At D = 1 a step is parallel to its column, and its gradient has no meaning.
    assert_fp32_accurate(draw_fp32(T=20, D=D, M=M, chunk=chunk, objective=objective, resumed=D > 1))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("pattern", [None, "mild"])
@pytest.mark.parametrize(
    "normalize, shrinkage",
    [(False, 0.0), (True, 0.3), (True, 0.05), (False, 0.05), (True, 1e4), (False, 1e4)],
)
def test_free_norms_and_shrinkage(normalize, shrinkage, pattern, objective):
    options = {"normalize": normalize, "shrinkage": shrinkage}
    assert_fp32_accurate(draw_fp32(pattern=pattern, objective=objective, **options))


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("G", [2, 8])
def test_fp32_grouped_queries(G, chunk):
    assert_fp32_accurate(draw_fp32(G=G, chunk=chunk, resumed=True))


@pytest.mark.parametrize("gate_dtype", [*DTYPES, torch.float64], ids=str)
def test_fp32_gates_of_any_dtype(gate_dtype):
    assert_fp32_accurate(draw_fp32(gate_dtype=gate_dtype))


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp32_layouts(layout, chunk):
    inputs = draw_fp32(B=3, D=24, M=17, chunk=chunk, resumed=True)
    pad = Padded(*LAYOUTS[layout], device=DEVICE)
    assert_fp32_accurate(inputs, found=run(inputs.map(pad)))
    pad.assert_untouched()


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("bounds", [[0, 0, 64, 64, 70, 90, 90], [0, 1, 2, 65, 70, 90], [9, 40, 80]], ids=str)
def test_fp32_packed_sequences(bounds, chunk):
    inputs = draw_fp32(B=1, T=90, chunk=chunk, resumed=True, sequences=len(bounds) - 1)
    cu_seqlens = torch.tensor(bounds)
    pad = Padded(*LAYOUTS["aligned"], device=DEVICE)
    assert_fp32_accurate(inputs, cu_seqlens, run(inputs.map(pad), cu_seqlens=cu_seqlens.to(DEVICE)))
    pad.assert_untouched()


@pytest.mark.parametrize("absent", ["do", "states", "all but one"])
def test_fp32_absent_gradients(absent):
    inputs = draw_fp32(chunk=7, resumed=True)
    grad_names = {"do": ["first", "step", "decay"], "states": ["o"], "all but one": ["step"]}[absent]
    assert_fp32_accurate(replace(inputs, grads={name: inputs.grads[name] for name in grad_names}))


@pytest.mark.parametrize("chunk", [1, 7])
def test_fp32_runs_have_the_same_bits(chunk):
    inputs = draw_fp32(T=200, D=64, M=64, chunk=chunk, resumed=True).map(lambda x: x.to(DEVICE))
    first = run(inputs)
    for _ in range(20):
        found = run(inputs)
        assert all(torch.equal(found[name], first[name]) for name in first)


@pytest.mark.parametrize("chunk", [1, 5])
def test_more_sequences_than_blocks(chunk):
    """The blocks of the backward kernels loop over sequences."""
    inputs = draw_fp32(B=40, T=9, H=16, D=8, M=8, chunk=chunk, resumed=True)
    assert_fp32_accurate(inputs)


@torch.no_grad()
def test_fp32_columns_stay_of_unit_length():
    inputs = draw_fp32(B=1, H=1, T=65536, D=64, M=64, pattern=None).map(lambda x: x.to(DEVICE))
    _, state = ops.lattice(**inputs.data, **inputs.options, state=inputs.state["first"])
    assert (state.first.norm(dim=-2) - 1).abs().max() < 1e-5


def test_fp32_memory_of_training():
    """Memories are saved every 64 tokens, not for every token."""
    inputs = draw_fp32(B=4, T=4096, H=16, D=64, M=64, dtype=torch.bfloat16)
    leaves = inputs.map(lambda x: x.to(DEVICE)).map(torch.Tensor.requires_grad_)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, _ = ops.lattice(**leaves.data, **inputs.options, state=leaves.state["first"])
    o.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**30


@torch.no_grad()
def test_a_step_in_a_graph():
    inputs = draw(T=1).map(lambda x: x.to(DEVICE))
    state, again = (initial_state(inputs.map(torch.Tensor.clone)) for _ in range(2))
    graph, o = capture(lambda: ops.lattice_step(**inputs.data, **inputs.options, state=state))
    for x, first in zip(state, initial_state(inputs), strict=True):
        x.copy_(first)
    for _ in range(40):
        graph.replay()
        want = ops.lattice_step(**inputs.data, **inputs.options, state=again)
        assert torch.equal(o, want)
        assert all(torch.equal(a, b) for a, b in zip(state, again, strict=True))
