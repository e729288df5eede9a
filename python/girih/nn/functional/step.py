"""What a decoding step computes beside its mixers' own steps: products of a few rows, by one kernel each."""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from girih.nn.functional import fused
from girih.nn.functional.fused import silu_product
from girih.nn.functional.gates import gated

# A model's blocks have nothing in them but weights: no hook, no adapter. Who records a step says so.
by_weights_alone: ContextVar[bool] = ContextVar("by_weights_alone", default=False)

ROWS, MATRICES, WIDEST, ELEMENTS = 16, 8, 8192, 96 * 1024  # of the kernel


class Product(NamedTuple):
    """x W^T, W `[features, width]`, and what becomes of it: `gates.gated`, bias and rate in fp32."""

    weight: Tensor
    gate: str = "none"
    bias: Tensor | None = None
    rate: Tensor | None = None
    scale: float = 1.0


class RowInput(NamedTuple):
    """What is made of rows x before their products.

    plain: x.  rms_norm: the RMS norm of x with weight `other`.  silu_rms_norm: that of silu(x).
    silu_product: silu(x) * other, `other` of x's shape.
    """

    kind: str = "plain"
    other: Tensor | None = None
    eps: float = 0.0


PLAIN = RowInput()


def products(
    x: Tensor, wanted: Sequence[Product], given: RowInput = PLAIN, residual: Tensor | None = None
) -> list[Tensor]:
    """Each product of x `[..., width]`; residual is added to that of a single one without a gate.

    One launch where `has_kernel`, of whose sums nothing is rounded before the end; else as the layers do.
    """
    if has_kernel(x, wanted, given, residual):
        weights, gates, biases, rates, scales = (list(part) for part in zip(*wanted, strict=True))
        return torch.ops.girih.few_rows(
            x, weights, gates, biases, rates, scales, given.kind, given.other, given.eps, residual
        )
    if given.kind == "rms_norm":
        x = fused.rms_norm(x, given.other, given.eps)
    elif given.kind == "silu_rms_norm":
        x = fused.silu_rms_norm(x, given.other, given.eps)
    elif given.kind == "silu_product":
        x = silu_product(x, given.other)
    results = [gated(F.linear(x, product.weight), *product[1:]) for product in wanted]
    return results if residual is None else [residual + results[0]]


def has_kernel(
    x: Tensor, wanted: Sequence[Product], given: RowInput = PLAIN, residual: Tensor | None = None
) -> bool:
    """A GPU, 16 bits, up to 16 rows, no autocast, and tensors as they were made: dense, of one dtype."""
    width = x.shape[-1]
    rows = x.numel() // max(width, 1)
    matrices = [x, *(p.weight for p in wanted), *(m for m in (given.other, residual) if m is not None)]
    numbers = [part for p in wanted for part in (p.bias, p.rate) if part is not None]
    return (
        x.is_cuda
        and hasattr(torch.ops.girih, "few_rows")  # not where the library was built without CUDA
        and x.dtype in (torch.bfloat16, torch.float16)
        and 1 <= rows <= ROWS
        and width % 8 == 0
        and width <= WIDEST
        and rows * width <= ELEMENTS
        and len(wanted) <= MATRICES
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cuda")
        and all(m.dtype == x.dtype and m.is_contiguous() and m.data_ptr() % 16 == 0 for m in matrices)
        and all(m.dtype == torch.float32 and m.is_contiguous() for m in numbers)
    )
