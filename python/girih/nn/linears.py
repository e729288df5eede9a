"""Linear layers that read the same x, in training on a GPU together: fewer launches, no sums of gradients."""

import torch
from torch import Tensor, nn

from girih.nn.fused import has_kernel, is_product


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
        return torch.ops.girih.linears(x, weights)
    return [linear(x) for linear in linears]
