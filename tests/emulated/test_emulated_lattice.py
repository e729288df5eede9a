"""The kernels of lattice, emulated on the CPU (tests/emulated): forward and all gradients."""

import ctypes

import pytest
import rounded_chunks
import torch
import torch.nn.functional as F
from draws import STRUCTURES
from emulated import (
    NUMBER,
    POINTER,
    SHARED,
    SHARED_80,
    Array,
    assert_close,
    assert_rest_unwritten,
    guarded_copy,
    guarded_nan,
    load_kernels,
    needs_headers,
    padded_rows,
    round_up_8,
    structure,
)
from girih.ops import LatticeState

pytestmark = needs_headers

OBJECTIVES = ["decode", "encode", "similarity"]


Call = structure(
    (NUMBER, "shared processors"),
    (NUMBER, "batch tokens sequences"),
    (POINTER, "cu_seqlens"),
    (NUMBER, "chunk"),
    (POINTER, "position"),
    (NUMBER, "heads query_heads D M objective"),
    (Array, "q k v gamma g memory step decay last last_step last_decay"),
    (POINTER, "last_position memories ends"),
    (Array, "o dout dq dk dv dgamma"),
    (Array, "dstep ddecay dlast dlast_step dlast_decay dmemory dg"),
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return load_kernels(tmp_path_factory, "lattice")


def run(
    kernels,
    objective,
    chunk,
    lengths,
    *,
    position=None,
    D=64,
    M=64,
    H=1,
    group=1,
    gates=0.2,
    packed=False,
    shared=SHARED,
    processors=4,
    tokens=lambda x: x,
):
    """One call: its tensors by name, inputs and results, and the position at the end of every sequence.

    tokens: maps random keys and values to the keys and values of the call.
    """
    generator = torch.Generator().manual_seed(chunk + sum(lengths))
    N, HQ = len(lengths), H * group
    B, T = (1, sum(lengths) + 3) if packed else (N, lengths[0])

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def state(values):
        padded = guarded_nan(N, H, round_up_8(D), round_up_8(M)).zero_()
        padded[:, :, :D, :M] = values
        return padded

    gated, resumed = gates is not None, position is not None
    first = F.normalize(normal(N, H, D, M), dim=2)
    tensors = {
        "q": padded_rows(B, T, HQ, M, values=normal(B, T, HQ, M)),
        "dout": padded_rows(B, T, HQ, D, values=normal(B, T, HQ, D)),
    }
    for name, width in (("k", M), ("v", D)):
        tensors[name] = padded_rows(
            B, T, H, width, values=tokens(F.normalize(normal(B, T, H, width), dim=-1))
        )
    tensors["gamma"] = guarded_copy(torch.rand(B, T, H, generator=generator) / chunk)
    tensors["g"] = guarded_copy(-gates * torch.rand(B, T, H, generator=generator)) if gated else None
    tensors["memory"], tensors["step"], tensors["decay"] = state(first), None, None
    if resumed:
        step = 0.1 * normal(N, H, D, M)
        tensors["step"] = state(step - first * (first * step).sum(2, keepdim=True))
        tensors["decay"] = guarded_copy(-torch.rand(N, H, generator=generator)) if gated else None
    sizes = tensors["memory"].shape
    tensors |= {name: guarded_nan(*sizes) for name in ("last", "last_step", "dmemory")}
    tensors |= {"dstep": guarded_nan(*sizes) if resumed else None, "dlast": state(normal(N, H, D, M))}
    tensors["dlast_step"] = state(normal(N, H, D, M))
    tensors["dlast_decay"] = guarded_copy(normal(N, H)) if gated else None
    tensors["last_decay"] = guarded_nan(N, H) if gated else None
    tensors["ddecay"] = guarded_nan(N, H) if gated and resumed else None
    tensors |= {
        "o": padded_rows(B, T, HQ, D),
        "dq": padded_rows(B, T, HQ, M),
        "dk": padded_rows(B, T, H, M),
        "dv": padded_rows(B, T, H, D),
    }
    tensors["dgamma"] = guarded_nan(B, T, H)
    tensors["dg"] = guarded_nan(B, T, H) if gated else None

    starts = [sum(lengths[:i]) for i in range(N)]
    cu_seqlens, last_position = (
        guarded_copy(torch.tensor([*starts, sum(lengths)])),
        guarded_nan(N, dtype=torch.int64),
    )
    position = None if position is None else guarded_copy(torch.tensor(position))
    call = Call(
        batch=B, tokens=T, sequences=N, chunk=chunk, heads=H, query_heads=HQ, D=round_up_8(D), M=round_up_8(M)
    )
    call.shared, call.processors = shared, processors
    call.objective = OBJECTIVES.index(objective)
    call.cu_seqlens = cu_seqlens.data_ptr() if packed else None
    call.position = position.data_ptr() if resumed else None
    call.last_position = last_position.data_ptr()
    for name, tensor in tensors.items():
        setattr(call, name, Array.of(tensor))
    chunks = kernels.chunks(ctypes.byref(call))
    memories = guarded_nan(chunks, H, round_up_8(M), round_up_8(D), dtype=torch.bfloat16)
    ends = guarded_nan(chunks, H, 2, round_up_8(M))
    call.memories, call.ends = memories.data_ptr(), ends.data_ptr()
    kernels.run(ctypes.byref(call))
    return tensors, last_position


def check(kernels, objective, chunk, lengths, *, position=None, D=64, M=64, packed=False, **how):
    """One call against the chunk formula in float64.

    The recurrence is no reference for gradients: in a perturbed memory its earlier steps are not tangent.
    """
    tensors, last_position = run(
        kernels, objective, chunk, lengths, position=position, D=D, M=M, packed=packed, **how
    )
    (B, T), N, sizes = tensors["q"].shape[:2], len(lengths), tensors["memory"].shape
    starts = [sum(lengths[:i]) for i in range(N)]
    gated, resumed = tensors["g"] is not None, position is not None
    position = torch.tensor(position) if resumed else None

    widths = {"q": M, "k": M, "v": D, "o": D}
    leaves = {name: tensors[name][..., : widths[name]].double() for name in "qkv"}
    leaves |= {name: tensors[name].double() for name in ("gamma", "g") if tensors[name] is not None}
    state_tensors = {name: tensors[name] for name in ("memory", "step", "decay") if tensors[name] is not None}
    leaves |= {name: (x[:, :, :D, :M] if x.dim() == 4 else x).double() for name, x in state_tensors.items()}
    for leaf in leaves.values():
        leaf.requires_grad_()
    total, o, finals = 0.0, [], []
    for n in range(N):
        row, low = (0, starts[n]) if packed else (n, 0)
        tokens = slice(low, low + lengths[n])
        part = {
            name: leaf[row : row + 1, tokens] for name, leaf in leaves.items() if name not in state_tensors
        }
        own = {name: leaves[name][n : n + 1] for name in state_tensors}
        start = own["memory"]
        if resumed:
            start = LatticeState(own["memory"], own["step"], own.get("decay"), position[n : n + 1])
        out, final = rounded_chunks.lattice(**part, chunk=chunk, objective=objective, state=start)
        total = total + (out * tensors["dout"][row : row + 1, tokens, :, :D].double()).sum()
        for name, x in zip(("dlast", "dlast_step", "dlast_decay"), final[:3], strict=True):
            if x is not None:
                grad = tensors[name][n : n + 1]
                total = total + (x * (grad[:, :, :D, :M] if x.dim() == 4 else grad).double()).sum()
        o.append(out.detach())
        finals.append([None if x is None else x.detach() for x in final])
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)

    tokens = slice(0, sum(lengths) if packed else T)
    for name in ("o", "dq", "dk", "dv", "dgamma", *(["dg"] if gated else [])):
        assert_rest_unwritten(name, tensors[name], tokens)
    want = {"o": torch.cat(o, 1 if packed else 0), "last": torch.cat([x[0] for x in finals])}
    want |= {f"d{n}": x if n in state_tensors else x[:, tokens] for n, x in zip(leaves, found, strict=True)}
    along = (leaves["memory"].detach() * want["dmemory"]).sum(2, keepdim=True)
    want["dmemory"] = want["dmemory"] - leaves["memory"].detach() * along
    if gated:
        want["last_decay"] = torch.cat([x[2] for x in finals])
    got = {}
    for name in want:
        x = tensors[name]
        if name.removeprefix("d") in widths:
            x = x[..., : widths[name.removeprefix("d")]]
        got[name] = x[:, :, :D, :M] if x.shape == sizes else x if x.shape[:2] != (B, T) else x[:, tokens]
    # A larger tolerance: the memory before the chunk and the gradient after it cancel.
    if "ddecay" in want:
        error = (got.pop("ddecay") - want["ddecay"]).norm() / want.pop("ddecay").norm()
        assert error < 0.05, f"ddecay: off by {error:.1%}"
    assert_close(got, want)
    first_positions = [0] * N if position is None else position.tolist()
    assert last_position.tolist() == [(b + n) % chunk for b, n in zip(first_positions, lengths, strict=True)]


