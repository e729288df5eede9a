"""The elementwise kernels, emulated on the CPU (tests/emulated), against formulas in float64."""

import ctypes

import pytest
import test_elementwise_kernels
import torch
import torch.nn.functional as F
from emulated import DTYPES, NUMBER, POINTER, load_kernels, needs_headers, structure
from test_elementwise_kernels import DTYPES as TYPES
from test_elementwise_kernels import PAIRS, assert_close, check_rotary

pytestmark = needs_headers
INT, FLOAT = ctypes.c_int, ctypes.c_float
AROUND = 64  # elements of NaN on each side


Vector = structure((POINTER, "data"), (INT, "dtype"), (NUMBER, "stride"))
Shape = structure(
    (NUMBER, "rows"), (INT, "dim"), (FLOAT, "eps"), (INT, "sum_dtype row_dtype"), (ctypes.c_bool, "use_silu")
)
Norm = structure((Shape, "shape"), (POINTER, "x branch"), (Vector, "weight"), (POINTER, "s y"))
NormBackward = structure(
    (Shape, "shape"),
    *((POINTER, "s"), (Vector, "weight"), (POINTER, "dy after ds dbranch")),
    (Vector, "dweight"),
)
Product = structure((NUMBER, "elements"), (INT, "dtype"), (POINTER, "gate up y"))
ProductBackward = structure((NUMBER, "elements"), (INT, "dtype"), (POINTER, "gate up dy dgate dup y"))
CrossEntropy = structure(
    (NUMBER, "rows classes"), (INT, "dtype"), (POINTER, "z labels"), (NUMBER, "ignored"), (POINTER, "l")
)


RotaryShape = structure(
    (NUMBER, "batch tokens"),
    (INT, "query_heads heads D dtype"),
    (POINTER, "position"),
    (ctypes.c_bool, "has_row_positions"),
    (POINTER, "rate"),
)
Rotary = structure((RotaryShape, "shape"), (POINTER, "x q k v"))
RotaryBackward = structure((RotaryShape, "shape"), (POINTER, "dq dk dv dx"))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return load_kernels(tmp_path_factory, "elementwise", sizes=())


class PaddedTensors:
    """Creates tensors with NaN before and after them in memory."""

    def __init__(self):
        self.buffers = []

    def __call__(self, x):
        buffer = torch.full((x.numel() + 2 * AROUND,), torch.nan, dtype=x.dtype)
        start = -buffer.data_ptr() % 32 // buffer.element_size()  # aligns the view to 32 bytes
        view = buffer[start + 32 : start + 32 + x.numel()].view(x.shape)
        view.copy_(x)
        self.buffers.append((buffer, start + 32, x.numel()))
        return view

    def like(self, x, dtype=None):
        return self(torch.full(x.shape, torch.nan, dtype=dtype or x.dtype))

    def assert_untouched(self):
        for buffer, start, count in self.buffers:
            assert buffer[:start].isnan().all() and buffer[start + count :].isnan().all()


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def vector(x):
    return Vector(x.data_ptr(), DTYPES[x.dtype], x.stride(0))


def address(x):
    return None if x is None else x.data_ptr()


def check_norm(kernels, rows, dim, pair, with_branch=True, with_after=True):
    pad, (sums, row_dtype) = PaddedTensors(), pair
    x, weight = pad(normal(rows, dim, dtype=sums)), pad(normal(dim, seed=9))
    branch = pad(normal(rows, dim, dtype=row_dtype, seed=1)) if with_branch else None
    dy = pad(normal(rows, dim, dtype=row_dtype, seed=2))
    after = pad(normal(rows, dim, dtype=sums, seed=3)) if with_after else None
    s, y, shape = (
        pad.like(x),
        pad.like(dy),
        Shape(rows, dim, 1e-5, DTYPES[sums], DTYPES[row_dtype], False),
    )
    call = Norm(shape, address(x), address(branch), vector(weight), address(s), address(y))
    kernels.run_norm(ctypes.byref(call))
    if with_branch:
        assert_close(s, x.double() + branch.double())
    else:
        assert s.isnan().all()
        s = x
    ds, dweight = pad.like(s), pad.like(weight)
    dbranch = pad.like(dy) if with_branch else None
    call = NormBackward(shape, address(s), vector(weight), address(dy), address(after), address(ds))
    call.dbranch, call.dweight = address(dbranch), vector(dweight)
    kernels.run_norm_backward(ctypes.byref(call))

    wide, w = s.double().requires_grad_(), weight.double().requires_grad_()
    want = F.rms_norm(wide, (dim,), w, 1e-5)
    assert_close(y, want.detach(), dim)
    exact, dw = torch.autograd.grad(want, (wide, w), dy.double())
    exact = exact if after is None else exact + after.double()
    for got in (ds, dbranch) if with_branch else (ds,):
        assert_close(got, exact, dim)
    assert_close(dweight, dw, rows)
    pad.assert_untouched()


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("dim", [8, 64, 72, 128, 136, 264, 1032, 2056, 4104])
def test_norms_of_every_width(kernels, dim, pair):
    check_norm(kernels, 3, dim, pair)


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 70])
@pytest.mark.parametrize("dim", [40, 104])
def test_norms_of_every_number_of_rows(kernels, rows, dim):
    check_norm(kernels, rows, dim, PAIRS[1])


@pytest.mark.parametrize("rows, dim", [(34500, 8), (17000, 72), (2200, 264)])
def test_blocks_of_norms_that_have_several_rows(kernels, rows, dim):
    check_norm(kernels, rows, dim, PAIRS[0])


@pytest.mark.parametrize("with_after", [False, True])
@pytest.mark.parametrize("with_branch", [False, True])
def test_norms_with_and_without_a_branch(kernels, with_branch, with_after):
    check_norm(kernels, 5, 272, PAIRS[1], with_branch, with_after)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows, dim", [(17, 64), (3, 264)])
