"""Raven: gated slot attention in which a router chooses the slots that a token changes."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.nn.functional.fields import head_widths, resolve_heads
from girih.nn.functional.fused import silu_norm
from girih.nn.functional.gates import apply_gate, promote_to_fp32
from girih.nn.functional.linears import apply_linears
from girih.nn.functional.state import LayerState, TensorSpec
from girih.nn.functional.step import PLAIN, RowInput
from girih.nn.layers.decay import reset_decay
from girih.nn.layers.mixers import Mixer, make_builder, register
from girih.nn.layers.norm import GatedRMSNorm, RMSNorm
from girih.nn.layers.projections import Projection
from girih.nn.layers.recurrent_layer import RecurrentLayer
from girih.ops import GSAState


class Raven(RecurrentLayer):
    """Gated slot attention in which a router chooses the slots that a token changes (Raven; the layer of
    flash-linear-attention, `fla.layers.Raven`, whose state_dict this layer loads).

        r = sigmoid(x W_r);   R: the topk slots of a memory with the largest r
        w = r / (sum of r over R) in R, 0 in the other slots
        g = -w exp(A_log) softplus(x W_a + dt_bias),   s = 1 - e^g
        Hk <- Hk Diag(e^g) + k s^T,  Hv <- Diag(e^g) Hv + s v^T,  o = Hv^T softmax(Hk^T q)
        y = W_o RMSNorm(silu(o)),   q, k = RMSNorm(silu(x W)) for each head,   v = silu(x W)

    A slot outside of R neither decays nor changes. `topk`: default min(32, num_slots).
    `slot_decay`: a decay for each slot, `g = w logsigmoid(x W_f) / gate_logit_normalizer`.
    `router_score="softmax"`: r is the softmax over the slots of a memory, and w = r in R.
    `router_mlp`: a layer of hidden_size channels with GELU before W_r.
    `router_bias`: r_bias `[num_kv_heads, num_slots]` is added to r for the choice of R only. It is a buffer,
    0 at first, without gradient: the training program sets it, to balance the use of slots.
    `router_noise`: in training, Gumbel noise is added to the logits x W_r; a call is then not reproducible
    without the state of the random generator. flash-linear-attention's layer adds it by default.
    `output_gate`: `y = W_o (RMSNorm(silu(o)) * silu(x W_g))`, with a norm for each head.

    num_heads query heads read num_kv_heads memories; num_kv_heads defaults to num_heads and divides it. Keys
    have `expand_k * head_dim` channels, values `expand_v * head_dim`, both whole numbers. x, y
    `[B, T, hidden_size]`. A wrong option raises a ValueError that names the option.

    >>> layer = Raven(64, num_heads=2, num_slots=16, topk=4)
    >>> y, state = layer(torch.randn(3, 10, 64), use_cache=True)
    >>> y.shape, state.memory.k.shape
    (torch.Size([3, 10, 64]), torch.Size([3, 2, 32, 16]))
    """

    undecayed = ("A_log", "dt_bias")
    fp32 = ("A_log", "dt_bias", "r_bias")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_slots: int = 64,
        topk: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        slot_decay: bool = False,
        gate_logit_normalizer: float = 8.0,
        router_score: str = "sigmoid",
        router_mlp: bool = False,
        router_bias: bool = False,
        router_noise: bool = False,
        output_gate: bool = False,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        kv_heads, head_dim = resolve_heads(
            "raven",
            hidden_size,
            num_heads,
            num_slots=num_slots,
            topk=topk,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            expand_k=expand_k,
            expand_v=expand_v,
            slot_decay=slot_decay,
            router_score=router_score,
            router_mlp=router_mlp,
            router_bias=router_bias,
            router_noise=router_noise,
            output_gate=output_gate,
            norm_eps=norm_eps,
        )
        self.heads, self.num_slots, self.topk = (num_heads, kv_heads), num_slots, topk or min(32, num_slots)
        self.key_dim, self.value_dim = head_widths(head_dim, expand_k, expand_v)
        self.gate_logit_normalizer, self.router_score = gate_logit_normalizer, router_score
        self.slot_decay, self.router_mlp, self.output_gate = slot_decay, router_mlp, output_gate
        self.router_bias, self.router_noise = router_bias, router_noise
        slots, width = kv_heads * num_slots, num_heads * self.value_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, kv_heads * self.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, kv_heads * self.value_dim, bias=False)
        self.r_proj = nn.Linear(hidden_size, slots, bias=False)
        if router_mlp:
            self.r_proj = nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.GELU(), self.r_proj)
        if router_bias:
            self.register_buffer("r_bias", promote_to_fp32(torch.empty(kv_heads, num_slots)))
        if slot_decay:
            self.f_proj = nn.Linear(hidden_size, slots, bias=False)
        else:
            self.a_proj = nn.Linear(hidden_size, kv_heads, bias=False)
            self.A_log, self.dt_bias = (
                nn.Parameter(promote_to_fp32(torch.empty(kv_heads))) for _ in range(2)
            )
        self.q_norm, self.k_norm = RMSNorm(self.key_dim, norm_eps), RMSNorm(self.key_dim, norm_eps)
        if output_gate:
            self.o_gate_proj = nn.Linear(hidden_size, width, bias=False)
            self.o_norm = GatedRMSNorm(self.value_dim, norm_eps)
        else:
            self.g_norm = RMSNorm(width, norm_eps)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Rates exp(A_log) are uniform in [0.0001, 16], softplus(dt_bias) is log-uniform in [0.001, 0.1]."""
        if self.router_bias:
            self.r_bias.zero_()
        if self.router_mlp:
            self.router_in.bias.zero_()
        if self.slot_decay:
            return
        reset_decay(self.A_log, self.dt_bias, smallest_rate=1e-4)

    @property
    def router_in(self) -> nn.Linear:
        """The router's product with x."""
        return self.r_proj[0] if self.router_mlp else self.r_proj

    def input_projections(self) -> tuple[Projection, ...]:
        decay = Projection("a_proj")
        if self.slot_decay:
            decay = Projection("f_proj", "logsigmoid", 1.0 / self.gate_logit_normalizer)
        gate = (Projection("o_gate_proj"),) if self.output_gate else ()
        qkv = (Projection("q_proj"), Projection("k_proj"), Projection("v_proj"))
        return *qkv, Projection("router_in", "linear"), decay, *gate

    def write_weights(self, logits: Tensor) -> Tensor:
        """w `[B, T, memories, slots]` from the router's logits of the same shape: 0 except in topk slots."""
        if self.router_noise and self.training:
            logits = logits - torch.empty_like(logits).exponential_().log()
        r = logits.softmax(-1) if self.router_score == "softmax" else logits.sigmoid()
        chosen = (r + self.r_bias if self.router_bias else r).topk(self.topk, -1).indices
        w = r * torch.zeros_like(r).scatter(-1, chosen, 1.0)
        return w if self.router_score == "softmax" else w / (w.sum(-1, keepdim=True) + 1e-9)

    def log_decay(self, router: Tensor, decay: Tensor) -> Tensor:
        """g `[B, T, memories, slots]`, in fp32 or fp64, from the outputs of the projections."""
        if self.router_mlp:
            router = promote_to_fp32(self.r_proj[2](F.gelu(router).to(self.r_proj[2].weight.dtype)))
        w = self.write_weights(router.unflatten(-1, (-1, self.num_slots)))
        if self.slot_decay:
            return decay.unflatten(-1, (-1, self.num_slots)) * w
        return apply_gate(decay, "decay", self.dt_bias, self.A_log)[..., None] * w

    def state_like(self, sequences: int, dtype: torch.dtype) -> LayerState:
        H, M = self.heads[1], self.num_slots
        k = TensorSpec((sequences, H, self.key_dim, M), dtype)
        return LayerState(None, GSAState(k, TensorSpec((sequences, H, M, self.value_dim), dtype), None))

    def core(
        self,
        projected: Sequence[Tensor],
        state: LayerState | None,
        use_cache: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, LayerState | None]:
        q, k, v, router, decay, *gate = projected
        self.check_state(state, q, cu_seqlens)
        o, memory = self.scan(
            "gsa",
            silu_norm(self.q_norm, q.unflatten(-1, (-1, self.key_dim))),
            silu_norm(self.k_norm, k.unflatten(-1, (-1, self.key_dim))),
            F.silu(v).unflatten(-1, (-1, self.value_dim)),
            None,
            self.log_decay(router, decay),
            scale=1.0,
            state=None if state is None else state.memory,
            in_place=use_cache and state is not None,
            cu_seqlens=cu_seqlens,
        )
        if self.output_gate:
            o = self.o_norm(F.silu(o), gate[0].unflatten(-1, (-1, self.value_dim)))
        return o.flatten(-2), LayerState(None, memory) if use_cache else None

    def output_prologue(self) -> RowInput:
        return PLAIN if self.output_gate else RowInput("silu_rms_norm", self.g_norm.weight, self.g_norm.eps)

    def output(self, o: Tensor) -> Tensor:
        return apply_linears(o if self.output_gate else silu_norm(self.g_norm, o), [self.o_proj])[0]


_FIELDS = (
    "head_dim",
    "expand_k",
    "expand_v",
    "num_slots",
    "topk",
    "slot_decay",
    "router_score",
    "router_mlp",
    "router_bias",
    "router_noise",
    "output_gate",
    "norm_eps",
)
# On attention's projections Raven has a memory for each query head, as Trellis and Lattice do.
register(
    "raven",
    make_builder(Raven, "num_kv_heads", *_FIELDS),
    "num_kv_heads",
    *_FIELDS,
    compared=False,
    on_attention=Mixer(make_builder(Raven, *_FIELDS), _FIELDS),
)
