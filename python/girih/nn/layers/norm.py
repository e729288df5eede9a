"""RMS norms."""

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


def apply_output_gate(norm: GatedRMSNorm | None, o: Tensor, gate: Tensor) -> Tensor:
    """norm(o, gate); without a norm, o * gelu(gate)."""
    return o * F.gelu(gate.to(o.dtype)) if norm is None else norm(o, gate)
