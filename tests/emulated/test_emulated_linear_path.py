"""The kernels of linear_path, emulated on the CPU (tests/emulated), against formulas in float64."""

import ctypes

import pytest
import torch
from emulated import (
    DTYPES,
    NUMBER,
    POINTER,
    guarded_copy,
    guarded_nan,
    load_kernels,
    needs_headers,
    structure,
)
from test_linear_path_kernels import DTYPES as TYPES
from test_linear_path_kernels import SUMS, check_channel_gate, check_gate, check_rows, check_sum

pytestmark = needs_headers
INT = ctypes.c_int

Shape = structure((NUMBER, "batch tokens"), (INT, "query_heads heads D n dtype"))
TokenRows = structure((POINTER, "data"), (NUMBER, "sequence token"))
Rows = structure((Shape, "shape"), (TokenRows, "q k v"), (POINTER, "of_q of_k of_v"))
RowsBackward = structure((Shape, "shape"), (TokenRows, "q k v"), (POINTER, "of_q of_k of_v dq dk dv"))
Sum = structure(
    (NUMBER, "batch tokens"),
    (INT, "columns"),
    (ctypes.c_bool, "from_end"),
    (INT, "of_x of_total"),
    (TokenRows, "x"),
    (POINTER, "total"),
)
Gate = structure((NUMBER, "batch tokens"), (INT, "heads D dtype"), (POINTER, "total beta"))
GateBackward = structure((NUMBER, "batch tokens"), (INT, "heads D dtype"), (POINTER, "total dbeta dtotal"))
ChannelGate = structure((NUMBER, "batch tokens"), (INT, "heads D n dtype"), (POINTER, "total beta"))
ChannelGateBackward = structure(
    (NUMBER, "batch tokens"), (INT, "heads D n dtype"), (POINTER, "total dbeta dtotal")
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return load_kernels(tmp_path_factory, "linear_path", sizes=())


def pointers(*tensors):
    return [x.data_ptr() for x in tensors]


def token_rows(x):
    """A guarded tensor of x with one more head, and a description of its token rows for the heads of x."""
    B, T, H, D = x.shape
    wide = guarded_copy(torch.cat((x, torch.full((B, T, 1, D), torch.nan).to(x)), 2))
    return wide, TokenRows(wide.data_ptr(), T * (H + 1) * D, (H + 1) * D)


def make_rows(kernels):
    def call(q, k, v, n):
        (B, T, query_heads, D), heads = q.shape, k.shape[2]
        tensors, where = zip(*map(token_rows, (q, k, v)), strict=True)
        return tensors, (Shape(B, T, query_heads, heads, D, n, DTYPES[q.dtype]), *where)

    def run(q, k, v, n):
        _tensors, arguments = call(q, k, v, n)
        shapes = [(x.shape[0], x.shape[1] * (1 if x is q else n), *x.shape[2:]) for x in (q, k, v)]
        found = [guarded_nan(*shape, dtype=q.dtype) for shape in shapes]
        kernels.run_virtual_rows(ctypes.byref(Rows(*arguments, *pointers(*found))))
        return found

    def run_backward(dq, dk, dv, q, k, v, n):
        _tensors, arguments = call(q, k, v, n)
        grads, found = (
            [guarded_copy(x) for x in (dq, dk, dv)],
            [guarded_nan(*x.shape, dtype=x.dtype) for x in (q, k, v)],
        )
        kernels.run_virtual_rows_backward(ctypes.byref(RowsBackward(*arguments, *pointers(*grads, *found))))
        return found

    return run, run_backward


def make_sum(kernels):
    def run(x, from_end, dtype):
        (B, T, H, D), total = x.shape, guarded_nan(*x.shape, dtype=dtype)
        _tensors, where = token_rows(x)
        call = Sum(B, T, H * D, from_end, DTYPES[x.dtype], DTYPES[dtype], where, total.data_ptr())
        kernels.run_running_sum(ctypes.byref(call))
        return total

    return run


def make_gate(kernels):
    def run(total):
        total, beta = guarded_copy(total), guarded_nan(*total.shape[:3], dtype=torch.float32)
        call = Gate(*total.shape, DTYPES[total.dtype], *pointers(total, beta))
        kernels.run_pooled_gate(ctypes.byref(call))
        return beta

    def run_backward(dbeta, total):
        total, dbeta, dtotal = (
            guarded_copy(total),
            guarded_copy(dbeta),
            guarded_nan(*total.shape, dtype=total.dtype),
        )
        call = GateBackward(*total.shape, DTYPES[total.dtype], *pointers(total, dbeta, dtotal))
        kernels.run_pooled_gate_backward(ctypes.byref(call))
        return dtotal

    return run, run_backward


def make_channel_gate(kernels):
    def run(total, n):
        B, T, heads, D = total.shape
        total, beta = guarded_copy(total), guarded_nan(B, T * n, heads, D, dtype=total.dtype)
        call = ChannelGate(B, T, heads, D, n, DTYPES[total.dtype], *pointers(total, beta))
        kernels.run_channel_gate(ctypes.byref(call))
        return beta

    def run_backward(dbeta, total, n):
        total, dbeta, dtotal = (
            guarded_copy(total),
            guarded_copy(dbeta),
            guarded_nan(*total.shape, dtype=total.dtype),
        )
        sizes = *total.shape, n, DTYPES[total.dtype]
        kernels.run_channel_gate_backward(
            ctypes.byref(ChannelGateBackward(*sizes, *pointers(total, dbeta, dtotal)))
        )
        return dtotal

    return run, run_backward


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("D", [8, 40, 64, 136, 256])
def test_rows_of_every_width(kernels, D, dtype):
    check_rows(*make_rows(kernels), (2, 5, 3, 1), D, 2, dtype)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("T", [1, 3, 16, 17, 33])
def test_rows_of_every_length(kernels, T, n):
    check_rows(*make_rows(kernels), (2, T, 2, 2), 40, n, torch.float32)


@pytest.mark.parametrize("scale", [0.0, 1e-8, 30.0])
def test_rows_that_are_nearly_zero_or_large(kernels, scale):
    check_rows(*make_rows(kernels), (1, 6, 2, 1), 64, 2, torch.float32, scale)


@pytest.mark.parametrize("from_end", [False, True])
@pytest.mark.parametrize("pair", SUMS, ids=str)
@pytest.mark.parametrize("sizes, D", [((2, 1, 3), 8), ((1, 64, 1), 40), ((2, 65, 2), 24), ((1, 700, 1), 8)])
def test_sums(kernels, sizes, D, pair, from_end):
    check_sum(make_sum(kernels), sizes, D, *pair, from_end)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("D", [8, 40, 64, 136, 256])
def test_gates_of_every_width(kernels, D, dtype):
    check_gate(*make_gate(kernels), (2, 9, 3), D, dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("D, n", [(8, 1), (40, 2), (64, 4), (136, 2), (256, 1)])
def test_gates_of_channels_of_every_width(kernels, D, n, dtype):
    check_channel_gate(*make_channel_gate(kernels), (2, 9, 3), D, n, dtype)
