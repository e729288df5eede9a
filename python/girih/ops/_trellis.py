"""Trellis."""

from typing import NamedTuple

import torch
from torch import Tensor

from girih.ops._state import copy_memory, expand_memory, is_memory, unpack_state, unpack_step_state


class TrellisState(NamedTuple):
    """Memories of :func:`trellis`: ``k`` (A_k) ``[N, H, M, D]`` and ``v`` (A_v) ``[N, H, M, V]``; ``first_k``
    and ``first_v``, these memories at the start of the chunk; ``position`` int64 ``[N]``, the number of
    tokens of the chunk so far. The state of a sequence without tokens does not change.
    """

    first_k: Tensor
    k: Tensor
    first_v: Tensor
    v: Tensor
    position: Tensor | None = None

    @classmethod
    def start(cls, batch: int, first_k: Tensor, first_v: Tensor, *, device=None) -> "TrellisState":
        """A new state before the first token, from initial memories ``[H, ...]`` or ``[N, H, ...]``."""
        k = copy_memory("TrellisState", "first_k", first_k, batch, device)
        v = copy_memory("TrellisState", "first_v", first_v, batch, device)
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
    """Trellis: two memories learn by gradient descent to map keys and values to targets.

    With ``x`` the key ``k_t`` for ``A_k``, the value ``v_t`` for ``A_v``, and ``A'`` the memory at the start
    of the chunk::

        u_t = J_phi(A' x_t)^T (phi(A' x_t) - a_t)        A_t = e^{g_t} A_{t-1} - gamma_t u_t x_t^T
        o_t = A_v^T f(A_k q_t)

    (Karami, Behrouz, Kacham and Mirrokni, eq. 8 to 12, with the Jacobian transposed; gamma includes their
    factor 2.)
    Shapes: q ``[B, T, HQ, D]``, k ``[B, T, H, D]``, v ``[B, T, H, V]``, a ``[B, T, H, M]``, gamma and g
    ``[B, T, H]``; o ``[B, T, HQ, V]``. Changing ``chunk``, 1 to 64, changes the output. ``phi`` and ``f`` are
    identity, silu, l2norm, layer_norm, l2_silu, ln_silu or softmax, over M. There is no zero start: ``state``
    is a :class:`TrellisState` or the initial memories ``(A_k [H, M, D], A_v [H, M, V])``, or each
    ``[N, H, ...]``.

    >>> q = k = v = torch.randn(2, 100, 4, 64)
    >>> a, gamma = torch.randn(2, 100, 4, 32), torch.rand(2, 100, 4) / 16
    >>> memories = torch.randn(4, 32, 64), torch.randn(4, 32, 64)
    >>> o, state = trellis(q, k, v, a, gamma, chunk=16, state=memories)
    >>> o.shape, state.k.shape, state.position
    (torch.Size([2, 100, 4, 64]), torch.Size([2, 4, 32, 64]), tensor([4, 4]))
    """
    memories = isinstance(state, tuple) and len(state) == 2 and all(is_memory(memory) for memory in state)
    if memories:
        A_k, A_v = (expand_memory(memory, q, cu_seqlens) for memory in state)
        state = TrellisState(None, A_k, None, A_v, None)
    before = unpack_state(
        "trellis", TrellisState, state, start="the first memories (A1 [H, M, D], A2 [H, M, V])"
    )
    o, *after = torch.ops.girih.trellis(q, k, v, a, gamma, g, *before, cu_seqlens, chunk=chunk, phi=phi, f=f)
    return o, TrellisState(*after)


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
    state = unpack_step_state("trellis_step", TrellisState, state)
    return torch.ops.girih.trellis_step(q, k, v, a, gamma, g, *state, chunk=chunk, phi=phi, f=f)
