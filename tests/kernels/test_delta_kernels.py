"""Edge cases of the kernels of delta_product; all cases but the long and large ones are small."""

import random
from dataclasses import replace

import pytest
import rounded_formula
import torch
import torch.nn.functional as F
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

WIDTHS = [8, 20, 64, 72, 128, 136, 256]
STEPS = [1, 2, 3, 4, 5, 8, 16, 17]  # steps per token; 17 exceed the kernels on tensor cores
# Calls of the fp32 kernels only. KINDS adds calls of the kernels on tensor cores.
FP32_CALLS = {
    "fp32": {"dtype": torch.float32},
    "vector": {"dtype": torch.bfloat16, "vector": True},
    "gelu": {"dtype": torch.float16, "chunk": 16, "between_chunks": "gelu"},
    "tanh vector": {"dtype": torch.float32, "vector": True, "chunk": 24, "between_chunks": "tanh"},
}
GATED = {
    "bf16": {"dtype": torch.bfloat16},
    "bf16 of 128": {"dtype": torch.bfloat16, "D": 128, "V": 72},  # has a separate scan kernel
} | FP32_CALLS
PLAIN_VECTOR = {"vector": True, "gated": False}  # per-channel beta on the tensor cores
KINDS = GATED | {
    "plain vector": {"dtype": torch.bfloat16, **PLAIN_VECTOR},
    "plain vector of 128": {"dtype": torch.float16, "D": 128, "V": 128, **PLAIN_VECTOR},
}
VECTORS = [name for name, kind in KINDS.items() if "vector" in kind]
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
every_gated_kind = pytest.mark.parametrize("kind", GATED.values(), ids=GATED)
every_fp32_call = pytest.mark.parametrize("kind", FP32_CALLS.values(), ids=FP32_CALLS)
# Head widths with scan kernels of their own.
every_head_width = pytest.mark.parametrize("D", [64, 128])
# Kinds whose sequences are computed independently of their place in a batch.
SCANS = ["bf16", "bf16 of 128", "fp32", "vector", "plain vector", "plain vector of 128"]
every_scan_kind = pytest.mark.parametrize("kind", [KINDS[name] for name in SCANS], ids=SCANS)


def keys(kind, shape, generator):
    """Unit keys: random, nearly parallel ("parallel"), one key ("one"), one key in every other row ("half");
    or zeros."""
    normal = torch.randn(shape, generator=generator)
    if kind == "parallel":
        normal = torch.randn(shape[-1], generator=generator) + 0.1 * normal
    if kind == "one":
        normal = torch.randn(shape[-1], generator=generator).expand(shape)
    if kind == "half":
        normal[:, ::2] = torch.randn(shape[-1], generator=generator)
    return torch.zeros(shape) if kind == "zero" else F.normalize(normal, dim=-1)


