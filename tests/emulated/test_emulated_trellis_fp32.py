"""The fp32 kernels of trellis and ttt, emulated on the CPU (tests/emulated): forward and gradients."""

import ctypes

import pytest
import recurrences
import torch
import torch.nn.functional as F
from emulated import (
    NUMBER,
    POINTER,
    Array,
    assert_near,
    assert_padding_unwritten,
    guarded_copy,
    guarded_nan,
    load_kernels,
    nan_padded_copy,
    needs_headers,
    padded_rows,
    round_up_8,
    structure,
)
from test_emulated_trellis import MAPS

pytestmark = needs_headers

Call = structure(
    (NUMBER, "batch tokens sequences"),
    (POINTER, "cu_seqlens position"),
    (NUMBER, "memory_count chunk heads query_heads D V M silu norm f_silu f_norm"),
    (Array, "q"),
    (Array * 2, "x"),
    (Array, "a weight gamma g"),
    (Array * 2, "first initial"),
    (Array, "o"),
    (Array * 2, "last_first last"),
    (Array, "dout"),
    (Array * 2, "dlast_first dlast"),
    (Array, "dq"),
    (Array * 2, "dx da"),
    (Array, "dweight dgamma dg"),
    (Array * 2, "dfirst dinitial"),
    (POINTER, "last_position"),
)
OF_MEMORIES = ("first", "initial", "last_first", "last", "dlast_first", "dlast", "dfirst", "dinitial")
PAIRS = ("x", "dx", "da", *OF_MEMORIES)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return load_kernels(tmp_path_factory, "trellis")


def expected(data, weight, memories, position, lengths, packed, chunk, maps, grads):
    """Results of the recurrence in float64: o, the last memories, and the gradients of data and memories by
    name. A resumed chunk has the given first memory at any position."""
    memory_count = 2 if "v" in data else 1
    leaves = {name: x.double().requires_grad_() for name, x in (data | weight | memories).items()}
    total, o, finals = 0.0, [], []
    for n, length in enumerate(lengths):
        row, low = (0, sum(lengths[:n])) if packed else (n, 0)
        tokens = slice(low, low + length)
        part = {name: leaves[name][row : row + 1, tokens] for name in data}
        part |= maps | {"chunk": chunk}
        A = [leaves[f"initial{m}"][n : n + 1] for m in range(memory_count)]
        start = A if memory_count == 2 else A[0]
        if position is not None:
            first = [leaves[f"first{m}"][n : n + 1] for m in range(memory_count)]
            start = (*(x for pair in zip(first, A, strict=True) for x in pair), position[n : n + 1])
        if memory_count == 2:
            out, final = recurrences.trellis(**part, state=start)
        else:
            out, final = recurrences.ttt(**part, **{n: leaves[n] for n in weight}, state=start)
        total = total + (out * grads["dout"][row : row + 1, tokens].double()).sum()
        for m in range(memory_count):
            for name, x in (("dlast_first", final[2 * m]), ("dlast", final[2 * m + 1])):
                total = total + (x * grads[f"{name}{m}"][n : n + 1].double()).sum()
        o.append(out.detach())
        finals.append([x.detach() for x in final])
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    want = {"o": torch.cat(o, 1 if packed else 0)}
    for m in range(memory_count):
        want[f"last_first{m}"] = torch.cat([x[2 * m] for x in finals])
        want[f"last{m}"] = torch.cat([x[2 * m + 1] for x in finals])
    return want | {f"d{name}": x for name, x in zip(leaves, found, strict=True)}, [x[-1] for x in finals]


