"""girih.nn.functional.fused: dispatch to kernels, and inputs that no kernel supports."""

import pytest
import torch
import torch.nn.functional as F
from conftest import needs_cuda
from girih._torch_internals import is_called_plainly
from girih.models import GirihConfig, GirihForCausalLM
from girih.nn import Block, RMSNorm
from girih.nn.functional.fused import residual_norm, silu_product, unit_rows
from girih.nn.functional.loss import linear_cross_entropy
from small_models import config_of


def norm_of(width, **how):
    norm = RMSNorm(width, 1e-5).to(**how)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.1 * torch.randn(width))
    return norm


@pytest.mark.parametrize("width", [16, 12])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_unit_rows_of_zeros_and_of_tiny_values(dtype, width, device):
    x = torch.zeros(2, width, dtype=dtype, device=device)
    x[1, 3] = -(2.0**-24)  # the smallest fp16 number
    want = torch.zeros_like(x)
    want[1, 3] = -1
    torch.testing.assert_close(unit_rows(x), want)


@pytest.mark.parametrize("shape", [(3, 5, 2, 64), (7, 12), (0, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_unit_rows_match_normalize(dtype, shape, device):
    x = torch.randn(shape).to(device, dtype).requires_grad_()
    dy, wide = torch.randn(shape).to(x), x.detach().double().requires_grad_()
    y, want = unit_rows(x), F.normalize(wide, dim=-1)
    both = (y, *torch.autograd.grad(y, x, dy)), (want, *torch.autograd.grad(want, wide, dy.double()))
    rtol, atol = (0.02, 0.01) if dtype == torch.bfloat16 else (1e-5, 1e-6)
    for got, exact in zip(*both, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), exact, rtol=rtol, atol=atol)


def test_unit_rows_second_derivatives(device):
    x, dy = torch.randn(5, 64, device=device, requires_grad=True), torch.randn(5, 64, device=device)

    def second(unit):
        (dx,) = torch.autograd.grad((unit(x) * dy).sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), x)[0]

    want = second(lambda x: F.normalize(x, dim=-1))
    torch.testing.assert_close(second(unit_rows), want, rtol=1e-4, atol=1e-5)


HOOKS = {
    "forward": lambda norm, seen: norm.register_forward_hook(lambda *_: seen.append(1)),
    "before forward": lambda norm, seen: norm.register_forward_pre_hook(lambda *_: seen.append(1)),
    "backward": lambda norm, seen: norm.register_full_backward_hook(lambda *_: seen.append(1)),
    "before backward": lambda norm, seen: norm.register_full_backward_pre_hook(lambda *_: seen.append(1)),
    "of all": lambda norm, seen: torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(1) if module is norm else None
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_a_norm_run(kind, device):
    norm, seen = norm_of(16, device=device), []
    assert is_called_plainly(norm)
    handle = HOOKS[kind](norm, seen)
    try:
        assert not is_called_plainly(norm)
        residual_norm(norm, torch.randn(2, 16, device=device, requires_grad=True))[1].sum().backward()
    finally:
        handle.remove()
    assert seen == [1] and is_called_plainly(norm)


def test_nan_loss_has_nan_gradients():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.arange(4))
    loss.backward()
    assert x.grad.isfinite().all()
    with torch.no_grad():
        x[0, 0] = torch.nan
    loss = linear_cross_entropy(x, weight, torch.arange(4))
    assert all(grad.isnan().all() for grad in torch.autograd.grad(loss, (x, weight)))


@needs_cuda
@pytest.mark.parametrize("label", [-1, 16])
def test_label_out_of_range_gives_nan_gradients(label):
    x, weight = (torch.randn(n, 8, device="cuda", requires_grad=True) for n in (4, 16))
    labels = torch.tensor([1, 2, label, 3], device="cuda")
    loss = linear_cross_entropy(x, weight, labels)
    assert loss.isnan()
    assert all(grad.isnan().all() for grad in torch.autograd.grad(loss, (x, weight)))


@needs_cuda
def test_labels_of_32_bits():
    x, weight, labels = torch.randn(4, 8).cuda(), torch.randn(16, 8).cuda(), torch.arange(4).cuda()
    torch.testing.assert_close(
        linear_cross_entropy(x, weight, labels.int()), linear_cross_entropy(x, weight, labels)
    )


@pytest.mark.parametrize("width", [16, 20])
@pytest.mark.parametrize("branch_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_residual_norm_adds_any_branch(width, branch_dtype, device):
    """The sum is also right for widths and dtypes without a kernel."""
    norm, x = norm_of(width, device=device), torch.randn(3, width, device=device)
    branch = torch.randn(3, width, device=device).to(branch_dtype)
    for part in (branch, branch[:1]):
        s, y = residual_norm(norm, x, part)
        torch.testing.assert_close(s, x + part)
        torch.testing.assert_close(y, norm(x + part), rtol=1e-5, atol=1e-5)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_accepts_gradients_that_are_views(dtype):
    norm, x = norm_of(40, device="cuda", dtype=dtype), torch.randn(5, 40, device="cuda", dtype=dtype)
    x.requires_grad_()
    s, y = residual_norm(norm, x, x * 2)
    grads = [torch.randn(201, device="cuda", dtype=dtype)[1:].view(5, 40) for _ in range(2)]
    for outs in ((s, y), (silu_product(x, x * 2),) * 2):
        for grad_outputs in (grads, [grad.t().contiguous().t() for grad in grads]):
            found = torch.autograd.grad(outs, x, grad_outputs, retain_graph=True)[0]
            expected = torch.autograd.grad(outs, x, [g.clone() for g in grads], retain_graph=True)[0]
            assert found.equal(expected)


@needs_cuda
@pytest.mark.parametrize("frozen", ["nothing", "weight", "x"])
def test_residual_norm_derivatives_with_frozen_inputs(frozen):
    norm, x = norm_of(16, device="cuda"), torch.randn(3, 16, device="cuda")
    norm.weight.requires_grad_(frozen != "weight")
    x.requires_grad_(frozen != "x")
    inputs = [t for t in (x, norm.weight) if t.requires_grad]

    def derivatives(call):
        s, y = call()
        first = torch.autograd.grad(y.pow(3).sum() + s.sum() * 0, inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs, allow_unused=True)
        return *first, *second

    by_kernel = derivatives(lambda: residual_norm(norm, x))
    by_pytorch = derivatives(lambda: (x, F.rms_norm(x, (16,), norm.weight, 1e-5)))
    for got, want in zip(by_kernel, by_pytorch, strict=True):  # both are equally far from float64
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * (1 + want.abs().max().item()))


@needs_cuda
def test_training_step_in_cuda_graph():
    norm, x = norm_of(64, device="cuda"), torch.randn(3, 64, device="cuda", requires_grad=True)

    def step():
        s, y = residual_norm(norm, x, x * 2)
        return torch.autograd.grad(silu_product(y, s).sum(), x)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert found.equal(step())


@pytest.mark.parametrize("mixer", ["gsa", "cat"])
def test_sums_in_the_next_norm_match_sums_in_the_block(mixer, device):
    """A hook that does nothing makes every block add its branch itself."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_heads": 2, "num_hidden_layers": 3}
    model = GirihForCausalLM(config_of(mixer=mixer, **sizes)).to(device).train()
    ids = torch.randint(64, (2, 48), device=device)

    def states_and_gradients():
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            found = model(ids, labels=ids, output_hidden_states=True, use_cache=False)
        found.loss.backward()
        return *found.hidden_states, *(p.grad.clone() for p in model.parameters())

    parts = []
    block_parts = Block.parts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Block, "parts", lambda *call: (parts.append(call[2] is not None), block_parts(*call))[1]
        )
        found = states_and_gradients()
        assert sum(parts) == 2  # the first block gets no branch
        for block in model.model.layers:
            block.register_forward_hook(lambda *_: None)
        parts.clear()
        want = states_and_gradients()
        assert not any(parts)
    for a, b in zip(found, want, strict=True):
        assert a.equal(b)


def test_checkpointing_calls_block_forward():
    model = GirihForCausalLM(
        GirihConfig(hidden_size=32, num_heads=2, num_slots=4, num_hidden_layers=2)
    ).train()
    ids, calls = torch.randint(256, (1, 12)), []
    with pytest.MonkeyPatch.context() as patch:
        forward = Block.forward
        patch.setattr(Block, "forward", lambda *call, **how: (calls.append(1), forward(*call, **how))[1])
        model(ids)
        assert not calls
        model.gradient_checkpointing_enable()
        model(ids)
        assert len(calls) == 2


@pytest.mark.parametrize("shape, dtype", [((2, 3), torch.float32), ((2, 16), torch.float64)], ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_silu_product_of_any_shape_dtype_and_mode(mode, shape, dtype, device):
    gate, up = torch.randn(2, *shape, device=device, dtype=dtype).unbind()
    with mode():
        torch.testing.assert_close(silu_product(gate, up), F.silu(gate) * up)
        torch.testing.assert_close(silu_product(gate, up[:1]), F.silu(gate) * up[:1])


@pytest.mark.parametrize("linear", [False, True])
def test_silu_product_gradients(linear, device):
    gate, up, weight = (
        torch.randn(shape, device=device, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 4), (3, 4), (5, 4))
    )
    call = torch.ops.girih.silu_product_linear if linear else torch.ops.girih.silu_product
    inputs = (gate, up, weight) if linear else (gate, up)
    assert torch.autograd.gradcheck(call, inputs) and torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("x_dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_norm_has_the_autocast_dtype(x_dtype, autocast):
    norm, x = RMSNorm(16).to(x_dtype), torch.randn(3, 16, dtype=x_dtype)
    compiled = torch.compile(residual_norm, backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        (total, y), (plain_total, plain) = compiled(norm, x, x), residual_norm(norm, x, x)
    rounded = torch.bfloat16 if autocast and x_dtype == torch.float32 else x_dtype
    assert y.dtype == rounded and plain.dtype == total.dtype == x_dtype
    assert torch.equal(total, plain_total) and torch.equal(y, plain.to(rounded))


def test_compiled_norm_subclass_keeps_its_dtype():
    class Wide(RMSNorm):
        def forward(self, x):
            return super().forward(x.float())

    compiled = torch.compile(residual_norm, backend="eager", fullgraph=True)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert compiled(Wide(16), torch.randn(3, 16, dtype=torch.bfloat16))[1].dtype == torch.float32


def test_fx_traces_residual_norm():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = RMSNorm(16)

        def forward(self, x, branch):
            return residual_norm(self.norm, x, branch)[1]

    layer, x = Twice(), torch.randn(3, 16)
    torch.testing.assert_close(torch.fx.symbolic_trace(layer)(x, x), layer(x, x))
