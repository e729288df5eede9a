"""What a decoding step computes beside its mixers' own steps: products of a few rows, by weights alone."""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from girih.nn.layer import at_least_fp32

# A model's blocks have nothing in them but weights: no hook, no adapter. Who records a step says so.
by_weights_alone: ContextVar[bool] = ContextVar("by_weights_alone", default=False)


class Product(NamedTuple):
    """x W^T, W `[features, width]`, and what becomes of r, its sums:

        none        r, in x's dtype
        linear      r + bias                            in fp32 at least, as all that follow
        sigmoid     scale sigmoid(r + bias)
        logsigmoid  scale log(sigmoid(r + bias))
        decay       -exp(rate) softplus(r + bias)

    bias, rate: `[features]` in fp32.
    """

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
    """Each product of x `[..., width]`; residual is added to that of a single one without a gate."""
    if given.kind.startswith("silu"):
        x = F.silu(x)
    if given.kind.endswith("rms_norm"):
        x = F.rms_norm(x, x.shape[-1:], given.other.to(x.dtype), given.eps)
    elif given.kind == "silu_product":
        x = x * given.other
    results = [gated(F.linear(x, product.weight), product) for product in wanted]
    return results if residual is None else [residual + results[0]]


def gated(r: Tensor, product: Product) -> Tensor:
    if product.gate == "none":
        return r
    r = at_least_fp32(r)
    if product.bias is not None:
        r = r + product.bias
    if product.gate == "sigmoid":
        return product.scale * r.sigmoid()
    if product.gate == "logsigmoid":
        return product.scale * F.logsigmoid(r)
    return -at_least_fp32(product.rate).exp() * F.softplus(r) if product.gate == "decay" else r
