"""The gated feed-forward layer of Llama blocks."""

import torch.nn.functional as F
from torch import Tensor, nn


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
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
