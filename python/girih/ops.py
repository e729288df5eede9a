"""The operators, as functions. Each is differentiable, compiles under ``torch.compile`` and runs on CPU and CUDA.

Letters: ``B`` batch, ``T`` tokens, ``H`` heads, ``D`` key width, ``V`` value width, ``M`` slots, ``N`` sequences (``B``, or
what ``cu_seqlens`` says). Gates are logs, at most 0. ``q`` may have a multiple of the other tensors' heads. States are
fp32 (fp64 when the inputs are); ``state=None`` is the start of a sequence. ``cu_seqlens [N + 1]`` (int32 or int64, on the
device) packs ``N`` sequences into ``B == 1``. ``X_step`` reads one token (``T == 1``), writes the state's tensors in
place and returns ``o`` alone. A wrong argument raises ``ValueError`` and names the argument.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["GLAState", "GSAState", "gla", "gla_step", "gsa", "gsa_step"]


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
        """The state before the first token, in tensors of its own (what ``gsa_step`` and a CUDA graph need)."""
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

    Shapes: q ``[B, T, HQ, D]``, k ``[B, T, H, D]``, v ``[B, T, H, V]``, s and g ``[B, T, H, M]``; o ``[B, T, HQ, V]``.
    ``s=None`` is ``1 - e^g``. ``g=None`` is ABC: s are logits, normalised over all tokens so far; ``-inf`` masks a token.
    ``scale`` defaults to ``D**-0.5``; ``feature`` is softmax, none, silu, relu or relu2.
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

    Shapes: q ``[B, T, HQ, D]``, k ``[B, T, H, D]``, v ``[B, T, H, V]``, g ``[B, T, H]`` or ``[B, T, H, D]``; o
    ``[B, T, HQ, V]``. ``scale`` defaults to ``D**-0.5``. ``g=None`` is linear attention.
    """
    o, *parts = torch.ops.girih.gla(q, k, v, g, *(state or (None,)), cu_seqlens, scale=scale)
    return o, GLAState(*parts)


def gla_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *, scale: float | None = None, state: GLAState
) -> Tensor:
    """One token of :func:`gla`; ``state`` is written in place."""
    return torch.ops.girih.gla_step(q, k, v, g, *state, scale=scale)
