"""The kernels of gsa, emulated on the CPU (tests/emulated): forward, all gradients and the step."""

import ctypes

import pytest
import recurrences
import torch
from emulated import (
    NUMBER,
    SHARED,
    SHARED_80,
    SHARED_86,
    Array,
    guarded_nan,
    load_kernels,
    needs_headers,
    padded_rows,
    round_up_8,
    structure,
)
from emulated_gated import (
    BF16,
    FEATURES,
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

Call = structure(*GATED, (NUMBER, "is_s_tied"), (Array, "logits first_z last_z dlast_z dlogits dfirst_z"))
Step = structure(
    (NUMBER, "sequences heads query_heads D V M feature"),
    (ctypes.c_double, "scale"),
    (Array, "q k v s g"),
    (Array * 2, "state"),
    (Array, "z o"),
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return load_kernels(tmp_path_factory, "gsa", sizes=())


def check(
    kernels,
    lengths,
    kind="s_g",
    *,
    dtype=BF16,
    use_fp32=False,
    D=64,
    V=64,
    M=64,
    H=1,
    group=1,
    pattern="mild",
    packing=None,
    resumed=True,
    feature="softmax",
    scale=None,
    shared=SHARED,
    cut=True,
):
    """One call against the recurrence in float64. kind: gates and weights, gates only, or ABC's logits."""
    generator = torch.Generator().manual_seed(sum(lengths) + D + 2 * V + 3 * M)
    layout, N, HQ, scale = (
        Layout(lengths, packing),
        len(lengths),
        H * group,
        D**-0.5 if scale is None else scale,
    )
    B, T, use_fp32 = layout.B, layout.T, use_fp32 or dtype == FP32 or kind == "abc"
    inner = FP32 if use_fp32 else dtype
    part = dtype if use_fp32 or group == 1 else FP32
    heads_of_parts = H if use_fp32 else HQ

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    x = {
        "q": padded_rows(B, T, HQ, D, values=normal(B, T, HQ, D), dtype=dtype),
        "k": padded_rows(B, T, H, D, values=normal(B, T, H, D), dtype=dtype),
        "v": padded_rows(B, T, H, V, values=normal(B, T, H, V), dtype=dtype),
        "dout": padded_rows(B, T, HQ, V, values=normal(B, T, HQ, V), dtype=dtype),
        "o": padded_rows(B, T, HQ, V, dtype=dtype),
        "dq": padded_rows(B, T, HQ, D, dtype=dtype),
        "dk": padded_rows(B, T, heads_of_parts, D, dtype=part),
        "dv": padded_rows(B, T, heads_of_parts, V, dtype=part),
    }
    z = {}
    if kind == "abc":
        z["logits"] = 3 * normal(B, T, H, M)
        z["logits"][:, ::7, :, ::3] = -torch.inf
        z |= {"dlogits": guarded_nan(B, T, H, M), "last_z": guarded_nan(N, H, M)}
        z["dlast_z"] = normal(N, H, M)
        if resumed:
            z |= {"first_z": normal(N, H, M), "dfirst_z": guarded_nan(N, H, M)}
    else:
        g = gates(pattern, (B, T, H, M), generator)
        x["g"] = padded_rows(B, T, H, M, values=g, dtype=FP32)
        s = torch.rand((B, T, H, M), generator=generator) / 2 if kind == "s_g" else -torch.expm1(g)
        if kind == "s_g" or use_fp32:
            x["s"] = padded_rows(B, T, H, M, values=s, dtype=inner)
        x["dg"] = padded_rows(B, T, heads_of_parts, M, dtype=FP32)
    if kind == "s_g":
        x["ds"] = padded_rows(B, T, heads_of_parts, M, dtype=FP32 if use_fp32 else part)
    widths, sizes = (D, V), ((N, H, D, M), (N, H, M, V))
    first = [normal(*size) if resumed else None for size in sizes]
    dlast = [normal(*size) for size in sizes]

    # The value memory is transposed, with values as rows: by strides (initial), or in memory.
    two = {"dlast": [state(N, H, D, M, dlast[0]), state(N, H, V, M, dlast[1].mT)], "initial": [None, None]}
    if resumed:
        transposed = state(N, H, V, M, first[1].mT).mT.contiguous().mT
        two["initial"] = [state(N, H, D, M, first[0]), transposed]
    two |= {name: [state(N, H, width, M) for width in widths] for name in ("last", "dinitial")}

    call = Call(
        heads=H, query_heads=HQ, D=round_up_8(D), V=round_up_8(V), M=round_up_8(M), slots=M, scale=scale
    )
    layout.fill(call)
    call.feature, call.use_fp32, call.is_s_tied = FEATURES.index(feature), use_fp32, kind == "g"
    call.shared, call.processors = shared, 132 if cut else 1
    for name, tensor in (x | z).items():
        setattr(call, name, Array.of(tensor))
    for name, pair in two.items():
        setattr(call, name, (Array * 2)(*map(Array.of, pair)))
    kernels.run(ctypes.byref(call))

    own = {"q": D, "k": D, "v": V, "s": M, "g": M}
    input_names = [n for n in own if n in "qkv" or (kind != "abc" and (n == "g" or kind == "s_g"))]
    leaves = {n: x[n][..., : own[n]].double() for n in input_names}
    if kind == "abc":
        leaves["s"] = z["logits"].double()
    state_leaves = {}
    if resumed:
        state_leaves = {"state_k": first[0].double(), "state_v": first[1].double()}
        if kind == "abc":
            state_leaves["state_z"] = z["first_z"].double()
    leaves |= state_leaves
    for leaf in leaves.values():
        leaf.requires_grad_()
    total, o, finals = 0.0, [], []
    for n in range(N):
        tokens = {name: leaf[layout.index(n)] for name, leaf in leaves.items() if name not in state_leaves}
        start = tuple(leaf[n : n + 1] for leaf in state_leaves.values())
        start = (*start, *[None] * (3 - len(start))) if start else None
        out, final = recurrences.gsa(**tokens, scale=scale, feature=feature, state=start)
        total = total + (out * x["dout"][layout.index(n)][..., :V].double()).sum()
        total = total + sum((final[m] * dlast[m][n : n + 1].double()).sum() for m in range(2))
        if kind == "abc":
            total = total + (final[2] * z["dlast_z"][n : n + 1].double())[final[2] > -torch.inf].sum()
        o.append(out.detach()[0])
        finals.append([None if y is None else y.detach() for y in final])
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)

    want = {"o": torch.cat(o), "last_k": torch.cat([f[0] for f in finals])}
    want["last_v"] = torch.cat([f[1] for f in finals])
    want |= {f"d{n}": y if n in state_leaves else y[layout.owned] for n, y in zip(leaves, found, strict=True)}
    got = {"o": x["o"][layout.owned][..., :V], "dq": x["dq"][layout.owned][..., :D]}
    for name in ("dk", "dv", "ds", "dg"):
        if name in want and (kind != "abc" or name in ("dk", "dv")):
            parts = x[name].unflatten(2, (H, -1)).sum(3) if heads_of_parts == HQ else x[name]
            got[name] = parts[layout.owned][..., : own[name[1]]]
    got |= {"last_k": two["last"][0][:, :, :D, :M], "last_v": two["last"][1].mT[:, :, :M, :V]}
    if resumed:
        got["dstate_k"] = two["dinitial"][0][:, :, :D, :M]
        got["dstate_v"] = two["dinitial"][1].mT[:, :, :M, :V]
    if kind == "abc":
        got["ds"] = z["dlogits"][layout.owned]
        if resumed:
            got |= {"dstate_z": z["dfirst_z"], "last_z": z["last_z"]}
            want["last_z"] = torch.cat([f[2] for f in finals])
    assert_close_by_rows(got, want, dtype, kinks=feature == "relu")
    for name in ("o", "dq", "dk", "dv", *(name for name in ("ds", "dg") if name in x)):
        layout.assert_rest_unwritten(name, x[name])


@pytest.mark.parametrize("T", [0, 1, 15, 64, 65])
@pytest.mark.parametrize("kind", ["s_g", "g", "abc"])
def test_every_length(kernels, T, kind):
    check(kernels, [T], kind, D=72, V=40, M=24)


@pytest.mark.parametrize("pattern", ["ordinary", "steady", "once", "mild", "full", "strong", "sudden"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("kind", ["s_g", "g"])
def test_every_gate(kernels, kind, dtype, pattern):
    check(kernels, [129], kind, dtype=dtype, pattern=pattern)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    "kind, M, pattern, scale",
    [("s_g", 64, "rising", 0.05), ("g", 128, "rising", 0.05)]
    + [("s_g", M, "growing", 1e-4) for M in (64, 128)],
)
def test_gates_above_0(kernels, kind, M, dtype, pattern, scale):
    """Memories grow for some tokens. The scale keeps every softmax away from a single slot, where dq loses
    precision."""
    check(kernels, [129], kind, dtype=dtype, M=M, pattern=pattern, scale=scale)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_weights_of_gates_far_above_0(kernels, dtype):
    """s = 1 - e^g for g where a series expansion is not accurate."""
    check(kernels, [66], "g", dtype=dtype, pattern="leaping", scale=0.05)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("feature, scale", [*((name, None) for name in FEATURES), ("softmax", -0.3)])
def test_every_feature(kernels, feature, scale, dtype):
    check(kernels, [66], dtype=dtype, D=24, V=40, M=20, feature=feature, scale=scale)


@pytest.mark.parametrize("pattern", ["mild", "strong"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("D, V, M", [(20, 130, 17), (130, 24, 64), (64, 64, 128), (72, 72, 100)])
def test_every_width(kernels, D, V, M, dtype, pattern):
    check(kernels, [70], "s_g" if dtype == BF16 else "g", dtype=dtype, D=D, V=V, M=M, pattern=pattern)


@pytest.mark.parametrize("kind", ["s_g", "abc"])
@pytest.mark.parametrize("D, V, M", [(20, 130, 17), (130, 24, 64), (72, 72, 200)])
def test_every_width_of_the_fp32_kernels(kernels, D, V, M, kind):
    check(kernels, [70], kind, dtype=BF16 if M == 64 else FP32, use_fp32=True, D=D, V=V, M=M)


@pytest.mark.parametrize("pattern", ["mild", "strong"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kind, M", [("s_g", 20), ("g", 72), ("abc", 20)])
def test_grouped_queries(kernels, kind, M, dtype, pattern):
    check(kernels, [66], kind, dtype=dtype, D=24, V=40, M=M, H=2, group=2, pattern=pattern)


@pytest.mark.parametrize("pattern", ["mild", "strong"])
@pytest.mark.parametrize("kind, M", [("s_g", 72), ("g", 128)])
def test_many_slots_on_a_smaller_card(kernels, kind, M, pattern):
    """The kernel of the key gradients processes one memory after the other."""
    check(kernels, [66], kind, D=72, V=136, M=M, H=2, group=2, pattern=pattern, shared=SHARED_80)


@pytest.mark.parametrize("packing", ["packed", "rows"])
@pytest.mark.parametrize("kind, dtype", [("s_g", BF16), ("g", FP16), ("s_g", FP32), ("abc", BF16)])
def test_sequences_of_their_own_lengths(kernels, kind, dtype, packing):
    check(kernels, [30, 0, 70, 64, 1, 129], kind, dtype=dtype, D=24, V=40, M=17, H=2, packing=packing)


@pytest.mark.parametrize("kind, dtype", [("s_g", BF16), ("g", BF16), ("s_g", FP32), ("abc", BF16)])
def test_no_first_state(kernels, kind, dtype):
    check(kernels, [70, 70], kind, dtype=dtype, D=24, V=40, M=40, resumed=False)


# At least 6 chunks, which the emulator's tile/segments.h cuts into segments.
@pytest.mark.parametrize(
    "kind, dtype, shared", [("s_g", BF16, SHARED), ("g", FP16, SHARED_80), ("g", BF16, SHARED_86)]
)
@pytest.mark.parametrize("D, M", [(24, 17), (72, 72)])
def test_long_sequences(kernels, D, M, kind, dtype, shared):
    shared = max(shared, SHARED_80) if M > 64 else shared  # M > 64 needs the shared memory of sm_80
    check(kernels, [390], kind, dtype=dtype, D=D, V=40, M=M, shared=shared)
    if D == 24:
        check(kernels, [385, 20], kind, dtype=dtype, D=D, V=40, M=M, packing="packed", shared=shared)


# More chunks than stages of the scan, without segments.
@pytest.mark.parametrize("shared", [SHARED, SHARED_80, SHARED_86])
def test_more_chunks_than_stages(kernels, shared):
    check(kernels, [500], D=24, V=24, M=40, shared=shared, cut=False)


STEPS = {
    "held": {"D": 64, "V": 64, "M": 64},
    "too large": {"D": 64, "V": 68, "M": 64},
    "no packs": {"D": 20, "V": 30, "M": 17},
    "few packs": {"D": 7, "V": 12, "M": 20},
    "wide": {"D": 9, "V": 520, "M": 12},
    "many slots": {"D": 9, "V": 4, "M": 520},
}


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("kind, dtype", [("s_g", BF16), ("g", FP32), ("abc", FP16)])
@pytest.mark.parametrize("sizes", STEPS)
def test_step(kernels, sizes, kind, dtype, group):
    step(kernels, **STEPS[sizes], kind=kind, dtype=dtype, group=group)


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_of_a_step(kernels, feature):
    step(kernels, D=20, V=24, M=40, kind="s_g", dtype=FP32, group=2, feature=feature)


@pytest.mark.parametrize("transposed", [(True, False), (False, True)])
def test_step_of_a_transposed_state(kernels, transposed):
    step(kernels, D=20, V=24, M=40, kind="s_g", dtype=BF16, group=2, transposed=transposed)


def step(kernels, D, V, M, kind, dtype, group, feature="softmax", transposed=(False, False)):
    generator = torch.Generator().manual_seed(D + V + M + group)
    N, H, HQ = 3, 2, 2 * group

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    x = {"q": with_gaps(normal(N, HQ, D), dtype, True), "k": with_gaps(normal(N, H, D), dtype)}
    x["v"] = with_gaps(normal(N, H, V), dtype, True)
    if kind == "s_g":
        x["s"] = with_gaps(torch.rand((N, H, M), generator=generator), dtype, True)
    if kind == "abc":
        x["s"] = with_gaps(3 * normal(N, H, M), dtype)
        x["s"][0, :, ::3] = -torch.inf
    else:
        x["g"] = with_gaps(gates("strong", (N, H, M), generator), dtype)
    sizes = ((N, H, D, M), (N, H, M, V))
    memories = [
        with_gaps(normal(*size), transposed=which) for size, which in zip(sizes, transposed, strict=True)
    ]
    z = normal(N, H, M)
    z[1] = -torch.inf
    x |= {
        "o": with_gaps(torch.full((N, HQ, V), torch.nan), dtype),
        "z": with_gaps(z) if kind == "abc" else None,
    }

    inputs = {name: x[name][:, None].double() for name in "qkvsg" if name in x}
    start = (*(memory.double() for memory in memories), z.double())
    o, state = recurrences.gsa(**inputs, feature=feature, state=start)

    call = Step(sequences=N, heads=H, query_heads=HQ, D=D, V=V, M=M, scale=D**-0.5)
    call.feature = FEATURES.index(feature)
    for name, tensor in x.items():
        setattr(call, name, Array.of(tensor))
    call.state = (Array * 2)(*map(Array.of, memories))
    kernels.step(ctypes.byref(call))
    assert_close_by_rows({"o": x["o"]}, {"o": o[:, 0]}, dtype)
    got, want = {"k": memories[0], "v": memories[1]}, {"k": state[0], "v": state[1]}
    if kind == "abc":
        empty = state[2] == -torch.inf
        assert (x["z"][empty] == -torch.inf).all()
        got["z"], want["z"] = x["z"].masked_fill(empty, 0.0), state[2].masked_fill(empty, 0.0)
    assert_close_by_rows(got, want, FP32)
    for tensor in (x["o"], *memories):
        assert_gaps_unwritten(tensor)
