"""Masked tokens do nothing: what they need in order to leave no trace in a memory."""

import torch
from torch import Tensor


def masked(attention_mask: Tensor | None, x: Tensor, value: float = 0.0) -> Tensor:
    """x `[B, T, ...]` with `value` in the rows of masked tokens (attention_mask `[B, T]` is 0 there)."""
    if attention_mask is None:
        return x
    drop = attention_mask.logical_not()
    return x.masked_fill(drop.view(drop.shape + (1,) * (x.dim() - 2)), value)


def left_padding(attention_mask: Tensor) -> Tensor:
    """How many masked tokens stand before the first valid one: int64 `[B]`."""
    return (attention_mask.bool().cumsum(1) == 0).sum(1)


def chunk_position(attention_mask: Tensor | None, position: Tensor | None, chunk: int) -> Tensor | None:
    """Position in the chunk to start from, int64 `[B]`: padding must not move the first valid token's.

    Masked tokens advance a position like any other, so it starts `left_padding` earlier, modulo `chunk`.
    `position` None is the start of a chunk. Without a mask it is returned as it is.
    """
    if attention_mask is None:
        return position
    before = left_padding(attention_mask)
    return torch.remainder(-before if position is None else position - before, chunk)


def refuse_mask_with_packing(attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    if attention_mask is not None and cu_seqlens is not None:
        raise ValueError("attention_mask and cu_seqlens: give one; packed sequences have no padding to mask")
