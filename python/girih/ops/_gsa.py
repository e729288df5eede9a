"""Gated slot attention."""

from typing import NamedTuple

import torch
from torch import Tensor

from girih.ops._state import call_operator, unpack_state, unpack_step_state


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
        """A new state before the first token, for ``gsa_step`` and CUDA graphs."""
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
    """Gated slot attention (Zhang et al. 2024); without ``g`` the ungated ABC (Peng et al. 2021).

    ::

        Hk_t = Hk_{t-1} Diag(e^{g_t}) + k_t s_t^T        p_t = feature(scale * Hk_t^T q_t)
        Hv_t = Diag(e^{g_t}) Hv_{t-1} + s_t v_t^T        o_t = Hv_t^T p_t

    Shapes: q ``[B, T, HQ, D]``, k ``[B, T, H, D]``, v ``[B, T, H, V]``, s and g ``[B, T, H, M]``; o
    ``[B, T, HQ, V]``. ``s=None`` is ``1 - e^g``. ``g=None`` is ABC: s are logits, normalized over all
    tokens so far; ``-inf`` masks a token. ``scale`` defaults to ``D**-0.5``; ``feature`` is softmax, none,
    silu, relu or relu2.

    >>> q = k = v = torch.randn(2, 100, 4, 64)
    >>> g = torch.nn.functional.logsigmoid(torch.randn(2, 100, 4, 32)) / 8
    >>> o, state = gsa(q, k, v, g=g)
    >>> o.shape, state.k.shape, state.v.shape
    (torch.Size([2, 100, 4, 64]), torch.Size([2, 4, 64, 32]), torch.Size([2, 4, 32, 64]))
    >>> gsa_step(*(x[:, -1:] for x in (q, k, v)), g=g[:, -1:], state=state).shape
    torch.Size([2, 1, 4, 64])
    """
    inputs = (q, k, v, s, g, *unpack_state("gsa", GSAState, state), cu_seqlens)
    return call_operator("gsa", GSAState, inputs, scale=scale, feature=feature)


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
    state = unpack_step_state("gsa_step", GSAState, state)
    return torch.ops.girih.gsa_step(q, k, v, s, g, *state, scale=scale, feature=feature)
