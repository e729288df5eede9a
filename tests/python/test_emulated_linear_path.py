"""The kernels of linear_path on the emulator of tests/emulated, against the formulas in float64."""

import ctypes

import pytest
import torch
from emulated import DTYPES, NUMBER, POINTER, compiled_once, needs_headers, structure, unwritten, walled
from test_linear_path_kernels import DTYPES as TYPES
from test_linear_path_kernels import check_channel_gate, check_gate, check_rows

pytestmark = needs_headers
INT = ctypes.c_int

Shape = structure((NUMBER, "batch tokens"), (INT, "query_heads heads D n dtype"))
Rows = structure((Shape, "shape"), (POINTER, "x q k v"))
RowsBackward = structure((Shape, "shape"), (POINTER, "x dq dk dv dx"))
Gate = structure((NUMBER, "batch tokens"), (INT, "heads D dtype"), (POINTER, "total beta"))
GateBackward = structure((NUMBER, "batch tokens"), (INT, "heads D dtype"), (POINTER, "total dbeta dtotal"))
ChannelGate = structure((NUMBER, "batch tokens"), (INT, "heads D n dtype"), (POINTER, "total beta"))
ChannelGateBackward = structure(
    (NUMBER, "batch tokens"), (INT, "heads D n dtype"), (POINTER, "total dbeta dtotal")
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return compiled_once(tmp_path_factory, "linear_path", sizes=())


def pointers(*tensors):
    return [x.data_ptr() for x in tensors]


def shape_of(x, query_heads, n):
    B, T, heads, D = x.shape
    return Shape(B, T, query_heads, (heads - query_heads) // 2, D, n, DTYPES[x.dtype])


def rows_by(kernels):
    def run(x, query_heads, n):
        x, shape = walled(x), shape_of(x, query_heads, n)
        q = unwritten(*x.shape[:2], query_heads, shape.D, dtype=x.dtype)
        k, v = (unwritten(shape.batch, shape.tokens * n, shape.heads, shape.D, dtype=x.dtype) for _ in "kv")
        kernels.run_virtual_rows(ctypes.byref(Rows(shape, *pointers(x, q, k, v))))
        return q, k, v

    def run_backward(dq, dk, dv, x, query_heads, n):
        tensors, shape = [walled(t) for t in (x, dq, dk, dv)], shape_of(x, query_heads, n)
        dx = unwritten(*x.shape, dtype=x.dtype)
        kernels.run_virtual_rows_backward(ctypes.byref(RowsBackward(shape, *pointers(*tensors, dx))))
        return dx

    return run, run_backward


def gate_by(kernels):
    def run(total):
        total, beta = walled(total), unwritten(*total.shape[:3], dtype=torch.float32)
        call = Gate(*total.shape, DTYPES[total.dtype], *pointers(total, beta))
        kernels.run_pooled_gate(ctypes.byref(call))
        return beta

    def run_backward(dbeta, total):
        total, dbeta, dtotal = walled(total), walled(dbeta), unwritten(*total.shape, dtype=total.dtype)
        call = GateBackward(*total.shape, DTYPES[total.dtype], *pointers(total, dbeta, dtotal))
        kernels.run_pooled_gate_backward(ctypes.byref(call))
        return dtotal

    return run, run_backward


def channel_gate_by(kernels):
    def run(total, n):
        B, T, heads, D = total.shape
        total, beta = walled(total), unwritten(B, T * n, heads, D, dtype=total.dtype)
        call = ChannelGate(B, T, heads, D, n, DTYPES[total.dtype], *pointers(total, beta))
        kernels.run_channel_gate(ctypes.byref(call))
        return beta

    def run_backward(dbeta, total, n):
        total, dbeta, dtotal = walled(total), walled(dbeta), unwritten(*total.shape, dtype=total.dtype)
        sizes = *total.shape, n, DTYPES[total.dtype]
        kernels.run_channel_gate_backward(
            ctypes.byref(ChannelGateBackward(*sizes, *pointers(total, dbeta, dtotal)))
        )
        return dtotal

    return run, run_backward


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("D", [8, 40, 64, 136, 256])
def test_rows_of_every_width(kernels, D, dtype):
    check_rows(*rows_by(kernels), (2, 5, 3, 1), D, 2, dtype)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("T", [1, 3, 9])
def test_rows_of_every_length(kernels, T, n):
    check_rows(*rows_by(kernels), (2, T, 2, 2), 40, n, torch.float32)


@pytest.mark.parametrize("scale", [0.0, 1e-8, 30.0])
def test_rows_that_are_nearly_zero_or_large(kernels, scale):
    check_rows(*rows_by(kernels), (1, 6, 2, 1), 64, 2, torch.float32, scale)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("D", [8, 40, 64, 136, 256])
def test_gates_of_every_width(kernels, D, dtype):
    check_gate(*gate_by(kernels), (2, 9, 3), D, dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("D, n", [(8, 1), (40, 2), (64, 4), (136, 2), (256, 1)])
def test_gates_of_channels_of_every_width(kernels, D, n, dtype):
    check_channel_gate(*channel_gate_by(kernels), (2, 9, 3), D, n, dtype)
