"""TTT."""

from typing import NamedTuple

import torch
from torch import Tensor

from girih.ops._state import copy_memory, expand_memory, is_memory, unpack_state, unpack_step_state


class TTTState(NamedTuple):
    """The memory of :func:`ttt`: ``k`` ``[N, H, M, D]``; ``first_k``, this memory at the start of the chunk;
    ``position`` int64 ``[N]``, the number of tokens of the chunk so far. The state of a sequence without
    tokens does not change.
    """

    first_k: Tensor
    k: Tensor
    position: Tensor | None = None

    @classmethod
    def start(cls, batch: int, first_k: Tensor, *, device=None) -> "TTTState":
        """A new state before the first token, from an initial memory ``[H, M, D]`` or ``[N, H, M, D]``."""
        k = copy_memory("TTTState", "first_k", first_k, batch, device)
        return cls(k, k.clone(), torch.zeros(batch, dtype=torch.int64, device=k.device))


def ttt(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    gamma: Tensor,
    g: Tensor | None = None,
    phi_weight: Tensor | None = None,
    *,
    chunk: int,
    phi: str = "layer_norm",
    f: str = "identity",
    state: TTTState | Tensor,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, TTTState]:
    """TTT: a memory learns by gradient descent to map keys to targets, and queries read it.

    This is the first of the two passes of :func:`trellis`. With ``A'`` the memory at the start of the chunk
    and ``w`` the weight of phi, ones by default::

        u_t = J_phi(A' k_t)^T (w * (w * phi(A' k_t) - a_t))        A_t = e^{g_t} A_{t-1} - gamma_t u_t k_t^T
        o_t = f(A_t q_t)

    TTT-Linear (Sun et al. 2024, eq. 4 to 8): ``a = v - k - bias`` with the bias of the norm,
    ``phi="layer_norm"``, mini-batches of ``chunk`` tokens, and the output ``q + w * f(A q) + bias`` with
    ``f="layer_norm"``. The loss is half the squared distance: ``gamma`` includes the paper's factor 2.
    Shapes: q ``[B, T, HQ, D]``, k ``[B, T, H, D]``, a ``[B, T, H, M]``, gamma and g ``[B, T, H]``, phi_weight
    ``[H, M]``; o ``[B, T, HQ, M]``. Changing ``chunk``, 1 to 64, changes the output. ``phi`` and ``f`` are
    identity, silu, l2norm, layer_norm, l2_silu, ln_silu or softmax, over M. There is no zero start: ``state``
    is a :class:`TTTState` or the initial memory ``[H, M, D]`` or ``[N, H, M, D]``.

    >>> q = k = v = torch.randn(2, 100, 4, 64)
    >>> o, state = ttt(q, k, v - k, torch.rand(2, 100, 4) / 16, chunk=16, state=torch.randn(4, 64, 64))
    >>> o.shape, state.k.shape, state.position
    (torch.Size([2, 100, 4, 64]), torch.Size([2, 4, 64, 64]), tensor([4, 4]))
    """
    if is_memory(state):
        state = TTTState(None, expand_memory(state, q, cu_seqlens), None)
    before = unpack_state("ttt", TTTState, state, start="the first memory A [H, M, D]")
    inputs = (q, k, a, gamma, g, phi_weight, *before, cu_seqlens)
    o, *after = torch.ops.girih.ttt(*inputs, chunk=chunk, phi=phi, f=f)
    return o, TTTState(*after)


def ttt_step(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    gamma: Tensor,
    g: Tensor | None = None,
    phi_weight: Tensor | None = None,
    *,
    chunk: int,
    phi: str = "layer_norm",
    f: str = "identity",
    state: TTTState,
) -> Tensor:
    """One token of :func:`ttt`; ``state`` is written in place."""
    state = unpack_step_state("ttt_step", TTTState, state)
    return torch.ops.girih.ttt_step(q, k, a, gamma, g, phi_weight, *state, chunk=chunk, phi=phi, f=f)
