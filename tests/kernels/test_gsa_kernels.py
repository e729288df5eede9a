"""Edge cases of the kernels of gsa and gla; all cases but the long and large ones are small."""

from dataclasses import replace

import pytest
import recurrences
import rounded_formula
import torch
from girih import ops
from graphs import capture
from kernel_accuracy import (
    DEVICE,
    DTYPES,
    LAYOUTS,
    LENGTHS,
    Inputs,
    assert_accurate,
    assert_accurate_as_formula,
    gates,
    initial_state,
    run,
    run_formula,
    run_in_segments,
)
from padding import Padded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PATTERNS = ["open", "ordinary", "steady", "once", "full", "closed", "mixed", "sudden", "uniform"]
# Dtypes that select the fp32 kernels and, with gates and few slots, the tensor cores. ABC always uses the
# former.
BOTH = [torch.float32, torch.bfloat16]
WIDTHS = [8, 20, 64, 72, 128, 256, 512]
SLOTS = [1, 8, 20, 64, 65, 128, 200, 256]
# Sizes of a step: memories that fill a block's shared memory (gsa or gla) or slightly exceed it; rows that
# are not whole vectors, that have few vectors, or more than a block has threads.
STEPS = {
    "gsa held": {"D": 64, "V": 64, "M": 64},
    "gsa too large": {"D": 64, "V": 68, "M": 64},
    "gla held": {"D": 64, "V": 128, "M": 40},
    "gla too large": {"D": 64, "V": 132, "M": 40},
    "no packs": {"D": 20, "V": 30, "M": 17},
    "few packs": {"D": 7, "V": 12, "M": 20},
    "wide": {"D": 9, "V": 520, "M": 12},
    "wide, too large": {"D": 16, "V": 520, "M": 16},
    "wide, no packs": {"D": 9, "V": 259, "M": 131},
    "many slots": {"D": 9, "V": 4, "M": 520},
}
# Optional inputs: s and g, g only, s only (ABC); no gate, a gate per head, a gate per key channel.
KINDS = {"s_g": "gsa", "g": "gsa", "abc": "gsa", "plain": "gla", "head": "gla", "channel": "gla"}