def check(
    kernels,
    *lengths,
    chunk=1,
    D=20,
    V=24,
    M=17,
    H=1,
    group=1,
    gates=None,
    position=None,
    packed=False,
    phi="ln_silu",
    f="ln_silu",
    dtype=torch.float32,
    most=1e-5,
    memory_count=2,
    weighted=False,
):
    """With one pass (ttt) there is no V, and the rows of o and of its gradient have M columns in vectors of
    8."""
    generator = torch.Generator().manual_seed(D + M + chunk + sum(lengths))
    N, HQ, widths = len(lengths), H * group, (D, V)[:memory_count]
    V, out = (V, V) if memory_count == 2 else (0, M)
    B, T = (1, sum(lengths) + 3) if packed else (N, lengths[0])

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def unit(x):
        return F.normalize(x, dim=-1) if phi in ("identity", "silu") else x

    data = {"q": normal(B, T, HQ, D)}
    data |= {name: unit(normal(B, T, H, width)) for name, width in zip("kv", widths, strict=False)}
    data["a"] = normal(B, T, H, M)
    weight = {"phi_weight": 1 + 0.25 * normal(H, M)} if weighted else {}
    data = {name: x.to(dtype) for name, x in data.items()}
    data["gamma"] = torch.rand(B, T, H, generator=generator) / max(chunk, 8)
    if gates is not None:
        data["g"] = -gates * torch.rand(B, T, H, generator=generator)
    position = None if position is None else torch.tensor(position)
    names = ("initial",) if position is None else ("initial", "first")
    both = {m: (N, H, M, widths[m]) for m in range(memory_count)}
    memories = {f"{name}{m}": normal(*both[m]) * widths[m] ** -0.5 for name in names for m in both}
    grads = {"dout": normal(B, T, HQ, out).to(dtype)}
    grads |= {f"{name}{m}": normal(*both[m]) for name in ("dlast_first", "dlast") for m in both}

    def packs(x):
        return padded_rows(*x.shape, values=x, dtype=x.dtype)

    def unpadded_rows(x):
        return guarded_copy(F.pad(x, (0, round_up_8(x.shape[-1]) - x.shape[-1])))

    # Reads use rows padded to vectors of 8; the other tensors are not padded.
    tensors = {"q": packs(data["q"])} | {f"x{m}": packs(data["kv"[m]]) for m in both}
    tensors |= {"a": nan_padded_copy(data["a"]), "gamma": nan_padded_copy(data["gamma"])}
    if weighted:
        tensors |= {
            "weight": unpadded_rows(weight["phi_weight"]),
            "dweight": guarded_nan(B, T, H, round_up_8(M)),
        }
    tensors |= {"dout": packs(grads["dout"]) if memory_count == 2 else unpadded_rows(grads["dout"])}
    tensors |= {n: nan_padded_copy(x) for n, x in memories.items()}
    tensors |= {name: nan_padded_copy(x) for name, x in grads.items() if name != "dout"}
    if gates is not None:
        tensors |= {"g": guarded_copy(data["g"]), "dg": guarded_nan(memory_count, B, T, H)}
    tensors |= {
        "o": padded_rows(B, T, HQ, V, dtype=dtype)
        if memory_count == 2
        else guarded_nan(B, T, HQ, round_up_8(M))
    }
    tensors |= {"dq": padded_rows(B, T, HQ, D, dtype=dtype)}
    tensors |= {"dgamma": guarded_nan(memory_count, B, T, H)}
    for m in both:
        tensors |= {
            f"dx{m}": guarded_nan(B, T, H, round_up_8(widths[m])),
            f"da{m}": guarded_nan(B, T, H, round_up_8(M)),
        }
        nan = torch.full(both[m], torch.nan)
        outputs = ("last_first", "last", *(f"d{name}" for name in names))
        tensors |= {f"{name}{m}": nan_padded_copy(nan) for name in outputs}

    bounds = guarded_copy(torch.tensor([sum(lengths[:i]) for i in range(N + 1)]))
    first_positions, last_position = guarded_copy(position), guarded_nan(N, dtype=torch.int64)
    call = Call(
        batch=B, tokens=T, sequences=N, memory_count=memory_count, chunk=chunk, heads=H, query_heads=HQ
    )
    call.D, call.V, call.M = D, V, M
    (call.silu, call.norm), (call.f_silu, call.f_norm) = MAPS[phi], MAPS[f]
    call.cu_seqlens = bounds.data_ptr() if packed else None
    call.position = None if position is None else first_positions.data_ptr()
    call.last_position = last_position.data_ptr()
    for name, x in tensors.items():
        if name[:-1] in PAIRS:
            getattr(call, name[:-1])[int(name[-1])] = Array.of(x)
        else:
            setattr(call, name, Array.of(x))
    finals = [tensors[f"{name}{m}"] for name in ("last_first", "last") for m in both]
    results = [tensors["o"], last_position, *finals]
    kernels.run_fp32_forward(ctypes.byref(call))
    alone = [result.clone() for result in results]
    for result in results:
        result.fill_(-1 if result.dtype == torch.int64 else torch.nan)
    kernels.run_fp32(ctypes.byref(call))
    for without, result in zip(alone, results, strict=True):
        assert torch.equal(without.nan_to_num(), result.nan_to_num()), "saved tensors change a result"

    maps = {"phi": phi, "f": f}
    want, positions = expected(data, weight, memories, position, lengths, packed, chunk, maps, grads)
    assert last_position.tolist() == [int(x) for x in positions]
    got = {name: x for name, x in tensors.items() if name in want}
    got |= {"o": tensors["o"][..., :out], "dq": tensors["dq"][..., :D], "dgamma": tensors["dgamma"].sum(0)}
    got |= {f"d{'kv'[m]}": tensors[f"dx{m}"][..., : widths[m]] for m in both}
    got["da"] = sum(tensors[f"da{m}"] for m in both)[..., :M]
    if weighted:
        got["dphi_weight"] = tensors["dweight"][:, : sum(lengths) if packed else T].sum((0, 1))[..., :M]
    if gates is not None:
        got["dg"] = tensors["dg"].sum(0)
    assert got.keys() == want.keys()
    tokens = slice(0, sum(lengths) if packed else T)
    for name, x in want.items():
        result = got[name]
        if name in ("o", *(f"d{n}" for n in data)):
            result, x = result[:, tokens], x[:, tokens]
        assert_near(name, result, x, most)
    for name in (name for name in tensors if name[:-1] in OF_MEMORIES):
        assert_padding_unwritten(name, tensors[name])


