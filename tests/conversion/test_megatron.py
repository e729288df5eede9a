"""Parameters of Megatron-LM's Gated DeltaProduct, there and back."""

import pytest
import torch
import torch.nn.functional as F
from girih.conversion import load_megatron, to_megatron
from girih.nn import GatedDeltaProduct, RMSNorm, Trellis

HIDDEN, H, G, N, K, V, W = 12, 4, 2, 3, 5, 3, 4
EPS = 1e-5  # of the norm of Megatron's layer


def make_layer(seed=0):
    torch.manual_seed(seed)
    layer = GatedDeltaProduct(HIDDEN, H, n=N, num_groups=G, head_dim=V, state_size=K, norm_eps=EPS)
    return layer.double()


def draw_heads():
    """Random weights of every head and group by what they compute, not in the layout of a file."""
    torch.manual_seed(1)

    def draw(*shape):
        return torch.randn(shape, dtype=torch.double) * 0.5

    return {
        "z": draw(H, V, HIDDEN),
        "v": draw(N, H, V, HIDDEN),
        "k": draw(N, G, K, HIDDEN),
        "q": draw(G, K, HIDDEN),
        "beta": draw(N, H, HIDDEN),
        "a": draw(H, HIDDEN),
        "conv_v": draw(N, H, V, W),
        "conv_k": draw(N, G, K, W),
        "conv_q": draw(G, K, W),
        "A_log": draw(H),
        "dt_bias": draw(H),
        "norm": 1 + draw(H, V),
        "out": draw(HIDDEN, H, V),
    }


