"""What becomes of a layer's small products: gates and step sizes, on a GPU in one pass each way."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from girih.nn.fused import has_kernel
from girih.nn.layer import at_least_fp32


def gated(
    r: Tensor, gate: str, bias: Tensor | None = None, rate: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """Of a product r `[..., features]`:

        none        r, in its dtype
        linear      r + bias                            in fp32 at least, as all that follow
        sigmoid     scale sigmoid(r + bias)
        logsigmoid  scale log(sigmoid(r + bias))
        decay       -exp(rate) softplus(r + bias)

    bias, rate: `[features]`, in fp32 at least.
    """
    if gate == "none" or (gate == "linear" and bias is None):
        return r if gate == "none" else at_least_fp32(r)
    if has_gate(r, bias, rate):
        return _Gated.apply(r, bias, rate, gate, scale)
    return by_pytorch(r, gate, bias, rate, scale)


def has_gate(r: Tensor, *numbers: Tensor | None) -> bool:
    given = [x for x in numbers if x is not None]
    return (
        r.dim() > 0
        and has_kernel(r, dense=False)
        and (not given or has_kernel(*given))
        and all(x.dtype == torch.float32 and x.shape == r.shape[-1:] for x in given)
    )


def by_pytorch(r: Tensor, gate: str, bias: Tensor | None, rate: Tensor | None, scale: float) -> Tensor:
    z = at_least_fp32(r) if bias is None else at_least_fp32(r) + bias
    if gate == "linear":
        return z
    if gate == "decay":
        return -at_least_fp32(rate).exp() * F.softplus(z)
    y = z.sigmoid() if gate == "sigmoid" else F.logsigmoid(z)
    return y if scale == 1.0 else scale * y


class _Gated(torch.autograd.Function):
    """Which keeps r as it came."""

    @staticmethod
    def forward(
        ctx: Any, r: Tensor, bias: Tensor | None, rate: Tensor | None, gate: str, scale: float
    ) -> Tensor:
        ctx.save_for_backward(r, bias, rate)
        ctx.gate, ctx.scale = gate, scale
        return torch.ops.girih.row_gates(r, gate, bias, rate, scale)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        r, bias, rate = ctx.saved_tensors
        of_r, of_bias, of_rate, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled() or not has_gate(r, bias, rate):  # what follows may be differentiated again
            dr, dbias, drate = derivatives(dy, r, bias, rate, ctx.gate, ctx.scale)
        else:
            dr, sums = torch.ops.girih.row_gates_backward(
                dy, r, ctx.gate, bias, rate, ctx.scale, of_bias or of_rate
            )
            dbias, drate = sums.unbind() if of_bias or of_rate else (None, None)
        return dr if of_r else None, dbias if of_bias else None, drate if of_rate else None, None, None


def derivatives(
    dy: Tensor, r: Tensor, bias: Tensor | None, rate: Tensor | None, gate: str, scale: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of r, bias and rate."""
    z = r.float() if bias is None else r.float() + bias
    dz, drate = dy, None
    if gate == "decay":
        factor = -rate.exp()
        drate = (dy * factor * F.softplus(z)).sum_to_size(rate.shape)
        dz = dy * factor * z.sigmoid()
    elif gate != "linear":
        s = z.sigmoid()
        dz = dy * scale * (s * (1 - s) if gate == "sigmoid" else 1 - s)
    return dz.to(r.dtype), dz.sum_to_size(r.shape[-1:]), drate
