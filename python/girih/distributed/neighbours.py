"""Operators that read rows of earlier pieces: short_conv, and the attentions."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from girih import ops
from girih.distributed.by_heads import gather_all, gather_rows, take
from girih.distributed.chunks import attend_chunks
from girih.distributed.pieces import Pieces, gather, pieces_of
from girih.ops import ShortConvState


class Halo(torch.autograd.Function):
    """(the rows before this rank's piece, those after the last piece).

    tail: the last rows of a piece's last sequence, after zeros where it is shorter, ``[B, W - 1, ...]``;
    counts ``[B]``: how many of them are tokens. It is one node on every rank, also where the piece does not
    need the rows before it, so that the ranks communicate in the same order in backward."""

    @staticmethod
    def forward(
        ctx, pieces: Pieces, tail: Tensor, counts: Tensor, given: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.pieces, ctx.has_given = pieces, given is not None
        tails, all_counts = gather_all(pieces, [tail, counts])
        zeros = torch.zeros_like(tail)
        before = zeros if given is None else given
        start = before
        for r in range(pieces.size):
            if pieces.begins is not None:
                before = torch.where(pieces.begins[r], zeros, before)
            if r == pieces.rank:
                start = before
            own, shift = places(all_counts[r], tail.shape[1])
            after = torch.where(own[..., None], tails[r], take(before, shift))
            before = after if pieces.cuts is None else torch.where(pieces.cuts[r], tails[r], after)
        ctx.save_for_backward(all_counts)
        return start.clone(), before.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, dstart: Tensor, dend: Tensor):
        pieces, (all_counts,) = ctx.pieces, ctx.saved_tensors
        dstarts, dends = gather(pieces, [dstart, dend])
        zeros = torch.zeros_like(dstart)
        gradient, dtail = dends.sum(0), zeros
        for r in reversed(range(pieces.size)):
            whole = zeros
            if pieces.cuts is not None:
                whole = torch.where(pieces.cuts[r], gradient, zeros)
                gradient = torch.where(pieces.cuts[r], zeros, gradient)
            own, shift = places(all_counts[r], dstart.shape[1])
            if r == pieces.rank:
                dtail = whole + torch.where(own[..., None], gradient, zeros)
            moved = torch.where(own[..., None], zeros, gradient)
            gradient = zeros.scatter_add(1, shift[..., None].expand_as(zeros), moved) + dstarts[r]
            if pieces.begins is not None:
                gradient = torch.where(pieces.begins[r], zeros, gradient)
        dgiven = (gradient if pieces.rank == 0 else zeros) if ctx.has_given else None
        return None, dtail, None, dgiven


def places(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Which of the last `rows` rows after a piece are the piece's own, ``[B, rows]``, and where the others
    stood in the rows before it. counts ``[B]``: tokens of the piece, at most `rows`."""
    row = torch.arange(rows, device=counts.device)
    return row >= rows - counts[:, None], (row + counts[:, None]).clamp(max=rows - 1)


def short_conv(
    x, weight, bias=None, *, group=None, bounds=None, activation=None, state: ShortConvState | None = None
) -> tuple[Tensor, ShortConvState | None]:
    """:func:`girih.ops.short_conv` of a sequence that is cut over the ranks of a group: every rank sends its
    last rows.

    x: this rank's piece. group, bounds, state: as in :func:`gla`; the gradients of weight and bias are those
    of the piece.
    """
    pieces = pieces_of(group, x, bounds)
    cu_seqlens, rows, T = pieces.cu_seqlens, weight.shape[1] - 1, x.shape[1]
    if bounds is not None:
        first, last = bounds.unbind(1)
    elif cu_seqlens is not None:
        first, last = cu_seqlens[-2:-1], cu_seqlens[-1:]
    else:
        first, last = (torch.full((x.shape[0],), n, device=x.device) for n in (0, T))
    index = last[:, None] - rows + torch.arange(rows, device=x.device)
    exists = index >= first[:, None]
    if T == 0:
        tail = x.new_zeros(x.shape[0], rows, x.shape[2]) + 0 * x.sum()
    else:
        tail = torch.where(exists[..., None], take(x, index.clamp(0, T - 1).long()), 0)
    start, end = Halo.apply(pieces, tail, exists.sum(1), None if state is None else state.x)
    if cu_seqlens is not None:
        start = torch.cat([start, start.new_zeros(cu_seqlens.shape[0] - 2, *start.shape[1:])])
    y, _ = ops.short_conv(
        x,
        weight,
        bias,
        activation=activation,
        state=ShortConvState(start),
        cu_seqlens=bounds if cu_seqlens is None else cu_seqlens,
    )
    return y, None if cu_seqlens is not None else ShortConvState(end)


def cat_attention(q, k, v, *, group=None, chunk: int, scale=None, cu_chunks: Tensor | None = None) -> Tensor:
    """:func:`girih.ops.cat_attention` of rows that are cut over the ranks of a group: every rank gathers the
    headers.

    q, k, v: this rank's piece, whole chunks; the last piece may end within a chunk. cu_chunks: the bounds of
    all packed sequences, in chunks of the whole.

    Raises ValueError for a piece that ends within a chunk before the last rows.
    """
    pieces = pieces_of(group, q)
    starts = [sum(pieces.lengths[:r]) for r in range(pieces.size)]
    if any(start % chunk and n for start, n in zip(starts, pieces.lengths, strict=True)):
        raise ValueError(
            f"girih.distributed.cat_attention: pieces have {list(pieces.lengths)} rows but should have whole "
            f"chunks of {chunk}"
        )
    bounds = [0, *itertools.accumulate(-(-n // chunk) for n in pieces.lengths)]
    every = torch.arange(bounds[-1], device=q.device)
    first, inside = torch.zeros_like(every), None
    if cu_chunks is not None:
        sequence = torch.searchsorted(cu_chunks, every, right=True)
        first = cu_chunks[(sequence - 1).clamp(min=0)]
        inside = (sequence > 0) & (sequence < cu_chunks.shape[0])
    T, (start, end) = q.shape[1], bounds[pieces.rank : pieces.rank + 2]
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, (end - start) * chunk - T)) for x in (q, k, v))
    o = attend_chunks(q, k, v, pieces=pieces, bounds=bounds, first=first, chunk=chunk, scale=scale)[:, :T]
    if inside is not None:
        o = torch.where(inside[start:end].repeat_interleave(chunk)[None, :T, None, None], o, 0)
    return o


@torch.compiler.disable
def attention(
    q,
    k,
    v,
    *,
    group=None,
    valid: Tensor | None = None,
    window: int | None = None,
    causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Attention of a sequence that is cut over the ranks of a group: every rank gathers keys and values.

    q, k, v: this rank's piece, rotated; ``[B, T, HQ, D]``, ``[B, T, H, D]``.
    valid: ``[B, T]`` bool, false at masked tokens of this piece; they attend to themselves.
    """
    pieces = pieces_of(group, q)
    k, v = gather_rows([k, v], pieces, pieces.lengths)
    key = torch.arange(k.shape[1], device=q.device)
    query = key[pieces.start : pieces.start + q.shape[1], None]
    sees = key <= query if causal else torch.ones_like(key <= query)
    if window is not None:
        sees = sees & (key > query - window)
    if pieces.whole is not None:
        sequence = torch.searchsorted(pieces.whole, key, right=True)
        sees = sees & (sequence == sequence[query])
    if valid is not None:
        (every,) = gather_rows([valid.to(k.dtype)], pieces, pieces.lengths)
        sees = (sees & every[:, None].bool() | (key == query))[:, None]
    if q.numel() == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum())
    return F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=sees,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)
