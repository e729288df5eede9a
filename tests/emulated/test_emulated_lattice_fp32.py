"""The fp32 kernels of lattice, emulated on the CPU (tests/emulated): forward and all gradients."""

import ctypes

import pytest
import recurrences
import rounded_chunks
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
    structure,
)
from girih.ops import LatticeState

pytestmark = needs_headers

OBJECTIVES = ["decode", "encode", "similarity"]
Call = structure(
    (NUMBER, "batch tokens sequences"),
    (POINTER, "cu_seqlens position"),
    (NUMBER, "chunk heads query_heads D M objective normalize"),
    (ctypes.c_double, "shrinkage"),
    (Array, "q k v gamma g memory step decay"),
    (Array, "last last_step last_decay o dout dlast dlast_step dlast_decay"),
    (Array, "dq dk dv dgamma dg dmemory dstep ddecay"),
    (POINTER, "last_position"),
)
OF_STATE = ("memory", "step", "decay")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return load_kernels(tmp_path_factory, "lattice")


def check(
    kernels,
    *lengths,
    chunk=1,
    objective="decode",
    D=20,
    M=24,
    H=1,
    group=1,
    gates=None,
    position=None,
    packed=False,
    normalize=True,
    shrinkage=0.0,
    dtype=torch.float32,
    most=1e-5,
):
    generator = torch.Generator().manual_seed(D + M + chunk + sum(lengths))
    N, HQ = len(lengths), H * group
    B, T = (1, sum(lengths) + 3) if packed else (N, lengths[0])

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def unit(*shape, dim=-1):
        return F.normalize(normal(*shape), dim=dim)

    gated, resumed = gates is not None, position is not None
    first = unit(N, H, D, M, dim=2) * (1 if normalize else 0.5 + torch.rand(M, generator=generator))
    inputs = {"q": normal(B, T, HQ, M), "k": unit(B, T, H, M), "v": unit(B, T, H, D)}
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    inputs["gamma"] = torch.rand(B, T, H, generator=generator) / max(chunk, 2)
    inputs |= {"g": -gates * torch.rand(B, T, H, generator=generator)} if gated else {}
    inputs["memory"] = first
    if resumed:
        step = 0.1 * normal(N, H, D, M)
        inputs["step"] = step - first * (first * step).sum(2, keepdim=True)
        inputs |= {"decay": -torch.rand(N, H, generator=generator)} if gated else {}
    grads = {"dout": normal(B, T, HQ, D).to(dtype), "dlast": normal(N, H, D, M)}
    grads["dlast_step"] = normal(N, H, D, M)
    grads |= {"dlast_decay": normal(N, H)} if gated else {}
    outs = {"o": torch.zeros(B, T, HQ, D, dtype=dtype), "last": first, "last_step": first}
    outs |= {"last_decay": torch.zeros(N, H)} if gated else {}
    outs |= {f"d{name}": x for name, x in inputs.items()}
    tensors = {name: nan_padded_copy(x) for name, x in (inputs | grads).items()}
    tensors |= {name: nan_padded_copy(torch.full_like(x, torch.nan)) for name, x in outs.items()}

    starts = [sum(lengths[:i]) for i in range(N)]
    bounds, last_position = (
        guarded_copy(torch.tensor([*starts, sum(lengths)])),
        guarded_nan(N, dtype=torch.int64),
    )
    first_positions = guarded_copy(torch.tensor([0] * N if position is None else position))
    call = Call(batch=B, tokens=T, sequences=N, chunk=chunk, heads=H, query_heads=HQ, D=D, M=M)
    call.objective, call.normalize, call.shrinkage = OBJECTIVES.index(objective), normalize, shrinkage
    call.cu_seqlens = bounds.data_ptr() if packed else None
    call.position = first_positions.data_ptr() if resumed else None
    call.last_position = last_position.data_ptr()
    for name, tensor in tensors.items():
        setattr(call, name, Array.of(tensor))
    kernels.run_fp32(ctypes.byref(call))

    leaves = {name: x.double().requires_grad_() for name, x in inputs.items()}
    total, o, finals = 0.0, [], []
    for n in range(N):
        row, low = (0, starts[n]) if packed else (n, 0)
        tokens = slice(low, low + lengths[n])
        part = {name: x[row : row + 1, tokens] for name, x in leaves.items() if name not in OF_STATE}
        own = {name: leaves[name][n : n + 1] for name in OF_STATE if name in leaves}
        S = own["memory"]
        if normalize:  # perturbations stay on the sphere
            fixed = S.detach()
            S = fixed + (S - fixed) - fixed * (fixed * (S - fixed)).sum(2, keepdim=True)
        how = {"chunk": chunk, "objective": objective}
        if resumed:
            # The recurrence is no reference for gradients: in a perturbed memory its earlier steps are not
            # tangent.
            start = LatticeState(S, own["step"], own.get("decay"), first_positions[n : n + 1])
            out, final = rounded_chunks.lattice(**part, **how, state=start)
        else:
            how |= {"normalize": normalize, "shrinkage": shrinkage}
            out, final = recurrences.lattice(**part, **how, state=S)
        total = total + (out * grads["dout"][row : row + 1, tokens].double()).sum()
        for name, x in zip(("dlast", "dlast_step", "dlast_decay"), final[:3], strict=True):
            if x is not None:
                total = total + (x * grads[name][n : n + 1].double()).sum()
        o.append(out.detach())
        finals.append([None if x is None else x.detach() for x in final])
        assert last_position[n] == (first_positions[n] + lengths[n]) % chunk
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)

    tokens = slice(0, sum(lengths) if packed else T)
    want = {"o": torch.cat(o, 1 if packed else 0), "last": torch.cat([x[0] for x in finals])}
    want["last_step"] = torch.cat([x[1] for x in finals])
    want |= {"last_decay": torch.cat([x[2] for x in finals])} if gated else {}
    want |= {f"d{n}": x if n in OF_STATE else x[:, tokens] for n, x in zip(leaves, found, strict=True)}
    got = {name: tensors[name] for name in want}
    got = {name: x[:, tokens] if x.shape[:2] == (B, T) else x for name, x in got.items()}
    if chunk == 1:  # every token completes a chunk
        assert not got.pop("last_step").any() and want.pop("last_step").abs().max() < 1e-9
    for name, x in want.items():
        assert_near(name, got[name], x, most)
    for name, x in tensors.items():
        assert_padding_unwritten(name, x)


