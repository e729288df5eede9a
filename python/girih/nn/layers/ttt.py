"""The TTT-Linear layer."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from girih.nn.functional.fields import resolve_heads
from girih.nn.functional.fused import unit_rows
from girih.nn.functional.gates import promote_to_fp32
from girih.nn.functional.state import LayerState, TensorSpec
from girih.nn.layers.decay import initial_step_size_bias
from girih.nn.layers.layer import GateLinear
from girih.nn.layers.mixers import register_layer
from girih.nn.layers.norm import GatedRMSNorm
from girih.nn.layers.projections import Projection
from girih.nn.layers.recurrent_layer import RecurrentLayer
from girih.nn.layers.short_conv import ShortConv
from girih.ops import TTTState


class TTTLinear(RecurrentLayer):
    """A memory that learns, while it reads, to map keys to values (TTT-Linear, Sun et al. 2024).

        f(x) = x + w * LayerNorm(A x) + b,   A <- A - gamma d|f'(k) - v|^2 / 2 dA'
        o = f(q),   y = W_o (RMSNorm(o) * gelu(x W_g))

    f' is f with A', the memory at the start of the chunk. A chunk is the paper's mini-batch; changing its
    length changes the output. q and k have a projection and a short convolution each and are unit vectors;
    `gamma = sigmoid(x W + b_gamma)`; the initial memory is learned. The paper has rotary positions within a
    mini-batch instead of unit vectors, and a layer norm instead of the RMSNorm. The convolutions and the gate
    are those of the paper's models with a gate.
    x, y `[B, T, hidden_size]`.

    >>> layer = TTTLinear(64, num_heads=2, chunk=8)
    >>> y, state = layer(torch.randn(3, 10, 64), use_cache=True)
    >>> y.shape, state.memory.k.shape, state.memory.position.tolist()
    (torch.Size([3, 10, 64]), torch.Size([3, 2, 32, 32]), [2, 2, 2])
    """

    undecayed = ("memory", "inner_weight", "inner_bias")
    fp32 = ("memory",)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        chunk: int = 16,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        _, head_dim = resolve_heads(
            "ttt",
            hidden_size,
            num_heads,
            head_dim=head_dim,
            chunk=chunk,
            conv_size=conv_size,
            norm_eps=norm_eps,
        )
        self.num_heads, self.chunk = num_heads, chunk
        channels = num_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, channels, bias=False)
        self.k_proj = nn.Linear(hidden_size, channels, bias=False)
        self.q_conv = ShortConv(channels, conv_size)
        self.k_conv = ShortConv(channels, conv_size)
        self.v_proj = nn.Linear(hidden_size, channels, bias=False)
        self.gamma_proj = GateLinear(hidden_size, num_heads)
        self.memory = nn.Parameter(promote_to_fp32(torch.empty(num_heads, head_dim, head_dim)))
        self.inner_weight = nn.Parameter(torch.empty(num_heads, head_dim))
        self.inner_bias = nn.Parameter(torch.empty(num_heads, head_dim))
        self.g_proj = nn.Linear(hidden_size, channels, bias=False)
        self.norm = GatedRMSNorm(head_dim, norm_eps, activation="gelu")
        self.o_proj = nn.Linear(channels, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.memory)  # entries of size 1: the layer norm divides by their size
        nn.init.ones_(self.inner_weight)
        nn.init.zeros_(self.inner_bias)
        nn.init.constant_(self.gamma_proj.bias, initial_step_size_bias(self.chunk))

    def input_projections(self) -> tuple[Projection, ...]:
        v, g, q, k = (Projection(name) for name in ("v_proj", "g_proj", "q_proj", "k_proj"))
        return v, g, Projection("gamma_proj", "sigmoid"), q, k

    def state_like(self, sequences: int, dtype: torch.dtype) -> LayerState:
        memory = TensorSpec((sequences, *self.memory.shape), dtype)
        position = TensorSpec((sequences,), torch.int64)
        conv = self.q_conv.state_like(sequences, dtype)
        return LayerState((conv, conv), TTTState(memory, memory, position))

    def core(
        self,
        projected: Sequence[Tensor],
        state: LayerState | None,
        use_cache: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, LayerState | None]:
        v, gate, gamma, q, k = projected
        self.check_state(state, v, cu_seqlens)
        (q_state, k_state), memory = state or ((None, None), None)
        q, q_state = self.q_conv(q, state=q_state, use_cache=use_cache, cu_seqlens=cu_seqlens)
        k, k_state = self.k_conv(k, state=k_state, use_cache=use_cache, cu_seqlens=cu_seqlens)
        q, k, v, gate = (p.unflatten(-1, (self.num_heads, -1)) for p in (q, k, v, gate))
        q, k = unit_rows(q), unit_rows(k)
        weight, bias = self.inner_weight.to(q.dtype), self.inner_bias.to(q.dtype)
        o, memory = self.scan(
            "ttt",
            q,
            k,
            v - k - bias,
            gamma,
            None,
            self.inner_weight,
            chunk=self.chunk,
            phi="layer_norm",
            f="layer_norm",
            state=promote_to_fp32(self.memory) if memory is None else memory,
            in_place=use_cache and state is not None,
            cu_seqlens=cu_seqlens,
        )
        o = self.norm(q + weight * o.to(q.dtype) + bias, gate)
        return o.flatten(-2), LayerState((q_state, k_state), memory) if use_cache else None


register_layer("ttt", TTTLinear, "head_dim", "chunk", "conv_size", "norm_eps")
