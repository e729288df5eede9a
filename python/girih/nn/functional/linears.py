"""Linear layers that read the same x, in training together: on a GPU, and where a compiler takes the operator
apart. Fewer launches, fewer sums of gradients, those of weights without a rounding."""

import torch
from torch import Tensor, nn

from girih.nn.functional.fused import autocast_dtype, has_kernel, is_compiled, is_product


def takes(x: Tensor, weights: list[Tensor | None]) -> bool:
    """x in the dtype of the products, by weights alone."""
    return (
        isinstance(x, Tensor)  # and no tracer's
        and torch.is_grad_enabled()
        and x.dim() > 1
        and all(weight is not None for weight in weights)
        and (is_compiled(x, *weights) or has_kernel(x, *weights))
        and all(weight.dtype == weights[0].dtype for weight in weights)
        and x.dtype == (autocast_dtype(x) or weights[0].dtype)
    )


def together(x: Tensor, linears: list[nn.Module]) -> list[Tensor]:
    """What each of these linear layers makes of x."""
    weights = [linear.weight if is_product(linear) else None for linear in linears]
    if takes(x, weights):
        return torch.ops.girih.linears(x, weights)
    return [linear(x) for linear in linears]
