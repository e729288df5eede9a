"""Norms, silu(x) y and unit vectors: on a GPU by one kernel each, elsewhere by PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih import _torch_internals as internals
from girih.nn.layers.norm import RMSNorm

PACK, MAX_WIDTH = 8, 8192  # of the kernels: elements of a vector access, elements of the widest row
MIN_NORM = 1e-12  # lower bound of |x|
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WITH_CUDA = hasattr(torch.ops.girih, "residual_norm")  # whether the library was built with CUDA


def autocast_device(x: Tensor) -> str:
    """x's device type for torch.autocast; "cpu" for meta tensors, which torch.autocast does not accept."""
    return "cpu" if x.is_meta else x.device.type


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast computes products of x; None without autocast and for fp64."""
    device_type = autocast_device(x)
    if x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def are_plain_tensors(*tensors: Tensor) -> bool:
    """Whether all are Tensor or Parameter, not a subclass and not nested."""
    return all(type(x) in (Tensor, nn.Parameter) and not x.is_nested for x in tensors)


def is_transformed() -> bool:
    """Whether a transform of torch.func or forward-mode AD is active."""
    return internals.has_transform() or internals.has_forward_mode()


def is_compiled(*tensors: Tensor) -> bool:
    """Whether torch.compile traces plain tensors. The compiler decomposes the fused operators."""
    return torch.compiler.is_compiling() and not is_transformed() and are_plain_tensors(*tensors)


def is_eager(*tensors: Tensor) -> bool:
    """Whether the tensors are plain and no compiler, tracer or transform is active. A compiler fuses these
    functions itself, with more of the surrounding operators."""
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not is_transformed()
        and are_plain_tensors(*tensors)
    )


def has_fused_kernel(*tensors: Tensor, needs_contiguous: bool = True) -> bool:
    """Whether a fused kernel can read the tensors: on a GPU, of a supported dtype, contiguous if
    `needs_contiguous`, run eagerly."""
    return (
        WITH_CUDA
        and is_eager(*tensors)
        and all(
            x.is_cuda and x.dtype in KERNEL_DTYPES and (x.is_contiguous() or not needs_contiguous)
            for x in tensors
        )
    )


def is_plain_linear(linear: nn.Module) -> bool:
    """Whether the module is x W^T only: a Linear without bias, adapters and hooks."""
    return type(linear) is nn.Linear and linear.bias is None and internals.is_called_plainly(linear)


def has_norm_kernel(x: Tensor, *weights: Tensor) -> bool:
    width = x.shape[-1]
    return (
        has_fused_kernel(x, *weights)
        and all(weight.shape == (width,) for weight in weights)
        and width % PACK == 0
        and width <= MAX_WIDTH
    )


def is_fused_norm(module: nn.Module, x: Tensor, row_dtype: torch.dtype) -> bool:
    """Whether the kernel computes `module(x)`: an RMSNorm without hooks; x in `row_dtype` or in fp32."""
    return (
        type(module) is RMSNorm
        and internals.is_called_plainly(module)
        and has_norm_kernel(x, module.weight)
        and (x.dtype == row_dtype or (x.dtype == torch.float32 and row_dtype in KERNEL_DTYPES))
    )


def residual_norm(norm: nn.Module, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`s = x + branch` (x if branch is None), and `norm(s)`.

    x, branch `[..., dim]`. By the kernel if `is_fused_norm`. Under autocast the kernel, and this function
    under torch.compile, round the norm to autocast's dtype, because the product that follows would do so.
    """
    if not isinstance(x, Tensor):  # a proxy of torch.fx
        x = x if branch is None else x + branch
        return x, norm(x)
    product_dtype = autocast_dtype(x)
    row_dtype = product_dtype or x.dtype
    kernel = is_fused_norm(norm, x, row_dtype)
    if branch is not None and not (
        kernel and has_fused_kernel(branch) and branch.dtype == row_dtype and branch.shape == x.shape
    ):
        x, branch = x + branch, None
        kernel = is_fused_norm(norm, x, row_dtype)
    if kernel:
        return torch.ops.girih.residual_norm(x, branch, norm.weight, norm.eps, row_dtype)
    y = norm(x)
    rounds_norm = (
        is_compiled(x, y)
        and type(norm) is RMSNorm
        and internals.is_called_plainly(norm)
        and y.dtype in KERNEL_DTYPES
    )
    return x, y.to(product_dtype) if product_dtype and rounds_norm else y


def silu_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """`norm(silu(x))`, x `[..., dim]`. The kernel saves only x for the backward."""
    if not is_fused_norm(norm, x, x.dtype):
        return norm(F.silu(x))
    return torch.ops.girih.silu_norm(x, norm.weight, norm.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x `[..., dim]` without gradient; bitwise equal to `residual_norm`."""
    if has_norm_kernel(x, weight) and not torch.is_grad_enabled():
        return torch.ops.girih.residual_norm(x, None, weight, eps, x.dtype)[1]
    return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)


def silu_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of silu(x) without gradient; bitwise equal to `silu_norm`."""
    if has_norm_kernel(x, weight) and not torch.is_grad_enabled():
        return torch.ops.girih.silu_norm(x, weight, eps)
    return F.rms_norm(F.silu(x), x.shape[-1:], weight.to(x.dtype), eps)


def unit_rows(x: Tensor) -> Tensor:
    """x / |x| over the last dimension; a zero row stays zero."""
    if has_norm_kernel(x):
        return torch.ops.girih.residual_norm(x, None, None, MIN_NORM**2 / x.shape[-1], x.dtype)[1]
    finfo = torch.finfo(x.dtype)  # MIN_NORM underflows in fp16: use the smallest subnormal number
    return F.normalize(x, dim=-1, eps=max(MIN_NORM, finfo.tiny * finfo.eps))


def has_silu_product_kernel(gate: Tensor, up: Tensor) -> bool:
    return (
        has_fused_kernel(gate, up)
        and gate.shape == up.shape
        and gate.dtype == up.dtype
        and gate.numel() % PACK == 0
    )


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`. The operator saves only its arguments for the backward; torch.compile chooses what
    to save."""
    if is_eager(gate, up) and gate.shape == up.shape and gate.dtype == up.dtype:
        return torch.ops.girih.silu_product(gate, up)
    return F.silu(gate) * up
