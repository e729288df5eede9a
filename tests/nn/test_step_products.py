"""Block.step, which uses the weights alone, against the block; products against their formulas."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from girih.nn import MIXERS, Block, map_state
from girih.nn.functional import step
from girih.nn.functional.step import PLAIN, Product, RowInput, products
from small_models import config_of
from torch import nn

torch.manual_seed(0)
LAYERS = sorted(set(MIXERS) - {"cat"})


def block_of(mixer, **options):
    config = config_of(
        hidden_size=64, num_heads=2, num_slots=16, num_hidden_layers=1, mixer=[mixer], **options
    )
    torch.manual_seed(1)
    block = Block(MIXERS[mixer].build(config), 64, 96).double().eval()
    for parameter in block.parameters():  # also norms and biases, whose initial values have no effect
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return block


@pytest.mark.parametrize("mixer", LAYERS)
@torch.no_grad()
def test_step_matches_block(mixer):
    block = block_of(mixer)
    x = torch.randn(3, 8, 64, dtype=torch.float64)
    _, state = block(x[:, :4], use_cache=True)
    other = map_state(torch.clone, state)
    for t in range(4, 8):
        y, state = block(x[:, t : t + 1], state=state, use_cache=True)
        z, other = block.step(x[:, t : t + 1], state=other, use_cache=True)
        torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_a_step_of_a_block_without_a_feed_forward_layer():
    torch.manual_seed(1)
    config = config_of(hidden_size=64, num_heads=2, num_hidden_layers=1, mixer="mamba2", state_size=16)
    block = Block(MIXERS["mamba2"].build(config), 64, None).double().eval()
    x = torch.randn(2, 6, 64, dtype=torch.float64)
    whole, _ = block(x)
    torch.testing.assert_close(whole, x + block.mixer(block.mixer_norm(x))[0])
    _, state = block(x[:, :5], use_cache=True)
    z, _ = block.step(x[:, 5:], state=state, use_cache=True)
    torch.testing.assert_close(whole[:, 5:], z, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        ("abc", {}),
        ("delta_product", {"n": 2, "gated": True, "allow_neg_eigval": True}),
        ("delta_product", {"n": 3, "gated": False}),
        ("trellis", {"gated": False}),
        ("lattice", {"gated": False}),
        ("gsa", {"conv_size": 4}),
        ("attention", {"num_kv_heads": 1}),
    ],
    ids=str,
)
@torch.no_grad()
def test_a_step_with_options(mixer, options):
    block = block_of(mixer, **options)
    x = torch.randn(2, 6, 64, dtype=torch.float64)
    _, state = block(x[:, :5], use_cache=True)
    other = map_state(torch.clone, state)
    y, _ = block(x[:, 5:], state=state, use_cache=True)
    z, _ = block.step(x[:, 5:], state=other, use_cache=True)
    torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)


def add_bias(module, name):
    old = getattr(module, name)
    setattr(module, name, nn.Linear(old.in_features, old.out_features).double())


@pytest.mark.parametrize(
    "change",
    [
        lambda block: add_bias(block.mixer, "qkv_proj"),
        lambda block: add_bias(block.mixer, "o_proj"),
        lambda block: add_bias(block.mlp, "up_proj"),
        lambda block: setattr(block, "mlp_norm", nn.LayerNorm(64).double()),
        lambda block: setattr(block.mixer, "norm", nn.LayerNorm(64).double()),
        lambda block: setattr(block, "mlp", nn.Sequential(nn.Linear(64, 64), nn.ReLU()).double()),
    ],
    ids=[
        "qkv with a bias",
        "o with a bias",
        "up with a bias",
        "layer norm",
        "mixer's layer norm",
        "another mlp",
    ],
)
@torch.no_grad()
def test_step_with_replaced_modules(change):
    block = block_of("gsa")
    change(block)
    x = torch.randn(2, 6, 64, dtype=torch.float64)
    _, state = block(x[:, :5], use_cache=True)
    other = map_state(torch.clone, state)
    y, _ = block(x[:, 5:], state=state, use_cache=True)
    z, _ = block.step(x[:, 5:], state=other, use_cache=True)
    torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)


def test_products_cover_every_projection():
    """The products of a layer cover every projection except o_proj."""
    for mixer in LAYERS:
        layer = block_of(mixer).mixer
        if layer.products() is None:
            continue
        products = {id(product.weight) for product in layer.products()}
        linears = [
            m for name, m in layer.named_modules() if isinstance(m, torch.nn.Linear) and name != "o_proj"
        ]
        assert products == {id(m.weight) for m in linears}, mixer


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *arguments):
        return self.module(*arguments)


@torch.no_grad()
def test_a_wrapped_decay_gate_is_called():
    layer, x = block_of("gated_deltanet").mixer, torch.randn(2, 6, 64, dtype=torch.float64)
    y, _ = layer(x)
    layer.decay = Wrapper(layer.decay)
    assert layer(x)[0].equal(y)


def test_limits_of_the_kernel_are_those_of_its_header():
    header = (Path(__file__).parents[2] / "kernels" / "skinny_gemm" / "limits.h").read_text()
    limits = dict(re.findall(r"kSkinnyGemmMax(\w+) = ([\d *]+);", header))
    assert {name: math.prod(map(int, value.split("*"))) for name, value in limits.items()} == {
        "Rows": step.MAX_ROWS,
        "Matrices": step.MAX_MATRICES,
        "Width": step.MAX_WIDTH,
        "Elements": step.MAX_ELEMENTS,
    }


def test_products_in_pytorch():
    x, w, up = torch.randn(3, 16), torch.randn(5, 16), torch.randn(3, 16)
    b, a, norm = torch.randn(5), torch.rand(5), torch.rand(16)
    r = x @ w.T
    specs = [
        Product(w),
        Product(w, "linear", b),
        Product(w, "sigmoid", b, scale=2.0),
        Product(w, "logsigmoid", scale=0.125),
        Product(w, "decay", b, a),
    ]
    expected = [
        r,
        r + b,
        2 / (1 + torch.exp(-r - b)),
        -torch.log1p(torch.exp(-r)) / 8,
        -torch.exp(a) * torch.log1p(torch.exp(r + b)),
    ]
    torch.testing.assert_close(products(x, specs), expected)
    silu = x / (1 + torch.exp(-x))
    for row_input, u in (
        (PLAIN, x),
        (RowInput("rms_norm", norm, 0.1), x / (x.square().mean(-1, True) + 0.1).sqrt() * norm),
        (RowInput("silu_rms_norm", norm, 0.1), silu / (silu.square().mean(-1, True) + 0.1).sqrt() * norm),
        (RowInput("silu_product", up), silu * up),
    ):
        y = products(x, [Product(w)], row_input, residual=r)
        torch.testing.assert_close(y, [F.linear(u, w) + r])