def draw(
    *,
    B=2,
    T=70,
    H=2,
    G=1,
    shared=1,
    D=64,
    V=64,
    n=1,
    dtype,
    gate_dtype=torch.float32,
    pattern="mild",
    key="random",
    beta=None,
    vector=False,
    gated=True,
    l2norm_qk=False,
    sequences=None,
    seed=0,
    **options,
):
    """Inputs on the CPU. G queries per memory; with G = 1, `shared` memories have one key and one query. A
    state for each of B rows, or for each of `sequences` packed sequences. pattern: of the gates; None or
    `gated=False` gives no gates. beta: of all steps, random between 0 and 2 if None; `vector`: per channel,
    random between 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    N = B if sequences is None else sequences
    full_dtype = torch.promote_types(dtype, torch.float32)

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    k = keys(key, (B, T * n, H // shared, D), generator)
    if l2norm_qk:
        k = k * torch.rand(*k.shape[:3], 1, generator=generator) * 10
    step_sizes = (
        2 * torch.rand(B, T * n, H, generator=generator) if beta is None else torch.full((B, T * n, H), beta)
    )
    if vector:
        step_sizes = torch.rand(B, T * n, H, D, generator=generator)
    data = {
        "q": normal(B, T, H * G // (shared if G == 1 else 1), D),
        "k": k.to(dtype),
        "v": normal(B, T * n, H, V),
        "beta": step_sizes.to(gate_dtype),
    }
    if pattern and gated:
        data["g"] = gates(pattern, (B, T, H), generator).to(gate_dtype)
    state = {"s": normal(N, H, D, V, dtype=full_dtype)}
    grads = {"o": normal(B, T, H * G, V), "s": normal(N, H, D, V, dtype=full_dtype)}
    return Inputs("delta_product", data, state, grads, options | {"n": n, "l2norm_qk": l2norm_qk})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T", LENGTHS)
@every_head_width
def test_every_length(D, T, dtype):
    assert_accurate_as_formula(draw(T=T, D=D, dtype=dtype))


@pytest.mark.parametrize("pattern, l2norm_qk", [(None, False), ("mild", False), ("sudden", True)])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("G", [1, 2])
@every_head_width
def test_more_chunks_than_stages(D, G, n, pattern, l2norm_qk):
    """Every ring of stages wraps around more than twice."""
    options = {"pattern": pattern, "l2norm_qk": l2norm_qk, "dtype": torch.bfloat16}
    assert_accurate_as_formula(draw(B=1, T=650, G=G, D=D, V=72, n=n, **options))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("pattern", [None, "mild", "closed"])
@pytest.mark.parametrize("n, T", [(1, 400), (1, 2100), (2, 330), (3, 20)])
@every_head_width
def test_outputs_without_gradients_have_the_same_bits(D, n, T, pattern, dtype):
    """Without gradients nothing is saved, and the outputs have the same bits."""
    inputs = draw(B=1, T=T, D=D, V=D, n=n, pattern=pattern, dtype=dtype).map(lambda x: x.to(DEVICE))
    found = run(inputs)
    with torch.no_grad():
        o, state = ops.delta_product(**inputs.data, **inputs.options, state=initial_state(inputs))
    assert torch.equal(o, found["o"])
    assert torch.equal(state.s, found["s"])


@every_fp32_call
@pytest.mark.parametrize("T", LENGTHS)
def test_every_length_of_the_fp32_kernels(T, kind):
    assert_accurate_as_formula(draw(T=T, **kind))


@pytest.mark.parametrize("n", STEPS)
@pytest.mark.parametrize("T", [1, 3, 4, 5, 12, 13, 31, 33, 50])
@every_head_width
def test_every_number_of_steps(D, T, n):
    assert_accurate_as_formula(draw(T=T, D=D, n=n, dtype=DTYPES[1 + T % 2]))


@every_fp32_call
@pytest.mark.parametrize("n", [2, 3, 17, 33, 64, 65])
@pytest.mark.parametrize("T", [1, 3, 22, 33])
def test_every_number_of_steps_of_the_fp32_kernels(T, n, kind):
    """65 steps have no kernel."""
    if n == 65 and "between_chunks" in kind:
        pytest.skip("the ATen form, whose tanh and gelu round differently between devices")
    assert_accurate_as_formula(draw(B=1, T=T, n=n, D=24, V=24, **kind))


@pytest.mark.parametrize("T", [1, 15, 16, 17, 64, 65, 130])
@pytest.mark.parametrize(
    "chunk, n", [(1, 1), (1, 3), (2, 1), (5, 2), (16, 1), (63, 1), (64, 1), (64, 3), (40, 8)]
)
@pytest.mark.parametrize("between_chunks", ["gelu", "tanh"])
def test_every_chunk_of_between_chunks(between_chunks, chunk, n, T):
    """From a state in mid-chunk, at another position in every sequence."""
    options = {"chunk": chunk, "between_chunks": between_chunks}
    assert_accurate_as_formula(draw(B=3, H=1, T=T, n=n, D=20, V=40, dtype=DTYPES[T % 3], **options))


@pytest.mark.parametrize("kind", [FP32_CALLS["gelu"], FP32_CALLS["tanh vector"]], ids=["gelu", "tanh"])
@pytest.mark.parametrize("T", [0, 1, 47, 48, 49])
def test_chunks_from_a_start_without_a_state(T, kind):
    assert_accurate_as_formula(replace(draw(T=T, **kind), state={}))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", [KINDS[name] for name in VECTORS], ids=VECTORS)
@pytest.mark.parametrize("D", WIDTHS)
def test_every_width_of_a_beta_for_every_channel(D, kind, n):
    assert_accurate_as_formula(draw(B=1, n=n, **kind | {"D": D, "V": D}))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("n", [1, 2, 5, 16])
@every_head_width
def test_a_beta_for_every_channel_on_the_tensor_cores(D, n, T, dtype):
    assert_accurate_as_formula(draw(T=T, D=D, V=D, n=n, dtype=dtype, **PLAIN_VECTOR))


@pytest.mark.parametrize("n, T", [(1, 650), (2, 330), (3, 220)])
@pytest.mark.parametrize("G", [1, 2])
@every_head_width
def test_more_chunks_than_stages_with_a_beta_for_every_channel(D, G, n, T):
    assert_accurate_as_formula(draw(B=1, T=T, G=G, D=D, V=D, n=n, dtype=torch.bfloat16, **PLAIN_VECTOR))


@pytest.mark.parametrize("key", ["parallel", "one", "half", "zero"])
@pytest.mark.parametrize("n", [1, 2])
@every_head_width
def test_hard_keys_with_a_beta_for_every_channel(D, n, key):
    assert_accurate_as_formula(draw(T=130, D=D, V=D, n=n, key=key, dtype=torch.bfloat16, **PLAIN_VECTOR))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D, V", list(zip(WIDTHS, WIDTHS[2:] + WIDTHS[:2], strict=True)))
def test_every_width(D, V, dtype, n):
    assert_accurate_as_formula(draw(B=1, D=D, V=V, n=n, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", [None, "open", "closed", "mixed", "sudden", "uniform"])
@pytest.mark.parametrize("n", [1, 3])
@every_head_width
def test_gates_from_0_to_minus_20(D, n, pattern, dtype):
    assert_accurate_as_formula(draw(T=130, D=D, n=n, pattern=pattern, dtype=dtype))


@every_fp32_call
@pytest.mark.parametrize("pattern", [None, "open", "closed", "mixed", "sudden", "uniform"])
@pytest.mark.parametrize("n", [1, 3])
def test_gates_of_the_fp32_kernels(n, pattern, kind):
    assert_accurate_as_formula(draw(T=130, n=n, pattern=pattern, **kind))


@every_gated_kind
@pytest.mark.parametrize("position", [0, 1, 15, 16, 31, 32, 47, 63, 64, 100])
def test_one_closed_gate(position, kind):
    inputs = draw(T=101, pattern="open", **kind)
    inputs.data["g"][:, position] = -20
    assert_accurate_as_formula(inputs)


@every_gated_kind
@pytest.mark.parametrize("gate", [-1e9, -torch.inf])
def test_very_negative_gates_equal_closed_gates(gate, kind):
    """A gate resets the memory without loss of precision for its neighbours: the results equal the
    results at -100."""
    inputs = draw(T=100, **kind).map(lambda x: x.to(DEVICE))
    inputs.data["g"][:, [5, 40, 70]] = -100.0
    want = run(inputs)
    inputs.data["g"][:, [5, 40, 70]] = gate
    found = run(inputs)
    for name in found:
        torch.testing.assert_close(found[name], want[name], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta", [None, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("key", ["random", "parallel", "one", "half", "zero"])
@every_head_width
def test_every_kind_of_keys(D, key, beta, dtype):
    """Nearly parallel keys give large inverses; with beta = 2 every step is a reflection."""
    assert_accurate_as_formula(draw(T=130, D=D, key=key, beta=beta, pattern=None, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("key", ["random", "one", "half", "zero"])
@pytest.mark.parametrize("n", [1, 2])
@every_head_width
def test_keys_and_queries_of_any_length(D, n, key, dtype):
    inputs = draw(n=n, T=100, D=D, key=key, l2norm_qk=True, dtype=dtype)
    inputs.data["q"][:, 3] = 0
    inputs.data["k"][:, 5] = 0
    assert_accurate_as_formula(inputs)


@every_fp32_call
@pytest.mark.parametrize("key", ["random", "one", "half", "zero"])
@pytest.mark.parametrize("n", [1, 2])
def test_keys_and_queries_of_any_length_of_the_fp32_kernels(n, key, kind):
    inputs = draw(n=n, T=100, key=key, l2norm_qk=True, **kind)
    inputs.data["q"][:, 3] = 0
    inputs.data["k"][:, 5] = 0
    assert_accurate_as_formula(inputs)


@every_kind
@pytest.mark.parametrize("G, n", [(2, 1), (3, 2), (2, 4), (8, 1)])
def test_grouped_queries(G, n, kind):
    assert_accurate_as_formula(draw(G=G, n=n, scale=0.3, **kind))


@every_kind
@pytest.mark.parametrize("G, n", [(1, 1), (1, 2), (2, 1), (3, 2)])
@pytest.mark.parametrize("shared", [2, 4])
def test_memories_that_share_keys(shared, G, n, kind):
    """With one output per memory, memories share queries too."""
    assert_accurate_as_formula(draw(H=4, shared=shared, G=G, n=n, **kind))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(
    "D, T, n", [(64, 1100, 1), (64, 330, 2), (128, 330, 1), (128, 4200, 1), (256, 130, 2)]
)
@pytest.mark.parametrize("pattern", [None, "mild"])
def test_memories_that_share_keys_in_every_scan(pattern, D, T, n, dtype):
    options = {"l2norm_qk": True, "pattern": pattern, "dtype": dtype}
    assert_accurate_as_formula(draw(B=1, H=6, shared=3, D=D, V=D, T=T, n=n, **options))
    bounds = torch.tensor([0, 5, 5, T - 7], dtype=torch.int32)
    inputs = draw(B=1, H=6, shared=3, D=D, V=D, T=T, n=n, sequences=3, **options)
    assert_accurate_as_formula(inputs, bounds)


@pytest.mark.parametrize("D, pattern", [(64, None), (128, None), (256, "mild")])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("G", [3, 4, 5])
def test_query_heads_around_the_number_of_stages(G, n, D, pattern):
    options = {"pattern": pattern, "dtype": torch.bfloat16}
    assert_accurate_as_formula(draw(H=1, G=G, D=D, V=D, T=330, n=n, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "D, V, T, H",
    [(64, 64, 130, 40), (128, 128, 330, 40), (72, 120, 70, 40), (128, 192, 70, 40), (96, 248, 70, 50)],
)
@pytest.mark.parametrize("pattern", [None, "mild", "closed"])
@pytest.mark.parametrize("n", [1, 2])
def test_many_heads(n, pattern, D, V, T, H, dtype):
    """More heads than half the multiprocessors, and at D = 128 more groups of 64 columns than
    multiprocessors: a block computes 128 columns, except for V = 192."""
    assert_accurate_as_formula(draw(H=H, T=T, D=D, V=V, n=n, pattern=pattern, dtype=dtype))


@pytest.mark.parametrize("key", ["half", "one"])
@pytest.mark.parametrize("n, packed, unit", [(1, False, True), (2, True, False), (3, True, True)])
def test_many_heads_of_128(n, packed, unit, key):
    """Hard keys, with and without saved states: accurate, and the same bits in every run."""
    sizes = {"B": 1, "sequences": 5, "H": 100} if packed else {"B": 2, "H": 50}
    inputs = draw(T=200, D=128, V=128, n=n, key=key, l2norm_qk=unit, dtype=torch.bfloat16, **sizes)
    cu_seqlens = torch.tensor([0, 1, 1, 66, 130, 200], device=DEVICE) if packed else None
    assert_accurate_as_formula(inputs, cu_seqlens=cu_seqlens)
    inputs = inputs.map(lambda x: x.to(DEVICE))
    first = run(inputs, cu_seqlens=cu_seqlens)
    for _ in range(20):
        found = run(inputs, cu_seqlens=cu_seqlens)
        assert all(torch.equal(found[name], first[name]) for name in first)
    with torch.no_grad():
        o, state = ops.delta_product(
            **inputs.data, **inputs.options, state=initial_state(inputs), cu_seqlens=cu_seqlens
        )
    assert torch.equal(o, first["o"])
    assert torch.equal(state.s, first["s"])


@every_kind
@pytest.mark.parametrize("gate_dtype", [*DTYPES, torch.float64], ids=str)
def test_gates_and_steps_of_any_dtype(gate_dtype, kind):
    assert_accurate_as_formula(draw(n=2, gate_dtype=gate_dtype, **kind))


@every_kind
@pytest.mark.parametrize("absent", ["state", "do", "dstate"])
@pytest.mark.parametrize("n", [1, 2])
def test_absent_parts(n, absent, kind):
    inputs = draw(n=n, **kind)
    grad_names = {"do": ["s"], "dstate": ["o"]}.get(absent, inputs.grads)
    inputs = replace(
        inputs,
        state={} if absent == "state" else inputs.state,
        grads={name: grad for name, grad in inputs.grads.items() if name in grad_names},
    )
    assert_accurate_as_formula(inputs)


@every_kind
def test_expanded_gradients(kind):
    inputs = draw(**kind)
    ones = {
        name: torch.ones((), device=DEVICE, dtype=x.dtype).expand(x.shape) for name, x in inputs.grads.items()
    }
    expanded = replace(inputs.map(lambda x: x.to(DEVICE)), grads=ones)
    found = run(expanded)
    dense = run(replace(expanded, grads={name: x.contiguous() for name, x in ones.items()}))
    assert all(torch.equal(found[name], dense[name]) for name in dense)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 2])
def test_every_layout(n, layout, dtype):
    # 16-bit gates and steps too, at even and odd offsets.
    inputs = draw(B=3, H=3, T=67, D=24, V=40, n=n, dtype=dtype, gate_dtype=dtype if n == 2 else torch.float32)
    pad = Padded(*LAYOUTS[layout], device=DEVICE)
    assert_accurate_as_formula(inputs, found=run(inputs.map(pad)))
    pad.assert_untouched()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("T", [1, 63, 65, 67])
def test_an_odd_number_of_steps_of_16_bits(T, dtype):
    inputs = draw(B=1, H=1, T=T, dtype=dtype, gate_dtype=dtype)
    pad = Padded(*LAYOUTS["dense"], device=DEVICE)
    assert_accurate_as_formula(inputs, found=run(inputs.map(pad)))
    pad.assert_untouched()


@every_fp32_call
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 2])
def test_every_layout_of_the_fp32_kernels(n, layout, kind):
    inputs = draw(B=3, T=67, D=24, V=24 if "vector" in kind else 40, n=n, **kind)
    pad = Padded(*LAYOUTS[layout], device=DEVICE)
    assert_accurate_as_formula(inputs, found=run(inputs.map(pad)))
    pad.assert_untouched()


@every_kind
@pytest.mark.parametrize("n", [1, 2])
def test_padding_at_full_tiles(n, kind):
    inputs = draw(T=128, n=n, **kind)
    pad = Padded(*LAYOUTS["dense"], device=DEVICE)
    assert_accurate_as_formula(inputs, found=run(inputs.map(pad)))
    pad.assert_untouched()


@pytest.mark.parametrize(
    "bounds",
    [[0, 150], [0, 0, 64, 64, 128, 150, 150], [0, 1, 2, 65, 129, 150], [0, 17, 33, 96, 150], [9, 70, 140]],
    ids=str,
)
@pytest.mark.parametrize("n", [1, 2, 3])
@every_kind
def test_packed_sequences(kind, n, bounds):
    inputs = draw(B=1, T=150, n=n, sequences=len(bounds) - 1, **kind)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32 if len(bounds) % 3 else torch.int64)
    pad = Padded(*LAYOUTS["aligned"], device=DEVICE)
    found = run(inputs.map(pad), cu_seqlens=cu_seqlens.to(DEVICE))
    assert_accurate_as_formula(inputs, cu_seqlens, found)
    pad.assert_untouched()


@pytest.mark.parametrize("l2norm_qk", [False, True])
@pytest.mark.parametrize("G", [1, 2])
@pytest.mark.parametrize("n", [1, 2, 3, 16])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("D, V", [(64, 64), (72, 200), (128, 128), (128, 256), (256, 136)])
def test_no_gates(D, V, dtype, n, G, l2norm_qk):
    """Calls without gates have separate backward kernels, with and without l2norm_qk."""
    options = {"pattern": None, "l2norm_qk": l2norm_qk, "dtype": dtype}

    def draw_inputs(**sizes):
        inputs = draw(D=D, G=G, n=n, **sizes, **options)
        k = inputs.data["k"]
        if l2norm_qk and dtype == torch.float16:  # division by the length of short keys overflows fp16
            factor = 0.1 / k.float().norm(dim=-1, keepdim=True).clamp(min=1e-6)
            inputs.data["k"] = (k * factor.clamp(min=1)).to(dtype)
        return inputs

    assert_accurate_as_formula(draw_inputs(T=70, V=V))
    packed = draw_inputs(B=1, T=150, V=V - 8, sequences=3)
    assert_accurate_as_formula(packed, torch.tensor([9, 70, 70, 140]))


@pytest.mark.parametrize("G", [1, 2])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@every_head_width
def test_tiny_step_sizes(D, dtype, n, G):
    """The gradient of beta is computed from beta G: dividing by a tiny beta needs its exponent range and
    precision."""
    inputs = draw(T=200, D=D, G=G, n=n, dtype=dtype, pattern=None)
    beta = inputs.data["beta"]
    beta[0, :64], beta[0, 70], beta[0, -1] = 0, 1e-38, 1e-39
    beta[1, 64:128], beta[1, 130], beta[1, -1] = 1e-11, 1e-38, -0.5
    assert_accurate_as_formula(inputs)


@pytest.mark.parametrize("dim", [0, 1, 2])
@every_kind
def test_expanded_inputs(kind, dim):
    """The same batch row, token or head is repeated along one dimension."""
    inputs = draw(**kind).map(lambda x: x.to(DEVICE))
    first = {name: x.narrow(dim, 0, 1).expand(x.shape) for name, x in inputs.data.items()}
    found = run(replace(inputs, data=first))
    dense = run(replace(inputs, data={name: x.contiguous() for name, x in first.items()}))
    assert all(torch.equal(found[name], dense[name]) for name in dense)


def random_options(choose, packed, seed):
    """Arguments of draw() besides sizes and options."""
    return {
        "pattern": choose([None, "mild", "mixed", "sudden", "uniform"]),
        "key": choose(["random", "parallel"]),
        "l2norm_qk": choose([False, True]),
        "sequences": 4 if packed else None,
        "seed": seed,
    }


@pytest.mark.parametrize("seed", range(24))
def test_random_options_together(seed):
    """Random sizes, options, gates and packing."""
    choose = random.Random(seed).choice
    T, packed = choose([1, 2, 20, 63, 64, 65, 100, 140]), choose([False, False, True])
    bounds = sorted(choose(range(T + 1)) for _ in range(3))
    inputs = draw(
        B=1 if packed else choose([1, 2]),
        T=T,
        H=choose([1, 2]),
        G=choose([1, 1, 2, 3]),
        D=choose([3, 8, 33, 64, 65, 128, 200, 256]),
        V=choose([1, 5, 32, 64, 70, 128, 150, 256]),
        n=choose([1, 1, 2, 2, 3, 4, 6]),
        dtype=choose(DTYPES[1:]),
        **random_options(choose, packed, seed),
    )
    assert_accurate_as_formula(inputs, torch.tensor([0, *bounds, T]) if packed else None)


@pytest.mark.parametrize("seed", range(48))
def test_random_options_together_in_the_fp32_kernels(seed):
    choose = random.Random(seed).choice
    T, packed, vector = choose([1, 2, 20, 63, 64, 65, 100, 140]), choose([False, False, True]), choose([0, 1])
    bounds = sorted(choose(range(T + 1)) for _ in range(3))
    D = choose([3, 8, 33, 64, 65, 128, 200, 256])
    between = {"chunk": choose([1, 2, 7, 16, 32, 50, 64]), "between_chunks": choose(["gelu", "tanh"])}
    options = choose([{}, between])
    inputs = draw(
        B=1 if packed else choose([1, 2]),
        T=T,
        H=choose([1, 2]),
        G=choose([1, 1, 2, 3]),
        D=D,
        V=D if vector else choose([1, 5, 32, 64, 70, 128, 150, 256]),
        n=choose([1, 1, 2, 2, 3, 4, 6, 20]),
        vector=bool(vector),
        dtype=choose(DTYPES if vector or options else DTYPES[:1]),
        **random_options(choose, packed, seed),
        **options,
    )
    assert_accurate_as_formula(inputs, torch.tensor([0, *bounds, T]) if packed else None)


@every_scan_kind
@pytest.mark.parametrize("n", [1, 2])
def test_rows_with_bounds_equal_their_sequences(n, kind):
    """cu_seqlens [B, 2]: the sequence of every row gives the same bits alone; other tokens give zeros."""
    bounds = [(0, 100), (30, 100), (0, 61), (50, 50)]
    inputs = draw(B=4, T=100, n=n, **kind).map(lambda x: x.to(DEVICE))
    found = run(inputs, cu_seqlens=torch.tensor(bounds, device=DEVICE))
    for b, (lo, hi) in enumerate(bounds):
        rows = {name: n if x.shape[1] == 100 * n else 1 for name, x in inputs.data.items()}

        def alone(x, count, b=b, lo=lo, hi=hi):
            return x[b : b + 1, lo * count : hi * count]

        own = Inputs(
            inputs.op,
            {name: alone(x, rows[name]) for name, x in inputs.data.items()},
            {name: x[b : b + 1] for name, x in inputs.state.items()},
            {"o": alone(inputs.grads["o"], 1), "s": inputs.grads["s"][b : b + 1]},
            inputs.options,
        )
        for name, x in run(own).items():
            data = name.removeprefix("d")
            count = rows.get(data, 1) if name != "o" else 1
            if name in ("s", "dstate_s"):
                assert torch.equal(found[name][b : b + 1], x)
            else:
                assert torch.equal(alone(found[name], count), x)
                outside = found[name][b].clone()
                outside[lo * count : hi * count] = 0
                assert not outside.any()


@pytest.mark.parametrize(
    "bounds", [[0, 99, -5, 20], [40, 30, 20, 10], [-7, -2, 1, 2**31 - 1], [7, 7, 7, 7]], ids=str
)
@every_kind
@pytest.mark.parametrize("n", [1, 2])
def test_invalid_bounds_access_no_memory_outside(n, kind, bounds):
    inputs = draw(B=1, T=40, n=n, sequences=3, **kind)
    pad = Padded(*LAYOUTS["aligned"], device=DEVICE)
    found = run(inputs.map(pad), cu_seqlens=torch.tensor(bounds, device=DEVICE))
    assert not any(x.isnan().any() for x in found.values())
    pad.assert_untouched()


@every_kind
def test_zero_packed_sequences(kind):
    inputs = draw(B=1, T=128, sequences=0, **kind).map(lambda x: x.to(DEVICE))
    found = run(inputs, cu_seqlens=torch.tensor([0, 128], device=DEVICE)[:1])
    assert not any(x.any() for name, x in found.items() if x.numel())


@every_kind
@pytest.mark.parametrize("n", [1, 2])
def test_every_output_is_written(n, kind):
    """New tensors are filled with NaN, and all results are finite."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for T, D in ((0, 8), (1, 8), (65, 20), (130, 64)):
            sizes = {"T": T, "D": D, "V": D, "n": n} | kind
            found = run(draw(**sizes).map(lambda x: x.to(DEVICE)))
            assert all(x.isfinite().all() for x in found.values())
    finally:
        torch.use_deterministic_algorithms(False)


