"""Edge cases of the elementwise kernels: row-wise norms, rotary positions, products and the loss."""

import copy

import pytest
import torch
import torch.nn.functional as F
from girih.models import GirihConfig, GirihForCausalLM
from girih.nn import Block, GatedSlotAttention, RMSNorm, fused, linears, loss, swiglu
from girih.nn.functional.fused import residual_norm, silu_norm, unit_rows
from girih.nn.functional.loss import linear_cross_entropy
from girih.nn.functional.rotary import rotary, rotary_cos_sin, rotary_frequencies, split_and_rotate
from girih.nn.layers.swiglu import silu_product
from padding import Padded
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (dtype of x and the sums, dtype of the branch and the normalised rows)
PAIRS = [(torch.float32, dtype) for dtype in DTYPES] + [(dtype, dtype) for dtype in DTYPES[1:]]
WIDTHS = [8, 40, 64, 72, 128, 136, 256, 264, 1024, 1032, 2048, 2056, 4096, 4104, 8192]


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def assert_close(got, want, terms=1, name=""):
    """Within two roundings of the result plus the rounding of an fp32 sum of n terms of the result's size."""
    assert got.shape == want.shape, name
    if not want.numel():
        return
    bound = 2 * torch.finfo(got.dtype).eps * want.abs() + 4e-7 * terms**0.5 * (1 + want.abs().amax())
    error = (got.double() - want).abs()
    assert (error <= bound).all(), f"{name}: off by {error.max().item():.3g}"


def norm_of(width, dtype=torch.float32):
    norm = RMSNorm(width, 1e-5).to(DEVICE, dtype)
    with torch.no_grad():
        norm.weight.copy_(normal(width, seed=9))
    return norm


@pytest.fixture
def without_kernels(monkeypatch):
    def disable():
        for module in (fused, swiglu, loss, linears):
            monkeypatch.setattr(module, "has_fused_kernel", lambda *tensors, needs_contiguous=True: False)

    return disable


OPS = (
    "residual_norm",
    "residual_norm_backward",
    "silu_norm",
    "silu_norm_backward",
    "silu_product_forward",
    "silu_product_backward",
    "cross_entropy_",
)


@pytest.fixture
def kernels():
    """The names of the kernels that are called."""
    called = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, arguments=(), options=None):
            if op.namespace == "girih" and (name := op._schema.name.split("::")[1]) in OPS:
                called.append(name)
            return op(*arguments, **(options or {}))

    with Watch():
        yield called


def check_norm(rows, width, pair, with_branch, with_after, weight=torch.float32):
    sums, row_dtype = pair
    norm = norm_of(width, weight)
    x = normal(rows, width, dtype=sums).requires_grad_()
    branch = normal(rows, width, dtype=row_dtype, seed=1).requires_grad_() if with_branch else None
    dy, after = normal(rows, width, dtype=row_dtype, seed=2), normal(rows, width, dtype=sums, seed=3)
    with torch.autocast("cuda", row_dtype if row_dtype != torch.float32 else None, enabled=row_dtype != sums):
        s, y = residual_norm(norm, x, branch)
    assert "ResidualNorm" in y.grad_fn.name() and (s.dtype, y.dtype) == pair
    leaves = [t for t in (x, branch, norm.weight) if t is not None]
    found = torch.autograd.grad((s, y), leaves, (after if with_after else torch.zeros_like(s), dy))

    # The sum is stored in the dtype of x, and the norm reads the stored sum.
    exact = (x if branch is None else x.double() + branch.double()).detach()
    assert_close(s, exact.double(), name="s")
    stored, w = s.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    want = F.rms_norm(stored, (width,), w, 1e-5)
    assert_close(y, want.detach(), width, "y")
    ds, dweight = torch.autograd.grad(want, (stored, w), dy.double())
    ds = ds + after.double() if with_after else ds
    for name, got in zip(["dx", "dbranch"] if with_branch else ["dx"], found, strict=False):
        assert got.dtype == (sums if name == "dx" else row_dtype)
        assert_close(got, ds, width, name)
    assert found[-1].dtype == weight
    assert_close(found[-1], dweight if rows else torch.zeros_like(dweight), max(rows, 1), "dweight")


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_of_every_width(width, pair):
    check_norm(5, width, pair, with_branch=True, with_after=True)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 1055, 1056, 1057, 9000])
