"""The kernels of gate_activations, emulated on the CPU (tests/emulated), against formulas in float64."""

import ctypes

import pytest
import test_gate_activations_kernels
import torch
from emulated import DTYPES, NUMBER, POINTER, load_kernels, needs_headers, structure
from test_emulated_elementwise import PaddedTensors, address
from test_gate_activations_kernels import DTYPES as TYPES
from test_gate_activations_kernels import GATES, check, normal

pytestmark = needs_headers
INT, FLOAT, BOOL = ctypes.c_int, ctypes.c_float, ctypes.c_bool

Gates = structure(
    *((NUMBER, "rows"), (INT, "columns gate dtype"), (POINTER, "x"), (NUMBER, "stride"), (BOOL, "use_packs")),
    *((POINTER, "bias rate"), (FLOAT, "scale"), (POINTER, "y")),
)
Backward = structure((Gates, "of"), (POINTER, "dy dx sums"))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return load_kernels(tmp_path_factory, "gate_activations", sizes=())


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(test_gate_activations_kernels, "DEVICE", "cpu")


def runner(kernels, stride=None):
    """`stride`: distance of the rows of x in elements."""

    def run(x, dy, gate, bias, rate, scale):
        pad, (rows, columns) = PaddedTensors(), x.shape
        step = stride or columns
        wide = pad(torch.full((rows, step), torch.nan, dtype=x.dtype))
        wide[:, :columns] = x
        dy, bias, rate = (None if t is None else pad(t) for t in (dy, bias, rate))
        y, dx, sums = pad.like(dy), pad.like(x), pad(torch.full((2, columns), torch.nan))
        gates = Gates(rows, columns, 1 + GATES.index(gate), DTYPES[x.dtype], address(wide), step)
        gates.use_packs = columns % 8 == 0 and step % 8 == 0
        gates.bias, gates.rate, gates.scale, gates.y = address(bias), address(rate), scale, address(y)
        kernels.run_gates(ctypes.byref(gates))
        call = Backward(gates, *map(address, (dy, dx, sums)))
        kernels.run_gates_backward(ctypes.byref(call))
        pad.assert_untouched()
        number_grads = [s for s, number in zip(sums, (bias, rate), strict=True) if number is not None]
        return y, dx, *number_grads

    return run


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows, columns", [(1, 1), (70, 12), (130, 16), (3, 2056), (2, 301)])
def test_every_width(kernels, rows, columns, dtype, gate):
    check(runner(kernels), normal(rows, columns, dtype=dtype), gate)


def test_columns_of_a_wider_product(kernels):
    check(runner(kernels, stride=48), normal(33, 16, dtype=torch.bfloat16), "decay")
    check(runner(kernels, stride=19), normal(33, 16, dtype=torch.bfloat16), "sigmoid", with_bias=False)


def test_blocks_that_loop_over_rows(kernels):
    check(runner(kernels), normal(9000, 264, dtype=torch.bfloat16), "decay")