@every_kind
@pytest.mark.parametrize("n, packed", [(1, False), (2, False), (2, True)])
def test_a_hundred_runs_have_the_same_bits(n, packed, kind):
    B, sequences = (1, 4) if packed else (2, None)
    inputs = draw(B=B, T=330, n=n, sequences=sequences, **kind).map(lambda x: x.to(DEVICE))
    cu_seqlens = torch.tensor([0, 3, 200, 201, 330], device=DEVICE) if packed else None
    first = run(inputs, cu_seqlens=cu_seqlens)
    for _ in range(100):
        found = run(inputs, cu_seqlens=cu_seqlens)
        assert all(torch.equal(found[name], first[name]) for name in first)


@pytest.mark.parametrize("n, D", [(1, 64), (2, 128)])
@pytest.mark.parametrize("T", [4096, 32768])
def test_long_sequences_of_few_heads(T, n, D):
    """One call, which cuts time into concurrent segments, and several calls of 3000 tokens each."""
    inputs = draw(B=1, H=4, T=T, D=D, V=D, n=n, dtype=torch.bfloat16).map(lambda x: x.to(DEVICE))
    exact, rounded = run(inputs.map(torch.Tensor.double)), run_formula(run, inputs)
    assert_accurate(run(inputs), exact, rounded, T * n)
    assert_accurate(run_in_segments(inputs, 3000), exact, rounded, T * n)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "H, G, D, V, n",
    [
        (16, 1, 128, 64, 1),
        (3, 2, 64, 192, 1),
        (2, 1, 256, 200, 1),
        (4, 1, 72, 72, 3),
        (4, 2, 128, 128, 1),
    ],
)
def test_segments_of_every_width(H, G, D, V, n, packed):
    """States split over one or two blocks, and values and transitions in one block."""
    sizes = {"H": H, "G": G, "D": D, "V": V, "n": n, "sequences": 2 if packed else None}
    inputs = draw(B=1, T=8192, dtype=torch.bfloat16, **sizes).map(lambda x: x.to(DEVICE))
    cu_seqlens = torch.tensor([0, 3000, 8192], device=DEVICE) if packed else None
    exact = run(inputs.map(torch.Tensor.double), cu_seqlens=cu_seqlens)
    rounded = run_formula(run, inputs, cu_seqlens=cu_seqlens)
    assert_accurate(run(inputs, cu_seqlens=cu_seqlens), exact, rounded, 8192 * n)