def test_norms_of_every_number_of_rows(rows):
    check_norm(rows, 264, PAIRS[1], with_branch=True, with_after=True)


@pytest.mark.parametrize("weight", DTYPES, ids=str)
@pytest.mark.parametrize("with_after", [False, True])
@pytest.mark.parametrize("with_branch", [False, True])
def test_norms_with_and_without_a_branch(with_branch, with_after, weight):
    check_norm(33, 64, PAIRS[1], with_branch, with_after, weight)
    check_norm(33, 64, PAIRS[3], with_branch, with_after, weight)


def test_gradients_of_single_outputs():
    norm, x, branch = norm_of(64), normal(3, 64).requires_grad_(), normal(3, 64, seed=1).requires_grad_()
    s, y = residual_norm(norm, x, branch)
    for grad in torch.autograd.grad(s, (x, branch), torch.ones_like(s), retain_graph=True):
        assert grad.equal(torch.ones_like(s))
    (alone,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    both = torch.autograd.grad((s, y), branch, (torch.ones_like(s), torch.ones_like(y)))[0]
    assert_close(both, alone.double() + 1)


@pytest.mark.parametrize("weight", [torch.float32, None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(5, width) for width in WIDTHS] + [(0, 264), (1, 264), (1057, 264)])
def test_norms_of_silu(rows, width, dtype, weight):
    norm = norm_of(width, weight or dtype)
    x, dy = (4 * normal(rows, width, dtype=dtype)).requires_grad_(), normal(rows, width, dtype=dtype, seed=2)
    y = silu_norm(norm, x)
    assert "SiluNorm" in y.grad_fn.name() and y.dtype == dtype
    found = torch.autograd.grad(y, (x, norm.weight), dy)
    wide, w = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    want = F.rms_norm(F.silu(wide), (width,), w, 1e-5)
    assert_close(y, want.detach(), width, "y")
    dx, dweight = torch.autograd.grad(want, (wide, w), dy.double())
    assert found[0].dtype == dtype and found[1].dtype == norm.weight.dtype
    assert_close(found[0], dx, width, "dx")
    assert_close(found[1], dweight if rows else torch.zeros_like(dweight), max(rows, 1), "dweight")


def test_norms_of_silu_of_extreme_inputs():
    x = torch.tensor([[0.0, -0.0, 80.0, -80.0, 300.0, -300.0, 1e-30, 3.0]], device=DEVICE).requires_grad_()
    norm, dy = norm_of(8), normal(1, 8, seed=2)
    wide = x.detach().double().requires_grad_()
    want = F.rms_norm(F.silu(wide), (8,), norm.weight.detach().double(), 1e-5)
    y = silu_norm(norm, x)
    assert_close(y, want.detach(), 8)
    assert_close(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(want, wide, dy.double())[0], 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(5, width) for width in WIDTHS] + [(0, 64), (9001, 64)])
def test_rows_of_length_one(rows, width, dtype):
    x, dy = normal(rows, 1, width, dtype=dtype).requires_grad_(), normal(rows, 1, width, dtype=dtype, seed=2)
    y = unit_rows(x)
    assert "ResidualNorm" in y.grad_fn.name() and y.dtype == dtype
    (found,) = torch.autograd.grad(y, x, dy)
    wide = x.detach().double().requires_grad_()
    want = F.normalize(wide, dim=-1)
    assert_close(y, want.detach(), width)
    assert_close(found, torch.autograd.grad(want, wide, dy.double())[0], width)


