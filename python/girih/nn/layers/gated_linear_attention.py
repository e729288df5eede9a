"""Linear attention without decay and with three kinds of decay: linear attention, RetNet, GLA."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.nn.functional.fields import head_widths, resolve_heads
from girih.nn.functional.packing import token_positions
from girih.nn.functional.rotary import rotary
from girih.nn.functional.state import LayerState, TensorSpec, is_step
from girih.nn.layers.decay import DecayGate
from girih.nn.layers.layer import GateLinear
from girih.nn.layers.mixers import Mixer, make_builder, register, register_layer
from girih.nn.layers.norm import GatedRMSNorm
from girih.nn.layers.projections import Projection, project, split_heads
from girih.nn.layers.recurrent_layer import RecurrentLayer
from girih.nn.layers.short_conv import ShortConv
from girih.ops import GLAState

GATES = ("none", "fixed", "scalar", "vector")
ROPE_THETA = 10000.0


class RotaryState(NamedTuple):
    """`LayerState`, and the number of tokens of each sequence, `[N]` int64."""

    conv: Any
    memory: Any
    length: Tensor


class GatedLinearAttention(RecurrentLayer):
    """One matrix memory for each head that adds k v^T (Katharopoulos et al. 2020) and decays by a gate.

        S <- e^g S + k v^T,   o = scale S^T q,   y = W_o (RMSNorm(o) * silu(x W_g))

    gate="none":   g = 0; q and k pass through elu + 1 (linear attention; the norm replaces the denominator).
    gate="fixed":  g = log(1 - 2^(-5-h)) in head h (RetNet).
    gate="scalar": Mamba-2's decay for each head, v scaled by its time step dt, and o + v * skip.
    gate="vector": one decay for each key channel, g = logsigmoid(x W_1 W_2 + b) / gate_logit_normalizer
    (GLA). x, y `[B, T, hidden_size]`; num_heads query heads read num_kv_heads memories. Keys have
    `expand_k * head_dim` channels, values `expand_v * head_dim`, both whole numbers. With `rotary` q and k
    are rotated by their position in the sequence (`girih.nn.rotary`, with `rope_theta`), as in RetNet.

    >>> layer = GatedLinearAttention(64, num_heads=2, gate="vector")
    >>> y, state = layer(torch.randn(3, 10, 64), use_cache=True)
    >>> y.shape, state.memory.s.shape
    (torch.Size([3, 10, 64]), torch.Size([3, 2, 32, 32]))
    """

    undecayed = ("skip",)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        gate: str = "vector",
        gate_low_rank: int = 16,
        gate_logit_normalizer: float = 16.0,
        rotary: bool = False,
        rope_theta: float = ROPE_THETA,
        conv_size: int = 0,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        if gate not in GATES:
            raise ValueError(f"gate is {gate!r}; expected one of {', '.join(GATES)}")
        if not rotary and rope_theta != ROPE_THETA:
            raise ValueError(f"rope_theta is {rope_theta}; expected none: it is for rotary")
        kv_heads, head_dim = resolve_heads(
            "retnet" if rotary else "gla",
            hidden_size,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            expand_k=expand_k,
            expand_v=expand_v,
            rotary=rotary,
            rope_theta=rope_theta,
            conv_size=conv_size,
            norm_eps=norm_eps,
        )
        self.gate, self.gate_logit_normalizer = gate, gate_logit_normalizer
        self.rotary, self.rope_theta = rotary, rope_theta
        self.heads, self.conv_size = (num_heads, kv_heads, kv_heads), conv_size
        self.key_dim, self.value_dim = head_widths(head_dim, expand_k, expand_v)
        channels = num_heads * self.key_dim + kv_heads * (self.key_dim + self.value_dim)
        self.qkv_proj = nn.Linear(hidden_size, channels, bias=False)
        self.conv = ShortConv(channels, conv_size, activation="silu" if conv_size else None)
        if gate == "scalar":
            self.decay = DecayGate(hidden_size, kv_heads)
            self.skip = nn.Parameter(torch.empty(num_heads))
        elif gate == "vector":
            self.decay = nn.Sequential(
                nn.Linear(hidden_size, gate_low_rank, bias=False),
                GateLinear(gate_low_rank, kv_heads * self.key_dim),
            )
        self.g_proj = nn.Linear(hidden_size, num_heads * self.value_dim, bias=False)
        self.norm = GatedRMSNorm(self.value_dim, norm_eps)
        self.o_proj = nn.Linear(num_heads * self.value_dim, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.gate == "scalar":
            nn.init.ones_(self.skip)
        elif self.gate == "vector":
            nn.init.zeros_(self.decay[1].bias)

    def log_decay(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The log decay g and, for gate="scalar", the time step dt."""
        if self.gate == "none":
            return None, None
        if self.gate == "fixed":
            wide = torch.promote_types(x.dtype, torch.float32)
            head = torch.arange(self.heads[1], device=x.device, dtype=wide)
            return torch.log1p(-torch.exp2(-5.0 - head)).expand(*x.shape[:2], -1), None
        if self.gate == "scalar":
            return self.decay(x)
        g = F.logsigmoid(self.decay(x)) / self.gate_logit_normalizer
        return g.unflatten(-1, (-1, self.key_dim)), None

    def state_like(self, sequences: int, dtype: torch.dtype) -> LayerState | RotaryState:
        conv = self.conv.state_like(sequences, dtype)
        memory = GLAState(TensorSpec((sequences, self.heads[1], self.key_dim, self.value_dim), dtype))
        if not self.rotary:
            return LayerState(conv, memory)
        return RotaryState(conv, memory, TensorSpec((sequences,), torch.int64))

    def mix(
        self,
        x: Tensor,
        state: LayerState | RotaryState | None,
        use_cache: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Any]:
        self.check_state(state, x, cu_seqlens)
        conv, memory, *length = state or (None, None)
        qkv, gate = project(self, (Projection("qkv_proj"), Projection("g_proj")), x)
        qkv, conv = self.conv(qkv, state=conv, use_cache=use_cache, cu_seqlens=cu_seqlens)
        q, k, v = split_heads(qkv, self.heads, self.key_dim, self.value_dim)
        in_place = use_cache and state is not None
        if self.rotary:
            position, after = token_positions(x, *(length or [None]), cu_seqlens)
            q, k = (rotary(part, position, self.rope_theta) for part in (q, k))
        g, dt = self.log_decay(x)
        skip = 0.0
        if self.gate == "none":
            q, k = F.elu(q) + 1, F.elu(k) + 1
        elif self.gate == "scalar":
            skip = v.repeat_interleave(self.heads[0] // self.heads[1], 2) * self.skip[:, None].to(v.dtype)
            v = v * dt[..., None].to(v.dtype)
        o, memory = self.scan("gla", q, k, v, g, state=memory, in_place=in_place, cu_seqlens=cu_seqlens)
        if self.rotary:
            length = [length[0].add_(1) if in_place and is_step(x, cu_seqlens) else after]
        y = self.o_proj(self.norm(o + skip, gate.unflatten(-1, (-1, self.value_dim))).flatten(-2))
        if not use_cache:
            return y, None
        return y, RotaryState(conv, memory, *length) if self.rotary else LayerState(conv, memory)


_FIELDS = ("num_kv_heads", "head_dim", "expand_k", "expand_v", "conv_size", "norm_eps")
register_layer("linear_attention", GatedLinearAttention, *_FIELDS, gate="none")


def _retnet(config: Any) -> nn.Module:
    # Without rotary positions retnet does not read rope_theta, which other layers of the model may set.
    rotary_fields = ("rotary", "rope_theta") if config.rotary else ()
    return make_builder(GatedLinearAttention, *rotary_fields, *_FIELDS, gate="fixed", expand_v=2.0)(config)


register(
    "retnet",
    _retnet,
    "rotary",
    "rope_theta",
    *_FIELDS,
    compared=False,
    on_attention=Mixer(make_builder(GatedLinearAttention, *_FIELDS, gate="fixed"), _FIELDS),
)
register_layer("gla", GatedLinearAttention, *_FIELDS, gate="vector", expand_k=0.5)  # d_k = d / 2, d_v = d
