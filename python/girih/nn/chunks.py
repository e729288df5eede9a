"""Whole chunks out of padded or packed sequences."""

from typing import NamedTuple

import torch
from torch import Tensor


class ChunkTable(NamedTuple):
    """Every sequence on chunks of its own, the sequences one after the other.

    row: `[B * T]`, where in the table's `chunks * chunk` rows a token stands; a masked one gets the row after
        them.
    first: `[chunks]`, whether the chunk is the first of its sequence.
    index: `[chunks]`, how many chunks of its sequence came before.
    cu_chunks: `[N + 1]`, the sequences' chunks; chunks that no sequence needs belong to the last one.
    """

    row: Tensor
    first: Tensor
    index: Tensor
    cu_chunks: Tensor

    def spread(self, x: Tensor, chunk: int) -> Tensor:
        """x `[B, T, ...]` -> `[1, chunks, chunk, ...]`, zero where no token stands."""
        chunks = self.first.shape[0]
        table = x.new_zeros(chunks * chunk + 1, *x.shape[2:]).index_copy(0, self.row, x.flatten(0, 1))
        return table[:-1].unflatten(0, (1, chunks, chunk))

    def gather(self, y: Tensor, shape: torch.Size, shift: int = 0) -> Tensor:
        """y `[1, chunks, chunk, ...]` -> `[B, T, ...]`: the row `shift` after each token's."""
        y = y.flatten(0, 2)
        return y.index_select(0, (self.row + shift).clamp(max=y.shape[0] - 1)).unflatten(0, shape)


def chunk_table(
    x: Tensor, chunk: int, attention_mask: Tensor | None, cu_seqlens: Tensor | None, room: int = 0
) -> ChunkTable:
    """The table of x `[B, T, ...]`, with `room` free rows after each sequence's last token.

    No value is read back from the device: sizes are bounds made of shapes.
    """
    B, T = x.shape[:2]
    if cu_seqlens is not None:
        length = cu_seqlens.diff().long()
        token = torch.arange(T, device=x.device)
        sequence = torch.searchsorted(cu_seqlens[1:], token, right=True).clamp(max=length.shape[0] - 1)
        rank, valid = token - cu_seqlens[sequence], token < cu_seqlens[-1]
        chunks = (T + length.shape[0] * (chunk - 1 + room)) // chunk
    else:
        valid = attention_mask.bool()
        length, rank = valid.sum(1), valid.cumsum(1) - 1
        sequence = torch.arange(B, device=x.device)[:, None]
        chunks = B * ((T + room + chunk - 1) // chunk)
    end = ((length + room + chunk - 1) // chunk).cumsum(0)
    cu_chunks = torch.cat((end.new_zeros(1), end[:-1], end.new_full((1,), chunks)))
    row = torch.where(valid, cu_chunks[sequence] * chunk + rank, chunks * chunk).flatten()
    at = torch.arange(chunks, device=x.device)
    index = at - cu_chunks[torch.searchsorted(end[:-1], at, right=True)]
    return ChunkTable(row, index == 0, index, cu_chunks)
