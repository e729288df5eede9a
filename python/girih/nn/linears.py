"""Linear layers that read the same x, in training on a GPU together: fewer launches, no sums of gradients."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.nn.fused import has_kernel, is_product

HALF = (torch.float16, torch.bfloat16)


class Linears(torch.autograd.Function):
    """`x W^T` of every weight, in x's dtype. dx is one sum that the products make, where autograd adds one
    after the other; 16-bit copies of fp32 weights are made by one kernel, and their gradients leave the
    products in fp32. The copies are a call's own and kept until its backward.

    x `[..., in]`, weights `[out, in]`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        own = copies(weights, x.dtype)
        of_x, *of_weights = ctx.needs_input_grad
        ctx.save_for_backward(x if any(of_weights) else None, *(own if of_x else [None] * len(own)))
        ctx.weights, ctx.versions = weights, versions(weights)  # as they are, for second derivatives
        ctx.shape = x.shape
        ctx.set_materialize_grads(False)
        with torch.autocast(autocast_device(x), enabled=False):
            return tuple(F.linear(x, weight) for weight in own)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *own = ctx.saved_tensors
        of_x, *of_weights = ctx.needs_input_grad
        dx, dweights = None, []
        if of_x and torch.is_grad_enabled() and versions(ctx.weights) != ctx.versions:
            raise RuntimeError("a weight has been modified by an inplace operation since the forward")
        for dy, w, weight, wanted in zip(dys, own, ctx.weights, of_weights, strict=True):
            if dy is None:
                dweights.append(None)
                continue
            dy = dy.reshape(-1, dy.shape[-1])
            if of_x:
                w = weight.to(dy.dtype) if torch.is_grad_enabled() else w
                dx = dy @ w if dx is None else torch.addmm(dx, dy, w)
            dweights.append(matrix_product(dy.t(), x.flatten(0, -2), weight.dtype) if wanted else None)
        return None if dx is None else dx.view(ctx.shape), *dweights


def copies(weights: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The weights in this dtype, themselves where they have it."""
    if all(weight.dtype == dtype for weight in weights):
        return weights
    made = weights[0].new_empty(sum(weight.numel() for weight in weights), dtype=dtype)
    parts = made.split([weight.numel() for weight in weights])
    own = tuple(part.view_as(weight) for part, weight in zip(parts, weights, strict=True))
    torch._foreach_copy_(own, weights)
    return own


def matrix_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b in this dtype; of 16 bits in fp32 without a rounding between."""
    if a.is_cuda and a.dtype in HALF and dtype == torch.float32 and not torch.is_grad_enabled():
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def versions(weights: tuple[Tensor, ...]) -> list[int | None]:
    """How often each has been written in place."""
    return [None if weight.is_inference() else weight._version for weight in weights]


def autocast_device(x: Tensor) -> str:
    """Its name for torch.autocast, which knows of none for meta tensors."""
    return "cpu" if x.is_meta else x.device.type


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast has products of x in; None outside of it."""
    kind = autocast_device(x)
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def takes(x: Tensor, linears: list[nn.Module]) -> bool:
    """x in the dtype of the products."""
    weights = [linear.weight for linear in linears if is_product(linear)]
    return (
        isinstance(x, Tensor)  # and no tracer's
        and torch.is_grad_enabled()
        and x.dim() > 1
        and len(weights) == len(linears)
        and has_kernel(x, *weights)
        and all(weight.dtype == weights[0].dtype for weight in weights)
        and x.dtype == (autocast_dtype(x) or weights[0].dtype)
        and all(linear.weight.shape[0] == linear.out_features for linear in linears)
    )


def together(x: Tensor, linears: list[nn.Module]) -> list[Tensor]:
    """What each of these linear layers makes of x."""
    if takes(x, linears):
        return list(Linears.apply(x, *(linear.weight for linear in linears)))
    return [linear(x) for linear in linears]