@pytest.mark.parametrize(
    "T, objective",
    [*((T, "decode") for T in (1, 15, 16, 17)), *((40, objective) for objective in OBJECTIVES)],
)
def test_every_length(kernels, T, objective):
    check(kernels, objective, 16, [T], position=[5])


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("chunk, T", [(8, 20), (33, 40), (64, 70)])
def test_every_chunk(kernels, chunk, T, objective):
    check(kernels, objective, chunk, [T], gates=0.05)


@pytest.mark.parametrize("objective, rows", [("decode", 1), ("decode", 3), ("encode", 1), ("similarity", 3)])
def test_more_chunks_than_stages(kernels, objective, rows):
    # With four multiprocessors, one row uses two blocks per head, and three rows use one block each.
    check(kernels, objective, 4, [70] * rows, D=24, M=40, gates=0.1)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_rings_that_wrap_around_many_times(kernels, objective):
    check(kernels, objective, 2, [131], position=[1], D=24, M=40, gates=0.05)


def equal_bits(x, y):
    """Equal bits, also in parts that are not written."""
    kind = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return torch.equal(x.contiguous().view(kind), y.contiguous().view(kind))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    "lengths, how",
    [
        ([1], {}),
        ([3], {"position": [2], "gates": None}),
        ([32], {"D": 40}),
        ([90], {"chunk": 3, "position": [1], "M": 24, "group": 3}),
        ([45], {"chunk": 1, "H": 2, "D": 24}),
        ([0, 50, 0, 7, 0], {"chunk": 4, "packed": True, "H": 2, "group": 2, "D": 24, "M": 40}),
        ([0, 50, 0, 7, 0], {"chunk": 4, "packed": True, "position": [3, 1, 2, 2, 1], "gates": None}),
    ],
)
def test_two_blocks_a_head_equal_one(kernels, objective, lengths, how):
    """Two blocks per head if the device has enough multiprocessors. Backward kernels split a head's chunks
    likewise."""
    heads = len(lengths) * how.get("H", 1)
    call = {"chunk": 16} | how
    two, last_position = run(kernels, objective, lengths=lengths, processors=2 * heads, **call)
    one, _ = run(kernels, objective, lengths=lengths, processors=2 * heads - 1, **call)
    check(kernels, objective, lengths=lengths, processors=2 * heads, **call)
    for name, x in two.items():
        assert (x is None and one[name] is None) or equal_bits(x, one[name]), name
    assert last_position.tolist() == [
        (first + length) % call["chunk"]
        for first, length in zip(call.get("position", [0] * len(lengths)), lengths, strict=True)
    ]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_short_chunks_on_a_small_card(kernels, objective):
    """Short chunks use the general kernels here, with more chunks than stages."""
    check(kernels, objective, 8, [75], position=[3], D=24, M=40, gates=0.1, shared=SHARED_80)
    check(kernels, objective, 16, [40], position=[5], shared=SHARED_80)


