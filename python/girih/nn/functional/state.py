"""States of layers: checks, the call of an operator with a state, and functions of nested states."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from girih import _torch_internals as internals
from girih import ops


class LayerState(NamedTuple):
    """A mixer's state after its last token: states of the short convolution and of the memory, or None."""

    conv: Any
    memory: Any


class TensorSpec(NamedTuple):
    """The expected shape `[N, ...]` and dtype of a tensor in a state; dtype None: any floating dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def fits(self, part: Tensor) -> bool:
        has_dtype = part.is_floating_point() if self.dtype is None else part.dtype == self.dtype
        return has_dtype and part.shape == self.shape


def check_batch(part: Tensor, sequences: int) -> None:
    """Raises unless `part`, a tensor `[N, ...]` of a state, has this number of sequences."""
    if part.dim() > 0 and part.shape[0] != sequences:
        raise ValueError(f"state has {part.shape[0]} sequences; expected {sequences}")


def check_state(state: Any, like: Any, name: str = "state") -> None:
    """Raises unless a state matches `like`: the same nested tuples, with a `TensorSpec` for each tensor.

    A layer with several operators calls this before the first of them writes its state.
    """
    if isinstance(like, TensorSpec) and isinstance(state, Tensor):
        check_batch(state, like.shape[0])
        if not like.fits(state):
            expected = "a floating dtype" if like.dtype is None else like.dtype
            raise ValueError(
                f"{name} is {state.dtype} of shape {list(state.shape)}; expected {expected} and shape "
                f"{list(like.shape)}, as this layer returns it"
            )
    elif type(state) is not type(like) or (isinstance(like, tuple) and len(state) != len(like)):
        expected = "Tensor" if isinstance(like, TensorSpec) else type(like).__name__
        size = f" of {len(like)} parts" if type(state) is type(like) else ""
        raise ValueError(
            f"{name} is a {type(state).__name__}; expected a {expected}{size}, as this layer returns it"
        )
    elif isinstance(like, tuple):
        names = getattr(like, "_fields", range(len(like)))
        for part_name, part, like_part in zip(names, state, like, strict=True):
            check_state(part, like_part, f"{name}.{part_name}")


def advance(
    name: str,
    *data: Tensor | None,
    state: Any,
    in_place: bool,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Calls `girih.ops.<name>`, or its step, which writes `state` in place, for one token without gradient.

    in_place: whether `state` may be overwritten, because the caller uses the returned state instead. False
    for a first memory and without use_cache. Returns the output and the state after the last token.
    """
    if in_place and is_step(data[0], cu_seqlens):
        return getattr(ops, f"{name}_step")(*data, state=state, **options), state
    return getattr(ops, name)(*data, state=state, cu_seqlens=cu_seqlens, **options)


def is_step(x: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether the call has one token of each sequence and no gradient."""
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
    """Whether operators on x run immediately and unobserved: no compiler, tracer, gradient, dispatch mode,
    transform or CUDA graph capture is active."""
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
    """The kind and the resulting state of an in-place step of one token, without computing the step.

    kind: equal for steps that launch the same kernels. The resulting state has the tensors of `state`, which
    the device writes, and updated numbers; without numbers it is the same object. A named tuple with numbers
    has a method of this name. None: unknown, or the step allocates tensors, as when a cache grows.
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
