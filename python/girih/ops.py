"""The operators, as functions. All differentiate, compile under ``torch.compile`` and run on CPU and CUDA.

Letters: ``B`` batch, ``T`` tokens, ``H`` heads, ``D`` key width, ``V`` value width, ``M`` slots, ``N``
sequences (``B``, or what ``cu_seqlens`` says). Gates are logs, at most 0. ``q`` may have a multiple of the
other tensors' heads. States are fp32 (fp64 when the inputs are); ``state=None`` is the start of a sequence.
``cu_seqlens [N + 1]`` (int32 or int64, on the device) packs ``N`` sequences into ``B == 1``; ``[B, 2]`` says
where in each row its one sequence begins and ends. Tokens outside belong to no sequence: they do nothing and
their ``o`` is 0. ``X_step`` reads one token (``T == 1``), writes the state's tensors in place and returns
``o`` alone. A wrong argument raises ``ValueError`` and names the argument.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "DeltaProductState",
    "GLAState",
    "GSAState",
    "LatticeState",
    "ShortConvState",
    "TrellisState",
    "cat_attention",
    "delta_product",
    "delta_product_step",
    "gated_rms_norm",
    "gla",
    "gla_step",
    "gsa",
    "gsa_step",
    "lattice",
    "lattice_step",
    "short_conv",
    "short_conv_step",
    "trellis",
    "trellis_step",
]


def _each(memory: Tensor, q: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """A first memory, shared ``[H, ...]`` or one a sequence ``[N, H, ...]`` -> one a sequence."""
    if memory.dim() != 3:
        return memory
    packed = cu_seqlens is not None and cu_seqlens.dim() == 1
    return memory.expand(max(cu_seqlens.shape[0] - 1, 0) if packed else q.shape[0], *memory.shape)


def _own(memory: Tensor, batch: int, device) -> Tensor:
    """A first memory, shared or one a sequence -> ``batch`` of them in memory of their own."""
    return memory.detach().to(device).expand(batch, *memory.shape[-3:]).clone()


class GSAState(NamedTuple):
    """Memories of :func:`gsa`: ``k [N, H, D, M]``, ``v [N, H, M, V]`` and, for ABC alone, ``z [N, H, M]``."""

    k: Tensor
    v: Tensor
    z: Tensor | None = None

    @classmethod
    def start(
        cls,
        batch: int,
        heads: int,
        D: int,
        V: int,
        M: int,
        *,
        abc: bool = False,
        dtype=torch.float32,
        device=None,
    ) -> "GSAState":
        """The state before the first token, in tensors of its own, as ``gsa_step`` and a CUDA graph need."""
        like = {"dtype": dtype, "device": device}
        return cls(
            torch.zeros(batch, heads, D, M, **like),
            torch.zeros(batch, heads, M, V, **like),
            torch.full((batch, heads, M), -torch.inf, **like) if abc else None,
        )


def gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor | None = None,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    feature: str = "softmax",
    state: GSAState | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, GSAState]:
    """Gated slot attention (Zhang et al. 2024), and without ``g`` its ungated form ABC (Peng et al. 2021).

    ::

        Hk_t = Hk_{t-1} Diag(e^{g_t}) + k_t s_t^T        p_t = feature(scale * Hk_t^T q_t)
        Hv_t = Diag(e^{g_t}) Hv_{t-1} + s_t v_t^T        o_t = Hv_t^T p_t

    Shapes: q ``[B, T, HQ, D]``, k ``[B, T, H, D]``, v ``[B, T, H, V]``, s and g ``[B, T, H, M]``; o
    ``[B, T, HQ, V]``. ``s=None`` is ``1 - e^g``. ``g=None`` is ABC: s are logits, normalised over all
    tokens so far; ``-inf`` masks a token. ``scale`` defaults to ``D**-0.5``; ``feature`` is softmax, none,
    silu, relu or relu2.
    """
    o, *parts = torch.ops.girih.gsa(
        q, k, v, s, g, *(state or (None, None, None)), cu_seqlens, scale=scale, feature=feature
    )
    return o, GSAState(*parts)


def gsa_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor | None = None,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    feature: str = "softmax",
    state: GSAState,
) -> Tensor:
    """One token of :func:`gsa`; ``state`` is written in place."""
    return torch.ops.girih.gsa_step(q, k, v, s, g, *state, scale=scale, feature=feature)


class GLAState(NamedTuple):
    """Memory of :func:`gla`: ``s [N, H, D, V]``."""

    s: Tensor

    @classmethod
    def start(cls, batch: int, heads: int, D: int, V: int, *, dtype=torch.float32, device=None) -> "GLAState":
        """The state before the first token, in tensors of its own."""
        return cls(torch.zeros(batch, heads, D, V, dtype=dtype, device=device))


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    state: GLAState | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, GLAState]:
    """Gated linear attention (Yang et al. 2024): plain, with one gate a head, or with one a key channel.

    ::

        S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T          o_t = scale * S_t^T q_t

    Shapes: q ``[B, T, HQ, D]``, k ``[B, T, H, D]``, v ``[B, T, H, V]``, g ``[B, T, H]`` or ``[B, T, H, D]``;
    o ``[B, T, HQ, V]``. ``scale`` defaults to ``D**-0.5``. ``g=None`` is linear attention.
    """
    o, *parts = torch.ops.girih.gla(q, k, v, g, *(state or (None,)), cu_seqlens, scale=scale)
    return o, GLAState(*parts)


def gla_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *, scale: float | None = None, state: GLAState
) -> Tensor:
    """One token of :func:`gla`; ``state`` is written in place."""
    return torch.ops.girih.gla_step(q, k, v, g, *state, scale=scale)


class DeltaProductState(NamedTuple):
    """Memory of :func:`delta_product`: ``s [N, H, D, V]``, ``position [N]`` (int64).

    The position, the tokens of the current chunk that have been read, is there with ``between_chunks`` alone.
    """

    s: Tensor
    position: Tensor | None = None

    @classmethod
    def start(
        cls,
        batch: int,
        heads: int,
        D: int,
        V: int,
        *,
        between_chunks: bool = False,
        dtype=torch.float32,
        device=None,
    ) -> "DeltaProductState":
        """The state before the first token, in tensors of its own."""
        return cls(
            torch.zeros(batch, heads, D, V, dtype=dtype, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device) if between_chunks else None,
        )


def _steps_per_token(q: Tensor, k: Tensor, n: int | None) -> int:
    """``n`` of :func:`delta_product`, from the rows of k when it is None; without tokens it is 1."""
    if n is not None:
        return n
    tokens, rows = q.shape[1], k.shape[1]
    if tokens == 0:
        return 1
    if rows == 0 or rows % tokens:
        raise ValueError(
            f"girih.delta_product: k has {rows} rows but should have T * n, a multiple of q's T = {tokens}"
        )
    return rows // tokens


def delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    n: int | None = None,
    scale: float | None = None,
    l2norm_qk: bool = False,
    chunk: int | None = None,
    between_chunks: str | None = None,
    state: DeltaProductState | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, DeltaProductState]:
    """DeltaProduct (Siems et al. 2025): ``n`` delta-rule steps a token.

    ``n = 1`` is DeltaNet (Yang et al. 2024), with g Gated DeltaNet; a vector beta is the gate of LiZA
    (Furfaro 2025).

    ::

        S <- e^{g_t} S                                    once a token
        for j < n:  S <- S + k_{t,j} (w_{t,j} - S^T b_{t,j})^T        b = beta k, w = beta v
        o_t = scale * S_t^T q_t                           after the last step

    Shapes: q ``[B, T, HQ, D]``, k ``[B, T * n, H, D]``, v ``[B, T * n, H, V]``, token by token; beta
    ``[B, T * n, H]`` or, where D == V, ``[B, T * n, H, D]``; g ``[B, T, H]``; o ``[B, T, HQ, V]``.
    ``n=None`` infers n. ``scale`` defaults to ``D**-0.5``. ``l2norm_qk`` divides q and k by their length.
    The memory stays bounded where ``beta |k|^2`` is between 0 and 2.

    ``between_chunks`` (``"gelu"`` or ``"tanh"``; Furfaro 2025, eq. 24) is applied to S after every ``chunk``
    tokens of a sequence, never on a part of a chunk. ``chunk``, 1 to 64, is then part of the model; without
    ``between_chunks`` there is none to give.
    """
    o, *parts = torch.ops.girih.delta_product(
        q,
        k,
        v,
        beta,
        g,
        *(state or (None, None)),
        cu_seqlens,
        n=_steps_per_token(q, k, n),
        scale=scale,
        l2norm_qk=l2norm_qk,
        chunk=chunk,
        between_chunks=between_chunks,
    )
    return o, DeltaProductState(*parts)


def delta_product_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    n: int | None = None,
    scale: float | None = None,
    l2norm_qk: bool = False,
    chunk: int | None = None,
    between_chunks: str | None = None,
    state: DeltaProductState,
) -> Tensor:
    """One token of :func:`delta_product`; ``state`` is written in place."""
    return torch.ops.girih.delta_product_step(
        q,
        k,
        v,
        beta,
        g,
        *state,
        n=_steps_per_token(q, k, n),
        scale=scale,
        l2norm_qk=l2norm_qk,
        chunk=chunk,
        between_chunks=between_chunks,
    )


class TrellisState(NamedTuple):
    """Memories of :func:`trellis`, now and at the start of the chunk: ``k`` and ``first_k`` ``[N, H, M, D]``,
    ``v`` and ``first_v`` ``[N, H, M, V]``; ``position`` int64 ``[N]``, how many tokens of the chunk are read.
    """

    first_k: Tensor
    k: Tensor
    first_v: Tensor
    v: Tensor
    position: Tensor | None = None

    @classmethod
    def start(cls, batch: int, first_k: Tensor, first_v: Tensor, *, device=None) -> "TrellisState":
        """The state before the first token, in its own tensors, from first memories (shared or ``N``)."""
        k, v = _own(first_k, batch, device), _own(first_v, batch, device)
        position = torch.zeros(batch, dtype=torch.int64, device=k.device)
        return cls(k, k.clone(), v, v.clone(), position)


def trellis(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    gamma: Tensor,
    g: Tensor | None = None,
    *,
    chunk: int,
    phi: str = "ln_silu",
    f: str = "ln_silu",
    state: TrellisState | tuple[Tensor, Tensor],
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, TrellisState]:
    """Trellis: two memories learn by gradient descent to map keys, and values, onto targets in slots.

    With ``x`` the key ``k_t`` for ``A1``, the value ``v_t`` for ``A2``, and ``A'`` the memory at the start of
    the chunk::

        u_t = J_phi(A' x_t)^T (phi(A' x_t) - a_t)        A_t = e^{g_t} A_{t-1} - gamma_t u_t x_t^T
        o_t = A2_t^T f(A1_t q_t)

    (Karami, Behrouz, Kacham and Mirrokni, eq. 8 to 12, the Jacobian transposed; their factor 2 is in gamma.)
    Shapes: q ``[B, T, HQ, D]``, k ``[B, T, H, D]``, v ``[B, T, H, V]``, a ``[B, T, H, M]``, gamma and g
    ``[B, T, H]``; o ``[B, T, HQ, V]``. ``chunk``, 1 to 64, is part of the model. ``phi`` and ``f`` are
    identity, silu, l2norm, layer_norm, l2_silu, ln_silu or softmax, over M. There is no zero start: ``state``
    is a :class:`TrellisState` or the first memories ``(A1 [H, M, D], A2 [H, M, V])``, ``N`` in front or not.
    """
    if state is not None and not isinstance(state, TrellisState):
        A1, A2 = state
        state = (None, _each(A1, q, cu_seqlens), None, _each(A2, q, cu_seqlens), None)
    o, *parts = torch.ops.girih.trellis(
        q, k, v, a, gamma, g, *(state or [None] * 5), cu_seqlens, chunk=chunk, phi=phi, f=f
    )
    return o, TrellisState(*parts)


def trellis_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    gamma: Tensor,
    g: Tensor | None = None,
    *,
    chunk: int,
    phi: str = "ln_silu",
    f: str = "ln_silu",
    state: TrellisState,
) -> Tensor:
    """One token of :func:`trellis`; ``state`` is written in place."""
    return torch.ops.girih.trellis_step(q, k, v, a, gamma, g, *state, chunk=chunk, phi=phi, f=f)


class LatticeState(NamedTuple):
    """Memory of :func:`lattice`: ``first [N, H, D, M]`` at the start of the chunk, ``step [N, H, D, M]`` what
    the chunk has added in its tangent spaces, ``decay [N, H]`` the sum of its gates so far (with ``g`` only),
    ``position`` int64 ``[N]``, how many tokens of the chunk are read.
    """

    first: Tensor
    step: Tensor | None = None
    decay: Tensor | None = None
    position: Tensor | None = None

    @classmethod
    def start(cls, batch: int, first: Tensor, *, gated: bool = False, device=None) -> "LatticeState":
        """The state before the first token, in its own tensors, from a first memory (shared or ``N``)."""
        first = _own(first, batch, device)
        decay = first.new_zeros(first.shape[:2]) if gated else None
        position = torch.zeros(batch, dtype=torch.int64, device=first.device)
        return cls(first, torch.zeros_like(first), decay, position)


def lattice(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    g: Tensor | None = None,
    *,
    chunk: int,
    objective: str = "decode",
    normalize: bool = True,
    shrinkage: float = 0.0,
    state: LatticeState | Tensor,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, LatticeState]:
    """Lattice: a memory of unit columns ``s_i``, each written only along what it does not hold yet.

    With ``S`` the memory at the start of the chunk and ``(h, c)`` the objective's pair::

        decode: h = S k - v, c = k      encode: h = v, c = S^T v - k      similarity: h = -v, c = k
        d_i = -gamma_t c_i (h - s_i (s_i.h))        X_t = e^{g_t} X_{t-1} + d        o_t = unit(X_t) q_t

    (Karami and Mirrokni, eq. 10, 11 and 15 with the true norm; their factor 2 is in gamma.) At ``chunk=1``
    alone: ``normalize=False`` leaves the norm of the columns free (eq. 10), ``shrinkage`` is the weight of an
    l1 penalty on the memory (eq. 17).
    Shapes: q ``[B, T, HQ, M]``, k ``[B, T, H, M]``, v ``[B, T, H, D]``, gamma and g ``[B, T, H]``; o
    ``[B, T, HQ, D]``. ``chunk``, 1 to 64, is part of the model. There is no zero start: ``state`` is a
    :class:`LatticeState` or the first memory ``S [H, D, M]``, ``N`` in front or not. Its columns are taken to
    be unit vectors, and its gradient is projected to their tangent spaces.
    """
    if isinstance(state, Tensor):
        state = LatticeState(_each(state, q, cu_seqlens))
    o, *parts = torch.ops.girih.lattice(
        q,
        k,
        v,
        gamma,
        g,
        *(state or [None] * 4),
        cu_seqlens,
        chunk=chunk,
        objective=objective,
        normalize=normalize,
        shrinkage=shrinkage,
    )
    return o, LatticeState(*parts)


def lattice_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    g: Tensor | None = None,
    *,
    chunk: int,
    objective: str = "decode",
    normalize: bool = True,
    shrinkage: float = 0.0,
    state: LatticeState,
) -> Tensor:
    """One token of :func:`lattice`; ``state`` is written in place."""
    return torch.ops.girih.lattice_step(
        q,
        k,
        v,
        gamma,
        g,
        *state,
        chunk=chunk,
        objective=objective,
        normalize=normalize,
        shrinkage=shrinkage,
    )


class ShortConvState(NamedTuple):
    """What :func:`short_conv` needs of the past: the last inputs ``x [N, W-1, channels]``, in x's dtype."""

    x: Tensor

    @classmethod
    def start(
        cls, batch: int, channels: int, width: int, *, dtype=torch.float32, device=None
    ) -> "ShortConvState":
        """The state before the first token, in a tensor of its own."""
        return cls(torch.zeros(batch, width - 1, channels, dtype=dtype, device=device))


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    state: ShortConvState | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, ShortConvState]:
    """Short convolution over time, one filter a channel, causal.

    ::

        z_t = bias + sum_j weight_j x_{t - (W-1) + j}        y_t = activation(z_t)

    Shapes: x and y ``[B, T, channels]``, weight ``[channels, W]`` with W from 1 to 4, the last tap the
    current token; bias ``[channels]``. ``activation`` is None or silu. weight and bias may have another float
    dtype than x; the sum is formed in fp32 (fp64 for fp64). A token that no sequence of ``cu_seqlens`` owns
    gives 0.
    """
    y, *parts = torch.ops.girih.short_conv(
        x, weight, bias, *(state or (None,)), cu_seqlens, activation=activation
    )
    return y, ShortConvState(*parts)


