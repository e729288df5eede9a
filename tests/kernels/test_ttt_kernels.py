"""Edge cases of the kernels of ttt, which are the kernels of trellis with one memory."""

from dataclasses import replace
from functools import partial

import kernel_accuracy
import pytest
import torch
import torch.nn.functional as F
from chunk_accuracy import (
    assert_accurate,
    assert_accurate_as_formula,
    initial_state,
    mean_square,
    run_formula,
)
from girih import ops
from graphs import capture
from kernel_accuracy import DEVICE, DTYPES, LAYOUTS, LENGTHS, gates, run, run_in_segments
from long_sequences import assert_same_at_the_end
from padding import Padded
from test_trellis_kernels import HALVES, MAPS, assert_fp32_accurate, with_scaled_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WEIGHTED = pytest.mark.parametrize("weighted", [False, True], ids=["no weight", "weight"])


class Inputs(kernel_accuracy.Inputs):
    def map(self, f):
        return Inputs(**vars(super().map(f)))

    def slice_tokens(self, part):
        """The inputs restricted to these tokens, with the whole weight of phi."""
        weight = {name: x for name, x in self.data.items() if name == "phi_weight"}
        cut = super().slice_tokens(part)
        return replace(cut, data=cut.data | weight)


def draw(
    *,
    B=2,
    T=70,
    H=16,
    G=1,
    D=64,
    M=64,
    dtype=torch.bfloat16,
    gate_dtype=torch.float32,
    pattern=None,
    weighted=False,
    resumed=True,
    sequences=None,
    chunk=16,
    steps=4,
    seed=0,
    **options,
):
    """As test_trellis_kernels.draw(), with a weight of phi about 1. w^2 multiplies a step, so gamma is
    divided by the largest w^2: the steps of a chunk sum to less than 1, as without a weight."""
    generator = torch.Generator().manual_seed(seed)
    N = B if sequences is None else sequences
    full_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    k = torch.randn(B, T, H, D, generator=generator)
    data = {"q": normal(B, T, H * G, D)}
    data["k"] = (F.normalize(k, dim=-1) if options.get("phi") in ("identity", "silu") else k).to(dtype)
    data["a"] = normal(B, T, H, M)
    gamma = torch.rand(B, T, H, generator=generator) / max(chunk, steps)
    if pattern:
        data["g"] = gates(pattern, (B, T, H), generator).to(gate_dtype)
    if weighted:
        weight = 1 + 0.25 * torch.randn(H, M, generator=generator)
        data["phi_weight"] = weight.to(gate_dtype)
        gamma = gamma / weight.square().amax(-1)
    data["gamma"] = gamma.to(gate_dtype)
    memories = {name: normal(N, H, M, D, dtype=full_dtype) * D**-0.5 for name in ("k", "first_k")}
    state = {"k": memories["k"]}
    if resumed:
        begins = (torch.arange(3, 3 + 5 * N, 5) % chunk == 0)[:, None, None, None]
        state["first_k"] = torch.where(begins, state["k"], memories["first_k"])
    grads = {"o": normal(B, T, H * G, M)}
    grads |= {name: normal(*x.shape, dtype=full_dtype) for name, x in memories.items()}
    return Inputs("ttt", data, state, grads, {"chunk": chunk} | options)


def test_selected_path():
    def path(**how):
        inputs = draw(resumed=False, **how)
        return ops.explain(
            "ttt", **inputs.data, **inputs.options, state=inputs.state["k"], device="cuda"
        ).path

    assert path() == path(chunk=1, D=128, M=1) == path(dtype=torch.float16, chunk=64) == "tensor cores"
    assert path(weighted=True) == path(phi="softmax") == "tensor cores"
    assert path(M=129) == path(D=136) == path(dtype=torch.float32, weighted=True) == "fp32"
    assert path(weighted=True, phi="softmax") == "fp32"
    assert path(M=257) == path(dtype=torch.float64) == "aten"


@WEIGHTED
@pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("T", LENGTHS)
def test_every_length(T, dtype, resumed, weighted):
    assert_accurate_as_formula(draw(B=3, T=T, dtype=dtype, resumed=resumed, weighted=weighted))


