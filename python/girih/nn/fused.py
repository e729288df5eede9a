"""What blocks compute beside their mixers, on a GPU: each in one pass over memory. Elsewhere by PyTorch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.nn.norm import RMSNorm

PACK, WIDEST = 8, 8192  # of the kernels: elements that rows are a multiple of, and the most
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def has_kernel(*tensors: Tensor) -> bool:
    """Plain, dense tensors on a GPU, outside of what traces or transforms PyTorch's operators."""
    return (
        hasattr(torch.ops.girih, "residual_norm")  # not where the library was built without CUDA
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and torch._C._functorch.peek_interpreter_stack() is None
        and all(
            type(x) in (Tensor, nn.Parameter)
            and x.is_cuda
            and x.dtype in TYPES
            and x.is_contiguous()
            and x.data_ptr() % (4 * PACK) == 0
            for x in tensors
        )
    )


def residual_norm(norm: nn.Module, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`s = x + branch`, or x, and `norm(s)`, under autocast rounded to its dtype.

    x, branch `[..., dim]`. By a kernel where `norm` is an RMSNorm as it was made, without a hook.
    """
    rows = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    if branch is not None and (branch.dtype != rows or branch.shape != x.shape):
        x, branch = x + branch, None
    if (
        type(norm) is RMSNorm
        and not (norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks)
        and "forward" not in vars(norm)
        and x.shape[-1:] == norm.weight.shape
        and x.shape[-1] % PACK == 0
        and x.shape[-1] <= WIDEST
        and (x.dtype == rows or (x.dtype == torch.float32 and rows in TYPES))
        and has_kernel(x, norm.weight, *([] if branch is None else [branch]))
    ):
        return _ResidualNorm.apply(x, branch, norm.weight, norm.eps, rows)
    s = x if branch is None else x + branch
    return s, norm(s)


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, rows: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        s, y = torch.ops.girih.residual_norm(x, branch, weight, eps, rows)
        if branch is None:
            s = x
        ctx.save_for_backward(s, weight)
        ctx.eps, ctx.of_branch, ctx.rows = eps, branch is not None, rows
        ctx.set_materialize_grads(False)
        return s, y

    @staticmethod
    def backward(ctx: Any, after: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        s, weight = ctx.saved_tensors
        if dy is None:
            ds, dweight = after, None
        elif torch.is_grad_enabled():  # what follows is differentiated once more
            y = F.rms_norm(s, weight.shape, weight.to(s.dtype), ctx.eps).to(dy.dtype)
            ds, dweight = torch.autograd.grad(y, (s, weight), dy, create_graph=True)
            ds = ds if after is None else ds + after
        else:
            after = None if after is None else after.contiguous()
            ds, dbranch, dweight = torch.ops.girih.residual_norm_backward(
                dy.contiguous(), after, s, weight, ctx.eps, ctx.of_branch
            )
            return ds, dbranch if ctx.of_branch else None, dweight, None, None
        dbranch = ds.to(ctx.rows) if ctx.of_branch and ds is not None else None
        return ds, dbranch, dweight, None, None
