"""The fp32 kernels of delta_product, emulated on the CPU (tests/emulated): forward and gradients."""

import ctypes

import pytest
import recurrences
import torch
import torch.nn.functional as F
from emulated import (
    NUMBER,
    POINTER,
    Array,
    assert_close,
    guarded_copy,
    guarded_nan,
    load_kernels,
    needs_headers,
    structure,
)

pytestmark = needs_headers

BETWEEN = [None, "gelu", "tanh"]
Call = structure(
    (NUMBER, "batch tokens sequences"),
    (POINTER, "cu_seqlens position"),
    (NUMBER, "heads query_heads D V n unit has_channel_beta chunk between shared"),
    (ctypes.c_double, "scale"),
    (Array, "q k v beta g initial last o dout dlast dinitial dq dk dv dbeta"),
    (POINTER, "last_position dg"),
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return load_kernels(tmp_path_factory, "delta_product", sizes=())


def check(
    kernels,
    *lengths,
    D=24,
    V=20,
    H=1,
    group=1,
    n=1,
    gates=None,
    unit=False,
    vector=False,
    chunk=0,
    between=None,
    position=None,
    packed=False,
    shared=227,
    dtype=torch.float32,
):
    """One call against the recurrence in float64. `dtype`: dtype of q, k, v and beta. Three tokens, of NaN,
    follow packed sequences."""
    generator = torch.Generator().manual_seed(D + n + sum(lengths))
    N, HQ = len(lengths), H * group
    B, T = (1, sum(lengths) + 3) if packed else (N, lengths[0])

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def unit_or_not(*shape):
        return normal(*shape) if unit else F.normalize(normal(*shape), dim=-1)

    inputs = {
        "q": unit_or_not(B, T, HQ, D),
        "k": unit_or_not(B, T * n, H, D),
        "v": normal(B, T * n, H, V),
        "beta": torch.rand(B, T * n, H, *[D] * vector, generator=generator),
        "g": None if gates is None else -gates * torch.rand(B, T, H, generator=generator),
        "initial": normal(N, H, D, V) * D**-0.5,
    }
    dout, dlast = F.pad(normal(B, T, HQ, V), (0, -V % 4)), normal(N, H, D, V)
    owned = sum(lengths) if packed else T
    inputs |= {name: inputs[name].to(dtype) for name in ("q", "k", "v", "beta")}
    for x in (*inputs.values(), dout):
        if x is not None and x is not inputs["initial"]:
            x[:, owned * (x.shape[1] // T if T else 1) :] = torch.nan
    inputs = {name: guarded_copy(x) for name, x in inputs.items()}
    tensors = dict(inputs) | {"dlast": guarded_copy(dlast), "dout": guarded_copy(dout)}
    tensors["beta"] = inputs["beta"] if vector else inputs["beta"][..., None].expand(B, T * n, H, max(D, V))
    like = {"last": "initial", "dinitial": "initial", "dq": "q", "dk": "k", "dv": "v"}
    tensors |= {
        name: guarded_nan(*inputs[values].shape, dtype=inputs[values].dtype) for name, values in like.items()
    }
    if dtype == torch.float32 and not unit and D % 4 == 0:  # delta_fp32_is_in_place()
        tensors["dq"][:, owned:] = 0
    tensors["o"] = guarded_nan(B, T, HQ, V)
    dbeta = guarded_nan(*inputs["beta"].shape, dtype=dtype)
    tensors["dbeta"] = dbeta if vector else dbeta[..., None]
    dg = guarded_nan((D + 63) // 64, B, T, H).zero_()
    starts = [sum(lengths[:i]) for i in range(N)]
    bounds, last_position = (
        guarded_copy(torch.tensor([*starts, sum(lengths)])),
        guarded_nan(N, dtype=torch.int64),
    )
    position = guarded_copy(torch.tensor([0] * N if position is None else position))
    call = Call(batch=B, tokens=T, sequences=N, heads=H, query_heads=HQ, D=D, V=V, n=n, unit=unit)
    call.has_channel_beta = vector
    call.chunk, call.between, call.scale = chunk, BETWEEN.index(between), 0.3
    call.shared = shared * 1024
    call.cu_seqlens = bounds.data_ptr() if packed else None
    if between:
        call.position, call.last_position = position.data_ptr(), last_position.data_ptr()
    call.dg = dg.data_ptr()
    for name, tensor in tensors.items():
        setattr(call, name, Array.of(tensor))
    kernels.run_fp32(ctypes.byref(call))

    leaves = {name: x.double().requires_grad_() for name, x in inputs.items() if x is not None}
    total, o, finals = 0.0, [], []
    for i in range(N):
        row, low = (0, starts[i]) if packed else (i, 0)
        high = low + lengths[i]
        own = {
            name: x[row : row + 1, low:high] if name in "qg" else x[row : row + 1, n * low : n * high]
            for name, x in leaves.items()
            if name != "initial"
        }
        out, (final, final_position) = recurrences.delta_product(
            **own,
            n=n,
            scale=0.3,
            l2norm_qk=unit,
            chunk=chunk,
            between_chunks=between,
            state=(leaves["initial"][i : i + 1], position[i : i + 1]),
        )
        total = total + (out * dout[row : row + 1, low:high, :, :V].double()).sum()
        total = total + (final * dlast[i : i + 1].double()).sum()
        o.append(out.detach())
        finals.append(final.detach())
        assert not between or last_position[i] == final_position
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    assert tensors["o"][:, owned:].isnan().all(), "o: a write outside its tokens"
    tensors["o"] = tensors["o"][:, :owned]
    want = {"o": torch.cat(o, 1 if packed else 0), "last": torch.cat(finals)}
    want |= {f"d{name}": x for name, x in zip(leaves, found, strict=True)}
    got = {name: tensors[name] for name in want if name not in ("dbeta", "dg")} | {"dbeta": dbeta}
    if gates is not None:
        got["dg"] = dg.sum(0)
    # Gradients have the dtypes of the inputs.
    rounded = {f"d{name}" for name in ("q", "k", "v", "beta") if dtype != torch.float32}
    for names, most in ((got.keys() - rounded, 3e-6), (rounded, 0.003)):
        assert_close({name: got[name] for name in names}, {name: want[name] for name in names}, most)


EVERY = {"gates": 0.1, "unit": True}


@pytest.mark.parametrize("T", [0, 1, 15, 64, 65])
@pytest.mark.parametrize("how", [{}, EVERY], ids=["plain", "gates_unit"])
def test_every_length(kernels, T, how):
    check(kernels, T, **how)


@pytest.mark.parametrize("D, V", [(64, 64), (128, 37), (200, 130), (5, 3)])
@pytest.mark.parametrize("n", [1, 2])
def test_widths(kernels, D, V, n):
    check(kernels, 70 // n, D=D, V=V, n=n, gates=0.1)


@pytest.mark.parametrize("n", [2, 20])
@pytest.mark.parametrize("vector", [False, True])
def test_several_steps_and_heads(kernels, n, vector):
    check(kernels, 80 // n, D=24, V=24, n=n, H=2, group=2, vector=vector, **EVERY)


def test_gates_above_0(kernels):
    check(kernels, 50, gates=-0.1)
    check(kernels, 25, n=2, H=2, group=2, gates=-0.1)


@pytest.mark.parametrize("shared, D", [(99, 200), (99, 128), (163, 200)])
def test_smaller_cards(kernels, shared, D):
    """Shared memory holds one, two or three stages of a ring."""
    check(kernels, 70, D=D, gates=0.1, shared=shared)


@pytest.mark.parametrize("group", [3, 4])
def test_several_queries_a_memory(kernels, group):
    check(kernels, 40, group=group, gates=0.1)


@pytest.mark.parametrize("between", ["gelu", "tanh"])
@pytest.mark.parametrize("chunk, n", [(1, 1), (5, 2), (70, 1)])
def test_between_chunks(kernels, between, chunk, n):
    check(kernels, 75, n=n, chunk=chunk, between=between, position=[chunk // 2], gates=0.1)


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("D", [24, 22])
def test_packed_sequences(kernels, D, unit):
    """With unit vectors or 22 keys backward stores dq by another kernel."""
    check(kernels, 40, 0, 1, 70, D=D, packed=True, gates=0.1, unit=unit)
    check(kernels, 17, 0, 30, D=D, packed=True, n=2, chunk=7, between="gelu", position=[3, 2, 0], unit=unit)


@pytest.mark.parametrize("n", [1, 2])
def test_16_bit_inputs(kernels, n):
    check(kernels, 75, n=n, chunk=20, between="tanh", position=[3], gates=0.1, dtype=torch.bfloat16)
    check(kernels, 40, 0, 21, D=22, V=22, n=n, packed=True, vector=True, gates=0.1, dtype=torch.float16)
