"""Lattice."""

from typing import NamedTuple

import torch
from torch import Tensor

from girih.ops._state import (
    call_operator,
    copy_memory,
    expand_memory,
    is_memory,
    unpack_state,
    unpack_step_state,
)


class LatticeState(NamedTuple):
    """Memory of :func:`lattice`: ``first [N, H, D, M]``, the memory at the start of the chunk, ``step [N, H,
    D, M]``, the sum of the chunk's updates in the tangent spaces, ``decay [N, H]`` the sum of the chunk's
    gates (with ``g`` only), ``position`` int64 ``[N]``, the number of tokens of the chunk so far.
    """

    first: Tensor
    step: Tensor | None = None
    decay: Tensor | None = None
    position: Tensor | None = None

    @classmethod
    def start(cls, batch: int, first: Tensor, *, gated: bool = False, device=None) -> "LatticeState":
        """A new state before the first token, from an initial memory ``[H, D, M]`` or ``[N, H, D, M]``."""
        first = copy_memory("LatticeState", "first", first, batch, device)
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
    """Lattice: a memory of unit columns ``s_i``; updates of a column are orthogonal to the column.

    With ``S`` the memory at the start of the chunk and ``(h, c)`` the objective's pair::

        decode: h = S k - v, c = k      encode: h = v, c = S^T v - k      similarity: h = -v, c = k
        d_i = -gamma_t c_i (h - s_i (s_i.h))        X_t = e^{g_t} X_{t-1} + d        o_t = unit(X_t) q_t

    (Karami and Mirrokni, eq. 10, 11 and 15 with the exact norm; gamma includes their factor 2.) Only at
    ``chunk=1``: ``normalize=False`` leaves the norm of the columns free (eq. 10), ``shrinkage`` is the weight
    of an l1 penalty on the memory (eq. 17).
    Shapes: q ``[B, T, HQ, M]``, k ``[B, T, H, M]``, v ``[B, T, H, D]``, gamma and g ``[B, T, H]``; o
    ``[B, T, HQ, D]``. Changing ``chunk``, 1 to 64, changes the output. There is no zero start: ``state`` is a
    :class:`LatticeState` or the initial memory ``S [H, D, M]`` or ``[N, H, D, M]``. Its columns must be unit
    vectors, which is not checked; its gradient is projected to their tangent spaces.

    >>> q = k = torch.randn(2, 100, 4, 32)
    >>> v, gamma = torch.randn(2, 100, 4, 64), torch.rand(2, 100, 4) / 16
    >>> memory = torch.nn.functional.normalize(torch.randn(4, 64, 32), dim=1)
    >>> o, state = lattice(q, k, v, gamma, chunk=16, state=memory)
    >>> o.shape, state.first.shape, state.position
    (torch.Size([2, 100, 4, 64]), torch.Size([2, 4, 64, 32]), tensor([4, 4]))
    """
    if is_memory(state):
        state = LatticeState(expand_memory(state, q, cu_seqlens))
    before = unpack_state("lattice", LatticeState, state, start="the first memory S [H, D, M]")
    return call_operator(
        "lattice",
        LatticeState,
        (q, k, v, gamma, g, *before, cu_seqlens),
        chunk=chunk,
        objective=objective,
        normalize=normalize,
        shrinkage=shrinkage,
    )


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
        *unpack_step_state("lattice_step", LatticeState, state),
        chunk=chunk,
        objective=objective,
        normalize=normalize,
        shrinkage=shrinkage,
    )
