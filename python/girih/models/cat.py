"""CAT, the compress and attend transformer, as a whole model."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.models.base import Backbone
from girih.models.cache import GirihCache
from girih.models.config import GirihConfig
from girih.nn import Attention, Block, ChunkAttention, RMSNorm
from girih.nn.attention_call import own_mask
from girih.nn.chunks import chunk_table
from girih.nn.masking import check_mask
from girih.nn.state import History, extended


class Compressor(nn.Module):
    """f(c): a chunk of C tokens as one vector of the decoder's width.

    A learned token for the chunk's place in its sequence stands in front of the chunk's tokens; bidirectional
    blocks and a norm follow, then one linear map of the C token outputs side by side.
    chunks `[B, K, C]`, index `[K]` -> `[B, K, hidden_size]`.
    """

    def __init__(self, config: GirihConfig):
        super().__init__()
        width = config.compressor_hidden_size
        heads, intermediate = width // config.head_dim, config.intermediate_size * width // config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.position = nn.Embedding(-(-config.max_position_embeddings // config.chunk), width)
        self.layers = nn.ModuleList(
            Block(
                Attention(width, heads, head_dim=config.head_dim, rope_theta=config.rope_theta, causal=False),
                width,
                intermediate,
                config.norm_eps,
            )
            for _ in range(config.compressor_layers)
        )
        self.norm = RMSNorm(width, config.norm_eps)
        self.proj = nn.Linear(config.chunk * width, config.hidden_size, bias=False)

    def forward(self, chunks: Tensor, index: Tensor, run_block) -> Tensor:
        B, K, _ = chunks.shape
        place = self.position(index.clamp(max=self.position.num_embeddings - 1)).expand(B, K, -1)
        x = torch.cat((place[:, :, None], self.embed_tokens(chunks)), 2).flatten(0, 1)
        for block in self.layers:
            x, _ = run_block(block, x)
        return self.proj(self.norm(x)[:, 1:].flatten(1)).unflatten(0, (B, K))


class CatModel(Backbone):
    """Compressor and decoder of CAT; the output at a token predicts the next one, as in any causal model.

    Chunk k is the rows `[header_k, x_{kC}, ..., x_{kC+C-2}]`: header_k = f(c_{k-1}), header_0 is learned, and
    a chunk's last token is never fed. Row r of a sequence predicts its token r, so token t's output is row t
    + 1. A `Backbone`, whose arguments it takes but inputs_embeds. The cache keeps the tokens, and a call
    computes all of them anew.
    """

    undecayed = ("header",)

    def __init__(self, config: GirihConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.header = nn.Parameter(torch.empty(config.hidden_size))
        self.compressor = Compressor(config)
        self.layers = nn.ModuleList(
            Block(
                ChunkAttention(
                    config.hidden_size,
                    config.num_heads,
                    chunk=config.chunk,
                    num_kv_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                    rope_theta=config.rope_theta,
                    running_positions=config.running_positions,
                ),
                config.hidden_size,
                config.intermediate_size,
                config.norm_eps,
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.header, std=self.config.initializer_range)

    def hidden_states(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        cache: GirihCache | None,
        cu_seqlens: Tensor | None,
    ) -> list[Tensor]:
        if inputs_embeds is not None:
            raise ValueError(
                "inputs_embeds: CAT's compressor and decoder embed the tokens apart; give input_ids"
            )
        if cu_seqlens is not None and cache is not None:
            raise ValueError(
                "cu_seqlens: CAT keeps no cache of packed sequences; call it with use_cache=False"
            )
        past = None if cache is None else cache.layers[0]
        mask = own_mask(attention_mask, input_ids.shape[1])
        check_mask(input_ids, mask, cu_seqlens)
        ids, valid, new = extended(input_ids, mask, None if past is None else past.state)
        C, T = self.config.chunk, ids.shape[1]
        # Masked tokens count here: how many are valid is not known without a wait, nor are packed lengths.
        most = self.config.max_position_embeddings
        if cu_seqlens is None and most < T:
            raise ValueError(f"input_ids has {T} tokens; expected at most max_position_embeddings, {most}")
        if past is not None:
            past.advance(History(ids, valid), new)
        if valid is None and cu_seqlens is None:
            K = T // C + 1
            chunks, index = (
                F.pad(ids, (0, K * C - T)).unflatten(1, (K, C)),
                torch.arange(K, device=ids.device),
            )
            every = [y.flatten(1, 2)[:, 1 : T + 1] for y in self.decode(chunks, index, None)]
        else:
            table = chunk_table(ids, C, valid, cu_seqlens, room=1)
            rows = self.decode(table.spread(ids, C), table.index, table.cu_chunks * C)
            every = [table.gather(y, ids.shape, shift=1) for y in rows]
        return [y[:, T - new :] for y in every]

    def decode(self, chunks: Tensor, index: Tensor, cu_rows: Tensor | None) -> list[Tensor]:
        """chunks `[B, K, C]` at the places `index [K]` -> the rows `[B, K, C, hidden_size]` before and after
        each block.

        The last chunk is nobody's past, so it is not compressed. The last entry has passed the final norm.
        """
        past = self.compressor(chunks[:, :-1], index[:-1], self.run_block)
        header = torch.where(index[:, None] == 0, self.header.to(past.dtype), F.pad(past, (0, 0, 1, 0)))
        tokens = self.embed_tokens(chunks[:, :, :-1])
        rows = torch.cat((header[:, :, None].to(tokens.dtype), tokens), 2)
        every = [rows.flatten(1, 2)]
        for block in self.layers:
            every.append(self.run_block(block, every[-1], None, None, False, cu_rows)[0])
        every[-1] = self.norm(every[-1])
        return [x.view_as(rows) for x in every]