EVERY = {"gates": 0.3, "H": 2, "group": 2}


@pytest.mark.parametrize("how", [{}, EVERY], ids=["start", "resumed"])
@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 33, 64])
def test_every_chunk(kernels, chunk, how):
    check(kernels, 70, chunk=chunk, position=[chunk * 2 // 3] if chunk > 1 and how else None, **how)


@pytest.mark.parametrize("phi", MAPS)
@pytest.mark.parametrize("f", ["ln_silu", "softmax", "silu"])
def test_every_map(kernels, phi, f):
    check(kernels, 12, chunk=5, phi=phi, f=f, gates=0.2)


@pytest.mark.parametrize("f", MAPS)
def test_every_map_of_reads(kernels, f):
    check(kernels, 6, chunk=4, f=f)


@pytest.mark.parametrize("T", [0, 1, 63, 64, 65, 128, 129])
@pytest.mark.parametrize("chunk, position", [(1, None), (7, [3]), (40, [39])])
def test_every_length(kernels, T, chunk, position):
    check(kernels, T, chunk=chunk, position=position, gates=0.1)


@pytest.mark.parametrize("D, V, M", [(1, 3, 2), (3, 1, 1), (64, 64, 64), (65, 20, 72), (128, 100, 128)])
def test_every_width(kernels, D, V, M):
    check(kernels, 9, D=D, V=V, M=M, chunk=3, gates=0.1, position=[1])


@pytest.mark.parametrize(
    "phi, D, V, M", [("ln_silu", 129, 20, 30), ("softmax", 40, 256, 200), ("l2_silu", 250, 130, 256)]
)
def test_wider_than_the_tensor_cores(kernels, phi, D, V, M):
    check(kernels, 12, D=D, V=V, M=M, phi=phi, f=phi, chunk=5, gates=0.1, position=[2])


def test_wide_chunks_in_several_runs(kernels):
    """A chunk has more tokens than a run holds."""
    check(kernels, 70, D=130, V=40, M=20, chunk=64, gates=0.1, position=[50], H=2, group=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(kernels, dtype):
    check(kernels, 10, D=140, chunk=4, dtype=dtype, most=0.01)


def test_packed_sequences(kernels):
    check(kernels, 12, 0, 1, 70, packed=True, gates=0.1)
    check(kernels, 12, 3, 16, 0, 66, chunk=5, position=[4, 2, 1, 1, 3], packed=True, **EVERY)


@pytest.mark.parametrize("chunk", [1, 6])
def test_closed_gates(kernels, chunk):
    check(kernels, 70, chunk=chunk, gates=8.0, phi="silu", f="silu", most=1e-4)


# ---- one memory, ttt's -----------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("phi", MAPS)
@pytest.mark.parametrize("f", ["layer_norm", "softmax", "identity"])
def test_one_memory_by_every_map(kernels, phi, f, weighted):
    check(kernels, 12, chunk=5, phi=phi, f=f, gates=0.2, memory_count=1, weighted=weighted)


@pytest.mark.parametrize("how", [{}, EVERY], ids=["start", "resumed"])
@pytest.mark.parametrize("chunk", [1, 7, 33, 64])
def test_one_memory_in_every_chunk(kernels, chunk, how):
    position = [chunk * 2 // 3] if chunk > 1 and how else None
    maps = {"phi": "layer_norm", "f": "identity"}
    check(kernels, 70, chunk=chunk, position=position, **maps, **how, memory_count=1, weighted=True)


@pytest.mark.parametrize("D, M", [(1, 1), (3, 1), (64, 64), (65, 20), (100, 128), (20, 140), (256, 256)])
def test_one_memory_of_every_width(kernels, D, M):
    check(kernels, 9, D=D, M=M, chunk=3, gates=0.1, position=[1], memory_count=1, weighted=True)


def test_one_memory_of_packed_sequences(kernels):
    maps = {"phi": "layer_norm", "f": "identity", "memory_count": 1}
    check(kernels, 12, 0, 1, 70, packed=True, gates=0.1, **maps)
    how = {"chunk": 5, "position": [4, 2, 1, 1, 3], "packed": True} | EVERY | maps
    check(kernels, 12, 3, 16, 0, 66, **how, weighted=True)
