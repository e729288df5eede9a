"""girih as a backend in fla's registry (`fla.backends`, from fla-core 0.6).

fla asks a verifier before each call, and calls the next backend, or fla's own kernels, when it refuses. The
verifiers refuse what the functions of girih.fla refuse, and calls that take girih's path `aten` on a GPU.
"""

import os
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from girih import fla as functions
from girih.fla.arguments import check_word, outside_autocast, read_options, refuse, value_first
from girih.fla.convolution import (
    NORM_ACTIVATIONS,
    as_channels,
    as_tokens,
    check_cache,
    check_filter,
    convolve,
    last_inputs,
    past_inputs,
)
from girih.fla.delta import check_gates, gated_options
from girih.fla.linear import head_gates
from girih.nn.functional.fused import WITH_CUDA
from girih.nn.functional.gates import canonical_activation

try:
    import fla.modules.causal_conv1d.ops as fla_conv
    import fla.modules.norm.fused_norm_gate as fla_norm
    import fla.ops.simple_gla as fla_simple_gla
    from fla.backends import BaseBackend, register
except ImportError as error:
    message = f"girih.fla.register needs fla-core 0.6 or newer, whose registry is fla.backends: {error}"
    raise ImportError(message) from error

Verdict = tuple[bool, str | None]  # of fla's verifiers: whether the call is served, and why not


class GirihBackend(BaseBackend):
    """fla's description of a backend; FLA_GIRIH=0 disables it."""

    backend_type = "girih"
    env_var = "FLA_GIRIH"
    priority = 1  # before FlashQLA (3): the user has registered girih by a call
    is_registered = False

    def is_enabled(self) -> bool:
        return GirihBackend.is_registered and super().is_enabled()


@outside_autocast
def verify_path(op: str, *inputs: Tensor | None, **options: Any) -> Verdict:
    """Accepts a call of `torch.ops.girih.<op>` that runs on girih's kernels, and every call on the CPU, for
    which fla has no kernels. Raises the errors of the call, which fla counts as a refusal."""
    device = inputs[0].device.type
    if device not in ("cpu", "cuda"):
        return False, f"girih runs on cpu and cuda, not on {device}"
    if device == "cuda" and not WITH_CUDA:
        return False, "this build of girih has no CUDA kernels"
    registered = getattr(torch.ops.girih, f"{op}_explain")
    path, why = registered(*inputs, **options, device=device, step=False)
    return device == "cpu" or path != "aten", f"girih: {why}"


def verify_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> Verdict:
    function = "chunk_gated_delta_rule"
    refuse(function, cp_context=cp_context)
    gated_options(function, state_v_first, use_beta_sigmoid_in_kernel, allow_neg_eigval, kwargs)
    check_gates(function, beta, g)
    inputs = (q, k, v, beta, g, None, None, cu_seqlens)
    return verify_path("delta_product", *inputs, n=1, scale=scale, l2norm_qk=use_qk_l2norm_in_kernel)


def verify_fused_recurrent_simple_gla(
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
) -> Verdict:
    function = "fused_recurrent_simple_gla"
    refuse(function, reverse=reverse)
    value_first(function, state_v_first, **read_options(function, kwargs, transpose_state_layout=None))
    g = head_gates(function, q, g, g_gamma)
    return verify_path("gla", q, k, v, g, None, cu_seqlens, scale=scale)


def verify_fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Verdict:
    g = head_gates("fused_chunk_simple_gla", q, g, g_gamma)
    return verify_path("gla", q, k, v, g, None, cu_seqlens, scale=scale)


def verify_parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Verdict:
    function = "parallel_simple_gla"
    refuse(function, output_attentions=output_attentions)
    return verify_path("gla", q, k, v, head_gates(function, q, g), None, cu_seqlens, scale=scale)


# fla's functions of the convolution and of the gated norm are halves of an autograd.Function: forward and
# backward are dispatched apart. Hints for fla's kernels (chunk_size, ...) are in **hints.


@outside_autocast
def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **hints: Any,
) -> tuple[Tensor, Tensor | None]:
    shape, x = x.shape, as_channels(x, weight)
    y = convolve(x, weight, bias, initial_state, activation, cu_seqlens)
    state = last_inputs(x, weight.shape[1], initial_state, cu_seqlens) if output_final_state else None
    # autograd refuses in-place operations on a view that an autograd.Function returns
    return y if y.shape == shape else y.view(shape), state


def verify_causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
    layout_fallback: bool = False,
) -> Verdict:
    function = "causal_conv1d"
    refuse(function, residual=residual)
    check_filter(function, weight, activation)
    x = as_channels(x, weight)
    inputs = (x, weight, bias, past_inputs(initial_state, x), cu_seqlens)
    return verify_path("short_conv", *inputs, activation=canonical_activation(activation))


@outside_autocast
def causal_conv1d_bwd(
    x: Tensor,
    dy: Tensor,
    dht: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **hints: Any,
) -> tuple[Tensor, Tensor, Tensor | None, None, Tensor | None]:
    shape, x = x.shape, as_channels(x, weight)
    dx, dweight, dbias, dpast, _ = torch.ops.girih.short_conv_backward(
        dy.reshape(x.shape),
        None,
        x,
        weight,
        bias,
        past_inputs(initial_state, x),
        cu_seqlens,
        activation=canonical_activation(activation),
    )
    # The filter does not read the oldest input of initial_state [N, D, W].
    dinitial = None if initial_state is None else F.pad(dpast.mT, (1, 0)).to(initial_state.dtype)
    if dht is not None:
        dx_state, dinitial_state = last_inputs_backward(dht, x, weight.shape[1], initial_state, cu_seqlens)
        dx = dx + dx_state
        dinitial = None if dinitial is None else dinitial + dinitial_state
    return dx.view(shape), dweight, dbias, None, dinitial


