"""Softmax attention with rotary positions and a key-value cache."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih._torch_internals import register_dataclass
from girih.nn.functional.fields import resolve_heads
from girih.nn.functional.linears import apply_linears
from girih.nn.functional.masking import check_mask, join_masks
from girih.nn.functional.packing import check_packing
from girih.nn.functional.rotary import rotary_factors, rotate_row, split_and_rotate
from girih.nn.functional.state import (
    TensorSpec,
    check_state,
    check_tensor,
    current_pieces,
    is_eager_inference,
)
from girih.nn.layers.mixers import register_layer
from girih.nn.layers.projections import Projection, project
from girih.nn.layers.sequence_layer import SequenceLayer


def choose_capacity(tokens: int) -> int:
    """Number of slots of a cache for `tokens` tokens and later ones.

    A decoding step reads all slots, so spare slots cost time. A full cache is copied and its CUDA graph
    captured again. The result is a multiple of 256, because cuDNN builds a plan for each size in tens of
    milliseconds.
    """
    return -(-(tokens + max(64, tokens // 8)) // 256) * 256


@dataclass(frozen=True, eq=False)
class Slots:
    """Tables that a decoding step reads, one entry for each slot of the key-value cache; shared by all
    sequences.

    turn: rotary factors `[slots, 2, head_dim]`: rotary(x, i) = x * turn[i, 0] + x.roll(D / 2) * turn[i, 1].
    see: additive mask `[2 slots - 1]`, 0 or -inf: see[slots - 1 - i + j] is added to the score of query i and
        key j.
    """

    turn: Tensor
    see: Tensor


register_dataclass(Slots, "girih.nn.attention.Slots")  # exported programs may return it
_slots: weakref.WeakValueDictionary[tuple, Slots] = weakref.WeakValueDictionary()


def make_slots(cached: Tensor, theta: float, window: int | None) -> Slots:
    """The tables for keys `[N, slots, heads, head_dim]`. Layers and caches on one stream share one object:
    `turn` is as large as the keys and values of one head of a sequence."""
    slots, head_dim = cached.shape[1], cached.shape[-1]
    shared = is_eager_inference(cached)
    if shared:
        stream = torch.cuda.current_stream(cached.device) if cached.is_cuda else None
        key = slots, head_dim, theta, window, cached.dtype, cached.device, stream
        if (found := _slots.get(key)) is not None:
            return found
    turn = rotary_factors(torch.arange(slots, device=cached.device), head_dim, theta, cached.dtype)
    see = torch.zeros(2 * slots - 1, dtype=cached.dtype, device=cached.device)
    see[slots:] = -torch.inf
    if window is not None and window < slots:
        see[: slots - window] = -torch.inf
    entry = Slots(torch.stack(turn, 1), see)
    if shared:
        _slots[key] = entry
    return entry


def attend_row(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of one query q `[N, 1, heads, D]` to k and v `[N, slots, kv_heads, D]` -> `[N, 1, heads, D]`.

    mask `[N, 1, 1, slots]` is added to the scores. The queries of one key head are rows of one product, so
    keys are not repeated.
    """
    o = F.scaled_dot_product_attention(
        q[:, 0].unflatten(1, (k.shape[2], -1)), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
    )
    return o.flatten(1, 2)[:, None]


class AttentionState(NamedTuple):
    """Rotated keys and values `[N, slots, heads, head_dim]`; the first `tokens` slots are used.

    valid: `[N, slots]`, false at masked tokens; None: no token is masked.
    place: `[N]`, the slot of the next token: `tokens` on the device.
    slots: the tables of a decoding step; None if the state was returned with gradients enabled.
    """

    k: Tensor
    v: Tensor
    valid: Tensor | None
    tokens: int
    place: Tensor | None = None
    slots: Slots | None = None

    def has_room(self) -> bool:
        """Whether the tables fit the keys and a slot is free for one more token."""
        if self.slots is None or self.tokens >= self.k.shape[1]:
            return False
        turn = self.slots.turn
        return (turn.shape[0], turn.dtype, turn.device) == (self.k.shape[1], self.k.dtype, self.k.device)

    def stepped(self) -> tuple[tuple, "AttentionState"] | None:
        if not self.has_room():
            return None
        return (), self._replace(tokens=self.tokens + 1)

    def grow_cache(self, slots: int, theta: float, window: int | None) -> "AttentionState":
        def padded(cached: Tensor, value: bool) -> Tensor:
            return F.pad(cached, (0, 0) * (cached.dim() - 2) + (0, slots - cached.shape[1]), value=value)

        k, v = padded(self.k, False), padded(self.v, False)
        valid = None if self.valid is None else padded(self.valid, True)
        place = torch.full((k.shape[0],), self.tokens, device=k.device)
        return AttentionState(k, v, valid, self.tokens, place, make_slots(k, theta, window))


