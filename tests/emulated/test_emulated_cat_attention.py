"""The kernels of cat_attention, emulated on the CPU (tests/emulated): forward and all gradients."""

import ctypes
from itertools import pairwise

import pytest
import torch
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
    (NUMBER, "batch tokens chunk sequences"),
    (POINTER, "cu_chunks"),
    (NUMBER, "heads query_heads D V"),
    (ctypes.c_double, "scale"),
    (NUMBER, "use_warpgroups"),
    (Array, "q k v o lse dout dq dk dv"),
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return load_kernels(tmp_path_factory, "cat_attention", sizes=())


def reference(q, k, v, chunk, scale, first):
    """o and lse, row by row of the mask; `first`: for every chunk, the first chunk of its sequence."""
    T, group = q.shape[1], q.shape[2] // k.shape[2]
    row = torch.arange(T)
    own, start = row // chunk, torch.tensor(first).repeat_interleave(chunk)[:T]
    header = (row % chunk == 0) & (own >= start[:, None]) & (own < own[:, None])
    visible = header | ((own == own[:, None]) & (row <= row[:, None]))
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = scale * torch.einsum("bthd,bshd->bhts", q, k)
    scores = scores.masked_fill(~visible, -torch.inf)
    return torch.einsum("bhts,bshv->bthv", scores.softmax(-1), v), scores.logsumexp(-1).transpose(1, 2)


def nan_padded_rows(B, T, *shape, dtype, values=None):
    """[B, T, *shape] as padded_rows(), with rows of NaN after the last token."""
    view = padded_rows(B, T + 2, *shape, dtype=dtype)[:, :T]
    if values is not None:
        view.zero_()[..., : shape[-1]] = values
    return view


def assert_rest_is_nan(x):
    around = x._base.clone()
    around[:, : x.shape[1], ..., : x.shape[-1]] = torch.nan
    assert around.isnan().all()


