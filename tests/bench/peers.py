"""The best public code for each operator, called as its documentation recommends.

`PEERS[name](shape, keywords)` takes the tensors of girih's operator and returns the peer's `(call,
keywords)`. Conversions of layout that a user of the peer would not need are outside the timed call. A peer
that is not installed raises ImportError.
"""

from importlib.metadata import version

import torch
import torch.nn.functional as F


def tensors(keywords, *names):
    return {name: keywords[name] for name in names if name in keywords}


# flash-linear-attention. Scales are D^-1/2 on both sides, and g has the form of girih's operators.


def fla_version():
    return f"flash-linear-attention {version('flash-linear-attention')} on triton {version('triton')}"


def chunk_gsa(shape, keywords):
    from fla.ops.gsa import chunk_gsa

    return lambda q, k, v, s, g: chunk_gsa(q, k, v, s, g)[0], keywords


def fused_recurrent_gsa(shape, keywords):
    from fla.ops.gsa import fused_recurrent_gsa

    def call(q, k, v, s, g, state):
        return fused_recurrent_gsa(q, k, v, s, g, initial_state=state[:2], output_final_state=True)

    return call, keywords


def chunk_gla(shape, keywords):
    from fla.ops.gla import chunk_gla

    return lambda q, k, v, g: chunk_gla(q, k, v, g)[0], keywords


def fused_recurrent_gla(shape, keywords):
    from fla.ops.gla import fused_recurrent_gla

    def call(q, k, v, g, state):
        return fused_recurrent_gla(q, k, v, gk=g, initial_state=state.s, output_final_state=True)

    return call, keywords


def chunk_simple_gla(shape, keywords):
    from fla.ops.simple_gla import chunk_simple_gla

    return lambda q, k, v, g: chunk_simple_gla(q, k, v, g)[0], keywords


def chunk_delta_rule(shape, keywords):
    from fla.ops.delta_rule import chunk_delta_rule

    return lambda q, k, v, beta: chunk_delta_rule(q, k, v, beta)[0], keywords


def fused_recurrent_delta_rule(shape, keywords):
    from fla.ops.delta_rule import fused_recurrent_delta_rule

    def call(q, k, v, beta, state):
        return fused_recurrent_delta_rule(q, k, v, beta, initial_state=state.s, output_final_state=True)

    return call, keywords


def chunk_gated_delta_rule(shape, keywords):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lambda q, k, v, beta, g: chunk_gated_delta_rule(q, k, v, g, beta)[0], keywords


def chunk_gated_delta_product(shape, keywords):
    from fla.ops.gated_delta_product import chunk_gated_delta_product

    n = shape.sizes["n"]

    def call(q, k, v, beta, g=None):
        return chunk_gated_delta_product(q, k, v, g, beta, n)[0]

    return call, tensors(keywords, "q", "k", "v", "beta", "g")


def chunk_ttt_linear(shape, keywords, passes=1):
    """TTT, and the public code closest to Trellis (with two passes) and to Lattice: gradient steps on one
    memory in chunks of 16. Keys and values have one width, and the step size is a column."""
    from fla.ops.ttt import chunk_ttt_linear

    values = keywords["a" if shape.op == "ttt" else "v"]
    H, V = values.shape[2:]
    peer_keywords = tensors(keywords, "q", "k") | {
        "v": values,
        "w": torch.ones(H, V, device=values.device, dtype=values.dtype),
        "b": torch.zeros(H, V, device=values.device, dtype=values.dtype),
        "eta": keywords["gamma"].to(values.dtype)[..., None],
    }

    def call(q, k, v, w, b, eta):
        for _ in range(passes):
            q = chunk_ttt_linear(q, k, v, w, b, eta, chunk_size=shape.case.chunk)[0]
        return q

    return call, peer_keywords


def fused_rms_norm_gated(shape, keywords):
    """The function that the module FusedRMSNormGated calls."""
    from fla.modules.fused_norm_gate import rms_norm_gated

    def call(x, weight, gate):
        return rms_norm_gated(x, gate, weight, None, activation="swish", eps=1e-6)

    return call, tensors(keywords, "x", "weight", "gate")


# an operator of girih, for orientation


def girih_gsa(shape, keywords):
    """Slot attention over the same tokens, with the same number of slots and a gate for each slot."""
    from girih.ops import gsa

    slots = keywords.get("a", keywords["k"])
    g = F.logsigmoid(slots.float()) / 8
    peer_keywords = {"q": keywords["k"], "k": keywords["k"], "v": keywords["v"], "s": slots, "g": g}
    return lambda **arguments: gsa(**arguments)[0], peer_keywords