def draw(
    kind="s_g",
    *,
    B=2,
    T=70,
    H=2,
    G=1,
    shared=1,
    D=64,
    V=64,
    M=64,
    dtype,
    gate_dtype=torch.float32,
    pattern="mild",
    sequences=None,
    seed=0,
    **options,
):
    """Inputs on the CPU. G queries per memory; with G = 1, `shared` memories of gla have one key and one
    query. A state for each of B rows, or for each of `sequences` packed sequences."""
    generator = torch.Generator().manual_seed(seed)
    N = B if sequences is None else sequences
    full_dtype = torch.promote_types(dtype, torch.float32)

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    queries = H * G // (shared if G == 1 else 1)
    data = {"q": normal(B, T, queries, D), "k": normal(B, T, H // shared, D), "v": normal(B, T, H, V)}
    if KINDS[kind] == "gla":
        shape = {"plain": None, "head": (B, T, H), "channel": (B, T, H, D)}[kind]
        if shape:
            data["g"] = gates(pattern, shape, generator).to(gate_dtype)
        state = {"s": normal(N, H, D, V, dtype=full_dtype)}
    else:
        if kind == "s_g":
            data["s"] = torch.rand(B, T, H, M, generator=generator).to(dtype)
        if kind == "abc":
            data["s"] = normal(B, T, H, M, dtype=gate_dtype)
        else:
            data["g"] = gates(pattern, (B, T, H, M), generator).to(gate_dtype)
        state = {"k": normal(N, H, D, M, dtype=full_dtype), "v": normal(N, H, M, V, dtype=full_dtype)}
        if kind == "abc":
            state["z"] = normal(N, H, M, dtype=full_dtype)
    grads = {"o": normal(B, T, H * G, V)} | {n: normal(*x.shape, dtype=full_dtype) for n, x in state.items()}
    return Inputs(KINDS[kind], data, state, grads, options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T", LENGTHS)
def test_every_length(T, dtype):
    assert_accurate_as_formula(draw(T=T, dtype=dtype))


@pytest.mark.parametrize("kind", ["g", "abc", "plain", "head", "channel"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T", LENGTHS)
def test_every_length_of_every_kind(T, dtype, kind):
    assert_accurate_as_formula(draw(kind, T=T, dtype=dtype))


@pytest.mark.parametrize("pattern", ["mild", "full"])
@pytest.mark.parametrize("kind", ["s_g", "head", "channel"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D, V", list(zip(WIDTHS, WIDTHS[2:] + WIDTHS[:2], strict=True)))
def test_every_width(D, V, dtype, kind, pattern):
    assert_accurate_as_formula(draw(kind, B=1, D=D, V=V, dtype=dtype, pattern=pattern))


@pytest.mark.parametrize("kind", ["plain", "head", "channel"])
@pytest.mark.parametrize("D", [136, 256, 257])
def test_keys_at_the_ends_of_the_kernels(D, kind):
    assert_accurate_as_formula(draw(kind, B=1, D=D, V=200, dtype=torch.bfloat16))


@pytest.mark.parametrize("pattern", ["mild", "full"])
@pytest.mark.parametrize("kind", ["s_g", "abc"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M", SLOTS)
def test_every_number_of_slots(M, dtype, kind, pattern):
    assert_accurate_as_formula(draw(kind, B=1, M=M, V=128, dtype=dtype, pattern=pattern))


@pytest.mark.parametrize("kind", ["s_g", "g", "head", "channel"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_gates_from_0_to_minus_20(pattern, dtype, kind):
    assert_accurate_as_formula(draw(kind, T=130, pattern=pattern, dtype=dtype))


@pytest.mark.parametrize("kind", ["s_g", "g", "head", "channel"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [64, 128])
@pytest.mark.parametrize("pattern, scale", [("rising", 0.05), ("growing", 1e-4)])
def test_gates_above_0(pattern, scale, slots, dtype, kind):
    """Memories grow for some tokens. The scale keeps every softmax away from a single slot, where dq loses
    precision."""
    inputs = draw(kind, T=130, D=slots, M=slots, pattern=pattern, dtype=dtype, scale=scale)
    assert_accurate_as_formula(inputs)


@pytest.mark.parametrize("M", [20, 64])
def test_large_logits_in_fp32(M):
    """Where one slot has all the weight, rounding errors of logits near 20,000 do not reach the outputs."""
    inputs = draw("g", B=1, T=60, M=M, dtype=torch.float32).map(lambda x: x.to(DEVICE))
    inputs.data["q"] *= 1000

    def exact(times):
        data = inputs.data | {"q": inputs.data["q"] * times}
        return run(replace(inputs, data=data).map(torch.Tensor.double))["o"]

    want = exact(1)
    one_slot = (want - exact(1.01)).abs().amax(-1) < 1e-9
    assert one_slot.double().mean() > 0.5
    error = (run(inputs)["o"].double() - want).abs().amax(-1)
    assert error[one_slot].max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("feature", ["softmax", "silu"])
@pytest.mark.parametrize("M", [72, 128])
@pytest.mark.parametrize("pattern", ["open", "mild", "sudden", "uniform"])
def test_rows_of_slots_shared_by_two_warps(pattern, M, feature):
    """Two warps share a row: its softmax and its products, with and without factored gates."""
    dtype = DTYPES[1 + (M == 128)]
    inputs = draw(T=100, G=2, M=M, D=72, V=136, pattern=pattern, dtype=dtype, feature=feature, scale=0.1)
    assert_accurate_as_formula(inputs)


@pytest.mark.parametrize("kind", ["s_g", "g", "abc", "head", "channel"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [120, 136])  # within and beyond the limit of the tensor-core kernels
def test_several_tiles_of_every_dimension(slots, dtype, kind):
    """Wide rows, many slots and grouped queries together, in chunks that end early."""
    D = slots if kind == "channel" else 200
    inputs = draw(kind, B=1, T=150, G=2, D=D, V=136, M=slots, dtype=dtype, pattern="mixed", sequences=3)
    assert_accurate_as_formula(inputs, torch.tensor([0, 70, 71, 150]))


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("position", [0, 1, 3, 4, 15, 16, 31, 32, 47, 63, 64, 100])
def test_one_closed_gate(position, dtype):
    """A gate of -20 for all slots at one token, at every position relative to the sub-blocks of a chunk."""
    inputs = draw(T=101, pattern="open", dtype=dtype)
    inputs.data["g"][:, position] = -20
    assert_accurate_as_formula(inputs)


@pytest.mark.parametrize("kind", ["s_g", "head"])
@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("gate", [-1e9, -torch.inf])
def test_very_negative_gates_equal_closed_gates(gate, dtype, kind):
    """A gate resets the memory without loss of precision for its neighbours: the results equal the
    results at -100."""
    inputs = draw(kind, T=100, dtype=dtype).map(lambda x: x.to(DEVICE))
    inputs.data["g"][:, [5, 40, 70]] = -100.0
    want = run(inputs)
    inputs.data["g"][:, [5, 40, 70]] = gate
    found = run(inputs)
    for name in found:
        close = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found[name], want[name], rtol=close, atol=close)


def test_zero_packed_sequences():
    inputs = draw(B=1, T=128, dtype=torch.bfloat16, sequences=0).map(lambda x: x.to(DEVICE))
    found = run(inputs, cu_seqlens=torch.tensor([0, 128], device=DEVICE)[:1])
    assert not any(x.any() for name, x in found.items() if x.numel())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["s_g", "g", "abc"])
@pytest.mark.parametrize("feature", ["none", "silu", "relu", "relu2"])
@pytest.mark.parametrize("M", [20, 64, 120, 200])
def test_every_feature(M, feature, kind, dtype):
    inputs = draw(kind, M=M, dtype=dtype, feature=feature, scale=0.01)
    if feature == "relu":
        # Logits far from 0, where the slope jumps: positive keys and memory, queries of either sign.
        for x in (inputs.data["k"], inputs.state["k"]):
            x.copy_(x.abs() + 0.5)
        q = inputs.data["q"]
        q.copy_((q.abs() + 0.5) * q[..., :1].sign())
    assert_accurate_as_formula(inputs)


@pytest.mark.parametrize("kind", ["s_g", "abc", "head", "channel"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("G", [2, 3])
def test_grouped_queries(G, dtype, kind):
    assert_accurate_as_formula(draw(kind, G=G, dtype=dtype, scale=0.3))


@pytest.mark.parametrize("kind", ["plain", "head", "channel"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("G, shared", [(1, 2), (1, 4), (3, 2)])
def test_memories_that_share_keys(G, shared, dtype, kind):
    """With one output per memory, memories share queries too."""
    assert_accurate_as_formula(draw(kind, H=4, G=G, shared=shared, T=330, dtype=dtype))
    bounds = torch.tensor([0, 5, 5, 300], dtype=torch.int32)
    inputs = draw(kind, B=1, H=4, G=G, shared=shared, D=128, V=72, T=330, sequences=3, dtype=dtype)
    assert_accurate_as_formula(inputs, bounds)


@pytest.mark.parametrize("kind", ["plain", "head", "channel"])
@pytest.mark.parametrize("G, shared", [(1, 2), (1, 4), (3, 2)])
@torch.no_grad()
def test_a_step_of_memories_that_share_keys(G, shared, kind):
    for D, V in ((64, 64), (72, 30), (128, 64)):
        assert_step_accurate(draw(kind, T=1, H=4, G=G, shared=shared, D=D, V=V, dtype=torch.bfloat16))


@pytest.mark.parametrize("gate_dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["s_g", "abc", "head"])
def test_gates_of_any_dtype(kind, gate_dtype):
    assert_accurate_as_formula(draw(kind, dtype=torch.bfloat16, gate_dtype=gate_dtype))


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("absent", ["state", "do", "dstate", "all but one"])
@pytest.mark.parametrize("kind", ["s_g", "abc", "head", "channel"])
def test_absent_parts(kind, absent, dtype):
    inputs = draw(kind, dtype=dtype)
    last = next(reversed(inputs.grads))
    grad_names = {"do": [*inputs.state], "dstate": ["o"], "all but one": [last]}.get(absent, inputs.grads)
    inputs = replace(
        inputs,
        state={} if absent == "state" else inputs.state,
        grads={name: grad for name, grad in inputs.grads.items() if name in grad_names},
    )
    assert_accurate_as_formula(inputs)


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_expanded_gradients(dtype):
    inputs = draw(dtype=dtype)
    ones = {name: torch.ones((), device=DEVICE).expand(x.shape) for name, x in inputs.grads.items()}
    expanded = replace(inputs.map(lambda x: x.to(DEVICE)), grads=ones)
    found = run(expanded)
    dense = run(replace(expanded, grads={name: x.contiguous() for name, x in ones.items()}))
    assert all(torch.equal(found[name], dense[name]) for name in dense)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["s_g", "abc", "head", "channel"])
def test_every_layout(kind, layout, dtype):
    inputs = draw(kind, B=3, T=67, D=24, V=40, M=17, dtype=dtype)
    pad = Padded(*LAYOUTS[layout], device=DEVICE)
    assert_accurate_as_formula(inputs, found=run(inputs.map(pad)))
    pad.assert_untouched()


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("kind", ["s_g", "abc", "head", "channel"])
def test_padding_at_full_tiles(kind, dtype):
    inputs = draw(kind, T=128, dtype=dtype)
    pad = Padded(*LAYOUTS["dense"], device=DEVICE)
    assert_accurate_as_formula(inputs, found=run(inputs.map(pad)))
    pad.assert_untouched()


@pytest.mark.parametrize(
    "bounds",
    [[0, 150], [0, 0, 64, 64, 128, 150, 150], [0, 1, 2, 65, 129, 150], [0, 17, 33, 96, 150], [9, 70, 140]],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["s_g", "g", "abc", "head", "channel"])
def test_packed_sequences(kind, dtype, bounds):
    inputs = draw(kind, B=1, T=150, dtype=dtype, sequences=len(bounds) - 1)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32 if len(bounds) % 2 else torch.int64)
    pad = Padded(*LAYOUTS["aligned"], device=DEVICE)
    found = run(inputs.map(pad), cu_seqlens=cu_seqlens.to(DEVICE))
    assert_accurate_as_formula(inputs, cu_seqlens, found)
    pad.assert_untouched()


@pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])
@pytest.mark.parametrize("G, D, V", [(1, 64, 72), (2, 128, 128), (2, 200, 264)])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("kind", ["plain", "head"])
def test_pairs_of_chunks(kind, dtype, G, D, V, resumed):
    """One to five chunks per sequence: the last chunk is paired or alone, full or of one token."""
    bounds = [0, 1, 129, 129, 193, 258, 450, 707]
    inputs = draw(kind, B=1, T=710, H=2, G=G, D=D, V=V, dtype=dtype, sequences=len(bounds) - 1)
    if not resumed:
        inputs = replace(inputs, state={})
    assert_accurate_as_formula(inputs, torch.tensor(bounds))


@pytest.mark.parametrize("kind", ["s_g", "g", "abc", "plain", "head", "channel"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bounds_of_rows(dtype, kind):
    """`cu_seqlens [B, 2]`: a row's tokens between its bounds give the same bits alone; other tokens give
    zeros."""
    inputs = draw(kind, B=3, T=150, dtype=dtype, pattern="mixed").map(lambda x: x.to(DEVICE))
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


@pytest.mark.parametrize(
    "bounds", [[0, 99, -5, 20], [40, 30, 20, 10], [-7, -2, 1, 2**31 - 1], [7, 7, 7, 7]], ids=str
)
@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("kind", ["s_g", "abc", "head", "channel"])
def test_invalid_bounds_access_no_memory_outside(kind, dtype, bounds):
    inputs = draw(kind, B=1, T=40, dtype=dtype, sequences=3)
    pad = Padded(*LAYOUTS["aligned"], device=DEVICE)
    found = run(inputs.map(pad), cu_seqlens=torch.tensor(bounds, device=DEVICE))
    assert not any(x.isnan().any() for x in found.values())
    pad.assert_untouched()


def test_masked_tokens_of_abc_do_nothing():
    """Logits of -inf: the other results are those without these tokens, which get no gradient."""
    inputs = draw("abc", T=100, dtype=torch.bfloat16)
    masked = torch.zeros(100, dtype=torch.bool)
    masked[[0, 1, 15, 16, 40, 63, 64, 65, 99]] = True
    inputs.data["s"][:, masked] = -torch.inf
    inputs.grads["o"][:, masked] = 0  # outputs at masked tokens still read the memory
    inputs = inputs.map(lambda x: x.to(DEVICE))
    found, unmasked = run(inputs), inputs.slice_tokens(~masked)
    for name in ("o", "dq", "dk", "dv", "ds"):
        if name in ("dk", "dv", "ds"):
            assert not found[name][:, masked].any()
        found[name] = found[name][:, ~masked]
    exact, rounded = run(unmasked.map(torch.Tensor.double)), run_formula(run, unmasked)
    assert_accurate(found, exact, rounded, 164)


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("kind", ["s_g", "abc", "head", "channel"])
def test_every_output_is_written(kind, dtype):
    """New tensors are filled with NaN, and all results are finite."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for T, M in ((0, 8), (1, 8), (65, 20), (130, 64)):
            found = run(draw(kind, T=T, D=M, V=M, M=M, dtype=dtype).map(lambda x: x.to(DEVICE)))
            assert all(x.isfinite().all() for x in found.values())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "kind, packed", [("s_g", False), ("s_g", True), ("abc", False), ("head", True), ("channel", True)]
)
@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_a_hundred_runs_have_the_same_bits(kind, packed, dtype):
    B, sequences = (1, 4) if packed else (2, None)
    inputs = draw(kind, B=B, T=330, dtype=dtype, sequences=sequences).map(lambda x: x.to(DEVICE))
    cu_seqlens = torch.tensor([0, 3, 200, 201, 330], device=DEVICE) if packed else None
    first = run(inputs, cu_seqlens=cu_seqlens)
    for _ in range(100):
        found = run(inputs, cu_seqlens=cu_seqlens)
        assert all(torch.equal(found[name], first[name]) for name in first)


@pytest.mark.parametrize("kind", ["s_g", "abc", "head"])
@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("T", [4096, 32768])
def test_long_sequences_of_few_heads(T, dtype, kind):
    """One call, which cuts time into concurrent segments, and several calls of 3000 tokens each."""
    inputs = draw(kind, B=1, H=4, T=T, dtype=dtype).map(lambda x: x.to(DEVICE))
    exact, rounded = run(inputs.map(torch.Tensor.double)), run_formula(run, inputs)
    assert_accurate(run(inputs), exact, rounded, T)
    assert_accurate(run_in_segments(inputs, 3000), exact, rounded, T)


@pytest.mark.parametrize("kind", ["s_g", "head"])
def test_long_packed_sequences_of_few_heads(kind):
    """Segments with an empty sequence among them, grouped queries, and widths that fill no tile."""
    inputs = draw(kind, B=1, T=9600, H=1, G=2, D=136, V=72, M=72, dtype=torch.float16, sequences=3)
    assert_accurate_as_formula(inputs, torch.tensor([0, 5000, 5000, 9600]))


@pytest.mark.parametrize("kind", ["plain", "head", "channel"])
def test_long_sequences_without_a_first_state(kind):
    inputs = draw(kind, B=1, T=3300, V=136, dtype=torch.bfloat16)
    assert_accurate_as_formula(replace(inputs, state={}))


@pytest.mark.parametrize("kind", ["s_g", "head", "channel"])
def test_long_rows_with_bounds(kind):
    inputs = draw(kind, B=2, T=4000, H=1, dtype=torch.bfloat16).map(lambda x: x.to(DEVICE))
    bounds = [(0, 4000), (300, 3500)]
    found = run(inputs, cu_seqlens=torch.tensor(bounds, device=DEVICE))
    token_results = {"o"} | {f"d{name}" for name in inputs.data}
    for row, (low, high) in enumerate(bounds):
        alone = inputs.map(lambda x, row=row: x[row : row + 1]).slice_tokens(slice(low, high))
        row_result = {name: x[row : row + 1] for name, x in found.items()}
        row_result = {name: x[:, low:high] if name in token_results else x for name, x in row_result.items()}
        assert_accurate(row_result, run(alone.map(torch.Tensor.double)), run_formula(run, alone), high - low)


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("size", [1e-3, 1, 100])
@pytest.mark.parametrize("kind", ["head", "channel"])
def test_gates_between_large_gradients(kind, size, dtype):
    """The gradient of the final state is much larger or much smaller than the gradient of the outputs, over
    many chunks."""
    inputs = draw(kind, B=1, T=1100, dtype=dtype)
    inputs.grads["s"].mul_(size)
    assert_accurate_as_formula(inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "kind, G", [("s_g", 1), ("g", 2), ("abc", 1), ("plain", 1), ("head", 2), ("channel", 1)]
)
@torch.no_grad()
def test_steps_in_place_equal_the_forward(kind, G, layout, dtype):
    T, sizes = 9, {"B": 3, "G": G, "D": 24, "V": 40, "M": 17}
    inputs = draw(kind, T=T, dtype=dtype, **sizes).map(lambda x: x.to(DEVICE))
    start, source = Padded(*LAYOUTS[layout], device=DEVICE), Padded(*LAYOUTS[layout], device=DEVICE)
    step_inputs, views = replace(inputs, state={n: start(x) for n, x in inputs.state.items()}), []
    state = initial_state(step_inputs)
    data = {name: source(x) for name, x in inputs.data.items()}
    for t in range(T):
        token = {name: x[:, t : t + 1] for name, x in data.items()}
        views.append(getattr(ops, f"{inputs.op}_step")(**token, state=state))
    found = {"o": torch.cat(views, 1)} | step_inputs.state
    start.assert_untouched(written=list(step_inputs.state.values()))
    source.assert_untouched()

    def forward(inputs, source=ops):
        keywords = inputs.data | {"state": initial_state(inputs)}
        o, state = getattr(source, inputs.op)(**keywords)
        return {"o": o} | {name: x for name, x in state._asdict().items() if x is not None}

    exact, rounded = forward(inputs.map(torch.Tensor.double)), run_formula(forward, inputs)
    assert_accurate(found, exact, rounded, T + 24)


@pytest.mark.parametrize("M", SLOTS)
@torch.no_grad()
def test_a_step_of_every_size(M):
    for D, V in zip(WIDTHS, reversed(WIDTHS), strict=True):
        assert_step_accurate(draw(T=1, D=D, V=V, M=M, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("size", STEPS)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_step_of_grouped_queries(kind, size, dtype):
    for G in (1, 2, 8):
        assert_step_accurate(draw(kind, T=1, G=G, **STEPS[size], dtype=dtype))


@pytest.mark.parametrize("feature", ["softmax", "none", "silu", "relu", "relu2"])
@pytest.mark.parametrize("kind", ["s_g", "g", "abc"])
@torch.no_grad()
def test_a_step_of_every_feature(kind, feature):
    for M in (17, 64, 68, 300):
        for scale in (None, 0.01):
            inputs = draw(kind, T=1, G=2, M=M, dtype=torch.float16, feature=feature, scale=scale)
            assert_step_accurate(inputs)


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("M", [17, 64, 68])
@torch.no_grad()
def test_a_step_with_closed_slots_of_abc(M, G):
    """Logits of -inf, empty slots, and both in one slot; then logits of -inf for all slots."""
    inputs = draw("abc", T=1, G=G, M=M, dtype=torch.float32)
    inputs.data["s"][..., ::3] = -torch.inf
    inputs.state["z"][..., ::2] = -torch.inf
    inputs.state["k"][..., ::2] = 0
    inputs.state["v"][..., ::2, :] = 0
    assert_step_accurate(inputs, formula=recurrences)  # the chunk formula does not support such slots
    inputs.data["s"][:] = -torch.inf
    assert_step_accurate(inputs, formula=recurrences)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["s_g", "g", "abc", "channel"])
@torch.no_grad()
def test_a_step_with_gates_of_any_dtype(kind, dtype):
    assert_step_accurate(draw(kind, T=1, M=20, dtype=torch.bfloat16, gate_dtype=dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["s_g", "abc", "head", "channel"])
@torch.no_grad()
def test_a_step_in_every_layout(kind, layout):
    """States whose rows are whole vectors in some layouts only, in shared memory or too large for it."""
    for M in (20, 68):
        inputs = draw(kind, B=3, T=1, G=2, D=72, V=M + 52, M=M, dtype=torch.bfloat16)
        pad = Padded(*LAYOUTS[layout], device=DEVICE)
        step_inputs = inputs.map(pad)
        assert_step_accurate(inputs, step_inputs=step_inputs)
        pad.assert_untouched(written=list(step_inputs.state.values()))


def assert_step_accurate(inputs, step_inputs=None, formula=rounded_formula):
    """One step with the state in place; `stepped`: the same values in another layout."""
    inputs = inputs.map(lambda x: x.to(DEVICE))
    step_inputs = inputs.map(torch.clone) if step_inputs is None else step_inputs

    def named(o, state):
        tensors = {"o": o} | dict(zip(inputs.state, state, strict=False))
        if "z" in tensors:  # -inf for slots that no token has opened
            z = tensors.pop("z")
            tensors |= {"closed": z.isneginf().long(), "z": z.masked_fill(z.isneginf(), 0)}
        return tensors

    def forward(inputs, source=ops):
        return named(
            *getattr(source, inputs.op)(**inputs.data, **inputs.options, state=initial_state(inputs))
        )

    state = initial_state(step_inputs)
    o = getattr(ops, f"{inputs.op}_step")(**step_inputs.data, **inputs.options, state=state)
    exact, rounded = forward(inputs.map(torch.Tensor.double)), forward(inputs, formula)
    terms = sum(x.shape[-2] for name, x in inputs.state.items() if name != "z")
    assert_accurate(named(o, state), exact, [rounded], terms)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("kind", ["s_g", "abc", "head", "channel"])
def test_forward_and_backward_in_a_graph(kind, dtype, packed):
    B, sequences = (1, 3) if packed else (2, None)
    cu_seqlens = torch.tensor([0, 100, 100, 200], device="cuda") if packed else None
    inputs, other = (
        draw(kind, B=B, T=200, dtype=dtype, sequences=sequences, seed=seed).map(torch.Tensor.cuda)
        for seed in (0, 1)
    )
    graph, found = capture(lambda: run(inputs, cu_seqlens=cu_seqlens))
    for part, other_part in (
        (inputs.data, other.data),
        (inputs.state, other.state),
        (inputs.grads, other.grads),
    ):
        for name, x in part.items():
            x.copy_(other_part[name])
    graph.replay()
    want = run(other, cu_seqlens=cu_seqlens)
    assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("kind", ["s_g", "abc", "head", "channel"])
@torch.no_grad()
def test_steps_replayed_from_a_graph(kind):
    inputs = draw(kind, T=9, dtype=torch.bfloat16).map(torch.Tensor.cuda)
    step = getattr(ops, f"{inputs.op}_step")
    eager, replayed = (initial_state(inputs.map(torch.clone)) for _ in range(2))
    token = {name: x[:, :1].clone() for name, x in inputs.data.items()}
    graph, o = capture(lambda: step(**token, state=replayed))
    for name, x in inputs.state.items():
        getattr(replayed, name).copy_(x)
    for t in range(9):
        token_data = {name: x[:, t : t + 1] for name, x in inputs.data.items()}
        for name, x in token.items():
            x.copy_(token_data[name])
        graph.replay()
        assert torch.equal(o, step(**token_data, state=eager))
    for name in inputs.state:
        assert torch.equal(getattr(replayed, name), getattr(eager, name))


@pytest.mark.parametrize("kind", ["s_g", "abc", "channel"])
def test_float64_takes_the_aten_form(kind):
    inputs = draw(kind, dtype=torch.float64, gate_dtype=torch.float64)
    found, want = run(inputs.map(lambda x: x.to(DEVICE))), run(inputs)
    for name, x in want.items():
        torch.testing.assert_close(found[name].cpu(), x, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("kind", ["s_g", "abc", "channel"])
def test_rows_that_are_more_than_2_31_elements_apart(kind, dtype):
    """Few elements with huge strides give the same bits as a contiguous tensor."""
    inputs = draw(kind, B=1, T=66, H=1, D=32, V=32, M=32, dtype=dtype).map(lambda x: x.to(DEVICE))
    stride = -(-(2**31 + 2**28) // 65)
    buffer = torch.empty(65 * stride + 2**12, dtype=dtype, device=DEVICE)
    data, offset = {}, 0
    for name in ("q", "k", "v"):
        x = inputs.data[name]
        data[name] = buffer.as_strided(x.shape, (0, stride, 32, 1), offset).copy_(x)
        offset += 64
    found, want = run(replace(inputs, data=inputs.data | data)), run(inputs)
    assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.large
def test_more_than_2_31_elements():
    """Outputs and gradients have more than 2^31 elements too. All tokens but the last ones are zero."""
    T, H, D, tail = 2**20 + 40, 32, 64, 100
    if torch.cuda.mem_get_info()[0] < 100 * 2**30:
        pytest.skip("needs 100 GiB of free device memory")
    sizes = {"B": 1, "T": tail, "H": H, "D": D, "V": D, "M": 8}
    end = draw("g", **sizes, dtype=torch.bfloat16, gate_dtype=torch.bfloat16).map(torch.Tensor.cuda)
    end = replace(end, state={})

    def long(x):
        whole = torch.zeros(1, T, *x.shape[2:], dtype=x.dtype, device="cuda")
        whole[:, -tail:] = x
        return whole

    data = {name: long(x) for name, x in end.data.items()}
    grads = end.grads | {"o": long(end.grads["o"])}
    found, want = run(replace(end, data=data, grads=grads)), run(end)
    for name, x in want.items():
        got = found[name] if name in ("k", "v") else found[name][:, -tail:]
        torch.testing.assert_close(got, x, rtol=2e-2, atol=2e-2 * x.abs().max().item())
        if name not in ("k", "v"):
            assert not found[name][:, :-tail].any()
