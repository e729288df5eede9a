"""Linear layers that read the same x, in training on a GPU together: fewer launches, no sums of gradients."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.nn.fused import has_kernel, is_product, without_hooks
from girih.nn.layer import check_features

HALF = (torch.float16, torch.bfloat16)


class Linears(torch.autograd.Function):
    """`x W^T` of every weight. dx is one sum in the products' own, where autograd adds one after the other;
    16-bit copies of fp32 weights are made by one kernel, and their gradients leave the products in fp32.

    x `[..., in]`, weights `[out, in]`; the results in autocast's dtype, or x's.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        rows, own = x.to(dtype), copies(weights, dtype)
        ctx.save_for_backward(x, rows, *weights, *own)
        ctx.set_materialize_grads(False)
        with torch.autocast(kind, enabled=False):
            return tuple(F.linear(rows, weight) for weight in own)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        x, rows, *saved = ctx.saved_tensors
        weights, own = saved[: len(dys)], saved[len(dys) :]
        if torch.is_grad_enabled():  # what follows may be differentiated once more
            rows, own = x.to(rows.dtype), [weight.to(rows.dtype) for weight in weights]
        flat, dx, dweights = rows.flatten(0, -2), None, []
        for dy, w, weight, wanted in zip(dys, own, weights, ctx.needs_input_grad[1:], strict=True):
            if dy is None:
                dweights.append(None)
                continue
            dy = dy.to(rows.dtype).reshape(-1, dy.shape[-1])
            if ctx.needs_input_grad[0]:
                dx = dy @ w if dx is None else torch.addmm(dx, dy, w)
            dweights.append(matrix_product(dy.t(), flat, weight.dtype) if wanted else None)
        return None if dx is None else dx.view_as(rows).to(x.dtype), *dweights


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


def takes(x: Tensor, linears: list[nn.Module]) -> bool:
    return (
        torch.is_grad_enabled()
        and x.dim() > 1
        and all(is_product(linear) for linear in linears)
        and has_kernel(x, *(linear.weight for linear in linears))
        and len({linear.weight.dtype for linear in linears}) == 1
        and all(linear.weight.shape[0] == linear.out_features for linear in linears)
    )


def together(x: Tensor, linears: list[nn.Module]) -> list[Tensor]:
    """What each of these linear layers makes of x."""
    if takes(x, linears):
        return list(Linears.apply(x, *(linear.weight for linear in linears)))
    return [linear(x) for linear in linears]


def projections(
    layer: nn.Module, names: list[str], x: Tensor, decay: nn.Module | None = None
) -> list[Tensor]:
    """What a layer's projections of these names make of x: all features, as heads were counted beforehand;
    and g of a DecayGate."""
    joins = decay is not None and without_hooks(decay)
    made = together(x, [*(getattr(layer, name) for name in names), *([decay.proj] if joins else [])])
    for name, y in zip(names, made, strict=False):
        check_features(layer, name, y)
    if joins:
        check_features(decay, "proj", made[-1])
        made[-1] = decay.of(made[-1])[0]
    elif decay is not None:
        made.append(decay(x)[0])
    return made
