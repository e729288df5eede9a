"""What layers have in common: parameters that stay in fp32, parameters that do not decay, how they print."""

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.nn.functional.gates import at_least_fp32


def projection(layer: nn.Module, name: str, x: Tensor) -> Tensor:
    """What a layer's projection of this name makes of x: all features, as heads were counted beforehand."""
    y = getattr(layer, name)(x)
    check_features(layer, name, y)
    return y


def check_features(layer: nn.Module, name: str, y: Tensor) -> None:
    if y.shape[-1] != (width := getattr(getattr(layer, name), "out_features", y.shape[-1])):
        raise ValueError(
            f"{name} of {type(layer).__name__} gives {y.shape[-1]} of its {width} features: tensor "
            f"parallelism of a layer's projections is not supported; leave {name} out of the plan, or give "
            f"it output_layouts=Replicate(), with which it gives all {width}"
        )


class Layer(nn.Module):
    """A module that says of its own parameters, by name, what must not happen to them.

    undecayed: those that weight decay would pull to a value that means something else: memories, gate biases,
        time scales, norms. `decay_parameter_names` reads them. Names, as a copy of a parameter has no marks.
    fp32: those whose rounding grows with the sequence, time scales and memories: they stay in fp32 when the
        layer goes to bf16 or fp16, and are made in it.
    """

    undecayed: ClassVar[tuple[str, ...]] = ()
    fp32: ClassVar[tuple[str, ...]] = ()

    def set_depth(self, layer: int, num_layers: int) -> None:
        """A model calls this once for every layer in it, which may depend on where it is: `layer` of
        `num_layers`, from 0."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Layer":
        own = self._parameters | self._buffers
        kept = {id(t) for name in self.fp32 if (p := own.get(name)) is not None for t in (p, p.grad)}

        def keeping(t: Tensor) -> Tensor:
            to = fn(t)
            low = id(t) in kept and to.dtype in (torch.float16, torch.bfloat16)
            return at_least_fp32(t.to(to.device)) if low else to

        return super()._apply(keeping, recurse)

    def extra_repr(self) -> str:
        """Its options: what it keeps beside parameters and modules."""
        plain = (bool, int, float, str, tuple)
        options = {k: v for k, v in vars(self).items() if isinstance(v, plain) and k[0] != "_"}
        return ", ".join(f"{k}={v!r}" for k, v in options.items() if k != "training")


class GateLinear(nn.Linear, Layer):
    """x W^T in the dtype of x, plus b in fp32 at least: a gate's bias is its time scale."""

    undecayed = fp32 = ("bias",)

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features)
        self.bias = nn.Parameter(at_least_fp32(self.bias.detach()))

    def forward(self, x: Tensor) -> Tensor:
        return at_least_fp32(F.linear(x, self.weight)) + self.bias


def decay_parameter_names(model: nn.Module) -> list[str]:
    """The parameters that weight decay is for: all but the memories, gate biases, time scales and norms.

    transformers' Trainer, and those that derive from it, ask for them here:

        class MyTrainer(Trainer):
            get_decay_parameter_names = staticmethod(girih.nn.decay_parameter_names)

    >>> decay_parameter_names(nn.Sequential(GateLinear(8, 2), nn.Linear(2, 8)))
    ['0.weight', '1.weight', '1.bias']
    """
    kept = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in getattr(module, "undecayed", ())
    }
    return [name for name, _ in model.named_parameters() if name not in kept]
