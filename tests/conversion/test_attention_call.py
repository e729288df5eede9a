"""Layers of girih, set by hand as the attention of models of transformers."""

import pytest
import torch
from converted import IDS, base_model, close
from girih import nn
from small_models import config_of
from transformers import DynamicCache

OPTIONS = {"num_slots": 8, "chunk": 4, "hidden_size": 32, "num_heads": 4}
ATTENTION = {
    "llama": lambda model, i: (model.model.layers[i], "self_attn"),
    "gpt2": lambda model, i: (model.transformer.h[i], "attn"),
    "gemma3_text": lambda model, i: (model.model.layers[i], "self_attn"),
}


def with_mixer(mixer, family="llama", numbered=True):
    model = base_model(family)
    torch.manual_seed(0)
    for i in range(2):
        block, name = ATTENTION[family](model, i)
        layer = nn.MIXERS[mixer].build(config_of(mixer=mixer, **OPTIONS))
        layer.layer_idx = i if numbered else None
        setattr(block, name, layer)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize(
    ("mixer", "family"),
    [(mixer, "llama") for mixer in nn.MIXERS]
    + [("gsa", "gpt2"), ("trellis", "gpt2"), ("lattice", "gemma3_text")],
)
def test_a_layer_is_called_as_attention_is(mixer, family):
    model = with_mixer(mixer, family)
    whole = model(IDS, use_cache=False).logits
    cache, parts = DynamicCache(config=model.config), []
    for a, b in ((0, 7), (7, 8), (8, 20)):
        parts.append(model(IDS[:, a:b], past_key_values=cache).logits)
    close(torch.cat(parts, 1), whole)
    mask = torch.ones_like(IDS)
    mask[0, :6] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = model(IDS, attention_mask=mask, position_ids=positions).logits
    close(padded[1], whole[1])
    if mixer not in (
        "attention",
        "mag",
    ):  # both count positions from the start of the row; rotary positions are relative
        close(padded[0, 6:], model(IDS[:1, 6:]).logits[0])
    text = model.generate(
        IDS, attention_mask=mask, max_new_tokens=4, do_sample=False, num_beams=2, eos_token_id=None
    )
    assert text.shape == (2, 24)


def test_gradients_reach_every_parameter():
    model = with_mixer("delta_product", numbered=False).train()
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_layer_without_a_valid_layer_idx_is_refused():
    model = with_mixer("gsa", numbered=False)
    with pytest.raises(ValueError, match="cache: .* set its layer_idx"):
        model(IDS)
    model.model.layers[0].self_attn.layer_idx = 5
    with pytest.raises(ValueError, match="cache has 2 layers; the layer's layer_idx is 5"):
        model(IDS, past_key_values=DynamicCache(config=model.config))


def test_position_ids_beside_positional_arguments_are_refused():
    layer = nn.DeltaProduct(32, 4)
    x, mask = torch.randn(2, 5, 32), torch.ones(2, 5)
    with pytest.raises(ValueError, match="DeltaProduct: position_ids beside 2 positional arguments"):
        layer(x, mask, position_ids=torch.arange(5)[None])
    assert layer(x, position_ids=torch.arange(5)[None])[0].equal(layer(x)[0])


def test_a_compiled_layer_takes_either_call():
    layer = nn.GatedSlotAttention(32, 4, num_slots=8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 32)
    close(compiled(x)[0], layer(x)[0])
    y, weights = compiled(hidden_states=x, attention_mask=None, position_embeddings=None)
    close(y, layer(x)[0])
    assert weights is None