# causal_conv1d of Dao, and the Triton version of fla


def causal_conv1d(shape, keywords):
    from causal_conv1d import causal_conv1d_fn

    def call(x, weight):
        return causal_conv1d_fn(x.transpose(1, 2), weight, activation="silu").transpose(1, 2)

    return call, tensors(keywords, "x", "weight")


def causal_conv1d_update(shape, keywords):
    from causal_conv1d import causal_conv1d_update

    peer_keywords = tensors(keywords, "weight") | {
        "x": keywords["x"][:, 0],
        "state": keywords["state"].x.transpose(1, 2).contiguous(),
    }
    return lambda x, weight, state: causal_conv1d_update(x, state, weight, activation="silu"), peer_keywords


def fla_causal_conv1d(shape, keywords):
    from fla.modules.causal_conv1d import causal_conv1d

    def call(x, weight):
        return causal_conv1d(x, weight, activation="silu")[0]

    return call, tensors(keywords, "x", "weight")


def fla_causal_conv1d_update(shape, keywords):
    from fla.modules.causal_conv1d import causal_conv1d_update

    B, _, channels = keywords["x"].shape  # the cache of fla also holds the current token
    cache = torch.zeros(B, channels, shape.sizes["W"], device=keywords["x"].device, dtype=keywords["x"].dtype)

    def call(x, weight, cache):
        return causal_conv1d_update(x, cache, weight=weight, activation="silu")

    return call, tensors(keywords, "x", "weight") | {"cache": cache}


# PyTorch. Users have [B, T, H, D] projections and pass transposed views, as these calls do.


def torch_version():
    return f"torch {torch.__version__}"


def dense_sdpa(shape, keywords):
    """Dense causal attention over the same rows: more pairs than CAT, with the fastest available kernel."""

    def call(q, k, v):
        o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
        return o.transpose(1, 2)

    return call, tensors(keywords, "q", "k", "v")


def flex_attention(shape, keywords):
    """The mask of CAT. Its blocks are computed in advance, as users do."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    C, T = shape.case.chunk, shape.sizes["T"]

    def is_visible(b, h, query, key):
        header = (key % C == 0) & (key // C <= query // C)
        return header | ((key // C == query // C) & (key <= query))

    blocks = create_block_mask(is_visible, None, None, T, T, device=keywords["q"].device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q, k, v):
        return compiled(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=blocks).transpose(1, 2)

    return call, tensors(keywords, "q", "k", "v")


def compiled_rms_norm(shape, keywords):
    """norm, activation and product of PyTorch, fused by torch.compile."""
    act = {"silu": F.silu, "gelu": F.gelu}[keywords.get("activation", "silu")]

    def norm(x, weight, gate):
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), 1e-6) * act(gate)

    return torch.compile(norm, dynamic=False), tensors(keywords, "x", "weight", "gate")


PEERS = {
    "chunk_gsa": chunk_gsa,
    "fused_recurrent_gsa": fused_recurrent_gsa,
    "chunk_gla": chunk_gla,
    "fused_recurrent_gla": fused_recurrent_gla,
    "chunk_simple_gla": chunk_simple_gla,
    "chunk_delta_rule": chunk_delta_rule,
    "fused_recurrent_delta_rule": fused_recurrent_delta_rule,
    "chunk_gated_delta_rule": chunk_gated_delta_rule,
    "chunk_gated_delta_product": chunk_gated_delta_product,
    "chunk_ttt_linear": chunk_ttt_linear,
    "chunk_ttt_linear twice": lambda shape, keywords: chunk_ttt_linear(shape, keywords, passes=2),
    "fla FusedRMSNormGated": fused_rms_norm_gated,
    "compiled rms_norm": compiled_rms_norm,
    "causal_conv1d": causal_conv1d,
    "causal_conv1d_update": causal_conv1d_update,
    "fla causal_conv1d": fla_causal_conv1d,
    "fla causal_conv1d_update": fla_causal_conv1d_update,
    "girih gsa": girih_gsa,
    "dense sdpa": dense_sdpa,
    "flex_attention": flex_attention,
}


def version_of(name):
    if name == "girih gsa":
        import girih

        return f"girih {girih.__version__}"
    if name in ("dense sdpa", "flex_attention", "compiled rms_norm"):
        return torch_version()
    if name in ("causal_conv1d", "causal_conv1d_update"):
        return f"causal-conv1d {version('causal-conv1d')}"
    return fla_version()