@WEIGHTED
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64])
def test_every_chunk(chunk, dtype, weighted):
    def inputs(seed=0):
        how = {"dtype": dtype, "pattern": "mild", "weighted": weighted, "seed": seed}
        return with_scaled_gradients(draw(T=150, chunk=chunk, **how))

    assert_accurate_as_formula(inputs(), redraw=inputs)


@WEIGHTED
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("D, M", [(8, 20), (20, 72), (72, 8), (128, 64), (64, 128), (63, 65), (128, 128)])
def test_every_width(D, M, chunk, dtype, weighted):
    inputs = draw(B=1, D=D, M=M, dtype=dtype, chunk=chunk, pattern="mild", weighted=weighted)
    assert_accurate_as_formula(with_scaled_gradients(inputs))


@WEIGHTED
@pytest.mark.parametrize("M", [64, 20, 128])
@pytest.mark.parametrize("f", ["layer_norm", "softmax", "identity"])
@pytest.mark.parametrize("phi", MAPS)
def test_every_map(phi, f, M, weighted):
    if weighted and phi == "softmax":
        return  # has no kernel on tensor cores
    for dtype in HALVES:
        assert_accurate_as_formula(draw(B=1, M=M, phi=phi, f=f, dtype=dtype, weighted=weighted))


@pytest.mark.parametrize("f", MAPS)
def test_every_map_of_reads(f):
    assert_accurate_as_formula(draw(M=40, f=f))


@WEIGHTED
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("chunk", [16, 40])
@pytest.mark.parametrize("pattern", ["open", "closed", "mixed", "sudden", "uniform"])
def test_gates_from_0_to_minus_20(pattern, chunk, dtype, weighted):
    how = {"pattern": pattern, "chunk": chunk, "dtype": dtype, "phi": "silu", "f": "silu"}
    inputs = partial(draw, T=130, **how, weighted=weighted)
    assert_accurate_as_formula(inputs(), redraw=lambda seed: inputs(seed=seed))


@pytest.mark.parametrize("gate_dtype", [*DTYPES, torch.float64], ids=str)
def test_gates_and_weights_of_any_dtype(gate_dtype):
    assert_accurate_as_formula(draw(gate_dtype=gate_dtype, pattern="mild", weighted=True))


@WEIGHTED
@pytest.mark.parametrize("G", [2, 3])
def test_grouped_queries(G, weighted):
    assert_accurate_as_formula(draw(G=G, pattern="mild", weighted=weighted))


@WEIGHTED
@pytest.mark.parametrize("absent", ["do", "states", "all but one"])
def test_absent_gradients(absent, weighted):
    inputs = draw(weighted=weighted)
    grad_names = {"do": ["first_k", "k"], "states": ["o"], "all but one": ["first_k"]}[absent]
    assert_accurate_as_formula(replace(inputs, grads={name: inputs.grads[name] for name in grad_names}))


@WEIGHTED
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, weighted):
    inputs = draw(B=3, T=67, D=24, M=17, pattern="mild", weighted=weighted)
    pad = Padded(*LAYOUTS[layout], device=DEVICE)
    assert_accurate_as_formula(inputs, found=run(inputs.map(pad)))
    pad.assert_untouched()


@WEIGHTED
@pytest.mark.parametrize("chunk", [16, 64])
def test_padding_at_full_tiles(chunk, weighted):
    inputs = draw(T=128, chunk=chunk, weighted=weighted)
    pad = Padded(*LAYOUTS["dense"], device=DEVICE)
    assert_accurate_as_formula(inputs, found=run(inputs.map(pad)))
    pad.assert_untouched()


