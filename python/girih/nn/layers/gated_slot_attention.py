"""Gated slot attention, and ABC, its ungated form."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.nn.functional.fields import resolve_heads
from girih.nn.functional.fused import silu_norm
from girih.nn.functional.gates import promote_to_fp32
from girih.nn.functional.linears import apply_linears
from girih.nn.functional.state import LayerState, TensorSpec
from girih.nn.functional.step import RowInput
from girih.nn.layers.mixers import register_layer
from girih.nn.layers.norm import RMSNorm
from girih.nn.layers.projections import Projection
from girih.nn.layers.recurrent_layer import RecurrentLayer
from girih.nn.layers.short_conv import ShortConv
from girih.ops import GSAState


class GatedSlotAttention(RecurrentLayer):
    """M memory slots with one forget gate each, read by softmax attention (GSA; Zhang et al. 2024, eq. 9).

        g = logsigmoid(x W_f) / gate_logit_normalizer,  s = 1 - e^g
        Hk <- Hk Diag(e^g) + k s^T,  Hv <- Diag(e^g) Hv + s v^T,  o = Hv^T softmax(Hk^T q)
        y = W_o RMSNorm(silu(o)),    q, k, v = silu(x W)

    `gated=False` is ABC: `x W_f` are logits. The write weight s of a token in a slot is the softmax of the
    slot's logits over all tokens so far.
    `data_dependent_decay=False`: learned `decay_logits [num_kv_heads, num_slots]` replace `x W_f` and are the
    same for all tokens (the paper's ablation). The initial time constants -1 / g of the slots are then
    log-spaced from 4 to 4096 tokens, because slots with equal time constants would always hold equal values.
    x, y `[B, T, hidden_size]`; num_heads query heads read num_kv_heads memories. `conv_size`: width of a
    short convolution before the SiLU of q, k and v; the paper has none.

    >>> layer = GatedSlotAttention(64, num_heads=2, num_slots=16)
    >>> y, state = layer(torch.randn(3, 10, 64), use_cache=True)
    >>> y.shape, state.memory.k.shape
    (torch.Size([3, 10, 64]), torch.Size([3, 2, 32, 16]))
    """

    undecayed = fp32 = ("decay_logits",)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_slots: int = 64,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        gated: bool = True,
        data_dependent_decay: bool = True,
        gate_logit_normalizer: float = 8.0,
        feature: str = "softmax",
        conv_size: int = 0,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        kv_heads, head_dim = resolve_heads(
            "gsa",
            hidden_size,
            num_heads,
            num_slots=num_slots,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            feature=feature,
            data_dependent_decay=data_dependent_decay,
            conv_size=conv_size,
            norm_eps=norm_eps,
        )
        if not gated and not data_dependent_decay:
            raise ValueError(
                "data_dependent_decay is false; expected true where gated is false: ABC has no decay"
            )
        self.gated, self.gate_logit_normalizer, self.feature = gated, gate_logit_normalizer, feature
        self.heads, self.num_slots = (num_heads, kv_heads, kv_heads), num_slots
        self.head_dim = head_dim
        channels = sum(self.heads) * head_dim
        self.qkv_proj = nn.Linear(hidden_size, channels, bias=False)
        self.conv = ShortConv(channels, conv_size)
        if data_dependent_decay:
            self.f_proj = nn.Linear(hidden_size, kv_heads * num_slots, bias=False)
        else:
            self.f_proj = None
            self.decay_logits = nn.Parameter(promote_to_fp32(torch.empty(kv_heads, num_slots)))
        self.norm = RMSNorm(num_heads * head_dim, norm_eps)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.f_proj is None:
            logits = self.decay_logits
            tokens = torch.logspace(2, 12, self.num_slots, base=2, dtype=logits.dtype, device=logits.device)
            y = -self.gate_logit_normalizer / tokens  # logsigmoid(decay_logits) = g gate_logit_normalizer
            logits.copy_(y - torch.log(-torch.expm1(y)))  # the inverse of logsigmoid: y - log(1 - e^y)

    def input_projections(self) -> tuple[Projection, ...]:
        qkv = Projection("qkv_proj")
        if self.f_proj is None:
            return (qkv,)
        if not self.gated:
            return qkv, Projection("f_proj", "linear")
        return qkv, Projection("f_proj", "logsigmoid", 1.0 / self.gate_logit_normalizer)

    def output(self, o: Tensor) -> Tensor:
        return apply_linears(silu_norm(self.norm, o), [self.o_proj])[0]

    def state_like(self, sequences: int, dtype: torch.dtype) -> LayerState:
        heads, D, M = self.heads[1], self.head_dim, self.num_slots
        k, v = TensorSpec((sequences, heads, D, M), dtype), TensorSpec((sequences, heads, M, D), dtype)
        z = None if self.gated else TensorSpec((sequences, heads, M), dtype)
        return LayerState(self.conv.state_like(sequences, dtype), GSAState(k, v, z))

    def core(
        self,
        projected: Sequence[Tensor],
        state: LayerState | None,
        use_cache: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, LayerState | None]:
        qkv, *slot_projections = projected
        self.check_state(state, qkv, cu_seqlens)
        conv, memory = state or (None, None)
        qkv, conv = self.conv(qkv, state=conv, use_cache=use_cache, cu_seqlens=cu_seqlens)
        q, k, v = qkv.unflatten(-1, (sum(self.heads), -1)).split(self.heads, 2)
        if self.f_proj is None:
            decay = F.logsigmoid(promote_to_fp32(self.decay_logits)) / self.gate_logit_normalizer
            per_slot = decay.expand(*qkv.shape[:2], -1, -1)
        else:  # the projection has applied logsigmoid, if gated
            per_slot = slot_projections[0].unflatten(-1, (-1, self.num_slots))
        s, g = (None, per_slot) if self.gated else (per_slot, None)
        o, memory = self.scan(
            "gsa",
            q,
            k,
            v,
            s,
            g,
            scale=1.0,
            feature=self.feature,
            state=memory,
            in_place=use_cache and state is not None,
            cu_seqlens=cu_seqlens,
        )
        return o.flatten(-2), LayerState(conv, memory) if use_cache else None

    def output_prologue(self) -> RowInput:
        return RowInput("silu_rms_norm", self.norm.weight, self.norm.eps)


_FIELDS = ("num_kv_heads", "head_dim", "num_slots", "feature", "conv_size", "norm_eps")
register_layer("gsa", GatedSlotAttention, "data_dependent_decay", *_FIELDS, gated=True)
register_layer("abc", GatedSlotAttention, *_FIELDS, gated=False)
