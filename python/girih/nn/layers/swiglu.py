"""The gated feed-forward layer of Llama blocks."""

import torch
from torch import Tensor, nn

from girih.nn.functional.fused import has_fused_kernel, has_silu_product_kernel, is_plain_linear, silu_product
from girih.nn.functional.linears import apply_linears


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
        (gate, up), down = apply_linears(x, [self.gate_proj, self.up_proj]), self.down_proj
        if (
            torch.is_grad_enabled()
            and is_plain_linear(down)
            and has_silu_product_kernel(gate, up)
            and has_fused_kernel(down.weight)
        ):
            return torch.ops.girih.silu_product_linear(gate, up, down.weight)
        return apply_linears(silu_product(gate, up), [down])[0]
