"""LiZA: a linear path that reads the same q, k and v as attention, and MaG, which mixes the two (TPTT)."""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from girih.conversion.config import Injection
from girih.conversion.projections import Projections
from girih.conversion.rows import MAX_STEPS, ChannelGate, PooledGate, VirtualRows, has_kernel, silu_normalize
from girih.nn import MemoryAsGate, RMSNorm
from girih.nn.functional.fused import autocast_device, autocast_dtype, residual_norm
from girih.nn.functional.gates import promote_to_fp32
from girih.nn.functional.packing import token_positions
from girih.nn.functional.state import TensorSpec, advance, current_pieces
from girih.nn.layers.recurrent_layer import RecurrentLayer
from girih.nn.layers.short_conv import cast_conv_state
from girih.ops import DeltaProductState, GLAState, ShortConvState

WINDOW = 3  # tokens of the mean for pool="window"


class LinearPathState(NamedTuple):
    """pool: the sum over tokens of the k or v from which beta is computed, `[N, heads, 1, head_dim]`, or for
        pool="window" their last rows.
    count: `[N]`, number of tokens; None for pool="window".
    differences: for the difference of each order, the previous row of k and v.
    memory: S, and the position in its chunk.
    """

    pool: Any
    count: Tensor | None
    differences: tuple[Any, ...]
    memory: Any


class LinearAttentionState(NamedTuple):
    """memory: S, `s [N, kv_heads, head_dim, head_dim]`. normalizer: z, the S of values that are 1,
    `s [N, kv_heads, head_dim, 1]`."""

    memory: GLAState
    normalizer: GLAState


