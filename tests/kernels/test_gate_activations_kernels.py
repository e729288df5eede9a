"""Edge cases of the kernels of gate_activations: gates of many rows, forward and backward."""

import pytest
import torch
from girih.nn.functional.gates import apply_gate, aten_gate
from padding import Padded

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GATES = ["linear", "sigmoid", "logsigmoid", "decay"]
COLUMNS = [1, 3, 8, 12, 16, 24, 72, 100, 1024, 2056, 2051]


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def assert_close(got, want, name, terms=1):
    """Within two roundings of the result plus the rounding of an fp32 sum of n terms."""
    assert got.shape == want.shape, name
    if want.numel():
        eps = 2 * torch.finfo(got.dtype).eps
        bound = eps * want.abs() + 4e-7 * terms**0.5 * (1 + want.abs().amax())
        error = (got.double() - want).abs()
        assert (error <= bound).all(), f"{name}: off by {error.max().item():.3g}"


def bias_and_rate(columns, gate, with_bias):
    bias = normal(columns, seed=1) if with_bias or gate == "linear" else None
    return bias, normal(columns, seed=2) if gate == "decay" else None


def check(run, x, gate, with_bias=True, scale=1.5):
    """`run(x, dy, gate, bias, rate, scale)` returns y, dx and the gradients of the bias and the rate, if
    any."""
    bias, rate = bias_and_rate(x.shape[-1], gate, with_bias)
    scale = 1.0 if gate in ("linear", "decay") else scale
    dy = normal(*x.shape, seed=3)
    y, dx, *number_grads = run(x, dy, gate, bias, rate, scale)
    assert y.dtype == torch.float32 and dx.dtype == x.dtype
    numbers = [n for n in (bias, rate) if n is not None]
    wide = [t.detach().double().requires_grad_() for t in (x, *numbers)]
    remaining = iter(wide[1:])
    want = aten_gate(
        wide[0],
        gate,
        None if bias is None else next(remaining),
        None if rate is None else next(remaining),
        scale,
    )
    exact = torch.autograd.grad(want, wide, dy.double())
    assert_close(y, want.detach(), "y")
    rows = max(x.shape[:-1].numel(), 1)
    for name, got, exactly in zip(("dx", "dbias", "drate"), (dx, *number_grads), exact, strict=False):
        assert_close(got, exactly, name, rows if name != "dx" else 1)
    assert len(number_grads) == len(numbers)


def run(x, dy, gate, bias, rate, scale):
    leaves = [t.detach().requires_grad_() for t in (x, bias, rate) if t is not None]
    remaining = iter(leaves[1:])
    y = apply_gate(
        leaves[0],
        gate,
        None if bias is None else next(remaining),
        None if rate is None else next(remaining),
        scale,
    )
    assert "RowGates" in y.grad_fn.name()
    return y, *torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_every_width(columns, dtype, gate):
    check(run, normal(2, 19, columns, dtype=dtype), gate)


@pytest.mark.parametrize("gate", ["sigmoid", "logsigmoid", "decay"])
@pytest.mark.parametrize("rows", [0, 1, 2, 127, 128, 129, 9000])
@pytest.mark.parametrize("columns", [12, 16, 600])
def test_every_number_of_rows(columns, rows, gate):
    check(run, normal(rows, columns, dtype=torch.bfloat16), gate, with_bias=False)


def test_blocks_that_loop_over_rows():
    check(run, normal(2**18 + 5, 9), "sigmoid")
    check(run, normal(20000, 1032), "decay")


@pytest.mark.parametrize("layout", ["columns", "odd columns", "transposed", "expanded", "odd"])
def test_any_layout_is_accepted(layout):
    whole = normal(3, 7, 64, dtype=torch.bfloat16)
    x = {
        "columns": lambda: whole[..., 16:32],
        "odd columns": lambda: whole[..., 3:19],
        "transposed": lambda: whole[..., :16].transpose(0, 1),
        "expanded": lambda: whole[:, :1, :16].expand(3, 7, 16),
        "odd": lambda: whole.flatten()[1 : 1 + 3 * 7 * 16].view(3, 7, 16),
    }[layout]()
    check(run, x, "sigmoid")


