"""CAT as a layer: attention to compressed earlier chunks and to the current chunk."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.nn.functional.chunks import (
    Continuation,
    SequenceLengths,
    check_seq_lengths,
    chunk_table,
    max_tokens,
)
from girih.nn.functional.fields import resolve_heads
from girih.nn.functional.masking import check_mask
from girih.nn.functional.packing import check_packing
from girih.nn.functional.state import TensorSpec, check_state, check_type, current_pieces, map_state
from girih.nn.layers.chunk_attention import ChunkAttention, ChunkRows, KeyValues, with_room
from girih.nn.layers.mixers import register_layer
from girih.nn.layers.projections import Projection, project
from girih.nn.layers.sequence_layer import SequenceLayer

COMPRESS = (Projection("compress"),)


class CompressAttendState(NamedTuple):
    """x: `[N, C, hidden_size]`, inputs of the current chunk.  header: `[N, hidden_size]`, its header.  kv:
    keys and values of its tokens and of all headers.  seq_lengths: lengths of the sequences."""

    x: Tensor
    header: Tensor
    kv: KeyValues
    seq_lengths: SequenceLengths

    def stepped(self) -> tuple[tuple, "CompressAttendState"] | None:
        """The kind of a step is the number of chunks that it compresses (`functional.state.stepped`)."""
        C = self.x.shape[1]
        seq_lengths = self.seq_lengths._replace(host_tokens=self.seq_lengths.host_tokens + 1)
        if self.kv.k.shape[1] <= C + max_tokens(seq_lengths.host_tokens) // C:
            return None
        return seq_lengths.step_kind(C), self._replace(seq_lengths=seq_lengths)


class CompressAttend(SequenceLayer):
    """Compress and attend (CAT) as a layer: later chunks attend to a chunk of C tokens by one header.

        header_0 learned,   header_k = W_c [x_{(k-1)C} ... x_{kC-1}]
        chunk k:  [header_k, x_{kC}, ..., x_{kC+C-1}]

    A token attends to headers 0..k and to its chunk up to itself. x, y `[B, T, hidden_size]`. Padded and
    packed sequences are first placed in whole chunks. The state has a slot for each header and for each token
    of one chunk, 1/C of a Transformer's cache. A decoding step attends to these slots, and compresses a
    complete chunk by one product with W_c. `torch.export` with a dynamic T of at least C needs
    `prefer_deferred_runtime_asserts_over_guards=True`, because C may or may not divide T.

    >>> layer = CompressAttend(64, num_heads=2, chunk=4)
    >>> y, state = layer(torch.randn(3, 10, 64), use_cache=True)
    >>> y.shape, layer(torch.randn(3, 1, 64), state=state, use_cache=True)[0].shape
    (torch.Size([3, 10, 64]), torch.Size([3, 1, 64]))
    """

    undecayed = ("header",)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        chunk: int = 16,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float = 10000.0,
        running_positions: bool = False,
    ):
        super().__init__()
        resolve_heads(
            "cat",
            hidden_size,
            num_heads,
            chunk=chunk,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope_theta=rope_theta,
            running_positions=running_positions,
        )
        self.chunk = chunk
        self.header = nn.Parameter(torch.empty(hidden_size))
        self.compress = nn.Linear(chunk * hidden_size, hidden_size, bias=False)
        self.attention = ChunkAttention(
            hidden_size,
            num_heads,
            chunk=chunk + 1,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope_theta=rope_theta,
            running_positions=running_positions,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.header)

    def check_state(
        self, state: CompressAttendState | None, x: Tensor, cu_seqlens: Tensor | None = None
    ) -> None:
        """Raises unless state is None or a state of this layer for the sequences of x `[B, T, ...]`."""
        if state is None:
            return
        check_type(state, CompressAttendState)
        N, width = x.shape[0], x.shape[2]
        check_state(state.x, TensorSpec((N, self.chunk, width)), "state.x")
        check_state(state.header, TensorSpec((N, width)), "state.header")
        self.attention.check_cache(state.kv, N, self.chunk + 1, "state.kv")
        check_seq_lengths(state.seq_lengths, N)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        state: CompressAttendState | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, CompressAttendState | None]:
        check_mask(x, attention_mask, cu_seqlens)
        check_packing(x, cu_seqlens)
        if (pieces := current_pieces.get()) is not None:
            return self.read_piece(x, attention_mask, pieces), None
        if cu_seqlens is not None:
            if use_cache or state is not None:
                raise ValueError(
                    "cu_seqlens: CAT has no cache for packed sequences; call it with use_cache=False"
                )
            table = chunk_table(x, self.chunk, cu_seqlens)
            tokens = table.scatter(x, self.chunk)
            headers = self.headers(tokens, self.header, table.first)
            y, _ = self.attend(headers, tokens, None, table.cu_chunks)
            return table.gather(y), None
        self.check_state(state, x)
        if state is not None and attention_mask is None and x.shape[1] == 1:
            in_place = use_cache and not torch.is_grad_enabled()
            y, state = self.step(x, state if in_place else map_state(torch.clone, state))
            return y, state if use_cache else None
        past = state is not None
        needs_cache = use_cache or past
        table = Continuation(x, self.chunk, attention_mask, state.seq_lengths if past else None, needs_cache)
        tokens = table.scatter(x, state.x if past else None)
        headers = self.headers(tokens, state.header[:, None] if past else self.header)
        rows = None
        if needs_cache:
            C = self.chunk + 1
            n = table.seq_lengths.tokens
            end = n // self.chunk * C + n % self.chunk + 1
            # All rows of the table have slots, including rows after a sequence's last token.
            room = table.chunks + (max_tokens(state.seq_lengths.host_tokens) // self.chunk if past else 0)
            rows = ChunkRows(C, table.first_chunk * C, end, room, state.kv if past else None)
        y, kv = self.attend(headers, tokens, rows, None)
        y = table.gather(y)
        if attention_mask is not None:  # a masked token may have no valid token before it
            y = y.masked_fill(~attention_mask.bool()[..., None], 0)
        if not use_cache:
            return y, None
        return y, CompressAttendState(table.last(tokens), table.last(headers), kv, table.seq_lengths)

    def read_piece(self, x: Tensor, attention_mask: Tensor | None, pieces: Any) -> Tensor:
        """`forward` of a piece of sequences that are cut over processes."""
        from girih.distributed.chunks import ChunkCut

        cut = ChunkCut.of_layer(pieces, self.chunk, x, attention_mask)
        tokens = cut.to_chunks(x)
        headers = cut.shift_chunks(project(self, COMPRESS, tokens.flatten(2))[0])
        headers = torch.where((cut.index == 0)[:, None], self.header.to(headers.dtype), headers)
        rows = torch.cat((headers[:, :, None], tokens), 2)
        y, _ = self.attention(rows.flatten(1, 2), None, ChunkRows(self.chunk + 1, cut=cut))
        return cut.to_tokens(y.view_as(rows)[:, :, 1:])

    def headers(self, tokens: Tensor, first: Tensor, where: Tensor | None = None) -> Tensor:
        """tokens `[B, K, C, hidden_size]` -> header of each chunk, `[B, K, hidden_size]`: `first` where
        `where [K]` is true (default: at chunk 0), else the compression of the preceding chunk."""
        # The compression of the last chunk is dropped. Without computing it, K = 1 would be a special case of
        # the shapes, and torch.export would not accept a dynamic T.
        headers = F.pad(project(self, COMPRESS, tokens.flatten(2))[0], (0, 0, 1, 0))[:, :-1]
        if where is None:
            where = torch.arange(tokens.shape[1], device=tokens.device) == 0
        return torch.where(where[:, None], first.to(headers.dtype), headers)

    def attend(
        self, headers: Tensor, tokens: Tensor, state: ChunkRows | None, cu_chunks: Tensor | None
    ) -> tuple[Tensor, KeyValues | None]:
        """headers `[B, K, hidden_size]` and tokens `[B, K, C, ...]` -> outputs of the tokens,
        `[B, K, C, ...]`."""
        rows = torch.cat((headers[:, :, None], tokens), 2)
        cu_rows = None if cu_chunks is None else cu_chunks * (self.chunk + 1)
        y, kv = self.attention(rows.flatten(1, 2), None, state, state is not None, cu_rows)
        return y.view_as(rows)[:, :, 1:], kv

    def step(self, x: Tensor, state: CompressAttendState) -> tuple[Tensor, CompressAttendState]:
        """One token x `[N, 1, hidden_size]` of each sequence; writes the state's tensors in place."""
        C, n, host_tokens = self.chunk, state.seq_lengths.tokens, state.seq_lengths.host_tokens + 1
        kv = KeyValues(*(with_room(part, C + 1, max_tokens(host_tokens) // C + 1) for part in state.kv))
        sequence = torch.arange(x.shape[0], device=x.device)
        state.x[sequence, n % C] = x[:, 0].to(state.x.dtype)
        place = n // C * (C + 1) + n % C + 1
        n.add_(1)
        seq_lengths = SequenceLengths(n, host_tokens)
        if (compressions := seq_lengths.find_compressions(C)) is not None:
            # The header of the next chunk. The current token does not attend to it.
            sequences = compressions.sequences
            header, k = project(self, COMPRESS, state.x[sequences].flatten(1))[0], n[sequences] // C
            state.header[sequences] = compressions.select(header, state.header[sequences])
            qkv = project(self.attention, self.attention.input_projections(), header[:, None])[0]
            at = ChunkRows(C + 1, k * (C + 1))
            _, *new = self.attention.rotate_qk(qkv.unflatten(-1, (-1, self.attention.head_dim)), at)
            for cache, part in zip(kv, new, strict=True):
                slot = sequence[sequences], C + k
                cache[slot] = compressions.select(part[:, 0], cache[slot])
        y, kv = self.attention(x, None, self.attention.prepare_row(C + 1, place, kv), True)
        return y, CompressAttendState(state.x, state.header, kv, seq_lengths)


register_layer(
    "cat",
    CompressAttend,
    "num_kv_heads",
    "head_dim",
    "chunk",
    "rope_theta",
    "running_positions",
)
