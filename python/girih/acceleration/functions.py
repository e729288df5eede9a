"""Replacements of transformers' functions for linear layers, with their signatures and layouts, by girih's
operators.

Each wrapper `X(original)` returns the function that replaces `original` in a modelling module. It calls
`original` for arguments that no operator of girih supports. Layouts are transformers': states of the gated
delta rule `[B, Hv, D, V]`, of Mamba-2 `[B, H, head_dim, state_size]`, convolutions `[B, channels, T]`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from girih import ops
from girih.nn.functional.fused import autocast_dtype
from girih.nn.functional.gates import canonical_activation
from girih.nn.functional.packing import cu_seqlens_from_starts

Function = Callable[..., Any]
FILTER_ACTIVATIONS = (None, *ops.words("short_conv", "activation"))
NORM_ACTIVATIONS = ops.words("gated_rms_norm", "activation")
MAX_TAPS = int(ops.describe()["short_conv"]["sizes"]["W"]["most"])


def packed_bounds(kwargs: dict[str, Any]) -> Tensor | None:
    """`cu_seqlens` of packed sequences, from the arguments that transformers' collators produce; None: no
    packing.

    `cu_seqlens` and `cu_seq_lens_q` are returned as they are. With `seq_idx [1, T]` only, the host counts the
    sequences, which waits for the device.
    """
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if kwargs.get(name) is not None:
            return kwargs[name]
    index = kwargs.get("seq_idx")
    if index is None:
        return None
    if index.shape[0] != 1:
        raise ValueError(f"seq_idx has {index.shape[0]} rows; packed sequences lie in one")
    starts = (index[0, 1:] != index[0, :-1]).nonzero()[:, 0] + 1
    return cu_seqlens_from_starts(starts, index.shape[1])


def chunk_gated_delta_rule(original: Function) -> Function:
    @functools.wraps(original)
    def girih_chunk_gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cu_seqlens = packed_bounds(kwargs)
        state_dtype = torch.promote_types(query.dtype, torch.float32)
        state = (
            None if initial_state is None else ops.DeltaProductState(copy_state(initial_state, state_dtype))
        )
        inputs, options = (query, key, value, beta, g), {"n": 1, "l2norm_qk": use_qk_l2norm_in_kernel}
        # A decoding step. Without gradient the state is written in place, as the caller's cache would be.
        is_single_token = query.shape[1] == 1 and cu_seqlens is None and output_final_state
        if state is not None and is_single_token and not torch.is_grad_enabled():
            o = ops.delta_product_step(*inputs, state=state, **options)
        else:
            o, state = ops.delta_product(*inputs, state=state, cu_seqlens=cu_seqlens, **options)
        return o, state.s if output_final_state else None

    return girih_chunk_gated_delta_rule


def fused_recurrent_gated_delta_rule(original: Function) -> Function:
    return chunk_gated_delta_rule(original)  # the same signature without chunk_size


def mamba_chunk_scan_combined(original: Function) -> Function:
    """Mamba-2: `S <- e^{A dt} S + B (dt x)^T, y = S^T C + D x`, computed as `gla` with a gate for each head.

    The groups of B and C are key heads that memories share. dt, its bias, softplus and limits are fp32.
    """

    @functools.wraps(original)
    def girih_mamba_chunk_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        x, state_dtype = hidden_states, torch.promote_types(hidden_states.dtype, torch.float32)
        dt = time_step(dt, dt_bias, dt_softplus, state_dtype).clamp(*dt_limit)
        state = None if initial_states is None else ops.GLAState(copy_state(initial_states.mT, state_dtype))
        y, final_state = ops.gla(
            C.to(x.dtype),
            B.to(x.dtype),
            (x * dt[..., None]).to(x.dtype),
            dt * A.to(state_dtype),
            scale=1.0,
            state=state,
            cu_seqlens=packed_bounds(kwargs),
        )
        if D is not None:
            y = torch.addcmul(y, x, D[:, None].to(x.dtype))
        return (y, final_state.s.mT) if return_final_states else y

    return girih_mamba_chunk_scan


def selective_state_update(original: Function) -> Function:
    """A decoding step of Mamba-2; `state` is written in place. Mamba-1, with a dt for each channel, calls
    `original`."""

    @functools.wraps(original)
    def girih_selective_state_update(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        x, state_dtype = hidden_states, torch.promote_types(hidden_states.dtype, torch.float32)
        # The values of a head are expanded over its channels.
        is_per_head = all(p is None or p.stride(-1) == 0 for p in (dt, A, dt_bias)) and A.stride(-2) == 0
        if not is_per_head or state.dtype != state_dtype:
            return original(state, x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=dt_softplus, z=z, **kwargs)
        dt = time_step(dt[..., 0], None if dt_bias is None else dt_bias[..., 0], dt_softplus, state_dtype)
        inputs = (
            C[:, None].to(x.dtype),
            B[:, None].to(x.dtype),
            (x * dt[..., None]).to(x.dtype)[:, None],
            (dt * A[..., 0, 0].to(state_dtype))[:, None],
        )
        if torch.is_grad_enabled():  # the step operator has no gradient
            y, final_state = ops.gla(
                *inputs, scale=1.0, state=ops.GLAState(copy_state(state.mT, state_dtype))
            )
            state.copy_(final_state.s.mT)
        else:
            y = ops.gla_step(*inputs, scale=1.0, state=ops.GLAState(state.mT))
        y = y[:, 0]
        if D is not None:
            y = torch.addcmul(y, x, D.to(x.dtype))
        return y if z is None else y * F.silu(z)

    return girih_selective_state_update


def copy_state(state: Tensor, dtype: torch.dtype) -> Tensor:
    """A state from the caller's cache in `dtype`. With gradients enabled it is a copy, because the caller
    overwrites the cache in place and backward may read the state."""
    return state.to(dtype, copy=torch.is_grad_enabled())


def time_step(dt: Tensor, bias: Tensor | None, softplus: bool, dtype: torch.dtype) -> Tensor:
    dt = dt.to(dtype)
    if bias is not None:
        dt = dt + bias.to(dtype)
    return F.softplus(dt) if softplus else dt


def mamba_split_conv1d_scan_combined(original: Function) -> Function:
    """The fused function of a whole Mamba-2 layer in training. It returns None: then the caller calls the
    separate functions."""

    @functools.wraps(original)
    def decline(*args: Any, **kwargs: Any) -> None:
        return None

    return decline


def causal_conv1d_fn(original: Function) -> Function:
    @functools.wraps(original)
    def girih_causal_conv1d(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if canonical_activation(activation) not in FILTER_ACTIVATIONS or weight.shape[-1] > MAX_TAPS:
            return original(hidden_states, weight, bias, activation, **kwargs)
        bounds = packed_bounds(kwargs)
        if bounds is not None:
            # Columns of a cache, or zeros, precede the tokens that bounds count: the past of the first
            # sequence.
            bounds = bounds + (hidden_states.shape[-1] - bounds[-1:])
            bounds = torch.cat((torch.zeros_like(bounds[:1]), bounds[1:]))
        options = {"activation": canonical_activation(activation), "cu_seqlens": bounds}
        y, _ = ops.short_conv(hidden_states.mT, weight, bias, **options)
        return y.mT

    return girih_causal_conv1d


def causal_conv1d_update(original: Function) -> Function:
    """One or several tokens; `conv_state` `[B, channels, K]`, the last K inputs, is written in place."""

    @functools.wraps(original)
    def girih_causal_conv1d_update(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        W, K, T = weight.shape[-1], conv_state.shape[-1], hidden_states.shape[-1]
        if canonical_activation(activation) not in FILTER_ACTIVATIONS or not 1 < W <= min(MAX_TAPS, K + 1):
            return original(hidden_states, conv_state, weight, bias, activation)
        x, options = hidden_states.mT, {"activation": canonical_activation(activation)}
        past = conv_state[..., K - W + 1 :].mT  # the inputs that the filter reads
        # Under autocast the dtype of the convolution may differ from the dtype of the cache.
        dtype = autocast_dtype(hidden_states) or hidden_states.dtype
        if T == 1 and K <= W and not torch.is_grad_enabled() and conv_state.dtype == dtype:
            if K == W:  # drop the oldest input, which the filter does not read
                conv_state[..., 0].copy_(conv_state[..., 1])
            return ops.short_conv_step(x, weight, bias, state=ops.ShortConvState(past), **options).mT
        past = past.to(dtype, copy=True, memory_format=torch.contiguous_format)
        y, _ = ops.short_conv(x, weight, bias, state=ops.ShortConvState(past), **options)
        conv_state.copy_(torch.cat((conv_state, hidden_states), -1)[..., -K:])
        return y.mT

    return girih_causal_conv1d_update


def lightning_attention(original: Function) -> Function:
    """`forward` of MiniMax's lightning attention: `S <- e^{-slope} S + k v^T, o = S^T q`, computed as `gla`
    with a gate for each head. A padding token has q = k = v = 0. The cache keeps S `[B, H, D, D]`."""

    @functools.wraps(original)
    def girih_lightning_attention(
        self: torch.nn.Module,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        cache, cu_seqlens = kwargs.get("past_key_values", cache), packed_bounds(kwargs)
        qkv = self.act_fn(self.qkv_proj(hidden_states))
        if attention_mask is not None:
            qkv = (qkv * attention_mask[..., None]).to(qkv.dtype)
        q, k, v = qkv.unflatten(-1, (self.num_attention_heads, -1)).chunk(3, -1)
        state_dtype = torch.promote_types(v.dtype, torch.float32)
        g = -self.slope_rate.flatten().to(state_dtype).expand(*v.shape[:-1])
        past = None if cache is None else cache.get_linear_cache(self.layer_idx)
        state = None if past is None else ops.GLAState(past.to(state_dtype, copy=True))
        if state is not None and v.shape[1] == 1 and cu_seqlens is None and not torch.is_grad_enabled():
            o = ops.gla_step(q, k, v, g, scale=1.0, state=state)
        else:
            o, state = ops.gla(q, k, v, g, scale=1.0, state=state, cu_seqlens=cu_seqlens)
        S = state.s.to(torch.promote_types(v.dtype, self.slope_rate.dtype))
        if cache is not None:
            cache.set_linear_cache(self.layer_idx, S)
        y = torch.sigmoid(self.output_gate(hidden_states)) * self.norm(o.flatten(-2))
        return self.out_proj(y), S

    return girih_lightning_attention


def rms_norm_gated(original: Function) -> Function:
    """`forward` of a norm followed by a gate: `rms(x) * weight * activation(gate)`."""

    @functools.wraps(original)
    def girih_rms_norm_gated(self: torch.nn.Module, hidden_states: Tensor, gate: Tensor) -> Tensor:
        activation = canonical_activation(self.activation)
        if activation not in NORM_ACTIVATIONS:
            return original(self, hidden_states, gate)
        return ops.gated_rms_norm(
            hidden_states,
            self.weight,
            gate.to(hidden_states.dtype),
            activation=activation,
            eps=self.variance_epsilon,
        )

    return girih_rms_norm_gated
