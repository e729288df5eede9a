"""Layouts of tokens in whole chunks: for packed sequences, and for sequences that continue over calls."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from girih.nn.functional.masking import sort_valid_first
from girih.nn.functional.state import TensorSpec, check_state


class ChunkTable(NamedTuple):
    """Layout of packed sequences in chunks: every sequence starts a new chunk.

    row: `[T]`, row of a token among `chunks * chunk` rows; `chunks * chunk` for a token of no sequence.
    first: `[chunks]`, whether the chunk is the first of its sequence.
    index: `[chunks]`, index of the chunk in its sequence.
    cu_chunks: `[N + 1]`, first chunk of each sequence; unused chunks belong to the last sequence.
    """

    row: Tensor
    first: Tensor
    index: Tensor
    cu_chunks: Tensor

    def scatter(self, x: Tensor, chunk: int) -> Tensor:
        """x `[1, T, ...]` -> `[1, chunks, chunk, ...]`; rows without a token are zero."""
        chunks = self.first.shape[0]
        table = x.new_zeros(chunks * chunk + 1, *x.shape[2:]).index_copy(0, self.row, x.flatten(0, 1))
        return table[:-1].unflatten(0, (1, chunks, chunk))

    def gather(self, y: Tensor, shift: int = 0) -> Tensor:
        """y `[1, chunks, chunk, ...]` -> `[1, T, ...]`: for each token the row at offset `shift` from its
        row."""
        y = y.flatten(0, 2)
        return y.index_select(0, (self.row + shift).clamp(max=y.shape[0] - 1))[None]


def chunk_table(x: Tensor, chunk: int, cu_seqlens: Tensor, room: int = 0) -> ChunkTable:
    """The layout of packed sequences x `[1, T, ...]`, with at least `room` free rows after a sequence's last
    token.

    Sizes are bounds computed from shapes, so the host does not wait for the device.
    """
    T = x.shape[1]
    length = cu_seqlens.diff().long()
    token = torch.arange(T, device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:], token, right=True).clamp(max=length.shape[0] - 1)
    rank, valid = token - cu_seqlens[sequence], token < cu_seqlens[-1]
    chunks = (T + length.shape[0] * (chunk - 1 + room)) // chunk
    end = ((length + room + chunk - 1) // chunk).cumsum(0)
    cu_chunks = torch.cat((end.new_zeros(1), end[:-1], end.new_full((1,), chunks)))
    row = torch.where(valid, cu_chunks[sequence] * chunk + rank, chunks * chunk)
    at = torch.arange(chunks, device=x.device)
    index = at - cu_chunks[torch.searchsorted(end[:-1], at, right=True)]
    return ChunkTable(row, index == 0, index, cu_chunks)


class Compressions(NamedTuple):
    """The K chunks that a decoding step compresses.

    sequences: `[K]`, index of the chunk's sequence.  is_complete: `[K]`, whether the chunk is complete; None:
        all are.
    """

    sequences: slice | Tensor
    is_complete: Tensor | None

    def select(self, new: Tensor, old: Tensor) -> Tensor:
        """new `[K, ...]` where the chunk is complete, else old; in the dtype of old."""
        new = new.to(old.dtype)
        if self.is_complete is None:
            return new
        return torch.where(self.is_complete.view(-1, *[1] * (new.dim() - 1)), new, old)


class SequenceLengths(NamedTuple):
    """Number of tokens of each of N sequences.

    tokens: `[N]` int64 on the device, for computations.
    host_tokens: the same numbers on the host, which chooses kernels and sizes: an int for equal lengths, else
        `[N]` on the CPU.
    """

    tokens: Tensor
    host_tokens: int | Tensor

    on_host = ("host_tokens",)

    def count_compressions(self, chunk: int) -> int:
        """Number of chunks that the last step compresses.

        Equal lengths: 0 or N. Otherwise the number of complete chunks, rounded up to a power of two, at most
        N: a CUDA graph has fixed sizes, and the extra rows are computed and discarded.
        """
        N = len(self.tokens)
        if not isinstance(self.host_tokens, Tensor):
            return 0 if self.host_tokens % chunk else N
        count, least = int((self.host_tokens.cpu().numpy() % chunk == 0).sum()), 1
        while least < count:
            least *= 2
        return min(least, N) if count else 0

    def step_kind(self, chunk: int) -> tuple[int, bool]:
        """The kind of the last decoding step (`state.stepped`): `count_compressions`, and whether the step
        tests which chunks are complete."""
        return self.count_compressions(chunk), isinstance(self.host_tokens, Tensor)

    def find_compressions(self, chunk: int) -> Compressions | None:
        """The chunks of `count_compressions`, found on the device; None: no chunk is complete."""
        count = self.count_compressions(chunk)
        if count == 0:
            return None
        if not isinstance(self.host_tokens, Tensor):
            return Compressions(slice(None), None)
        row = self.tokens % chunk
        sequences = row.topk(count, largest=False).indices
        return Compressions(sequences, row[sequences] == 0)


def check_seq_lengths(state: SequenceLengths, sequences: int) -> None:
    """Raises unless `state` has the lengths of this number of sequences."""
    spec = TensorSpec((sequences,), torch.int64)
    host_tokens = getattr(state, "host_tokens", None)
    like = SequenceLengths(spec, host_tokens if isinstance(host_tokens, int) else spec)
    check_state(state, like, "state.seq_lengths")


def max_tokens(host_tokens: int | Tensor) -> int:
    """The largest number of tokens that any sequence has."""
    if not isinstance(host_tokens, Tensor):
        return host_tokens
    return int(host_tokens.cpu().numpy().max()) if len(host_tokens) else 0


class Continuation:
    """Layout of T further tokens of N sequences in chunks.

    The first chunk of a row is the sequence's incomplete chunk, with its earlier tokens. past: lengths before
    the call; None at the start of the sequences. attention_mask `[N, T]`: masked tokens are moved behind the
    valid tokens, which do not attend to them. use_cache: whether the sequences continue after this call. Then
    the host reads the lengths, and waits for the device if there is a mask.

    first_chunk: `[N]`, index of the table's first chunk in the sequence.  chunks: chunks of the table; the
    next token's chunk is one of them.  seq_lengths: lengths after the call, with `use_cache`.
    """

    def __init__(
        self,
        x: Tensor,
        chunk: int,
        attention_mask: Tensor | None,
        past: SequenceLengths | None,
        use_cache: bool,
    ):
        N, self.T = x.shape[:2]
        if torch.jit.is_tracing():  # sizes are tensors, but a tensor `host_tokens` means different lengths
            self.T = int(self.T)
        self.chunk, self.order, self.row, self.seq_lengths = chunk, None, None, None
        start = x.new_zeros(N, dtype=torch.long) if past is None else past.tokens
        host_tokens = 0 if past is None else past.host_tokens
        new, count = self.T, self.T
        if attention_mask is not None:
            self.order, place, count = sort_valid_first(attention_mask.bool())
            self.row = place.minimum(count[:, None] - 1)
            new = count.cpu() if use_cache else self.T
        after = host_tokens + new
        if isinstance(after, Tensor) and len(after) and bool((after == after[0]).all()):
            after = int(after[0])
        self.position = None
        if past is not None:
            self.position = start % chunk
            row = torch.arange(self.T, device=x.device) if self.row is None else self.row
            self.row = row + self.position[:, None]
        self.first_chunk = start // chunk
        self.chunks = max_tokens(host_tokens % chunk + new) // chunk + 1
        if use_cache:
            self.seq_lengths = SequenceLengths(start + count, after)
            self.current_chunk = self.seq_lengths.tokens // chunk - self.first_chunk

    def scatter(self, x: Tensor, before: Tensor | None) -> Tensor:
        """x `[N, T, ...]`, placed after the tokens `before [N, chunk, ...]` of the incomplete chunk ->
        `[N, chunks, chunk, ...]`. Rows after the last token are unspecified.
        """
        rest = x.dim() - 2
        if self.order is not None:
            x = x.take_along_dim(self.order.view(*self.order.shape, *[1] * rest), 1)
        rows = self.chunks * self.chunk
        if self.position is None:
            return F.pad(x, [0, 0] * rest + [0, rows - self.T]).unflatten(1, (self.chunks, self.chunk))
        at, position = torch.arange(rows, device=x.device), self.position[:, None]
        at = at.where(at < position, self.chunk + at - position).clamp(max=self.chunk + self.T - 1)
        both = torch.cat((before.to(x.dtype), x), 1)
        return both.take_along_dim(at.view(*at.shape, *[1] * rest), 1).unflatten(1, (self.chunks, self.chunk))

    def gather(self, y: Tensor, shift: int = 0) -> Tensor:
        """y `[N, chunks, chunk, ...]` -> `[N, T, ...]`: for each token the row at offset `shift` from its
        row; a masked token gets the row of the sequence's last valid token."""
        y = y.flatten(1, 2)
        if self.row is None:
            return y[:, shift : self.T + shift]
        row = (self.row + shift).clamp(min=0)
        return y.take_along_dim(row.view(*row.shape, *[1] * (y.dim() - 2)), 1)

    def last(self, table: Tensor) -> Tensor:
        """table `[N, chunks, ...]` -> `[N, ...]`: the entry of the chunk that the next token belongs to."""
        return table[torch.arange(table.shape[0], device=table.device), self.current_chunk]
