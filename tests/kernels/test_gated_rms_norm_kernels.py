"""Edge cases of the kernels of gated_rms_norm. All cases but the large one suit compute-sanitizer."""

import pytest
import torch
import torch.nn.functional as F
from girih import ops
from padding import Padded

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "sigmoid": torch.sigmoid}
# Around the vectors of 4 and 8 elements and the widths of 4 to 512 threads.
EDGES = [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
WIDTHS = [1, 3, 4, 7, 8, 9, 12, 40, *(w for edge in EDGES for w in (edge - 1, edge, edge + 1, edge + 8))]
WIDTHS = [width for width in WIDTHS if width <= 8192]
# (elements of padding, order of the dimensions in memory from outer to inner, number of padded dimensions)
LAYOUTS = {
    "dense": (1, (0, 1, 2), 1),
    "packs": (8, (0, 1, 2)),
    "odd": (1, (0, 1, 2)),
    "tokens inside": (4, (0, 2, 1)),
    "batch inside": (3, (2, 1, 0)),
}


def draw(*shape, dtype, weight_dtype=torch.float32, gated=True, seed=0):
    """x, weight, gate and the gradient of y, on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    x, weight, gate, dy = (
        normal(*shape),
        normal(shape[-1], dtype=weight_dtype),
        normal(*shape),
        normal(*shape),
    )
    return [x, weight, 2 * gate if gated else None, dy]


def formula(x, weight, gate, *, activation="silu", eps=1e-6):
    """The formula in PyTorch with one rounding of the result."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps)
    return (y if gate is None else y * ACTIVATIONS[activation](gate.to(wide))).to(x.dtype)


def run(x, weight, gate, dy, *, function=ops.gated_rms_norm, **options):
    """y, and the gradients of x, weight and gate."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, gate) if t is not None]
    y = function(*leaves[:2], leaves[2] if gate is not None else None, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def on_device(inputs):
    return [None if t is None else t.to(DEVICE) for t in inputs]


def assert_accurate_as_formula(found, inputs, **options):
    """The error against float64 is at most twice the error of the formula at the same dtypes, plus one
    rounding of the result. The weight's gradient, an fp32 sum of n rows, also errs by about sqrt(n) roundings
    of a term, which depend on its order."""
    exact = run(*(None if t is None else t.double() for t in inputs), function=formula, **options)
    rounded = run(*inputs, function=formula, **options)
    assert len(found) == len(exact)
    for i, (got, near, want) in enumerate(zip(found, rounded, exact, strict=True)):
        assert got.dtype == near.dtype and got.shape == want.shape
        if not want.numel():
            continue
        error = (got.cpu().double() - want).abs().max()
        rounding = torch.finfo(got.dtype).eps * want.abs().max()
        order = (
            torch.finfo(torch.float32).eps * 8 * (inputs[0].numel() / want.numel()) ** 0.5 if i == 2 else 0
        )
        assert error <= 2 * (near.double() - want).abs().max() + rounding + order


@pytest.mark.parametrize("width", WIDTHS)
def test_every_width(width):
    i = WIDTHS.index(width)
    inputs = draw(2, 3, width, dtype=DTYPES[i % 3], gated=i % 7 > 0, seed=width)
    options = {"activation": list(ACTIVATIONS)[i // 3 % 3], "eps": 1e-3 if i % 2 else 1e-6}
    pad = Padded(*LAYOUTS["dense"], device=DEVICE)
    assert_accurate_as_formula(run(*map(pad, inputs), **options), inputs, **options)
    pad.assert_untouched()


@pytest.mark.parametrize("activation", [*ACTIVATIONS, None])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 100, 128, 256, 1024])
def test_every_activation_and_dtype(activation, dtype, width):
    inputs = draw(3, 7, 2, width, dtype=dtype, gated=activation is not None)
    options = {"activation": activation} if activation else {}
    assert_accurate_as_formula(run(*on_device(inputs), **options), inputs, **options)


# One row, row counts around the rows of a block, and more rows than all blocks hold at once.
@pytest.mark.parametrize(
    ("rows", "width"),
    [
        *((rows, 128) for rows in (0, 1, 31, 32, 33, 65)),
        *((rows, 64) for rows in (63, 64, 65)),
        *((rows, 1024) for rows in (1, 3, 4, 5, 2113)),
        *((rows, 16) for rows in (0, 16897, 40001)),
        (530, 4096),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_number_of_rows(rows, width, dtype):
    inputs = draw(rows, width, dtype=dtype, seed=rows)
    pad = Padded(1, (0, 1), 1, device=DEVICE)
    assert_accurate_as_formula(run(*map(pad, inputs)), inputs)
    pad.assert_untouched()


def test_a_single_row_without_other_dimensions():
    inputs = draw(96, dtype=torch.bfloat16)
    assert_accurate_as_formula(run(*on_device(inputs)), inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 6, 64, 136])
def test_every_layout(layout, dtype, width):
    inputs = draw(3, 5, width, dtype=dtype)
    pad = Padded(*LAYOUTS[layout], device=DEVICE)
    assert_accurate_as_formula(run(*map(pad, inputs)), inputs)
    pad.assert_untouched()


@pytest.mark.parametrize("unaligned", range(4))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unaligned_rows(unaligned, dtype):
    """Contiguous tensors, one of which starts at an address that is not a multiple of 16 bytes."""
    inputs = draw(5, 128, dtype=dtype)
    device_inputs = on_device(inputs)
    unaligned_buffer = torch.empty(
        device_inputs[unaligned].numel() + 1, dtype=device_inputs[unaligned].dtype, device=DEVICE
    )[1:]
    device_inputs[unaligned] = unaligned_buffer.view_as(device_inputs[unaligned]).copy_(
        device_inputs[unaligned]
    )
    assert_accurate_as_formula(run(*device_inputs), inputs)


@pytest.mark.parametrize("weight_dtype", [torch.float64, *DTYPES], ids=str)
def test_weights_of_any_dtype(weight_dtype):
    inputs = draw(2, 33, 72, dtype=torch.bfloat16, weight_dtype=weight_dtype)
    assert_accurate_as_formula(run(*on_device(inputs)), inputs)


def test_a_strided_weight():
    x, weight, gate, dy = inputs = draw(9, 40, dtype=torch.float32)
    strided_weight = torch.stack([weight, torch.full_like(weight, torch.nan)], -1)[..., 0]
    assert_accurate_as_formula(run(*on_device([x, strided_weight, gate, dy])), inputs)


def test_expanded_gradients():
    *inputs, _ = draw(2, 33, 24, dtype=torch.float32)
    one = torch.ones(())
    found = run(*on_device(inputs), one.to(DEVICE).expand(2, 33, 24))
    assert_accurate_as_formula(found, [*inputs, one.expand(2, 33, 24)])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_of_any_size(activation, dtype):
    x, weight, _, dy = draw(2, 16, 8, dtype=dtype)
    far = torch.tensor([0.0, 1e-6, 8.0, 30.0, 87.0, 89.0, 127.0, 1e3])
    gate = torch.stack([far, -far]).repeat(16, 1).view(2, 16, 8).to(dtype)
    inputs = [x, weight, gate, dy]
    options = {"activation": activation}
    found = run(*on_device(inputs), **options)
    assert all(t.isfinite().all() for t in found)
    assert_accurate_as_formula(found, inputs, **options)


def test_rows_of_zeros_and_infinities_do_not_affect_others():
    """Neither row affects y, dx or dgate of another row."""
    x, weight, gate, dy = on_device(draw(40, 64, dtype=torch.bfloat16))
    want = run(x, weight, gate, dy)
    x = x.clone()
    x[7], x[9] = 0, torch.inf
    found = run(x, weight, gate, dy)
    others = [row for row in range(40) if row not in (7, 9)]
    for i in (0, 1, 3):
        assert torch.equal(found[i][others], want[i][others])
    assert not found[0][7].any() and found[1][7].isfinite().all()


@pytest.mark.parametrize("width", [64, 128, 1000, 1024, 5000])
def test_a_hundred_runs_have_the_same_bits(width):
    inputs = on_device(draw(3, 700, width, dtype=torch.bfloat16))
    first = run(*inputs)
    for _ in range(100):
        assert all(map(torch.equal, run(*inputs), first))


@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, 64), (torch.float32, 8193)], ids=str)
def test_calls_without_a_kernel_use_aten(dtype, width):
    inputs = [t.to(dtype) for t in draw(2, 3, width, dtype=torch.float32)]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for got, want in zip(run(*on_device(inputs)), run(*inputs), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.large
def test_more_than_2_31_elements():
    rows, width = 2**21 + 40, 1024
    if torch.cuda.mem_get_info()[0] < 32 * 2**30:
        pytest.skip("needs 32 GiB of free device memory")
    x, gate, dy = (torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    weight = torch.randn(width, device="cuda")
    for t in (x, gate, dy):
        t[-60:] = torch.randn(60, width, dtype=torch.bfloat16, device="cuda")
    found = run(x, weight, gate, dy)
    tail = run(x[-60:], weight, gate[-60:], dy[-60:])
    for i in (0, 1, 3):
        assert torch.equal(found[i][-60:], tail[i]) and not found[i][:-60].any()
    torch.testing.assert_close(found[2], tail[2], rtol=1e-5, atol=1e-4)
