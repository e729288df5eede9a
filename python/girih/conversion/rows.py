"""What a linear path makes of q, k and v; on a GPU in one pass each way, where nothing is resumed."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from girih._torch_internals import has_transform
from girih.nn.functional import fused
from girih.nn.functional.fused import autocast_device

MIN_NORM = 1e-6  # what shorter rows count as, where they are divided by their length
MAX_HEAD_DIM, MAX_STEPS = (
    256,
    4,
)  # elements of a row and n; as MIN_NORM, what kernels/linear_path/linear_path.h has


class SiluNormalize(torch.autograd.Function):
    """y / |y| of y = silu(x), in x's dtype, whatever autocast says: lengths alone are fp32.

    By F.normalize all rows behind it would be fp32 under autocast, and several more kept for the backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = F.silu(x)
        length = length_of(y)
        z = y.div_(length)
        ctx.save_for_backward(x, z, length)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> Tensor:
        """dy = (dz - z <z, dz>) / length, and then silu's."""
        x, z, length = ctx.saved_tensors
        dy = dz * z
        along = dy.sum(-1, keepdim=True, dtype=length.dtype).masked_fill_(length <= MIN_NORM, 0)
        torch.sub(dz, torch.mul(z, along, out=dy), out=dy)
        return torch.ops.aten.silu_backward(dy.div_(length), x)


def length_of(y: Tensor) -> Tensor:
    """In fp32 at least, and MIN_NORM."""
    wide = torch.promote_types(y.dtype, torch.float32)
    with torch.autocast(autocast_device(y), enabled=False):
        return torch.linalg.vector_norm(y, dim=-1, keepdim=True, dtype=wide).clamp(min=MIN_NORM)


def silu_normalize(x: Tensor) -> Tensor:
    """SiLU, then length 1 (eq. 4). x `[..., head_dim]`.

    By plain operators for a compiler, which loses the gradients of a function that writes what it returns and
    fuses them as well, for a tracer, whose program cannot be saved with a function of Python, and for a
    transform of functions.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or has_transform():
        y = F.silu(x)
        return (y / length_of(y)).to(x.dtype)
    return SiluNormalize.apply(x)


def has_kernel(x: Tensor) -> bool:
    return (
        fused.has_fused_kernel(x, needs_contiguous=False)
        and x.shape[-1] % fused.PACK == 0
        and 0 < x.shape[-1] <= MAX_HEAD_DIM
        and x.numel() // x.shape[-1] < 2**31
    )


class VirtualRows(torch.autograd.Function):
    """The rows of q, k, v by `silu_normalize`, and of k and v the half differences over tokens: a token's n
    rows one after the other (eq. 22). q `[B, T, query_heads, head_dim]`, k, v `[B, T, heads, head_dim]`,
    which alone are kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(q, k, v)
        ctx.n = n
        return torch.ops.girih.virtual_rows(q, k, v, n)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        return *torch.ops.girih.virtual_rows_backward(dq, dk, dv, *ctx.saved_tensors, ctx.n), None


def running_sum(x: Tensor) -> Tensor:
    """Over the tokens of x `[B, T, heads, head_dim]`. In bf16 their mean keeps its digits, as the sum is
    formed in fp32; in fp16 the sum itself would leave the range."""
    return torch.ops.girih.running_sum(x, False, torch.float32 if x.dtype == torch.float16 else x.dtype)


class PooledGate(torch.autograd.Function):
    """The mean over head_dim of sigmoid(mean of x so far), `[B, T, heads]` in fp32, of x
    `[B, T, heads, head_dim]` (eq. 5)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = running_sum(x)
        ctx.save_for_backward(total)
        ctx.dtype = x.dtype
        return torch.ops.girih.pooled_gate(total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dbeta: Tensor) -> Tensor:
        dtotal = torch.ops.girih.pooled_gate_backward(dbeta, *ctx.saved_tensors)
        return torch.ops.girih.running_sum(dtotal, True, ctx.dtype)


class ChannelGate(torch.autograd.Function):
    """sigmoid(mean of x so far) of x `[B, T, heads, head_dim]` for each of a token's n rows:
    `[B, T n, heads, head_dim]`, in fp32 for fp16 and else in x's dtype (eq. 5)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int) -> Tensor:
        total = running_sum(x)
        ctx.save_for_backward(total)
        ctx.dtype, ctx.n = x.dtype, n
        return torch.ops.girih.channel_gate(total, n)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dbeta: Tensor) -> tuple[Tensor, None]:
        dtotal = torch.ops.girih.channel_gate_backward(dbeta, *ctx.saved_tensors, ctx.n)
        return torch.ops.girih.running_sum(dtotal, True, ctx.dtype), None
