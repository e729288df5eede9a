"""What a layer carries from one call to the next, and how an operator advances it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from girih import ops


class LayerState(NamedTuple):
    """A mixer's state after its last token: the short convolution's and the memory's (each may be None)."""

    conv: Any
    memory: Any


def advance(
    name: str,
    *data: Tensor | None,
    state: Any,
    in_place: bool,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """`girih.ops.<name>`, or its step when that may write `state` in place: one token without gradient.

    `in_place` says that the caller gives `state` up for the one it gets: an earlier call returned it and this
    one returns the next. A first memory is never written, nor a state without use_cache. Returns the output
    and the state after the last token.
    """
    if in_place and cu_seqlens is None and data[0].shape[1] == 1 and not torch.is_grad_enabled():
        return getattr(ops, f"{name}_step")(*data, state=state, **options), state
    return getattr(ops, name)(*data, state=state, cu_seqlens=cu_seqlens, **options)


def map_state(f: Callable[[Tensor], Tensor], state: Any) -> Any:
    """`state` with f applied to every tensor in it; None stays None, named tuples keep their type."""
    if state is None:
        return None
    if isinstance(state, Tensor):
        return f(state)
    parts = [map_state(f, part) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


class History(NamedTuple):
    """All inputs so far, `x [B, tokens, ...]`, and which of them were valid, `[B, tokens]` (None: all)."""

    x: Tensor
    valid: Tensor | None


def extended(
    x: Tensor, attention_mask: Tensor | None, past: History | None
) -> tuple[Tensor, Tensor | None, int]:
    """x `[B, T, ...]` and its mask behind those of `past`; and T.

    A mask on one side only is completed by ones on the other.
    """
    valid, new = None if attention_mask is None else attention_mask.bool(), x.shape[1]
    if past is None:
        return x, valid, new
    if valid is not None or past.valid is not None:
        ones = (torch.ones(p.shape[:2], dtype=torch.bool, device=p.device) for p in (past.x, x))
        valid = torch.cat(
            [mask if mask is not None else one for mask, one in zip((past.valid, valid), ones, strict=True)],
            1,
        )
    return torch.cat((past.x, x), 1), valid, new