def append_tokens(cached: Tensor | None, tokens: int, x: Tensor, slots: int) -> Tensor:
    """A new tensor with at least `slots` slots: the first `tokens` slots of cached, then x `[N, T, ...]`."""
    end = tokens + x.shape[1]
    if slots <= end:
        return x if cached is None else torch.cat((cached[:, :tokens], x), 1)
    padded = x.new_zeros(x.shape[0], slots, *x.shape[2:])
    if cached is not None:
        padded[:, :tokens] = cached[:, :tokens]
    padded[:, tokens:end] = x
    return padded


class Attention(SequenceLayer):
    """Softmax attention, causal or bidirectional; num_heads query heads read num_kv_heads heads of keys and
    values.

        o_t = softmax(q_t K^T / sqrt(D)) V,  y = W_o o

    x, y `[B, T, hidden_size]`. The state is the key-value cache. With use_cache and without gradients it has
    spare slots, and a decoding step writes its token to one of them in place.

    window: tokens that a query attends to, itself included (sliding-window attention); only with causal. The
        state has the keys of all tokens.

    >>> layer = Attention(64, num_heads=4, num_kv_heads=2)
    >>> y, state = layer(torch.randn(3, 10, 64), use_cache=True)
    >>> y.shape, state.k[:, : state.tokens].shape
    (torch.Size([3, 10, 64]), torch.Size([3, 10, 2, 16]))
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float = 10000.0,
        causal: bool = True,
        window: int | None = None,
    ):
        super().__init__()
        kv_heads, head_dim = resolve_heads(
            "attention",
            hidden_size,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope_theta=rope_theta,
            window=window,
        )
        if window is not None and not causal:
            raise ValueError(f"window is {window}; expected none where causal is false")
        self.heads, self.head_dim = (num_heads, kv_heads, kv_heads), head_dim
        self.rope_theta, self.causal, self.window = rope_theta, causal, window
        self.qkv_proj = nn.Linear(hidden_size, sum(self.heads) * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def check_state(self, state: AttentionState | None, x: Tensor, cu_seqlens: Tensor | None = None) -> None:
        """Raises unless state is None or a state of this layer for the sequences of x `[B, T, ...]`."""
        if state is None:
            return
        if not isinstance(state, AttentionState):
            raise ValueError(f"state is a {type(state).__name__}; expected an AttentionState")
        check_tensor(state.k, 4, "state.k")
        slots = state.k.shape[1]
        shape = (x.shape[0], slots, self.heads[1], self.head_dim)
        check_state(state.k, TensorSpec(shape), "state.k")
        check_state(state.v, TensorSpec(shape, state.k.dtype), "state.v")
        # torch.jit.trace makes tensors of sizes.
        if not (isinstance(state.tokens, int | torch.SymInt) or torch.jit.is_tracing()):
            raise ValueError(f"state.tokens is a {type(state.tokens).__name__}; expected an int")
        if not 0 <= state.tokens <= slots:
            raise ValueError(f"state.tokens is {state.tokens}; expected 0 to {slots}, the slots of the keys")
        if state.valid is not None:
            check_state(state.valid, TensorSpec((x.shape[0], slots), torch.bool), "state.valid")
        if state.place is not None:
            check_state(state.place, TensorSpec((x.shape[0],), torch.int64), "state.place")

    def make_mask(
        self, past: int, T: int, valid: Tensor | None, cu_seqlens: Tensor | None, device
    ) -> Tensor | None:
        """The mask of attention, true where a query attends to a key: `[T, past + T]` or
        `[B, 1, T, past + T]`.

        None: no mask beside causality. A query always attends to its own token, so that the softmax of a
        masked query is defined.
        """
        has_window = self.window is not None and self.window < past + T
        if (
            valid is None
            and cu_seqlens is None
            and not has_window
            and (past == 0 or T == 1 or not self.causal)
        ):
            return None
        key = torch.arange(past + T, device=device)
        query = key[past:, None]
        see = key <= query if self.causal else torch.ones_like(key <= query)
        if has_window:
            see = see & (key > query - self.window)
        if cu_seqlens is not None:
            sequence = torch.searchsorted(cu_seqlens, key, right=True)
            see = see & (sequence == sequence[past:, None])
        return see if valid is None else (see & valid[:, None, :] | (key == query))[:, None]

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        state: AttentionState | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState | None]:
        check_mask(x, attention_mask, cu_seqlens)
        check_packing(x, cu_seqlens)
        if cu_seqlens is not None and (use_cache or state is not None):
            raise ValueError(
                "cu_seqlens: attention has no cache for packed sequences; call it with use_cache=False"
            )
        projected = project(self, self.input_projections(), x)
        o, state = self.core(projected, state, use_cache, cu_seqlens, attention_mask)
        return apply_linears(o, [self.o_proj])[0], state

    def input_projections(self) -> tuple[Projection, ...]:
        return (Projection("qkv_proj"),)

    def core(
        self,
        projected: Sequence[Tensor],
        state: AttentionState | None,
        use_cache: bool,
        cu_seqlens: Tensor | None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState | None]:
        x = projected[0]
        qkv = x.unflatten(-1, (-1, self.head_dim))
        Attention.check_state(self, state, x)  # a converted layer's check_state expects more parts
        past, T = 0 if state is None else state.tokens, x.shape[1]
        if (pieces := current_pieces.get()) is not None:
            return self.attend_pieces(qkv, pieces, attention_mask), None
        in_place = use_cache and not torch.is_grad_enabled()
        if in_place and past and T == 1 and qkv.numel() and state.k.dtype == qkv.dtype:
            return self.step(qkv, state, attention_mask)
        position = torch.arange(past, past + T, device=x.device)
        q, k, v = split_and_rotate(qkv, self.heads, position, self.rope_theta)
        before_k, before_v, before_valid = (None, None, None) if state is None else state[:3]
        if before_valid is not None:
            before_valid = before_valid[:, :past]
        valid = join_masks(before_valid, attention_mask, past, x)
        slots = choose_capacity(past + T) if in_place else past + T
        cached = append_tokens(before_k, past, k, slots), append_tokens(before_v, past, v, slots)
        k, v = (part[:, : past + T] for part in cached)
        see = self.make_mask(past, T, valid, cu_seqlens, x.device)
        if q.numel() == 0:  # without tokens PyTorch's attention returns None (CUDA, 16-bit types)
            o = q
        else:
            o = F.scaled_dot_product_attention(
                *(p.transpose(1, 2) for p in (q, k, v)),
                attn_mask=see,
                is_causal=self.causal and see is None and past == 0,
                enable_gqa=self.heads[0] != self.heads[1],
            ).transpose(1, 2)
        o = o.flatten(-2)
        if not use_cache:
            return o, None
        if valid is not None:
            valid = F.pad(valid, (0, cached[0].shape[1] - past - T), value=True)
        place = torch.full((x.shape[0],), past + T, device=x.device)
        slots = make_slots(cached[0], self.rope_theta, self.window) if in_place else None
        return o, AttentionState(*cached, valid, past + T, place, slots)

    def attend_pieces(self, qkv: Tensor, pieces: Any, mask: Tensor | None) -> Tensor:
        """`core` for a piece of a sequence that is cut over processes."""
        from girih.distributed import attention

        position = torch.arange(pieces.start, pieces.start + qkv.shape[1], device=qkv.device)
        q, k, v = split_and_rotate(qkv, self.heads, position, self.rope_theta)
        valid = None if mask is None else mask.bool()
        o = attention(q, k, v, group=pieces, valid=valid, window=self.window, causal=self.causal)
        return o.flatten(-2)

    def step(self, qkv: Tensor, state: AttentionState, mask: Tensor | None) -> tuple[Tensor, AttentionState]:
        """`core` for one token of each sequence, qkv `[N, 1, heads, head_dim]`; mask: `[N, 1]`. Writes the
        state's tensors in place. The device work does not depend on the host's token count, so that a CUDA
        graph can replay it."""
        if not state.has_room():
            state = state.grow_cache(choose_capacity(state.tokens + 1), self.rope_theta, self.window)
        slots, place, valid, n = state.slots, state.place[:1], state.valid, state.k.shape[1]
        turn = slots.turn.index_select(0, place)[:, None, None].unbind(3)
        q, k, v = rotate_row(qkv, self.heads, turn)
        state.k.index_copy_(1, place, k)
        state.v.index_copy_(1, place, v)
        see = slots.see.unfold(0, n, 1).index_select(0, n - 1 - place).expand(len(q), -1)
        if mask is not None:
            valid = mask.new_ones(len(q), n, dtype=torch.bool) if valid is None else valid
            valid.index_copy_(1, place, mask.bool())
        if valid is not None:
            see = see.where(valid, -torch.inf)
        if mask is not None:
            see = see.index_fill_(1, place, 0.0)  # a masked token attends to itself
        o = attend_row(q, state.k, state.v, see[:, None, None])
        state.place.add_(1)
        # _replace fails under torch.compile, which returns an empty tuple.
        return o.flatten(2), AttentionState(state.k, state.v, valid, state.tokens + 1, state.place, slots)


register_layer("attention", Attention, "num_kv_heads", "head_dim", "rope_theta", "window")
