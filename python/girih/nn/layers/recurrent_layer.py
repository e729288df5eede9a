"""Layers with a state: a recurrent layer reads only the valid tokens of each row."""

from typing import Any

import torch
from torch import Tensor

from girih.nn.functional.linears import apply_linears
from girih.nn.functional.masking import check_mask, sort_valid_first
from girih.nn.functional.state import advance
from girih.nn.layers.projections import project
from girih.nn.layers.sequence_layer import SequenceLayer


class RecurrentLayer(SequenceLayer):
    """A layer that reads tokens in order and has a state; `mix` does not handle masks.

    The valid tokens of each row are moved to the front, and operators get the bounds of the rows. Masked
    tokens are outside of the bounds: they do not change states, positions in a chunk or windows of
    convolutions. Outputs at masked tokens are unspecified.
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
        order, inverse_order, count = sort_valid_first(attention_mask.bool())
        bounds = torch.stack((torch.zeros_like(count), count), 1)
        y, state = self.mix(x.take_along_dim(order[..., None], 1), state, use_cache, bounds)
        return y.take_along_dim(inverse_order[..., None], 1), state

    def mix(self, x: Tensor, state: Any, use_cache: bool, cu_seqlens: Tensor | None) -> tuple[Tensor, Any]:
        """`forward` without a mask; cu_seqlens may be `[B, 2]`, the bounds of rows."""
        o, state = self.core(project(self, self.projections(), x), state, use_cache, cu_seqlens)
        return self.output(o), state

    def scan(self, name: str, *data: Tensor | None, **call: Any) -> tuple[Tensor, Any]:
        """Calls the layer's operator (`state.advance`); layers of an encoder override it to scan in both
        directions."""
        return advance(name, *data, **call)

    def output(self, o: Tensor) -> Tensor:
        """y of core's o, computed by the layer's modules; `output_prologue` and `o_proj` describe the same by
        weights."""
        return apply_linears(o, [self.o_proj])[0]
