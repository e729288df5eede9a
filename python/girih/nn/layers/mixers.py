"""The mixers that a configuration can name. Each registers itself beside its layer."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn


class Mixer(NamedTuple):
    """build: configuration -> layer. fields: what it reads beside hidden_size and num_heads.

    compared: whether `girih.compare` trains it when no mixers are named.
    has_mlp: whether its blocks have a feed-forward layer.
    on_attention: what `girih.replace_attention` puts on an attention's projections, where these do not fit
        the layer itself.
    """

    build: Callable[[Any], nn.Module]
    fields: tuple[str, ...]
    compared: bool = True
    has_mlp: bool = True
    on_attention: "Mixer | None" = None


MIXERS: dict[str, Mixer] = {}


def register(name: str, build: Callable[[Any], nn.Module], *fields: str, **more: Any) -> None:
    """Makes a mixer known; `girih::nn` registers the same names with the same fields, and their bounds.

    more: `Mixer`'s.
    """
    MIXERS[name] = Mixer(build, fields, **more)
    for known in sorted(MIXERS):
        MIXERS[known] = MIXERS.pop(known)


def layer_of(layer: type[nn.Module], *fields: str, **fixed: Any) -> Callable[[Any], nn.Module]:
    """A layer from a configuration's fields of the same names. One that is None keeps `fixed`, or the layer's
    own default."""

    def build(config: Any) -> nn.Module:
        given = {field: value for field in fields if (value := getattr(config, field)) is not None}
        return layer(config.hidden_size, config.num_heads, **(fixed | given))

    return build


def register_layer(
    name: str, layer: type[nn.Module], *fields: str, compared: bool = True, **fixed: Any
) -> None:
    """Registers a layer whose keywords are the configuration's fields; `fixed` are the mixer's own."""
    register(name, layer_of(layer, *fields, **fixed), *fields, compared=compared)
