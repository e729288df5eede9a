"""The kernels of linear_path, which compute an injected memory's rows and gates, against formulas in
float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from girih.conversion import liza
from girih.conversion.config import Injection
from girih.conversion.projections import Projections
from girih.conversion.rows import ChannelGate, PooledGate, VirtualRows
from padding import Padded

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SUMS = [  # dtypes of x and of its sum
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float32, torch.float16),
]
SIZES = Projections(("q", "k", "v"), "o", None, hidden_size=256, heads=4, kv_heads=2, head_dim=64)
WIDTHS = [8, 24, 32, 40, 64, 72, 128, 136, 248, 256]


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_of(q, k, v, n):
    """The rows of q, k, v `[B, T, heads, D]` by the formulas (eq. 4, 22), in the dtype of the inputs."""

    def unit(x):
        y = F.silu(x)
        return y / y.norm(dim=-1, keepdim=True).clamp(min=1e-6)

    def differences(x):
        rows = [unit(x)]
        for _ in range(1, n):
            rows.append((rows[-1] - F.pad(rows[-1], (0, 0, 0, 0, 1, 0))[:, :-1]) / 2)
        return torch.stack(rows, 2).flatten(1, 2)

    return unit(q), differences(k), differences(v)


def gate_of(total):
    """beta of running sums `[B, T, H, D]` (eq. 5)."""
    rank = torch.arange(1, total.shape[1] + 1, device=total.device, dtype=total.dtype)
    return (total / rank[:, None, None]).sigmoid()


def assert_close(got, want, name=""):
    """Within two roundings of the result plus some fp32 roundings of the largest result."""
    assert got.shape == want.shape, name
    if want.numel():
        want, info = want.detach(), torch.finfo(got.dtype)
        beyond = want.abs() > info.max
        assert got[beyond].isinf().all(), name
        got, want = got.masked_fill(beyond, 0), want.masked_fill(beyond, 0)
        bound = 2 * info.eps * (want.abs() + info.smallest_normal) + 2e-6 * (1e-2 + want.abs().amax())
        error = (got.double() - want).abs()
        assert (error <= bound).all(), f"{name}: off by {error.max().item():.3g}"


def qkv_of(x, query_heads):
    """q, k and v of x `[B, T, query_heads + 2 heads, D]`."""
    heads = (x.shape[2] - query_heads) // 2
    return x.split([query_heads, heads, heads], 2)


def check_rows(run, run_backward, sizes, D, n, dtype, scale=2.0):
    """`run(q, k, v, n)` and `run_backward(dq, dk, dv, q, k, v, n)`; sizes: B, T, query heads, heads."""
    B, T, query_heads, heads = sizes
    qkv = qkv_of((scale * normal(B, T, query_heads + 2 * heads, D)).to(dtype), query_heads)
    wide = [x.double().requires_grad_() for x in qkv]
    want = rows_of(*wide, n)
    found = run(*qkv, n)
    for name, got, exact in zip("qkv", found, want, strict=True):
        assert got.dtype == dtype
        assert_close(got, exact, name)
    grads = [normal(*y.shape, dtype=dtype, seed=i + 1) for i, y in enumerate(want)]
    exact = torch.autograd.grad(want, wide, [g.double() for g in grads])
    for name, got, dx in zip("qkv", run_backward(*grads, *qkv, n), exact, strict=True):
        assert got.dtype == dtype
        assert_close(got, dx, f"d{name}")


def check_sum(run, sizes, D, x_dtype, total_dtype, from_end):
    """`run(x, from_end, dtype)`; sizes: B, T, heads."""
    x = normal(*sizes, D, dtype=x_dtype)
    wide = x.double()
    want = wide.flip(1).cumsum(1).flip(1) if from_end else wide.cumsum(1)
    found = run(x, from_end, total_dtype)
    assert found.dtype == total_dtype and found.is_contiguous()
    assert_close(found, want)


def check_gate(run, run_backward, sizes, D, dtype):
    total = (3 * normal(*sizes, D)).cumsum(1).to(dtype)
    wide, dbeta = total.double().requires_grad_(), normal(*sizes, seed=1)
    want = gate_of(wide).mean(-1)
    found = run(total)
    assert found.dtype == torch.float32
    assert_close(found, want, "beta")
    (dtotal,) = torch.autograd.grad(want, wide, dbeta.double())
    assert_close(run_backward(dbeta, total), dtotal, "dtotal")


def check_channel_gate(run, run_backward, sizes, D, n, dtype):
    B, T, heads = sizes
    total = (3 * normal(*sizes, D)).cumsum(1).to(dtype)
    wide, dbeta = total.double().requires_grad_(), normal(B, T * n, heads, D, dtype=dtype, seed=1)
    want = gate_of(wide).repeat_interleave(n, 1)
    found = run(total, n)
    assert found.dtype == dtype
    assert_close(found, want, "beta")
    (dtotal,) = torch.autograd.grad(want, wide, dbeta.double())
    assert_close(run_backward(dbeta, total, n), dtotal, "dtotal")


def on_gpu(op):
    """Runs the operator on the GPU for tensors on the CPU."""

    def run(*arguments):
        device_arguments = (x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in arguments)
        found = getattr(torch.ops.girih, op)(*device_arguments)
        return found.cpu() if isinstance(found, torch.Tensor) else [x.cpu() for x in found]

    return run


ROWS = on_gpu("virtual_rows"), on_gpu("virtual_rows_backward")
SUM = on_gpu("running_sum")
GATE = on_gpu("pooled_gate"), on_gpu("pooled_gate_backward")
CHANNEL_GATE = on_gpu("channel_gate"), on_gpu("channel_gate_backward")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", WIDTHS)
def test_rows_of_every_width(D, dtype):
    check_rows(*ROWS, (2, 5, 3, 1), D, 2, dtype)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 15, 16, 17, 18, 31, 32, 33, 70])
def test_rows_of_every_length(T, n):
    check_rows(*ROWS, (3, T, 2, 2), 40, n, torch.float32)


@pytest.mark.parametrize("sizes", [(0, 4, 2, 1), (2, 0, 2, 1), (1, 9, 0, 2), (1, 9, 5, 0), (1, 3000, 7, 3)])
def test_rows_of_any_heads_and_none(sizes):
    check_rows(*ROWS, sizes, 64, 2, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-8, 1e-3, 30.0])
def test_rows_that_are_nearly_zero_or_large(scale, dtype):
    check_rows(*ROWS, (1, 6, 2, 1), 64, 2, dtype, scale)


@pytest.mark.parametrize("from_end", [False, True])
@pytest.mark.parametrize("pair", SUMS, ids=str)
@pytest.mark.parametrize("sizes", [(0, 4, 2), (2, 0, 2), (1, 1, 1), (2, 63, 3), (1, 64, 1), (3, 2000, 5)])
def test_sums_of_any_sizes(sizes, pair, from_end):
    for D in (8, 24, 64):
        check_sum(SUM, sizes, D, *pair, from_end)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", WIDTHS)
def test_gates_of_every_width(D, dtype):
    check_gate(*GATE, (2, 65, 3), D, dtype)


@pytest.mark.parametrize("sizes", [(0, 4, 2), (2, 0, 2), (1, 1, 1), (3, 2000, 5)])
def test_gates_of_any_sizes(sizes):
    check_gate(*GATE, sizes, 64, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", WIDTHS)
def test_gates_of_channels_of_every_width(D, dtype):
    check_channel_gate(*CHANNEL_GATE, (2, 65, 3), D, 2, dtype)


@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("sizes", [(0, 4, 2), (2, 0, 2), (1, 1, 1), (3, 2000, 5)])
def test_gates_of_channels_of_any_sizes(sizes, n):
    check_channel_gate(*CHANNEL_GATE, sizes, 64, n, torch.bfloat16)


@pytest.mark.parametrize("layout", ["transposed", "odd", "expanded"])
def test_any_layout_is_accepted(layout):
    def with_layout(x):
        if layout == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "odd":  # starts at an unaligned address
            return torch.cat((x.new_zeros(1), x.flatten()))[1:].view_as(x)
        return x[:, :1].expand_as(x)

    ops, shapes = torch.ops.girih, [(2, 6, 2, 40), (2, 12, 1, 40), (2, 12, 1, 40), (2, 6, 4, 40)]
    grads = [with_layout(normal(*shape, seed=i).to(DEVICE)) for i, shape in enumerate(shapes)]
    dense = [x.clone(memory_format=torch.contiguous_format) for x in grads]
    qkv, dense_qkv = qkv_of(grads[3], 2), [x.contiguous() for x in qkv_of(dense[3], 2)]
    rows = ops.virtual_rows(*qkv, 2), ops.virtual_rows(*dense_qkv, 2)
    both = (
        ops.virtual_rows_backward(*grads[:3], *qkv, 2),
        ops.virtual_rows_backward(*dense[:3], *dense_qkv, 2),
    )
    for got, want in (*zip(*rows, strict=True), *zip(*both, strict=True)):
        assert got.is_contiguous() and got.equal(want)
    for from_end in (False, True):
        total = ops.running_sum(qkv[1], from_end, torch.float32)
        assert total.is_contiguous() and total.equal(ops.running_sum(dense_qkv[1], from_end, torch.float32))
    assert ops.pooled_gate(grads[3]).equal(ops.pooled_gate(dense[3]))
    assert ops.channel_gate(grads[3], 2).equal(ops.channel_gate(dense[3], 2))
    assert ops.channel_gate_backward(grads[1], dense[2][:, :6], 2).equal(
        ops.channel_gate_backward(dense[1], dense[2][:, :6], 2)
    )


def test_no_access_outside_the_tensors():
    pad, ops = Padded(16, range(4), outer=1, device=DEVICE), torch.ops.girih
    shapes = [(2, 6, 4, 40), (2, 6, 2, 40), (2, 12, 1, 40), (2, 12, 1, 40), (2, 6, 1, 40), (2, 6, 1, 40)]
    x, dq, dk, dv, k, v = (pad(normal(*shape, seed=i)) for i, shape in enumerate(shapes))
    assert all(out.isfinite().all() for out in ops.virtual_rows(dq, k, v, 2))
    assert all(out.isfinite().all() for out in ops.virtual_rows_backward(dq, dk, dv, dq, k, v, 2))
    assert ops.running_sum(x, False, torch.float32).isfinite().all()
    assert ops.running_sum(x, True, torch.float16).isfinite().all()
    assert ops.pooled_gate(x).isfinite().all()
    assert ops.pooled_gate_backward(normal(2, 6, 4).to(DEVICE), x).isfinite().all()
    assert ops.channel_gate(dq, 2).isfinite().all()
    assert ops.channel_gate_backward(dk, dv[:, :6], 2).isfinite().all()
    pad.assert_untouched()


def test_equal_calls_have_the_same_bits():
    x, ops = normal(3, 500, 12, 64, dtype=torch.bfloat16).to(DEVICE), torch.ops.girih

    def run_once():
        rows, total = ops.virtual_rows(*qkv_of(x, 4), 2), ops.running_sum(x, False, x.dtype)
        gates = ops.pooled_gate(x), ops.channel_gate(x, 2), ops.channel_gate_backward(x, x, 1)
        return *rows, total, *ops.virtual_rows_backward(*rows, *qkv_of(x, 4), 2), *gates

    assert all(a.equal(b) for a, b in zip(run_once(), run_once(), strict=True))


def test_invalid_arguments_are_refused():
    x, ops = normal(2, 6, 4, 40).to(DEVICE), torch.ops.girih
    for call, message in [
        (lambda: ops.virtual_rows(x[..., :12], x, x, 2), "q is Float"),
        (lambda: ops.virtual_rows(x.double(), x, x, 2), "q is Double"),
        (lambda: ops.virtual_rows(x, x[0], x, 2), "k has shape"),
        (lambda: ops.virtual_rows(x, x[:, :5], x, 2), r"k is Float \[2, 5, 4, 40\]"),
        (lambda: ops.virtual_rows(x, x, x[:, :, :3], 2), r"v is Float \[2, 6, 3, 40\]"),
        (lambda: ops.virtual_rows(x, x, x.half(), 2), "v is Half"),
        (lambda: ops.virtual_rows(x, x, x, 0), "n is 0"),
        (lambda: ops.virtual_rows(x, x, x, 5), "n is 5"),
        (lambda: ops.virtual_rows_backward(x, x, x, x, x, x, 2), r"dk has shape \[2, 6, 4, 40\]"),
        (lambda: ops.running_sum(x[0], False, x.dtype), "x is Float"),
        (lambda: ops.running_sum(x, False, torch.bfloat16), "dtype is BFloat16"),
        (lambda: ops.running_sum(x.half(), False, torch.float16), "dtype is Half"),
        (lambda: ops.pooled_gate(x[0]), "total is Float"),
        (lambda: ops.pooled_gate_backward(x[..., 0].half(), x), "dbeta is Half"),
        (lambda: ops.channel_gate(x[0], 1), "total is Float"),
        (lambda: ops.channel_gate(x, 0), "n is 0"),
        (lambda: ops.channel_gate_backward(x, x, 2), r"dbeta has shape \[2, 6, 4, 40\]"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call()


def mean_of(x):
    """The gate of x `[B, T, H, D]` (eq. 5)."""
    return gate_of(x.cumsum(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_functions_differentiate(dtype):
    x = normal(2, 9, 4, 64, dtype=dtype).to(DEVICE).requires_grad_()
    for found, want in (
        (VirtualRows.apply(*qkv_of(x, 2), 2), rows_of(*qkv_of(x.double(), 2), 2)),
        ([PooledGate.apply(x)], [mean_of(x.double()).mean(-1)]),
        ([ChannelGate.apply(x, 2)], [mean_of(x.double()).repeat_interleave(2, 1)]),
    ):
        for got, exact in zip(found, want, strict=True):
            assert (got.double() - exact).norm() <= 2 * torch.finfo(dtype).eps * exact.norm()
        grads = [normal(*y.shape, seed=i).to(y) for i, y in enumerate(found)]
        (got,) = torch.autograd.grad(found, x, grads)
        (exact,) = torch.autograd.grad(want, x, [g.double() for g in grads])
        assert got.dtype == dtype
        assert (got.double() - exact.double()).norm() <= 4 * torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize("gate_per", ["head", "channel"])
@pytest.mark.parametrize("n", [1, 2])
def test_an_injected_layer_is_as_accurate_as_its_parts(n, gate_per, monkeypatch):
    """In bf16, outputs and gradients err against float64 by at most 1.1 times the error of the separate
    parts."""
    torch.manual_seed(0)
    path = liza.LinearPath(SIZES, Injection(n=n, gate_per=gate_per)).to(DEVICE)
    x = normal(2, 130, (4 + 2 * 2) * 64).to(DEVICE)
    exact = copy.deepcopy(path).double()

    def gradients(path, x):
        x = x.detach().requires_grad_()
        y = path(x.split([4 * 64, 2 * 64, 2 * 64], -1))[0]
        return y, torch.autograd.grad(y, x, normal(*y.shape, seed=1).to(y))[0]

    calls = []
    rows = liza.VirtualRows.apply
    monkeypatch.setattr(liza.VirtualRows, "apply", lambda *a: (calls.append(a), rows(*a))[1])
    found = gradients(path.bfloat16(), x.bfloat16())
    assert len(calls) == 1
    monkeypatch.setattr(liza, "has_kernel", lambda x: False)
    parts, want = gradients(path, x.bfloat16()), gradients(exact, x.bfloat16().double())
    for result, reference, truth in zip(found, parts, want, strict=True):
        error, allowed = (result.double() - truth).norm(), (reference.double() - truth).norm()
        assert error <= 1.1 * allowed + 1e-3 * truth.norm()
