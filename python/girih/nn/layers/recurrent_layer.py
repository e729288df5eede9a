"""Masked tokens do nothing: a recurrent layer reads each row's valid tokens alone."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from girih.nn.functional.linears import together
from girih.nn.functional.masking import check_mask, valid_first
from girih.nn.functional.state import advance
from girih.nn.layers.sequence_layer import SequenceLayer


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
