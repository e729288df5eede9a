"""Linear attention, with or without decay."""

from typing import NamedTuple

import torch
from torch import Tensor

from girih.ops._state import unpack_state, unpack_step_state


class GLAState(NamedTuple):
    """Memory of :func:`gla`: ``s [N, H, D, V]``."""

    s: Tensor

    @classmethod
    def start(cls, batch: int, heads: int, D: int, V: int, *, dtype=torch.float32, device=None) -> "GLAState":
        """A new state before the first token."""
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
    """Gated linear attention (Yang et al. 2024): no gate, one gate for each head, or one per key channel.

    ::

        S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T          o_t = scale * S_t^T q_t

    Shapes: q ``[B, T, HQ, D]``, k ``[B, T, HK, D]``, v ``[B, T, H, V]``, g ``[B, T, H]`` or ``[B, T, H, D]``;
    o ``[B, T, max(HQ, H), V]``. ``scale`` defaults to ``D**-0.5``. ``g=None`` is linear attention.

    There are H memories. HQ is a multiple of H (several query heads read a memory) or a divisor of H (a query
    head reads several memories). HK is H or a divisor of H: memory h has key head ``h // (H / HK)`` (the
    groups of Mamba-2).

    >>> q = k = v = torch.randn(2, 100, 4, 64)
    >>> g = torch.nn.functional.logsigmoid(torch.randn(2, 100, 4))
    >>> o, state = gla(q, k, v, g)
    >>> o.shape, state.s.shape
    (torch.Size([2, 100, 4, 64]), torch.Size([2, 4, 64, 64]))
    >>> o, state = gla(q, k, v, g, state=state)  # the next 100 tokens
    """
    o, *after = torch.ops.girih.gla(
        q, k, v, g, *unpack_state("gla", GLAState, state), cu_seqlens, scale=scale
    )
    return o, GLAState(*after)


def gla_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *, scale: float | None = None, state: GLAState
) -> Tensor:
    """One token of :func:`gla`; ``state`` is written in place."""
    return torch.ops.girih.gla_step(q, k, v, g, *unpack_step_state("gla_step", GLAState, state), scale=scale)