def rotate_pairs(x: Tensor, angle: float) -> Tensor:
    """The pairs (2i, 2i + 1) of x `[..., D]` rotated by `angle` (eq. 23)."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = math.cos(angle), math.sin(angle)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


class SharedPath(RecurrentLayer):
    """A linear path that reads an attention's q, k and v and has no projections; `read` computes it.

    q `[B, T, heads head_dim]`, k and v `[B, T, kv_heads head_dim]` from `Projections` -> o
    `[B, T, heads head_dim]`.
    """

    def __init__(self, sizes: Projections):
        super().__init__()
        self.heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
        self.head_dim = sizes.head_dim

    def forward(
        self,
        qkv: Sequence[Tensor],
        attention_mask: Tensor | None = None,
        state: Any = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        self.check_state(state, qkv[0], cu_seqlens)
        if attention_mask is None:
            return self.read(qkv, state, use_cache, cu_seqlens)
        return super().forward(torch.cat(tuple(qkv), -1), attention_mask, state, use_cache, cu_seqlens)

    def mix(self, x: Tensor, state: Any, use_cache: bool, cu_seqlens: Tensor | None) -> tuple[Tensor, Any]:
        qkv = x.split([heads * self.head_dim for heads in self.heads], -1)
        return self.read(qkv, state, use_cache, cu_seqlens)

    def rows(self, qkv: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """q, k and v by heads, `[B, T, heads, head_dim]`, in one dtype. Norms with an fp32 weight, as in
        Qwen, return q and k in fp32 while v is 16-bit."""
        wide = functools.reduce(torch.promote_types, (x.dtype for x in qkv))
        return tuple(x.to(wide).unflatten(-1, (-1, self.head_dim)) for x in qkv)

    def read(
        self, qkv: Sequence[Tensor], state: Any, use_cache: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Any]:
        raise NotImplementedError


class LinearPath(SharedPath):
    """DeltaProduct of an attention's q, k and v, without projections (Furfaro 2025, section 3).

        beta = sigmoid(mean of k over the past),   q, k, v <- silu(.) / |silu(.)|            eq. 5, 4
        k_0 = k, v_0 = v;   k_m, v_m: their virtual tokens                                   eq. 22, 23
        for m < n:  S <- S + k_m (beta * v_m - S^T (beta * k_m))^T
        o = RMSNorm(S^T q)                                                                   eq. 6

    q, k, v and o as in `SharedPath`. o has no scale, because the norm removes any scale.
    """

    def __init__(self, sizes: Projections, injection: Injection):
        super().__init__(sizes)
        self.n, self.virtual_tokens = injection.n, injection.virtual_tokens
        self.gate, self.gate_per, self.pool = injection.gate, injection.gate_per, injection.pool
        self.between_chunks = injection.between_chunks
        self.chunk = injection.chunk if injection.between_chunks else None
        if injection.virtual_tokens != "derivative" and sizes.head_dim % 2:
            raise ValueError(
                f"virtual_tokens is {injection.virtual_tokens!r}, which turns pairs of channels; heads have "
                f"{sizes.head_dim}"
            )
        self.norm = RMSNorm(sizes.head_dim, injection.norm_eps)

    def state_like(self, sequences: int, dtype: torch.dtype) -> LinearPathState:
        heads, D, is_past = self.heads[1], self.head_dim, self.pool == "past"
        pooled_heads = heads * len(self.gate)
        tokens = TensorSpec((sequences,), torch.int64)
        if is_past:
            pool = GLAState(TensorSpec((sequences, pooled_heads, 1, D), dtype))
        else:
            pool = ShortConvState(TensorSpec((sequences, WINDOW - 1, pooled_heads * D)))
        row = ShortConvState(TensorSpec((sequences, 1, 2 * heads * D)))
        differences = () if self.virtual_tokens == "rotary" else (row,) * (self.n - 1)
        memory = TensorSpec((sequences, heads, D, D), dtype)
        position = tokens if self.between_chunks else None
        return LinearPathState(
            pool, tokens if is_past else None, differences, DeltaProductState(memory, position)
        )

    def pool_mean(
        self, x: Tensor, state: LinearPathState | None, in_place: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Any, Tensor | None]:
        """The causal mean of x `[B, T, heads, head_dim]`, in fp32, and `pool` and `count` of the state."""
        if self.pool == "window":
            options = {"in_place": in_place, "cu_seqlens": cu_seqlens}
            past = cast_conv_state(None if state is None else state.pool, x)
            taps = x.new_full((x.shape[2] * x.shape[3], WINDOW), 1 / WINDOW)
            mean, pool = advance("short_conv", x.flatten(2), taps, None, state=past, **options)
            return promote_to_fp32(mean.view_as(x)), pool, None
        total, pool = self.sum_tokens(x, state, in_place, cu_seqlens)
        position, count = token_positions(x, None if state is None else state.count, cu_seqlens)
        return total / (position + 1)[..., None, None].float(), pool, count  # in fp32 or fp64

    def sum_tokens(
        self, x: Tensor, state: LinearPathState | None, in_place: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Any]:
        """The running sum of x `[B, T, heads, head_dim]`, computed as linear attention with k = q = 1. For
        bf16 the operator sums in fp32 and returns bf16, which is precise enough for the mean. For fp16 the
        sum may overflow, so x is converted to fp32."""
        past = None if state is None else state.pool
        options = {"in_place": in_place, "cu_seqlens": cu_seqlens}
        dtype, region = sum_region(x)
        with region:
            x = x.to(dtype)
            one = x.new_ones(1).expand(*x.shape[:3], 1)
            return advance("gla", one, one, x, None, scale=1.0, state=past, **options)

    def differences(
        self, x: Tensor, state: LinearPathState | None, in_place: bool, cu_seqlens: Tensor | None
    ) -> tuple[list[Tensor], tuple[Any, ...]]:
        """x `[B, T, heads, head_dim]`, x^(1), ..., x^(n-1), each half the difference of the one before."""
        taps = torch.arange(-0.5, 1.0, dtype=x.dtype, device=x.device)  # -1/2, 1/2
        taps = taps.expand(x.shape[2] * x.shape[3], 2)
        rows, states = [x], []
        for m in range(1, self.n):
            past = cast_conv_state(None if state is None else state.differences[m - 1], x)
            row, after = advance(
                "short_conv",
                rows[-1].flatten(2),
                taps,
                None,
                state=past,
                in_place=in_place,
                cu_seqlens=cu_seqlens,
            )
            rows.append(row.view_as(x))
            states.append(after)
        return rows, tuple(states)

    def step_sizes(
        self,
        k: Tensor,
        v: Tensor,
        state: LinearPathState | None,
        in_place: bool,
        cu_seqlens: Tensor | None,
        is_last: bool = False,
    ) -> tuple[Tensor, Any, Tensor | None]:
        """beta `[B, T n, kv_heads, head_dim]`, or `[B, T n, kv_heads]` for gate_per="head", and `pool` and
        `count` of the state; None if no call follows (`is_last`). k, v `[B, T, kv_heads, head_dim]`.

        beta is fp32, except that the kernel for channels returns it in the dtype of the running sums: bf16
        for bf16, to which the rows that it multiplies are rounded too.
        """
        source = {"k": k, "v": v}.get(self.gate)
        if is_last and source is not None and self.pool == "past" and has_kernel(source):
            if self.gate_per == "channel":
                return ChannelGate.apply(source, self.n), None, None
            return self.repeat_steps(PooledGate.apply(source)), None, None
        source = torch.cat((k, v), 2) if source is None else source
        mean, pool, count = self.pool_mean(source, state, in_place, cu_seqlens)
        beta = mean.sigmoid()
        if self.gate == "kv":
            k_gate, v_gate = beta.chunk(2, 2)
            beta = k_gate * v_gate
        return self.repeat_steps(beta.mean(-1) if self.gate_per == "head" else beta), pool, count

    def repeat_steps(self, beta: Tensor) -> Tensor:
        """Repeats beta for the n updates of each token."""
        return beta.repeat_interleave(self.n, 1) if self.n > 1 else beta

    def virtual_rows(
        self, kv: Tensor, state: LinearPathState | None, in_place: bool, cu_seqlens: Tensor | None
    ) -> tuple[list[Tensor], tuple[Any, ...]]:
        """n tensors `[B, T, 2 kv_heads, head_dim]`, k and v of each update of a token, and `differences` of
        the state."""
        rows, states, rotated = [], (), []
        if self.virtual_tokens != "rotary":
            rows, states = self.differences(kv, state, in_place, cu_seqlens)
        if self.virtual_tokens != "derivative":
            rotated = [rotate_pairs(kv, 2 * math.pi * m / self.n) if m else kv for m in range(self.n)]
        if self.virtual_tokens == "both":
            rows = [(row + rotation) / 2 for row, rotation in zip(rows, rotated, strict=True)]
        return rows or rotated, states

    def read(
        self,
        qkv: Sequence[Tensor],
        state: LinearPathState | None,
        use_cache: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, LinearPathState | None]:
        in_place = use_cache and state is not None
        q, k, v = self.rows(qkv)
        # Every row is a whole sequence: it begins with this call, and no later call continues it.
        is_whole_text = state is None and cu_seqlens is None and not use_cache
        is_whole_text = is_whole_text and current_pieces.get() is None
        beta, pool, count = self.step_sizes(k, v, state, in_place, cu_seqlens, is_whole_text)
        differences: tuple[Any, ...] = ()
        has_kernel_rows = self.n == 1 or (self.virtual_tokens == "derivative" and self.n <= MAX_STEPS)
        if is_whole_text and has_kernel_rows and all(has_kernel(x) for x in (q, k, v)):
            q, k, v = VirtualRows.apply(q, k, v, self.n)
        else:
            q, kv = silu_normalize(q), silu_normalize(torch.cat((k, v), 2))
            rows, differences = self.virtual_rows(kv, state, in_place, cu_seqlens)
            kv = torch.stack(rows, 2).flatten(1, 2) if self.n > 1 else kv  # token by token
            k, v = kv.split(self.heads[1:], 2)
        with keep_dtypes(q, k, v, beta):
            o, memory = advance(
                "delta_product",
                q,
                k,
                v,
                beta,
                None,
                n=self.n,
                scale=1.0,
                chunk=self.chunk,
                between_chunks=self.between_chunks,
                state=None if state is None else state.memory,
                in_place=in_place,
                cu_seqlens=cu_seqlens,
            )
        y = residual_norm(self.norm, o)[1].flatten(-2)
        return y, LinearPathState(pool, count, differences, memory) if use_cache else None


def elu_plus_one(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1, computed as x + 1 for x > 0, else e^x: (e^x - 1) + 1 would lose digits."""
    return torch.where(x > 0, x + 1, x.masked_fill(x > 0, 0).exp())


