"""fla's own layers on girih: outputs, gradients, padding and decoding equal those of recurrences in torch.

Convolutions, gated norms and the gated delta rule of chunks reach girih through fla's registry. The other
mixers are imported from girih.fla in place of fla.
"""

import sys

import pytest
import torch
import torch.nn.functional as F
from comparison import assert_within
from fla_references import REFERENCES
from girih import fla as girih_fla

pytestmark = pytest.mark.filterwarnings("ignore")  # fla warns that there is no GPU
pytest.importorskip("fla.backends", reason="needs fla-core 0.6: pip install fla-core==0.6.0")
layers = pytest.importorskip("fla.layers", reason="needs flash-linear-attention==0.6.0")

import fla.modules.causal_conv1d.ops as fla_conv
import fla.modules.norm.fused_norm_gate as fla_norm
from fla.layers import simple_gla
from fla.models.utils import Cache

SIZES = {"hidden_size": 32, "layer_idx": 0}
# Layers by name: their options, and the functions that fla cannot dispatch.
LAYERS = {
    "GatedDeltaNet": (
        {"num_heads": 2, "num_v_heads": 4, "head_dim": 8, "allow_neg_eigval": True},
        ("fused_recurrent_gated_delta_rule",),
    ),
    "GatedDeltaProduct": (
        {"num_heads": 2, "head_dim": 8, "num_householder": 2},
        ("chunk_gated_delta_product", "fused_recurrent_gated_delta_rule"),
    ),
    "DeltaNet": (
        {"num_heads": 2, "use_gate": True},
        ("chunk_delta_rule", "fused_recurrent_delta_rule"),
    ),
    "GatedLinearAttention": (
        {"num_heads": 2, "use_short_conv": True},
        ("chunk_gla", "fused_recurrent_gla"),
    ),
    "SimpleGatedLinearAttention": ({"num_heads": 2, "use_short_conv": True}, ("chunk_simple_gla",)),
    "GatedSlotAttention": (
        {"num_heads": 2, "num_slots": 5, "use_short_conv": True, "feature_map": "relu"},
        ("chunk_gsa", "fused_recurrent_gsa"),
    ),
}


def norm_linear(x, norm_weight, norm_bias, weight, bias, eps=1e-6):
    """fla's rms_norm_linear, for which fla has a registry and girih no kernel."""
    return F.linear(F.rms_norm(x, x.shape[-1:], norm_weight, eps), weight, bias)


def substitute(monkeypatch, layer, names, functions):
    """Gives the module of a layer other functions."""
    module = sys.modules[type(layer).__module__]
    for name in names:
        monkeypatch.setattr(module, name, functions(name))
    if hasattr(module, "rms_norm_linear"):
        monkeypatch.setattr(module, "rms_norm_linear", norm_linear)
    return module


@pytest.fixture
def on_girih(monkeypatch):
    girih_fla.register()

    def use(layer, names):
        substitute(monkeypatch, layer, names, lambda name: getattr(girih_fla, name))

    yield use
    girih_fla.unregister()


@pytest.fixture
def on_recurrences(monkeypatch):
    def use(layer, names):
        everything = [name for name in REFERENCES if hasattr(sys.modules[type(layer).__module__], name)]
        substitute(monkeypatch, layer, {*names, *everything}, REFERENCES.get)
        monkeypatch.setattr(fla_conv, "causal_conv1d", REFERENCES["causal_conv1d"])
        monkeypatch.setattr(fla_norm, "rms_norm_gated", lambda **x: REFERENCES["rms_norm_gated"](**x)[0])

    return use


def make(name):
    torch.manual_seed(0)
    options, names = LAYERS[name]
    layer = getattr(simple_gla if name.startswith("Simple") else layers, name)(**SIZES, **options)
    return layer, names


def gradients(layer, y, x):
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    found = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    return found | {"x": x.grad}


@pytest.mark.parametrize("padded", [False, True], ids=["rows", "padded"])
@pytest.mark.parametrize("name", LAYERS)
def test_forward_and_backward(name, padded, on_girih, on_recurrences):
    layer, names = make(name)
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[1, :17] = False
    results = []
    for use in (on_girih, on_recurrences):
        use(layer, names)
        x = torch.randn(2, 70, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
        y = layer(x, attention_mask=mask.int() if padded else None)[0]
        results.append({"y": y} | gradients(layer, y, x))
    got, want = results
    assert len(want) > 5
    assert_within(got, want, 2e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_decoding_with_the_cache_of_fla(name, on_girih):
    """A prompt and then tokens one by one give what the whole sequence gives."""
    layer, names = make(name)
    layer.eval()
    on_girih(layer, names)
    x, cache = torch.randn(2, 73, 32), Cache()
    with torch.no_grad():
        want = layer(x)[0]
        parts = [layer(x[:, :70], past_key_values=cache, use_cache=True)[0]]
        for t in range(70, 73):
            parts.append(layer(x[:, t : t + 1], past_key_values=cache, use_cache=True)[0])
    assert_within(torch.cat(parts, 1), want, 1e-5)
