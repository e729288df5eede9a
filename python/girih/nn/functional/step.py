"""Linear layers of a decoding step.

For up to 16 rows one kernel (skinny GEMM, torch.ops.girih.few_rows) computes several products of one input,
with the prologue before them (a norm or an activation) and the gates after them. Beside the operators of the
mixers, a decoding step computes nothing else.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from girih.nn.functional import fused
from girih.nn.functional.fused import silu_product
from girih.nn.functional.gates import apply_gate

# True while a decoding step is captured. Then the blocks have no hooks and no adapters, and `Block.step`
# computes from the weights without calling modules.
use_weights_only: ContextVar[bool] = ContextVar("use_weights_only", default=False)

MAX_ROWS, MAX_MATRICES, MAX_WIDTH, MAX_ELEMENTS = 16, 8, 8192, 96 * 1024  # limits of the kernel


class Product(NamedTuple):
    """gate(x W^T), W `[features, width]`, with the arguments of `gates.apply_gate`. bias, rate: fp32; rate is
    the log rate (A_log). With gate "none" bias must be None."""

    weight: Tensor
    gate: str = "none"
    bias: Tensor | None = None
    rate: Tensor | None = None
    scale: float = 1.0


class RowInput(NamedTuple):
    """The prologue: a function of x that is applied before linear products.

    plain: x (no prologue).  rms_norm: RMS norm of x with weight `other`.  silu_rms_norm: RMS norm of silu(x)
        with weight `other`.
    silu_product: silu(x) * other; `other` has the shape of x.
    """

    kind: str = "plain"
    other: Tensor | None = None
    eps: float = 0.0


PLAIN = RowInput()


def products(
    x: Tensor, specs: Sequence[Product], prologue: RowInput = PLAIN, residual: Tensor | None = None
) -> list[Tensor]:
    """Applies `prologue` to x `[..., width]`, then computes every product of the result.

    residual: added to the result of a single product without gate. If `has_skinny_gemm`, this is one launch,
    which rounds only the final results; else the functions that layers use.
    """
    if has_skinny_gemm(x, specs, prologue, residual):
        weights, gates, biases, rates, scales = (list(part) for part in zip(*specs, strict=True))
        return torch.ops.girih.few_rows(
            x, weights, gates, biases, rates, scales, prologue.kind, prologue.other, prologue.eps, residual
        )
    if prologue.kind == "rms_norm":
        x = fused.rms_norm(x, prologue.other, prologue.eps)
    elif prologue.kind == "silu_rms_norm":
        x = fused.silu_rms_norm(x, prologue.other, prologue.eps)
    elif prologue.kind == "silu_product":
        x = silu_product(x, prologue.other)
    results = [apply_gate(F.linear(x, product.weight), *product[1:]) for product in specs]
    return results if residual is None else [residual + results[0]]


def has_skinny_gemm(
    x: Tensor, specs: Sequence[Product], prologue: RowInput = PLAIN, residual: Tensor | None = None
) -> bool:
    """Whether the kernel supports the call: fp16 or bf16 on a GPU, 1 to 16 rows, no gradient, no autocast,
    contiguous tensors of one dtype."""
    width = x.shape[-1]
    rows = x.numel() // max(width, 1)
    matrices = [x, *(p.weight for p in specs), *(m for m in (prologue.other, residual) if m is not None)]
    vectors = [part for p in specs for part in (p.bias, p.rate) if part is not None]
    return (
        x.is_cuda
        and hasattr(torch.ops.girih, "few_rows")  # absent if the library was built without CUDA
        and x.dtype in (torch.bfloat16, torch.float16)
        and 1 <= rows <= MAX_ROWS
        and width % 8 == 0
        and width <= MAX_WIDTH
        and rows * width <= MAX_ELEMENTS
        and len(specs) <= MAX_MATRICES
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cuda")
        and all(m.dtype == x.dtype and m.is_contiguous() and m.data_ptr() % 16 == 0 for m in matrices)
        and all(m.dtype == torch.float32 and m.is_contiguous() for m in vectors)
    )
