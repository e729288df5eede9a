"""The kernels of gla, emulated on the CPU (tests/emulated): forward, all gradients and the step."""

import ctypes
from bisect import bisect_left

import pytest
import recurrences
import torch
from emulated import (
    NUMBER,
    SHARED,
    SHARED_80,
    SHARED_86,
    Array,
    guarded_copy,
    guarded_nan,
    load_kernels,
    needs_headers,
    padded_rows,
    round_up_8,
    structure,
)
from emulated_gated import (
    BF16,
    FP16,
    FP32,
    GATED,
    Layout,
    assert_close_by_rows,
    assert_gaps_unwritten,
    gates,
    state,
    with_gaps,
)

pytestmark = needs_headers

Call = structure(*GATED, (NUMBER, "use_head_kernels key_share query_share values"))
Step = structure(
    (NUMBER, "sequences heads query_heads key_share query_share D V"),
    (ctypes.c_double, "scale"),
    (Array, "q k v g state o"),
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return load_kernels(tmp_path_factory, "gla", sizes=())


def repeat_heads(x, heads):
    """Repeats heads: [B, T, shared, width] -> [B, T, heads, width]."""
    return x.repeat_interleave(max(1, heads // x.shape[2]), 2)


def check(
    kernels,
    lengths,
    kind="channel",
    *,
    dtype=BF16,
    use_fp32=False,
    D=64,
    V=64,
    H=1,
    queries=None,
    keys=None,
    pattern="mild",
    gate_dtype=FP32,
    packing=None,
    resumed=True,
    scale=None,
    shared=SHARED,
    cut=True,
):
    """One call against the recurrence in float64. kind: a gate per channel, per head, or no gate (plain)."""
    generator = torch.Generator().manual_seed(sum(lengths) + D + 2 * V)
    layout, N, scale = Layout(lengths, packing), len(lengths), D**-0.5 if scale is None else scale
    B, T, use_fp32 = layout.B, layout.T, use_fp32 or dtype == FP32
    use_head_kernels = kind != "channel" and not use_fp32
    HQ, HK = queries or H, keys or H
    HO = max(HQ, H)
    part = dtype if HO == H else FP32
    parts = H if use_fp32 else HO

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    inputs = {"q": normal(B, T, HQ, D), "k": normal(B, T, HK, D), "v": normal(B, T, H, V)}
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    if kind != "plain":
        shape = (B, T, H, D) if kind == "channel" else (B, T, H)
        inputs["g"] = gates(pattern, shape, generator).to(gate_dtype)
    x = {name: padded_rows(*y.shape, values=y, dtype=dtype) for name, y in inputs.items() if name in "qkv"}
    if not use_head_kernels:
        q = repeat_heads(inputs["q"], H)
        k = repeat_heads(inputs["k"], H)
        x["q"] = (
            padded_rows(*q.shape, values=q * scale, dtype=FP32)
            if use_fp32
            else padded_rows(*q.shape, values=q, dtype=dtype)
        )
        x["k"] = padded_rows(*k.shape, values=k, dtype=dtype)
        g = inputs["g"].float() if "g" in inputs else torch.zeros(B, T, H)
        x["g"] = padded_rows(B, T, H, D, values=g if g.dim() == 4 else g[..., None], dtype=FP32)
    x["dout"] = padded_rows(B, T, HO, V, values=normal(B, T, HO, V), dtype=dtype)
    x |= {
        "o": padded_rows(B, T, HO, V, dtype=dtype),
        "dq": padded_rows(B, T, HO, D, dtype=FP32 if use_fp32 else dtype),
        "dk": padded_rows(B, T, parts, D, dtype=FP32 if use_fp32 else part),
        "dv": padded_rows(B, T, parts, V, dtype=dtype if use_fp32 else part),
    }
    has_channel_dg = not use_head_kernels and "g" in inputs
    if has_channel_dg:
        x["dg"] = padded_rows(B, T, parts, D, dtype=FP32)
    first = normal(N, H, D, V) if resumed else None
    dlast = normal(N, H, D, V)

    call = Call(heads=H, query_heads=HO, D=0, V=round_up_8(V), M=round_up_8(D), slots=D, scale=scale)
    layout.fill(call)
    call.use_fp32, call.use_head_kernels, call.values = use_fp32, use_head_kernels, V
    call.shared, call.processors = shared, 132 if cut else 1
    call.key_share, call.query_share = H // HK, max(1, H // HQ)
    if use_head_kernels:
        # The gradient of the last state is an input of the first query head of every memory.
        query_dlast = torch.zeros(N, H, HO // H, D, V)
        query_dlast[:, :, 0] = dlast
        memory = {
            "initial": guarded_copy(first),
            "dlast": guarded_copy(query_dlast.flatten(1, 2)),
            "last": guarded_nan(N, H, D, V),
            "dinitial": guarded_nan(N, HO, D, V),
        }
        memory = {name: None if y is None else y.mT for name, y in memory.items()}
        if "g" in inputs:
            x |= {"g": guarded_copy(inputs["g"]), "dg": guarded_nan(B, T, H, dtype=gate_dtype)}
    else:
        memory = {name: state(N, H, V, D) for name in ("last", "dinitial")}
        memory["initial"] = state(N, H, V, D, first.mT).mT.contiguous().mT if resumed else None
        memory["dlast"] = state(N, H, V, D, dlast.mT)
    for name, tensor in x.items():
        setattr(call, name, Array.of(tensor))
    for name, tensor in memory.items():
        setattr(call, name, (Array * 2)(Array(), Array.of(tensor)))
    kernels.run(ctypes.byref(call))

    leaves = {name: y.double() for name, y in inputs.items()}
    if resumed:
        leaves["state"] = first.double()
    for leaf in leaves.values():
        leaf.requires_grad_()
    total, o, finals = 0.0, [], []
    for n in range(N):
        tokens = {name: leaf[layout.index(n)] for name, leaf in leaves.items() if name != "state"}
        start = (leaves["state"][n : n + 1],) if resumed else None
        out, (final,) = recurrences.gla(**tokens, scale=scale, state=start)
        total = total + (out * x["dout"][layout.index(n)][..., :V].double()).sum()
        total = total + (final * dlast[n : n + 1].double()).sum()
        o.append(out.detach()[0])
        finals.append(final.detach())
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)

    want = {"o": torch.cat(o), "last": torch.cat(finals)}
    want |= {f"d{n}": y if n == "state" else y[layout.owned] for n, y in zip(leaves, found, strict=True)}

    def summed(name, heads, width):
        return x[name].unflatten(2, (heads, -1)).float().sum(3)[layout.owned][..., :width]

    got = {"o": x["o"][layout.owned][..., :V], "last": memory["last"].mT[:, :, :D, :V]}
    got |= {"dq": summed("dq", HQ, D) * (scale if use_fp32 else 1), "dk": summed("dk", HK, D)}
    got["dv"] = summed("dv", H, V)
    if use_head_kernels and "g" in inputs:
        got["dg"] = x["dg"][layout.owned]
    elif "g" in inputs:
        got["dg"] = summed("dg", H, D).sum(-1) if kind == "head" else summed("dg", H, D)
    if resumed:
        got["dstate"] = memory["dinitial"].mT[:, :, :D, :V].unflatten(1, (H, -1)).sum(2)
    assert_close_by_rows(got, want, dtype)
    for name in ("o", "dq", "dk", "dv", *(["dg"] if has_channel_dg else [])):
        layout.assert_rest_unwritten(name, x[name])


KINDS = ["channel", "head", "plain"]


@pytest.mark.parametrize("T", [0, 1, 15, 64, 65, 128, 129])
@pytest.mark.parametrize("kind", KINDS)
def test_every_length(kernels, T, kind):
    check(kernels, [T], kind, D=24, V=40)


@pytest.mark.parametrize("pattern", ["ordinary", "steady", "once", "mild", "full", "strong", "sudden"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("kind", ["channel", "head"])
def test_every_gate(kernels, kind, dtype, pattern):
    check(kernels, [200], kind, dtype=dtype, pattern=pattern)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("kind, D", [("channel", 64), ("channel", 128), ("head", 64)])
@pytest.mark.parametrize("pattern", ["rising", "growing"])
def test_gates_above_0(kernels, kind, D, dtype, pattern):
    check(kernels, [200], kind, dtype=dtype, D=D, pattern=pattern)


@pytest.mark.parametrize("pattern", ["mild", "strong"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "kind, D, V",
    [
        *(("channel", D, V) for D, V in ((20, 130), (128, 64), (100, 72))),
        *(("head", D, V) for D, V in ((20, 130), (128, 64), (100, 200), (256, 24), (200, 130))),
    ],
)
def test_every_width(kernels, kind, D, V, dtype, pattern):
    check(kernels, [140], kind, dtype=dtype, D=D, V=V, pattern=pattern)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("D, V", [(20, 130), (200, 24)])
def test_every_width_of_the_fp32_kernels(kernels, D, V, kind):
    check(kernels, [70], kind, dtype=BF16 if V == 24 else FP32, use_fp32=True, D=D, V=V)


@pytest.mark.parametrize("gate_dtype", [BF16, FP16])
def test_gates_of_16_bits(kernels, gate_dtype):
    check(kernels, [129, 129], "head", H=2, gate_dtype=gate_dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "H, queries, keys", [(2, 6, 2), (4, 2, 1), (2, 1, 2), (2, 4, 1)], ids=lambda n: str(n)
)
def test_heads_that_share(kernels, H, queries, keys, kind, dtype):
    check(kernels, [66], kind, dtype=dtype, D=40, V=24, H=H, queries=queries, keys=keys)


@pytest.mark.parametrize("packing", ["packed", "rows"])
@pytest.mark.parametrize(
    "kind, dtype", [*((kind, BF16) for kind in KINDS), ("head", FP16), ("channel", FP32)]
)
def test_sequences_of_their_own_lengths(kernels, kind, dtype, packing):
    check(kernels, [30, 0, 70, 64, 1, 193, 128], kind, dtype=dtype, D=24, V=40, H=2, packing=packing)


@pytest.mark.parametrize("kind, dtype", [("channel", BF16), ("head", BF16), ("plain", BF16), ("head", FP32)])
def test_no_first_state(kernels, kind, dtype):
    check(kernels, [140, 140], kind, dtype=dtype, D=24, V=40, resumed=False)


# At least 6 chunks, which the emulator's tile/segments.h cuts into segments.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [SHARED, SHARED_86])
def test_long_sequences(kernels, kind, shared):
    check(kernels, [450], kind, D=24, V=40, shared=shared)
    check(kernels, [385, 20], kind, D=24, V=40, H=2, queries=4, packing="packed", shared=shared)


# More chunks than stages of the rings, without segments.
@pytest.mark.parametrize(
    "D, T, shared",
    [
        *((64, 460, SHARED), (64, 330, SHARED_86), (128, 330, SHARED)),
        *((128, 260, SHARED_86), (200, 260, SHARED), (200, 200, SHARED_80)),
    ],
)
def test_more_chunks_than_stages(kernels, D, T, shared):
    check(kernels, [T], "head", D=D, V=24, shared=shared, cut=False)


@pytest.mark.parametrize("D", [24, 128, 200])
def test_the_smallest_shared_memory(kernels, D):
    least = bisect_left(range(SHARED), True, key=lambda shared: bool(kernels.fits(D, shared)))
    assert 0 < least < SHARED
    check(kernels, [140], "head", D=D, V=24, shared=least)


def step(kernels, D, V, kind, dtype, H=2, queries=None, keys=None, transposed=False):
    generator = torch.Generator().manual_seed(D + V)
    N, HQ, HK = 3, queries or H, keys or H
    HO = max(HQ, H)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    x = {"q": with_gaps(normal(N, HQ, D), dtype, True), "k": with_gaps(normal(N, HK, D), dtype)}
    x["v"] = with_gaps(normal(N, H, V), dtype, True)
    if kind != "plain":
        shape = (N, H, D) if kind == "channel" else (N, H, 1)
        x["g"] = with_gaps(gates("strong", shape, generator), dtype).expand(N, H, D)
    x["o"] = with_gaps(torch.full((N, HO, V), torch.nan), dtype)
    memory = with_gaps(normal(N, H, D, V), transposed=transposed)

    inputs = {name: x[name][:, None].double() for name in "qkvg" if name in x}
    o, (state,) = recurrences.gla(**inputs, state=(memory.double(),))

    call = Step(sequences=N, heads=H, query_heads=HO, D=D, V=V, scale=D**-0.5)
    call.key_share, call.query_share = H // HK, max(1, H // HQ)
    for name, tensor in x.items():
        setattr(call, name, Array.of(tensor))
    call.state = Array.of(memory)
    kernels.step(ctypes.byref(call))
    assert_close_by_rows({"o": x["o"]}, {"o": o[:, 0]}, dtype)
    assert_close_by_rows({"state": memory}, {"state": state}, FP32)
    for tensor in (x["o"], memory):
        assert_gaps_unwritten(tensor)


STEPS = {
    "held": {"D": 40, "V": 128},
    "too large": {"D": 72, "V": 132},
    "no packs": {"D": 17, "V": 30},
    "few packs": {"D": 20, "V": 12},
    "wide": {"D": 9, "V": 520},
    "long": {"D": 300, "V": 4},
}


@pytest.mark.parametrize("kind, dtype", [("channel", BF16), ("head", FP32), ("plain", FP16)])
@pytest.mark.parametrize("sizes", STEPS)
def test_step(kernels, sizes, kind, dtype):
    step(kernels, **STEPS[sizes], kind=kind, dtype=dtype)


@pytest.mark.parametrize("H, queries, keys", [(2, 6, 2), (4, 2, 1), (2, 1, 2)])
@pytest.mark.parametrize("sizes", ["held", "too large", "no packs"])
def test_heads_that_share_in_a_step(kernels, sizes, H, queries, keys):
    step(kernels, **STEPS[sizes], kind="channel", dtype=BF16, H=H, queries=queries, keys=keys)


def test_step_of_a_transposed_state(kernels):
    step(kernels, D=20, V=24, kind="channel", dtype=BF16, queries=4, transposed=True)
