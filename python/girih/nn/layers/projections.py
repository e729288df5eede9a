"""The linear projections of a layer's input, and their gates."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from girih._torch_internals import is_called_plainly
from girih.nn.functional.fused import is_plain_linear
from girih.nn.functional.gates import apply_gate
from girih.nn.functional.linears import has_linears_kernel
from girih.nn.functional.step import Product
from girih.nn.layers.decay import DecayGate
from girih.nn.layers.layer import GateLinear, check_features


class Projection(NamedTuple):
    """A linear projection of a layer's input: the layer's attribute `name`, and the gate of its result
    (`gates.apply_gate`). With gate "decay" the attribute is a DecayGate, which has the bias and the log
    rate."""

    name: str
    gate: str = "none"
    scale: float = 1.0


def project(layer: nn.Module, specs: Sequence[Projection], x: Tensor) -> list[Tensor]:
    """The gated projections of x by the layer's modules, in the order of `specs`; a DecayGate returns g.

    Raises unless every projection returns all of its features: the numbers of heads are fixed.
    """
    modules = [getattr(layer, spec.name) for spec in specs]
    weights = [plain_weight(module) for module in modules]
    use_linears = has_linears_kernel(x, weights)
    outputs = list(torch.ops.girih.linears(x, weights)) if use_linears else [None] * len(modules)
    for i, (spec, module) in enumerate(zip(specs, modules, strict=True)):
        if spec.gate == "decay":
            if use_linears:
                check_features(module, "proj", outputs[i])
                outputs[i] = apply_gate(outputs[i], *module.product()[1:])
            else:
                outputs[i] = module(x)[0]
            continue
        y = outputs[i] if use_linears else module(x)
        check_features(layer, spec.name, y)
        bias = module.bias if use_linears else None  # a called module has added its bias
        gate = "linear" if spec.gate == "none" and bias is not None else spec.gate
        outputs[i] = y if gate == "none" else apply_gate(y, gate, bias, scale=spec.scale)
    return outputs


def decay_projections(layer: nn.Module) -> tuple[Projection, ...]:
    """The projection to g of a layer's optional `decay`, a DecayGate."""
    return () if layer.decay is None else (Projection("decay", "decay"),)


def products_of(layer: nn.Module, specs: Sequence[Projection]) -> tuple[Product, ...]:
    """`project` as products of the weights, which a decoding step computes without calling modules."""
    modules = [getattr(layer, spec.name) for spec in specs]
    return tuple(
        module.product()
        if spec.gate == "decay"
        else Product(module.weight, spec.gate, module.bias, scale=spec.scale)
        for spec, module in zip(specs, modules, strict=True)
    )


def split_heads(
    qkv: Tensor, heads: tuple[int, int, int], key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv `[..., channels]` -> q, k and v, each `[..., heads, width]`."""
    widths = (key_dim, key_dim, value_dim)
    parts = qkv.split([n * width for n, width in zip(heads, widths, strict=True)], -1)
    q, k, v = (part.unflatten(-1, (n, -1)) for part, n in zip(parts, heads, strict=True))
    return q, k, v


def split_steps(x: Tensor, n: int) -> Tensor:
    """`[B, T, n * heads, ...]` -> `[B, T * n, heads, ...]`: the n keys, values or betas of a token are
    adjacent rows."""
    return x.unflatten(2, (n, -1)).flatten(1, 2)


def plain_weight(module: nn.Module) -> Tensor | None:
    """The weight of a module that is a linear product without hooks or adapters; None for other modules."""
    if type(module) is GateLinear and is_called_plainly(module):
        return module.weight
    if type(module) is DecayGate and is_called_plainly(module):
        module = module.proj
    return module.weight if is_plain_linear(module) else None
