"""A mixer of girih's that starts from an attention's projections."""

import functools
import math

import torch
from torch import Tensor, nn

from girih.conversion.config import Replacement
from girih.conversion.projections import Projections, Shared
from girih.nn import MIXERS, ShortConv


def mixer_of(attention: nn.Module, sizes: Projections, told: Replacement) -> nn.Module:
    """The mixer for an attention, which stays the owner of its projections: q, k, v and o are the mixer's.

    A short convolution starts as one that passes its input on, so that the mixer starts from q, k and v as
    they are; the further steps of DeltaProduct, which read the same k and v, start from their differences
    over time (TPTT, eq. 22), as equal steps would stay equal.
    """
    config = told.mixer_config(
        hidden_size=sizes.hidden_size,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
    )
    layer = MIXERS[told.mixer].build(config)
    n = getattr(layer, "n", 1)
    del layer.qkv_proj, layer.o_proj
    layer.qkv_proj = Shared(attention, functools.partial(read, sizes=sizes, n=n))
    layer.o_proj = Shared(attention, functools.partial(write, sizes=sizes))
    if isinstance(getattr(layer, "conv", None), ShortConv) and layer.conv.weight is not None:
        start(layer.conv.weight, sizes, n)
    return layer


def read(attention: nn.Module, x: Tensor, *, sizes: Projections, n: int) -> Tensor:
    """q, then k and v n times each, `[B, T, (heads + 2 n kv_heads) head_dim]`."""
    qkv = sizes.project(attention, x)
    if n == 1:
        return qkv
    q, k, v = qkv.split(
        [heads * sizes.head_dim for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)], -1
    )
    return torch.cat((q, *[k] * n, *[v] * n), -1)


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
