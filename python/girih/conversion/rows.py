"""Functions of q, k and v in a linear path. For whole sequences on a GPU, one kernel each for forward and
backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from girih._torch_internals import has_transform
from girih.nn.functional import fused
from girih.nn.functional.fused import autocast_device

MIN_NORM = 1e-6  # lower bound of |silu(x)|
MAX_HEAD_DIM, MAX_STEPS = (
    256,
    4,
)  # limits of the kernels; like MIN_NORM as in kernels/linear_path/linear_path.h


class SiluNormalize(torch.autograd.Function):
    """y / |y| with y = silu(x), in the dtype of x also under autocast; only the lengths are fp32.

    Under autocast F.normalize would return fp32, and it saves more tensors for the backward.
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
        """dy = (dz - z <z, dz>) / length; then the backward of silu."""
        x, z, length = ctx.saved_tensors
        dy = dz * z
        along = dy.sum(-1, keepdim=True, dtype=length.dtype).masked_fill_(length <= MIN_NORM, 0)
        torch.sub(dz, torch.mul(z, along, out=dy), out=dy)
        return torch.ops.aten.silu_backward(dy.div_(length), x)


def length_of(y: Tensor) -> Tensor:
    """max(|y|, MIN_NORM) over the last dimension, in fp32 or fp64."""
    wide = torch.promote_types(y.dtype, torch.float32)
    with torch.autocast(autocast_device(y), enabled=False):
        return torch.linalg.vector_norm(y, dim=-1, keepdim=True, dtype=wide).clamp(min=MIN_NORM)


def silu_normalize(x: Tensor) -> Tensor:
    """silu(x) / |silu(x)| (eq. 4). x `[..., head_dim]`.

    Under a compiler, a tracer or a transform it calls plain operators: torch.compile loses the gradients of
    an autograd function that returns a tensor that it has written in place, a traced program with a Python
    autograd function cannot be saved, and transforms do not support the function.
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
    """`silu_normalize` of q, k and v, and the virtual tokens of k and v (m-th differences over 2^m, eq. 22):
    the n rows of a token are adjacent. q `[B, T, query_heads, head_dim]`, k, v `[B, T, heads, head_dim]` -> q
    `[B, T, ...]`, k and v `[B, T n, ...]`. Only q, k and v are saved for the backward."""

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
    """The running sum over the tokens of x `[B, T, heads, head_dim]`. It is computed in fp32 and returned in
    the dtype of x, which is precise enough for the mean; for fp16, whose range it may exceed, in fp32."""
    return torch.ops.girih.running_sum(x, False, torch.float32 if x.dtype == torch.float16 else x.dtype)


class PooledGate(torch.autograd.Function):
    """x `[B, T, heads, head_dim]` -> `[B, T, heads]` fp32: the mean over head_dim of sigmoid(causal mean of
    x) (eq. 5)."""

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
    """x `[B, T, heads, head_dim]` -> `[B, T n, heads, head_dim]`: sigmoid(causal mean of x) (eq. 5), repeated
    for the n updates of each token. fp32 for fp16, else the dtype of x."""

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
