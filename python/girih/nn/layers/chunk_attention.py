"""The attention of CAT over rows in chunks, and what it keeps while a text is written."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih import ops
from girih.nn.functional.fields import heads_of
from girih.nn.functional.linears import together
from girih.nn.functional.rotary import rotary_factors, rotate_row, turned
from girih.nn.functional.step import Product
from girih.nn.layers.attention import attend_row
from girih.nn.layers.projections import projections
from girih.nn.layers.sequence_layer import SequenceLayer

ROOM = 16  # a cache grows by so many headers: rarely, as it is copied, and little, as every slot is read


class KeyValues(NamedTuple):
    """Turned keys and values `[N, slots, heads, head_dim]`: chunk - 1 slots for the rows that follow the
    current chunk's header, then one slot for each header."""

    k: Tensor
    v: Tensor


class ChunkRows(NamedTuple):
    """Where the rows of a call stand, and what their sequences keep: the state of a `ChunkAttention`.

    chunk: rows of a chunk, the header among them.
    first: `[N]`, the place of each sequence's first row; the start of a chunk if a call has several rows.
    end: `[N]`, the place after the last row that stays.
    headers: how many headers the sequences have at most after the call.
    past: keys and values of all rows before `first`; None at the start.
    slot, see, turn: of a single row, computed once for all layers. slot `[N]`: where its key goes. see
        `[N, 1, 1, slots]`: what is added to its scores, -inf at slots that it does not read. turn: two
        `[N, 1, 1, D]`, the `rotary_factors` of its position.

    Without `first` each sequence begins here and nothing is kept.
    """

    chunk: int
    first: Tensor | None = None
    end: Tensor | None = None
    headers: int = 0
    past: KeyValues | None = None
    slot: Tensor | None = None
    see: Tensor | None = None
    turn: tuple[Tensor, Tensor] | None = None


