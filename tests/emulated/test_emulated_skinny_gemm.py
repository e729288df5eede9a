"""The kernel of skinny_gemm, emulated on the CPU (tests/emulated), against the formulas in float64."""

import ctypes

import pytest
import torch
from emulated import DTYPES, load_kernels, needs_headers
from test_skinny_gemm_kernels import GATES, KINDS, draw, formula, map_tensors

pytestmark = needs_headers
POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
AROUND = 64  # elements of NaN on each side


class Matrix(ctypes.Structure):
    _fields_ = (
        *(("weight", POINTER), ("features", INT), ("gate", INT), ("bias", POINTER), ("rate", POINTER)),
        *(("scale", FLOAT), ("y", POINTER), ("first_tile", INT)),
    )


class Call(ctypes.Structure):
    _fields_ = (
        *(("dtype", INT), ("rows", INT), ("width", INT), ("x", POINTER), ("input", INT), ("other", POINTER)),
        *(("eps", FLOAT), ("residual", POINTER), ("count", INT), ("matrices", Matrix * 8)),
    )


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return load_kernels(tmp_path_factory, "skinny_gemm", sizes=())


def run(kernels, x, matrices, row_input, residual):
    """y of each matrix; all tensors are surrounded by NaN."""
    buffers = []

    def place_in_nan(t):
        buffers.append(torch.full((t.numel() + 2 * AROUND,), torch.nan, dtype=t.dtype))
        view = buffers[-1][AROUND:-AROUND].view(t.shape)
        view.copy_(t)
        return view

    def address(t):
        return None if t is None else t.data_ptr()

    x, matrices, row_input, residual = map_tensors((x, matrices, row_input, residual), place_in_nan)
    rows = x.numel() // x.shape[-1]
    call = Call(DTYPES[x.dtype], rows, x.shape[-1], x.data_ptr(), KINDS.index(row_input.kind))
    call.other, call.eps, call.residual = address(row_input.other), row_input.eps, address(residual)
    call.count, results = len(matrices), []
    for matrix, p in zip(call.matrices, matrices, strict=False):
        dtype = x.dtype if p.gate == "none" else torch.float32
        results.append(place_in_nan(torch.full((*x.shape[:-1], len(p.weight)), torch.nan, dtype=dtype)))
        matrix.weight, matrix.features, matrix.gate = p.weight.data_ptr(), len(p.weight), gate_number(p.gate)
        matrix.bias, matrix.rate, matrix.scale = address(p.bias), address(p.rate), p.scale
        matrix.y = results[-1].data_ptr()
    kernels.run_skinny_gemm(ctypes.byref(call))
    for buffer in buffers:
        assert buffer[:AROUND].isnan().all() and buffer[-AROUND:].isnan().all()
    return results


def gate_number(gate):
    return ["none", *GATES].index(gate)


def check(kernels, rows, width, features, dtype=torch.bfloat16, kind="plain", with_residual=False):
    x, matrices, row_input = draw(rows, width, features, dtype, kind)
    residual = torch.randn(*rows, features[0]).to(dtype) if with_residual else None
    found = run(kernels, x, matrices, row_input, residual)
    exact = formula(*map_tensors((x, matrices, row_input, residual), torch.Tensor.double), dtype)
    for got, want in zip(found, exact, strict=True):
        error = (got.double() - want).abs().max()
        assert error <= 2 * torch.finfo(dtype).eps * (1 + want.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [8, 40, 264, 1024, 3080])
def test_every_width(kernels, width, kind, dtype):
    check(kernels, (2,), width, (9, 8, 1, 3, 8), dtype, kind)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16])
def test_every_number_of_rows(kernels, rows):
    check(kernels, (rows, 1), 72, (16, 8), kind="silu_rms_norm")


@pytest.mark.parametrize("kind", KINDS)
def test_a_residual(kernels, kind):
    check(kernels, (3, 1), 96, (20,), kind=kind, with_residual=True)
