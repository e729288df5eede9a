"""The Trellis layer."""

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
from girih.ops import TrellisState


class Trellis(RecurrentLayer):
    """Two memories of M slots that learn to map keys and values onto targets (Trellis, eq. 8-14).

        A <- e^g A - gamma J_phi(A' x)^T (phi(A' x) - a) x^T      A_k for x = k, A_v for x = v
        o = A_v^T f(A_k q),   y = W_o (RMSNorm(o) * gelu(x W_g))

    A' is A at the start of the chunk. q and k have a projection and a short convolution each; keys and values
    have one target a = x W_a; `gamma = sigmoid(x W + b)`. The initial memories A_k and A_v are learned
    (`key_memory`, `value_memory`). An update grows with `|x|^2`. Therefore k and v are unit vectors:
    otherwise the sum of a chunk's updates may overshoot (phi identity and silu diverge). Changing `chunk`
    changes the output.

    shared_qk: one projection for q and k, as in Lattice.
    normalize_kv: False: k and v are not normalized, as in the paper.
    value_read: "phi": o = phi(A_v^T f(A_k q)), as the paper's sentence after eq. 14 says literally. Its
        results were worse in every comparison.
    post_norm: False: no RMSNorm.

    Initialization: let s be the size of A's entries. The value of a normalizing phi does not depend on s, and
    its derivative is proportional to 1 / s, so an update has curvature gamma / s^2. The decay e^g = e^-lambda
    reduces s and the updates increase s. At equilibrium the curvature is about sqrt(2 lambda D), independent
    of gamma and of the initial s. At lambda = 0.01 the updates of a chunk overshoot: gradients grow up to
    10^4 times over 512 tokens, and a text model learns only the frequencies of bytes. Therefore the initial s
    is 1 and the initial e^g is close to 1 (dt <= 1e-4).
    x, y `[B, T, hidden_size]`.

    >>> layer = Trellis(64, num_heads=2, num_slots=16, chunk=8)
    >>> y, state = layer(torch.randn(3, 10, 64), use_cache=True)
    >>> y.shape, state.memory.k.shape, state.memory.position.tolist()
    (torch.Size([3, 10, 64]), torch.Size([3, 2, 16, 32]), [2, 2, 2])
    """

    undecayed = fp32 = ("key_memory", "value_memory")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_slots: int = 64,
        head_dim: int | None = None,
        chunk: int = 16,
        phi: str = "ln_silu",
        f: str = "ln_silu",
        gated: bool = True,
        shared_qk: bool = False,
        normalize_kv: bool = True,
        value_read: str = "linear",
        post_norm: bool = True,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        _, head_dim = resolve_heads(
            "trellis",
            hidden_size,
            num_heads,
            num_slots=num_slots,
            head_dim=head_dim,
            chunk=chunk,
            phi=phi,
            f=f,
            gated=gated,
            shared_qk=shared_qk,
            normalize_kv=normalize_kv,
            value_read=value_read,
            post_norm=post_norm,
            conv_size=conv_size,
            norm_eps=norm_eps,
        )
        self.num_heads, self.num_slots, self.chunk = num_heads, num_slots, chunk
        self.phi, self.f, self.gated = phi, f, gated
        self.normalize_kv, self.value_read = normalize_kv, value_read
        self.qk_names = ("qk_proj",) if shared_qk else ("q_proj", "k_proj")
        channels = num_heads * head_dim
        for name in self.qk_names:
            setattr(self, name, nn.Linear(hidden_size, channels, bias=False))
        self.q_conv = ShortConv(channels, conv_size)
        self.k_conv = ShortConv(channels, conv_size)
        self.v_proj = nn.Linear(hidden_size, channels, bias=False)
        self.a_proj = nn.Linear(hidden_size, num_heads * num_slots, bias=False)
        self.gamma_proj = GateLinear(hidden_size, num_heads)
        self.decay = DecayGate(hidden_size, num_heads, largest_step=1e-4) if gated else None
        self.key_memory = nn.Parameter(promote_to_fp32(torch.empty(num_heads, num_slots, head_dim)))
        self.value_memory = nn.Parameter(torch.empty_like(self.key_memory))
        self.g_proj = nn.Linear(hidden_size, channels, bias=False)
        self.norm = GatedRMSNorm(head_dim, norm_eps, activation="gelu") if post_norm else None
        self.o_proj = nn.Linear(channels, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.key_memory)  # entries of size 1: normalizing phis divide by their size
        nn.init.normal_(self.value_memory)
        nn.init.constant_(self.gamma_proj.bias, initial_step_size_bias(self.chunk))

    def input_projections(self) -> tuple[Projection, ...]:
        v, a, gate = (Projection(name) for name in ("v_proj", "a_proj", "g_proj"))
        qk = (Projection(name) for name in self.qk_names)
        return v, a, gate, Projection("gamma_proj", "sigmoid"), *qk, *decay_projections(self)

    def state_like(self, sequences: int, dtype: torch.dtype) -> LayerState:
        memory = TensorSpec((sequences, *self.key_memory.shape), dtype)
        position = TensorSpec((sequences,), torch.int64)
        conv = self.q_conv.state_like(sequences, dtype)
        return LayerState((conv, conv), TrellisState(memory, memory, memory, memory, position))

    def core(
        self,
        projected: Sequence[Tensor],
        state: LayerState | None,
        use_cache: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, LayerState | None]:
        v, a, gate, gamma, q, *optional = projected  # optional: k without shared_qk, then g if gated
        k = optional[0] if len(self.qk_names) == 2 else q
        g = None if self.decay is None else optional[-1]
        self.check_state(state, v, cu_seqlens)
        (q_state, k_state), memory = state or ((None, None), None)
        q, q_state = self.q_conv(q, state=q_state, use_cache=use_cache, cu_seqlens=cu_seqlens)
        k, k_state = self.k_conv(k, state=k_state, use_cache=use_cache, cu_seqlens=cu_seqlens)
        q, k, v, a, gate = (p.unflatten(-1, (self.num_heads, -1)) for p in (q, k, v, a, gate))
        if self.normalize_kv:
            k, v = unit_rows(k), unit_rows(v)
        if memory is None:
            memory = (promote_to_fp32(self.key_memory), promote_to_fp32(self.value_memory))
        o, memory = advance(
            "trellis",
            q,
            k,
            v,
            a,
            gamma,
            g,
            chunk=self.chunk,
            phi=self.phi,
            f=self.f,
            state=memory,
            in_place=use_cache and state is not None,
            cu_seqlens=cu_seqlens,
        )
        if self.value_read == "phi":
            o = torch.ops.girih.trellis_phi(promote_to_fp32(o), self.phi).to(o.dtype)
        return apply_output_gate(self.norm, o, gate).flatten(-2), LayerState(
            (q_state, k_state), memory
        ) if use_cache else None


register_layer(
    "trellis",
    Trellis,
    "head_dim",
    "num_slots",
    "chunk",
    "phi",
    "f",
    "gated",
    "shared_qk",
    "normalize_kv",
    "value_read",
    "post_norm",
    "conv_size",
    "norm_eps",
)
