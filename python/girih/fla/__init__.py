"""flash-linear-attention's operators on girih's kernels.

The functions have the names, arguments, defaults and results of fla-core 0.6.0 and call ``girih.ops``. They
need neither fla nor Triton. ``register()`` makes girih a backend of an installed fla: fla's own functions
and layers then call girih.

Conventions are fla's. Tensors are ``[B, T, H, ...]``, gates are logs, ``scale`` defaults to ``K**-0.5``, keys
and queries are normalized by ``use_qk_l2norm_in_kernel``. A function returns ``(o, final_state)``; the state
is ``[N, H, K, V]`` in fp32, and None unless ``output_final_state``. ``cu_seqlens [N + 1]`` packs N sequences
into ``B == 1``. Autocast does not change dtypes. All functions but ``causal_conv1d_update`` have gradients.
``cu_seqlens_cpu``, ``chunk_indices``, ``chunk_size`` and ``checkpoint_level`` are hints for fla's kernels and
have no effect on the result.

An argument with an unsupported value raises ValueError, which names the argument; a keyword that fla would
ignore raises TypeError.
"""

from girih.fla.convolution import causal_conv1d, causal_conv1d_update, rms_norm_gated
from girih.fla.delta import (
    chunk_delta_rule,
    chunk_gated_delta_product,
    chunk_gated_delta_rule,
    chunk_gdn,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
)
from girih.fla.linear import (
    chunk_gla,
    chunk_gsa,
    chunk_simple_gla,
    fused_chunk_simple_gla,
    fused_recurrent_gla,
    fused_recurrent_gsa,
    fused_recurrent_simple_gla,
    parallel_simple_gla,
)

__all__ = [
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gla",
    "chunk_gsa",
    "chunk_simple_gla",
    "fused_chunk_simple_gla",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gla",
    "fused_recurrent_gsa",
    "fused_recurrent_simple_gla",
    "parallel_simple_gla",
    "register",
    "rms_norm_gated",
    "unregister",
]


def register() -> None:
    """Makes girih a backend of fla-core 0.6 or newer: fla's functions call girih where girih serves the call.

    girih serves ``chunk_gated_delta_rule``, ``fused_recurrent_simple_gla``, ``fused_chunk_simple_gla``,
    ``parallel_simple_gla``, ``causal_conv1d``, ``causal_conv1d_update`` and ``rms_norm_gated``. fla verifies
    each call first, as for all backends; a call that girih does not serve runs on fla's own kernels, and fla
    logs the reason (logger ``fla.backends``, level INFO). fla's environment variables apply: ``FLA_GIRIH=0``
    turns girih off, at any time; ``FLA_DISABLE_BACKEND_DISPATCH=1`` turns off every backend, and register()
    warns.

    Raises ImportError without fla-core 0.6 or newer.
    """
    from girih.fla.registry import register_backend

    register_backend()


def unregister() -> None:
    """fla's functions no longer call girih, as before :func:`register`."""
    from girih.fla.registry import unregister_backend

    unregister_backend()
