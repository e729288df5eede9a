"""The kernels of delta_product, emulated on the CPU (tests/emulated): forward, gradients and step."""

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
    padded_rows,
    round_up_8,
    structure,
)

pytestmark = needs_headers


Call = structure(
    (NUMBER, "batch tokens sequences"),
    (POINTER, "cu_seqlens"),
    (NUMBER, "rows heads output_heads key_share query_share D V n unit has_channel_beta"),
    (ctypes.c_double, "scale"),
    (NUMBER, "processors"),
    (Array, "q k v beta g initial last o last_inference o_inference"),
    (Array, "dout dlast dinitial dq dk dv dbeta dg"),
    (POINTER, "states prepared transitions"),
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return load_kernels(
        tmp_path_factory, "delta_product", sizes=("chunks", "saved_segments", "forward_segments")
    )


class Draw:
    """Random tensors; `dtype` is the dtype of q."""

    def __init__(self, seed, dtype):
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def uniform(self, low, high, *shape):
        return low + (high - low) * torch.rand(shape, generator=self.generator)

    def keys(self, kind, *shape):
        """Unit vectors; "normal": vectors of any length; "repeated": nearly the same vector in every row."""
        x = self.normal(*shape)
        if kind == "repeated":
            x = x[:, :1] + 0.1 * x
        return x if kind == "normal" else F.normalize(x, dim=-1)


def check(
    kernels,
    *lengths,
    D=64,
    V=64,
    H=1,
    heads_q=None,
    heads_k=None,
    n=1,
    gates=None,
    unit=False,
    beta=(0.0, 1.0),
    vector=False,
    keys="unit",
    initial=True,
    ends=True,
    packed=False,
    begins=None,
    processors=132,
    dtype=torch.bfloat16,
    numbers=torch.float32,
    scale=None,
    cut=None,
    times=1,
):
    """One call against the recurrence in float64. `begins`: first token of the sequence of each row;
    `numbers`: dtype of beta and g; `vector`: per-channel beta; `cut`: the scans that are cut into segments,
    "both" or "forward"; `times`: factor of the allowed error.
    """
    N, HQ, HK = len(lengths), heads_q or H, heads_k or H
    HO = max(HQ, H)
    B, T = (1, sum(lengths) + 3) if packed else (N, lengths[0] if begins is None else 2 + max(lengths))
    draw = Draw(D + n + sum(lengths), dtype)

    def state(present=True):
        padded = guarded_nan(N, H, round_up_8(D), round_up_8(V)).zero_()
        padded[:, :, :D, :V] = draw.normal(N, H, D, V) * D**-0.5
        return padded if present else None

    def input_rows(width, rows_, heads, values, dtype=dtype):
        return padded_rows(B, rows_, heads, width, values=values, dtype=dtype)

    tensors = {
        "q": input_rows(D, T, HQ, draw.keys("normal" if unit else "unit", B, T, HQ, D)),
        "k": input_rows(D, T * n, HK, draw.keys("normal" if unit else keys, B, T * n, HK, D)),
        "v": input_rows(V, T * n, H, draw.normal(B, T * n, H, V)),
        "dout": input_rows(V, T, HO, draw.normal(B, T, HO, V)),
        "beta": input_rows(D, T * n, H, draw.uniform(*beta, B, T * n, H, D), numbers)
        if vector
        else guarded_copy(draw.uniform(*beta, B, T * n, H).to(numbers)),
        "g": None if gates is None else guarded_copy((-gates * draw.uniform(0, 1, B, T, H)).to(numbers)),
        "initial": state(initial),
        "dlast": state(ends),
    }
    alone = H == HO
    tensors |= {
        name: guarded_nan(N, H, round_up_8(D), round_up_8(V))
        for name in ("last", "last_inference", "dinitial")
    }
    tensors |= {name: padded_rows(B, T, HO, V, dtype=dtype) for name in ("o", "o_inference")}
    tensors |= {"dv": padded_rows(B, T * n, H, V, dtype=dtype), "dq": padded_rows(B, T, HO, D, dtype=dtype)}
    if vector:
        tensors["dk"] = padded_rows(B, T * n, H, D, dtype=dtype)
        tensors["dbeta"] = padded_rows(B, T * n, H, D, dtype=numbers)
    else:
        tensors["dk"] = padded_rows(B, T * n, HO, D, dtype=dtype if alone else torch.float32)
        tensors |= {"dbeta": guarded_nan(B, T * n, H), "dg": None if gates is None else guarded_nan(B, T, HO)}

    outside = torch.ones(B, T, dtype=torch.bool)
    starts = [sum(lengths[:i]) for i in range(N)] if packed else begins or [0] * N
    bounds = torch.tensor([*starts, sum(lengths)])
    if begins is not None:
        bounds = torch.tensor([[low, low + length] for low, length in zip(starts, lengths, strict=True)])
    for i, (low, length) in enumerate(zip(starts, lengths, strict=True)):
        outside[0 if packed else i, low : low + length] = False
    for name in ("q", "k", "v", "dout", "beta", "g"):  # NaN at tokens of no sequence
        if T and tensors[name] is not None:
            x = tensors[name]
            x[outside.repeat_interleave(x.shape[1] // T, 1)] = torch.nan
    bounds = guarded_copy(bounds)
    call = Call(
        batch=B, tokens=T, sequences=N, heads=H, output_heads=HO, D=round_up_8(D), V=round_up_8(V), n=n
    )
    call.key_share, call.query_share = H // HK, max(H // HQ, 1)
    call.unit, call.has_channel_beta, call.processors = unit, vector, processors
    call.rows, call.cu_seqlens = begins is not None, bounds.data_ptr() if packed or begins else None
    call.scale = D**-0.5 if scale is None else scale
    for name, tensor in tensors.items():
        is_number = name in ("beta", "dbeta") and not vector
        setattr(call, name, Array.of(tensor[..., None] if is_number else tensor))
    chunks, saved_segments = (
        getattr(kernels, name)(ctypes.byref(call)) for name in ("chunks", "saved_segments")
    )
    cuts = [count > 0 for count in (kernels.forward_segments(ctypes.byref(call)), saved_segments)]
    assert cut is None or cuts == [True, cut == "both"]
    saved = {  # all bits set, with 256 spare bytes
        name: guarded_nan(size + 256, dtype=torch.uint8)
        for name, size in (
            ("states", 2 * chunks * H * round_up_8(V) * round_up_8(D)),
            ("prepared", chunks * H * kernels.prepared_bytes()),
            ("transitions", saved_segments * H * 4 * round_up_8(D) ** 2),
        )
    }
    for name, tensor in saved.items():
        setattr(call, name, tensor.data_ptr())
    kernels.run(ctypes.byref(call))
    assert all((tensor[-256:] == 0xFF).all() for tensor in saved.values())

    widths = {"q": D, "k": D, "v": V, "o": V, "beta": D}
    leaves = {name: tensors[name][..., : widths[name]].double() for name in "qkv"}
    leaves["beta"] = (tensors["beta"][..., :D] if vector else tensors["beta"]).double()
    if gates is not None:
        leaves["g"] = tensors["g"].double()
    if initial:
        leaves["initial"] = tensors["initial"][:, :, :D, :V].double()
    for leaf in leaves.values():
        leaf.requires_grad_()
    total, o, finals = 0.0, torch.full((B, T, HO, V), torch.nan, dtype=torch.float64), []
    for i in range(N):
        row, low = (0, starts[i]) if packed else (i, starts[i])
        high = low + lengths[i]
        own = {
            name: x[row : row + 1, low:high] if name in "qg" else x[row : row + 1, n * low : n * high]
            for name, x in leaves.items()
            if name != "initial"
        }
        start = (leaves["initial"][i : i + 1], None) if initial else None
        out, (final, _) = recurrences.delta_product(**own, n=n, scale=call.scale, l2norm_qk=unit, state=start)
        total = total + (out * tensors["dout"][row : row + 1, low:high, :, :V].double()).sum()
        if ends:
            total = total + (final * tensors["dlast"][i : i + 1, :, :D, :V].double()).sum()
        o[row, low:high] = out.detach()[0]
        finals.append(final.detach())
    found = dict.fromkeys(leaves)
    if isinstance(total, torch.Tensor) and total.requires_grad:
        gradients = torch.autograd.grad(
            total, list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        found = dict(zip(leaves, gradients, strict=True))

    is_owned = ~outside[..., None, None]
    want = {"o": o, "o_inference": o, "last": torch.cat(finals), "last_inference": torch.cat(finals)}
    want |= {f"d{name}": x for name, x in found.items() if x is not None}
    got = {}
    for name, expected in want.items():
        x, data_name = tensors[name], name.removeprefix("d").removesuffix("_inference")
        if name in ("last", "last_inference", "dinitial"):
            got[name] = x[:, :, :D, :V]
            continue
        token = is_owned.repeat_interleave(x.shape[1] // T, 1) if T else is_owned
        token = token if x.dim() == 4 else token[..., 0]
        if x.dim() == 4:
            assert x._base[..., x.shape[-1] :].isnan().all(), f"{name}: a write outside its columns"
            assert x.masked_fill(token, torch.nan).isnan().all(), f"{name}: a write outside its tokens"
            x = x[..., : widths[data_name]]
        else:
            assert x.masked_fill(token, torch.nan).isnan().all(), f"{name}: a write outside its tokens"
        x = x.double().masked_fill(~token, 0.0)
        if x.shape != expected.shape:  # heads that share one have partial gradients
            x = x.unflatten(2, (expected.shape[2], -1)).sum(3)
        got[name], want[name] = x, expected.masked_fill(~token, 0.0)
    assert_close(got, want, times * ALLOWED_ERROR[dtype])


ALLOWED_ERROR = {torch.bfloat16: 0.01, torch.float16: 0.00125}
GROUPED = {"H": 2, "heads_q": 4}
SHARED = {"H": 2, "heads_q": 1, "heads_k": 1}
EVERY = {"gates": 0.1, "unit": True}


@pytest.mark.parametrize("T", [0, 1, 15, 64, 65])
@pytest.mark.parametrize("how", [{}, EVERY], ids=["plain", "gates_unit"])
def test_every_length(kernels, T, how):
    check(kernels, T, **how)


@pytest.mark.parametrize("n", [2, 3, 16])
@pytest.mark.parametrize("how", [{}, EVERY], ids=["plain", "gates_unit"])
def test_several_steps(kernels, n, how):
    check(kernels, 70 // n, n=n, **how)


@pytest.mark.parametrize("D, V", [(64, 128), (128, 64), (128, 128), (72, 24), (20, 40)])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("how", [{}, {"unit": True}, {"gates": 0.1}], ids=["plain", "unit", "gates"])
def test_widths(kernels, D, V, n, how):
    check(kernels, 70 // n, D=D, V=V, n=n, **how)


@pytest.mark.parametrize("V", [24, 200])
def test_widest(kernels, V):
    check(kernels, 20, D=200, V=V, n=4, **EVERY)


@pytest.mark.parametrize("D, V, n", [(64, 64, 1), (64, 40, 2), (128, 64, 1), (128, 128, 2), (64, 128, 2)])
@pytest.mark.parametrize("heads", [GROUPED, SHARED], ids=["grouped", "shared"])
@pytest.mark.parametrize("how", [{}, EVERY], ids=["plain", "gates_unit"])
def test_heads(kernels, D, V, n, heads, how):
    check(kernels, 70 // n, D=D, V=V, n=n, **heads, **how)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("n", [1, 2])
def test_packed_sequences(kernels, D, n):
    check(kernels, 40, 0, 1, 70, D=D, n=n, gates=0.1, packed=True)
    check(kernels, 17, 0, 70, D=D, n=n, H=2, packed=True, unit=True)
    check(kernels, 17, 0, 30, D=D, n=n, packed=True, **GROUPED, **EVERY)


@pytest.mark.parametrize("n", [1, 2])
def test_rows_with_one_sequence(kernels, n):
    check(kernels, 70, 0, 33, n=n, gates=0.1, begins=[1, 5, 2])


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("heads", [{}, GROUPED], ids=["own", "grouped"])
def test_one_block_with_chain_and_readers(kernels, n, heads):
    check(kernels, 330 // n, n=n, processors=0, gates=0.05, **heads)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("how", [{}, EVERY], ids=["plain", "gates_unit"])
def test_more_chunks_than_stages(kernels, D, n, how):
    check(kernels, 400 // n, D=D, n=n, processors=2, **how)


# One multiprocessor, so blocks with 64 columns of V would not all run at the same time.
@pytest.mark.parametrize("D, V", [(128, 128), (72, 104)])
@pytest.mark.parametrize("n, T", [(1, 330), (1, 65), (3, 100), (4, 33)])
@pytest.mark.parametrize("how", [{}, EVERY, {"gates": 5.0}], ids=["plain", "gates_unit", "strong"])
def test_two_chains_with_output_warps(kernels, D, V, n, T, how):
    check(kernels, T, D=D, V=V, n=n, processors=1, **how)


@pytest.mark.parametrize("V", [192, 200])  # three and four groups of 64 columns, with one chain each
def test_two_chains_with_output_warps_of_wide_values(kernels, V):
    check(kernels, 70, D=128, V=V, processors=1, **EVERY)
    check(kernels, 35, D=128, V=V, n=2, processors=1, **SHARED, **EVERY)


@pytest.mark.parametrize("how", [{}, EVERY], ids=["plain", "gates_unit"])
def test_two_chains_with_output_warps_of_packed_sequences(kernels, how):
    check(kernels, 40, 0, 1, 130, D=128, V=128, H=2, processors=1, packed=True, **how)
    check(kernels, 70, 0, 33, D=128, V=128, n=2, processors=1, begins=[1, 5, 2], **how)


@pytest.mark.parametrize("D, V, n", [(64, 64, 1), (64, 24, 2), (128, 64, 1), (128, 40, 2), (72, 128, 2)])
@pytest.mark.parametrize("how", [{}, EVERY], ids=["plain", "gates_unit"])
def test_segments(kernels, D, V, n, how):
    check(kernels, 350 // n, D=D, V=V, n=n, cut="both", **how)


def test_many_segments(kernels):
    check(kernels, 320, n=2, V=24, cut="both")


@pytest.mark.parametrize("D, V, processors", [(64, 64, 4), (128, 64, 4), (64, 128, 8)])
def test_two_chains_a_block(kernels, D, V, processors):
    check(kernels, 140, D=D, V=V, n=4, processors=processors, cut="both")


def test_two_chains_that_share_many_stages(kernels):
    check(kernels, 400, n=4, processors=4, cut="both")


@pytest.mark.parametrize("D", [64, 128])
def test_segments_of_packed_sequences(kernels, D):
    check(kernels, 70, 0, 190, n=4, D=D, gates=0.05 if D == 64 else None, packed=True, cut="both")


def test_segments_of_rows_with_one_sequence(kernels):
    check(kernels, 190, 0, 70, n=4, begins=[1, 5, 2], cut="both")


def test_four_forward_segments_and_an_uncut_reverse_pass(kernels):
    check(kernels, 250, 20, n=4, D=128, processors=4, packed=True, cut="forward")


@pytest.mark.parametrize("n, T, D", [(1, 100, 64), (2, 60, 64), (1, 70, 128), (2, 35, 128)])
@pytest.mark.parametrize("gates", [None, 0.05])
def test_repeated_keys_with_strong_steps(kernels, n, T, D, gates):
    how = {"n": n, "D": D, "gates": gates, "keys": "repeated", "times": 4}
    check(kernels, T, beta=(1.9, 2.0), **how)
    check(kernels, T, beta=(0.9, 1.0), **how, **GROUPED)


@pytest.mark.parametrize("n", [1, 2])
def test_half_with_repeated_keys(kernels, n):
    how = {"n": n, "keys": "repeated", "dtype": torch.float16, "times": 4}
    check(kernels, 100 // n, beta=(1.9, 2.0), **how)
    check(kernels, 100 // n, beta=(1.9, 2.0), gates=0.05, **how)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("how", [{}, EVERY, {"unit": True}], ids=["plain", "gates_unit", "unit"])
def test_half(kernels, n, how):
    check(kernels, 100 // n, n=n, dtype=torch.float16, **how)


@pytest.mark.parametrize("gates", [5.0, 300.0])
@pytest.mark.parametrize("D, V", [(64, 64), (128, 64), (128, 128)])
def test_closed_gates(kernels, D, V, gates):
    check(kernels, 70, D=D, V=V, gates=gates)


@pytest.mark.parametrize("numbers", [torch.bfloat16, torch.float16, torch.float64])
def test_types_of_gates_and_steps(kernels, numbers):
    check(kernels, 70, H=3, gates=0.1, numbers=numbers)
    check(kernels, 37, H=1, n=2, numbers=numbers)


@pytest.mark.parametrize("D", [64, 128])
def test_without_states(kernels, D):
    check(kernels, 70, D=D, gates=0.1, initial=False, ends=False, scale=0.3)


def check_step(
    kernels,
    *,
    D,
    V,
    H=1,
    heads_q=None,
    heads_k=None,
    n=1,
    gates=None,
    unit=False,
    vector=False,
    dtype=torch.bfloat16,
    N=2,
):
    HQ, HK = heads_q or H, heads_k or H
    HO = max(HQ, H)
    draw = Draw(D + V + n, dtype)
    one = {
        "q": draw.normal(N, 1, HQ, D).to(dtype),
        "k": draw.keys("normal" if unit else "unit", N, n, HK, D).to(dtype),
        "v": draw.normal(N, n, H, V).to(dtype),
        "beta": draw.uniform(0, 1, N, n, H, *[D] * vector),
    }
    g = None if gates is None else -gates * draw.uniform(0, 1, N, 1, H)
    # The state is every second row and head of a larger tensor.
    buffer = draw.normal(N, 2 * H, 2 * D, V + 4)
    state = buffer[:, ::2, ::2, :V]
    initial, expected_buffer = state.double(), buffer.clone()
    o = torch.full((N, HO, V + 1), torch.nan, dtype=dtype)[..., :V]
    call = Call(sequences=N, heads=H, output_heads=HO, key_share=H // HK, query_share=max(H // HQ, 1))
    call.D, call.V, call.n, call.unit, call.scale = D, V, n, unit, 0.3
    beta = one["beta"] if vector else one["beta"][..., None].expand(N, n, H, max(D, V))
    for name, x in {
        "q": one["q"][:, 0],
        "k": one["k"],
        "v": one["v"],
        "beta": beta,
        "g": g if g is None else g[:, 0],
        "last": state,
        "o": o,
    }.items():
        setattr(call, name, Array.of(x))
    kernels.step(ctypes.byref(call))
    double = {name: x.double() for name, x in one.items()} | {"g": None if g is None else g.double()}
    out, (final, _) = recurrences.delta_product(
        **double, n=n, scale=0.3, l2norm_qk=unit, state=(initial, None)
    )
    assert_close({"o": o}, {"o": out[:, 0]}, 1e-6 if dtype == torch.float32 else 4e-3)
    assert_close({"last": state}, {"last": final}, 1e-6)
    expected_buffer[:, ::2, ::2, :V] = state
    assert torch.equal(expected_buffer, buffer)
    assert o._base[..., V].isnan().all()


@pytest.mark.parametrize("D, V", [(64, 64), (128, 128), (72, 20), (20, 37), (200, 64)])
@pytest.mark.parametrize("how", [{}, {"n": 2, **EVERY}, {"n": 2, **GROUPED}, SHARED | EVERY], ids=str)
def test_step(kernels, D, V, how):
    check_step(kernels, D=D, V=V, **how)


@pytest.mark.parametrize("n", [1, 2])
def test_step_with_a_beta_for_every_element(kernels, n):
    check_step(kernels, D=72, V=72, n=n, vector=True, gates=0.1, dtype=torch.float32)


@pytest.mark.parametrize("T", [0, 1, 15, 64, 65, 130])
def test_every_length_with_a_beta_for_every_channel(kernels, T):
    check(kernels, T, vector=True)


@pytest.mark.parametrize("D", [40, 64, 72, 128])
@pytest.mark.parametrize("n", [1, 2, 3, 16])
@pytest.mark.parametrize("numbers", [torch.bfloat16, torch.float32])
def test_widths_with_a_beta_for_every_channel(kernels, D, n, numbers):
    check(kernels, 90 // n, D=D, V=D, n=n, vector=True, numbers=numbers)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("heads", [GROUPED, SHARED], ids=["grouped", "shared"])
def test_heads_with_a_beta_for_every_channel(kernels, D, n, heads):
    check(kernels, 70 // n, 70 // n, D=D, V=D, n=n, vector=True, **heads)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("n", [1, 2])
def test_packed_sequences_with_a_beta_for_every_channel(kernels, D, n):
    check(kernels, 40, 0, 1, 70, D=D, V=D, n=n, packed=True, vector=True)
    check(kernels, 70, 0, 33, D=D, V=D, n=n, begins=[1, 5, 2], vector=True, **GROUPED)


@pytest.mark.parametrize("D, n, processors", [(64, 1, 132), (64, 2, 4), (128, 1, 132), (128, 4, 8)])
def test_segments_with_a_beta_for_every_channel(kernels, D, n, processors):
    check(kernels, 350 // n, D=D, V=D, n=n, processors=processors, cut="both", vector=True)


def test_segments_of_packed_sequences_with_a_beta_for_every_channel(kernels):
    check(kernels, 70, 0, 190, n=4, packed=True, cut="both", vector=True)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("n", [1, 2])
def test_more_chunks_than_stages_with_a_beta_for_every_channel(kernels, D, n):
    check(kernels, 400 // n, D=D, V=D, n=n, processors=2, vector=True)


@pytest.mark.parametrize("n, D", [(1, 64), (2, 64), (1, 128)])
@pytest.mark.parametrize("beta", [(0.9, 1.0), (1.9, 2.0)], ids=str)
def test_repeated_keys_with_a_beta_for_every_channel(kernels, n, D, beta):
    check(kernels, 100 // n, n=n, D=D, V=D, beta=beta, keys="repeated", times=4, vector=True)


@pytest.mark.parametrize("n", [1, 2])
def test_half_with_a_beta_for_every_channel(kernels, n):
    check(kernels, 100 // n, n=n, dtype=torch.float16, numbers=torch.float16, vector=True)
