"""DeltaProduct and the delta rules."""

from typing import NamedTuple

import torch
from torch import Tensor

from girih.ops._state import call_operator, unpack_state, unpack_step_state


class DeltaProductState(NamedTuple):
    """Memory of :func:`delta_product`: ``s [N, H, D, V]``, ``position [N]`` (int64).

    ``position`` is the number of tokens of the current chunk so far; it is None without ``between_chunks``.
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
        """A new state before the first token."""
        return cls(
            torch.zeros(batch, heads, D, V, dtype=dtype, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device) if between_chunks else None,
        )


def _steps_per_token(q: Tensor, k: Tensor, n: int | None) -> int:
    """``n`` of :func:`delta_product`; None: from the rows of k, or 1 without tokens."""
    if n is not None:
        return n
    if not all(isinstance(x, Tensor) and x.dim() > 1 for x in (q, k)) or q.shape[1] == 0:
        return 1  # the operator raises if a tensor is not [B, T, ...]
    tokens, rows = q.shape[1], k.shape[1]
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
    """DeltaProduct (Siems et al. 2025): ``n`` delta-rule updates for each token.

    ``n = 1`` is DeltaNet (Yang et al. 2024), with g Gated DeltaNet. A beta for each channel is the gate of
    LiZA (Furfaro 2025).

    ::

        S <- e^{g_t} S                                    once per token
        for j < n:  S <- S + k_{t,j} (w_{t,j} - S^T b_{t,j})^T        b = beta k, w = beta v
        o_t = scale * S_t^T q_t                           after the last update

    Shapes: q ``[B, T, HQ, D]``, k ``[B, T * n, HK, D]``, v ``[B, T * n, H, V]``, token by token; beta
    ``[B, T * n, H]`` or, where D == V, ``[B, T * n, H, D]``; g ``[B, T, H]``; o ``[B, T, max(HQ, H), V]``.
    There are H memories. HQ is a multiple of H (several query heads read a memory) or a divisor of H (a query
    head reads several memories). HK is H or a divisor of H: memory h has key head ``h // (H / HK)``.
    ``n=None`` infers n. ``scale`` defaults to ``D**-0.5``. ``l2norm_qk`` divides q and k by their length. The
    memory stays bounded where ``beta |k|^2`` is between 0 and 2.

    ``between_chunks`` (``"gelu"`` or ``"tanh"``; Furfaro 2025, eq. 24) is applied to S after every ``chunk``
    tokens of a sequence, not after an incomplete chunk. Changing ``chunk``, 1 to 64, then changes the output;
    without ``between_chunks`` it must be None.

    >>> q, k, v = torch.randn(2, 50, 4, 64), torch.randn(2, 100, 4, 64), torch.randn(2, 100, 4, 64)
    >>> beta = 2 * torch.rand(2, 100, 4)
    >>> o, state = delta_product(q, k, v, beta, l2norm_qk=True)  # n = 2
    >>> o.shape, state.s.shape
    (torch.Size([2, 50, 4, 64]), torch.Size([2, 4, 64, 64]))
    """
    return call_operator(
        "delta_product",
        DeltaProductState,
        (q, k, v, beta, g, *unpack_state("delta_product", DeltaProductState, state), cu_seqlens),
        n=_steps_per_token(q, k, n),
        scale=scale,
        l2norm_qk=l2norm_qk,
        chunk=chunk,
        between_chunks=between_chunks,
    )


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
        *unpack_step_state("delta_product_step", DeltaProductState, state),
        n=_steps_per_token(q, k, n),
        scale=scale,
        l2norm_qk=l2norm_qk,
        chunk=chunk,
        between_chunks=between_chunks,
    )
