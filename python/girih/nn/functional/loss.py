"""The loss of a language model without the logits of all its tokens."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from girih._torch_internals import is_watched
from girih.nn.functional.fused import PACK, autocast_device, has_kernel

LOGITS = 2**26  # that are there at once; in fp32 256 MiB, and without a kernel their gradient as much
ROWS = 64  # a multiple, for products along them are slow at odd numbers


def cross_entropy(logits: Tensor, label: Tensor, ignored: int, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sum over rows, and its gradient of the logits."""
    counted = label != ignored
    at = label.masked_fill(~counted, 0)[:, None]
    log_p = logits.to(wide).log_softmax(-1)
    loss = -log_p.gather(1, at)[:, 0].masked_fill(~counted, 0).sum()
    d = log_p.exp_()
    d.scatter_add_(1, at, torch.full_like(at, -1, dtype=d.dtype))
    return loss, d.mul_(counted[:, None]).to(logits.dtype)


def with_product(sums: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """sums + a b, in fp32 at least; on a GPU, and in fp16, whose range it may leave, without a rounding
    of the product."""
    # A mode that watches operators may not know this one's arguments, as that of FLOPs does not.
    if has_kernel(a, b, dense=False) and a.dtype != sums.dtype and not is_watched():
        return torch.addmm(sums, a, b, out_dtype=sums.dtype, out=sums)
    return sums + (
        a.to(sums.dtype) @ b.to(sums.dtype) if a.dtype == torch.float16 else (a @ b).to(sums.dtype)
    )


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of cross entropies. Its gradients are made with it, a part of the rows after another: then they
    are all that is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, ignored: int) -> Tensor:
        rows = max(1, LOGITS // weight.shape[0] // ROWS) * ROWS
        wanted_x, wanted_weight = ctx.needs_input_grad[:2]
        wide = torch.promote_types(x.dtype, torch.float32)
        dx = torch.empty_like(x) if wanted_x else None
        dweight = weight.new_zeros(weight.shape, dtype=wide) if wanted_weight else None
        loss, own = x.new_zeros((), dtype=wide), None
        for i in range(0, x.shape[0], rows):
            part, label = x[i : i + rows], labels[i : i + rows]
            logits = d = None  # the last ones, before the next are made
            logits = F.linear(part, weight)
            # Not in place: torch.compile loses all gradients of a function that writes what it returns.
            if logits.shape[-1] % PACK == 0 and has_kernel(logits):
                loss = loss + torch.ops.girih.cross_entropy_(logits, label.long().contiguous(), ignored).sum()
                d = logits
            else:
                loss_of_part, d = cross_entropy(logits, label, ignored, wide)
                loss = loss + loss_of_part
            with torch.autocast(autocast_device(x), enabled=False):
                if wanted_x:
                    own = weight.to(d.dtype) if own is None else own  # rounded once for all parts
                    dx[i : i + rows] = d @ own
                if wanted_weight:
                    dweight = with_product(dweight, d.t(), part.to(d.dtype))
        ctx.save_for_backward(dx, dweight, loss)
        ctx.dtypes = x.dtype, weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        # Rounded once, behind the product: a sum over many tokens may be beyond 16 bits, and its mean is not.
        *gradients, loss = ctx.saved_tensors
        dloss = dloss.where(~loss.isnan(), torch.nan)  # as where a label is no class
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

    x `[N, D]`, weight `[V, D]`, labels `[N]`, of which those that are ignore_index do not count. The sum is
    divided by num_items; None: by how many count. Logits are rounded to the dtype of the product (under
    autocast its), their softmax is fp32. Each gradient once; no second.

    >>> x, weight, labels = torch.randn(50, 8), torch.randn(100, 8), torch.randint(100, (50,))
    >>> torch.allclose(linear_cross_entropy(x, weight, labels), F.cross_entropy(x @ weight.T, labels))
    True
    """
    if not torch.is_grad_enabled():
        x, weight = x.detach(), weight.detach()
    if torch.jit.is_tracing():  # a traced program cannot be saved with a function of Python
        logits = F.linear(x, weight)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(wide, labels, ignore_index=ignore_index, reduction="sum")
    else:
        loss = _LinearCrossEntropy.apply(x, weight, labels, ignore_index)
    if num_items is not None:
        return loss / num_items
    counted = (labels != ignore_index).sum()  # of none no number, with gradients of 0
    return (loss / counted.clamp(min=1)).masked_fill(counted == 0, torch.nan)