def test_rows_of_length_one(kernels, rows, dim, dtype):
    pad = PaddedTensors()
    x, dy = pad(normal(rows, dim, dtype=dtype)), pad(normal(rows, dim, dtype=dtype, seed=2))
    y, dx, shape = pad.like(x), pad.like(x), Shape(rows, dim, 1e-26, DTYPES[dtype], DTYPES[dtype], False)
    kernels.run_norm(ctypes.byref(Norm(shape, address(x), None, Vector(), None, address(y))))
    call = NormBackward(shape, address(x), Vector(), address(dy), None, address(dx))
    kernels.run_norm_backward(ctypes.byref(call))
    wide = x.double().requires_grad_()
    want = F.normalize(wide, dim=-1)
    assert_close(y, want.detach(), dim)
    assert_close(dx, torch.autograd.grad(want, wide, dy.double())[0], dim)
    pad.assert_untouched()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("elements", [8, 40, 2056])
def test_products(kernels, elements, dtype):
    pad = PaddedTensors()
    gate, up, dy = (pad((3 * normal(elements, seed=i)).to(dtype)) for i in range(3))
    y, dgate, dup, again = (pad.like(gate) for _ in range(4))
    call = Product(elements, DTYPES[dtype], *map(address, (gate, up, y)))
    kernels.run_product(ctypes.byref(call))
    call = ProductBackward(elements, DTYPES[dtype], *map(address, (gate, up, dy, dgate, dup, again)))
    kernels.run_product_backward(ctypes.byref(call))
    wide = [x.double().requires_grad_() for x in (gate, up)]
    want = F.silu(wide[0]) * wide[1]
    exact = want, *torch.autograd.grad(want, wide, dy.double())
    for got, x in zip((y, dgate, dup), exact, strict=True):
        assert_close(got, x.detach())
    assert again.equal(y)
    pad.assert_untouched()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows, dim", [(1, 8), (3, 264), (70, 40), (2, 2056)])
def test_norms_of_silu(kernels, rows, dim, dtype):
    pad = PaddedTensors()
    x, weight = pad((3 * normal(rows, dim)).to(dtype)), pad(normal(dim, seed=9))
    dy, dx, y, dweight = (
        pad(normal(rows, dim, dtype=dtype)),
        pad.like(x),
        pad.like(x),
        pad.like(weight),
    )
    shape = Shape(rows, dim, 1e-5, DTYPES[dtype], DTYPES[dtype], True)
    kernels.run_norm(ctypes.byref(Norm(shape, address(x), None, vector(weight), None, address(y))))
    call = NormBackward(shape, address(x), vector(weight), address(dy), None, address(dx))
    call.dweight = vector(dweight)
    kernels.run_norm_backward(ctypes.byref(call))
    wide, w = x.double().requires_grad_(), weight.double().requires_grad_()
    want = F.rms_norm(F.silu(wide), (dim,), w, 1e-5)
    assert_close(y, want.detach(), dim)
    exact, dw = torch.autograd.grad(want, (wide, w), dy.double())
    assert_close(dx, exact, dim)
    assert_close(dweight, dw, rows)
    pad.assert_untouched()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("classes", [8, 40, 4096, 4104])
def test_cross_entropies(kernels, classes, dtype):
    pad = PaddedTensors()
    logits = (5 * normal(6, classes)).to(dtype)
    logits[4], logits[5] = -torch.inf, torch.linspace(-6e4, 6e4, classes)
    logits[4, 3] = 2.0
    labels = torch.tensor([0, classes - 1, -100, 5, 3, classes - 1])
    z, l = pad(logits), pad(torch.full((6,), torch.nan))
    call = CrossEntropy(6, classes, DTYPES[dtype], address(z), address(labels), -100, address(l))
    kernels.run_cross_entropy(ctypes.byref(call))
    wide = logits.double().requires_grad_()
    want = F.cross_entropy(wide, labels, reduction="none")
    assert_close(l, want.detach(), 30)
    assert_close(z, torch.autograd.grad(want.sum(), wide)[0])
    pad.assert_untouched()


@pytest.mark.parametrize("has_row_positions", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "sizes, D", [((2, 3, 3, 1), 16), ((1, 2, 2, 2), 48), ((1, 2, 9, 4), 256), ((1, 0, 1, 1), 16)]
)
def test_rotary(kernels, sizes, D, dtype, has_row_positions, monkeypatch):
    monkeypatch.setattr(test_elementwise_kernels, "DEVICE", "cpu")
    B, T, query_heads, heads = sizes
    pad = PaddedTensors()

    def shape(dtype, position, rate):
        return RotaryShape(
            *sizes, D, DTYPES[dtype], position.data_ptr(), position.dim() == 2, rate.data_ptr()
        )

    def run(x, query_heads, position, rate):
        x, rate = pad(x), pad(rate)
        found = [pad.like(part) for part in x.split([query_heads, heads, heads], 2)]
        kernels.run_rotary(ctypes.byref(Rotary(shape(x.dtype, position, rate), *map(address, (x, *found)))))
        return found

    def run_backward(dq, dk, dv, position, rate):
        grads, rate = [pad(x) for x in (dq, dk, dv)], pad(rate)
        dx = pad(torch.full((B, T, query_heads + 2 * heads, D), torch.nan, dtype=dq.dtype))
        call = RotaryBackward(shape(dq.dtype, position, rate), *map(address, (*grads, dx)))
        kernels.run_rotary_backward(ctypes.byref(call))
        return dx

    check_rotary(run, run_backward, sizes, D, dtype, has_row_positions)
    pad.assert_untouched()