def test_rows_of_length_one_of_zeros_and_tiny_numbers():
    x = torch.zeros(3, 64, device=DEVICE)
    x[1, 5], x[2] = 1e-9, -3e-9
    y = unit_rows(x)
    assert not y[0].any() and not y[1, :5].any()
    assert abs(y[1, 5].item() - 1) < 1e-6  # the length is 1e-9, and eps is 1e-12
    torch.testing.assert_close(y[2], torch.full_like(y[2], -0.125))


def test_second_derivatives_of_rows_of_length_one():
    x = normal(5, 64).requires_grad_()

    def second(unit):
        (dx,) = torch.autograd.grad((unit(x) * normal(5, 64, seed=3)).sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), x)[0]

    torch.testing.assert_close(
        second(unit_rows), second(lambda x: F.normalize(x, dim=-1)), rtol=1e-4, atol=1e-5
    )


def test_frozen_weights_have_no_gradient(kernels):
    norm, x = norm_of(64).requires_grad_(False), normal(3, 64).requires_grad_()
    for call in (lambda: residual_norm(norm, x)[1], lambda: silu_norm(norm, x)):
        (found,) = torch.autograd.grad(call().sum(), x)
        want = torch.autograd.grad(norm(x if "silu_norm" not in kernels else F.silu(x)).sum(), x)[0]
        assert_close(found, want.double(), 64)
    assert [*kernels] == ["residual_norm", "residual_norm_backward", "silu_norm", "silu_norm_backward"]


@pytest.mark.parametrize("layout", ["transposed", "odd", "expanded"])
def test_any_layout_is_accepted(layout):
    def with_layout(x):
        if layout == "transposed":
            return x.t().contiguous().t()
        if layout == "odd":  # starts at an unaligned address
            return torch.cat((x.new_zeros(1), x.flatten()))[1:].view_as(x)
        return x[:1].expand_as(x)

    x, branch, dy, after = (with_layout(normal(6, 40, seed=i)) for i in range(4))
    weight, ops = normal(40), torch.ops.girih
    dense = [t.clone(memory_format=torch.contiguous_format) for t in (x, branch, dy, after)]
    for run in (
        lambda x, b, dy, a: ops.residual_norm(x, b, weight, 0.1, x.dtype),
        lambda x, b, dy, a: ops.residual_norm_backward(dy, a, x, weight, 0.1, True, True),
        lambda x, b, dy, a: (ops.silu_norm(x, weight, 0.1),),
        lambda x, b, dy, a: ops.silu_norm_backward(dy, x, weight, 0.1, True),
        lambda x, b, dy, a: (ops.silu_product(x, b),),
        lambda x, b, dy, a: ops.silu_product_backward(dy, x, b, True),
    ):
        for got, want in zip(run(x, branch, dy, after), run(*dense), strict=True):
            assert got.is_contiguous() and got.equal(want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (3, 40), (7, 1, 2816), (300, 4104)])
def test_products(shape, dtype):
    gate = (4 * normal(*shape, dtype=dtype)).requires_grad_()
    up, dy = normal(*shape, dtype=dtype, seed=1).requires_grad_(), normal(*shape, dtype=dtype, seed=2)
    y = silu_product(gate, up)
    found = torch.autograd.grad(y, (gate, up), dy)
    wide = [x.detach().double().requires_grad_() for x in (gate, up)]
    want = F.silu(wide[0]) * wide[1]
    for got, exact in zip((y, *found), (want, *torch.autograd.grad(want, wide, dy.double())), strict=True):
        assert got.dtype == dtype
        assert_close(got, exact.detach())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