def short_conv_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    state: ShortConvState,
) -> Tensor:
    """One token of :func:`short_conv`; ``state`` is written in place."""
    return torch.ops.girih.short_conv_step(x, weight, bias, *state, activation=activation)


def gated_rms_norm(
    x: Tensor, weight: Tensor, gate: Tensor | None = None, *, activation: str = "silu", eps: float = 1e-6
) -> Tensor:
    """RMS norm over the last dimension and the gate of a mixer's output, in one pass over memory.

    ::

        y = x / sqrt(mean(x^2) + eps) * weight * activation(gate)

    (Zhang and Sennrich 2019, with a gate.) Shapes: x, gate and y ``[..., dim]``, weight ``[dim]``.
    ``activation`` is silu, gelu (exact) or sigmoid; without gate its factor is absent. y has x's dtype, gate
    the same; weight may have another float dtype. Sums are formed in fp32 (fp64 for fp64) and y is rounded
    once. There is no state.
    """
    return torch.ops.girih.gated_rms_norm(x, weight, gate, activation=activation, eps=eps)


def cat_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chunk: int,
    scale: float | None = None,
    cu_chunks: Tensor | None = None,
) -> Tensor:
    """The attention of CAT, compress and attend: K chunks cost T (K + chunk) / 2 scores, not T^2 / 2.

    Row 0 of every chunk of ``chunk`` rows (2 to 256) is its header. A row attends to the headers of the
    chunks before its own and to the rows of its own chunk up to itself; its own header is one of those. So a
    header attends to headers alone. T need not be a multiple of ``chunk``.

    Shapes: q ``[B, T, HQ, D]``, k ``[B, T, H, D]``, v ``[B, T, H, V]``; o ``[B, T, HQ, V]``. ``scale``
    defaults to ``D**-0.5``. ``cu_chunks [N + 1]`` (int32 or int64, on the device) packs N sequences of whole
    chunks into ``B == 1`` and counts chunks; rows that no sequence owns give 0. There is no state: a decoding
    step is attention over the headers and the current chunk's rows.
    """
    return torch.ops.girih.cat_attention(q, k, v, cu_chunks, chunk=chunk, scale=scale)
