"""What blocks compute beside their mixers, on a GPU: each in one pass over memory. Elsewhere by PyTorch."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from girih.nn.norm import RMSNorm

PACK, WIDEST, ALIGNED = 8, 8192, 32  # of the kernels: elements of a pack, of the widest row; bytes
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def has_kernel(*tensors: Tensor) -> bool:
    """Plain, dense tensors on a GPU, outside of what traces or transforms PyTorch's operators."""
    return (
        hasattr(torch.ops.girih, "residual_norm")  # not where the library was built without CUDA
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and all(
            type(x) in (Tensor, nn.Parameter)
            and x.is_cuda
            and x.dtype in TYPES
            and x.is_contiguous()
            and x.data_ptr() % ALIGNED == 0
            for x in tensors
        )
    )


def as_kernels_read(x: Tensor) -> Tensor:
    """A gradient, which may come as any view."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNED == 0 else x.clone()


def without_hooks(module: nn.Module) -> bool:
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
        or nn.modules.module._has_any_global_hook()
    )


def residual_norm(norm: nn.Module, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`s = x + branch`, or x, and `norm(s)`.

    x, branch `[..., dim]`. By a kernel where `norm` is an RMSNorm as it was made, without a hook: under
    autocast its result is rounded to autocast's dtype, as the product behind it would do.
    """
    rows = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype

    def fits(x: Tensor) -> bool:
        return (
            type(norm) is RMSNorm
            and without_hooks(norm)
            and has_kernel(x, norm.weight)
            and x.shape[-1:] == norm.weight.shape
            and x.shape[-1] % PACK == 0
            and x.shape[-1] <= WIDEST
            and (x.dtype == rows or (x.dtype == torch.float32 and rows in TYPES))
        )

    kernel = fits(x)
    if branch is not None and not (
        kernel and has_kernel(branch) and branch.dtype == rows and branch.shape == x.shape
    ):
        x, branch = x + branch, None
        kernel = fits(x)
    return _ResidualNorm.apply(x, branch, norm.weight, norm.eps, rows) if kernel else (x, norm(x))


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
        dbranch = None
        if dy is None:
            ds, dweight = after, None
        elif torch.is_grad_enabled() or not has_kernel(s):  # what follows may be differentiated once more
            ds, dweight = gradients(dy, s, weight, ctx.eps)
            ds = ds if after is None else ds + after
        else:
            ds, dbranch, dweight = torch.ops.girih.residual_norm_backward(
                as_kernels_read(dy),
                None if after is None else as_kernels_read(after),
                *(s, weight, ctx.eps, ctx.of_branch),
            )
        if not ctx.of_branch:
            dbranch = None
        elif dbranch is None and ds is not None:
            dbranch = ds.to(ctx.rows)
        return ds, dbranch, dweight, None, None


def gradients(dy: Tensor, s: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Of s and of the weight of an RMS norm."""
    wide, u = s.float(), dy.float() * weight.float()
    r = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    n = r * wide
    ds = r * (u - n * (u * n).mean(-1, keepdim=True))
    dweight = (dy.float() * n).flatten(0, -2).sum(0) if s.dim() > 1 else dy.float() * n
    return ds.to(s.dtype), dweight.to(weight.dtype)
