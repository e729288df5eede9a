"""A mixer of girih's that starts from an attention's projections."""

import functools
import math

import torch
from torch import Tensor, nn

from girih.conversion.config import OF_QK, Replacement
from girih.conversion.projections import Projections, Shared
from girih.nn import MIXERS, ShortConv


def mixer_of(attention: nn.Module, sizes: Projections, told: Replacement) -> nn.Module:
    """The mixer for an attention, which stays the owner of its projections: q, k, v and o are the mixer's.

    A short convolution starts as one that passes its input on, so that the mixer starts from q, k and v as
    they are; the further steps of DeltaProduct, which read the same k and v, start from their differences
    over time (TPTT, eq. 22), as equal steps would stay equal. Trellis and Lattice, which have one projection
    for q and k, get the mean of the two, which of all is nearest to both, and a memory for each query head.
    """
    by_qk = told.mixer in OF_QK
    config = told.mixer_config(
        hidden_size=sizes.hidden_size,
        num_heads=sizes.heads,
        num_kv_heads=None if by_qk else sizes.kv_heads,
        head_dim=sizes.head_dim,
        **({"num_slots": sizes.head_dim} if told.mixer == "lattice" else {}),
    )
    layer = MIXERS[told.mixer].build(config)
    n = getattr(layer, "n", 1)
    readers = {"qk_proj": read_qk, "v_proj": read_v} if by_qk else {"qkv_proj": functools.partial(read, n=n)}
    for name, function in (readers | {"o_proj": write}).items():
        delattr(layer, name)
        setattr(layer, name, Shared(attention, functools.partial(function, sizes=sizes)))
    for name, conv in layer.named_children():
        if isinstance(conv, ShortConv) and conv.weight is not None:
            start(conv.weight, sizes, n if name == "conv" else 1)
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


def read_v(attention: nn.Module, x: Tensor, *, sizes: Projections) -> Tensor:
    return for_each_query(*sizes.project_some(attention, x, 2), sizes)


def write(attention: nn.Module, o: Tensor, *, sizes: Projections) -> Tensor:
    return getattr(attention, sizes.out)(o)


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
