"""Edge cases of the kernels of trellis."""

import collections
import statistics
from dataclasses import replace

import pytest
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
from girih import ops
from graphs import capture
from kernel_accuracy import DEVICE, DTYPES, LAYOUTS, LENGTHS, Inputs, gates, run, run_in_segments
from long_sequences import assert_same_at_the_end
from padding import Padded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HALVES = DTYPES[1:]
MAPS = ["identity", "silu", "l2norm", "layer_norm", "l2_silu", "ln_silu", "softmax"]


def draw(
    *,
    B=2,
    T=70,
    H=16,
    G=1,
    D=64,
    V=64,
    M=64,
    dtype=torch.bfloat16,
    gate_dtype=torch.float32,
    pattern="mild",
    resumed=True,
    sequences=None,
    chunk=16,
    steps=4,
    seed=0,
    **options,
):
    """Inputs on the CPU. G queries per memory; a state in mid-chunk for each of B rows, or for each of
    `sequences` packed sequences. Step sizes are below 1 / chunk and below 1 / `steps`."""
    generator = torch.Generator().manual_seed(seed)
    N = B if sequences is None else sequences
    full_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    def rows(width):
        # Without a norm in phi the recurrence is stable only for unit keys and values.
        x = torch.randn(B, T, H, width, generator=generator)
        return (F.normalize(x, dim=-1) if options.get("phi") in ("identity", "silu") else x).to(dtype)

    data = {"q": normal(B, T, H * G, D), "k": rows(D), "v": rows(V), "a": normal(B, T, H, M)}
    # In short chunks, steps of up to 1 make the recurrence chaotic, and the error of any formula random.
    data["gamma"] = (torch.rand(B, T, H, generator=generator) / max(chunk, steps)).to(gate_dtype)
    if pattern:
        data["g"] = gates(pattern, (B, T, H), generator).to(gate_dtype)
    # z = A x is about 1: for much larger z maps saturate, and the largest error is random.
    memories = {}
    for name, width in (("k", D), ("v", V), ("first_k", D), ("first_v", V)):
        memories[name] = normal(N, H, M, width, dtype=full_dtype) * width**-0.5
    state = {"k": memories["k"], "v": memories["v"]}
    if resumed:
        # At the start of a chunk the first memory equals the memory.
        begins = (torch.arange(3, 3 + 5 * N, 5) % chunk == 0)[:, None, None, None]
        state = dict(memories)
        state |= {f"first_{x}": torch.where(begins, state[x], state[f"first_{x}"]) for x in "kv"}
    grads = {"o": normal(B, T, H * G, V)}
    grads |= {name: normal(*x.shape, dtype=full_dtype) for name, x in memories.items()}
    return Inputs("trellis", data, state, grads, {"chunk": chunk} | options)


def with_scaled_gradients(inputs):
    """Scales the gradients down, so that roundings in the formula stay within the range of fp16."""
    return replace(inputs, grads={name: x / 16 for name, x in inputs.grads.items()})


def test_selected_path():
    def path(**how):
        inputs = draw(resumed=False, **how)
        state = inputs.state["k"], inputs.state["v"]
        return ops.explain("trellis", **inputs.data, **inputs.options, state=state, device="cuda").path

    assert path() == path(chunk=1, D=128, V=20, M=1) == path(dtype=torch.float16, chunk=64) == "tensor cores"
    assert path(M=129) == path(D=136) == path(V=256) == path(dtype=torch.float32, chunk=64) == "fp32"
    assert path(M=257) == path(dtype=torch.float64) == "aten"


@pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("T", LENGTHS)
def test_every_length(T, dtype, resumed):
    assert_accurate_as_formula(draw(B=3, T=T, dtype=dtype, resumed=resumed))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64])
def test_every_chunk(chunk, dtype):
    inputs = draw(T=150, chunk=chunk, dtype=dtype)
    assert_accurate_as_formula(with_scaled_gradients(inputs))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("D, V, M", [(8, 64, 20), (20, 8, 72), (72, 20, 8), (128, 64, 64), (64, 128, 128)])
def test_every_width(D, V, M, chunk, dtype):
    inputs = draw(B=1, D=D, V=V, M=M, dtype=dtype, chunk=chunk)
    assert_accurate_as_formula(with_scaled_gradients(inputs))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("chunk", [16, 64])
def test_few_slots(chunk, dtype):
    inputs = draw(B=1, D=1, V=1, M=3, dtype=dtype, chunk=chunk, phi="silu", f="silu")
    assert_accurate_as_formula(with_scaled_gradients(inputs))


