"""CAT's chunks of sequences that are cut over the ranks of a process group.

A piece may end within a chunk, and with packed rows or masks it usually does. A chunk belongs to the rank
that has its first token, and the other tokens move to this rank, by one all-to-all.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from girih.distributed.by_heads import AllGather, exchange, gather_rows
from girih.distributed.pieces import Pieces

BLOCK_ROWS = 1024  # rows whose scores attention computes together, and once more in backward


class Move(torch.autograd.Function):
    """x ``[N, ...]`` to y ``[size, ...]``: rows sent[r] of x go to rank r, and rows of rank r arrive at
    received[r] of y. The other rows of y are zero."""

    @staticmethod
    def forward(
        ctx, pieces: Pieces, sent: list[Tensor], received: list[Tensor], size: int, x: Tensor
    ) -> Tensor:
        ctx.call = pieces, sent, received, x.shape[0]
        return move(pieces, sent, received, size, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        pieces, sent, received, size = ctx.call
        return None, None, None, None, move(pieces, received, sent, size, grad)


def move(pieces: Pieces, sent: list[Tensor], received: list[Tensor], size: int, x: Tensor) -> Tensor:
    shapes = [[len(index), *x.shape[1:]] for index in received]
    (found,) = exchange([[x[index] for index in sent]], [shapes], pieces)
    # A row may arrive several times: in backward, where tokens have read it.
    return x.new_zeros(size, *x.shape[1:]).index_put_(
        (torch.cat(received),), torch.cat(found), accumulate=True
    )


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkCut:
    """The chunks of every rank. The chunks of a batch are a table ``[B, K, chunk]``, or ``[1, K, chunk]`` for
    packed rows, in which every sequence starts a chunk.

    bounds: rank r has the chunks ``bounds[r]`` to ``bounds[r + 1]`` of every row.
    first: ``[K]``, the first chunk of each chunk's sequence.
    rows: ``[B, T]``, on the host: the row of each token among the ``K * chunk`` of its table; -1: none.
    shift: the output at a token is the row at this offset from its row.
    """

    pieces: Pieces
    chunk: int
    bounds: tuple[int, ...]
    first: Tensor
    rows: Tensor
    shift: int

    @classmethod
    @torch.compiler.disable
    def of_layer(cls, pieces: Pieces, chunk: int, x: Tensor, mask: Tensor | None) -> "ChunkCut":
        """For a layer. x, mask: this rank's piece. Layers of the same chunk share the result."""
        key = (chunk, x.shape[0], x.device, id(mask))
        if key not in pieces.chunk_cuts:
            valid = mask
            if mask is not None:
                (valid,) = gather_rows([mask.to(torch.uint8)], pieces, pieces.lengths)
            # The mask is kept, so that its id stays its own.
            pieces.chunk_cuts[key] = cls.make(pieces, chunk, x, valid), mask
        return pieces.chunk_cuts[key][0]

    @classmethod
    def make(
        cls, pieces: Pieces, chunk: int, x: Tensor, valid: Tensor | None = None, shift: int = 0
    ) -> "ChunkCut":
        """x: of the batch and the device. valid: ``[B, T]``, of all pieces; with `shift` a masked token reads
        the row of the last valid token. Waits for the device if there are masks or packed rows."""
        tokens, B = sum(pieces.lengths), x.shape[0]
        ends = [0, tokens] if pieces.whole is None else pieces.whole.tolist()
        counts = [-(-(b - a + shift) // chunk) for a, b in itertools.pairwise(ends)]
        starts = list(itertools.accumulate(counts, initial=0))
        lengths = torch.tensor(counts)
        first = torch.tensor(starts[:-1]).repeat_interleave(lengths)
        # The token with which each chunk starts.
        begin = torch.tensor(ends[:-1]).repeat_interleave(lengths)
        begin = begin + (torch.arange(starts[-1]) - first) * chunk
        firsts = torch.tensor(list(itertools.accumulate(pieces.lengths[:-1], initial=0)))
        bounds = (*torch.searchsorted(begin, firsts).tolist(), starts[-1])
        token = torch.arange(tokens)
        if valid is not None:
            valid = valid.bool().cpu()
            count = valid.sum(1, keepdim=True)
            masked = count - 1 if shift else torch.full_like(count, -1)
            rows = torch.where(valid, valid.cumsum(1) - 1, masked)
        else:
            sequence = torch.searchsorted(torch.tensor(ends[1:-1], dtype=torch.long), token, right=True)
            rows = torch.tensor(starts)[sequence] * chunk + token - torch.tensor(ends)[sequence]
            rows = rows.expand(B, tokens)
        return cls(pieces, chunk, bounds, first.to(x.device), rows, shift)

    @property
    def own(self) -> slice:
        """This rank's chunks."""
        return slice(self.bounds[self.pieces.rank], self.bounds[self.pieces.rank + 1])

    @property
    def count(self) -> int:
        """The number of this rank's chunks."""
        return self.own.stop - self.own.start

    @property
    def index(self) -> Tensor:
        """``[count]``: the index of this rank's chunks in their sequences."""
        return torch.arange(self.own.start, self.own.stop, device=self.first.device) - self.first[self.own]

    def find_moves(self, rows: Tensor, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        """rows ``[B, T]``: a row for each token; -1: none. Returns two lists with an index for each rank r:
        of this rank's tokens whose rows rank r has, and of this rank's rows whose tokens rank r has."""
        pieces, length, width = self.pieces, self.pieces.lengths[self.pieces.rank], self.count * self.chunk
        owner = torch.searchsorted(torch.tensor(self.bounds[1:]), rows // self.chunk, right=True)
        owner = owner.masked_fill(rows < 0, -1)
        batch = torch.arange(rows.shape[0])[:, None]
        tokens = (batch * length + torch.arange(length)).expand(rows.shape[0], length)
        own = owner[:, pieces.start : pieces.start + length]
        sent = [tokens[own == r].to(device) for r in range(pieces.size)]
        places = batch * width + rows - self.own.start * self.chunk
        received = [
            place[held == pieces.rank].to(device)
            for place, held in zip(
                places.split(pieces.lengths, 1), owner.split(pieces.lengths, 1), strict=True
            )
        ]
        return sent, received

    @torch.compiler.disable
    def to_chunks(self, x: Tensor) -> Tensor:
        """This rank's tokens ``[B, T_r, ...]`` -> its chunks ``[B, count, chunk, ...]``. Rows without a token
        are zero."""
        sent, received = self.find_moves(self.rows, x.device)
        size = x.shape[0] * self.count * self.chunk
        y = Move.apply(self.pieces, sent, received, size, x.flatten(0, 1))
        return y.view(x.shape[0], self.count, self.chunk, *x.shape[2:])

    @torch.compiler.disable
    def to_tokens(self, y: Tensor) -> Tensor:
        """The outputs of this rank's chunks ``[B, count, chunk, ...]`` -> those of its tokens
        ``[B, T_r, ...]``, zero for a token without a row."""
        length = self.pieces.lengths[self.pieces.rank]
        received, sent = self.find_moves(self.rows + self.shift, y.device)
        x = Move.apply(self.pieces, sent, received, y.shape[0] * length, y.flatten(0, 2))
        return x.view(y.shape[0], length, *y.shape[3:])

    def place(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """The tokens of all pieces ``[B, T]`` -> all chunks ``[B, K, chunk]``."""
        B, K = x.shape[0], self.first.shape[0]
        rows = self.rows.to(x.device)
        if valid is not None:
            rows = rows.masked_fill(~valid, K * self.chunk)
        table = x.new_zeros(B, K * self.chunk + 1).scatter(1, rows, x)
        return table[:, :-1].view(B, K, self.chunk)

    @torch.compiler.disable
    def shift_chunks(self, x: Tensor) -> Tensor:
        """x ``[B, count, ...]`` -> x of each chunk's predecessor, which may be on another rank; arbitrary for
        the first chunk of a sequence."""
        last = x[:, -1] if self.count else x.new_zeros(x.shape[0], *x.shape[2:]) + 0 * x.sum()
        (every,) = AllGather.apply(self.pieces, last)
        if not self.count:
            return x + 0 * every.sum()  # every rank has the node, so that the ranks communicate in backward
        holders = [r for r in range(self.pieces.rank) if self.bounds[r] < self.bounds[r + 1]]
        return torch.cat((every[holders[-1] if holders else 0][:, None], x[:, :-1]), 1)

    @torch.compiler.disable
    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: int) -> Tensor:
        """`girih.ops.cat_attention` of this rank's chunks of `rows` rows, ``[B, count * rows, ...]``."""
        return attend_chunks(q, k, v, pieces=self.pieces, bounds=self.bounds, first=self.first, chunk=rows)


def attend_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pieces: Pieces,
    bounds: Sequence[int],
    first: Tensor,
    chunk: int,
    scale: float | None = None,
) -> Tensor:
    """CAT's attention of a rank's chunks, ``[B, count * chunk, H, ...]``; bounds and first as in `ChunkCut`.

    Every rank gathers the headers. BLOCK_ROWS rows are computed at a time, and again in backward: all scores
    of a long sequence would not fit.
    """
    start, end = bounds[pieces.rank], bounds[pieces.rank + 1]
    counts = tuple(b - a for a, b in itertools.pairwise(bounds))
    header_k, header_v = gather_rows([x[:, ::chunk] for x in (k, v)], pieces, counts)
    if q.numel() == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * (q.sum() + header_k.sum() + header_v.sum())
    step = max(1, BLOCK_ROWS // chunk)
    outputs = []
    for at in range(start, end, step):
        stop = min(at + step, end)
        rows = slice((at - start) * chunk, (stop - start) * chunk)
        block = (q[:, rows], k[:, rows], v[:, rows], header_k[:, : stop - 1], header_v[:, : stop - 1])
        call = (*block, first[at:stop], at, chunk, scale)
        if end - start > step and torch.is_grad_enabled():
            outputs.append(checkpoint(attend_block, *call, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(attend_block(*call))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    header_k: Tensor,
    header_v: Tensor,
    first: Tensor,
    start: int,
    chunk: int,
    scale: float | None,
) -> Tensor:
    """Attention of the chunks from `start` on to the headers of earlier chunks of their sequences, and of
    each row to the rows of its chunk up to itself."""
    row = torch.arange(q.shape[1], device=q.device)
    here, header = row // chunk, torch.arange(header_k.shape[1], device=q.device)
    sees_header = (header < start + here[:, None]) & (header >= first[here][:, None])
    sees_row = (here == here[:, None]) & (row <= row[:, None])
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        torch.cat((header_k, k), 1).transpose(1, 2),
        torch.cat((header_v, v), 1).transpose(1, 2),
        attn_mask=torch.cat((sees_header, sees_row), 1),
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return o.transpose(1, 2)