@every_fp32_call
@pytest.mark.parametrize("n", [1, 2])
def test_long_sequences_of_the_fp32_kernels(n, kind):
    inputs = draw(B=1, T=4096, D=64, V=64, n=n, **kind).map(lambda x: x.to(DEVICE))
    exact, rounded = run(inputs.map(torch.Tensor.double)), run_formula(run, inputs)
    assert_accurate(run(inputs), exact, rounded, 4096 * n)
    assert_accurate(run_in_segments(inputs, 3000), exact, rounded, 4096 * n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("G, n, l2norm_qk", [(1, 1, False), (2, 2, True)])
@torch.no_grad()
def test_steps_in_place_equal_the_forward(G, n, l2norm_qk, layout, dtype):
    T, sizes = 9, {"B": 3, "G": G, "D": 24, "V": 40, "n": n, "l2norm_qk": l2norm_qk}
    inputs = draw(T=T, dtype=dtype, **sizes).map(lambda x: x.to(DEVICE))
    start, source = Padded(*LAYOUTS[layout], device=DEVICE), Padded(*LAYOUTS[layout], device=DEVICE)
    step_inputs, views = replace(inputs, state={name: start(x) for name, x in inputs.state.items()}), []
    state = initial_state(step_inputs)
    data = {name: source(x) for name, x in inputs.data.items()}
    for t in range(T):
        views.append(ops.delta_product_step(**token(data, t, n), **inputs.options, state=state))
    found = {"o": torch.cat(views, 1)} | step_inputs.state
    start.assert_untouched(written=list(step_inputs.state.values()))
    source.assert_untouched()

    def forward(inputs, source=ops):
        o, state = source.delta_product(**inputs.data, **inputs.options, state=initial_state(inputs))
        return {"o": o, "s": state.s}

    exact, rounded = forward(inputs.map(torch.Tensor.double)), run_formula(forward, inputs)
    assert_accurate(found, exact, rounded, T * n + 24)


def token(data, t, n):
    rows = {"q": 1, "k": n, "v": n, "beta": n, "g": 1}
    return {name: x[:, t * rows[name] : (t + 1) * rows[name]] for name, x in data.items()}


@pytest.mark.parametrize("n", [1, 3])
@torch.no_grad()
def test_a_step_of_every_size(n):
    for D in [*WIDTHS, 1, 3]:
        for V in (1, 30, 64, 256):
            assert_step_accurate(draw(T=1, D=D, V=V, n=n, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("l2norm_qk", [False, True])
@pytest.mark.parametrize("D, V", [(64, 64), (72, 30), (256, 36)])
@torch.no_grad()
def test_a_step_of_every_number_of_writes_and_queries(D, V, l2norm_qk, dtype):
    for n, G in ((1, 1), (1, 8), (2, 3), (3, 2), (5, 7), (8, 1), (8, 8)):
        assert_step_accurate(draw(T=1, D=D, V=V, n=n, G=G, l2norm_qk=l2norm_qk, dtype=dtype))


@pytest.mark.parametrize("G, shared", [(1, 2), (1, 4), (3, 2)])
@torch.no_grad()
def test_a_step_of_memories_that_share_keys(G, shared):
    for kind in ({}, {"vector": True}, {"l2norm_qk": True, "n": 3}):
        assert_step_accurate(draw(T=1, H=4, G=G, shared=shared, dtype=torch.bfloat16, **kind))


@pytest.mark.parametrize("kind", ["no gates", "vector"])
@torch.no_grad()
def test_a_step_of_every_kind_of_gates_and_betas(kind):
    options = {"pattern": None} if kind == "no gates" else {"vector": True}
    for gate_dtype in (*DTYPES, torch.float64):
        assert_step_accurate(draw(T=1, n=2, G=2, dtype=torch.bfloat16, gate_dtype=gate_dtype, **options))


def assert_step_accurate(inputs):
    inputs = inputs.map(lambda x: x.to(DEVICE))
    state = initial_state(inputs.map(torch.clone))
    o = ops.delta_product_step(**inputs.data, **inputs.options, state=state)
    double = inputs.map(torch.Tensor.double)
    want_o, want = ops.delta_product(**double.data, **inputs.options, state=initial_state(double))
    near_o, near = rounded_formula.delta_product(**inputs.data, **inputs.options, state=initial_state(inputs))
    terms = inputs.data["q"].shape[-1] + inputs.options["n"]
    assert_accurate({"o": o, "s": state.s}, {"o": want_o, "s": want.s}, [{"o": near_o, "s": near.s}], terms)


@every_kind
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_forward_and_backward_in_a_graph(n, packed, kind):
    B, sequences = (1, 3) if packed else (2, None)
    cu_seqlens = torch.tensor([0, 100, 100, 200], device="cuda") if packed else None
    inputs, other = (
        draw(B=B, T=200, n=n, sequences=sequences, seed=seed, **kind).map(torch.Tensor.cuda)
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


@pytest.mark.parametrize("n", [1, 2])
@torch.no_grad()
def test_steps_replayed_from_a_graph(n):
    inputs = draw(T=9, n=n, dtype=torch.bfloat16).map(torch.Tensor.cuda)
    eager, replayed = (initial_state(inputs.map(torch.clone)) for _ in range(2))
    first = {name: x.clone() for name, x in token(inputs.data, 0, n).items()}
    graph, o = capture(lambda: ops.delta_product_step(**first, **inputs.options, state=replayed))
    replayed.s.copy_(inputs.state["s"])
    for t in range(9):
        token_data = token(inputs.data, t, n)
        for name, x in first.items():
            x.copy_(token_data[name])
        graph.replay()
        assert torch.equal(o, ops.delta_product_step(**token_data, **inputs.options, state=eager))
    assert torch.equal(replayed.s, eager.s)


@pytest.mark.parametrize("kind", ["float64", "vector", "between chunks"])
def test_the_aten_form_serves_float64(kind):
    """As on the CPU, also with a per-channel beta and with a function between chunks."""
    inputs = draw(dtype=torch.float64, gate_dtype=torch.float64)
    if kind == "vector":
        beta = torch.rand(inputs.data["k"].shape, generator=torch.Generator().manual_seed(0))
        inputs.data["beta"] = beta.double()
    if kind == "between chunks":
        inputs = replace(inputs, state={}, options=inputs.options | {"chunk": 16, "between_chunks": "tanh"})
    found, want = run(inputs.map(lambda x: x.to(DEVICE))), run(inputs)
    for name, x in want.items():
        torch.testing.assert_close(found[name].cpu(), x, rtol=1e-9, atol=1e-9)


def test_rows_that_are_more_than_2_31_elements_apart():
    """Few elements with huge strides give the same bits as a contiguous tensor."""
    inputs = draw(B=1, T=66, H=1, D=32, V=32, dtype=torch.bfloat16).map(lambda x: x.to(DEVICE))
    stride = -(-(2**31 + 2**28) // 65)
    buffer = torch.empty(65 * stride + 2**12, dtype=torch.bfloat16, device=DEVICE)
    data, offset = {}, 0
    for name in ("q", "k", "v"):
        x = inputs.data[name]
        data[name] = buffer.as_strided(x.shape, (0, stride, 32, 1), offset).copy_(x)
        offset += 64
    found, want = run(replace(inputs, data=inputs.data | data)), run(inputs)
    assert all(torch.equal(found[name], want[name]) for name in want)