class LinearAttentionPath(SharedPath):
    """Linear attention of an attention's q, k and v (Furfaro 2025, eq. 3 with beta = 1, and Algorithm 1).

        S <- S + phi(k) v^T,   z <- z + phi(k),   o = S^T phi(q) / (z^T phi(q)),   phi(x) = elu(x) + 1

    The weights of the values sum to 1, as in softmax. The path has no norm, which would remove the
    denominator, and no parameters. q, k, v and o as in `SharedPath`.
    """

    def __init__(self, sizes: Projections, injection: Injection):
        super().__init__(sizes)

    def state_like(self, sequences: int, dtype: torch.dtype) -> LinearAttentionState:
        heads, D = self.heads[1], self.head_dim
        return LinearAttentionState(*(GLAState(TensorSpec((sequences, heads, D, V), dtype)) for V in (D, 1)))

    def read(
        self,
        qkv: Sequence[Tensor],
        state: LinearAttentionState | None,
        use_cache: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, LinearAttentionState | None]:
        q, k, v = self.rows(qkv)
        dtype = q.dtype
        memory, normalizer = state or (None, None)
        options = {"scale": 1.0, "in_place": use_cache and state is not None, "cu_seqlens": cu_seqlens}
        sums, region = sum_region(q)
        with region:
            q, k, v = (x.to(sums) for x in (q, k, v))
            q, k = elu_plus_one(q), elu_plus_one(k)
            total, memory = advance("gla", q, k, v, None, state=memory, **options)
            ones = v.new_ones(1).expand(*v.shape[:-1], 1)
            weight, normalizer = advance("gla", q, k, ones, None, state=normalizer, **options)
            # Tokens of no sequence have weight 0: their output is meaningless, but finite.
            o = total / weight.where(weight > 0, 1)
        y = o.to(dtype).flatten(-2)
        return y, LinearAttentionState(memory, normalizer) if use_cache else None


