"""Checks and conversions that the functions of girih.fla share."""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# Arguments of fla's functions that girih supports at their default only, and why.
REASONS = {
    "bias": "the norm has a weight only",
    "cp_context": "girih.context_parallel cuts sequences over processes",
    "gk": "delta_product has no gate for each key channel",
    "gv": "girih has no gate for each channel of the values",
    "output_attentions": "no attention matrix is formed",
    "prenorm": "add the residual before the call",
    "residual": "add the residual before the call",
    "residual_in_fp32": "add the residual before the call",
    "reverse": "tokens are read in order; flip them before and after the call",
    "seq_idx": "cu_seqlens packs sequences",
}


def show(value: Any) -> str:
    """A value as an error message shows it."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return (
        repr(value) if isinstance(value, (bool, int, float, str, type(None))) else f"a {type(value).__name__}"
    )


def refuse(function: str, **arguments: Any) -> None:
    """Raises ValueError for the first argument that is set: neither None nor False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            default = False if isinstance(value, bool) else None
            raise ValueError(
                f"girih.fla.{function}: {name} is {show(value)} but should be {default}: {REASONS[name]}"
            )


def check_word(function: str, name: str, value: Any, words: tuple) -> None:
    if value not in words:
        expected = ", ".join(map(repr, words))
        raise ValueError(f"girih.fla.{function}: {name} is {show(value)} but should be one of {expected}")


def check_dims(function: str, name: str, tensor: Any, shape: str) -> None:
    """Raises ValueError unless tensor is None or a tensor with as many dimensions as shape, e.g. "[B, T]"."""
    if tensor is None:
        return
    if not isinstance(tensor, Tensor) or tensor.dim() != len(shape.split(",")):
        raise ValueError(f"girih.fla.{function}: {name} is {show(tensor)} but should be {shape}")


def read_options(function: str, kwargs: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """The options that fla reads from **kwargs, with their defaults. Raises TypeError for other names: fla
    ignores them."""
    if "head_first" in kwargs:
        raise ValueError(
            f"girih.fla.{function}: head_first is {show(kwargs['head_first'])} but should be absent: "
            "tensors are [B, T, H, ...], and fla has removed the option"
        )
    for name in kwargs:
        if name not in defaults:
            raise TypeError(f"girih.fla.{function}: got an unexpected keyword argument {name!r}")
    return {**defaults, **kwargs}


def value_first(function: str, state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """state_v_first, or its deprecated name."""
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError(
            f"girih.fla.{function}: transpose_state_layout is {transpose_state_layout} and state_v_first is "
            "True; the first is the deprecated name of the second"
        )
    warnings.warn(
        "transpose_state_layout is deprecated: its name is state_v_first", DeprecationWarning, stacklevel=4
    )
    return transpose_state_layout


def sequences(q: Tensor, cu_seqlens: Tensor | None) -> int:
    """N, the number of sequences."""
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def first_state(
    function: str, initial_state: Tensor, sizes: tuple[int, ...], q: Tensor, *, value_first: bool = False
) -> Tensor:
    """fla's state as girih's: `[N, H, K, V]` in fp32 (fp64 for fp64). sizes: (N, H, K, V)."""
    expected = (*sizes[:2], sizes[3], sizes[2]) if value_first else sizes
    if not isinstance(initial_state, Tensor) or initial_state.shape != expected:
        raise ValueError(
            f"girih.fla.{function}: initial_state is {show(initial_state)} but should be {list(expected)}"
        )
    state = initial_state.mT if value_first else initial_state
    return state.to(torch.promote_types(q.dtype, torch.float32))


def final_state(state: Tensor, output_final_state: bool, value_first: bool = False) -> Tensor | None:
    """girih's state as fla's; None unless it is wanted."""
    if not output_final_state:
        return None
    return state.mT.contiguous() if value_first else state


def outside_autocast(function: Callable) -> Callable:
    """fla's functions compute in the dtypes of their arguments under autocast too; girih's operators cast."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        device = next((x.device.type for x in tensors), "cpu")
        if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return call
