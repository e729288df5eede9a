"""Softmax attention with rotary positions: the baseline, the base of a mixture, and CAT's building block."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.nn.attention_call import SequenceLayer
from girih.nn.masking import check_mask, joined_masks
from girih.nn.mixers import register_layer
from girih.nn.packing import check_packing


def rotary(x: Tensor, position: Tensor, theta: float = 10000.0) -> Tensor:
    """x `[B, T, H, D]` with the pairs (i, i + D/2) turned by position * theta^(-2i/D).

    position is `[T]` or `[B, T]`, D even. Angles are fp32 (fp64 for fp64); the result has x's dtype.
    """
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    rate = theta ** (torch.arange(half, device=x.device, dtype=wide) / -half)
    angle = (position[..., None] * rate)[..., None, :]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


ROOM = 64  # slots more than are needed now


class AttentionState(NamedTuple):
    """Turned keys and values `[N, room, heads, head_dim]`, of which the first `tokens` are there; valid
    `[N, tokens]`, None if all were."""

    k: Tensor
    v: Tensor
    valid: Tensor | None
    tokens: int


def appended(kept: Tensor | None, tokens: int, x: Tensor, room: int) -> Tensor:
    """The first `tokens` slots of kept, then x `[N, T, ...]`, in a tensor with `room` more slots; where room
    is asked for, one token goes into kept's own if it has any."""
    end = tokens + x.shape[1]
    if room and x.shape[1] == 1 and kept is not None and kept.shape[1] >= end and kept.dtype == x.dtype:
        kept[:, tokens:end] = x
        return kept
    if not room:
        return x if kept is None else torch.cat((kept[:, :tokens], x), 1)
    roomy = x.new_zeros(x.shape[0], end + room, *x.shape[2:])
    if kept is not None:
        roomy[:, :tokens] = kept[:, :tokens]
    roomy[:, tokens:end] = x
    return roomy


class Attention(SequenceLayer):
    """Softmax attention, causal or bidirectional, with `num_heads` queries on `num_kv_heads` keys and values.

        o_t = softmax(q_t K^T / sqrt(D)) V,  y = W_o o

    x, y `[B, T, hidden_size]`. The state is the key-value cache and grows with the tokens; with use_cache and
    without gradients a single token is written into the room that the last one's has, if it has.

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
    ):
        super().__init__()
        kv_heads, head_dim = num_kv_heads or num_heads, head_dim or hidden_size // num_heads
        self.heads, self.head_dim = (num_heads, kv_heads, kv_heads), head_dim
        self.rope_theta, self.causal = rope_theta, causal
        self.qkv_proj = nn.Linear(hidden_size, sum(self.heads) * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def visible(
        self, past: int, T: int, valid: Tensor | None, cu_seqlens: Tensor | None, device
    ) -> Tensor | None:
        """Which keys a query sees, `[T, past + T]` or `[B, 1, T, past + T]`; None: all, or all up to itself.

        A query always sees its own token, so that a masked one has something to attend to.
        """
        if valid is None and cu_seqlens is None and (past == 0 or T == 1 or not self.causal):
            return None
        key = torch.arange(past + T, device=device)
        query = key[past:, None]
        see = key <= query if self.causal else torch.ones_like(key <= query)
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
                "cu_seqlens: attention keeps no cache of packed sequences; call it with use_cache=False"
            )
        q, k, v = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).split(self.heads, 2)
        past, T = 0 if state is None else state.tokens, x.shape[1]
        position = torch.arange(past, past + T, device=x.device)
        q, k = rotary(q, position, self.rope_theta), rotary(k, position, self.rope_theta)
        before_k, before_v, before_valid = (None, None, None) if state is None else state[:3]
        valid = joined_masks(before_valid, attention_mask, past, x)
        room = ROOM if use_cache and not torch.is_grad_enabled() else 0
        kept = appended(before_k, past, k, room), appended(before_v, past, v, room)
        k, v = (part[:, : past + T] for part in kept)
        see = self.visible(past, T, valid, cu_seqlens, x.device)
        o = F.scaled_dot_product_attention(
            *(p.transpose(1, 2) for p in (q, k, v)),
            attn_mask=see,
            is_causal=self.causal and see is None and past == 0,
            enable_gqa=self.heads[0] != self.heads[1],
        )
        y = self.o_proj(o.transpose(1, 2).flatten(-2))
        return y, AttentionState(*kept, valid, past + T) if use_cache else None


register_layer("attention", Attention, "num_kv_heads", "head_dim", "rope_theta")