@pytest.mark.parametrize(
    "objective, chunk, T, D, M",
    [
        *(("decode", 20, 110, 24, 40), ("encode", 33, 180, 40, 24), ("similarity", 20, 110, 24, 72)),
        *(("decode", 17, 80, 72, 24), ("encode", 17, 80, 72, 72)),
    ],
)
def test_more_long_chunks_than_stages(kernels, objective, chunk, T, D, M):
    check(kernels, objective, chunk, [T], position=[3], D=D, M=M, gates=0.05)


@pytest.mark.parametrize(
    "objective, chunk, D, M", [("encode", 16, 128, 64), ("similarity", 16, 72, 128), ("decode", 33, 128, 120)]
)
def test_wide_memories(kernels, objective, chunk, D, M):
    check(kernels, objective, chunk, [35], D=D, M=M, gates=None)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_closed_gates(kernels, objective):
    # Gates that nearly empty the memory leave almost no reads and steps in encode.
    check(kernels, objective, 16, [40], position=[5], D=40, gates=1.0 if objective == "encode" else 8.0)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_grouped_queries(kernels, objective):
    check(kernels, objective, 16, [20], position=[7], D=24, M=40, H=2, group=2)


def test_packed_sequences(kernels):
    how = {"D": 24, "M": 40, "H": 2, "group": 2, "packed": True}
    check(kernels, "decode", 16, [12, 3, 16, 0], position=[7, 5, 1, 3], **how)
    check(kernels, "encode", 16, [20, 0, 12], D=24, packed=True)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_reads_are_bounded(kernels, structure, objective):
    """With repeated tokens and closed gates, norms are small differences; their floor keeps reads bounded."""
    for chunk, gates in ((8, 5.0), (16, 5.0), (16, 40.0), (64, 5.0)):
        tokens = STRUCTURES[structure]
        results, _ = run(kernels, objective, chunk, [chunk + 20], D=24, M=24, gates=gates, tokens=tokens)
        label = f"chunks of {chunk}, gates to {-gates}"
        ratio = (results["o"].float().abs().amax(-1) / results["q"].float().abs().sum(-1)).max()
        assert ratio <= 2, f"{label}: {ratio:.2g} sum |q|"
        for name in ("dq", "dk", "dv", "dgamma", "dg", "dmemory"):
            assert results[name].isfinite().all(), f"{label}: {name}"
