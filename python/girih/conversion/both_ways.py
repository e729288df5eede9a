"""Bidirectional forms of recurrent mixers, for encoders.

    o_t = read(q_t, state of tokens 0..t) + read(q_t, state of tokens T-1..t+1, in reverse order)

Each term is one call of the mixer's causal operator. The second call gets the tokens in reverse order, and
each query one index earlier: it reads the state before its own token, so the token counts once. For linear
attention o_t = (sum over all tokens s of k_s v_s^T)^T q_t. Both terms use the same projections, gates and
norms.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from girih.nn.functional.state import advance
from girih.nn.layers.recurrent_layer import RecurrentLayer


class Mirror(NamedTuple):
    """Index tables, `[1, T]` or `[B, T]`, of the order in which each sequence is reversed within its bounds.

    token: the token at each index of the reversed order; the table is its own inverse. before: the index
    before that of each token. is_first: whether a token is the first of its reversed sequence; true for
    tokens of no sequence.
    """

    token: Tensor
    before: Tensor
    is_first: Tensor

    def reverse(self, x: Tensor | None) -> Tensor | None:
        """x `[B, T, ...]` in reversed order."""
        return None if x is None else take_tokens(x, self.token)

    def reverse_early(self, q: Tensor) -> Tensor:
        """q `[B, T, ...]` in reversed order, each query one index earlier; the last index has an arbitrary
        query."""
        return take_tokens(q, self.before)

    def restore(self, o: Tensor) -> Tensor:
        """The outputs o `[B, T, ...]` of `reverse_early` queries in the original order; 0 for the last token
        of each sequence, which has no later tokens."""
        is_first = self.is_first.view(*self.is_first.shape, *[1] * (o.dim() - 2))
        return take_tokens(o, self.before).masked_fill(is_first, 0)


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """x `[B, T, ...]` at the tokens index `[1, T]` or `[B, T]`."""
    if index.shape[0] == 1:
        return x.index_select(1, index[0])
    return x.take_along_dim(index.view(*index.shape, *[1] * (x.dim() - 2)), 1)


def mirror(T: int, cu_seqlens: Tensor | None, device: torch.device) -> Mirror:
    """The `Mirror` of rows of T tokens. cu_seqlens: None, `[N + 1]` of packed sequences, or `[B, 2]` with the
    first and last + 1 valid token of each row."""
    token = torch.arange(T, device=device)[None]
    if cu_seqlens is None:
        first, end = token.new_zeros(1, 1), token.new_full((1, 1), T)
    elif cu_seqlens.dim() == 2:
        first, end = cu_seqlens.long().split(1, 1)
    else:
        bounds = cu_seqlens.long()
        sequence = torch.searchsorted(bounds[1:], token, right=True).clamp(max=bounds.shape[0] - 2)
        first, end = bounds[sequence], bounds[sequence + 1]
    is_within = token < end
    index = torch.where(is_within, first + end - 1 - token, token)
    return Mirror(index, (index - 1).clamp(min=0), (index == first) | ~is_within)


class BothWays(RecurrentLayer):
    """A recurrent layer whose operator scans in both directions. It has no state, because every token reads
    later tokens."""

    reads_pieces = False

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        state: Any = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        if use_cache or state is not None:
            raise ValueError(
                f"cache: {type(self).__name__} reads tokens both ways and cannot go on from earlier ones; "
                "call the model with use_cache=False and without a cache"
            )
        return super().forward(x, attention_mask, None, False, cu_seqlens)

    def scan(
        self, name: str, q: Tensor, *data: Tensor | None, cu_seqlens: Tensor | None = None, **call: Any
    ) -> tuple[Tensor, None]:
        mirrored = mirror(q.shape[1], cu_seqlens, q.device)
        forward, _ = advance(name, q, *data, cu_seqlens=cu_seqlens, **call)
        reverse = [mirrored.reverse(x) for x in data]
        backward, _ = advance(name, mirrored.reverse_early(q), *reverse, cu_seqlens=cu_seqlens, **call)
        return forward + mirrored.restore(backward), None


def read_both_ways(layer: nn.Module) -> nn.Module:
    """Changes a recurrent layer to its bidirectional form, in place, and returns it."""
    layer.__class__ = both_ways_class(type(layer))
    return layer


@functools.cache
def both_ways_class(kind: type[nn.Module]) -> type[nn.Module]:
    name = f"BothWays{kind.__name__}"
    return type(name, (BothWays, kind), {"__module__": __name__, "kind": kind, "__reduce__": reduce})


def reduce(layer: nn.Module) -> tuple:
    """The class is created at run time, so pickle cannot find it by name."""
    return empty, (type(layer).kind,), vars(layer)


def empty(kind: type[nn.Module]) -> nn.Module:
    return nn.Module.__new__(both_ways_class(kind))