def test_a_feed_forward_layer_is_as_accurate_as_its_parts(autocast, frozen, kernels):
    """Compared with float64; both sides use the kernels of `silu_product`."""
    torch.manual_seed(0)
    layer, x = swiglu.SwiGLU(64, 160).to(DEVICE), normal(3, 50, 64).requires_grad_()
    layer.down_proj.weight.requires_grad_(not frozen)

    def gradients(call, layer, x):
        leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
        y = call(layer, x)
        return y, *torch.autograd.grad(y, leaves, normal(*y.shape, seed=1).to(y))

    def run_parts(layer, x):
        return layer.down_proj(silu_product(layer.gate_proj(x), layer.up_proj(x)))

    with torch.autocast("cuda", autocast, enabled=autocast is not None):
        found = gradients(type(layer).__call__, layer, x)
        assert kernels == ["silu_product_forward", "silu_product_backward"]
        parts = gradients(run_parts, layer, x)
    want = gradients(
        type(layer).__call__, copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    )
    for result, reference, exact in zip(found, parts, want, strict=True):
        assert result.dtype == reference.dtype
        error, parts_error = ((y.double() - exact).norm() for y in (result, reference))
        assert error <= 1.1 * parts_error + 1e-6 * exact.norm()


def test_a_feed_forward_layer_calls_hooks_of_its_layers():
    layer, x, outputs = swiglu.SwiGLU(64, 160).to(DEVICE), normal(5, 64), []
    layer.down_proj.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    assert layer(x).equal(outputs[0])


def test_a_feed_forward_layer_does_not_save_the_product():
    layer, x = swiglu.SwiGLU(64, 4096).to(DEVICE), normal(1000, 64).requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = layer(x)
    saved_bytes = torch.cuda.memory_allocated() - before - y.nbytes
    assert saved_bytes < 2.5 * 4 * 4096 * 1000  # gate and up


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_extreme_gates(dtype):
    gate = torch.tensor([0.0, -0.0, 80.0, -80.0, 3e4, -3e4, torch.inf, -torch.inf], device=DEVICE).to(dtype)
    up = torch.ones_like(gate)
    got, want = torch.ops.girih.silu_product(gate, up), F.silu(gate.float())
    assert_close(got[:6], want[:6].double())
    assert got[6].isinf() and (got[7].isnan() == want[7].isnan())
    dgate, dup, _ = torch.ops.girih.silu_product_backward(up, gate[:6].repeat(4)[:8], up, False)
    assert dgate.isfinite().all() and dup.isfinite().all()


def entropy(z, labels, ignored=-100):
    """The loss of every row, and the gradient of their sum."""
    z = z.double().requires_grad_()
    l = F.cross_entropy(z, labels, reduction="none", ignore_index=ignored)
    return l.detach(), torch.autograd.grad(l.sum(), z)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [8, 40, 256, 4088, 4096, 4104, 32000, 50264])
def test_cross_entropies(classes, dtype):
    z = (5 * normal(19, classes)).to(dtype)
    labels = torch.randint(classes, (19,), device=DEVICE)
    labels[3], labels[7], labels[0], labels[1] = -100, -100, 0, classes - 1
    l, dz = entropy(z, labels)
    got = torch.ops.girih.cross_entropy_(z, labels, -100)
    assert_close(got, l, 30, "loss")
    assert_close(z, dz, 1, "gradient")
    assert not got[3] and not z[3].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropies_of_extreme_logits(dtype):
    z = torch.full((6, 64), -torch.inf, device=DEVICE, dtype=dtype)
    z[0, 5], z[1, :2], z[2], z[3] = 3.0, 1.0, 6e4, torch.linspace(-6e4, 6e4, 64)
    z[4], z[4, 9] = 0.0, torch.nan
    labels = torch.tensor([5, 1, 0, 63, 0, 0], device=DEVICE)
    l, dz = entropy(z[:4], labels[:4])
    got = torch.ops.girih.cross_entropy_(z, labels, -100)
    assert_close(got[:4], l)
    assert_close(z[:4], dz)
    assert got[4:].isnan().all() and z[4:].isnan().all()  # rows with a NaN, and rows that are all -inf


