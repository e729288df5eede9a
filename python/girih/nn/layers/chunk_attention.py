"""The attention of CAT over rows in chunks, and its key-value cache."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih import ops
from girih.nn.functional.fields import resolve_heads
from girih.nn.functional.linears import apply_linears
from girih.nn.functional.rotary import rotary_factors, rotate_row, split_and_rotate
from girih.nn.functional.state import TensorSpec, check_state, check_tensor, check_type
from girih.nn.layers.attention import attend_row
from girih.nn.layers.projections import Projection, project
from girih.nn.layers.sequence_layer import SequenceLayer

ROOM = 16  # a cache grows by this many headers: growth copies the cache, and a step reads all slots


class KeyValues(NamedTuple):
    """Rotated keys and values `[N, slots, heads, head_dim]`: chunk - 1 slots for the rows after the header of
    the current chunk, then one slot for each header."""

    k: Tensor
    v: Tensor


class ChunkRows(NamedTuple):
    """Positions of the rows of a call, and the cache of their sequences: the state of a `ChunkAttention`.

    chunk: rows of a chunk, header included.
    first: `[N]`, position of each sequence's first row; a multiple of chunk if a call has several rows.
    end: `[N]`, position after the last row that the cache stores.
    headers: largest number of headers of a sequence after the call.
    past: keys and values of all rows before `first`; None at the start.
    slot, see, turn: for a call of a single row, computed once for all layers. slot: `[N]`, slot of the row's
        key. see: additive mask of the row's scores, `[N, 1, 1, slots]`, -inf at slots that the row does not
        read.
        turn: the `rotary_factors` of the row's position, two `[N, 1, 1, D]`.
    cut: the chunks of this process, where sequences are cut over processes (`girih.distributed.chunks`).

    Without `first` each sequence begins with this call and there is no cache.
    """

    chunk: int
    first: Tensor | None = None
    end: Tensor | None = None
    headers: int = 0
    past: KeyValues | None = None
    slot: Tensor | None = None
    see: Tensor | None = None
    turn: tuple[Tensor, Tensor] | None = None
    cut: Any = None


def with_room(cache: Tensor, chunk: int, headers: int) -> Tensor:
    """cache `[N, slots, ...]` if it has slots for `headers` headers, else a copy padded with zeros."""
    more = chunk - 1 + headers - cache.shape[1]
    return F.pad(cache, (0, 0, 0, 0, 0, -(-more // ROOM) * ROOM)) if more > 0 else cache


class ChunkAttention(SequenceLayer):
    """Attention of rows in chunks; row 0 of a chunk is its header (the decoder of CAT).

    A row attends to the headers of all earlier chunks and to the rows of its own chunk up to itself. Rotary
    positions are 0..chunk-1 in every chunk; with `running_positions` chunk k starts at position k, as if each
    earlier chunk were one token. x, y `[B, rows, hidden_size]`; `cu_seqlens` counts rows, and its bounds are
    multiples of chunk. There is no mask. The state is a `ChunkRows`, whose chunk may differ from the layer's.
    With use_cache the call returns `KeyValues`. A single row is written to the state's `past` in place.

    >>> ChunkAttention(64, num_heads=2, chunk=4)(torch.randn(3, 12, 64))[0].shape
    torch.Size([3, 12, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        chunk: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float = 10000.0,
        running_positions: bool = False,
    ):
        super().__init__()
        kv_heads, head_dim = resolve_heads(
            "attention",
            hidden_size,
            num_heads,
            chunk=chunk,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope_theta=rope_theta,
            running_positions=running_positions,
        )
        self.heads, self.head_dim, self.chunk = (num_heads, kv_heads, kv_heads), head_dim, chunk
        self.rope_theta, self.running_positions = rope_theta, running_positions
        self.qkv_proj = nn.Linear(hidden_size, sum(self.heads) * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        state: ChunkRows | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, KeyValues | None]:
        if attention_mask is not None:
            raise ValueError("attention_mask: rows of chunks have no padding")
        rows = ChunkRows(self.chunk) if state is None else state
        cached = rows.first is not None
        if cached != use_cache or (cached and cu_seqlens is not None):
            raise ValueError(
                "use_cache: expected True exactly with a state that says where the rows stand (`first`), and "
                "then without cu_seqlens"
            )
        o, cache = self.core(project(self, self.input_projections(), x), rows, use_cache, cu_seqlens)
        return apply_linears(o, [self.o_proj])[0], cache

    def input_projections(self) -> tuple[Projection, ...]:
        return (Projection("qkv_proj"),)

    def check_cache(self, cache: KeyValues, sequences: int, chunk: int, name: str = "state.past") -> None:
        """Raises unless this layer can have returned the cache for chunks of `chunk` rows."""
        check_type(cache, KeyValues, name)
        check_tensor(cache.k, 4, f"{name}.k")
        slots = cache.k.shape[1]
        shape = (sequences, slots, self.heads[1], self.head_dim)
        check_state(cache, KeyValues(TensorSpec(shape), TensorSpec(shape, cache.k.dtype)), name)
        if slots < chunk:
            raise ValueError(
                f"{name}.k has {slots} slots; expected at least {chunk} for chunks of {chunk} rows"
            )

    def core(
        self, projected: Sequence[Tensor], rows: ChunkRows, use_cache: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, KeyValues | None]:
        qkv = projected[0].unflatten(-1, (-1, self.head_dim))
        past = rows.past
        if past is not None:
            self.check_cache(past, qkv.shape[0], rows.chunk)
        if past is not None and past.k.dtype != qkv.dtype:  # only one of two calls ran under autocast
            past = KeyValues(*(part.to(qkv.dtype) for part in past))
            rows = rows._replace(past=past)
        if rows.slot is not None and rows.see.dtype != qkv.dtype:
            rows = self.prepare_row(rows.chunk, rows.first, past)
        if rows.slot is not None:
            return self.step(qkv, rows).flatten(-2), past
        if rows.cut is not None:
            index = rows.cut.index.repeat_interleave(rows.chunk)
            row = torch.arange(qkv.shape[1], device=qkv.device) % rows.chunk
            position = row + index if self.running_positions else row
            q, k, v = split_and_rotate(qkv, self.heads, position, self.rope_theta)
            return rows.cut.attend(q, k, v, rows.chunk).flatten(-2), None
        cu_chunks = None if cu_seqlens is None else cu_seqlens // rows.chunk
        q, k, v = self.rotate_qk(qkv, rows, cu_chunks)
        cache = self.update_cache(k, v, rows) if use_cache else None
        if past is None:
            o = ops.cat_attention(q, k, v, chunk=rows.chunk, cu_chunks=cu_chunks)
        else:
            o = self.extend(q, k, v, rows, cache)
        return o.flatten(-2), cache

    def rotate_qk(
        self, qkv: Tensor, rows: ChunkRows, cu_chunks: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """qkv `[B, rows, sum of heads, D]` -> q and k rotated to their positions, and v."""
        row = torch.arange(qkv.shape[1], device=qkv.device)
        if rows.first is not None:
            row = row + rows.first[:, None]
        first = None
        if cu_chunks is not None:
            first = cu_chunks[torch.searchsorted(cu_chunks[1:-1], row // rows.chunk, right=True)]
        return split_and_rotate(qkv, self.heads, self.position(row, rows.chunk, first), self.rope_theta)

    def position(self, row: Tensor, chunk: int, first: Tensor | None = None) -> Tensor:
        """Rotary position of a row. first: first chunk of the row's sequence."""
        position = row % chunk
        if not self.running_positions:
            return position
        return position + row // chunk - (0 if first is None else first)

    def prepare_row(self, chunk: int, place: Tensor, past: KeyValues) -> ChunkRows:
        """The `ChunkRows` of one row of each sequence, which reads and writes `past`. place: `[N]`, position
        of the row in its sequence."""
        k, j = place // chunk, place % chunk
        at = torch.arange(past.k.shape[1], device=place.device)
        header = at - (chunk - 1)
        seen = torch.where(header < 0, at < j[:, None], header <= k[:, None])[:, None, None]
        see = torch.zeros(seen.shape, dtype=past.k.dtype, device=place.device).masked_fill(~seen, -torch.inf)
        slot = torch.where(j == 0, chunk - 1 + k, j - 1)
        position = self.position(place, chunk)[:, None, None]
        turn = rotary_factors(position, self.head_dim, self.rope_theta, past.k.dtype)
        return ChunkRows(chunk, place, past=past, slot=slot, see=see, turn=turn)

    def step(self, qkv: Tensor, rows: ChunkRows) -> Tensor:
        """Attention of one row to K + chunk slots, after its own key and value are written."""
        q, k, v = rotate_row(qkv, self.heads, rows.turn)
        sequence = torch.arange(len(q), device=q.device)
        for cache, new in zip(rows.past, (k, v), strict=True):
            cache[sequence, rows.slot] = new[:, 0]
        return attend_row(q, *rows.past, rows.see)

    def update_cache(self, k: Tensor, v: Tensor, rows: ChunkRows) -> KeyValues:
        """The cache after the rows of a call: headers of all chunks, and rows of the current chunk."""
        C, (N, T, H, D) = rows.chunk, k.shape
        sequence = torch.arange(N, device=k.device)
        chunk = rows.first[:, None] // C + torch.arange(-(-T // C), device=k.device)
        # Rows of the current chunk after its header. A new chunk has none: indices are clamped.
        own = (rows.end // C * C - rows.first)[:, None] + torch.arange(1, C, device=k.device)
        own = own.clamp(max=T - 1)[..., None, None]
        cache = []
        for new, past in zip((k, v), rows.past or (None, None), strict=True):
            if past is None:
                past = new.new_zeros(N, C - 1 + -(-rows.headers // ROOM) * ROOM, H, D)
            else:
                past = with_room(past, C, rows.headers).clone()
            past[sequence[:, None], C - 1 + chunk] = new[:, ::C]
            past[:, : C - 1] = new.take_along_dim(own, 1)
            cache.append(past)
        return KeyValues(*cache)

    def extend(self, q: Tensor, k: Tensor, v: Tensor, rows: ChunkRows, cache: KeyValues) -> Tensor:
        """Attention of rows that continue cached sequences. A row attends to the rows of its chunk up to
        itself and to the K headers of earlier chunks in the cache: T (K + chunk) scores."""
        C, (_, T, H, D), G = rows.chunk, k.shape, self.heads[0] // self.heads[1]
        K = -(-T // C)
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, K * C - T)).unflatten(1, (K, C)) for x in (q, k, v))
        q = q.unflatten(3, (H, G)) * D**-0.5
        header_k, header_v = (x[:, C - 1 :] for x in cache)
        wide = torch.promote_types(q.dtype, torch.float32)
        row = torch.arange(C, device=q.device)
        is_later = row > row[:, None]
        at = rows.first[:, None] // C + torch.arange(K, device=q.device)
        header = torch.arange(header_k.shape[1], device=q.device)
        is_masked = (header >= at[..., None])[:, None, None, :, None]  # its own header is a row of its chunk
        own = torch.einsum("nkchgd,nkehd->nhgkce", q, k).to(wide).masked_fill(is_later, -torch.inf)
        past = torch.einsum("nkchgd,nshd->nhgkcs", q, header_k).to(wide).masked_fill(is_masked, -torch.inf)
        p = torch.cat((own, past), -1).softmax(-1).to(v.dtype)
        o = torch.einsum("nhgkce,nkehd->nkchgd", p[..., :C], v)
        o = o + torch.einsum("nhgkcs,nshd->nkchgd", p[..., C:], header_v)
        return o.flatten(3, 4).flatten(1, 2)[:, :T]