@WEIGHTED
@pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])
@pytest.mark.parametrize("chunk", [16, 33])
@pytest.mark.parametrize(
    "bounds", [[0, 150], [0, 0, 64, 64, 128, 150, 150], [0, 1, 2, 65, 129, 150], [9, 70, 140]], ids=str
)
def test_packed_sequences(bounds, chunk, resumed, weighted):
    how = {"chunk": chunk, "resumed": resumed, "pattern": "mild", "weighted": weighted}
    inputs = partial(draw, B=1, T=150, sequences=len(bounds) - 1, **how)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32 if len(bounds) % 2 else torch.int64)
    pad = Padded(*LAYOUTS["aligned"], device=DEVICE)
    found = run(inputs().map(pad), cu_seqlens=cu_seqlens.to(DEVICE))
    assert_accurate_as_formula(inputs(), cu_seqlens, found, redraw=lambda seed: inputs(seed=seed))
    pad.assert_untouched()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "bounds", [[0, 99, -5, 20], [40, 30, 20, 10], [-7, -2, 1, 2**31 - 1], [7, 7, 7, 7]], ids=str
)
def test_invalid_bounds_access_no_memory_outside(bounds, dtype):
    for f in ("identity", "softmax"):
        inputs = draw(B=1, T=40, sequences=3, dtype=dtype, f=f, weighted=True)
        pad = Padded(*LAYOUTS["aligned"], device=DEVICE)
        found = run(inputs.map(pad), cu_seqlens=torch.tensor(bounds, device=DEVICE))
        assert not any(x.isnan().any() for x in found.values() if x.is_floating_point())
        pad.assert_untouched()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("f", ["identity", "softmax"])