@pytest.mark.parametrize("chunk", [16, 64])
def test_few_slots_under_a_norm(chunk):
    """Three slots minus their mean may nearly vanish, and then the error of any formula is random: the
    geometric mean over 16 draws of the ratio of the kernels' error to the formula's is at most 2. Only bf16,
    because such gradients overflow fp16."""
    ratios = collections.defaultdict(list)
    for seed in range(16):
        inputs = draw(B=1, D=1, V=1, M=3, chunk=chunk, seed=seed)
        inputs = with_scaled_gradients(inputs).map(lambda x: x.to(DEVICE))
        found = run(inputs)
        if SANITIZED:
            return
        exact, rounded = run(inputs.map(torch.Tensor.double)), run_formula(inputs)
        for name, want in exact.items():
            if want.is_floating_point():
                error, *formula_errors = (
                    mean_square(x[name].double() - want).item() for x in (found, *rounded)
                )
                ratios[name].append(
                    (error / max(formula_errors)) ** 0.5 if max(formula_errors) else float(error > 0)
                )
    for name, name_ratios in ratios.items():
        assert statistics.geometric_mean(max(ratio, 1e-3) for ratio in name_ratios) <= 2, (
            f"{name}: {name_ratios}"
        )


@pytest.mark.parametrize("M, V", [(64, 64), (20, 30), (128, 128)])
@pytest.mark.parametrize("f", ["ln_silu", "softmax", "identity"])
@pytest.mark.parametrize("phi", MAPS)
def test_every_map(phi, f, M, V):
    for dtype in HALVES:
        assert_accurate_as_formula(draw(B=1, M=M, V=V, phi=phi, f=f, dtype=dtype))


@pytest.mark.parametrize("f", MAPS)
def test_every_map_of_reads(f):
    assert_accurate_as_formula(draw(M=40, f=f))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("chunk", [16, 40])
@pytest.mark.parametrize("pattern", [None, "open", "closed", "mixed", "sudden", "uniform"])
def test_gates_from_0_to_minus_20(pattern, chunk, dtype):
    """With maps that do not divide by a norm. The norm of a memory that gates emptied is almost 0, and
    dividing by the norm would amplify rounding errors a thousand times."""
    assert_accurate_as_formula(draw(T=130, pattern=pattern, chunk=chunk, dtype=dtype, phi="silu", f="silu"))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("phi", MAPS)
@pytest.mark.parametrize("pattern", ["closed", "mixed", "uniform"])
def test_closed_gates_give_finite_results(pattern, phi, dtype):
    inputs = draw(T=130, pattern=pattern, dtype=dtype, phi=phi, f=phi).map(lambda x: x.to(DEVICE))
    with torch.no_grad():
        o, state = ops.trellis(**inputs.data, **inputs.options, state=initial_state(inputs))
    assert o.isfinite().all() and all(x.isfinite().all() for x in state)


@pytest.mark.parametrize("gate_dtype", [*DTYPES, torch.float64], ids=str)
def test_gates_of_any_dtype(gate_dtype):
    assert_accurate_as_formula(draw(gate_dtype=gate_dtype))


@pytest.mark.parametrize("G", [2, 3])
def test_grouped_queries(G):
    assert_accurate_as_formula(draw(G=G))


@pytest.mark.parametrize("absent", ["do", "states", "all but one"])
def test_absent_gradients(absent):
    inputs = draw()
    grad_names = {"do": ["first_k", "k", "first_v", "v"], "states": ["o"], "all but one": ["first_v"]}[absent]
    grads = {name: grad for name, grad in inputs.grads.items() if name in grad_names}
    assert_accurate_as_formula(replace(inputs, grads=grads))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout):
    inputs = draw(B=3, T=67, D=24, V=40, M=17)
    pad = Padded(*LAYOUTS[layout], device=DEVICE)
    assert_accurate_as_formula(inputs, found=run(inputs.map(pad)))
    pad.assert_untouched()


@pytest.mark.parametrize("chunk", [16, 64])
def test_padding_at_full_tiles(chunk):
    inputs = draw(T=128, chunk=chunk)
    pad = Padded(*LAYOUTS["dense"], device=DEVICE)
    assert_accurate_as_formula(inputs, found=run(inputs.map(pad)))
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
    assert_accurate_as_formula(inputs, cu_seqlens, found)
    pad.assert_untouched()


@pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])
@pytest.mark.parametrize(
    "bounds", [[0, 99, -5, 20], [40, 30, 20, 10], [-7, -2, 1, 2**31 - 1], [7, 7, 7, 7]], ids=str
)
def test_invalid_bounds_access_no_memory_outside(bounds, resumed):
    inputs = draw(B=1, T=40, sequences=3, resumed=resumed)
    pad = Padded(*LAYOUTS["aligned"], device=DEVICE)
    found = run(inputs.map(pad), cu_seqlens=torch.tensor(bounds, device=DEVICE))
    assert not any(x.isnan().any() for x in found.values() if x.is_floating_point())
    pad.assert_untouched()


def test_bounds_of_rows():
    """`cu_seqlens [B, 2]`: a row's tokens between its bounds give the same bits alone; other tokens give
    zeros."""
    inputs = draw(B=3, T=150, resumed=False).map(lambda x: x.to(DEVICE))
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


def test_every_output_is_written():
    """New tensors are filled with NaN, and all results are finite."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for T, M in ((0, 8), (1, 8), (65, 20), (130, 64)):
            found = run(draw(T=T, D=M, V=M, M=M).map(lambda x: x.to(DEVICE)))
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


def test_long_sequences_in_one_call_and_in_pieces():
    inputs = draw(B=1, T=2048, resumed=False).map(lambda x: x.to(DEVICE))
    exact, rounded = run(inputs.map(torch.Tensor.double)), run_formula(inputs)
    assert_accurate(run(inputs), exact, rounded, 2048, [mean_square])
    assert_accurate(run_in_segments(inputs, 777), exact, rounded, 2048, [mean_square])


@pytest.mark.large
def test_more_than_2_31_elements():
    """Outputs and gradients have more than 2^31 elements too."""
    end = draw(B=1, T=100, H=32, chunk=64, pattern=None, resumed=False)
    assert_same_at_the_end(end.map(torch.Tensor.cuda), 2**20 + 100 - 64, 110)


def run_steps(inputs, T):
    """Steps token by token with a state that is written in place: o and the state."""
    state = initial_state(inputs.map(torch.Tensor.clone))
    rows = [
        ops.trellis_step(
            **{n: x[:, t : t + 1] for n, x in inputs.data.items()}, **inputs.options, state=state
        )
        for t in range(T)
    ]
    return {"o": torch.cat(rows, 1)} | state._asdict()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("phi", MAPS)
@torch.no_grad()
def test_steps_equal_the_sequence(phi, G, dtype):
    for D, V, M, chunk in ((64, 64, 64, 16), (7, 30, 17, 1), (24, 20, 17, 4), (136, 200, 150, 3)):
        inputs = draw(T=20, D=D, V=V, M=M, G=G, chunk=chunk, phi=phi, dtype=dtype).map(lambda x: x.to(DEVICE))
        found = run_steps(inputs, 20)
        exact = inputs.map(torch.Tensor.double)
        o, state = ops.trellis(**exact.data, **inputs.options, state=initial_state(exact))
        want = {"o": o} | state._asdict()
        for name, x in want.items():
            close = max(4 * torch.finfo(dtype).eps, 1e-5) if name == "o" else 1e-4
            if name == "position":
                assert torch.equal(found[name], x)
            else:
                torch.testing.assert_close(
                    found[name].double(), x, rtol=close, atol=close * max(1, x.abs().max())
                )


@torch.no_grad()
def test_a_step_in_a_graph():
    inputs = draw(T=1).map(lambda x: x.to(DEVICE))
    state = initial_state(inputs.map(torch.Tensor.clone))
    graph, o = capture(lambda: ops.trellis_step(**inputs.data, **inputs.options, state=state))
    for x, first in zip(state, initial_state(inputs), strict=True):
        x.copy_(first)
    want_state = initial_state(inputs.map(torch.Tensor.clone))
    for _ in range(40):
        graph.replay()
        want = ops.trellis_step(**inputs.data, **inputs.options, state=want_state)
        assert torch.equal(o, want)
        assert all(torch.equal(a, b) for a, b in zip(state, want_state, strict=True))


def draw_fp32(*, T=40, H=3, D=24, V=20, M=17, dtype=torch.float32, resumed=False, **how):
    return draw(T=T, H=H, D=D, V=V, M=M, dtype=dtype, resumed=resumed, steps=8, **how)


def perturb_by_rounding(x, seed):
    """Every fp32 number unchanged, or replaced by its previous or next neighbour, at random."""
    if x.dtype != torch.float32:
        return x
    way = torch.randint(-1, 2, x.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(way == 0, x, torch.nextafter(x, torch.where(way > 0, torch.inf, -torch.inf)))


def assert_fp32_accurate(inputs, cu_seqlens=None, found=None):
    """The errors of the fp32 kernels are at most twice the errors of the CPU's chunk form in fp32, on these
    inputs and on eight perturbations by a rounding: maps with a norm amplify roundings, and the error of a
    single result is random."""
    inputs = inputs.map(lambda x: x.to(DEVICE))
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(DEVICE)
    call = inputs.data | inputs.options | {"state": initial_state(inputs), "cu_seqlens": cu_seqlens}
    assert ops.explain(inputs.op, **call).path == "fp32"
    found = run(inputs, cu_seqlens=cu_seqlens) if found is None else found
    if SANITIZED:
        return
    exact = run(inputs.map(torch.Tensor.double), cu_seqlens=cu_seqlens)
    near = [inputs.map(torch.Tensor.cpu)]
    if inputs.data["q"].dtype == torch.float32:
        near += [near[0].map(lambda x, seed=seed: perturb_by_rounding(x, seed)) for seed in range(8)]
    bounds = None if cu_seqlens is None else cu_seqlens.cpu()
    cpu_results = [run(x, cu_seqlens=bounds) for x in near]
    rounded = [{name: x.to(DEVICE) for name, x in of.items()} for of in cpu_results]
    M, D = inputs.state["k"].shape[-2:]
    assert_accurate(found, exact, rounded, inputs.data["q"].shape[1] + M + D)


@pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])
@pytest.mark.parametrize("pattern", [None, "mild"])
@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 33, 40, 64])
def test_fp32_chunks(chunk, pattern, resumed):
    assert_fp32_accurate(draw_fp32(T=150, chunk=chunk, pattern=pattern, resumed=resumed))


@pytest.mark.parametrize("T", [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_fp32_lengths(T, chunk):
    assert_fp32_accurate(draw_fp32(B=3, T=T, chunk=chunk, resumed=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "D, V, M",
    [(129, 24, 20), (24, 129, 20), (24, 20, 129), (256, 256, 256), (200, 136, 72), (64, 3, 255)],
)
def test_fp32_wide(D, V, M, dtype):
    for chunk, resumed in ((16, True), (64, True), (1, False)):
        assert_fp32_accurate(
            draw_fp32(B=1, T=70, H=2, D=D, V=V, M=M, chunk=chunk, dtype=dtype, resumed=resumed)
        )


@pytest.mark.parametrize("D, V, M", [(3, 1, 1), (64, 64, 64), (65, 20, 72), (20, 72, 8), (128, 128, 128)])
@pytest.mark.parametrize("chunk", [1, 16, 40])
def test_fp32_widths(D, V, M, chunk):
    assert_fp32_accurate(draw_fp32(D=D, V=V, M=M, chunk=chunk, resumed=True))


@pytest.mark.parametrize("phi", ["silu", "softmax"])
@pytest.mark.parametrize("D, V, M", [(1, 64, 3), (3, 1, 1), (20, 64, 3)])
@pytest.mark.parametrize("chunk", [1, 16, 40])
def test_fp32_few_slots(D, V, M, chunk, phi):
    """With maps without a norm: three slots minus their mean may nearly vanish, and a division by their norm
    amplifies rounding errors. The norm of a memory of width 1 keeps only the sign."""
    assert_fp32_accurate(draw_fp32(D=D, V=V, M=M, chunk=chunk, phi=phi, f=phi, resumed=True))


@pytest.mark.parametrize("chunk", [16, 40])
def test_fp32_few_slots_with_a_norm(chunk):
    assert_fp32_accurate(draw_fp32(D=20, V=64, M=3, chunk=chunk, phi="l2_silu", f="l2_silu", resumed=True))


@pytest.mark.parametrize("M", [40, 130])
@pytest.mark.parametrize("f", ["ln_silu", "softmax", "identity"])
@pytest.mark.parametrize("phi", MAPS)
def test_fp32_maps(phi, f, M):
    assert_fp32_accurate(draw_fp32(M=M, phi=phi, f=f, resumed=True))


@pytest.mark.parametrize("f", MAPS)
def test_fp32_maps_of_reads(f):
    assert_fp32_accurate(draw_fp32(f=f))


@pytest.mark.parametrize("chunk", [1, 16, 40])
@pytest.mark.parametrize("pattern", ["open", "closed", "mixed", "sudden", "uniform"])
def test_fp32_gates_from_0_to_minus_20(pattern, chunk):
    assert_fp32_accurate(draw_fp32(T=130, pattern=pattern, chunk=chunk, phi="silu", f="silu", resumed=True))


@pytest.mark.parametrize("gate_dtype", [*DTYPES, torch.float64], ids=str)
def test_fp32_gates_of_any_dtype(gate_dtype):
    assert_fp32_accurate(draw_fp32(gate_dtype=gate_dtype))


@pytest.mark.parametrize("D", [24, 136])
@pytest.mark.parametrize("G", [2, 8])
def test_fp32_grouped_queries(G, D):
    assert_fp32_accurate(draw_fp32(G=G, D=D, resumed=True))


@pytest.mark.parametrize("chunk", [1, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp32_layouts(layout, chunk):
    inputs = draw_fp32(B=3, T=67, chunk=chunk, resumed=True)
    pad = Padded(*LAYOUTS[layout], device=DEVICE)
    assert_fp32_accurate(inputs, found=run(inputs.map(pad)))
    pad.assert_untouched()


@pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])
@pytest.mark.parametrize("chunk", [1, 16, 33])
@pytest.mark.parametrize(
    "bounds", [[0, 150], [0, 0, 64, 64, 128, 150, 150], [0, 1, 2, 65, 129, 150], [9, 70, 140]], ids=str
)
def test_fp32_packed_sequences(bounds, chunk, resumed):
    inputs = draw_fp32(B=1, T=150, chunk=chunk, resumed=resumed, sequences=len(bounds) - 1)
    cu_seqlens = torch.tensor(bounds)
    pad = Padded(*LAYOUTS["aligned"], device=DEVICE)
    assert_fp32_accurate(inputs, cu_seqlens, run(inputs.map(pad), cu_seqlens=cu_seqlens.to(DEVICE)))
    pad.assert_untouched()


@pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])
@pytest.mark.parametrize(
    "bounds", [[0, 99, -5, 20], [40, 30, 20, 10], [-7, -2, 1, 2**31 - 1], [7, 7, 7, 7]], ids=str
)
def test_fp32_invalid_bounds_access_no_memory_outside(bounds, resumed):
    inputs = draw_fp32(B=1, T=40, sequences=3, resumed=resumed)
    pad = Padded(*LAYOUTS["aligned"], device=DEVICE)
    found = run(inputs.map(pad), cu_seqlens=torch.tensor(bounds, device=DEVICE))
    assert not any(x.isnan().any() for x in found.values() if x.is_floating_point())
    pad.assert_untouched()


def test_fp32_bounds_of_rows():
    """A row's tokens between its bounds give the same bits alone; other tokens give zeros."""
    inputs = draw_fp32(B=3, T=150).map(lambda x: x.to(DEVICE))
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


