"""Activations of gates and step sizes. On a GPU, one kernel each for forward and backward."""

import torch
import torch.nn.functional as F
from torch import Tensor

from girih.nn.functional.fused import has_fused_kernel


def promote_to_fp32(x: Tensor) -> Tensor:
    """x in fp32, or in fp64 when x is fp64: the dtype in which gates and step sizes are activated."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def canonical_activation(activation: str | None) -> str | None:
    """The name that girih uses for an activation: fla and transformers also call silu swish."""
    return "silu" if activation == "swish" else activation


def apply_gate(
    r: Tensor, gate: str, bias: Tensor | None = None, rate: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """The activation of a linear product r `[..., features]`, in fp32 or fp64 except for none:

        none        r, in the dtype of r; bias must be None
        linear      r + bias
        sigmoid     scale sigmoid(r + bias)
        logsigmoid  scale log(sigmoid(r + bias))
        decay       -exp(rate) softplus(r + bias)

    bias: `[features]`, fp32 or fp64. rate: `[features]`, fp32 or fp64; the log rate, A_log of Mamba-2.
    """
    if gate == "none" or (gate == "linear" and bias is None):
        return r if gate == "none" else promote_to_fp32(r)
    if has_gate_kernel(r, bias, rate):
        return torch.ops.girih.row_gates(r, gate, bias, rate, scale)
    return aten_gate(r, gate, bias, rate, scale)


def has_gate_kernel(r: Tensor, *optional_vectors: Tensor | None) -> bool:
    vectors = [x for x in optional_vectors if x is not None]
    return (
        r.dim() > 0
        and has_fused_kernel(r, needs_contiguous=False)
        and (not vectors or has_fused_kernel(*vectors))
        and all(x.dtype == torch.float32 and x.shape == r.shape[-1:] for x in vectors)
    )


def aten_gate(r: Tensor, gate: str, bias: Tensor | None, rate: Tensor | None, scale: float) -> Tensor:
    z = promote_to_fp32(r) if bias is None else promote_to_fp32(r) + bias
    if gate == "linear":
        return z
    if gate == "decay":
        return -promote_to_fp32(rate).exp() * F.softplus(z)
    y = z.sigmoid() if gate == "sigmoid" else F.logsigmoid(z)
    return y if scale == 1.0 else scale * y
