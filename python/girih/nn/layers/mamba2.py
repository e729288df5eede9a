"""Mamba-2's mixer."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.nn.functional.fields import resolve_heads
from girih.nn.functional.fused import residual_norm, silu_product
from girih.nn.functional.gates import promote_to_fp32
from girih.nn.functional.linears import apply_linears
from girih.nn.functional.state import LayerState, TensorSpec
from girih.nn.functional.step import RowInput
from girih.nn.layers.decay import reset_decay
from girih.nn.layers.gated_linear_attention import GatedLinearAttention
from girih.nn.layers.mixers import Mixer, make_builder, register
from girih.nn.layers.norm import RMSNorm
from girih.nn.layers.projections import Projection
from girih.nn.layers.recurrent_layer import RecurrentLayer
from girih.nn.layers.short_conv import ShortConv
from girih.ops import GLAState


class Mamba2(RecurrentLayer):
    """Mamba-2's mixer (Dao and Gu 2024).

        x, B, C = silu(conv(u W)),   dt = softplus(u W_dt + dt_bias)
        S <- e^{-exp(A_log) dt} S + dt B x^T,   o = S^T C + skip x
        y = W_o RMSNorm(o * silu(u W_z))

    x has `expand_v * num_heads` heads of `head_dim` channels with one decay for each head; all heads share B
    and C of `state_size` channels. u, y `[B, T, hidden_size]`.

    >>> layer = Mamba2(64, num_heads=2, state_size=16)
    >>> y, state = layer(torch.randn(3, 10, 64), use_cache=True)
    >>> y.shape, state.memory.s.shape
    (torch.Size([3, 10, 64]), torch.Size([3, 4, 16, 32]))
    """

    undecayed = ("A_log", "dt_bias", "skip")
    fp32 = ("A_log", "dt_bias")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        expand_v: float = 2.0,
        state_size: int = 128,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        _, self.head_dim = resolve_heads(
            "mamba2",
            hidden_size,
            num_heads,
            head_dim=head_dim,
            expand_v=expand_v,
            state_size=state_size,
            conv_size=conv_size,
            norm_eps=norm_eps,
        )
        self.heads, self.state_size = round(expand_v * num_heads), state_size
        width = self.heads * self.head_dim
        self.in_proj = nn.Linear(hidden_size, width + 2 * state_size, bias=False)
        self.conv = ShortConv(width + 2 * state_size, conv_size, bias=True)
        self.dt_proj = nn.Linear(hidden_size, self.heads, bias=False)
        self.z_proj = nn.Linear(hidden_size, width, bias=False)
        self.A_log, self.dt_bias = (nn.Parameter(promote_to_fp32(torch.empty(self.heads))) for _ in range(2))
        self.skip = nn.Parameter(torch.empty(self.heads))
        self.norm = RMSNorm(width, norm_eps)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Rates exp(A_log) are uniform in [1, 16], softplus(dt_bias) is log-uniform in [0.001, 0.1]."""
        reset_decay(self.A_log, self.dt_bias, smallest_rate=1.0)
        nn.init.ones_(self.skip)

    def input_projections(self) -> tuple[Projection, ...]:
        return Projection("in_proj"), Projection("dt_proj", "linear"), Projection("z_proj")

    def state_like(self, sequences: int, dtype: torch.dtype) -> LayerState:
        memory = TensorSpec((sequences, self.heads, self.state_size, self.head_dim), dtype)
        return LayerState(self.conv.state_like(sequences, dtype), GLAState(memory))

    def core(
        self,
        projected: Sequence[Tensor],
        state: LayerState | None,
        use_cache: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, LayerState | None]:
        xbc, dt, z = projected
        self.check_state(state, xbc, cu_seqlens)
        conv, memory = state or (None, None)
        xbc, conv = self.conv(xbc, state=conv, use_cache=use_cache, cu_seqlens=cu_seqlens)
        N = self.state_size
        x, k, q = xbc.split((self.heads * self.head_dim, N, N), -1)  # x, B, C
        x = x.unflatten(-1, (self.heads, -1))
        dt = F.softplus(dt + self.dt_bias)
        g = -promote_to_fp32(self.A_log).exp() * dt
        o, memory = self.scan(
            "gla",
            q[:, :, None],
            k[:, :, None],
            x * dt[..., None].to(x.dtype),
            g,
            scale=1.0,
            state=memory,
            in_place=use_cache and state is not None,
            cu_seqlens=cu_seqlens,
        )
        o = o + x * self.skip[:, None].to(x.dtype)
        return silu_product(z, o.flatten(-2)), LayerState(conv, memory) if use_cache else None

    def output_prologue(self) -> RowInput:
        return RowInput("rms_norm", self.norm.weight, self.norm.eps)

    def output(self, o: Tensor) -> Tensor:
        return apply_linears(residual_norm(self.norm, o)[1], [self.o_proj])[0]


_FIELDS = ("head_dim", "expand_v", "state_size", "conv_size", "norm_eps")
# On attention's projections k, q and v are B, C and x of each head; decay, dt and skip are added.
_ON_ATTENTION = ("num_kv_heads", "head_dim", "conv_size", "norm_eps")
register(
    "mamba2",
    make_builder(Mamba2, *_FIELDS),
    *_FIELDS,
    has_mlp=False,
    on_attention=Mixer(
        make_builder(GatedLinearAttention, *_ON_ATTENTION, gate="scalar", conv_size=4), _ON_ATTENTION
    ),
)
