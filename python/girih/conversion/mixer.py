"""Builds the mixer that replaces an attention and uses its projections."""

import functools
import math

import torch
from torch import Tensor, nn

from girih.conversion.both_ways import read_both_ways
from girih.conversion.config import Replacement, on_attention, projections_of
from girih.conversion.projections import Projections, Shared
from girih.nn import ShortConv


def mixer_of(attention: nn.Module, sizes: Projections, replacement: Replacement) -> nn.Module:
    """The mixer for an attention. It calls the attention's projections (`Shared`) in place of its own.

    Short convolutions are initialized to the identity, so that the mixer starts from attention's q, k and v.
    DeltaProduct with n > 1 reads the same k and v in every update; the filters of the further updates are
    initialized to differences over tokens (TPTT, eq. 22), because equal updates would stay equal. Lattice,
    and Trellis with shared_qk, have one projection for q and k and read the mean of q and k. These two mixers
    have a memory for each query head. For attention that is not causal the mixer scans in both directions.
    """
    layer = build_mixer(sizes, replacement)
    if not sizes.causal:
        layer = read_both_ways(layer)
    n = getattr(layer, "n", 1)
    for name in projections_of(layer):
        delattr(layer, name)
        function = functools.partial(READERS[name], n=n) if name == "qkv_proj" else READERS[name]
        setattr(layer, name, Shared(attention, functools.partial(function, sizes=sizes)))
    for name, conv in layer.named_children():
        if isinstance(conv, ShortConv) and conv.weight is not None:
            init_filters(conv.weight, sizes, n if name == "conv" else 1)
    return layer


def build_mixer(sizes: Projections, replacement: Replacement) -> nn.Module:
    """The mixer with an attention's sizes and with its own projections."""
    mixer = on_attention(replacement.mixer)
    fields = {"hidden_size": sizes.hidden_size, "num_heads": sizes.heads, "head_dim": sizes.head_dim}
    if "num_kv_heads" in mixer.fields:
        fields["num_kv_heads"] = sizes.kv_heads
    fields |= {name: 1.0 for name in ("expand_k", "expand_v") if name in mixer.fields}
    if not sizes.causal:
        fields |= replacement.both_ways_options()
    layer = mixer.build(replacement.mixer_config(**fields))
    if hasattr(layer, "qk_proj") and layer.qk_proj.out_features != sizes.heads * sizes.head_dim:
        # The keys of this mixer have num_slots channels.
        if "num_slots" in replacement.options:
            raise ValueError(
                f"num_slots is {replacement.options['num_slots']}; {replacement.mixer} reads keys "
                f"of so many channels, and attention's have {sizes.head_dim}"
            )
        layer = mixer.build(replacement.mixer_config(num_slots=sizes.head_dim, **fields))
    return layer


def read_qkv(attention: nn.Module, x: Tensor, *, sizes: Projections, n: int) -> Tensor:
    """q, n copies of k and n copies of v, concatenated, `[B, T, (heads + 2 n kv_heads) head_dim]`."""
    if n == 1:
        return sizes.project(attention, x)
    q, k, v = sizes.project_selected(attention, x, 0, 1, 2)
    return torch.cat((q, *[k] * n, *[v] * n), -1)


def repeat_for_queries(x: Tensor, sizes: Projections) -> Tensor:
    """Repeats x `[B, T, kv_heads head_dim]` for the query heads that read it, `[B, T, heads head_dim]`."""
    return (
        x.unflatten(-1, (-1, sizes.head_dim)).repeat_interleave(sizes.heads // sizes.kv_heads, 2).flatten(2)
    )


def read_qk(attention: nn.Module, x: Tensor, *, sizes: Projections) -> Tensor:
    q, k = sizes.project_selected(attention, x, 0, 1)
    return (q + repeat_for_queries(k, sizes)) / 2


def read_q(attention: nn.Module, x: Tensor, *, sizes: Projections) -> Tensor:
    return sizes.project_selected(attention, x, 0)[0]


def read_k(attention: nn.Module, x: Tensor, *, sizes: Projections) -> Tensor:
    return repeat_for_queries(*sizes.project_selected(attention, x, 1), sizes)


def read_v(attention: nn.Module, x: Tensor, *, sizes: Projections) -> Tensor:
    return repeat_for_queries(*sizes.project_selected(attention, x, 2), sizes)


def write_o(attention: nn.Module, o: Tensor, *, sizes: Projections) -> Tensor:
    return sizes.project_out(attention, o)


READERS = {
    "qkv_proj": read_qkv,
    "qk_proj": read_qk,
    "q_proj": read_q,
    "k_proj": read_k,
    "v_proj": read_v,
    "o_proj": write_o,
}


@torch.no_grad()
def init_filters(weight: Tensor, sizes: Projections, n: int) -> None:
    """Initializes the filters `[channels, W]` of q and of the n copies of k and v: identity for q and the
    first copies, the m-th difference for copy m."""
    nn.init.zeros_(weight)
    nn.init.ones_(weight[:, -1])
    kv_channels = sizes.kv_heads * sizes.head_dim
    for m in range(1, min(n, weight.shape[1])):
        taps = [(-1) ** k * math.comb(m, k) / 2**m for k in range(m, -1, -1)]
        for row in (m, n + m):  # of k, of v
            begin = sizes.heads * sizes.head_dim + row * kv_channels
            weight[begin : begin + kv_channels, -m - 1 :] = weight.new_tensor(taps)
