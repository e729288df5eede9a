"""Memory as Gate (MaG): a weighted sum of two mixers of the same input."""

import math
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from girih.nn.functional.gates import promote_to_fp32
from girih.nn.functional.state import check_layer_states, check_type
from girih.nn.layers.layer import Layer
from girih.nn.layers.mixers import MIXERS, register
from girih.nn.layers.sequence_layer import SequenceLayer

SCHEDULES = ("constant", "gradual", "cyclic")


def mix_weight(
    schedule: str,
    step: int,
    *,
    final: float = 0.5,
    first: float = 0.01,
    steps: int = 100,
    levels=(0.0, 0.5, 1.0),
) -> float:
    """The weight m at a training step (TPTT, section 4).

    constant: `final`. gradual: linear from `first` to `final` over `steps` steps. cyclic: every `steps` steps
    the next of `levels`, repeated.

    >>> [mix_weight("gradual", step, first=0.0, steps=10) for step in (0, 5, 20)]
    [0.0, 0.25, 0.5]
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; expected one of {', '.join(SCHEDULES)}")
    if schedule == "gradual":
        return first + (final - first) * min(step / steps, 1.0)
    return final if schedule == "constant" else levels[step // steps % len(levels)]


def is_weight(value: Any) -> bool:
    """Whether value is a number from 0 to 1."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0.0 <= value <= 1.0


def check_mixture(weight: Any, learned: bool) -> None:
    """Raises unless 0 <= weight <= 1; a learned weight is a sigmoid and cannot be 0 or 1."""
    if not is_weight(weight) or (learned and weight in (0.0, 1.0)):
        raise ValueError(
            f"weight is {weight!r}; expected a number from 0 to 1, and between them if it is learned"
        )


class MixState(NamedTuple):
    base: Any
    mixer: Any


class MemoryAsGate(Layer):
    """The mixture `(1 - m) base + m mixed`; with `cross`, plus the product of both terms (TPTT eq. 7, 8).

    m is the buffer `weight`, which `set_weight(mix_weight(...))` changes during training; with `learned` m is
    `sigmoid(logit)` of the parameter `logit`. At m = 0 the mixture is bitwise equal to base.
    """

    undecayed = ("logit",)
    fp32 = ("logit", "weight")

    def __init__(self, *, weight: float = 0.5, learned: bool = False, cross: bool = False):
        super().__init__()
        check_mixture(weight, learned)
        self.initial_weight, self.learned, self.cross = weight, learned, cross
        if learned:
            self.logit = nn.Parameter(promote_to_fp32(torch.empty(1)))  # fully_shard does not accept scalars
        else:
            self.register_buffer("weight", promote_to_fp32(torch.empty(())))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.learned:
            nn.init.constant_(self.logit, math.log(self.initial_weight / (1.0 - self.initial_weight)))
        else:
            nn.init.constant_(self.weight, self.initial_weight)

    def set_weight(self, weight: float) -> None:
        """Sets m, without waiting for the device."""
        if self.learned:
            raise ValueError("weight is learned by this mixture; a schedule cannot set it")
        if not is_weight(weight):
            raise ValueError(f"weight is {weight!r}; expected a number from 0 to 1")
        self.weight.fill_(weight)

    def current_weight(self) -> Tensor:
        """m, a tensor of one element, fp32."""
        return self.logit.sigmoid() if self.learned else self.weight

    def mixture(self, base: Tensor, mixed: Tensor) -> Tensor:
        """The mixture of base and mixed, which have equal shapes."""
        m, dtype = self.current_weight(), torch.promote_types(base.dtype, mixed.dtype)
        if not self.cross:
            return torch.lerp(base.to(dtype), mixed.to(dtype), m.to(dtype))
        m = m.to(base.dtype)
        base, mixed = (1 - m) * base, m * mixed
        return base + mixed + base * mixed


class MixAttention(SequenceLayer, MemoryAsGate):
    """`y = (1 - m) base(x) + m mixer(x)`, or the mixture with `cross` (`MemoryAsGate`).

    base, mixer: layers. x, y `[B, T, hidden_size]`.

    >>> from girih.nn import Attention, DeltaProduct
    >>> layer = MixAttention(Attention(64, num_heads=2), DeltaProduct(64, num_heads=2), weight=0.25)
    >>> layer(torch.randn(3, 10, 64))[0].shape
    torch.Size([3, 10, 64])
    """

    def __init__(
        self,
        base: nn.Module,
        mixer: nn.Module,
        *,
        weight: float = 0.5,
        learned: bool = False,
        cross: bool = False,
    ):
        super().__init__(weight=weight, learned=learned, cross=cross)
        self.base, self.mixer = base, mixer

    @property
    def has_state(self) -> bool:
        return any(getattr(layer, "has_state", True) for layer in (self.base, self.mixer))

    def check_state(self, state: MixState | None, x: Tensor, cu_seqlens: Tensor | None = None) -> None:
        """Raises unless state is None or has both layers' states for the sequences of x `[B, T, ...]`."""
        if state is None:
            return
        check_type(state, MixState)
        check_layer_states(("state.base", "state.mixer"), (self.base, self.mixer), state, x, cu_seqlens)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        state: MixState | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, MixState | None]:
        self.check_state(state, x, cu_seqlens)  # before base writes its state
        base_state, mixer_state = state or (None, None)
        base, base_state = self.base(x, attention_mask, base_state, use_cache, cu_seqlens)
        mixed, mixer_state = self.mixer(x, attention_mask, mixer_state, use_cache, cu_seqlens)
        return self.mixture(base, mixed), MixState(base_state, mixer_state) if use_cache else None


def _mixture(config: Any) -> nn.Module:
    return MixAttention(
        MIXERS[config.mag_base].build(config),
        MIXERS[config.mag_mixer].build(config),
        weight=config.mag_weight,
        learned=config.mag_learned,
        cross=config.mag_cross,
    )


register("mag", _mixture, "mag_base", "mag_mixer", "mag_weight", "mag_learned", "mag_cross", compared=False)
