"""Conversion between states and operator arguments, and initial memories."""

import functools
from typing import Any

import torch
from torch import Tensor

from girih.ops._describe import describe


def unpack_state(name: str, kind: type, state: Any, start: str = "None") -> tuple[Tensor | None, ...]:
    """The tensors of a state of type kind; None for each tensor if state is None. start: the alternative to a
    state that the error message names."""
    if state is None:
        return (None,) * len(kind._fields)
    if not isinstance(state, kind):
        raise ValueError(
            f"girih.{name}: state is a {type(state).__name__} but should be a {kind.__name__} or {start}"
        )
    return state


def call_operator(name: str, kind: type, inputs: tuple, **options: Any) -> tuple[Tensor, Any]:
    """Calls `torch.ops.girih.<name>`. Returns the output and the new state, of type kind.

    torch.jit.trace does not support optional outputs. Operators with an optional output have a variant
    X_list, which returns the outputs that are not None; only the optional tensor of the state can be missing.
    """
    if torch.jit.is_tracing():
        o, *after = getattr(torch.ops.girih, f"{name}_list")(*inputs, **options)
        if len(after) < len(kind._fields):
            after.insert(optional_index(name), None)
    else:
        o, *after = getattr(torch.ops.girih, name)(*inputs, **options)
    return o, kind(*after)


@functools.cache
def optional_index(name: str) -> int:
    """Index of the optional tensor in an operator's state."""
    state = [tensor for tensor in describe()[name]["tensors"] if tensor["state"]]
    (found,) = [i for i, tensor in enumerate(state) if tensor["optional"]]
    return found


def unpack_step_state(name: str, kind: type, state: Any) -> tuple[Tensor | None, ...]:
    """The tensors of a state that a step writes; raises unless state is of type kind."""
    if not isinstance(state, kind):
        raise ValueError(
            f"girih.{name}: state is a {type(state).__name__} but should be a {kind.__name__}, whose tensors "
            f"a step writes in place; {kind.__name__}.start() makes the first"
        )
    return state


def is_memory(memory: Any) -> bool:
    """Whether memory can be an initial memory: `[H, ...]`, shared by all sequences, or `[N, H, ...]`."""
    return isinstance(memory, Tensor) and memory.dim() in (3, 4)


def expand_memory(memory: Tensor, q: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """An initial memory `[H, ...]` or `[N, H, ...]` -> `[N, H, ...]`."""
    if memory.dim() == 4 or not isinstance(q, Tensor):  # the operator raises if q is no tensor
        return memory
    packed = isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1
    return memory.expand(max(cu_seqlens.shape[0] - 1, 0) if packed else q.shape[0], *memory.shape)


def copy_memory(
    state: str, name: str, memory: Tensor, batch: int, device: torch.device | str | None
) -> Tensor:
    """An initial memory `[H, ...]` or `[batch, H, ...]` -> a copy `[batch, H, ...]`."""
    if not is_memory(memory) or (memory.dim() == 4 and memory.shape[0] not in (1, batch)):
        found = list(memory.shape) if isinstance(memory, Tensor) else type(memory).__name__
        raise ValueError(
            f"girih.{state}.start: {name} is {found} but should be a tensor of 3 dimensions, or of 4 with "
            f"batch = {batch} in front"
        )
    return memory.detach().to(device).expand(batch, *memory.shape[-3:]).clone()
