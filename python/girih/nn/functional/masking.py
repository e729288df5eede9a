"""Attention masks: checks, concatenation, and the permutation that moves valid tokens to the front."""

import torch
from torch import Tensor


def select_current_mask(attention_mask: Tensor | None, tokens: int) -> Tensor | None:
    """The mask of the current `tokens` tokens `[B, tokens]`, from a mask `[B, past + tokens]`."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask has {attention_mask.dim()} dimensions; expected [batch, tokens]")
    if attention_mask.shape[1] < tokens:
        raise ValueError(
            f"attention_mask covers {attention_mask.shape[1]} tokens; expected at least {tokens}"
        )
    return attention_mask[:, -tokens:].bool()


def sort_valid_first(valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A stable permutation `[B, T]` that moves the valid tokens of each row to the front, the inverse
    permutation `[B, T]`, and the number of valid tokens `[B]`."""
    count = valid.sum(1)
    inverse_order = torch.where(
        valid, valid.cumsum(1) - 1, count[:, None] + valid.logical_not().cumsum(1) - 1
    )
    token = torch.arange(valid.shape[1], device=valid.device).expand_as(inverse_order)
    return torch.empty_like(inverse_order).scatter_(1, inverse_order, token), inverse_order, count


def join_masks(past: Tensor | None, current: Tensor | None, tokens: int, x: Tensor) -> Tensor | None:
    """Concatenates the mask `past` of `tokens` tokens and the mask `current` of x `[B, T, ...]`:
    `[B, tokens + T]`. A mask None counts as ones; the result is None if both are."""
    if past is None and current is None:
        return None
    ones = [x.new_ones(x.shape[0], n, dtype=torch.bool) for n in (tokens, x.shape[1])]
    return torch.cat(
        [m if mask is None else mask.bool() for m, mask in zip(ones, (past, current), strict=True)], 1
    )


def check_mask(x: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Raises unless attention_mask is None, or has x's shape `[B, T]` and cu_seqlens is None."""
    if attention_mask is None:
        return
    if cu_seqlens is not None:
        raise ValueError("attention_mask and cu_seqlens: give one; packed sequences have no padding to mask")
    if attention_mask.shape != x.shape[:2]:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; expected [B, T] = {list(x.shape[:2])}"
        )