def write_shards(p, shards):
    """Megatron's state_dict of each rank, from its description: a rank has the heads and the groups of its
    part, its projection has the rows z, v, k, q, beta, a, and v, k and beta have the updates first."""
    written = []
    for rank in range(shards):
        h = slice(rank * H // shards, (rank + 1) * H // shards)
        g = slice(rank * G // shards, (rank + 1) * G // shards)
        rows = [p["z"][h], p["v"][:, h], p["k"][:, g], p["q"][g], p["beta"][:, h], p["a"][h]]
        filters = [p["conv_v"][:, h], p["conv_k"][:, g], p["conv_q"][g]]
        written.append(
            {
                "in_proj.weight": torch.cat([part.reshape(-1, HIDDEN) for part in rows]),
                "conv1d.weight": torch.cat([part.reshape(-1, 1, W) for part in filters]),
                "A_log": p["A_log"][h].clone(),
                "dt_bias": p["dt_bias"][h].clone(),
                "norm.weight": p["norm"][h].flatten(),
                "out_proj.weight": p["out"][:, h].flatten(1),
            }
        )
    return written


def convolve(p, name, x):
    """silu of the causal convolution of `x W`, `[T, ..., channels]`."""
    rows = torch.einsum("...c,tc->t...", p[name], x)
    past = F.pad(rows.movedim(0, -1), (W - 1, 0))
    return F.silu((past.unfold(-1, W, 1) * p[f"conv_{name}"].unsqueeze(-2)).sum(-1)).movedim(-1, 0)


def reference(p, x):
    """The layer by heads: x `[T, HIDDEN]` -> y `[T, HIDDEN]`."""
    q, k, v = (convolve(p, name, x) for name in "qkv")
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    beta = torch.einsum("nhc,tc->tnh", p["beta"], x).sigmoid()
    g = -p["A_log"].exp() * F.softplus(x @ p["a"].T + p["dt_bias"])
    S, outputs = torch.zeros(H, K, V, dtype=x.dtype), []
    for t in range(len(x)):
        S = g[t].exp()[:, None, None] * S
        for j in range(N):
            key = k[t, j].repeat_interleave(H // G, 0)
            error = v[t, j] - torch.einsum("hk,hkv->hv", key, S)
            S = S + torch.einsum("h,hk,hv->hkv", beta[t, j], key, error)
        outputs.append(torch.einsum("hk,hkv->hv", q[t].repeat_interleave(H // G, 0), S) / K**0.5)
    o = torch.stack(outputs) * F.silu(torch.einsum("hvc,tc->thv", p["z"], x))
    groups = o.reshape(len(x), G, -1)
    o = (groups / (groups.square().mean(-1, keepdim=True) + EPS).sqrt()).view_as(o) * p["norm"]
    return torch.einsum("chv,thv->tc", p["out"], o)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_layer_with_megatrons_parameters(shards):
    """Outputs, gradients of the input, packed rows and decoding are those of the description."""
    p, layer = draw_heads(), make_layer()
    load_megatron(layer, *write_shards(p, shards))
    x = torch.randn(13, HIDDEN, dtype=torch.double, requires_grad=True)
    want = reference(p, x)
    found = layer(x[None])[0][0]
    torch.testing.assert_close(found, want)
    weights = torch.randn_like(want)
    gradients = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (found, want))
    torch.testing.assert_close(*gradients)
    packed = layer(x[None], cu_seqlens=torch.tensor([0, 5, 13]))[0][0]
    torch.testing.assert_close(packed, torch.cat([reference(p, x[:5]), reference(p, x[5:])]))
    with torch.no_grad():
        first, state = layer(x[None, :6], use_cache=True)
        rows = [first]
        for t in range(6, 13):
            row, state = layer(x[None, t : t + 1], state=state, use_cache=True)
            rows.append(row)
        torch.testing.assert_close(torch.cat(rows, 1)[0], want)


@pytest.mark.parametrize("shards", [1, 2])
def test_there_and_back(shards):
    layer, loaded = make_layer(), make_layer(seed=2)
    written = to_megatron(layer, shards)
    load_megatron(loaded, *written)
    for name, value in layer.state_dict().items():
        assert loaded.state_dict()[name].equal(value), name
    p, again = write_shards(draw_heads(), shards), make_layer()
    load_megatron(again, *p)
    for found, want in zip(to_megatron(again, shards), p, strict=True):
        assert found.keys() == want.keys() and all(found[name].equal(want[name]) for name in want)


def test_the_norm_before_the_layer_and_the_state_of_fp8_products():
    layer, norm = make_layer(), RMSNorm(HIDDEN).double()
    (shard,) = to_megatron(layer)
    shard |= {
        "in_proj.layer_norm_weight": torch.randn(HIDDEN).double(),
        "in_proj._extra_state": torch.empty(0),
    }
    with pytest.raises(
        ValueError, match="an entry in_proj.layer_norm_weight.* give the norm before the layer"
    ):
        load_megatron(layer, shard)
    load_megatron(layer, shard, norm=norm)
    assert norm.weight.equal(shard["in_proj.layer_norm_weight"])
    del shard["in_proj.layer_norm_weight"]
    with pytest.raises(ValueError, match="shard 0 has no in_proj.layer_norm_weight"):
        load_megatron(layer, shard, norm=norm)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s.pop("dt_bias"), "shard 1 has no dt_bias; expected A_log, "),
        (lambda s: s.update({"conv1d.bias": torch.zeros(1)}), "shard 1 has an entry conv1d.bias; expected"),
        (
            lambda s: s.update({"in_proj.weight": s["in_proj.weight"][1:]}),
            r"in_proj.weight of shard 1 has shape \[51, 12\]; expected \[52, 12\]",
        ),
    ],
)
def test_other_entries_are_refused_by_name(change, message):
    layer = make_layer()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    shards = to_megatron(make_layer(seed=3), 2)
    change(shards[1])
    with pytest.raises(ValueError, match=message):
        load_megatron(layer, *shards)
    assert all(value.equal(before[name]) for name, value in layer.state_dict().items())


def test_layers_that_megatron_does_not_have_are_refused():
    with pytest.raises(ValueError, match="shards is 3; expected a divisor of num_groups, 2"):
        to_megatron(make_layer(), 3)
    with pytest.raises(ValueError, match="shards is 0"):
        load_megatron(make_layer())
    with pytest.raises(ValueError, match="conv_size of the layer is 0"):
        to_megatron(GatedDeltaProduct(HIDDEN, H, conv_size=0))
    with pytest.raises(TypeError, match="layer is a Trellis; expected a girih.nn.GatedDeltaProduct"):
        to_megatron(Trellis(HIDDEN, 2))
