"""The short convolution and the gated norm, with the signatures of `fla.modules`.

fla's state of a convolution is `[N, D, W]`, the last W inputs; the filter reads W - 1 of them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from girih import ops
from girih.fla.arguments import (
    check_dims,
    check_word,
    outside_autocast,
    read_options,
    refuse,
    sequences,
    show,
)
from girih.nn.functional.gates import canonical_activation

FILTER_ACTIVATIONS = (None, "silu", "swish")
NORM_ACTIVATIONS = ("swish", "silu", "sigmoid")


@outside_autocast
def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The short convolution by :func:`girih.ops.short_conv`.

    Shapes: x ``[B, T, D]``, or ``[B, T, ..., d]`` with D channels in all; weight ``[D, W]`` with W from 1 to
    4, bias ``[D]``, residual as x, added after the activation; states ``[N, D, W]`` in x's dtype.
    ``activation`` is None, silu or swish. ``backend`` names an implementation of fla: triton, cuda and mix
    are the same here. ``weight=None``, ``seq_idx`` and a ``cp_context`` raise ValueError.
    """
    function = "causal_conv1d"
    refuse(function, cp_context=cp_context, **read_options(function, kwargs, seq_idx=None))
    check_word(function, "backend", backend, ("triton", "cuda", "mix"))
    check_filter(function, weight, activation)
    check_dims(function, "cu_seqlens", cu_seqlens, "[N + 1]")
    check_residual(function, residual, x)
    shape, x = x.shape, as_channels(x, weight)
    if initial_state is not None:
        check_cache(function, "initial_state", initial_state, x, weight, sequences(x, cu_seqlens))
    y = convolve(x, weight, bias, initial_state, activation, cu_seqlens)
    if residual is not None:
        y = y + residual.reshape(x.shape).to(y.dtype)
    state = last_inputs(x, weight.shape[1], initial_state, cu_seqlens) if output_final_state else None
    return y.view(shape), state


@outside_autocast
def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of N sequences by :func:`girih.ops.short_conv_step`; ``cache [N, D, W]`` is written in place.

    Shapes: x ``[N, D]``, ``[N, 1, D]`` or ``[1, N, D]``. A cache in another dtype than x raises ValueError.
    """
    function = "causal_conv1d_update"
    check_filter(function, weight, activation)
    check_residual(function, residual, x)
    tokens = as_tokens(function, x, weight)
    check_cache(function, "cache", cache, tokens, weight, tokens.shape[0])
    if weight.shape[1] > 1:
        cache[..., 0] = cache[..., 1]  # the oldest input, which the filter does not read
    else:
        cache[..., 0] = tokens[:, 0]
    state = ops.ShortConvState(cache[..., 1:].mT)
    options = {"activation": canonical_activation(activation), "state": state}
    y = ops.short_conv_step(tokens, weight, bias, **options)
    if residual is not None:
        y = y + residual.reshape(y.shape).to(y.dtype)
    return y.reshape(x.shape), cache


@outside_autocast
def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """RMS norm followed by a gate, by :func:`girih.ops.gated_rms_norm`.

    Shapes: x, g and the result ``[..., D]``, weight ``[D]`` or None. ``activation`` is swish, silu or
    sigmoid. A bias, a residual, ``prenorm`` and ``residual_in_fp32`` raise ValueError.
    """
    function = "rms_norm_gated"
    refuse(function, bias=bias, residual=residual, prenorm=prenorm, residual_in_fp32=residual_in_fp32)
    check_word(function, "activation", activation, NORM_ACTIVATIONS)
    if not isinstance(g, Tensor) or g.dtype != x.dtype:
        dtype = g.dtype if isinstance(g, Tensor) else show(g)
        raise ValueError(f"girih.fla.{function}: g is {dtype} but should have the dtype of x, {x.dtype}")
    weight = x.new_ones(x.shape[-1]) if weight is None else weight
    return ops.gated_rms_norm(x, weight, g, activation=canonical_activation(activation), eps=eps)


def check_filter(function: str, weight: Tensor | None, activation: str | None) -> None:
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ValueError(f"girih.fla.{function}: weight is {show(weight)} but should be [D, W]")
    check_word(function, "activation", activation, FILTER_ACTIVATIONS)


def check_cache(function: str, name: str, cache: Tensor, x: Tensor, weight: Tensor, N: int) -> None:
    if not isinstance(cache, Tensor) or cache.shape != (N, *weight.shape):
        raise ValueError(
            f"girih.fla.{function}: {name} is {show(cache)} but should be [N, D, W] = {[N, *weight.shape]}"
        )
    if name == "cache" and cache.dtype != x.dtype:
        raise ValueError(
            f"girih.fla.{function}: {name} is {cache.dtype} but should have the dtype of x, {x.dtype}"
        )


def check_residual(function: str, residual: Tensor | None, x: Tensor) -> None:
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"girih.fla.{function}: residual is {show(residual)} but should have the shape of x, "
            f"{list(x.shape)}"
        )


def as_tokens(function: str, x: Tensor, weight: Tensor) -> Tensor:
    """x of one token a sequence -> `[N, 1, D]`."""
    D = weight.shape[0]
    if x.dim() not in (2, 3) or x.shape[-1] != D:
        raise ValueError(
            f"girih.fla.{function}: x is {show(x)} but should be [N, D], [N, 1, D] or [1, N, D] with D = {D}"
        )
    return x.reshape(-1, 1, D)


def as_channels(x: Tensor, weight: Tensor) -> Tensor:
    """x `[B, T, ..., d]` -> `[B, T, D]`."""
    return x if x.shape[-1] == weight.shape[0] else x.flatten(2)


def past_inputs(initial_state: Tensor | None, x: Tensor) -> Tensor | None:
    """The inputs that the filter reads, `[N, W - 1, D]`, from fla's state `[N, D, W]`."""
    return None if initial_state is None else initial_state[..., 1:].mT.to(x.dtype)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    state = None if initial_state is None else ops.ShortConvState(past_inputs(initial_state, x))
    options = {"activation": canonical_activation(activation), "state": state, "cu_seqlens": cu_seqlens}
    return ops.short_conv(x, weight, bias, **options)[0]


def last_inputs(
    x: Tensor, W: int, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """fla's state after x `[B, T, D]`: the last W inputs of each sequence, `[N, D, W]` in x's dtype.

    Inputs before a sequence are those of initial_state, or 0.
    """
    before = None if initial_state is None else initial_state.to(x.dtype)
    if cu_seqlens is None:
        earlier = F.pad(x.mT, (W, 0)) if before is None else torch.cat([before, x.mT], -1)
        return earlier[..., -W:].contiguous()
    start, end = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    token = end + torch.arange(-W, 0, device=x.device)  # [N, W]
    is_inside = (token >= start)[..., None]
    state = torch.where(is_inside, x[0, token.clamp(min=0)], 0)  # [N, W, D]
    if before is not None:
        column = (token - start + W).clamp(max=W - 1)  # of initial_state, where token < start
        state = torch.where(is_inside, state, before.mT.take_along_dim(column[..., None], 1))
    return state.mT.contiguous()