@pytest.mark.parametrize("absent", ["do", "states", "all but one"])
def test_fp32_absent_gradients(absent):
    inputs = draw_fp32(chunk=7, resumed=True)
    grad_names = {"do": ["first_k", "k", "first_v", "v"], "states": ["o"], "all but one": ["first_v"]}[absent]
    assert_fp32_accurate(replace(inputs, grads={name: inputs.grads[name] for name in grad_names}))


def test_fp32_every_output_is_written():
    """New tensors are filled with NaN, and all results are finite."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for T, M in ((0, 8), (1, 8), (65, 20), (130, 64), (70, 130)):
            found = run(draw_fp32(T=T, D=M, V=M, M=M).map(lambda x: x.to(DEVICE)))
            assert all(x.isfinite().all() for x in found.values())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("M", [64, 150])
def test_fp32_runs_have_the_same_bits(M):
    inputs = draw_fp32(T=200, D=64, V=64, M=M, resumed=True).map(lambda x: x.to(DEVICE))
    first = run(inputs)
    for _ in range(20):
        found = run(inputs)
        assert all(torch.equal(found[name], first[name]) for name in first)


@pytest.mark.parametrize("chunk", [1, 16])
def test_fp32_calls_in_segments(chunk):
    inputs = draw_fp32(B=1, T=200, chunk=chunk).map(lambda x: x.to(DEVICE))
    assert_fp32_accurate(inputs, found=run_in_segments(inputs, 77))


def test_fp32_memory_of_training():
    """Memories are saved every 64 tokens, not for every token."""
    inputs = draw_fp32(B=4, T=4096, H=16, D=64, V=64, M=64, chunk=1)
    leaves = inputs.map(lambda x: x.to(DEVICE)).map(torch.Tensor.requires_grad_)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, _ = ops.trellis(**leaves.data, **inputs.options, state=(leaves.state["k"], leaves.state["v"]))
    o.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 3 * 2**30
