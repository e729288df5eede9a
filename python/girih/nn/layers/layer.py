"""The base class of layers: parameters that stay in fp32, parameters without weight decay, extra_repr."""

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.nn.functional.gates import promote_to_fp32


def projection(layer: nn.Module, name: str, x: Tensor) -> Tensor:
    """The output of a layer's projection for x. Raises unless it has all features: the number of heads is
    fixed."""
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
    """A module that lists its parameters with special treatment by name.

    undecayed: names of parameters without weight decay: memories, gate biases, time scales, norms. Zero is
        not a neutral value for these. `decay_parameter_names` reads the list. It has names, because a copy of
        a parameter loses attributes.
    fp32: names of parameters that are created in fp32 and stay in fp32 when the layer is converted to bf16 or
        fp16: time scales and memories. Their rounding error would grow with the length of the sequence.
    """

    undecayed: ClassVar[tuple[str, ...]] = ()
    fp32: ClassVar[tuple[str, ...]] = ()

    def set_depth(self, layer: int, num_layers: int) -> None:
        """Called once by the model for every layer: `layer`, from 0, of `num_layers`."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Layer":
        own = self._parameters | self._buffers
        fp32_ids = {id(t) for name in self.fp32 if (p := own.get(name)) is not None for t in (p, p.grad)}

        def cast(t: Tensor) -> Tensor:
            to = fn(t)
            low = id(t) in fp32_ids and to.dtype in (torch.float16, torch.bfloat16)
            return promote_to_fp32(t.to(to.device)) if low else to

        return super()._apply(cast, recurse)

    def extra_repr(self) -> str:
        """The layer's options: its attributes of these types."""
        types = (bool, int, float, str, tuple)
        options = {k: v for k, v in vars(self).items() if isinstance(v, types) and k[0] != "_"}
        return ", ".join(f"{k}={v!r}" for k, v in options.items() if k != "training")


class GateLinear(nn.Linear, Layer):
    """x W^T in the dtype of x, plus b in fp32 or fp64: the bias of a gate sets its time scale."""

    undecayed = fp32 = ("bias",)

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features)
        self.bias = nn.Parameter(promote_to_fp32(self.bias.detach()))

    def forward(self, x: Tensor) -> Tensor:
        return promote_to_fp32(F.linear(x, self.weight)) + self.bias


def decay_parameter_names(model: nn.Module) -> list[str]:
    """Names of the parameters with weight decay: all except memories, gate biases, time scales and norms.

    For transformers' Trainer and classes derived from it:

        class MyTrainer(Trainer):
            get_decay_parameter_names = staticmethod(girih.nn.decay_parameter_names)

    >>> decay_parameter_names(nn.Sequential(GateLinear(8, 2), nn.Linear(2, 8)))
    ['0.weight', '1.weight', '1.bias']
    """
    undecayed = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in getattr(module, "undecayed", ())
    }
    return [name for name, _ in model.named_parameters() if name not in undecayed]
