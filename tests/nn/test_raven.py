"""Raven: slots outside of the router's choice, the router's noise and bias, and names of parameters."""

import pytest
import torch
from girih.nn import Raven

HIDDEN, SLOTS, TOPK = 16, 8, 3


def make_layer(**options):
    torch.manual_seed(0)
    return Raven(HIDDEN, 2, num_slots=SLOTS, topk=TOPK, **options).double()


def changed_slots(layer, x):
    """Whether each slot of each memory has another key after the last token of x than before, `[N, H, M]`."""
    state = layer(x[:, :-1], use_cache=True)[1]
    return ((layer(x, use_cache=True)[1].memory.k - state.memory.k).abs() > 1e-12).any(2)


@pytest.mark.parametrize("slot_decay", [False, True])
def test_a_token_changes_topk_slots(slot_decay):
    changed = changed_slots(make_layer(slot_decay=slot_decay), torch.randn(5, 9, HIDDEN).double())
    assert (changed.sum(-1) == TOPK).all()
    assert changed.any(0).any(0).sum() > TOPK  # different tokens choose different slots


def test_the_bias_of_the_router_changes_the_choice_only():
    layer = make_layer(router_bias=True)
    x = torch.randn(2, 9, HIDDEN).double()
    layer.r_bias[:, :TOPK] = 2.0  # more than any sigmoid
    assert (changed_slots(layer, x) == (torch.arange(SLOTS) < TOPK)).all()
    y = layer(x)[0]
    layer.r_bias[:, :TOPK] = 3.0
    assert layer(x)[0].equal(y)


def test_noise_of_the_router_in_training_only():
    """The frequencies of the first choice are the softmax of the logits, which defines Gumbel noise."""
    layer, x = make_layer(router_noise=True), torch.randn(1, 4, HIDDEN).double()
    assert not layer(x)[0].equal(layer(x)[0])
    layer.eval()
    assert layer(x)[0].equal(layer(x)[0])
    assert layer(x)[0].equal(make_layer()(x)[0])
    layer.train()
    layer.topk, logits = 1, torch.randn(SLOTS).double()
    draws = layer.write_weights(logits.expand(20_000, SLOTS)) > 0
    torch.testing.assert_close(draws.double().mean(0), logits.softmax(0), atol=0.02, rtol=0)


# Names and shapes of flash-linear-attention's layer, fla.layers.Raven of version 0.6.0, with 32 channels, 4
# heads that read 2 memories of 8 slots, expand_k 0.5 and expand_v 2.
COMMON = {
    "q_proj.weight": (16, 32),
    "k_proj.weight": (8, 32),
    "v_proj.weight": (32, 32),
    "q_norm.weight": (4,),
    "k_norm.weight": (4,),
    "o_proj.weight": (32, 64),
}
NAMES = [
    (
        {},
        {"a_proj.weight": (2, 32), "A_log": (2,), "dt_bias": (2,), "g_norm.weight": (64,)}
        | {"r_proj.weight": (16, 32)},
    ),
    (
        {"slot_decay": True, "router_bias": True, "router_mlp": True, "output_gate": True},
        {"f_proj.weight": (16, 32), "r_bias": (2, 8), "o_gate_proj.weight": (64, 32)}
        | {"r_proj.0.weight": (32, 32), "r_proj.0.bias": (32,), "r_proj.2.weight": (16, 32)}
        | {"o_norm.weight": (16,)},
    ),
]


@pytest.mark.parametrize("options, names", NAMES)
def test_parameters_are_those_of_flash_linear_attention(options, names):
    layer = Raven(32, 4, num_kv_heads=2, num_slots=8, expand_k=0.5, expand_v=2, **options)
    assert {name: tuple(p.shape) for name, p in layer.state_dict().items()} == COMMON | names


def test_topk_defaults_to_32_or_to_all_slots():
    assert (Raven(32, 4).topk, Raven(32, 4, num_slots=6).topk) == (32, 6)
    with pytest.raises(ValueError, match="topk is 7; expected 1 to num_slots, 6"):
        Raven(32, 4, num_slots=6, topk=7)
    with pytest.raises(ValueError, match="topk is 0; expected 1 to"):
        Raven(32, 4, topk=0)
    with pytest.raises(ValueError, match="router_score is 'tanh'; expected one of sigmoid, softmax"):
        Raven(32, 4, router_score="tanh")
