"""Edge cases of the kernels of cat_attention."""

import os
from dataclasses import dataclass, replace

import pytest
import torch
from girih import ops
from kernel_accuracy import DEVICE, DTYPES, LAYOUTS, assert_accurate
from padding import Padded

SANITIZED = bool(os.environ.get("GIRIH_SANITIZED"))
KERNEL_DTYPES = [torch.bfloat16, torch.float32]  # the dtypes with kernels of their own


def path(*, T=40, D=64, V=64, dtype=torch.bfloat16, chunk=16):
    q, v = (torch.zeros(1, T, 1, n, dtype=dtype) for n in (D, V))
    return ops.explain("cat_attention", q, q, v, chunk=chunk, device="cuda").path


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor
    options: dict

    def map(self, f):
        return replace(self, **{name: f(getattr(self, name)) for name in ("q", "k", "v", "grad")})


def draw(*, B=2, T=70, H=2, G=1, D=64, V=64, dtype=torch.bfloat16, seed=0, **options):
    """Inputs on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (H * G, D), "k": (H, D), "v": (H, V), "grad": (H * G, V)}
    drawn = {m: torch.randn(B, T, *shape, generator=generator).to(dtype) for m, shape in shapes.items()}
    return Inputs(**drawn, options={"chunk": 16} | options)


def formula(q, k, v, *, chunk, scale=None, cu_chunks=None):
    """The masked attention row by row; products have the inputs' dtype, softmax is in fp32."""
    T, group = q.shape[1], q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    row = torch.arange(T, device=q.device)
    own, first, outside = row // chunk, torch.zeros_like(row), torch.zeros_like(row, dtype=torch.bool)
    if cu_chunks is not None:
        bounds = cu_chunks.long()
        after = torch.searchsorted(bounds, own, right=True)
        first, outside = bounds[(after - 1).clamp_min(0)], (after == 0) | (after == len(bounds))
    header = (row % chunk == 0) & (own >= first[:, None]) & (own < own[:, None])
    visible = header | ((own == own[:, None]) & (row <= row[:, None]))
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = scale * torch.einsum("bthd,bshd->bhts", q, k).to(wide)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).to(q.dtype)
    return torch.einsum("bhts,bshv->bthv", weights, v).masked_fill(outside[:, None, None], 0.0)


