"""The gated feed-forward layer of Llama blocks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.nn.fused import PACK, has_kernel, is_eager, is_product
from girih.nn.linears import together


def takes_kernel(gate: Tensor, up: Tensor) -> bool:
    return (
        has_kernel(gate, up)
        and gate.shape == up.shape
        and gate.dtype == up.dtype
        and gate.numel() % PACK == 0
    )


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, which keeps its arguments alone. A compiler decides by itself what is kept."""
    if is_eager(gate, up) and gate.shape == up.shape and gate.dtype == up.dtype:
        return torch.ops.girih.silu_product(gate, up)
    return F.silu(gate) * up


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020); x `[..., hidden_size]`.

    >>> SwiGLU(16, 40)(torch.randn(2, 3, 16)).shape
    torch.Size([2, 3, 16])
    """

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        (gate, up), down = together(x, [self.gate_proj, self.up_proj]), self.down_proj
        if (
            torch.is_grad_enabled()
            and is_product(down)
            and takes_kernel(gate, up)
            and has_kernel(down.weight)
        ):
            return torch.ops.girih.silu_product_linear(gate, up, down.weight)
        return together(silu_product(gate, up), [down])[0]
