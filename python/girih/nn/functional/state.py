"""States of layers: checks, calls of an operator with a state, and functions of nested states."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from girih import _torch_internals as internals
from girih import ops

#: A `girih.distributed.Pieces` while a model reads a sequence that is cut over processes
#: (`girih.context_parallel`); None: sequences are whole.
current_pieces: ContextVar[Any] = ContextVar("girih.pieces", default=None)


class LayerState(NamedTuple):
    """The state of a mixer. conv: the state of its short convolution, or a pair for q and k; None: no
    convolution.
    memory: the operator's state, such as `girih.ops.GSAState`."""

    conv: Any
    memory: Any


class TensorSpec(NamedTuple):
    """The expected shape `[N, ...]` and dtype of a tensor in a state; dtype None: any floating dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def matches(self, part: Tensor) -> bool:
        has_dtype = part.is_floating_point() if self.dtype is None else part.dtype == self.dtype
        return has_dtype and part.shape == self.shape


def check_batch(part: Tensor, sequences: int) -> None:
    """Raises unless `part`, a tensor `[N, ...]` of a state, has this number of sequences."""
    if part.dim() > 0 and part.shape[0] != sequences:
        raise ValueError(f"state has {part.shape[0]} sequences; expected {sequences}")


def check_state(state: Any, like: Any, name: str = "state") -> None:
    """Raises unless a state matches `like`: the same nested tuples, with a `TensorSpec` for each tensor.

    A layer checks all of its state before a step writes any part in place.
    """
    if isinstance(like, TensorSpec) and isinstance(state, Tensor):
        check_batch(state, like.shape[0])
        if not like.matches(state):
            expected = "a floating dtype" if like.dtype is None else like.dtype
            raise ValueError(
                f"{name} is {state.dtype} of shape {list(state.shape)}; expected {expected} and shape "
                f"{list(like.shape)}; pass the state that this layer returned"
            )
    elif type(state) is not type(like) or (isinstance(like, tuple) and len(state) != len(like)):
        expected = "Tensor" if isinstance(like, TensorSpec) else type(like).__name__
        size = f" of {len(like)} parts" if type(state) is type(like) else ""
        raise ValueError(
            f"{name} is a {type(state).__name__}; expected a {expected}{size}; pass the state "
            "that this layer returned"
        )
    elif isinstance(like, tuple):
        names = getattr(like, "_fields", range(len(like)))
        for part_name, part, like_part in zip(names, state, like, strict=True):
            check_state(part, like_part, f"{name}.{part_name}")


def check_type(state: Any, expected: type, name: str = "state") -> None:
    """Raises unless `state` is an instance of `expected`."""
    if not isinstance(state, expected):
        raise ValueError(
            f"{name} is a {type(state).__name__}; expected a {expected.__name__}; pass the state that this "
            "layer returned"
        )


def check_tensor(state: Any, dim: int, name: str) -> None:
    """Raises unless `state` is a tensor of `dim` dimensions."""
    check_type(state, Tensor, name)
    if state.dim() != dim:
        raise ValueError(
            f"{name} has shape {list(state.shape)}; expected {dim} dimensions; pass the state that this "
            "layer returned"
        )


def is_absent(state: Any) -> bool:
    """Whether a state is None or a tuple of absent states."""
    return state is None or (isinstance(state, tuple) and all(is_absent(part) for part in state))


def check_layer_states(
    names: Iterable[str], layers: Iterable[Any], states: Sequence[Any], x: Tensor, cu_seqlens: Tensor | None
) -> None:
    """Raises unless each state fits its layer and the sequences of x `[B, T, ...]`, and either all states are
    absent or none is. names: of the states. Layers without `check_state`, of other packages, are not checked.
    A layer whose attribute `has_state` is False needs no state."""
    has_past = not all(is_absent(state) for state in states)
    for name, layer, state in zip(names, layers, states, strict=True):
        if not hasattr(layer, "check_state"):
            continue
        layer.check_state(state, x, cu_seqlens)
        if has_past and is_absent(state) and getattr(layer, "has_state", True):
            raise ValueError(f"{name} is missing; pass the state that this layer returned")


def advance(
    name: str,
    *data: Tensor | None,
    state: Any,
    in_place: bool,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Calls the operator `girih.ops.<name>` and returns its output and the state after the last token.

    in_place: whether the caller no longer needs `state` itself. It is False without use_cache, and for an
    initial memory, which is a parameter. If it is True and the call `is_step`, this function calls
    `girih.ops.<name>_step`, which writes `state` in place.
    """
    if (pieces := current_pieces.get()) is not None:
        return pieces.advance(name, *data, state=state, cu_seqlens=cu_seqlens, **options)
    if in_place and is_step(data[0], cu_seqlens):
        return getattr(ops, f"{name}_step")(*data, state=state, **options), state
    return getattr(ops, name)(*data, state=state, cu_seqlens=cu_seqlens, **options)


def is_step(x: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether the call is a decoding step: one token of each sequence, without gradient."""
    return cu_seqlens is None and x.shape[1] == 1 and not torch.is_grad_enabled()


def map_state(f: Callable[[Tensor], Tensor], state: Any, device_only: bool = False) -> Any:
    """`state` with f applied to every tensor; None and numbers stay, named tuples keep their types.

    device_only: do not apply f to the fields that a named tuple lists in `on_host`.
    """
    if isinstance(state, Tensor):
        return f(state)
    if not isinstance(state, tuple):
        return state
    host_fields = getattr(state, "on_host", ()) if device_only else ()
    names = getattr(state, "_fields", range(len(state)))
    parts = [
        part if name in host_fields else map_state(f, part, device_only)
        for name, part in zip(names, state, strict=True)
    ]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def first_tensor(state: Any) -> Tensor | None:
    """The first tensor in a state, or None."""
    if isinstance(state, Tensor):
        return state
    parts = state if isinstance(state, tuple) else ()
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


def is_eager_inference(x: Tensor) -> bool:
    """Whether operators on x run eagerly and nothing records them: no compiler, tracer, gradient, dispatch
    mode, transform or CUDA graph capture is active."""
    return not (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or type(x) is not Tensor
        or torch.jit.is_tracing()
        or internals.has_dispatch_mode()
        or internals.has_transform()
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def stepped(state: Any) -> tuple[Hashable, Any] | None:
    """Predicts an in-place decoding step of one token, without computing it: (kind, state after the step).

    A CUDA graph replays only device work, so the host updates its part of the state with this function. kind:
    equal for steps that launch the same kernels. The state after the step has the same tensors, which the
    device writes, and updated host numbers; without host numbers it is the same object. A named tuple with
    host numbers implements the method `stepped`.
    None: the step cannot be captured: the state has no such method, or the step allocates tensors, for
    example because a cache grows.
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
