"""DeltaProduct, and with n = 1 DeltaNet and Gated DeltaNet."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from girih.nn.functional.fields import head_widths, resolve_heads
from girih.nn.functional.state import LayerState, TensorSpec
from girih.nn.layers.decay import DecayGate
from girih.nn.layers.mixers import make_builder, register
from girih.nn.layers.norm import GatedRMSNorm
from girih.nn.layers.projections import Projection, decay_projections, split_heads, split_steps
from girih.nn.layers.recurrent_layer import RecurrentLayer
from girih.nn.layers.short_conv import ShortConv
from girih.ops import DeltaProductState
from girih.ops._describe import option

CHUNK = option("delta_product", "chunk")


class DeltaProduct(RecurrentLayer):
    """A matrix memory with n delta-rule updates for each token (DeltaProduct; Siems et al. 2025; eq. 16 of
    TPTT, Furfaro 2025).

        S <- e^g S;  for j < n:  S <- S + beta_j k_j (v_j - S^T k_j)^T;   o = S^T q / sqrt(D)
        y = W_o (RMSNorm(o) * silu(x W_g))

    q, k and v pass through a short convolution with SiLU; q and k are l2-normalized; `beta = sigmoid(x W)`,
    doubled if `allow_neg_eigval`. `n=1` is DeltaNet, with `gated` Gated DeltaNet. `between_chunks` (gelu or
    tanh) is applied to S after every `chunk` tokens (TPTT, eq. 24); `chunk` is None without it. num_heads
    query heads read num_kv_heads memories; num_kv_heads defaults to num_heads and divides it. Keys have
    `expand_k * head_dim` channels, values `expand_v * head_dim`, both whole numbers. x, y
    `[B, T, hidden_size]`.

    >>> layer = DeltaProduct(64, num_heads=2, n=2, gated=True)
    >>> y, state = layer(torch.randn(3, 10, 64), use_cache=True)
    >>> y.shape, state.memory.s.shape
    (torch.Size([3, 10, 64]), torch.Size([3, 2, 32, 32]))
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        n: int = 1,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        gated: bool = False,
        allow_neg_eigval: bool = False,
        between_chunks: str | None = None,
        chunk: int | None = None,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        kv_heads, head_dim = resolve_heads(
            "delta_product",
            hidden_size,
            num_heads,
            n=n,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            expand_k=expand_k,
            expand_v=expand_v,
            gated=gated,
            allow_neg_eigval=allow_neg_eigval,
            between_chunks=between_chunks,
            conv_size=conv_size,
            norm_eps=norm_eps,
            **({} if chunk is None else {"chunk": chunk}),
        )
        if between_chunks is not None and chunk is None:
            least, most = (int(CHUNK[bound]) for bound in ("least", "most"))
            raise ValueError(f"chunk is None; expected {least} to {most} with between_chunks")
        if between_chunks is None and chunk is not None:
            raise ValueError(f"chunk is {chunk}; expected none: it is for between_chunks")
        self.n, self.gated, self.allow_neg_eigval = n, gated, allow_neg_eigval
        self.between_chunks, self.chunk = between_chunks, chunk
        self.heads = (num_heads, n * kv_heads, n * kv_heads)  # of q, k, v: n keys and values for each memory
        self.key_dim, self.value_dim = head_widths(head_dim, expand_k, expand_v)
        channels = num_heads * self.key_dim + n * kv_heads * (self.key_dim + self.value_dim)
        self.qkv_proj = nn.Linear(hidden_size, channels, bias=False)
        self.conv = ShortConv(channels, conv_size)
        self.beta_proj = nn.Linear(hidden_size, n * kv_heads, bias=False)
        # With DecayGate's default, an initial dt up to 0.1, the memory forgets a key before its query: recall
        # of 32 pairs (MQAR, girih.data) after 800 training steps was 4% and 12% (two seeds). An initial dt
        # up to 0.01 gives 100%.
        self.decay = DecayGate(hidden_size, kv_heads, largest_step=0.01) if gated else None
        self.g_proj = nn.Linear(hidden_size, num_heads * self.value_dim, bias=False)
        self.norm = GatedRMSNorm(self.value_dim, norm_eps)
        self.o_proj = nn.Linear(num_heads * self.value_dim, hidden_size, bias=False)

    def input_projections(self) -> tuple[Projection, ...]:
        beta = Projection("beta_proj", "sigmoid", 2.0 if self.allow_neg_eigval else 1.0)
        return Projection("qkv_proj"), beta, Projection("g_proj"), *decay_projections(self)

    def state_like(self, sequences: int, dtype: torch.dtype) -> LayerState:
        memory = TensorSpec((sequences, self.heads[2] // self.n, self.key_dim, self.value_dim), dtype)
        position = TensorSpec((sequences,), torch.int64) if self.between_chunks else None
        return LayerState(self.conv.state_like(sequences, dtype), DeltaProductState(memory, position))

    def core(
        self,
        projected: Sequence[Tensor],
        state: LayerState | None,
        use_cache: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, LayerState | None]:
        qkv, beta, gate, *decay = projected
        g = decay[0] if decay else None
        self.check_state(state, qkv, cu_seqlens)
        conv, memory = state or (None, None)
        qkv, conv = self.conv(qkv, state=conv, use_cache=use_cache, cu_seqlens=cu_seqlens)
        q, k, v = split_heads(qkv, self.heads, self.key_dim, self.value_dim)
        k, v, beta = (split_steps(rows, self.n) for rows in (k, v, beta))
        # For n > 1 split_steps copies k and v. A copy of q too frees qkv: autograd saves q, not qkv.
        if self.n > 1 and torch.is_grad_enabled():
            q = q.contiguous()
        del qkv
        o, memory = self.scan(
            "delta_product",
            q,
            k,
            v,
            beta,
            g,
            n=self.n,
            l2norm_qk=True,
            chunk=self.chunk,
            between_chunks=self.between_chunks,
            state=memory,
            in_place=use_cache and state is not None,
            cu_seqlens=cu_seqlens,
        )
        o = self.norm(o, gate.unflatten(-1, (-1, self.value_dim)))
        return o.flatten(-2), LayerState(conv, memory) if use_cache else None


_FIELDS = (
    "num_kv_heads",
    "head_dim",
    "expand_k",
    "expand_v",
    "allow_neg_eigval",
    "between_chunks",
    "chunk",
    "conv_size",
    "norm_eps",
)


def _register(name: str, *specific: str, **fixed: Any) -> None:
    """Registers a mixer of this layer. specific: its fields beside `_FIELDS`. fixed: the mixer's options."""
    fields = (*specific, *_FIELDS)

    def build(config: Any) -> nn.Module:
        # Without between_chunks the layer has no chunk; the field may be that of other layers of the model.
        read = [field for field in fields if field != "chunk" or config.between_chunks]
        return make_builder(DeltaProduct, *read, **fixed)(config)

    register(name, build, *fields)


_register("delta_product", "n", "gated")
_register("deltanet", n=1, gated=False)
_register("gated_deltanet", n=1, gated=True, expand_v=2.0)
