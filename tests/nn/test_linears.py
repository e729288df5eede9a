"""girih::linears, which applies several linear layers to the same x, against the separate layers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from girih.models import GirihConfig, GirihForCausalLM
from girih.nn import DecayGate, DeltaProduct, GatedSlotAttention, Lattice, SwiGLU, Trellis, TTTLinear
from girih.nn.functional import linears
from torch._dynamo.backends.common import aot_autograd

aten = torch.ops.aten
SIZES = (72, 8, 3)  # one wide, two narrow


def draw_inputs(dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()

    return normal(2, 5, 16), [normal(size, 16) for size in SIZES]


def gradients(ys, leaves):
    total = sum((y * torch.arange(y.shape[-1], device=y.device)).double().sin().sum() for y in ys)
    return torch.autograd.grad(
        total, leaves, create_graph=total.requires_grad and leaves[0].dtype == torch.float64
    )


def test_linears_match_separate_layers(device):
    x, weights = draw_inputs(device=device)
    ys, plain = torch.ops.girih.linears(x, weights), [F.linear(x, w) for w in weights]
    for y, want in zip(ys, plain, strict=True):
        torch.testing.assert_close(y, want)
    for dx, want in zip(gradients(ys, [x, *weights]), gradients(plain, [x, *weights]), strict=True):
        torch.testing.assert_close(dx, want)


def test_frozen_and_unused_weights_have_no_gradient():
    x, weights = draw_inputs()
    weights[1].requires_grad_(False)
    ys = torch.ops.girih.linears(x, weights)
    dx, first, last = torch.autograd.grad(ys[0].sum(), [x, weights[0], weights[2]], allow_unused=True)
    torch.testing.assert_close(dx, weights[0].sum(0).expand_as(x))
    assert last is None and first.shape == weights[0].shape
    x, weights = draw_inputs()
    (found,) = torch.autograd.grad(torch.ops.girih.linears(x.detach(), weights)[2].sum(), weights[2])
    torch.testing.assert_close(found, x.detach().flatten(0, 1).sum(0).expand_as(weights[2]))


def test_second_derivatives():
    x, weights = draw_inputs()

    def second(ys):
        return torch.autograd.grad(sum(g.square().sum() for g in gradients(ys, [x, *weights])), [x, *weights])

    actual, want = second(torch.ops.girih.linears(x, weights)), second([F.linear(x, w) for w in weights])
    for found, expected in zip(actual, want, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_gradients_are_as_accurate_as_separate_layers(device, x_dtype, monkeypatch):
    monkeypatch.setattr(linears, "has_fused_kernel", lambda *tensors: True)
    x, weights = draw_inputs(torch.float32, device)
    x = x.detach().to(x_dtype).requires_grad_()
    layers = layers_of(weights)

    def autocast_gradients(ys):
        assert all(y.dtype == torch.bfloat16 for y in ys)
        return gradients(ys, [x, *(layer.weight for layer in layers)])

    wide = x.detach().double().requires_grad_(), [w.detach().double().requires_grad_() for w in weights]
    exact = gradients([F.linear(wide[0], w) for w in wide[1]], [wide[0], *wide[1]])
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        both = (
            autocast_gradients(linears.apply_linears(x, layers)),
            autocast_gradients([layer(x) for layer in layers]),
        )
    for actual, plain, want in zip(*both, exact, strict=True):
        assert actual.dtype == plain.dtype
        error, plain_error = ((g.double() - want).norm() / want.norm() for g in (actual, plain))
        assert error <= 1.2 * plain_error + 1e-3


def test_compiled_linears_merge_narrow_products(device):
    x, weights = draw_inputs(torch.float32, device)
    x, layers, graphs = x.detach().bfloat16().requires_grad_(), layers_of(weights), []

    def record_graph(graph, _):
        graphs.append([node.target for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    def autocast_gradients(each):
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            ys = each(x, layers)
        return gradients(ys, [x, *(layer.weight for layer in layers)])

    compiled = torch.compile(
        linears.apply_linears,
        backend=aot_autograd(fw_compiler=record_graph, bw_compiler=record_graph),
        fullgraph=True,
    )
    wide = x.detach().double().requires_grad_(), [w.detach().double().requires_grad_() for w in weights]
    exact = gradients([F.linear(wide[0], w) for w in wide[1]], [wide[0], *wide[1]])
    plain = autocast_gradients(lambda x, layers: [layer(x) for layer in layers])
    for actual, each, want in zip(autocast_gradients(compiled), plain, exact, strict=True):
        assert actual.dtype == each.dtype
        error, plain_error = ((g.double() - want).norm() / want.norm() for g in (actual, each))
        assert error <= 1.2 * plain_error + 1e-3
    mm, addmm = (
        [sum(target in targets for target in graph) for graph in graphs]
        for targets in ((aten.mm.default, aten.mm.dtype), (aten.addmm.default,))
    )
    assert mm == [2, 4] and addmm == [0, 0]  # one for the wide weight and one for the narrow weights


@pytest.mark.parametrize("in_forward", [False, True])
def test_backward_under_autocast(device, in_forward):
    x, weights = draw_inputs(torch.float32, device)
    weights.append(weights[0].detach().clone().requires_grad_())

    def run_backward(each):
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            with torch.autocast(torch.device(device).type, enabled=in_forward):
                ys = each(x.bfloat16() if in_forward else x)
            return torch.autograd.grad(sum(y.float().square().sum() for y in ys), [x, *weights])

    plain = run_backward(lambda x: [F.linear(x, w) for w in weights])
    for actual, want in zip(run_backward(lambda x: torch.ops.girih.linears(x, weights)), plain, strict=True):
        assert actual.dtype == torch.float32 and (actual - want).norm() <= 0.02 * want.norm()


def layers_of(weights):
    layers = [torch.nn.Linear(16, len(w), bias=False) for w in weights]
    for layer, w in zip(layers, weights, strict=True):
        layer.weight = torch.nn.Parameter(w.detach().clone())
    return layers


def saved_bytes(call, *arguments):
    """Bytes saved for the backward, each storage counted once."""
    seen = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.setdefault(t.data_ptr(), t), lambda t: t):
        call(*arguments)
    return sum(t.nbytes for t in seen.values())


def test_saved_bytes_are_at_most_those_of_separate_layers(monkeypatch):
    monkeypatch.setattr(linears, "has_fused_kernel", lambda *tensors: True)
    x, weights = torch.randn(1, 4096, 16, requires_grad=True), draw_inputs(torch.float32)[1]
    for frozen in (False, True):
        layers = layers_of(weights)
        for layer in layers:
            layer.requires_grad_(not frozen)
        for dtype in (torch.bfloat16, torch.float32):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
                actual = saved_bytes(linears.apply_linears, x, layers)
                plain = saved_bytes(lambda x, layers: [layer(x) for layer in layers], x, layers)
            assert actual <= plain + 1024


def test_weights_copied_by_autocast_may_change_before_backward(monkeypatch):
    monkeypatch.setattr(linears, "has_fused_kernel", lambda *tensors: True)
    x, weights = draw_inputs(torch.float32)
    layers = layers_of(weights)
    with torch.autocast("cpu", torch.bfloat16):
        total = sum(y.float().sum() for y in linears.apply_linears(x, layers))
    with torch.no_grad():
        layers[0].weight.zero_()
    (dx,) = torch.autograd.grad(total, x)
    torch.testing.assert_close(dx, sum(w.sum(0) for w in weights).expand_as(x), rtol=0.02, atol=0.05)


def test_mixed_dtypes_are_refused(monkeypatch):
    monkeypatch.setattr(linears, "has_fused_kernel", lambda *tensors: True)
    layers = layers_of(draw_inputs(torch.float32)[1])
    with pytest.raises(RuntimeError, match="dtype"):
        linears.apply_linears(torch.randn(2, 5, 16, dtype=torch.bfloat16), layers)


def test_inplace_results_and_compiled_autograd():
    x, weights = draw_inputs()

    def run_backward(each):
        ys = [y * 2 for y in each(x, weights)]
        return torch.autograd.grad(sum(y.sin().sum() for y in ys), [x, *weights])

    want = run_backward(lambda x, weights: [F.linear(x, w) for w in weights])
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        actual = run_backward(torch.ops.girih.linears)
    for dx, exact in zip(actual, want, strict=True):
        torch.testing.assert_close(dx, exact)
    y = torch.ops.girih.linears(x, weights[:1])[0]
    torch.testing.assert_close(y.add_(1), F.linear(x, weights[0]) + 1)


def test_no_tokens(device):
    x, weights = draw_inputs(device=device)
    ys = torch.ops.girih.linears(x[:, :0], weights)
    assert [y.shape for y in ys] == [(2, 0, size) for size in SIZES]
    (dw,) = torch.autograd.grad(ys[0].sum(), weights[0])
    assert not dw.any()


LAYERS = {
    "gsa": lambda: GatedSlotAttention(64, 2, num_slots=16),
    "gated_deltanet": lambda: DeltaProduct(64, 2, gated=True),
    "lattice": lambda: Lattice(64, 2, num_slots=16, chunk=8),
    "trellis": lambda: Trellis(64, 2, num_slots=16, chunk=8),
    "ttt": lambda: TTTLinear(64, 2, chunk=8),
    "mlp": lambda: SwiGLU(64, 128),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_match_with_fused_linears(name, monkeypatch):
    """The layers call girih::linears on CUDA in training; the test forces the call on the CPU."""
    torch.manual_seed(0)
    layer, x = LAYERS[name]().double(), torch.randn(2, 9, 64, dtype=torch.float64)

    def run_backward():
        copied, inputs = copy.deepcopy(layer), x.clone().requires_grad_()
        y = copied(inputs)
        y = y[0] if isinstance(y, tuple) else y
        y.sin().sum().backward()
        return [y.detach(), inputs.grad, *(p.grad for p in copied.parameters())]

    want, weight_counts = run_backward(), []
    apply = torch.ops.girih.linears
    monkeypatch.setattr(linears, "has_fused_kernel", lambda *tensors: True)
    monkeypatch.setattr(
        torch.ops.girih, "linears", lambda x, ws: weight_counts.append(len(ws)) or apply(x, ws)
    )
    for actual, plain in zip(run_backward(), want, strict=True):
        torch.testing.assert_close(actual, plain)
    weights = {"gsa": [2, 1], "gated_deltanet": [4, 1], "lattice": [5, 1], "trellis": [7, 1], "ttt": [5, 1]}
    weights["mlp"] = [2, 1]
    assert weight_counts == weights[name]


def test_projections_with_hooks_are_called(monkeypatch):
    monkeypatch.setattr(linears, "has_fused_kernel", lambda *tensors: True)
    layer, x = GatedSlotAttention(64, 2, num_slots=16), torch.randn(2, 9, 64)
    seen = []
    layer.f_proj.register_forward_hook(lambda *args: seen.append(1))
    layer(x)
    assert seen == [1]
    gated = DeltaProduct(64, 2, gated=True)
    gated.decay.register_forward_hook(lambda *args: seen.append(2))
    gated(x)
    lattice = Lattice(64, 2, num_slots=16, chunk=8)
    lattice.gamma_proj.register_forward_hook(lambda *args: seen.append(3))
    lattice(x)
    assert seen == [1, 2, 3]


def test_decay_gate_subclass_is_called(monkeypatch):
    monkeypatch.setattr(linears, "has_fused_kernel", lambda *tensors: True)

    class Other(DecayGate):
        def forward(self, x):
            seen.append(x.shape)
            return super().forward(x)

    seen, layer = [], DeltaProduct(64, 2, gated=True)
    layer.decay = Other(64, 2)
    layer(torch.randn(2, 9, 64))
    assert seen == [(2, 9, 64)]


def test_fused_linears_need_x_in_the_autocast_dtype(monkeypatch):
    """A projection with a hook receives x in its own dtype."""
    monkeypatch.setattr(linears, "has_fused_kernel", lambda *tensors: True)
    x, weights = draw_inputs(torch.float32)
    layers, seen = layers_of(weights), []
    layers[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        linears.apply_linears(x * 1, layers)
        plain = [layer.weight for layer in layers[1:]]
        assert not linears.has_linears_kernel(x, plain) and linears.has_linears_kernel(x.bfloat16(), plain)
    assert seen == [torch.float32]


def test_second_derivative_after_a_weight_change_is_refused(monkeypatch):
    monkeypatch.setattr(linears, "has_fused_kernel", lambda *tensors: True)
    x, weights = draw_inputs(torch.float32)
    layers, x = layers_of(weights), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        ys = linears.apply_linears(x, layers)
    with torch.no_grad():
        layers[0].weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(sum(y.float().sum() for y in ys), x, create_graph=True)


def test_fx_and_meta_tensors():
    layer = SwiGLU(16, 24)
    x = torch.randn(3, 16)
    torch.testing.assert_close(torch.fx.symbolic_trace(layer)(x), layer(x))
    with torch.device("meta"):
        assert SwiGLU(16, 24)(torch.empty(3, 16)).is_meta


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_compiled_function_transforms(transform):
    layer, x = SwiGLU(16, 24), torch.randn(3, 5, 16)
    weights = dict(layer.named_parameters())

    def loss(weights, x):
        return torch.func.functional_call(layer, weights, (x,)).square().sum()

    calls = {
        "grad": lambda x: torch.func.grad(loss)(weights, x)["up_proj.weight"],
        "vmap": lambda x: torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)["up_proj.weight"],
        "jvp": lambda x: torch.func.jvp(layer, (x,), (x,))[1],
    }
    compiled = torch.compile(calls[transform], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), calls[transform](x))


@pytest.mark.parametrize("mixer", ["gated_deltanet", "attention"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_sequence_lengths_share_a_graph(mixer, dynamic):
    torch._dynamo.reset()
    config = GirihConfig(mixer=mixer, hidden_size=32, num_hidden_layers=1, num_heads=2, vocab_size=50)
    model, lengths = GirihForCausalLM(config), (40, 44, 41, 64)
    compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic, fullgraph=True)
    # One graph for the first length and one for all others, or one dynamic graph.
    limit = 1 if dynamic else 2
    with torch._dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True):
        for length in lengths:
            ids = torch.arange(length).reshape(1, length) % 50
            loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            torch.testing.assert_close(loss, model(input_ids=ids, labels=ids, use_cache=False).loss)


def test_exported_layer_accepts_any_length():
    layer, tokens = SwiGLU(16, 24), torch.export.Dim("tokens", min=2, max=100)
    x = torch.randn(2, 5, 16)
    compiled = torch.export.export(layer, (x,), dynamic_shapes=({1: tokens},), strict=True).module()
    for length in (5, 9):
        y = torch.randn(2, length, 16)
        torch.testing.assert_close(compiled(y), layer(y))
