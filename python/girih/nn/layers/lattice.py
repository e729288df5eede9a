"""The Lattice layer."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from girih.nn.functional.fields import resolve_heads
from girih.nn.functional.fused import unit_rows
from girih.nn.functional.gates import promote_to_fp32
from girih.nn.functional.state import LayerState, TensorSpec, advance
from girih.nn.layers.decay import DecayGate, initial_step_size_bias
from girih.nn.layers.layer import GateLinear
from girih.nn.layers.mixers import register_layer
from girih.nn.layers.norm import GatedRMSNorm, apply_output_gate
from girih.nn.layers.projections import Projection, decay_projections
from girih.nn.layers.recurrent_layer import RecurrentLayer
from girih.nn.layers.short_conv import ShortConv
from girih.ops import LatticeState


class Lattice(RecurrentLayer):
    """M slots on the unit sphere, each updated orthogonally to its value (Lattice, eq. 10-11, 15).

        d_i = -gamma c_i (h - s_i (s_i . h)),   s_i <- (e^g s_i + d_i) / |e^g s_i + d_i|,   o = S q
        y = W_o (o * gelu(x W_g))

    `objective` defines (h, c): decode, encode or similarity. q and k have `num_slots` channels in each head,
    share one projection and have a short convolution each. v has `head_dim` channels. With encode v is a unit
    vector, because the updates grow with `|v|^2`. `gamma = sigmoid(x W + b)`. The initial memory is a
    parameter whose columns are scaled to unit length; it is initialized orthonormal if num_slots <= head_dim.
    Changing `chunk` changes the output. x, y `[B, T, hidden_size]`.

    normalize: False: neither slots nor the initial memory are normalized (eq. 10 alone); only at chunk 1.
    shrinkage: lambda of the l1 shrinkage of slots (eq. 16-17); only at chunk 1.
    post_norm: y = W_o (RMSNorm(o) * gelu(x W_g)).

    >>> layer = Lattice(64, num_heads=2, num_slots=16, chunk=8)
    >>> y, state = layer(torch.randn(3, 10, 64), use_cache=True)
    >>> y.shape, state.memory.first.shape
    (torch.Size([3, 10, 64]), torch.Size([3, 2, 32, 16]))
    """

    undecayed = fp32 = ("memory",)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_slots: int = 64,
        head_dim: int | None = None,
        chunk: int = 16,
        objective: str = "decode",
        normalize: bool = True,
        shrinkage: float = 0.0,
        gated: bool = True,
        post_norm: bool = False,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        _, head_dim = resolve_heads(
            "lattice",
            hidden_size,
            num_heads,
            num_slots=num_slots,
            head_dim=head_dim,
            chunk=chunk,
            objective=objective,
            normalize=normalize,
            shrinkage=shrinkage,
            gated=gated,
            post_norm=post_norm,
            conv_size=conv_size,
            norm_eps=norm_eps,
        )
        self.num_heads, self.num_slots, self.chunk = num_heads, num_slots, chunk
        self.objective, self.normalize, self.shrinkage, self.gated = objective, normalize, shrinkage, gated
        self.qk_proj = nn.Linear(hidden_size, num_heads * num_slots, bias=False)
        self.q_conv = ShortConv(num_heads * num_slots, conv_size)
        self.k_conv = ShortConv(num_heads * num_slots, conv_size)
        self.v_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.gamma_proj = GateLinear(hidden_size, num_heads)
        self.decay = DecayGate(hidden_size, num_heads, largest_step=0.01) if gated else None
        self.memory = nn.Parameter(promote_to_fp32(torch.empty(num_heads, head_dim, num_slots)))
        self.g_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.norm = GatedRMSNorm(head_dim, norm_eps, activation="gelu") if post_norm else None
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for slots in self.memory:  # [D, M] of one head
            nn.init.orthogonal_(slots)
        nn.init.constant_(self.gamma_proj.bias, initial_step_size_bias(self.chunk))

    def input_projections(self) -> tuple[Projection, ...]:
        qk, v, gate = (Projection(name) for name in ("qk_proj", "v_proj", "g_proj"))
        return qk, v, gate, Projection("gamma_proj", "sigmoid"), *decay_projections(self)

    def state_like(self, sequences: int, dtype: torch.dtype) -> LayerState:
        heads = sequences, self.num_heads
        memory = TensorSpec((*heads, *self.memory.shape[1:]), dtype)
        decay = TensorSpec(heads, dtype) if self.gated else None
        position = TensorSpec((sequences,), torch.int64)
        conv = self.q_conv.state_like(sequences, dtype)
        return LayerState((conv, conv), LatticeState(memory, memory, decay, position))

    def core(
        self,
        projected: Sequence[Tensor],
        state: LayerState | None,
        use_cache: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, LayerState | None]:
        qk, v, gate, gamma, *decay = projected
        g = decay[0] if decay else None
        self.check_state(state, qk, cu_seqlens)
        (q_state, k_state), memory = state or ((None, None), None)
        q, q_state = self.q_conv(qk, state=q_state, use_cache=use_cache, cu_seqlens=cu_seqlens)
        k, k_state = self.k_conv(qk, state=k_state, use_cache=use_cache, cu_seqlens=cu_seqlens)
        q, k, v, gate = (p.unflatten(-1, (self.num_heads, -1)) for p in (q, k, v, gate))
        if self.objective == "encode":
            v = unit_rows(v)
        if memory is None:
            memory = promote_to_fp32(self.memory)
            if self.normalize:
                memory = unit_rows(memory.mT.contiguous()).mT
        o, memory = advance(
            "lattice",
            q,
            k,
            v,
            gamma,
            g,
            chunk=self.chunk,
            objective=self.objective,
            normalize=self.normalize,
            shrinkage=self.shrinkage,
            state=memory,
            in_place=use_cache and state is not None,
            cu_seqlens=cu_seqlens,
        )
        return apply_output_gate(self.norm, o, gate).flatten(-2), LayerState(
            (q_state, k_state), memory
        ) if use_cache else None


register_layer(
    "lattice",
    Lattice,
    "head_dim",
    "num_slots",
    "chunk",
    "objective",
    "normalize",
    "shrinkage",
    "gated",
    "post_norm",
    "conv_size",
    "norm_eps",
)
