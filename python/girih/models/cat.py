"""CAT, the compress and attend transformer, as a whole model."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from girih.distributed.chunks import ChunkCut
from girih.distributed.context import cut_tokens
from girih.models.base import Backbone
from girih.models.cache import GirihCache
from girih.models.config import GirihConfig
from girih.nn import Attention, Block, ChunkAttention, ChunkRows, RMSNorm, map_state
from girih.nn.functional.chunks import (
    Continuation,
    SequenceLengths,
    check_seq_lengths,
    chunk_table,
    max_tokens,
)
from girih.nn.functional.fused import is_plain_linear
from girih.nn.functional.masking import check_mask, select_current_mask
from girih.nn.functional.state import TensorSpec, check_state, check_tensor
from girih.nn.layers.chunk_attention import KeyValues, with_room


class Compressor(nn.Module):
    """f(c): compresses a chunk of C tokens to one vector of the decoder's width.

    chunks `[B, K, C]`, index `[K]` or `[B, K]`, the index of a chunk in its sequence -> `[B, K,
    hidden_size]`. A learned vector for the chunk's index precedes the embedded tokens. Bidirectional blocks
    and a norm follow. A linear map of the C concatenated token outputs gives the result.

    With several chunk lengths each length has its own columns of the map, and indices are counted in chunks
    of the shortest length, so that an index means the same token for all lengths.
    """

    def __init__(self, config: GirihConfig):
        super().__init__()
        width = config.compressor_hidden_size
        heads, intermediate = width // config.head_dim, config.intermediate_size * width // config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.chunks = config.chunks or [config.chunk]
        self.position = nn.Embedding(-(-config.max_position_embeddings // self.chunks[0]), width)
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
        self.proj = nn.Linear(sum(self.chunks) * width, config.hidden_size, bias=False)

    def forward(self, chunks: Tensor, index: Tensor, run_blocks: Callable) -> Tensor:
        B, K, C = chunks.shape
        # An index of -1 belongs to a sequence in its first chunk; the result is discarded.
        position = (index * (C // self.chunks[0])).clamp(0, self.position.num_embeddings - 1)
        position = self.position(position).expand(B, K, -1)
        x = torch.cat((position[:, :, None], self.embed_tokens(chunks)), 2).flatten(0, 1)
        x = self.norm(run_blocks(self.layers, x, lambda _: ())[0][-1])[:, 1:].flatten(1)
        if len(self.chunks) == 1:
            return self.proj(x).unflatten(0, (B, K))
        before = sum(self.chunks[: self.chunks.index(C)]) * self.norm.weight.shape[0]
        if is_plain_linear(self.proj):
            return F.linear(x, self.proj.weight[:, before : before + x.shape[1]]).unflatten(0, (B, K))
        # A quantized map or one with adapters cannot be sliced: the columns of other lengths read zeros.
        after = sum(self.chunks) * self.norm.weight.shape[0] - before - x.shape[1]
        return self.proj(F.pad(x, (before, after))).unflatten(0, (B, K))


class CatState(NamedTuple):
    """ids: `[N, C]`, tokens of the current chunk.  header: `[N, hidden_size]`, its header.  kv: for each
    layer the keys and values of the current chunk's rows and of all headers.  seq_lengths: lengths of the
    sequences.
    """

    ids: Tensor
    header: Tensor
    kv: tuple[KeyValues, ...]
    seq_lengths: SequenceLengths

    def with_room(self, tokens: int) -> "CatState":
        """The state with slots for sequences of `tokens` tokens. Steps up to this length allocate no tensors,
        which their CUDA graphs require."""
        C = self.ids.shape[1]
        return self._replace(kv=map_state(lambda part: with_room(part, C, tokens // C + 1), self.kv))

    def stepped(self) -> tuple[tuple, "CatState"] | None:
        """The kind of a step is the number of chunks that it compresses (`functional.state.stepped`)."""
        C = self.ids.shape[1]
        seq_lengths = self.seq_lengths._replace(host_tokens=self.seq_lengths.host_tokens + 1)
        if self.kv[0].k.shape[1] < C + max_tokens(seq_lengths.host_tokens) // C:
            return None
        return seq_lengths.step_kind(C), self._replace(seq_lengths=seq_lengths)


class CatModel(Backbone):
    """The compressor and the decoder of CAT. The output at a token predicts the next token.

    Chunk k has the rows `[header_k, x_{kC}, ..., x_{kC+C-2}]`, header_k = f(c_{k-1}), header_0 learned. The
    decoder does not read the last token of a chunk; the next header replaces it. Row r of a sequence predicts
    token r, so the output at token t is row t + 1. `Backbone` documents the arguments; inputs_embeds is not
    accepted.

    The cache of each layer has slots for K headers and the rows of one chunk. A decoding step computes one
    row, and a step that completes a chunk calls the compressor once. The host knows the lengths of the
    sequences, so a cached call with a mask waits for the device.

    Adaptive CAT, with `config.chunks`: `chunk` is the chunk length of this call. Default: the cache's;
    without a cache, in training a random one of `config.chunks` from torch's generator, else `config.chunk`.
    Each length has its own header_0, from which the decoder knows the length, and its own columns of the
    compressor's map.
    """

    undecayed = ("header",)

    def __init__(self, config: GirihConfig):
        super().__init__(config)
        self.chunks = config.chunks or [config.chunk]
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        lengths = [len(self.chunks)] if config.chunks else []
        self.header = nn.Parameter(torch.empty(*lengths, config.hidden_size))
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

    def choose_chunk(self, chunk: int | None, cache_chunk: int | None) -> int:
        """The chunk length of a call. cache_chunk: that of the cache, or None."""
        if chunk is None:
            if cache_chunk is not None:
                return cache_chunk
            if self.training and len(self.chunks) > 1:
                return self.chunks[int(torch.randint(len(self.chunks), ()))]
            return self.config.chunk
        if chunk not in self.chunks:
            raise ValueError(
                f"chunk is {chunk!r}; expected one of {', '.join(map(str, self.chunks))}, "
                "which the model was made for (chunks in its configuration)"
            )
        if cache_chunk is not None and chunk != cache_chunk:
            raise ValueError(f"chunk is {chunk}; expected {cache_chunk}, with which the cache was begun")
        return chunk

    def compute_hidden_states(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        cache: GirihCache | None,
        cu_seqlens: Tensor | None,
        chunk: int | None,
    ) -> list[Tensor]:
        refuse_embeds(inputs_embeds)
        if cu_seqlens is not None and cache is not None:
            raise ValueError(
                "cu_seqlens: CAT has no cache for packed sequences; call it with use_cache=False"
            )
        T = input_ids.shape[1]
        mask = select_current_mask(attention_mask, T)
        check_mask(input_ids, mask, cu_seqlens)
        if cu_seqlens is not None:
            C = self.choose_chunk(chunk, None)
            table = chunk_table(input_ids, C, cu_seqlens, room=1)
            chunks = table.scatter(input_ids, C)
            headers = self.headers(chunks, self.first_header(C), table.index, table.first[None, :, None])
            rows, _ = self.decode(headers, chunks, ChunkRows(C), table.cu_chunks * C)
            return [table.gather(x, shift=1) for x in rows]
        if cache is None:
            return self.read(input_ids, mask, None, self.choose_chunk(chunk, None), use_cache=False)[0]
        layer = cache.layers[0]
        if layer.state is not None:
            self.check_state(layer.state, input_ids.shape[0])
        # A cache that was cropped into its first call has no state, only tokens to reread.
        C = self.choose_chunk(chunk, layer.chunk if layer.state is None else layer.state.ids.shape[1])
        all_hidden = layer.run(lambda *call: self.read(*call, C), input_ids, mask)
        layer.chunk = C
        return all_hidden

    def forward_piece(
        self,
        group: Any,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: GirihCache | None,
        use_cache: bool | None,
        *,
        output_hidden_states: bool | None,
        return_dict: bool | None,
        chunk: int | None,
    ) -> BaseModelOutputWithPast | tuple:
        """Every rank has all tokens, so it compresses the chunks before its own ones itself. The attentions
        gather headers, and the outputs move to the ranks of their tokens."""
        self.check_piece(cache, use_cache)
        refuse_embeds(inputs_embeds)
        mask = select_current_mask(attention_mask, input_ids.shape[1])
        check_mask(input_ids, mask, cu_seqlens)
        if cu_seqlens is None:
            self.check_length(input_ids.shape[1])
        C = self.choose_chunk(chunk, None)
        if chunk is None and len(self.chunks) > 1:
            C = chunk_of_first_rank(C, group)
        pieces = cut_tokens(group, input_ids.shape[1], cu_seqlens)
        cut = ChunkCut.make(pieces, C, input_ids, mask, shift=1)
        chunks, index = cut.place(input_ids, mask), cut.index
        past = self.compressor(F.pad(chunks, (0, 0, 1, 0))[:, cut.own], index - 1, self.run_blocks)
        headers = torch.where((index == 0)[:, None], self.first_header(C).to(past.dtype), past)
        all_hidden, _ = self.decode(headers, chunks[:, cut.own], ChunkRows(C, cut=cut), None)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        found = [cut.to_tokens(x) for x in all_hidden[0 if output_hidden_states else -1 :]]
        return self.make_output(found, None, output_hidden_states, return_dict)

    def is_capturable_step(self, cache: GirihCache, chunk: int | None) -> bool:
        layer = cache.layers[0]
        return (
            chunk in (None, layer.chunk)
            and isinstance(layer.state, CatState)
            and isinstance(layer.state.seq_lengths, SequenceLengths)
            and max_tokens(layer.state.seq_lengths.host_tokens) < self.config.max_position_embeddings
        )

    def check_state(self, state: CatState, sequences: int) -> None:
        """Raises unless this model can have returned the state for this number of sequences."""
        if not isinstance(state, CatState):
            raise ValueError(
                f"state is a {type(state).__name__}; expected a CatState; pass the state that this model "
                "returned"
            )
        check_tensor(state.ids, 2, "state.ids")
        C = state.ids.shape[1]
        if C not in self.chunks:
            raise ValueError(
                f"state.ids has chunks of {C} tokens; expected one of {', '.join(map(str, self.chunks))}"
            )
        dtype = torch.int32 if state.ids.dtype == torch.int32 else torch.int64
        check_state(state.ids, TensorSpec((sequences, C), dtype), "state.ids")
        check_state(state.header, TensorSpec((sequences, self.config.hidden_size)), "state.header")
        if not isinstance(state.kv, tuple) or len(state.kv) != len(self.layers):
            size = f" of {len(state.kv)} parts" if isinstance(state.kv, tuple) else ""
            raise ValueError(
                f"state.kv is a {type(state.kv).__name__}{size}; expected a tuple of {len(self.layers)} "
                "KeyValues; pass the state that this model returned"
            )
        for i, (block, kv) in enumerate(zip(self.layers, state.kv, strict=True)):
            block.mixer.check_cache(kv, sequences, C, f"state.kv.{i}")
        check_seq_lengths(state.seq_lengths, sequences)

    def check_length(self, tokens: int) -> None:
        if tokens > self.config.max_position_embeddings:
            raise ValueError(
                f"input_ids has {tokens} tokens; expected at most max_position_embeddings, "
                f"{self.config.max_position_embeddings}"
            )

    def read(
        self, ids: Tensor, mask: Tensor | None, state: CatState | None, C: int, use_cache: bool = True
    ) -> tuple[list[Tensor], CatState | None]:
        """Computes `all_hidden` and the state of tokens `[N, T]` that follow those of `state`; C: chunk
        length."""
        T = ids.shape[1]
        # Counts masked tokens too: the number of valid tokens is on the device.
        self.check_length(T + (0 if state is None else max_tokens(state.seq_lengths.host_tokens)))
        if state is not None and mask is None and T == 1:
            return self.step(ids, state)
        return self.read_tokens(ids, mask, state, C, use_cache)

    def read_tokens(
        self, ids: Tensor, mask: Tensor | None, state: CatState | None, C: int, use_cache: bool
    ) -> tuple[list[Tensor], CatState | None]:
        """`read` for several tokens or a mask: reads the incomplete chunk again from its start."""
        has_past = state is not None
        table = Continuation(ids, C, mask, state.seq_lengths if has_past else None, use_cache)
        chunks = table.scatter(ids, state.ids if has_past else None)
        index = table.first_chunk[:, None] + torch.arange(table.chunks, device=ids.device)
        first = state.header[:, None] if has_past else self.first_header(C)
        headers = self.headers(chunks, first, index, (index == index[:, :1])[..., None])
        rows = ChunkRows(C)
        if use_cache:
            room = table.chunks + (max_tokens(state.seq_lengths.host_tokens) // C if has_past else 0)
            rows = ChunkRows(C, table.first_chunk * C, table.seq_lengths.tokens + 1, room)
        all_hidden, kv = self.decode(headers, chunks, rows, None, state.kv if has_past else None)
        all_hidden = [table.gather(x, shift=1) for x in all_hidden]
        if not use_cache:
            return all_hidden, None
        return all_hidden, CatState(table.last(chunks), table.last(headers), kv, table.seq_lengths)

    def step(self, ids: Tensor, state: CatState) -> tuple[list[Tensor], CatState]:
        """`read` for one token `[N, 1]` of each sequence. Its row is the token, or the header of the next
        chunk if the token completes a chunk. Writes the state's tensors in place, except with gradients
        enabled."""
        if torch.is_grad_enabled():
            state = map_state(torch.clone, state)
        C, n, host_tokens = state.ids.shape[1], state.seq_lengths.tokens, state.seq_lengths.host_tokens + 1
        state = state.with_room(max_tokens(host_tokens))
        sequence = torch.arange(ids.shape[0], device=ids.device)
        state.ids[sequence, n % C] = ids[:, 0]
        n.add_(1)
        seq_lengths = SequenceLengths(n, host_tokens)
        x = self.embed_tokens(ids)
        if (compressions := seq_lengths.find_compressions(C)) is not None:
            sequences = compressions.sequences
            index = (n[sequences] // C - 1)[:, None]
            header = self.compressor(state.ids[sequences][:, None], index, self.run_blocks)
            state.header[sequences] = compressions.select(header[:, 0], state.header[sequences])
            x = x.index_put((sequence[sequences],), compressions.select(header, x[sequences]))
        all_hidden, kv = [x], []
        rows = self.layers[0].mixer.prepare_row(C, n, state.kv[0])
        for block, past in zip(self.layers, state.kv, strict=True):
            x, layer_kv = self.run_block(block, all_hidden[-1], None, rows._replace(past=past), True, None)
            all_hidden.append(x)
            kv.append(layer_kv)
        all_hidden[-1] = self.norm(all_hidden[-1])
        return all_hidden, CatState(state.ids, state.header, tuple(kv), seq_lengths)

    def first_header(self, chunk: int) -> Tensor:
        return self.header if self.header.dim() == 1 else self.header[self.chunks.index(chunk)]

    def headers(self, chunks: Tensor, first: Tensor, index: Tensor, where: Tensor) -> Tensor:
        """chunks `[B, K, C]` with indices `index [K]` or `[B, K]` -> header of each chunk,
        `[B, K, hidden_size]`: `first` where `where` is true, else the compression of the preceding chunk. The
        last chunk is not compressed."""
        past = self.compressor(chunks[:, :-1], index[..., :-1], self.run_blocks)
        return torch.where(where, first.to(past.dtype), F.pad(past, (0, 0, 1, 0)))

    def decode(
        self,
        headers: Tensor,
        chunks: Tensor,
        rows: ChunkRows,
        cu_rows: Tensor | None,
        kv: tuple[KeyValues, ...] | None = None,
    ) -> tuple[list[Tensor], tuple[KeyValues, ...]]:
        """headers `[B, K, hidden_size]` and chunks `[B, K, C]` -> the input rows `[B, K, C, hidden_size]` of
        each block, then the output of the final norm; and the keys and values of each layer."""
        tokens = self.embed_tokens(chunks[:, :, :-1])
        x = torch.cat((headers[:, :, None].to(tokens.dtype), tokens), 2)

        def arguments(i: int) -> tuple:
            state = rows if kv is None else rows._replace(past=kv[i])
            return None, state, rows.first is not None, cu_rows

        all_hidden, layer_kv = self.run_blocks(self.layers, x.flatten(1, 2), arguments)
        all_hidden[-1] = self.norm(all_hidden[-1])
        return [y.view(x.shape) for y in all_hidden], tuple(layer_kv)


def refuse_embeds(inputs_embeds: Tensor | None) -> None:
    if inputs_embeds is not None:
        raise ValueError("inputs_embeds: CAT's compressor and decoder embed the tokens apart; give input_ids")


def chunk_of_first_rank(chunk: int, group: dist.ProcessGroup) -> int:
    """The chunk length that the first rank of a group has chosen: it may be random."""
    found = [chunk]
    dist.broadcast_object_list(found, group=group, group_src=0)
    return found[0]