@pytest.mark.parametrize("label", [-1, 64, 2**40])
def test_invalid_labels_give_nan_losses(label):
    z, labels = normal(3, 64), torch.tensor([1, label, 2], device=DEVICE)
    got = torch.ops.girih.cross_entropy_(z, labels, -100)
    assert got.isnan().tolist() == [False, True, False] and z.isfinite().all()


def test_no_access_outside_the_tensors():
    pad = Padded(16, range(2), outer=1, device=DEVICE)
    x, branch, dy, after = (pad(normal(9, 40, seed=i)) for i in range(4))
    weight = Padded(8, range(1), device=DEVICE)(normal(40))
    s, y = torch.ops.girih.residual_norm(x, branch, weight, 1e-5, torch.float32)
    assert s.isfinite().all() and y.isfinite().all()
    for out in torch.ops.girih.residual_norm_backward(dy, after, s, weight, 1e-5, True, True):
        assert out.isfinite().all()
    assert torch.ops.girih.silu_norm(x, weight, 1e-5).isfinite().all()
    assert all(out.isfinite().all() for out in torch.ops.girih.silu_norm_backward(dy, x, weight, 1e-5, True))
    assert torch.ops.girih.silu_product(x, branch).isfinite().all()
    assert all(out.isfinite().all() for out in torch.ops.girih.silu_product_backward(dy, x, branch, True))
    pad.assert_untouched()
    z = pad(normal(9, 40))
    assert torch.ops.girih.cross_entropy_(z, torch.arange(9, device=DEVICE), -100).isfinite().all()
    assert z.isfinite().all()
    pad.assert_untouched(written=[z])


def test_equal_calls_have_the_same_bits():
    x, branch, dy = (normal(3000, 264, seed=i) for i in range(3))
    weight = normal(264)

    def run_once():
        s, y = torch.ops.girih.residual_norm(x, branch, weight, 1e-5, torch.float32)
        z = normal(3000, 264)
        l = torch.ops.girih.cross_entropy_(z, torch.arange(3000, device=DEVICE) % 264, -100)
        silu_grads = torch.ops.girih.silu_norm_backward(dy, x, weight, 1e-5, True)
        return (
            s,
            y,
            *silu_grads,
            *torch.ops.girih.residual_norm_backward(dy, x, s, weight, 1e-5, True, True),
            z,
            l,
        )

    for a, b in zip(run_once(), run_once(), strict=True):
        assert a.equal(b)


