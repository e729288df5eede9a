"""The short convolution before a mixer."""

from typing import NamedTuple

import torch
from torch import Tensor

from girih.ops._state import unpack_state, unpack_step_state


class ShortConvState(NamedTuple):
    """State of :func:`short_conv`: the last inputs ``x [N, W-1, channels]``, in x's dtype."""

    x: Tensor

    @classmethod
    def start(
        cls, batch: int, channels: int, width: int, *, dtype=torch.float32, device=None
    ) -> "ShortConvState":
        """A new state before the first token."""
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
    """Causal short convolution over time, one filter for each channel.

    ::

        z_t = bias + sum_j weight_j x_{t - (W-1) + j}        y_t = activation(z_t)

    Shapes: x and y ``[B, T, channels]``, weight ``[channels, W]`` with W from 1 to 4, the last tap the
    current token; bias ``[channels]``. ``activation`` is None or silu. weight and bias may have another float
    dtype than x; the sum is formed in fp32 (fp64 for fp64). A token of no sequence in ``cu_seqlens``
    returns 0.

    >>> x, weight = torch.randn(1, 100, 256), torch.randn(256, 4)
    >>> y, state = short_conv(x, weight, activation="silu", cu_seqlens=torch.tensor([0, 30, 100]))
    >>> y.shape, state.x.shape
    (torch.Size([1, 100, 256]), torch.Size([2, 3, 256]))
    """
    before = unpack_state("short_conv", ShortConvState, state)
    y, *after = torch.ops.girih.short_conv(x, weight, bias, *before, cu_seqlens, activation=activation)
    return y, ShortConvState(*after)


def short_conv_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    state: ShortConvState,
) -> Tensor:
    """One token of :func:`short_conv`; ``state`` is written in place."""
    state = unpack_step_state("short_conv_step", ShortConvState, state)
    return torch.ops.girih.short_conv_step(x, weight, bias, *state, activation=activation)
