"""Linear layers that read the same x together, against each by itself."""

import copy

import pytest
import torch
import torch.nn.functional as F
from girih.nn import DeltaProduct, GatedSlotAttention, Lattice, SwiGLU, Trellis, linears
from girih.nn.linears import Linears

SIZES = (24, 8, 3)


def drawn(dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()

    return normal(2, 5, 16), [normal(size, 16) for size in SIZES]


def gradients(ys, leaves):
    total = sum((y * torch.arange(y.shape[-1], device=y.device)).double().sin().sum() for y in ys)
    return torch.autograd.grad(
        total, leaves, create_graph=total.requires_grad and leaves[0].dtype == torch.float64
    )


def test_results_and_gradients_are_those_of_each(device):
    x, weights = drawn(device=device)
    ys, plain = Linears.apply(x, *weights), [F.linear(x, w) for w in weights]
    for y, want in zip(ys, plain, strict=True):
        torch.testing.assert_close(y, want)
    for dx, want in zip(gradients(ys, [x, *weights]), gradients(plain, [x, *weights]), strict=True):
        torch.testing.assert_close(dx, want)


def test_what_is_not_wanted_or_used_has_no_gradient():
    x, weights = drawn()
    weights[1].requires_grad_(False)
    ys = Linears.apply(x, *weights)
    dx, first, last = torch.autograd.grad(ys[0].sum(), [x, weights[0], weights[2]], allow_unused=True)
    torch.testing.assert_close(dx, weights[0].sum(0).expand_as(x))
    assert last is None and first.shape == weights[0].shape
    x, weights = drawn()
    (found,) = torch.autograd.grad(Linears.apply(x.detach(), *weights)[2].sum(), weights[2])
    torch.testing.assert_close(found, x.detach().flatten(0, 1).sum(0).expand_as(weights[2]))


def test_gradients_can_be_differentiated_once_more():
    x, weights = drawn()

    def second(ys):
        return torch.autograd.grad(sum(g.square().sum() for g in gradients(ys, [x, *weights])), [x, *weights])

    ours, want = second(Linears.apply(x, *weights)), second([F.linear(x, w) for w in weights])
    for found, of_plain in zip(ours, want, strict=True):
        torch.testing.assert_close(found, of_plain)


def test_under_autocast_gradients_err_no_more_than_each_by_itself(device):
    x, weights = drawn(torch.float32, device)
    x = x.detach().bfloat16().requires_grad_()

    def found(together):
        with torch.autocast(device, torch.bfloat16):
            ys = Linears.apply(x, *weights) if together else [F.linear(x, w) for w in weights]
        assert all(y.dtype == torch.bfloat16 for y in ys)
        return gradients(ys, [x, *weights])

    wide = x.detach().double().requires_grad_(), [w.detach().double().requires_grad_() for w in weights]
    exact = gradients([F.linear(wide[0], w) for w in wide[1]], [wide[0], *wide[1]])
    for ours, plain, want in zip(found(True), found(False), exact, strict=True):
        assert ours.dtype == plain.dtype
        error, of_plain = ((g.double() - want).norm() / want.norm() for g in (ours, plain))
        assert error <= 1.2 * of_plain + 1e-3


LAYERS = {
    "gsa": lambda: GatedSlotAttention(64, 2, num_slots=16),
    "gated_deltanet": lambda: DeltaProduct(64, 2, gated=True),
    "lattice": lambda: Lattice(64, 2, num_slots=16, chunk=8),
    "trellis": lambda: Trellis(64, 2, num_slots=16, chunk=8),
    "mlp": lambda: SwiGLU(64, 128),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_give_the_same(name, monkeypatch):
    """By the function that GPUs take in training, taken here too."""
    torch.manual_seed(0)
    layer, x = LAYERS[name]().double(), torch.randn(2, 9, 64, dtype=torch.float64)

    def found():
        own, given = copy.deepcopy(layer), x.clone().requires_grad_()
        y = own(given)
        y = y[0] if isinstance(y, tuple) else y
        y.sin().sum().backward()
        return [y.detach(), given.grad, *(p.grad for p in own.parameters())]

    want, taken = found(), []
    apply = Linears.apply
    monkeypatch.setattr(linears, "has_kernel", lambda *tensors: True)
    monkeypatch.setattr(Linears, "apply", lambda *args: taken.append(len(args)) or apply(*args))
    for ours, plain in zip(found(), want, strict=True):
        torch.testing.assert_close(ours, plain)
    weights = {"gsa": [2, 1], "gated_deltanet": [4, 1], "lattice": [4, 1], "trellis": [5, 1], "mlp": [2]}
    assert [count - 1 for count in taken] == weights[name]


def test_an_adapter_or_a_hook_takes_its_part_alone(monkeypatch):
    monkeypatch.setattr(linears, "has_kernel", lambda *tensors: True)
    layer, x = GatedSlotAttention(64, 2, num_slots=16), torch.randn(2, 9, 64)
    seen = []
    layer.f_proj.register_forward_hook(lambda *args: seen.append(1))
    layer(x)
    assert seen == [1]
    gated = DeltaProduct(64, 2, gated=True)
    gated.decay.register_forward_hook(lambda *args: seen.append(2))
    gated(x)
    assert seen == [1, 2]