def run(inputs, call=ops.cat_attention, cu_chunks=None):
    """o and the gradients of q, k and v, by name."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    o = call(*leaves, **inputs.options, cu_chunks=cu_chunks)
    found = torch.autograd.grad(o, leaves, inputs.grad)
    return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *found), strict=True))


def assert_accurate_as_formula(inputs, cu_chunks=None, found=None, lse=0):
    """Checks `run` on these inputs, or `found`, its result on the same values in another layout. A weight
    e^(a - lse) errs by the rounding of lse: for a large lse, `lse` more roundings relative to the largest
    result are allowed."""
    inputs = inputs.map(lambda x: x.to(DEVICE))
    cu_chunks = None if cu_chunks is None else cu_chunks.to(DEVICE)
    found = run(inputs, cu_chunks=cu_chunks) if found is None else found
    if SANITIZED:
        return
    exact = run(inputs.map(torch.Tensor.double), formula, cu_chunks)
    rounded = run(inputs, formula, cu_chunks)
    if lse:
        size = {name: x.abs().max() for name, x in exact.items()}
        found, exact, rounded = (
            {n: x / size[n] for n, x in result.items()} for result in (found, exact, rounded)
        )
    assert_accurate(found, exact, [rounded], inputs.q.shape[1] + inputs.q.shape[-1] + lse)


def test_selected_path():
    assert path() == path(D=256, V=20) == path(dtype=torch.float16, chunk=256) == path(chunk=2, D=1)
    assert path() == path(dtype=torch.float32) == path(dtype=torch.float32, D=128, V=1, chunk=256)
    assert path(D=257) == path(V=264) == path(dtype=torch.float64) == "aten"
    assert path(D=129, dtype=torch.float32) == path(V=136, dtype=torch.float32) == "aten"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T", [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300])
def test_every_length(T, dtype):
    assert_accurate_as_formula(draw(B=3, T=T, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "chunk", [2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256]
)
def test_every_chunk(chunk, dtype):
    assert_accurate_as_formula(draw(T=531, chunk=chunk, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [4, 16, 64])
@pytest.mark.parametrize(
    "D, V",
    [(8, 64), (20, 8), (64, 72), (72, 64), (128, 128), (136, 40), (40, 136), (256, 256), (1, 3), (255, 129)],
)
def test_every_width(D, V, chunk, dtype):
    assert_accurate_as_formula(draw(B=1, T=330, D=D, V=V, chunk=chunk, dtype=dtype))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("T, chunk", [(1000, 2), (1029, 5), (2048, 16), (4097, 31)])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_many_blocks_of_headers(T, chunk, D, dtype):
    assert_accurate_as_formula(draw(B=1, T=T, H=1, D=D, V=D, chunk=chunk, dtype=dtype))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [4, 16, 128])
@pytest.mark.parametrize("G", [2, 3, 8])
def test_grouped_queries(G, chunk, dtype):
    assert_accurate_as_formula(draw(T=200, G=G, chunk=chunk, dtype=dtype))
    assert_accurate_as_formula(draw(T=200, G=G, D=256, chunk=chunk, dtype=dtype))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.0, 1.0, -0.5])
def test_every_scale(scale, dtype):
    assert_accurate_as_formula(draw(scale=scale, D=16, dtype=dtype))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [5, 16])
def test_scores_far_from_zero(chunk, dtype):
    """e^a overflows fp32 for most scores."""
    inputs = draw(T=200, chunk=chunk, dtype=dtype)
    inputs = replace(inputs, q=inputs.q * 20, k=inputs.k * 20)
    scores = torch.einsum("bthd,bshd->bhts", inputs.q.float(), inputs.k.float()) * inputs.q.shape[-1] ** -0.5
    lse = int(scores.abs().max()) if dtype == torch.float32 else 0
    assert_accurate_as_formula(inputs, lse=lse)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, dtype):
    inputs = draw(B=3, T=67, D=24, V=40, dtype=dtype)
    pad = Padded(*LAYOUTS[layout], device=DEVICE)
    assert_accurate_as_formula(inputs, found=run(inputs.map(pad)))
    pad.assert_untouched()


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [4, 16, 128])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_padding_at_full_tiles(D, chunk, dtype):
    inputs = draw(T=256, D=D, V=D, chunk=chunk, dtype=dtype)
    pad = Padded(*LAYOUTS["dense"], device=DEVICE)
    assert_accurate_as_formula(inputs, found=run(inputs.map(pad)))
    pad.assert_untouched()


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [3, 16, 33])
@pytest.mark.parametrize(
    "bounds", [[0, 25], [0, 0, 7, 7, 19, 25, 25], [0, 1, 2, 12, 25], [4, 9, 20], [25, 25], [0, 0]], ids=str
)
def test_packed_sequences(bounds, chunk, dtype):
    inputs = draw(B=1, T=25 * chunk - chunk // 2, chunk=chunk, dtype=dtype)
    cu_chunks = torch.tensor(bounds, dtype=torch.int32 if len(bounds) % 2 else torch.int64)
    pad = Padded(*LAYOUTS["aligned"], device=DEVICE)
    found = run(inputs.map(pad), cu_chunks=cu_chunks.to(DEVICE))
    assert_accurate_as_formula(inputs, cu_chunks, found)
    pad.assert_untouched()


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(
    "bounds", [[0, 99, -5, 20], [40, 30, 20, 10], [-7, -2, 1, 2**31 - 1], [7, 7, 7, 7]], ids=str
)
def test_invalid_bounds_access_no_memory_outside(bounds, dtype):
    inputs = draw(B=1, T=170, chunk=4, dtype=dtype)
    pad = Padded(*LAYOUTS["aligned"], device=DEVICE)
    found = run(inputs.map(pad), cu_chunks=torch.tensor(bounds, device=DEVICE))
    assert not any(x.isnan().any() for x in found.values())
    pad.assert_untouched()


def test_rows_depend_only_on_visible_keys():
    """A row does not depend on later rows, nor on tokens of earlier chunks that are not headers."""
    inputs = draw(B=1, T=200, H=1).map(lambda x: x.to(DEVICE))
    o = ops.cat_attention(inputs.q, inputs.k, inputs.v, **inputs.options)
    hidden = torch.arange(200, device=DEVICE)
    hidden = (hidden > 100) | ((hidden < 96) & (hidden % 16 > 0))
    k, v = (x.masked_fill(hidden[:, None, None], 100.0) for x in (inputs.k, inputs.v))
    other = ops.cat_attention(inputs.q, k, v, **inputs.options)
    assert torch.equal(o[:, 96:101], other[:, 96:101]) and not torch.equal(o[:, 102:], other[:, 102:])


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_every_output_is_written(dtype):
    """New tensors are filled with NaN, and all results are finite."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for T, D in ((0, 8), (1, 8), (65, 20), (130, 64), (300, 256)):
            found = run(draw(T=T, D=D, V=D, dtype=dtype).map(lambda x: x.to(DEVICE)))
            assert all(x.isfinite().all() for x in found.values())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_a_hundred_runs_have_the_same_bits(packed, dtype):
    inputs = draw(B=1 if packed else 2, T=1030, chunk=4, G=2, dtype=dtype).map(lambda x: x.to(DEVICE))
    cu_chunks = torch.tensor([0, 3, 150, 151, 258], device=DEVICE) if packed else None
    first = run(inputs, cu_chunks=cu_chunks)
    for _ in range(100):
        found = run(inputs, cu_chunks=cu_chunks)
        assert all(torch.equal(found[name], first[name]) for name in first)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [4, 16, 64])
@pytest.mark.parametrize("D", [64, 128])
def test_long_sequences(D, chunk, dtype):
    assert_accurate_as_formula(draw(B=1, T=4096, D=D, V=D, chunk=chunk, dtype=dtype))


@pytest.mark.large
def test_more_than_2_31_elements():
    """Outputs and gradients have more than 2^31 elements too. All packed sequences but the last are zero."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free device memory")
    T, H, tail = 2**20 + 2**12, 32, 2**12
    end = draw(B=1, T=tail, H=H).map(lambda x: x.to(DEVICE))

    def long(x):
        whole = torch.zeros(1, T, *x.shape[2:], dtype=x.dtype, device=DEVICE)
        whole[:, -tail:] = x
        return whole

    cu_chunks = torch.arange(0, T + 1, tail, device=DEVICE) // 16
    found, want = run(end.map(long), cu_chunks=cu_chunks), run(end)
    for name, x in want.items():
        torch.testing.assert_close(found[name][:, -tail:], x, rtol=2e-2, atol=2e-2 * x.abs().max().item())
        assert not found[name][:, :-tail].any()
