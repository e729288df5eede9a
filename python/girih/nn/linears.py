"""Linear layers that read the same x, in training on a GPU together: fewer launches, no sums of gradients."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.nn.fused import has_kernel, is_product

HALF = (torch.float16, torch.bfloat16)
NARROW = 64  # features of a product whose time is its launches


class Linears(torch.autograd.Function):
    """`x W^T` of every weight, in x's dtype. dx is one sum that the products make, where autograd adds one
    after the other; 16-bit copies of fp32 weights are made by one kernel, and their gradients leave the
    products in fp32. The copies are a call's own and kept until its backward. Narrow products are columns of
    one, which nobody may write in place.

    x `[..., in]`, weights `[out, in]`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        groups = grouped(weights)
        own = copies(weights, groups, x.dtype)
        of_x, *of_weights = ctx.needs_input_grad
        ctx.save_for_backward(x if any(of_weights) else None, *(own if of_x else [None] * len(own)))
        ctx.weights, ctx.versions = weights, versions(weights)  # as they are, for second derivatives
        ctx.groups, ctx.shape = groups, x.shape
        ctx.set_materialize_grads(False)
        made: list[Any] = [None] * len(weights)
        for group, w in zip(groups, own, strict=True):  # autocast has nothing left to do
            y = F.linear(x, w)
            for i, part in zip(group, parts(y, group, weights, -1), strict=True):
                made[i] = part
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *own = ctx.saved_tensors
        weights, (of_x, *of_weights) = ctx.weights, ctx.needs_input_grad
        dx, dweights = None, [None] * len(weights)
        if of_x and torch.is_grad_enabled() and versions(weights) != ctx.versions:
            raise RuntimeError("a weight has been modified by an inplace operation since the forward")
        for group, w in zip(ctx.groups, own, strict=True):
            dy = beside([dys[i] for i in group], [weights[i].shape[0] for i in group])
            if dy is None:
                continue
            dy = dy.reshape(-1, dy.shape[-1])
            if of_x and torch.is_grad_enabled():
                w = torch.cat([weights[i] for i in group]).to(dy.dtype)
                dx = dy @ w if dx is None else torch.addmm(dx, dy, w)
            elif of_x:  # a backward under autocast has dx in its dtype; nothing casts what is done in place
                dx = dy @ w if dx is None else dx.addmm_(dy.to(dx.dtype), w.to(dx.dtype))
            if any(of_weights[i] for i in group):
                made = matrix_product(dy.t(), x.flatten(0, -2), weights[group[0]].dtype)
                for i, part in zip(group, parts(made, group, weights, 0), strict=True):
                    dweights[i] = part if of_weights[i] and dys[i] is not None else None
        return None if dx is None else dx.view(ctx.shape), *dweights


def grouped(weights: tuple[Tensor, ...]) -> list[list[int]]:
    """Which weights make one product: the narrow ones, which cost their launches, and each other alone."""
    narrow = [i for i, weight in enumerate(weights) if weight.shape[0] <= NARROW]
    return [[i] for i in range(len(weights)) if i not in narrow] + [narrow] * bool(narrow)


def parts(y: Tensor, group: list[int], weights: tuple[Tensor, ...], dim: int) -> tuple[Tensor, ...]:
    """A group's product, or its gradient by the weights, as those of each."""
    return (y,) if len(group) == 1 else y.split([weights[i].shape[0] for i in group], dim)


def beside(dys: list[Tensor | None], widths: list[int]) -> Tensor | None:
    """`[..., sum of widths]`, zeros for None; of nothing but None: None."""
    given = [dy for dy in dys if dy is not None]
    if not given or len(dys) == 1:
        return given[0] if given else None
    shape = given[0].shape[:-1]
    return torch.cat(
        [
            given[0].new_zeros(*shape, width) if dy is None else dy
            for dy, width in zip(dys, widths, strict=True)
        ],
        -1,
    )


def copies(weights: tuple[Tensor, ...], groups: list[list[int]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Each group's weights in this dtype, one below the other; a single one itself where it has it."""
    if all(weight.dtype == dtype for weight in weights):
        return tuple(torch.cat([weights[i] for i in g]) if len(g) > 1 else weights[g[0]] for g in groups)
    order = [i for group in groups for i in group]
    made = weights[0].new_empty(sum(weight.shape[0] for weight in weights), weights[0].shape[1], dtype=dtype)
    rows = made.split([weights[i].shape[0] for i in order])
    torch._foreach_copy_(rows, [weights[i] for i in order])
    return made.split([sum(weights[i].shape[0] for i in group) for group in groups])


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


def takes(x: Tensor, weights: list[Tensor | None]) -> bool:
    """x in the dtype of the products, by weights alone."""
    return (
        isinstance(x, Tensor)  # and no tracer's
        and torch.is_grad_enabled()
        and x.dim() > 1
        and all(weight is not None for weight in weights)
        and has_kernel(x, *weights)
        and all(weight.dtype == weights[0].dtype for weight in weights)
        and x.dtype == (autocast_dtype(x) or weights[0].dtype)
    )


def together(x: Tensor, linears: list[nn.Module]) -> list[Tensor]:
    """What each of these linear layers makes of x."""
    weights = [linear.weight if is_product(linear) else None for linear in linears]
    if takes(x, weights):
        return list(Linears.apply(x, *weights))
    return [linear(x) for linear in linears]