def check_rotary(run, run_backward, sizes, D, dtype, has_row_positions):
    """`run(x, query_heads, position, rate)` and `run_backward(dq, dk, dv, position, rate)`; sizes: B, T,
    query heads, heads. The tolerance is relative to the size of a pair, because cos and sin are rounded."""
    B, T, query_heads, heads = sizes
    position = torch.arange(T, device=DEVICE) * 7 % 5000
    if has_row_positions:
        position = position + torch.arange(B, device=DEVICE)[:, None] * 100
    rate, all_heads = (
        rotary_frequencies(D, 10000.0, torch.float32, position.device),
        [query_heads, heads, heads],
    )
    x = normal(B, T, sum(all_heads), D, dtype=dtype)
    wide = x.double().requires_grad_()
    parts = wide.split(all_heads, 2)
    cos, sin = (part[..., None, :].double() for part in rotary_cos_sin(position, D, 10000.0, dtype))

    def rotate(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def assert_rotated(got, want, source):
        size = sum(part.abs() for part in source.double().chunk(2, -1)).repeat(1, 1, 1, 2)
        assert got.dtype == dtype and got.shape == want.shape
        error = (got.double() - want).abs()
        assert (error <= (2 * torch.finfo(dtype).eps + 1e-6) * size).all(), error.max()

    want = [rotate(parts[0]), rotate(parts[1]), parts[2]]
    found = run(x, query_heads, position, rate)
    for got, exact, source in zip(found, want, x.split(all_heads, 2), strict=True):
        assert_rotated(got, exact.detach(), source)
    assert found[2].equal(x[:, :, query_heads + heads :])
    grads = [normal(*y.shape, dtype=dtype, seed=i + 1) for i, y in enumerate(want)]
    (exact,) = torch.autograd.grad(want, wide, [g.double() for g in grads])
    assert_rotated(run_backward(*grads, position, rate), exact, torch.cat(grads, 2))


@pytest.mark.parametrize("has_row_positions", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [16, 48, 64, 96, 128, 256])
def test_rotary_of_every_width(D, dtype, has_row_positions):
    check_rotary(
        torch.ops.girih.rotary, torch.ops.girih.rotary_backward, (2, 33, 3, 1), D, dtype, has_row_positions
    )


@pytest.mark.parametrize("sizes", [(0, 3, 2, 1), (2, 0, 2, 1), (1, 5, 0, 2), (1, 5, 3, 0), (3, 700, 40, 8)])
def test_rotary_of_any_number_of_heads(sizes):
    check_rotary(torch.ops.girih.rotary, torch.ops.girih.rotary_backward, sizes, 128, torch.bfloat16, False)


@pytest.mark.parametrize("heads", [(2, 2, 2), (4, 1, 1)])
def test_split_and_rotate_equals_rotary(heads):
    """Equal up to a rounding in fp32, also for first and second derivatives."""
    x, position = normal(2, 9, sum(heads), 32).requires_grad_(), torch.arange(3, 12, device=DEVICE)

    def parts(x):
        q, k, v = x.split(heads, 2)
        return rotary(q, position), rotary(k, position), v

    def penalty(f):
        y = torch.cat(f(x), 2)
        (dx,) = torch.autograd.grad(y.square().sum() * y.sum(), x, create_graph=True)
        return y, dx, *torch.autograd.grad(dx.square().sum(), x)

    found = penalty(lambda x: split_and_rotate(x, heads, position, 10000.0))
    assert "Rotary" in split_and_rotate(x, heads, position, 10000.0)[0].grad_fn.name()
    for got, want in zip(found, penalty(parts), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())
    with torch.no_grad():
        assert all(
            a.equal(b) for a, b in zip(split_and_rotate(x, heads, position, 10000.0), parts(x), strict=True)
        )


def test_invalid_arguments_are_refused():
    position, rate, all_heads = torch.arange(6, device=DEVICE), normal(8), normal(2, 6, 4, 16)
    x, weight, label = normal(4, 16), normal(16), torch.zeros(4, dtype=torch.long, device=DEVICE)
    ops = torch.ops.girih
    for call, message in [
        (lambda: ops.residual_norm(x[:, :12].contiguous(), None, weight[:12], 0.1, x.dtype), "multiple of 8"),
        (lambda: ops.residual_norm(x, None, weight[:8], 0.1, x.dtype), r"weight has shape \[8\]"),
        (lambda: ops.residual_norm(x, x[:2], weight, 0.1, x.dtype), r"branch has shape \[2, 16\]"),
        (lambda: ops.residual_norm(x.bfloat16(), None, weight, 0.1, torch.float16), "x is BFloat16"),
        (lambda: ops.residual_norm(x.t(), None, normal(4), 0.1, x.dtype), r"x has shape \[16, 4\]"),
        (lambda: ops.residual_norm_backward(x, None, x, None, 0.1, False, True), "weight is None"),
        (lambda: ops.silu_norm(x, weight[:8], 0.1), r"silu_norm: weight has shape \[8\]"),
        (lambda: ops.rotary(all_heads[0], 2, position, rate), "x has shape"),
        (lambda: ops.rotary(normal(2, 6, 4, 24), 2, position, normal(12)), "multiple of 16"),
        (lambda: ops.rotary(all_heads.double(), 2, position, rate), "x is Double"),
        (lambda: ops.rotary(all_heads, 3, position, rate), "query_heads is 3"),
        (lambda: ops.rotary(all_heads, 2, position[:5], rate), r"position is Long \[5\]"),
        (lambda: ops.rotary(all_heads, 2, position.int(), rate), "position is Int"),
        (lambda: ops.rotary(all_heads, 2, position, normal(16)), r"rate is Float \[16\]"),
        (
            lambda: ops.rotary_backward(all_heads, all_heads, all_heads[:, :5], position, rate),
            r"dv has shape \[2, 5, 4, 16\]",
        ),
        (lambda: ops.cross_entropy_(normal(8, 8).t(), label, -100), "contiguous"),
        (lambda: ops.cross_entropy_(normal(9 * 16)[4:68].view(4, 16), label, -100), "16 bytes after"),
        (lambda: ops.silu_product(x, x.bfloat16()), "up is BFloat16"),
        (lambda: ops.silu_product(x, x[:2]), r"up is Float \[2, 16\]"),
        (lambda: ops.silu_product_backward(*[x[:1, :4].contiguous()] * 3, False), "multiple of 8"),
        (lambda: ops.silu_product_backward(*[x.double()] * 3, False), "gate is Double"),
        (lambda: ops.cross_entropy_(x, label[:3], -100), r"labels are Long \[3\]"),
        (lambda: ops.cross_entropy_(x, label.int(), -100), "labels are Int"),
        (lambda: ops.cross_entropy_(x[:, :9].contiguous(), label, -100), "multiple of 8"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call()


@pytest.mark.parametrize("dtype, width", [(torch.float32, 3), (torch.float64, 8)], ids=str)
def test_products_without_a_kernel_use_pytorch(dtype, width):
    gate, up = (normal(3, width, seed=i).to(dtype).requires_grad_() for i in range(2))
    for result, want in (
        (silu_product(gate, up), F.silu(gate) * up),
        *zip(
            torch.autograd.grad(silu_product(gate, up).square().sum(), (gate, up)),
            torch.autograd.grad((F.silu(gate) * up).square().sum(), (gate, up)),
            strict=True,
        ),
    ):
        torch.testing.assert_close(result, want)


@pytest.mark.parametrize("why", ["hook", "double", "width", "strides", "class"])
def test_other_calls_use_pytorch(why, kernels):
    width = 12 if why == "width" else 64
    norm, x = norm_of(width), normal(4, width)
    if why == "hook":
        norm.register_forward_hook(lambda module, inputs, output: output + 1)
    if why == "double":
        norm, x = norm.double(), x.double()
    if why == "strides":
        x = normal(width, 4).t()
    if why == "class":
        norm = torch.nn.RMSNorm(width, 1e-5, device=DEVICE)
    s, y = residual_norm(norm, x)
    assert not kernels and s is x and y.equal(norm(x))


def test_torch_func_transforms_use_pytorch():
    norm, x = norm_of(64), normal(3, 5, 64)

    def f(x):
        s, y = residual_norm(norm, x, 0.5 * x)
        return silu_product(y, s).square().sum()

    def plain(x):
        return (F.silu(norm(x * 1.5)) * x * 1.5).square().sum()

    want = torch.stack([torch.autograd.functional.jacobian(plain, part) for part in x])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(f))(x), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.func.vmap(f)(x), torch.stack([plain(part) for part in x]))


def test_gradients_of_gradients():
    norm, x = norm_of(16), normal(2, 16)

    def f(x):
        s, y = residual_norm(norm, x, 0.5 * x)
        return silu_product(y, s).sum()

    def plain(x):
        return (F.silu(norm(x * 1.5)) * x * 1.5).sum()

    for result, reference in ((f, plain), *feed_forward()):
        found, want = (torch.autograd.functional.hessian(g, x) for g in (result, reference))
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def feed_forward():
    torch.manual_seed(0)
    layer = swiglu.SwiGLU(16, 40).to(DEVICE)

    def f(x):
        return layer(x).square().sum()

    def plain(x):
        return layer.down_proj(F.silu(layer.gate_proj(x)) * layer.up_proj(x)).square().sum()

    return [(f, plain)]


def errors_of(model, exact, ids):
    """The error of the loss, and the relative errors of all gradients, against float64."""
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        found = model(input_ids=ids, labels=ids, use_cache=False).loss
    found.backward()
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    return [(found.double() - exact.loss).abs()] + [
        (p.grad.double() - q.grad).norm() / q.grad.norm() for p, q in pairs
    ]


@pytest.mark.parametrize("mixer", ["gsa", "gated_deltanet", "attention"])
def test_a_model_trains_as_accurately_as_with_pytorch(mixer, kernels, without_kernels):
    torch.manual_seed(0)
    sizes = {"vocab_size": 1000, "hidden_size": 64, "num_heads": 2, "num_hidden_layers": 2}
    model = GirihForCausalLM(GirihConfig(mixer=mixer, loss_in_chunks=True, **sizes)).to(DEVICE).train()
    exact = copy.deepcopy(model).double()
    ids = torch.randint(1000, (3, 100), device=DEVICE)
    exact.loss = exact(input_ids=ids, labels=ids, use_cache=False).loss
    exact.loss.backward()
    exact.loss = exact.loss.detach()
    kernels.clear()
    found = errors_of(model, exact, ids)
    silu_ops = {"silu_norm", "silu_norm_backward"}
    assert {*kernels} == {*OPS} - (set() if mixer == "gsa" else silu_ops)
    without_kernels()
    pytorch_errors = errors_of(model, exact, ids)
    for result, reference in zip(found, pytorch_errors, strict=True):
        assert result <= 2 * reference + 1e-3


def test_a_loss_without_gradients():
    x, weight, labels = normal(50, 16), normal(64, 16, seed=1), torch.arange(50, device=DEVICE)
    with torch.no_grad():
        found = linear_cross_entropy(x, weight, labels)
    torch.testing.assert_close(found, F.cross_entropy(x @ weight.T, labels))


def test_checkpointed_blocks_have_the_same_gradients():
    torch.manual_seed(0)
    block = Block(GatedSlotAttention(64, num_heads=2, num_slots=16), 64, 160).to(DEVICE)
    x = normal(2, 70, 64).requires_grad_()
    found = []
    for run in (
        lambda: block(x)[0],
        lambda: torch.utils.checkpoint.checkpoint(lambda x: block(x)[0], x, use_reentrant=False),
    ):
        with torch.autocast("cuda", torch.bfloat16):
            y = run()
        found.append(torch.autograd.grad(y.float().square().sum(), [x, *block.parameters()]))
    for a, b in zip(*found, strict=True):
        assert a.equal(b)


@pytest.mark.large
def test_more_than_2_31_elements():
    gate = torch.zeros(2**31 // 4096 + 1, 4096, dtype=torch.bfloat16, device=DEVICE)
    gate[-1] = normal(4096)
    up = torch.ones_like(gate)
    y = torch.ops.girih.silu_product(gate, up)
    assert_close(y[-1], F.silu(gate[-1].double()))
    dgate, dup, _ = torch.ops.girih.silu_product_backward(up, gate, up, False)
    assert_close(dup[-1], F.silu(gate[-1].double()))
    del y, dgate, dup
    s, y = torch.ops.girih.residual_norm(gate, None, normal(4096), 1e-5, torch.bfloat16)
    assert_close(y[-1], F.rms_norm(gate[-1].double(), (4096,), normal(4096).double(), 1e-5), 4096)
    ds, _, _ = torch.ops.girih.residual_norm_backward(up, None, gate, normal(4096), 1e-5, False, True)
    assert ds[-1].isfinite().all() and ds[-1].any()
    del s, y, ds, up
    labels = torch.full((len(gate),), 7, device=DEVICE)
    l, _ = entropy(gate[-1:], labels[-1:])
    found = torch.ops.girih.cross_entropy_(gate, labels, -100)
    assert_close(found[-1:], l, 30)
