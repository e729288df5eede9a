"""CAT: attention to compressed past chunks and to the own chunk, as a layer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih import ops
from girih.nn.attention import rotary
from girih.nn.attention_call import SequenceLayer
from girih.nn.chunks import chunk_table
from girih.nn.masking import check_mask
from girih.nn.mixers import register_layer
from girih.nn.packing import check_packing
from girih.nn.state import History, extended


class ChunkAttention(SequenceLayer):
    """Attention of rows in chunks, row 0 of each its header (the decoder of CAT).

    A row sees the headers of its own and of all earlier chunks, and its own chunk up to itself. Rotary
    positions are 0..chunk-1 in every chunk; with `running_positions` chunk k starts at k, as if each earlier
    one were one token. x, y `[B, rows, hidden_size]`; `cu_seqlens` counts rows and cuts between chunks. There
    is no mask and no state.

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
        kv_heads, head_dim = num_kv_heads or num_heads, head_dim or hidden_size // num_heads
        self.heads, self.head_dim, self.chunk = (num_heads, kv_heads, kv_heads), head_dim, chunk
        self.rope_theta, self.running_positions = rope_theta, running_positions
        self.qkv_proj = nn.Linear(hidden_size, sum(self.heads) * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        state: None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None or state is not None or use_cache:
            raise ValueError(
                "attention_mask, state, use_cache: rows of chunks have neither padding nor a state"
            )
        cu_chunks = None if cu_seqlens is None else cu_seqlens // self.chunk
        row = torch.arange(x.shape[1], device=x.device)
        position = row % self.chunk
        if self.running_positions:
            k = row // self.chunk
            if cu_chunks is not None:
                k = k - cu_chunks[torch.searchsorted(cu_chunks[1:-1], k, right=True)]
            position = position + k
        q, k, v = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).split(self.heads, 2)
        q, k = rotary(q, position, self.rope_theta), rotary(k, position, self.rope_theta)
        o = ops.cat_attention(q, k, v, chunk=self.chunk, cu_chunks=cu_chunks)
        return self.o_proj(o.flatten(-2)), None


class CompressAttend(SequenceLayer):
    """A chunk of C tokens becomes one header for all later ones: compress and attend (CAT), as a layer.

        header_0 learned,   header_k = W_c [x_{(k-1)C} ... x_{kC-1}]
        chunk k:  [header_k, x_{kC}, ..., x_{kC+C-1}]

    A token sees headers 0..k and its own chunk up to itself. x, y `[B, T, hidden_size]`. Padded and packed
    sequences are laid on whole chunks of their own first. The state keeps the inputs, and a call computes the
    layer anew. `torch.export` takes a dynamic T from C on with
    `prefer_deferred_runtime_asserts_over_guards=True`, as C divides T or not.

    >>> layer = CompressAttend(64, num_heads=2, chunk=4)
    >>> layer(torch.randn(3, 10, 64))[0].shape
    torch.Size([3, 10, 64])
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

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        state: History | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, History | None]:
        check_mask(x, attention_mask, cu_seqlens)
        check_packing(x, cu_seqlens)
        if cu_seqlens is not None and (use_cache or state is not None):
            raise ValueError(
                "cu_seqlens: CAT keeps no cache of packed sequences; call it with use_cache=False"
            )
        x, valid, new = extended(x, attention_mask, state)
        if valid is None and cu_seqlens is None:
            # At least one row of padding: whether chunks are full must not show in a shape, or torch.export
            # takes no dynamic T.
            T, K = x.shape[1], x.shape[1] // self.chunk + 1
            tokens = F.pad(x, (0, 0, 0, K * self.chunk - T)).unflatten(1, (K, self.chunk))
            y = self.attend(tokens, torch.arange(K, device=x.device) == 0, None).flatten(1, 2)[:, :T]
        else:
            table = chunk_table(x, self.chunk, valid, cu_seqlens)
            tokens = table.spread(x, self.chunk)
            y = table.gather(self.attend(tokens, table.first, table.cu_chunks), x.shape[:2])
        return y[:, -new:], History(x, valid) if use_cache else None

    def attend(self, tokens: Tensor, first: Tensor, cu_chunks: Tensor | None) -> Tensor:
        """tokens `[B, K, C, hidden_size]` of sequences whose first chunks are marked in `first [K]`."""
        before = F.pad(self.compress(tokens.flatten(2)), (0, 0, 1, 0))[:, :-1]
        header = torch.where(first[:, None], self.header.to(before.dtype), before)
        rows = torch.cat((header[:, :, None], tokens), 2)
        cu_rows = None if cu_chunks is None else cu_chunks * (self.chunk + 1)
        y, _ = self.attention(rows.flatten(1, 2), cu_seqlens=cu_rows)
        return y.view_as(rows)[:, :, 1:]


register_layer(
    "cat",
    CompressAttend,
    "num_kv_heads",
    "head_dim",
    "chunk",
    "rope_theta",
    "running_positions",
    tasks=("text",),
)
