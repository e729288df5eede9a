"""Gated DeltaProduct with groups of heads, as in Megatron-LM."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from girih.nn.functional.fields import resolve_heads
from girih.nn.functional.gates import apply_gate, promote_to_fp32
from girih.nn.functional.state import LayerState, TensorSpec
from girih.nn.layers.decay import reset_decay
from girih.nn.layers.mixers import register_layer
from girih.nn.layers.norm import GatedInputRMSNorm
from girih.nn.layers.projections import Projection, split_steps
from girih.nn.layers.recurrent_layer import RecurrentLayer
from girih.nn.layers.short_conv import ShortConv
from girih.ops import DeltaProductState


class GatedDeltaProduct(RecurrentLayer):
    """Gated DeltaProduct whose heads share queries and keys in groups: the layer of Megatron-LM
    (`GatedDeltaProductMixer`; the recurrence: Siems et al. 2025).

        z, (v, k, q), beta, a = x W;   v, k, q = silu(conv(v, k, q));   q, k are l2-normalized
        g = -exp(A_log) softplus(a + dt_bias),   beta = sigmoid(beta)
        S <- e^g S;  for j < n:  S <- S + beta_j k_j (v_j - S^T k_j)^T;   o = S^T q / sqrt(state_size)
        y = W_o RMSNorm(o * silu(z))

    num_heads memories of state_size key channels and head_dim value channels; num_groups divides num_heads,
    and the heads of a group read one query and, for each of the n updates, one key. The norm is taken over
    the channels of a group, after the gate; PyTorch's operators compute it (`GatedInputRMSNorm`).
    The output of in_proj, its parts in Megatron's order:
    z `[num_heads, head_dim]`, v `[n, num_heads, head_dim]`, k `[n, num_groups, state_size]`,
    q `[num_groups, state_size]`, beta `[n, num_heads]`, a `[num_heads]`. `girih.conversion.load_megatron`
    reads Megatron's parameters. `girih.nn.DeltaProduct` has grouped memories and the norm before the gate.
    x, y `[B, T, hidden_size]`. A wrong option raises a ValueError that names the option.

    >>> layer = GatedDeltaProduct(64, num_heads=4, n=3, num_groups=2, state_size=32)
    >>> y, state = layer(torch.randn(3, 10, 64), use_cache=True)
    >>> y.shape, state.memory.s.shape
    (torch.Size([3, 10, 64]), torch.Size([3, 4, 32, 16]))
    """

    undecayed = fp32 = ("A_log", "dt_bias")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        n: int = 2,
        num_groups: int = 1,
        head_dim: int | None = None,
        state_size: int = 128,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        _, self.head_dim = resolve_heads(
            "gated_delta_product",
            hidden_size,
            num_heads,
            n=n,
            num_groups=num_groups,
            head_dim=head_dim,
            state_size=state_size,
            conv_size=conv_size,
            norm_eps=norm_eps,
        )
        self.n, self.num_heads, self.num_groups, self.state_size = n, num_heads, num_groups, state_size
        width, keys = num_heads * self.head_dim, num_groups * state_size
        self.channels = (n * width, n * keys, keys)  # of v, k and q
        self.parts = (width, sum(self.channels), n * num_heads, num_heads)  # of z; v, k and q; beta; a
        self.in_proj = nn.Linear(hidden_size, sum(self.parts), bias=False)
        self.conv = ShortConv(sum(self.channels), conv_size)
        self.A_log, self.dt_bias = (nn.Parameter(promote_to_fp32(torch.empty(num_heads))) for _ in range(2))
        self.norm = GatedInputRMSNorm(width, num_groups, norm_eps)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Rates exp(A_log) are uniform in [0.0001, 16], softplus(dt_bias) is log-uniform in [0.001, 0.1]."""
        reset_decay(self.A_log, self.dt_bias, smallest_rate=1e-4)

    def input_projections(self) -> tuple[Projection, ...]:
        return (Projection("in_proj"),)

    def state_like(self, sequences: int, dtype: torch.dtype) -> LayerState:
        memory = TensorSpec((sequences, self.num_heads, self.state_size, self.head_dim), dtype)
        return LayerState(self.conv.state_like(sequences, dtype), DeltaProductState(memory))

    def core(
        self,
        projected: Sequence[Tensor],
        state: LayerState | None,
        use_cache: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, LayerState | None]:
        z, vkq, beta, a = projected[0].split(self.parts, -1)
        self.check_state(state, vkq, cu_seqlens)
        conv, memory = state or (None, None)
        vkq, conv = self.conv(vkq, state=conv, use_cache=use_cache, cu_seqlens=cu_seqlens)
        v, k, q = vkq.split(self.channels, -1)
        o, memory = self.scan(
            "delta_product",
            q.unflatten(-1, (-1, self.state_size)),
            split_steps(k.unflatten(-1, (-1, self.state_size)), self.n),
            split_steps(v.unflatten(-1, (-1, self.head_dim)), self.n),
            split_steps(apply_gate(beta, "sigmoid"), self.n),
            apply_gate(a, "decay", self.dt_bias, self.A_log),
            n=self.n,
            l2norm_qk=True,
            state=memory,
            in_place=use_cache and state is not None,
            cu_seqlens=cu_seqlens,
        )
        return self.norm(o.flatten(-2), z), LayerState(conv, memory) if use_cache else None


register_layer(
    "gated_delta_product",
    GatedDeltaProduct,
    "n",
    "num_groups",
    "head_dim",
    "state_size",
    "conv_size",
    "norm_eps",
    compared=False,
)