def with_room(kept: Tensor, chunk: int, headers: int) -> Tensor:
    """kept `[N, slots, ...]`, or a copy of it with slots for at least so many headers."""
    more = chunk - 1 + headers - kept.shape[1]
    return F.pad(kept, (0, 0, 0, 0, 0, -(-more // ROOM) * ROOM)) if more > 0 else kept


class ChunkAttention(SequenceLayer):
    """Attention of rows in chunks, row 0 of each its header (the decoder of CAT).

    A row sees the headers of its own and of all earlier chunks, and its own chunk up to itself. Rotary
    positions are 0..chunk-1 in every chunk; with `running_positions` chunk k starts at k, as if each earlier
    one were one token. x, y `[B, rows, hidden_size]`; `cu_seqlens` counts rows and cuts between chunks. There
    is no mask. The state is a `ChunkRows`, which may name another chunk than the layer's; with use_cache the
    `KeyValues` are returned, those of a single row written in place.

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
        kv_heads, head_dim = heads_of(
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
        o, kept = self.core(projections(self, ["qkv_proj"], x), rows, use_cache, cu_seqlens)
        return together(o, [self.o_proj])[0], kept

    def products(self) -> tuple[Product, ...]:
        return (Product(self.qkv_proj.weight),)

    def core(
        self, projected: Sequence[Tensor], rows: ChunkRows, use_cache: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, KeyValues | None]:
        qkv = projected[0].unflatten(-1, (-1, self.head_dim))
        past = rows.past
        if past is not None and past.k.dtype != qkv.dtype:  # one call was under autocast, one was not
            past = KeyValues(*(part.to(qkv.dtype) for part in past))
            rows = rows._replace(past=past)
        if rows.slot is not None and rows.see.dtype != qkv.dtype:
            rows = self.prepare_row(rows.chunk, rows.first, past)
        if rows.slot is not None:
            return self.step(qkv, rows).flatten(-2), past
        cu_chunks = None if cu_seqlens is None else cu_seqlens // rows.chunk
        q, k, v = self.rotate_qk(qkv, rows, cu_chunks)
        kept = self.keep(k, v, rows) if use_cache else None
        if past is None:
            o = ops.cat_attention(q, k, v, chunk=rows.chunk, cu_chunks=cu_chunks)
        else:
            o = self.extend(q, k, v, rows, kept)
        return o.flatten(-2), kept

    def rotate_qk(
        self, qkv: Tensor, rows: ChunkRows, cu_chunks: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of qkv `[B, rows, sum of heads, D]`, q and k turned to their places."""
        row = torch.arange(qkv.shape[1], device=qkv.device)
        if rows.first is not None:
            row = row + rows.first[:, None]
        first = None
        if cu_chunks is not None:
            first = cu_chunks[torch.searchsorted(cu_chunks[1:-1], row // rows.chunk, right=True)]
        return turned(qkv, self.heads, self.position(row, rows.chunk, first), self.rope_theta)

    def position(self, row: Tensor, chunk: int, first: Tensor | None = None) -> Tensor:
        """The rotary position of a row; first: the chunk that its sequence begins with."""
        position = row % chunk
        if not self.running_positions:
            return position
        return position + row // chunk - (0 if first is None else first)

    def prepare_row(self, chunk: int, place: Tensor, past: KeyValues) -> ChunkRows:
        """One row of each sequence, at `place [N]`, that reads `past` and writes its own keys into it."""
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
        """One row over K + chunk slots: its own key and value are written first, as it sees itself."""
        q, k, v = rotate_row(qkv, self.heads, rows.turn)
        sequence = torch.arange(len(q), device=q.device)
        for kept, new in zip(rows.past, (k, v), strict=True):
            kept[sequence, rows.slot] = new[:, 0]
        return attend_row(q, *rows.past, rows.see)

    def keep(self, k: Tensor, v: Tensor, rows: ChunkRows) -> KeyValues:
        """The cache after whole chunks of rows: their headers, and the rows of the chunk that goes on."""
        C, (N, T, H, D) = rows.chunk, k.shape
        sequence = torch.arange(N, device=k.device)
        chunk = rows.first[:, None] // C + torch.arange(-(-T // C), device=k.device)
        # The chunk of the next row; of a new one only its header is here, or not even that.
        own = (rows.end // C * C - rows.first)[:, None] + torch.arange(1, C, device=k.device)
        own = own.clamp(max=T - 1)[..., None, None]
        kept = []
        for new, past in zip((k, v), rows.past or (None, None), strict=True):
            if past is None:
                past = new.new_zeros(N, C - 1 + -(-rows.headers // ROOM) * ROOM, H, D)
            else:
                past = with_room(past, C, rows.headers).clone()
            past[sequence[:, None], C - 1 + chunk] = new[:, ::C]
            past[:, : C - 1] = new.take_along_dim(own, 1)
            kept.append(past)
        return KeyValues(*kept)

    def extend(self, q: Tensor, k: Tensor, v: Tensor, rows: ChunkRows, kept: KeyValues) -> Tensor:
        """Rows of chunks that begin after others: softmax over the own chunk's rows up to oneself and the
        headers of all earlier chunks, T (K + chunk) scores, of which K are in the cache."""
        C, (_, T, H, D), G = rows.chunk, k.shape, self.heads[0] // self.heads[1]
        K = -(-T // C)
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, K * C - T)).unflatten(1, (K, C)) for x in (q, k, v))
        q = q.unflatten(3, (H, G)) * D**-0.5
        header_k, header_v = (x[:, C - 1 :] for x in kept)
        wide = torch.promote_types(q.dtype, torch.float32)
        row = torch.arange(C, device=q.device)
        later = row > row[:, None]
        at = rows.first[:, None] // C + torch.arange(K, device=q.device)
        header = torch.arange(header_k.shape[1], device=q.device)
        unseen = (header >= at[..., None])[:, None, None, :, None]  # the own header is a row of the own chunk
        own = torch.einsum("nkchgd,nkehd->nhgkce", q, k).to(wide).masked_fill(later, -torch.inf)
        past = torch.einsum("nkchgd,nshd->nhgkcs", q, header_k).to(wide).masked_fill(unseen, -torch.inf)
        p = torch.cat((own, past), -1).softmax(-1).to(v.dtype)
        o = torch.einsum("nhgkce,nkehd->nkchgd", p[..., :C], v)
        o = o + torch.einsum("nhgkcs,nshd->nkchgd", p[..., C:], header_v)
        return o.flatten(3, 4).flatten(1, 2)[:, :T]