def test_extreme_gates():
    x = torch.tensor([[0.0, -0.0, 80.0, -80.0, 3e4, -3e4, 20.5, -20.5]], device=DEVICE)
    for gate in GATES:
        check(run, x, gate)


def test_only_requested_gradients_are_computed():
    x, bias = normal(9, 16).requires_grad_(), normal(16)
    assert_close(
        torch.autograd.grad(apply_gate(x, "sigmoid", bias).sum(), x)[0],
        torch.autograd.grad(aten_gate(x.double(), "sigmoid", bias, None, 1.0).sum(), x)[0].double(),
        "dx",
    )
    rate = normal(16).requires_grad_()
    y = apply_gate(x.detach(), "decay", bias, rate)
    (drate,) = torch.autograd.grad(y.sum(), rate)
    assert_close(drate, y.detach().double().sum(0), "drate", 9)


@pytest.mark.parametrize("rows", [(5,), ()], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_second_derivatives(gate, rows):
    bias, rate = bias_and_rate(16, gate, True)
    leaves = [t.requires_grad_() for t in (normal(*rows, 16), bias, rate) if t is not None]

    def second(gate_function):
        y = gate_function(*leaves[:2], leaves[2] if gate == "decay" else None)
        grads = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

    found = second(lambda x, b, r: apply_gate(x, gate, b, r))
    want = second(lambda x, b, r: aten_gate(x, gate, b, r, 1.0))
    for result, exact in zip(found, want, strict=True):
        torch.testing.assert_close(result, exact, rtol=1e-4, atol=1e-4)


def test_other_calls_use_pytorch(monkeypatch):
    monkeypatch.setattr(torch.ops.girih, "row_gates", None)
    x, bias = normal(4, 16), normal(16)
    assert apply_gate(x.double(), "sigmoid", bias).dtype == torch.float64
    apply_gate(x, "sigmoid", bias.double())
    apply_gate(x, "sigmoid", normal(1))
    assert apply_gate(x, "none") is x and apply_gate(x.bfloat16(), "linear").dtype == torch.float32
    torch.func.vmap(lambda row: apply_gate(row, "sigmoid", bias))(x)


def test_no_access_outside_the_tensors():
    pad, rows = Padded(8, range(1), device=DEVICE), Padded(16, range(2), device=DEVICE)
    x, dense = rows(normal(9, 40)), Padded(16, range(2), outer=1, device=DEVICE)
    bias, rate, dy = pad(normal(40, seed=1)), pad(normal(40, seed=2)), dense(normal(9, 40, seed=3))
    assert torch.ops.girih.row_gates(x, "decay", bias, rate, 1.0).isfinite().all()
    for out in torch.ops.girih.row_gates_backward(dy, x, "decay", bias, rate, 1.0, True):
        assert out.isfinite().all()
    for padded in (pad, rows, dense):
        padded.assert_untouched()


def test_equal_calls_have_the_same_bits():
    x, dy, bias, rate = normal(30000, 24), normal(30000, 24, seed=3), normal(24), normal(24, seed=2)
    first, second = (
        torch.ops.girih.row_gates_backward(dy, x, "decay", bias, rate, 1.0, True) for _ in range(2)
    )
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


def test_invalid_arguments_are_refused():
    x, bias, ops = normal(4, 16), normal(16), torch.ops.girih
    for call, message in [
        (lambda: ops.row_gates(x.double(), "sigmoid", bias, None, 1.0), "x is Double"),
        (lambda: ops.row_gates(x, "tanh", bias, None, 1.0), "a gate is 'tanh'"),
        (lambda: ops.row_gates(x, "none", None, None, 1.0), ": gate is 'none'"),
        (lambda: ops.row_gates(x, "sigmoid", bias[:8], None, 1.0), r"bias is Float \[8\]"),
        (lambda: ops.row_gates(x, "sigmoid", bias.double(), None, 1.0), "bias is Double"),
        (lambda: ops.row_gates(x, "decay", bias, None, 1.0), "rate should be a tensor for the gate decay"),
        (lambda: ops.row_gates(x, "sigmoid", bias, bias, 1.0), "rate should be a tensor for the gate decay"),
        (
            lambda: ops.row_gates_backward(x[:2], x, "sigmoid", bias, None, 1.0, True),
            r"dy has shape \[2, 16\]",
        ),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call()
