"""Masked tokens do nothing: a recurrent layer reads each row's valid tokens alone."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from girih.nn.attention_call import SequenceLayer
from girih.nn.linears import together
from girih.nn.state import advance


class RecurrentLayer(SequenceLayer):
    """A layer that reads tokens in order and carries a state; `mix` is written without masks.

    Each row's valid tokens move to its front and its bounds go to the operators, so that the rest belongs to
    no sequence: it moves no state, no position in a chunk and no window of a convolution, wherever it stood.
    What comes out at masked tokens means nothing.
    """

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        state: Any = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        if attention_mask is None:
            return self.mix(x, state, use_cache, cu_seqlens)
        check_mask(x, attention_mask, cu_seqlens)
        order, place, count = valid_first(attention_mask.bool())
        bounds = torch.stack((torch.zeros_like(count), count), 1)
        y, state = self.mix(x.take_along_dim(order[..., None], 1), state, use_cache, bounds)
        return y.take_along_dim(place[..., None], 1), state

    def mix(self, x: Tensor, state: Any, use_cache: bool, cu_seqlens: Tensor | None) -> tuple[Tensor, Any]:
        """`forward` on valid tokens; cu_seqlens may be `[B, 2]`, the rows' bounds."""
        o, state = self.core(self.projected(x), state, use_cache, cu_seqlens)
        return self.output(o), state

    def scan(self, name: str, *data: Tensor | None, **call: Any) -> tuple[Tensor, Any]:
        """The layer's operator over its tokens, `state.advance`; a layer of an encoder scans both ways."""
        return advance(name, *data, **call)

    def projected(self, x: Tensor) -> Sequence[Tensor]:
        """What `core` takes, by the layer's modules, as `products` says it by their weights."""
        raise NotImplementedError

    def output(self, o: Tensor) -> Tensor:
        """y of core's o, by the layer's modules, as `before_output` and `o_proj` say it by their weights."""
        return together(o, [self.o_proj])[0]


def valid_first(valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The order `[B, T]` that moves each row's valid tokens to its front, each token's place in it, and how
    many are valid, `[B]`. Both parts keep their order."""
    count = valid.sum(1)
    place = torch.where(valid, valid.cumsum(1) - 1, count[:, None] + valid.logical_not().cumsum(1) - 1)
    token = torch.arange(valid.shape[1], device=valid.device).expand_as(place)
    return torch.empty_like(place).scatter_(1, place, token), place, count


def joined_masks(past: Tensor | None, now: Tensor | None, tokens: int, x: Tensor) -> Tensor | None:
    """The mask `[B, tokens + T]` of past tokens and of x `[B, T, ...]` after them; None: all count."""
    if past is None and now is None:
        return None
    every = [x.new_ones(x.shape[0], n, dtype=torch.bool) for n in (tokens, x.shape[1])]
    return torch.cat(
        [m if mask is None else mask.bool() for m, mask in zip(every, (past, now), strict=True)], 1
    )


def check_mask(x: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Refuses a mask beside packed sequences, and one that is not x's `[B, T]`."""
    if attention_mask is None:
        return
    if cu_seqlens is not None:
        raise ValueError("attention_mask and cu_seqlens: give one; packed sequences have no padding to mask")
    if attention_mask.shape != x.shape[:2]:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; expected [B, T] = {list(x.shape[:2])}"
        )
