"""RMS norms."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih import ops
from girih.ops import words

ACTIVATIONS = words("gated_rms_norm", "activation")


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm in the dtype of x (sums in fp32); its weight has no weight decay.

    >>> RMSNorm(8)(torch.full((2, 8), 3.0)).mean().round(decimals=3).item()
    1.0
    """

    undecayed = ("weight",)

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__(dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class GatedRMSNorm(RMSNorm):
    """`RMSNorm(x) * act(gate)` over the last dimension, in the dtype of x (`girih.ops.gated_rms_norm`).

    x, gate `[..., dim]`; act: silu, gelu or sigmoid.

    >>> norm = GatedRMSNorm(8, activation="gelu")
    >>> norm(torch.randn(2, 3, 8), torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(self, dim: int, eps: float = 1e-6, activation: str = "silu"):
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
        super().__init__(dim, eps)
        self.activation = activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return ops.gated_rms_norm(x, self.weight, gate.to(x.dtype), activation=self.activation, eps=self.eps)


class GatedInputRMSNorm(RMSNorm):
    """`RMSNorm(x * silu(gate))`, over each of `groups` equal parts of the last dimension; x, gate
    `[..., dim]`. The norm of Mamba-2 and of Megatron-LM's Gated DeltaProduct, where the gate comes first.

    PyTorch's operators compute it, in fp32 or fp64, with one rounding to the dtype of x: the operator
    `gated_rms_norm` has the norm before the gate.

    >>> GatedInputRMSNorm(8, groups=2)(torch.randn(2, 3, 8), torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(self, dim: int, groups: int = 1, eps: float = 1e-6):
        if groups < 1 or dim % groups:
            raise ValueError(f"groups is {groups}; expected a divisor of {dim}")
        super().__init__(dim, eps)
        self.groups = groups

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        y = (x.to(dtype) * F.silu(gate.to(dtype))).unflatten(-1, (self.groups, -1))
        y = F.rms_norm(y, y.shape[-1:], eps=self.eps).flatten(-2)
        return (y * self.weight.to(dtype)).to(x.dtype)


def apply_output_gate(norm: GatedRMSNorm | None, o: Tensor, gate: Tensor) -> Tensor:
    """norm(o, gate); without a norm, o * gelu(gate)."""
    return o * F.gelu(gate.to(o.dtype)) if norm is None else norm(o, gate)
