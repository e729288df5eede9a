"""A mixer of girih's that starts from an attention's projections."""

import functools
import math

import torch
from torch import Tensor, nn

from girih.conversion.both_ways import read_both_ways
from girih.conversion.config import Replacement, on_attention, projections_of
from girih.conversion.projections import Projections, Shared
from girih.nn import ShortConv


def mixer_of(attention: nn.Module, sizes: Projections, told: Replacement) -> nn.Module:
    """The mixer for an attention, which stays the owner of its projections: q, k, v and o are the mixer's.

    A short convolution starts as one that passes its input on, so that the mixer starts from q, k and v as
    they are; the further steps of DeltaProduct, which read the same k and v, start from their differences
    over time (TPTT, eq. 22), as equal steps would stay equal. Lattice, and Trellis with shared_qk, which have
    one projection for q and k, get the mean of the two, which of all is nearest to both. These two mixers
    have a memory for each query head. Where attention is not causal the mixer reads both ways.
    """
    layer = built(sizes, told)
    if not sizes.causal:
        layer = read_both_ways(layer)
    n = getattr(layer, "n", 1)
    for name in projections_of(layer):
        delattr(layer, name)
        function = functools.partial(READ[name], n=n) if name == "qkv_proj" else READ[name]
        setattr(layer, name, Shared(attention, functools.partial(function, sizes=sizes)))
    for name, conv in layer.named_children():
        if isinstance(conv, ShortConv) and conv.weight is not None:
            start(conv.weight, sizes, n if name == "conv" else 1)
    return layer


def built(sizes: Projections, told: Replacement) -> nn.Module:
    """The mixer at an attention's sizes, with projections of its own still."""
    mixer = on_attention(told.mixer)
    given = {"hidden_size": sizes.hidden_size, "num_heads": sizes.heads, "head_dim": sizes.head_dim}
    if "num_kv_heads" in mixer.fields:
        given["num_kv_heads"] = sizes.kv_heads
    given |= {name: 1.0 for name in ("expand_k", "expand_v") if name in mixer.fields}
    if not sizes.causal:
        given |= told.both_ways()
    layer = mixer.build(told.mixer_config(**given))
    if hasattr(layer, "qk_proj") and layer.qk_proj.out_features != sizes.heads * sizes.head_dim:
        # Its keys have as many channels as it has slots.
        if "num_slots" in told.options:
            raise ValueError(
                f"num_slots is {told.options['num_slots']}; {told.mixer} reads keys of so many channels, and "
                f"attention's have {sizes.head_dim}"
            )
        layer = mixer.build(told.mixer_config(num_slots=sizes.head_dim, **given))
    return layer


def read(attention: nn.Module, x: Tensor, *, sizes: Projections, n: int) -> Tensor:
    """q, then k and v n times each, `[B, T, (heads + 2 n kv_heads) head_dim]`."""
    if n == 1:
        return sizes.project(attention, x)
    q, k, v = sizes.project_some(attention, x, 0, 1, 2)
    return torch.cat((q, *[k] * n, *[v] * n), -1)


def for_each_query(x: Tensor, sizes: Projections) -> Tensor:
    """What kv_heads have, `[B, T, kv_heads head_dim]`, for each of the heads that read it."""
    return (
        x.unflatten(-1, (-1, sizes.head_dim)).repeat_interleave(sizes.heads // sizes.kv_heads, 2).flatten(2)
    )


def read_qk(attention: nn.Module, x: Tensor, *, sizes: Projections) -> Tensor:
    q, k = sizes.project_some(attention, x, 0, 1)
    return (q + for_each_query(k, sizes)) / 2


def read_q(attention: nn.Module, x: Tensor, *, sizes: Projections) -> Tensor:
    return sizes.project_some(attention, x, 0)[0]


def read_k(attention: nn.Module, x: Tensor, *, sizes: Projections) -> Tensor:
    return for_each_query(*sizes.project_some(attention, x, 1), sizes)


def read_v(attention: nn.Module, x: Tensor, *, sizes: Projections) -> Tensor:
    return for_each_query(*sizes.project_some(attention, x, 2), sizes)


def write(attention: nn.Module, o: Tensor, *, sizes: Projections) -> Tensor:
    return sizes.written(attention, o)


READ = {
    "qkv_proj": read,
    "qk_proj": read_qk,
    "q_proj": read_q,
    "k_proj": read_k,
    "v_proj": read_v,
    "o_proj": write,
}


@torch.no_grad()
def start(weight: Tensor, sizes: Projections, n: int) -> None:
    """Filters `[channels, W]` of q and of n times k and v."""
    nn.init.zeros_(weight)
    nn.init.ones_(weight[:, -1])
    own = sizes.kv_heads * sizes.head_dim
    for m in range(1, min(n, weight.shape[1])):
        taps = [(-1) ** k * math.comb(m, k) / 2**m for k in range(m, -1, -1)]
        for first in (m, n + m):  # of k, of v
            begin = sizes.heads * sizes.head_dim + first * own
            weight[begin : begin + own, -m - 1 :] = weight.new_tensor(taps)
