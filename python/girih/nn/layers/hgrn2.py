"""HGRN2's mixer."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.nn.functional.fields import head_widths, resolve_heads
from girih.nn.functional.fused import residual_norm
from girih.nn.functional.gates import promote_to_fp32
from girih.nn.functional.linears import apply_linears
from girih.nn.functional.state import LayerState, TensorSpec
from girih.nn.functional.step import RowInput
from girih.nn.layers.mixers import register_layer
from girih.nn.layers.norm import RMSNorm
from girih.nn.layers.projections import Projection, split_heads
from girih.nn.layers.recurrent_layer import RecurrentLayer
from girih.ops import GLAState


class HGRN2(RecurrentLayer):
    """A memory with forget gates f and keys 1 - f (HGRN2; Qin et al. 2024).

        f = lower_bound + (1 - lower_bound) sigmoid(x W_f),   q = silu(x W_q),   v = x W_v
        S <- Diag(f) S + (1 - f) v^T,   o = S^T q,   y = W_o RMSNorm(o)

    Keys have `expand_k * head_dim` channels (the paper's state expansion), values `expand_v * head_dim`. A
    model sets the `lower_bound` of layer i of L to i / L, the initial value of the paper's learned bounds. x,
    y `[B, T, hidden_size]`.

    >>> layer = HGRN2(64, num_heads=2)
    >>> y, state = layer(torch.randn(3, 10, 64), use_cache=True)
    >>> y.shape, state.memory.s.shape
    (torch.Size([3, 10, 64]), torch.Size([3, 2, 32, 32]))
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        lower_bound: float = 0.0,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        _, head_dim = resolve_heads(
            "hgrn2",
            hidden_size,
            num_heads,
            head_dim=head_dim,
            expand_k=expand_k,
            expand_v=expand_v,
            norm_eps=norm_eps,
        )
        self.heads = (num_heads,) * 3
        self.key_dim, self.value_dim = head_widths(head_dim, expand_k, expand_v)
        self.set_lower_bound(lower_bound)
        width = num_heads * self.value_dim
        self.qfv_proj = nn.Linear(hidden_size, 2 * num_heads * self.key_dim + width, bias=False)
        self.norm = RMSNorm(width, norm_eps)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def set_lower_bound(self, lower_bound: float) -> None:
        if not 0 <= lower_bound < 1:
            raise ValueError(f"lower_bound is {lower_bound}; expected at least 0 and less than 1")
        self.lower_bound = lower_bound

    def set_depth(self, layer: int, num_layers: int) -> None:
        self.set_lower_bound(layer / num_layers)

    def input_projections(self) -> tuple[Projection, ...]:
        return (Projection("qfv_proj"),)

    def state_like(self, sequences: int, dtype: torch.dtype) -> LayerState:
        memory = TensorSpec((sequences, self.heads[0], self.key_dim, self.value_dim), dtype)
        return LayerState(None, GLAState(memory))

    def core(
        self,
        projected: Sequence[Tensor],
        state: LayerState | None,
        use_cache: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, LayerState | None]:
        self.check_state(state, projected[0], cu_seqlens)
        q, f, v = split_heads(projected[0], self.heads, self.key_dim, self.value_dim)
        logits, bound = promote_to_fp32(f), self.lower_bound
        # g = log f. sigmoid(logits) may underflow: without a bound use logsigmoid.
        g = torch.log(bound + (1 - bound) * logits.sigmoid()) if bound else F.logsigmoid(logits)
        k = ((1 - bound) * torch.sigmoid(-logits)).to(v.dtype)  # 1 - f
        o, memory = self.scan(
            "gla",
            F.silu(q),
            k,
            v,
            g,
            scale=1.0,
            state=None if state is None else state.memory,
            in_place=use_cache and state is not None,
            cu_seqlens=cu_seqlens,
        )
        return o.flatten(-2), LayerState(None, memory) if use_cache else None

    def output_prologue(self) -> RowInput:
        return RowInput("rms_norm", self.norm.weight, self.norm.eps)

    def output(self, o: Tensor) -> Tensor:
        return apply_linears(residual_norm(self.norm, o)[1], [self.o_proj])[0]


register_layer("hgrn2", HGRN2, "head_dim", "expand_k", "expand_v", "norm_eps", compared=False)