def check(
    kernels,
    T,
    chunk,
    *,
    B=1,
    H=1,
    G=1,
    D=64,
    V=64,
    scale=None,
    bounds=None,
    seed=0,
    use_warpgroups=False,
    dtype=torch.bfloat16,
):
    generator = torch.Generator().manual_seed(seed)
    scale = D**-0.5 if scale is None else scale

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    HQ, K = H * G, -(-T // chunk)
    inputs = {"q": (HQ, D), "k": (H, D), "v": (H, V), "dout": (HQ, V)}
    inputs = {
        name: nan_padded_rows(B, T, *shape, dtype=dtype, values=normal(B, T, *shape))
        for name, shape in inputs.items()
    }
    outputs = {"o": (HQ, V), "dq": (HQ, D), "dk": (H, D), "dv": (H, V)}
    outputs = {name: nan_padded_rows(B, T, *shape, dtype=dtype) for name, shape in outputs.items()}
    row_outputs = list(outputs.values())
    outputs["lse"] = guarded_nan(B, T, HQ)
    call = Call(batch=B, tokens=T, chunk=chunk, sequences=B, heads=H, query_heads=HQ, scale=scale)
    call.use_warpgroups = use_warpgroups
    call.D, call.V = round_up_8(D), round_up_8(V)
    cu_chunks = None if bounds is None else guarded_copy(torch.tensor(bounds))
    if bounds is not None:
        call.cu_chunks, call.sequences = cu_chunks.data_ptr(), len(bounds) - 1
    for name, x in (inputs | outputs).items():
        setattr(call, name, Array.of(x))
    kernels.run(ctypes.byref(call))
    for x in row_outputs:
        assert_rest_is_nan(x)

    widths = {"q": D, "k": D, "v": V}
    wide = {name: inputs[name][..., :width].double().requires_grad_() for name, width in widths.items()}
    bounds = [0, K] if bounds is None else bounds
    has_sequence = [any(a <= c < b for a, b in pairwise(bounds)) for c in range(K)]
    first = [max(b for b in bounds if b <= c) if inside else c for c, inside in enumerate(has_sequence)]
    o, lse = reference(*wide.values(), chunk, scale, first)
    outside = torch.tensor([not inside for inside in has_sequence]).repeat_interleave(chunk)[:T, None]
    o = o.masked_fill(outside[..., None], 0.0)
    lse = lse.masked_fill(outside, torch.inf)
    found = torch.autograd.grad((o * inputs["dout"][..., :V].double()).sum(), list(wide.values()))
    want = {"o": o.detach()} | {f"d{name}": x for name, x in zip(wide, found, strict=True)}
    got = {name: outputs[name][..., : want[name].shape[-1]] for name in want}
    # A weight e^(a - lse) errs by half a unit of the rounding of lse, which is large for large scores.
    fp32 = 3e-6 + lse.detach().where(lse.isfinite(), 0.0).abs().max().item() * 2**-24
    assert_close(got, want, fp32 if dtype == torch.float32 else 0.02)
    assert torch.allclose(outputs["lse"].double(), lse, atol=1e-4)
    assert (got["o"] * outside[..., None]).count_nonzero() == 0


@pytest.mark.parametrize("chunk", [2, 5, 16, 64, 100, 128, 256])
def test_every_chunk(kernels, chunk):
    check(kernels, 203, chunk)


@pytest.mark.parametrize("T", [1, 15, 16, 64, 65, 129])
def test_every_length(kernels, T):
    check(kernels, T, 4, D=8, V=16)


def test_more_headers_than_a_block(kernels):
    check(kernels, 330, 2, D=16, V=8)
    check(kernels, 400, 5, D=16, V=8)


@pytest.mark.parametrize("D, V", [(40, 24), (128, 128), (72, 128), (256, 256), (64, 200), (136, 32)])
def test_every_width(kernels, D, V):
    check(kernels, 81, 3, D=D, V=V)


def test_grouped_queries(kernels):
    check(kernels, 70, 4, H=2, G=3, D=16, V=24)
    check(kernels, 40, 16, B=2, G=2)


@pytest.mark.parametrize("use_warpgroups", [False, True])
def test_fp16(kernels, use_warpgroups):
    for chunk, V in ((4, 64), (16, 64), (8, 128), (4, 256)):
        check(kernels, 150, chunk, D=24, V=V, use_warpgroups=use_warpgroups, dtype=torch.float16)


@pytest.mark.parametrize("chunk", [2, 5, 16, 64, 100])
def test_fp32(kernels, chunk):
    """Accurate to fp32, with products of tf32 parts."""
    check(kernels, 203, chunk, D=24, V=40, dtype=torch.float32)
    check(kernels, 70, chunk, H=2, G=3, D=72, V=128, scale=-0.4, dtype=torch.float32)
    check(kernels, 9 * chunk + 1, chunk, D=16, V=8, bounds=[1, 4, 4, 9], dtype=torch.float32)
    check(kernels, 130, chunk, D=16, V=16, scale=40.0, dtype=torch.float32)


@pytest.mark.parametrize("chunk", [3, 16])
def test_packed_sequences(kernels, chunk):
    check(kernels, 20 * chunk + 1, chunk, D=16, V=16, bounds=[0, 7, 7, 8, 21])
    check(kernels, 20 * chunk, chunk, D=16, V=16, bounds=[2, 9, 17])


def test_every_scale(kernels):
    for scale in (0.0, -0.3, 2.0):
        check(kernels, 50, 4, D=16, V=16, scale=scale)


@pytest.mark.parametrize(
    "chunk, T", [(2, 600), (4, 390), (8, 530), (16, 1100), (32, 260), (64, 200), (128, 290)]
)
def test_warpgroups_at_every_chunk(kernels, chunk, T):
    check(kernels, T, chunk, D=16, V=24, use_warpgroups=True)


@pytest.mark.parametrize("T", [1, 63, 64, 65, 127, 128, 129])
def test_warpgroups_at_every_length(kernels, T):
    """Tiles of 128 rows, 64 per warpgroup, and partial chunks of every size."""
    for chunk in (4, 16):
        check(kernels, T, chunk, D=8, V=8, use_warpgroups=True)


@pytest.mark.parametrize("chunk, T", [(3, 450), (100, 350), (256, 800)])
def test_warpgroups_for_headers_alone(kernels, chunk, T):
    """Chunks that do not fill tiles of queries."""
    check(kernels, T, chunk, D=8, V=16, use_warpgroups=True)
    check(kernels, T // 2, chunk, G=2, D=8, V=8, bounds=[0, 1, T // 2 // chunk], use_warpgroups=True)


def test_warpgroups_at_every_width(kernels):
    check(kernels, 140, 8, D=128, V=128, use_warpgroups=True)
    check(kernels, 260, 4, G=2, D=24, V=72, scale=-0.3, use_warpgroups=True)
    check(kernels, 140, 16, D=104, V=8, scale=0.0, use_warpgroups=True)
    check(kernels, 70, 64, H=2, G=2, D=64, V=40, use_warpgroups=True)
    check(kernels, 150, 8, B=2, H=2, D=8, V=8, use_warpgroups=True)
    check(kernels, 100, 16, G=2, D=8, V=8, use_warpgroups=True)


@pytest.mark.parametrize("chunk", [4, 8, 16, 64])
def test_packed_sequences_of_warpgroups(kernels, chunk):
    """Sequences that share a tile or fill several, of zero or one chunks, before and after rows of no
    sequence."""
    K = 330 // chunk
    check(
        kernels,
        330,
        chunk,
        D=8,
        V=8,
        bounds=[0, K // 5, K // 5, K // 2, K // 2 + 1, K + 1],
        use_warpgroups=True,
    )
    check(kernels, 330, chunk, D=8, V=8, bounds=[1, K // 2, K - 1], use_warpgroups=True)
    check(kernels, 130, chunk, D=8, V=8, bounds=[0, 0], use_warpgroups=True)
