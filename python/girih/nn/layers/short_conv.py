"""The short convolution before a mixer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih import ops
from girih.nn.functional.fused import autocast_dtype
from girih.nn.functional.state import TensorSpec, advance
from girih.nn.layers.recurrent_layer import RecurrentLayer

ACTIVATIONS = ops.words("short_conv", "activation")
MAX_WIDTH = ops.describe()["short_conv"]["sizes"]["W"]["most"]


def cast_conv_state(state: ops.ShortConvState | None, x: Tensor) -> ops.ShortConvState | None:
    """The state in the dtype in which x is convolved, which differs between calls with and without
    autocast."""
    dtype = autocast_dtype(x) or x.dtype
    if state is None or state.x.dtype == dtype or not state.x.is_floating_point():
        return state
    return ops.ShortConvState(state.x.to(dtype))


class ShortConv(RecurrentLayer):
    """Depthwise causal convolution over the last `kernel_size` tokens, then SiLU (or nothing).

        y_t = act(bias + sum_j weight_j x_{t - kernel_size + 1 + j})

    x, y `[B, T, channels]`. `kernel_size=0` leaves only the activation, and has no parameters and no state.

    >>> conv = ShortConv(8, kernel_size=4)
    >>> y, state = conv(torch.randn(2, 5, 8), use_cache=True)
    >>> y.shape, state.x.shape
    (torch.Size([2, 5, 8]), torch.Size([2, 3, 8]))
    """

    undecayed = ("bias",)

    def __init__(
        self, channels: int, kernel_size: int = 4, activation: str | None = "silu", bias: bool = False
    ):
        super().__init__()
        if activation is not None and activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; expected None or {', '.join(ACTIVATIONS)}")
        if not 0 <= kernel_size <= MAX_WIDTH:
            raise ValueError(f"kernel_size is {kernel_size}; expected 0 to {MAX_WIDTH}")
        self.kernel_size, self.activation = kernel_size, activation
        self.weight = nn.Parameter(torch.empty(channels, kernel_size)) if kernel_size else None
        self.bias = nn.Parameter(torch.empty(channels)) if kernel_size and bias else None
        self.reset_parameters()

    @property
    def has_state(self) -> bool:
        return self.kernel_size > 0

    def reset_parameters(self) -> None:
        if self.weight is not None:
            bound = self.weight.shape[1] ** -0.5
            nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def state_like(self, sequences: int, dtype: torch.dtype) -> ops.ShortConvState | None:
        if self.weight is None:
            return None
        return ops.ShortConvState(TensorSpec((sequences, self.kernel_size - 1, self.weight.shape[0])))

    def mix(
        self, x: Tensor, state: ops.ShortConvState | None, use_cache: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, ops.ShortConvState | None]:
        if self.weight is None:
            return (F.silu(x) if self.activation else x), None
        state = cast_conv_state(state, x)
        y, state = advance(
            "short_conv",
            x,
            self.weight,
            self.bias,
            activation=self.activation,
            state=state,
            in_place=use_cache and state is not None,
            cu_seqlens=cu_seqlens,
        )
        return y, state if use_cache else None