def last_inputs_backward(
    dht: Tensor, x: Tensor, W: int, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and initial_state through the final state, which consists of copies of both."""
    leaves = [None if y is None else y.detach().requires_grad_() for y in (x, initial_state)]
    with torch.enable_grad():
        state = last_inputs(leaves[0], W, leaves[1], cu_seqlens)
    inputs = [y for y in leaves if y is not None]
    gradients = torch.autograd.grad(state, inputs, dht.to(state.dtype))
    return gradients[0], gradients[1] if initial_state is not None else None


def verify_causal_conv1d_bwd(
    x: Tensor,
    dy: Tensor,
    dht: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **hints: Any,
) -> Verdict:
    options = {"activation": activation, "cu_seqlens": cu_seqlens}
    return verify_causal_conv1d_fwd(x, weight, bias, residual, initial_state, **options)


def verify_causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Verdict:
    function = "causal_conv1d_update"
    check_filter(function, weight, activation)
    tokens = as_tokens(function, x, weight)
    check_cache(function, "cache", cache, tokens, weight, tokens.shape[0])
    inputs = (tokens, weight, bias, cache[..., 1:].mT, None)
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in inputs):
        return False, "girih has no gradient of a step of the convolution"
    return verify_path("short_conv", *inputs, activation=canonical_activation(activation))


@outside_autocast
def layer_norm_gated_fwd(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    **absent: Any,
) -> tuple[Tensor, None, None, Tensor]:
    """y, mean, rstd and the input of the norm. rstd is None: girih's backward computes it again, and fla's
    backward does not compile without it, should girih be disabled between the two."""
    y = torch.ops.girih.gated_rms_norm(x, weight, g, activation=canonical_activation(activation), eps=eps)
    return y, None, None, x


def verify_layer_norm_gated_fwd(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
) -> Verdict:
    function = "rms_norm_gated"
    refuse(function, residual=residual, bias=bias)
    check_word(function, "activation", activation, NORM_ACTIVATIONS)
    if not is_rms_norm or weight is None:
        return False, "girih has the RMS norm with a weight only"
    if any(dtype not in (None, x.dtype) for dtype in (out_dtype, residual_dtype)):
        return False, "girih has one dtype for the input, the output and the residual"
    options = {"activation": canonical_activation(activation), "eps": eps}
    return verify_path("gated_rms_norm", x, weight, g, **options)


@outside_autocast
def layer_norm_gated_bwd(
    dy: Tensor,
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    dresidual: Tensor | None = None,
    recompute_output: bool = False,
    **absent: Any,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, g, weight, bias (None) and residual (None); with recompute_output also y."""
    options = {"activation": canonical_activation(activation), "eps": eps}
    dx, dweight, dg = torch.ops.girih.gated_rms_norm_backward(dy.to(x.dtype), x, weight, g, **options)
    if dresidual is not None:  # with prenorm fla returns the input of the norm as a second result
        dx = dx + dresidual.to(dx.dtype)
    gradients = (dx, dg, dweight, None, None)
    if not recompute_output:
        return gradients
    return *gradients, torch.ops.girih.gated_rms_norm(x, weight, g, **options).to(dy.dtype)


def verify_layer_norm_gated_bwd(
    dy: Tensor,
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    dresidual: Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
) -> Verdict:
    if has_residual:
        return False, "girih has no residual"
    options = {"out_dtype": x_dtype, "is_rms_norm": is_rms_norm}
    return verify_layer_norm_gated_fwd(x, g, weight, bias, activation, eps, **options)


class GatedDeltaRule(GirihBackend):
    """fla has one registry for the functions of `fla.ops.gated_delta_rule`, and finds them here by name."""

    chunk_gated_delta_rule = staticmethod(functions.chunk_gated_delta_rule)
    chunk_gated_delta_rule_verifier = staticmethod(verify_chunk_gated_delta_rule)


# fla's functions with a registry of their own: the module, girih's implementation, the verifier.
SERVED = {
    "fused_recurrent_simple_gla": (
        fla_simple_gla,
        functions.fused_recurrent_simple_gla,
        verify_fused_recurrent_simple_gla,
    ),
    "fused_chunk_simple_gla": (
        fla_simple_gla,
        functions.fused_chunk_simple_gla,
        verify_fused_chunk_simple_gla,
    ),
    "parallel_simple_gla": (fla_simple_gla, functions.parallel_simple_gla, verify_parallel_simple_gla),
    "causal_conv1d_fwd": (fla_conv, causal_conv1d_fwd, verify_causal_conv1d_fwd),
    "causal_conv1d_bwd": (fla_conv, causal_conv1d_bwd, verify_causal_conv1d_bwd),
    "causal_conv1d_update": (fla_conv, functions.causal_conv1d_update, verify_causal_conv1d_update),
    "layer_norm_gated_fwd": (fla_norm, layer_norm_gated_fwd, verify_layer_norm_gated_fwd),
    "layer_norm_gated_bwd": (fla_norm, layer_norm_gated_bwd, verify_layer_norm_gated_bwd),
}


def register_backend() -> None:
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        warnings.warn(
            "girih.fla.register has no effect: FLA_DISABLE_BACKEND_DISPATCH=1 turns fla's dispatch off",
            stacklevel=3,
        )
    GirihBackend.is_registered = True
    register("gated_delta_rule")(GatedDeltaRule)
    for name, (module, implementation, verifier) in SERVED.items():
        register(getattr(module, name), backend=GirihBackend, verifier=verifier)(implementation)


def unregister_backend() -> None:
    GirihBackend.is_registered = False
