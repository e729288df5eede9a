"""The norm and the gate after a mixer."""

import torch
from torch import Tensor


def gated_rms_norm(
    x: Tensor, weight: Tensor, gate: Tensor | None = None, *, activation: str = "silu", eps: float = 1e-6
) -> Tensor:
    """RMS norm over the last dimension and the gate of a mixer's output, in one pass over memory.

    ::

        y = x / sqrt(mean(x^2) + eps) * weight * activation(gate)

    (Zhang and Sennrich 2019, with a gate.) Shapes: x, gate and y ``[..., dim]``, weight ``[dim]``.
    ``activation`` is silu, gelu (exact) or sigmoid; without gate there is no factor. y and gate have x's
    dtype; weight may have another float dtype. Sums are formed in fp32 (fp64 for fp64) and y is rounded
    once. There is no state.

    >>> x = gate = torch.randn(2, 100, 4, 64)
    >>> gated_rms_norm(x, torch.ones(64), gate).shape
    torch.Size([2, 100, 4, 64])
    """
    return torch.ops.girih.gated_rms_norm(x, weight, gate, activation=activation, eps=eps)
