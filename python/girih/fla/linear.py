"""Gated slot attention and gated linear attention, with the signatures of `fla.ops.gsa`, `fla.ops.gla` and
`fla.ops.simple_gla`."""

from typing import Any

import torch
from torch import Tensor

from girih import ops
from girih.fla.arguments import (
    check_dims,
    check_word,
    final_state,
    first_state,
    outside_autocast,
    read_options,
    refuse,
    sequences,
    show,
    value_first,
)


@outside_autocast
def chunk_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    checkpoint_level: int = 2,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor | None]]:
    """Gated slot attention by :func:`girih.ops.gsa`; ``g=None`` is ABC.

    Shapes: q ``[B, T, HQ, K]``, k ``[B, T, H, K]``, v ``[B, T, H, V]``, s and g ``[B, T, H, M]``; states
    ``[N, H, K, M]`` and ``[N, H, M, V]``; o ``[B, T, HQ, V]``. Without g the logits s are normalized over the
    tokens of this call, as in fla: an initial state does not enter the normalization.
    """
    read_options("chunk_gsa", kwargs, chunk_size=None)
    check_word("chunk_gsa", "checkpoint_level", checkpoint_level, (0, 1, 2))
    return _gsa("chunk_gsa", q, k, v, s, g, scale, initial_state, output_final_state, cu_seqlens)


@outside_autocast
def fused_recurrent_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """As :func:`chunk_gsa`; ``reverse=True`` raises ValueError."""
    function = "fused_recurrent_gsa"
    refuse(function, reverse=reverse)
    return _gsa(function, q, k, v, s, g, scale, initial_state, output_final_state, cu_seqlens)


def _gsa(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None,
    scale: float | None,
    initial_state: tuple[Tensor, Tensor] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:
    check_dims(function, "cu_seqlens", cu_seqlens, "[N + 1]")
    check_dims(function, "k", k, "[B, T, H, K]")
    state = None
    if initial_state is not None and not (
        isinstance(initial_state, (tuple, list)) and len(initial_state) == 2
    ):
        raise ValueError(
            f"girih.fla.{function}: initial_state is {show(initial_state)} but should be a pair of tensors"
        )
    if initial_state is not None and any(x is not None for x in initial_state):
        N, H, K, V, M = sequences(q, cu_seqlens), *k.shape[2:], v.shape[-1], s.shape[-1]
        first_k = first_state(function, initial_state[0], (N, H, K, M), q)
        first_v = first_state(function, initial_state[1], (N, H, M, V), q)
        # No token has been normalized: the first gate of ABC is 0.
        z = first_k.new_full((N, H, M), -torch.inf) if g is None else None
        state = ops.GSAState(first_k, first_v, z)
    o, state = ops.gsa(q, k, v, s, g, scale=scale, state=state, cu_seqlens=cu_seqlens)
    return o, [state.k, state.v] if output_final_state else [None, None]


@outside_autocast
def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: int | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention with a gate for each key channel, by :func:`girih.ops.gla`.

    Shapes: q, k and g ``[B, T, H, K]``, v ``[B, T, H, V]``; state ``[N, H, K, V]``, or ``[N, H, V, K]`` with
    ``state_v_first``.
    """
    check_dims("chunk_gla", "g", g, "[B, T, H, K]")
    state = (initial_state, output_final_state, state_v_first, cu_seqlens)
    return _gla("chunk_gla", q, k, v, g, scale, *state)


@outside_autocast
def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: int | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As :func:`chunk_gla`, with or without the gates gk; ``gv`` and ``reverse=True`` raise ValueError."""
    function = "fused_recurrent_gla"
    refuse(function, gv=gv, reverse=reverse)
    check_dims(function, "gk", gk, "[B, T, H, K]")
    options = read_options(function, kwargs, transpose_state_layout=None)
    is_value_first = value_first(function, state_v_first, **options)
    return _gla(function, q, k, v, gk, scale, initial_state, output_final_state, is_value_first, cu_seqlens)


@outside_autocast
def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with a gate for each head, by :func:`girih.ops.gla`.

    Shapes: q and k ``[B, T, H, K]``, v ``[B, T, H, V]``, g ``[B, T, H]``; state ``[N, H, K, V]``, or
    ``[N, H, V, K]`` with ``state_v_first``. ``g_gamma [H]`` is a log decay of each head, in place of g;
    fla computes no gradient for g_gamma, so a g_gamma that requires one raises ValueError.
    """
    read_options("chunk_simple_gla", kwargs, chunk_size=None)
    g = head_gates("chunk_simple_gla", q, g, g_gamma)
    state = (initial_state, output_final_state, state_v_first, cu_seqlens)
    return _gla("chunk_simple_gla", q, k, v, g, scale, *state)


@outside_autocast
def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As :func:`chunk_simple_gla`; ``reverse=True`` raises ValueError."""
    function = "fused_recurrent_simple_gla"
    refuse(function, reverse=reverse)
    options = read_options(function, kwargs, transpose_state_layout=None)
    is_value_first = value_first(function, state_v_first, **options)
    g = head_gates(function, q, g, g_gamma)
    return _gla(function, q, k, v, g, scale, initial_state, output_final_state, is_value_first, cu_seqlens)


@outside_autocast
def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As :func:`chunk_simple_gla`."""
    function = "fused_chunk_simple_gla"
    g = head_gates(function, q, g, g_gamma)
    return _gla(function, q, k, v, g, scale, initial_state, output_final_state, False, cu_seqlens)


@outside_autocast
def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, None]:
    """As :func:`chunk_simple_gla`, without states: the second result is None. ``output_attentions=True``
    raises ValueError."""
    function = "parallel_simple_gla"
    refuse(function, output_attentions=output_attentions)
    return _gla(function, q, k, v, head_gates(function, q, g), scale, None, False, False, cu_seqlens)


def head_gates(function: str, q: Tensor, g: Tensor | None, g_gamma: Tensor | None = None) -> Tensor | None:
    """The gates `[B, T, H]` of the heads, from g or from the log decays g_gamma `[H]`."""
    check_dims(function, "g", g, "[B, T, H]")
    if g_gamma is None:
        return g
    check_dims(function, "g_gamma", g_gamma, "[H]")
    if g is not None:
        raise ValueError(
            f"girih.fla.{function}: g_gamma is {show(g_gamma)} but should be None when g is given"
        )
    if g_gamma.requires_grad:
        raise ValueError(
            f"girih.fla.{function}: g_gamma requires a gradient, but fla computes none for it; "
            "g=g_gamma.expand(B, T, H) has one"
        )
    return g_gamma.expand(*q.shape[:2], g_gamma.shape[0])


def _gla(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    is_value_first: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    check_dims(function, "cu_seqlens", cu_seqlens, "[N + 1]")
    state = None
    if initial_state is not None:
        sizes = (sequences(q, cu_seqlens), v.shape[2], k.shape[3], v.shape[3])
        state = ops.GLAState(first_state(function, initial_state, sizes, q, value_first=is_value_first))
    o, state = ops.gla(q, k, v, g, scale=scale, state=state, cu_seqlens=cu_seqlens)
    return o, final_state(state.s, output_final_state, is_value_first)
