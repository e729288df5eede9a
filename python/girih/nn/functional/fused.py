"""What blocks compute beside their mixers, on a GPU: each in one pass over memory. Elsewhere by PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih import _torch_internals as internals
from girih.nn.layers.norm import RMSNorm

PACK, WIDEST = 8, 8192  # of the kernels: elements of a pack, and of the widest row
ZERO = 1e-12  # a row so long has no direction
TYPES = (torch.float32, torch.bfloat16, torch.float16)
WITH_CUDA = hasattr(torch.ops.girih, "residual_norm")  # the library was built


def autocast_device(x: Tensor) -> str:
    """Its name for torch.autocast, which knows of none for meta tensors."""
    return "cpu" if x.is_meta else x.device.type


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast has products of x in; None outside of it, and of fp64, which it leaves alone."""
    kind = autocast_device(x)
    if x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def is_plain(*tensors: Tensor) -> bool:
    return all(type(x) in (Tensor, nn.Parameter) and not x.is_nested for x in tensors)


def is_transformed() -> bool:
    """By torch.func, or forward mode."""
    return internals.has_transform() or internals.has_forward_mode()


def is_compiled(*tensors: Tensor) -> bool:
    """Plain tensors under torch.compile, which takes operators without a kernel apart."""
    return torch.compiler.is_compiling() and not is_transformed() and is_plain(*tensors)


def is_eager(*tensors: Tensor) -> bool:
    """Plain tensors, outside of what compiles, traces or transforms PyTorch's operators: a compiler makes the
    same passes, and puts more into them."""
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not is_transformed()
        and is_plain(*tensors)
    )


def has_kernel(*tensors: Tensor, dense: bool = True) -> bool:
    """Of a GPU, `dense` ones, where operators run as they are called."""
    return (
        WITH_CUDA
        and is_eager(*tensors)
        and all(x.is_cuda and x.dtype in TYPES and (x.is_contiguous() or not dense) for x in tensors)
    )


def is_product(linear: nn.Module) -> bool:
    """By a weight, and nothing else: neither an adapter's nor a hook's."""
    return type(linear) is nn.Linear and linear.bias is None and internals.is_called_plainly(linear)


def has_norm(x: Tensor, *weights: Tensor) -> bool:
    width = x.shape[-1]
    return (
        has_kernel(x, *weights)
        and all(weight.shape == (width,) for weight in weights)
        and width % PACK == 0
        and width <= WIDEST
    )


def is_norm(module: nn.Module, x: Tensor, rows: torch.dtype) -> bool:
    """An RMSNorm as it was made, without a hook, and x is rows or the fp32 sums of them."""
    return (
        type(module) is RMSNorm
        and internals.is_called_plainly(module)
        and has_norm(x, module.weight)
        and (x.dtype == rows or (x.dtype == torch.float32 and rows in TYPES))
    )


def residual_norm(norm: nn.Module, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`s = x + branch`, or x, and `norm(s)`.

    x, branch `[..., dim]`. By a kernel where it `is_norm`: under autocast its result is rounded to
    autocast's dtype, as the product behind it would do. So is a compiler's.
    """
    if not isinstance(x, Tensor):  # a tracer's
        x = x if branch is None else x + branch
        return x, norm(x)
    products = autocast_dtype(x)
    rows = products or x.dtype
    kernel = is_norm(norm, x, rows)
    if branch is not None and not (
        kernel and has_kernel(branch) and branch.dtype == rows and branch.shape == x.shape
    ):
        x, branch = x + branch, None
        kernel = is_norm(norm, x, rows)
    if kernel:
        return torch.ops.girih.residual_norm(x, branch, norm.weight, norm.eps, rows)
    y = norm(x)
    rounds = (
        is_compiled(x, y) and type(norm) is RMSNorm and internals.is_called_plainly(norm) and y.dtype in TYPES
    )
    return x, y.to(products) if products and rounds else y


def silu_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """`norm(silu(x))`, x `[..., dim]`; of which the kernel keeps x alone."""
    if not is_norm(norm, x, x.dtype):
        return norm(F.silu(x))
    return torch.ops.girih.silu_norm(x, norm.weight, norm.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm of x `[..., dim]` where nothing is differentiated, with the bits of `residual_norm`."""
    if has_norm(x, weight) and not torch.is_grad_enabled():
        return torch.ops.girih.residual_norm(x, None, weight, eps, x.dtype)[1]
    return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)


def silu_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same of silu(x), with the bits of `silu_norm`."""
    if has_norm(x, weight) and not torch.is_grad_enabled():
        return torch.ops.girih.silu_norm(x, weight, eps)
    return F.rms_norm(F.silu(x), x.shape[-1:], weight.to(x.dtype), eps)


def unit_rows(x: Tensor) -> Tensor:
    """x / |x|, x `[..., dim]`; a row of zeros stays one."""
    if has_norm(x):
        return torch.ops.girih.residual_norm(x, None, None, ZERO**2 / x.shape[-1], x.dtype)[1]
    kind = torch.finfo(x.dtype)  # of fp16 ZERO is 0: the least number is shorter than any other row
    return F.normalize(x, dim=-1, eps=max(ZERO, kind.tiny * kind.eps))


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