def test_bounds_of_rows(f, dtype):
    """`cu_seqlens [B, 2]`: a row's tokens between its bounds give the same bits alone; other tokens give
    zeros."""
    inputs = draw(B=3, T=150, resumed=False, f=f, dtype=dtype).map(lambda x: x.to(DEVICE))
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_output_is_written(dtype):
    """New tensors are filled with NaN, and all results are finite."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for T, M in ((0, 8), (1, 8), (65, 20), (130, 64), (70, 130)):
            found = run(draw(T=T, D=M, M=M, dtype=dtype, weighted=True).map(lambda x: x.to(DEVICE)))
            assert all(x.isfinite().all() for x in found.values())
    finally:
        torch.use_deterministic_algorithms(False)


@WEIGHTED
@pytest.mark.parametrize("packed", [False, True])
def test_a_hundred_runs_have_the_same_bits(packed, weighted):
    B, sequences = (1, 4) if packed else (2, None)
    inputs = draw(B=B, T=330, sequences=sequences, pattern="mild", weighted=weighted)
    inputs = inputs.map(lambda x: x.to(DEVICE))
    cu_seqlens = torch.tensor([0, 3, 200, 201, 330], device=DEVICE) if packed else None
    first = run(inputs, cu_seqlens=cu_seqlens)
    for _ in range(100):
        found = run(inputs, cu_seqlens=cu_seqlens)
        assert all(torch.equal(found[name], first[name]) for name in first)


@WEIGHTED
def test_long_sequences_in_one_call_and_in_pieces(weighted):
    inputs = draw(B=1, T=2048, resumed=False, weighted=weighted).map(lambda x: x.to(DEVICE))
    exact, rounded = run(inputs.map(torch.Tensor.double)), run_formula(inputs)
    assert_accurate(run(inputs), exact, rounded, 2048, [mean_square])
    if not weighted:
        assert_accurate(run_in_segments(inputs, 777), exact, rounded, 2048, [mean_square])


@pytest.mark.large
def test_more_than_2_31_elements():
    """Outputs and gradients have more than 2^31 elements too."""
    end = draw(B=1, T=100, H=32, chunk=64, resumed=False)
    assert_same_at_the_end(end.map(torch.Tensor.cuda), 2**20 + 100 - 64, 110)


def run_steps(inputs, T):
    """Steps token by token with a state that is written in place: o and the state."""
    state = initial_state(inputs.map(torch.Tensor.clone))
    rows = [
        ops.ttt_step(**inputs.slice_tokens(slice(t, t + 1)).data, **inputs.options, state=state)
        for t in range(T)
    ]
    return {"o": torch.cat(rows, 1)} | state._asdict()


@WEIGHTED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("phi", MAPS)
@torch.no_grad()
def test_steps_equal_the_sequence(phi, G, dtype, weighted):
    for D, M, chunk in ((64, 64, 16), (7, 17, 1), (24, 17, 4), (136, 150, 3)):
        inputs = draw(T=20, D=D, M=M, G=G, chunk=chunk, phi=phi, dtype=dtype, weighted=weighted)
        inputs = inputs.map(lambda x: x.to(DEVICE))
        found = run_steps(inputs, 20)
        exact = inputs.map(torch.Tensor.double)
        o, state = ops.ttt(**exact.data, **inputs.options, state=initial_state(exact))
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
    inputs = draw(T=1, weighted=True).map(lambda x: x.to(DEVICE))
    state = initial_state(inputs.map(torch.Tensor.clone))
    graph, o = capture(lambda: ops.ttt_step(**inputs.data, **inputs.options, state=state))
    for x, first in zip(state, initial_state(inputs), strict=True):
        x.copy_(first)
    want_state = initial_state(inputs.map(torch.Tensor.clone))
    for _ in range(40):
        graph.replay()
        want = ops.ttt_step(**inputs.data, **inputs.options, state=want_state)
        assert torch.equal(o, want)
        assert all(torch.equal(a, b) for a, b in zip(state, want_state, strict=True))


def draw_fp32(*, T=40, H=3, D=24, M=17, dtype=torch.float32, resumed=False, **how):
    return draw(T=T, H=H, D=D, M=M, dtype=dtype, resumed=resumed, steps=8, **how)


@WEIGHTED
@pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])
@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 33, 40, 64])
def test_fp32_chunks(chunk, resumed, weighted):
    assert_fp32_accurate(draw_fp32(T=150, chunk=chunk, pattern="mild", resumed=resumed, weighted=weighted))


@pytest.mark.parametrize("T", [0, 1, 63, 64, 65, 129])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_fp32_lengths(T, chunk):
    assert_fp32_accurate(draw_fp32(B=3, T=T, chunk=chunk, resumed=True, weighted=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D, M", [(129, 20), (24, 129), (256, 256), (200, 72), (64, 255)])
def test_fp32_wide(D, M, dtype):
    for chunk, resumed in ((16, True), (1, False)):
        how = {"chunk": chunk, "dtype": dtype, "resumed": resumed, "weighted": True}
        assert_fp32_accurate(draw_fp32(B=1, T=70, H=2, D=D, M=M, **how))


@WEIGHTED
@pytest.mark.parametrize("M", [40, 130])
@pytest.mark.parametrize("f", ["layer_norm", "softmax", "identity"])
@pytest.mark.parametrize("phi", MAPS)
def test_fp32_maps(phi, f, M, weighted):
    assert_fp32_accurate(draw_fp32(M=M, phi=phi, f=f, resumed=True, weighted=weighted))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("f", ["softmax", "identity"])
def test_a_weight_of_softmax(f, dtype):
    assert_fp32_accurate(draw_fp32(phi="softmax", f=f, dtype=dtype, resumed=True, weighted=True))


@WEIGHTED
@pytest.mark.parametrize("D", [24, 136])
@pytest.mark.parametrize("G", [2, 8])
def test_fp32_grouped_queries(G, D, weighted):
    assert_fp32_accurate(draw_fp32(G=G, D=D, resumed=True, pattern="mild", weighted=weighted))


@pytest.mark.parametrize("chunk", [1, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp32_layouts(layout, chunk):
    inputs = draw_fp32(B=3, T=67, chunk=chunk, resumed=True, weighted=True)
    pad = Padded(*LAYOUTS[layout], device=DEVICE)
    assert_fp32_accurate(inputs, found=run(inputs.map(pad)))
    pad.assert_untouched()


@pytest.mark.parametrize("f", ["softmax", "identity"])
@pytest.mark.parametrize("chunk", [1, 33])
@pytest.mark.parametrize("bounds", [[0, 0, 64, 64, 128, 150, 150], [9, 70, 140]], ids=str)
def test_fp32_packed_sequences(bounds, chunk, f):
    how = {"sequences": len(bounds) - 1, "f": f, "pattern": "mild", "weighted": True}
    inputs = draw_fp32(B=1, T=150, chunk=chunk, resumed=True, **how)
    cu_seqlens = torch.tensor(bounds)
    pad = Padded(*LAYOUTS["aligned"], device=DEVICE)
    assert_fp32_accurate(inputs, cu_seqlens, run(inputs.map(pad), cu_seqlens=cu_seqlens.to(DEVICE)))
    pad.assert_untouched()
