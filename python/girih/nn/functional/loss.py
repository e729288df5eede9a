"""Cross entropy of a language model in parts of rows, without the logits of all tokens at once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from girih._torch_internals import has_dispatch_mode
from girih.nn.functional.fused import PACK, autocast_device, has_fused_kernel

MAX_LOGITS = 2**26  # logits of a part: 256 MiB in fp32, and as much for their gradient without a kernel
ROW_MULTIPLE = 64  # the rows of a part are a multiple of this: products over odd numbers of rows are slow


def cross_entropy(logits: Tensor, label: Tensor, ignored: int, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sum of cross entropies over rows, and its gradient with respect to the logits."""
    counted = label != ignored
    index = label.masked_fill(~counted, 0)[:, None]
    log_p = logits.to(wide).log_softmax(-1)
    loss = -log_p.gather(1, index)[:, 0].masked_fill(~counted, 0).sum()
    d = log_p.exp_()
    d.scatter_add_(1, index, torch.full_like(index, -1, dtype=d.dtype))
    return loss, d.mul_(counted[:, None]).to(logits.dtype)


def add_product(sums: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """sums + a b, in the dtype of sums, fp32 or fp64. On a GPU, and for fp16, whose range the product may
    exceed, the product is not rounded."""
    # Some dispatch modes, as PyTorch's FLOP counter, do not support these arguments of addmm.
    if has_fused_kernel(a, b, needs_contiguous=False) and a.dtype != sums.dtype and not has_dispatch_mode():
        return torch.addmm(sums, a, b, out_dtype=sums.dtype, out=sums)
    return sums + (
        a.to(sums.dtype) @ b.to(sums.dtype) if a.dtype == torch.float16 else (a @ b).to(sums.dtype)
    )


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of cross entropies. forward computes the gradients too, part by part, and saves only these for
    backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, ignored: int) -> Tensor:
        rows = max(1, MAX_LOGITS // weight.shape[0] // ROW_MULTIPLE) * ROW_MULTIPLE
        needs_dx, needs_dweight = ctx.needs_input_grad[:2]
        wide = torch.promote_types(x.dtype, torch.float32)
        dx = torch.empty_like(x) if needs_dx else None
        dweight = weight.new_zeros(weight.shape, dtype=wide) if needs_dweight else None
        loss, cast_weight = x.new_zeros((), dtype=wide), None
        for i in range(0, x.shape[0], rows):
            part, label = x[i : i + rows], labels[i : i + rows]
            logits = d = None  # release the tensors of the last part first
            logits = F.linear(part, weight)
            # Not in place: torch.compile drops all gradients of a function that writes its result in place.
            if logits.shape[-1] % PACK == 0 and has_fused_kernel(logits):
                loss = loss + torch.ops.girih.cross_entropy_(logits, label.long().contiguous(), ignored).sum()
                d = logits
            else:
                loss_of_part, d = cross_entropy(logits, label, ignored, wide)
                loss = loss + loss_of_part
            with torch.autocast(autocast_device(x), enabled=False):
                if needs_dx:
                    cast_weight = (
                        weight.to(d.dtype) if cast_weight is None else cast_weight
                    )  # cast once for all parts
                    dx[i : i + rows] = d @ cast_weight
                if needs_dweight:
                    dweight = add_product(dweight, d.t(), part.to(d.dtype))
        ctx.save_for_backward(dx, dweight, loss)
        ctx.dtypes = x.dtype, weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        # Multiply, then round once: the gradient of a sum over many tokens may overflow in fp16, the mean's
        # does not.
        *gradients, loss = ctx.saved_tensors
        dloss = dloss.where(~loss.isnan(), torch.nan)  # NaN if a label is out of range
        both = zip(gradients, ctx.dtypes, strict=True)
        return *(None if d is None else (d.to(dloss.dtype) * dloss).to(t) for d, t in both), None, None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    num_items: int | Tensor | None = None,
) -> Tensor:
    """`cross_entropy(x @ weight.T, labels)` in nats, in memory for 2^26 logits.

    x `[N, D]`, weight `[V, D]`, labels `[N]`; rows with label ignore_index do not count. The sum is divided
    by num_items; None: by the number of rows that count. Logits are rounded to the dtype of the product
    (autocast's under autocast), their softmax is fp32. There is no double backward.

    >>> x, weight, labels = torch.randn(50, 8), torch.randn(100, 8), torch.randint(100, (50,))
    >>> torch.allclose(linear_cross_entropy(x, weight, labels), F.cross_entropy(x @ weight.T, labels))
    True
    """
    if not torch.is_grad_enabled():
        x, weight = x.detach(), weight.detach()
    if torch.jit.is_tracing():  # a traced program with a Python autograd function cannot be saved
        logits = F.linear(x, weight)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(wide, labels, ignore_index=ignore_index, reduction="sum")
    else:
        loss = _LinearCrossEntropy.apply(x, weight, labels, ignore_index)
    if num_items is not None:
        return loss / num_items
    counted = (labels != ignore_index).sum()  # without labels: NaN, with gradients of 0
    return (loss / counted.clamp(min=1)).masked_fill(counted == 0, torch.nan)
