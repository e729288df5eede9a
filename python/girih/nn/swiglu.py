"""The gated feed-forward layer of Llama blocks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.nn.fused import PACK, has_kernel, is_product
from girih.nn.linears import matrix_product, together


class _SiluProduct(torch.autograd.Function):
    """`silu(gate) * up`, which keeps its arguments alone: silu(gate) is made again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return product(gate, up)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():
            return derivatives(dy, gate, up)
        if takes_kernel(gate, up):
            return torch.ops.girih.silu_product_backward(dy, gate, up, False)[:2]
        return torch.ops.aten.silu_backward(dy * up, gate), F.silu(gate) * dy


def derivatives(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Of gate and up, which may be differentiated once more."""
    s = gate.sigmoid()
    return dy * up * s * (1 + gate * (1 - s)), dy * gate * s


def takes_kernel(gate: Tensor, up: Tensor) -> bool:
    return (
        has_kernel(gate, up)
        and gate.shape == up.shape
        and gate.dtype == up.dtype
        and gate.numel() % PACK == 0
    )


def product(gate: Tensor, up: Tensor) -> Tensor:
    return torch.ops.girih.silu_product(gate, up) if takes_kernel(gate, up) else F.silu(gate) * up


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`. A compiler decides by itself what is kept; a trace has PyTorch's operators alone."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not torch.jit.is_tracing():
        return _SiluProduct.apply(gate, up)
    return product(gate, up)


class _ProductDown(torch.autograd.Function):
    """`linear(silu(gate) * up, weight)`, which keeps gate and up alone: the product is made again in the pass
    that makes their gradients."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.linear(torch.ops.girih.silu_product(gate, up), weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        dz = F.linear(dy, weight.to(dy.dtype).t()).to(gate.dtype)
        of_weight = ctx.needs_input_grad[2]
        if torch.is_grad_enabled() or not takes_kernel(gate, up):
            dgate, dup = derivatives(dz, gate, up)
            z = _SiluProduct.apply(gate, up)
        else:
            dgate, dup, z = torch.ops.girih.silu_product_backward(dz, gate, up, of_weight)
        if not of_weight:
            return dgate, dup, None
        rows, made = (y.reshape(-1, y.shape[-1]) for y in (dy, z.to(dy.dtype)))
        return dgate, dup, matrix_product(rows.t(), made, weight.dtype)


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
            return _ProductDown.apply(gate, up, down.weight)
        return down(silu_product(gate, up))
