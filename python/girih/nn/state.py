"""What a layer carries from one call to the next, and how an operator advances it."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from girih import _torch_internals as internals
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
    if in_place and is_step(data[0], cu_seqlens):
        return getattr(ops, f"{name}_step")(*data, state=state, **options), state
    return getattr(ops, name)(*data, state=state, cu_seqlens=cu_seqlens, **options)


def is_step(x: Tensor, cu_seqlens: Tensor | None) -> bool:
    """One token of each sequence, without gradient."""
    return cu_seqlens is None and x.shape[1] == 1 and not torch.is_grad_enabled()


def map_state(f: Callable[[Tensor], Tensor], state: Any, device_only: bool = False) -> Any:
    """`state` with f applied to every tensor in it; None and numbers stay, named tuples keep their type.

    device_only: not to what a named tuple says that the host has for itself, by its `on_host`.
    """
    if isinstance(state, Tensor):
        return f(state)
    if not isinstance(state, tuple):
        return state
    left = getattr(state, "on_host", ()) if device_only else ()
    names = getattr(state, "_fields", range(len(state)))
    parts = [
        part if name in left else map_state(f, part, device_only)
        for name, part in zip(names, state, strict=True)
    ]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def first_tensor(state: Any) -> Tensor | None:
    """The first tensor in a state; None: there is none."""
    if isinstance(state, Tensor):
        return state
    parts = state if isinstance(state, tuple) else ()
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


def by_itself(x: Tensor) -> bool:
    """Whether what is done with x is done now and no more: it is neither traced nor watched nor recorded."""
    return not (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or type(x) is not Tensor
        or torch.jit.is_tracing()
        or internals.is_watched()
        or internals.has_transform()
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def stepped(state: Any) -> tuple[Hashable, Any] | None:
    """Of a step of one token that works in place: what it runs, where that is not always the same, and
    `state` after it, whose tensors the device writes; the same object where it has nothing else.

    A named tuple that has numbers says it by a method of this name. None: what the step does cannot be told,
    or it makes new tensors, as for more room.
    """
    if state is None or isinstance(state, Tensor):
        return (), state
    if hasattr(state, "stepped"):
        return state.stepped()
    if not isinstance(state, tuple):
        return None
    parts = [stepped(part) for part in state]
    if None in parts:
        return None
    if all(part is after for part, (_, after) in zip(state, parts, strict=True)):
        return (), state
    kinds, after = zip(*parts, strict=True)
    return kinds, type(state)(*after) if hasattr(state, "_fields") else after
