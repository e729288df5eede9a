"""The decay gate of Mamba-2 and Gated DeltaNet, and the initial bias of the step sizes gamma."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.nn.functional.gates import promote_to_fp32
from girih.nn.functional.step import Product
from girih.nn.layers.layer import Layer, projection


def initial_step_size_bias(chunk: int) -> float:
    """The initial bias b of the step size gamma = sigmoid(x W + b): sigmoid(b) = 1 / (4 max(chunk, 16)).

    All updates of a chunk use the memory at the start of the chunk, so the sum of the chunk's step sizes must
    not overshoot. With b = 0 the gradients of Trellis explode, and Lattice was 0.2 bits per byte worse after
    120 training steps. At chunk 1 the gradient norms of Trellis reach 1e11 with initial step sizes of 1/4,
    and at most 880 with 1/64.
    """
    return -math.log(4.0 * max(chunk, 16) - 1.0)


def reset_decay(A_log: Tensor, dt_bias: Tensor, smallest_rate: float) -> None:
    """Initialises a decay of Mamba-2, -exp(A_log) softplus(r + dt_bias), in place: rates exp(A_log) uniform
    in [smallest_rate, 16], softplus(dt_bias) log-uniform in [0.001, 0.1]. Call it without gradients."""
    A_log.uniform_(smallest_rate, 16.0).log_()
    dt = torch.empty_like(dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp_()
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus


class DecayGate(Layer):
    """One decay e^g for each head, and the time step dt that determines it (Mamba-2, Gated DeltaNet).

        dt = softplus(x W + dt_bias),   g = -exp(A_log) dt

    x `[B, T, hidden_size]` -> g, dt `[B, T, num_heads]`, fp32 also under autocast. The initial rates
    exp(A_log) are log-uniform in [1, 16], and the initial dt without x, softplus(dt_bias), is log-uniform in
    `[largest_step / 100, largest_step]`.

    >>> g, dt = DecayGate(16, num_heads=4)(torch.randn(2, 5, 16))
    >>> g.shape, bool((g < 0).all())
    (torch.Size([2, 5, 4]), True)
    """

    undecayed = fp32 = ("A_log", "dt_bias")

    def __init__(self, hidden_size: int, num_heads: int, largest_step: float = 0.1):
        super().__init__()
        self.largest_step = largest_step
        self.proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.A_log = nn.Parameter(promote_to_fp32(torch.empty(num_heads)))
        self.dt_bias = nn.Parameter(promote_to_fp32(torch.empty(num_heads)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.A_log, 0.0, math.log(16.0))
        max_log_dt = math.log(self.largest_step)  # softplus(b) is close to exp(b) for b << 0
        nn.init.uniform_(self.dt_bias, max_log_dt - math.log(100.0), max_log_dt)

    def product(self) -> Product:
        """The product that computes g; its rate is A_log."""
        return Product(self.proj.weight, "decay", self.dt_bias, self.A_log)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dt = F.softplus(promote_to_fp32(projection(self, "proj", x)) + self.dt_bias)
        return -promote_to_fp32(self.A_log).exp() * dt, dt
