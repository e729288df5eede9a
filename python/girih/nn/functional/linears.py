"""Several linear layers of the same x as one operator, in training on a GPU and under torch.compile.

The operator needs fewer launches, sums the gradients of x once and rounds the gradients of weights once. The
compiler decomposes it.
"""

import torch
from torch import Tensor, nn

from girih.nn.functional.fused import autocast_dtype, has_fused_kernel, is_compiled, is_plain_linear


def has_linears_kernel(x: Tensor, weights: list[Tensor | None]) -> bool:
    """Whether the operator supports x and the weights. None: the weight of a module that is not a plain
    linear layer. x must have the dtype in which the products are computed."""
    return (
        isinstance(x, Tensor)  # not a proxy of torch.fx
        and torch.is_grad_enabled()
        and x.dim() > 1
        and all(weight is not None for weight in weights)
        and (is_compiled(x, *weights) or has_fused_kernel(x, *weights))
        and all(weight.dtype == weights[0].dtype for weight in weights)
        and x.dtype == (autocast_dtype(x) or weights[0].dtype)
    )


def apply_linears(x: Tensor, linears: list[nn.Module]) -> list[Tensor]:
    """The outputs of all these linear layers for x."""
    weights = [linear.weight if is_plain_linear(linear) else None for linear in linears]
    if has_linears_kernel(x, weights):
        return torch.ops.girih.linears(x, weights)
    return [linear(x) for linear in linears]
