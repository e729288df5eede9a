"""The linear projections of a layer's input, and their gates."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from girih._torch_internals import is_called_plainly
from girih.nn.functional.fused import is_product
from girih.nn.functional.gates import apply_gate
from girih.nn.functional.linears import has_linears_kernel
from girih.nn.layers.decay import DecayGate
from girih.nn.layers.layer import GateLinear, check_features


def projections(
    layer: nn.Module,
    names: list[str],
    x: Tensor,
    decay: nn.Module | None = None,
    gates: Mapping[str, tuple[str, float]] | None = None,
) -> list[Tensor]:
    """The outputs of a layer's projections `names` for x, then g of the DecayGate `decay`.

    gates: gate and scale (`gates.apply_gate`) of a projection, by name.

    Raises unless every projection returns all of its features: the numbers of heads are fixed.
    """
    gates = gates or {}
    modules = [getattr(layer, name) for name in names]
    weights = [plain_weight(module) for module in (modules if decay is None else [*modules, decay])]
    use_linears = has_linears_kernel(x, weights)
    outputs = list(torch.ops.girih.linears(x, weights)) if use_linears else [module(x) for module in modules]
    for i, (name, module) in enumerate(zip(names, modules, strict=True)):
        check_features(layer, name, outputs[i])
        bias = module.bias if use_linears else None  # a called module has added its bias
        if name in gates or bias is not None:
            gate, scale = gates.get(name, ("linear", 1.0))
            outputs[i] = apply_gate(outputs[i], gate, bias, scale=scale)
    if decay is not None and use_linears:
        check_features(decay, "proj", outputs[-1])
        outputs[-1] = apply_gate(outputs[-1], "decay", decay.dt_bias, decay.A_log)
    elif decay is not None:
        outputs.append(decay(x)[0])
    return outputs


def split_heads(
    qkv: Tensor, heads: tuple[int, int, int], key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv `[..., channels]` -> q, k and v, each `[..., heads, width]`."""
    widths = (key_dim, key_dim, value_dim)
    parts = qkv.split([n * width for n, width in zip(heads, widths, strict=True)], -1)
    q, k, v = (part.unflatten(-1, (n, -1)) for part, n in zip(parts, heads, strict=True))
    return q, k, v


def plain_weight(module: nn.Module) -> Tensor | None:
    """The weight of a module that is a linear product without hooks or adapters; None for other modules."""
    if type(module) is GateLinear and is_called_plainly(module):
        return module.weight
    if type(module) is DecayGate and is_called_plainly(module):
        module = module.proj
    return module.weight if is_product(module) else None