PATHS = {"delta_product": LinearPath, "linear_attention": LinearAttentionPath}


def keep_dtypes(*tensors: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast if all tensors have autocast's dtype. The operator would cast a 16-bit beta
    to fp32, without gain in precision, and its gradient back."""
    if {x.dtype for x in tensors} != {autocast_dtype(tensors[0])}:
        return nullcontext()
    return torch.autocast(autocast_device(tensors[0]), enabled=False)


def sum_region(x: Tensor) -> tuple[torch.dtype, AbstractContextManager[Any]]:
    """The dtype of data that is summed over tokens, and a context for the sum: fp32 without autocast in place
    of fp16, because sums may exceed its range."""
    if torch.float16 in (x.dtype, autocast_dtype(x)):
        return torch.float32, torch.autocast(autocast_device(x), enabled=False)
    return x.dtype, nullcontext()


class Liza(MemoryAsGate):
    """The module that `girih.inject` adds to an attention: a linear path, and the weight m of the mixture.

    y = (1 - m) attention(x) + m W_o path(q, k, v)          W_o is the attention's own
    """

    def __init__(self, sizes: Projections, injection: Injection):
        super().__init__(weight=injection.weight, learned=injection.learned, cross=injection.cross)
        self.path = PATHS[injection.mixer](sizes, injection)

    def forward(
        self,
        base: Tensor,
        qkv: Sequence[Tensor],
        project: Callable[[Tensor], Tensor],
        attention_mask: Tensor | None = None,
        state: Any = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """base: the output of attention, `[B, T, hidden_size]`. Returns the mixture and the path's state."""
        o, state = self.path(qkv, attention_mask, state, use_cache, cu_seqlens)
        return self.mixture(base, project(o)), state
