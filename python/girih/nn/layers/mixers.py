"""Registry of the mixers that a configuration can name. The file of a layer registers the layer's mixers."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn


class Mixer(NamedTuple):
    """build: configuration -> layer. fields: fields that it reads, apart from hidden_size and num_heads.

    compared: whether `girih.compare` trains it when no mixers are named.
    has_mlp: whether its blocks have a feed-forward layer.
    on_attention: the mixer that `girih.replace_attention` builds on attention's projections, if they do not
        fit this one.
    """

    build: Callable[[Any], nn.Module]
    fields: tuple[str, ...]
    compared: bool = True
    has_mlp: bool = True
    on_attention: "Mixer | None" = None


MIXERS: dict[str, Mixer] = {}


def register(name: str, build: Callable[[Any], nn.Module], *fields: str, **more: Any) -> None:
    """Registers a mixer; `girih::nn` registers the same names and fields, and the bounds of the fields.

    more: fields of `Mixer`.
    """
    MIXERS[name] = Mixer(build, fields, **more)
    for known in sorted(MIXERS):
        MIXERS[known] = MIXERS.pop(known)


def make_builder(layer: type[nn.Module], *fields: str, **fixed: Any) -> Callable[[Any], nn.Module]:
    """A builder that passes the fields of a configuration to the layer's keywords of the same names. A field
    that is None leaves the value of `fixed` or the layer's default."""

    def build(config: Any) -> nn.Module:
        values = {field: value for field in fields if (value := getattr(config, field)) is not None}
        return layer(config.hidden_size, config.num_heads, **(fixed | values))

    return build


def register_layer(
    name: str, layer: type[nn.Module], *fields: str, compared: bool = True, **fixed: Any
) -> None:
    """Registers a mixer with the builder `make_builder`; `fixed`: keyword arguments of this mixer."""
    register(name, make_builder(layer, *fields, **fixed), *fields, compared=compared)
