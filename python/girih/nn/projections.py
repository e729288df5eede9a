"""The projections that a layer makes of its x."""

from torch import Tensor, nn

from girih.nn.decay import DecayGate
from girih.nn.fused import without_hooks
from girih.nn.layer import check_features
from girih.nn.linears import together


def projections(
    layer: nn.Module, names: list[str], x: Tensor, decay: nn.Module | None = None
) -> list[Tensor]:
    """What a layer's projections of these names make of x: all features, as heads were counted beforehand;
    and g of a DecayGate."""
    joins = type(decay) is DecayGate and without_hooks(decay)
    made = together(x, [*(getattr(layer, name) for name in names), *([decay.proj] if joins else [])])
    for name, y in zip(names, made, strict=False):
        check_features(layer, name, y)
    if joins:
        check_features(decay, "proj", made[-1])
        made[-1] = decay.of(made[-1])[0]
    elif decay is not None:
        made.append(decay(x)[0])
    return made