EVERY = {"gates": 0.3, "H": 2, "group": 2}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("chunk, how", [(1, {}), (1, EVERY), (2, {}), (7, EVERY), (16, EVERY)])
def test_every_chunk_and_objective(kernels, chunk, objective, how):
    position = [chunk // 2] if chunk > 1 and how else None
    check(kernels, 19, chunk=chunk, objective=objective, position=position, **how)


@pytest.mark.parametrize("chunk, T", [(1, 0), (1, 1), (1, 64), (1, 65), (7, 63), (7, 64), (40, 90)])
def test_every_length(kernels, chunk, T):
    check(kernels, T, chunk=chunk, position=[3] if chunk > 1 else None, gates=0.1)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    "how",
    [
        {"normalize": False},
        {"shrinkage": 0.3},
        {"shrinkage": 0.05, "gates": 0.3},
        {"normalize": False, "shrinkage": 0.05, "gates": 0.3},
        {"shrinkage": 1e4},  # columns become 0 and keep their previous values
        {"normalize": False, "shrinkage": 1e4, "gates": 0.3},
    ],
    ids=["free", "shrunk", "shrunk_gated", "free_shrunk", "all_shrunk", "free_all_shrunk"],
)
def test_free_norms_and_shrinkage(kernels, objective, how):
    check(kernels, 12, objective=objective, **how)


@pytest.mark.parametrize("D, M", [(1, 3), (3, 1), (100, 64), (64, 100), (128, 128)])
@pytest.mark.parametrize("chunk", [1, 3])
def test_every_width(kernels, D, M, chunk):
    # The gradient of a gate is a sum of D * M products.
    check(kernels, 5, D=D, M=M, chunk=chunk, gates=0.1, most=5e-5 if D * M > 10_000 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(kernels, dtype):
    check(kernels, 10, dtype=dtype, most=0.01)


def test_packed_sequences(kernels):
    check(kernels, 12, 0, 1, 70, packed=True, gates=0.1)
    check(kernels, 12, 3, 16, 0, chunk=5, position=[4, 2, 0, 1], packed=True, **EVERY)


@pytest.mark.parametrize("chunk", [1, 6])
def test_closed_gates(kernels, chunk):
    check(kernels, 20, chunk=chunk, gates=8.0, most=1e-4)
