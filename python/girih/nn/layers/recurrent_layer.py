"""The base class of layers that read tokens in order."""

from typing import Any

import torch
from torch import Tensor

from girih.nn.functional.linears import apply_linears
from girih.nn.functional.masking import check_mask, sort_valid_first
from girih.nn.functional.packing import count_sequences
from girih.nn.functional.state import advance, check_state, current_pieces
from girih.nn.layers.projections import project
from girih.nn.layers.sequence_layer import SequenceLayer


class RecurrentLayer(SequenceLayer):
    """A layer that reads tokens in order and has a state; `mix` does not handle masks.

    With a mask, `forward` moves the valid tokens of each row to the front and passes the bounds of the rows
    as cu_seqlens. Masked tokens are outside of the bounds: they do not change states, positions in a chunk or
    windows of convolutions. Outputs at masked tokens are unspecified.
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
        """`forward` without a mask; cu_seqlens may be `[B, 2]` with the first and last + 1 valid token of
        each row."""
        o, state = self.core(project(self, self.input_projections(), x), state, use_cache, cu_seqlens)
        return self.output(o), state

    def check_state(self, state: Any, x: Tensor, cu_seqlens: Tensor | None = None) -> None:
        """Raises unless state is None or a state of this layer for the sequences of x `[B, T, ...]`. `core`
        calls it before a step writes any part of the state in place."""
        if state is None or current_pieces.get() is not None:  # a piece of a sequence is never a step
            return
        dtype = torch.promote_types(x.dtype, torch.float32)
        check_state(state, self.state_like(count_sequences(x, cu_seqlens), dtype))

    def state_like(self, sequences: int, dtype: torch.dtype) -> Any:
        """A state of this layer with a `TensorSpec` in place of each tensor; dtype: of memories and sums."""
        raise NotImplementedError

    def scan(self, name: str, *data: Tensor | None, **call: Any) -> tuple[Tensor, Any]:
        """Calls the layer's operator (`state.advance`). `conversion.both_ways` overrides it for encoders, to
        scan in both directions. Trellis and Lattice have no such form and call `advance` directly."""
        return advance(name, *data, **call)

    def output(self, o: Tensor) -> Tensor:
        """Maps core's output o to y, by calling the layer's modules. `output_prologue` and `o_proj` describe
        the same function for a decoding step that calls no modules."""
        return apply_linears(o, [self.o_proj])[0]
