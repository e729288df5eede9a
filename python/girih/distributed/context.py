"""Models that read sequences cut over the ranks of a process group."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh

from girih.distributed.pieces import Pieces, group_of
from girih.nn.functional.state import current_pieces

#: The process group of the `context_parallel` that is entered; None: none is.
_group: ContextVar[dist.ProcessGroup | None] = ContextVar("girih.context_parallel", default=None)
_lock, _entries = threading.Lock(), 0  # how many contexts are entered, in all threads
_uncut_call: Any = None
PIECE_MULTIPLE = 64  # pieces are whole chunks of the operators, where the sequence is long enough


@contextlib.contextmanager
def context_parallel(mesh: "DeviceMesh | dist.ProcessGroup | None" = None) -> Iterator[None]:
    """Within this context, a girih model cuts every sequence over the ranks of a group.

    mesh: a mesh of one dimension, such as ``mesh["cp"]``, a process group, or None for the default group.

    Every rank calls the model with the same whole batch: input_ids, labels, attention_mask, cu_seqlens or
    position_ids. Each rank reads its piece; the layers exchange states (`girih.distributed`). Logits and
    hidden states are those of the piece, the loss is that of the whole batch on every rank. Gradients
    averaged over the ranks, as DDP and `girih.distributed.shard` average them, are those of the whole batch.

    Every rank calls backward. There is no cache: use_cache must not be True. Raises ValueError for a model
    with a layer that cannot read pieces (layers that read backwards), for `logits_to_keep` and for
    `GirihForSequenceClassification`.

    Models of transformers, converted by girih or not, are cut in the same way if their type is one of
    `girih.models.adapters.pieces_call.MODEL_TYPES`. Their first call sets attn_implementation from "sdpa" to
    "girih", which is the same for whole sequences. A ValueError refuses other models of transformers, rotary
    positions of type "dynamic" or "longrope", and fewer tokens than ranks.
    """
    group = group_of(mesh)
    with cut_calls_of_transformers():
        token = _group.set(group)
        try:
            yield
        finally:
            _group.reset(token)


@contextlib.contextmanager
def cut_calls_of_transformers() -> Iterator[None]:
    """Within this context, `PreTrainedModel.__call__` is `pieces_call.call_model`, until the last thread
    leaves the context."""
    global _entries, _uncut_call
    from transformers import PreTrainedModel

    from girih.models.adapters.pieces_call import call_model

    with _lock:
        if not _entries:
            _uncut_call = vars(PreTrainedModel).get("__call__")  # None: it is nn.Module's
        _entries += 1
        PreTrainedModel.__call__ = call_model
    try:
        yield
    finally:
        with _lock:
            _entries -= 1
            if not _entries and _uncut_call is None:
                del PreTrainedModel.__call__
            elif not _entries:
                PreTrainedModel.__call__ = _uncut_call


def entered_group() -> dist.ProcessGroup | None:
    """The group over which a model cuts its sequences; None without `context_parallel`, and within a model
    that has already cut them."""
    return None if current_pieces.get() is not None else _group.get()


def cut_tokens(group: dist.ProcessGroup, tokens: int, cu_seqlens: Tensor | None) -> Pieces:
    """Pieces of equal length, the last one shorter. If this left a piece empty, the lengths differ by one at
    most instead. Pieces are empty only if there are fewer tokens than ranks."""
    size = dist.get_world_size(group)
    length = -(-tokens // size)
    if length > PIECE_MULTIPLE:
        length = -(-length // PIECE_MULTIPLE) * PIECE_MULTIPLE
    if length * (size - 1) < tokens:
        lengths = tuple(min(tokens - r * length, length) for r in range(size))
    else:
        lengths = tuple(tokens * (r + 1) // size - tokens * r // size for r in range(size))
    return Pieces.cut(group, lengths[dist.get_rank(group)], cu_seqlens, lengths=lengths)


@contextlib.contextmanager
def reading(pieces: Pieces) -> Iterator[None]:
    """Within this context, layers are called with this rank's piece."""
    token = current_pieces.set(pieces)
    try:
        yield
    finally:
        current_pieces.reset(token)


def bind_pieces(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` as it is now, also where gradient checkpointing runs it again in backward."""
    pieces = current_pieces.get()
    if pieces is None:
        return call

    def bound(*args: Any) -> Any:
        with reading(pieces):
            return call(*args)

    return bound


def check_layers(model: nn.Module) -> None:
    """Raises ValueError if a layer of the model cannot read pieces."""
    for name, module in model.named_modules():
        if not getattr(module, "reads_pieces", True):
            raise ValueError(
                f"context_parallel: {name or 'the model'} is a {type(module).__name__}, which reads whole "
                "sequences"
            )
        if isinstance(module, CheckpointWrapper):  # it runs layers again without their pieces
            raise ValueError(
                f"context_parallel: {name} is a CheckpointWrapper; call "
                "model.gradient_checkpointing_enable() instead"
            )


def check_cache(cache: Any, use_cache: bool | None) -> None:
    """Raises ValueError for a call with a cache."""
    if cache is not None or use_cache:
        raise ValueError("use_cache: context_parallel has no cache; call the model with use_cache=False")


def check_logits_to_keep(logits_to_keep: Any) -> None:
    """Raises ValueError unless all logits are kept."""
    if not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
        raise ValueError("logits_to_keep: context_parallel has the logits of pieces; expected 0")


class SumOfLosses(torch.autograd.Function):
    """The sum of the ranks' losses. The gradient is multiplied by the number of ranks, since the gradients of
    parameters are averaged over the ranks."""

    @staticmethod
    def forward(ctx, loss: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.size = dist.get_world_size(group)
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad * ctx.size, None


def sum_of_losses(loss: Tensor, group: dist.ProcessGroup) -> Tensor:
    return SumOfLosses.apply(loss, group)


def check_labels(labels: Tensor, x: Tensor, name: str = "labels") -> None:
    """Raises unless labels have the shape of x ``[B, T, ...]``: on every rank, also where the labels of the
    rank's piece are complete."""
    if labels.shape != x.shape[:2]:
        raise ValueError(f"{name} has shape {list(labels.shape)}; expected [B, T] = {list(x.shape[:2])}")


def next_labels(labels: Tensor) -> Tensor:
    """The label that each token predicts: that of the next token; -100 at the last."""
    return torch.cat([labels[:, 1:], labels.new_full((labels.shape[0], 1), -100)], 1)


def piece_of(x: Any, pieces: Pieces) -> Any:
    """This rank's tokens of x ``[B, T, ...]``."""
    return None if x is None else x[:, pieces.start : pieces.start + pieces.lengths[pieces.rank]]
