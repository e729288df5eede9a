"""Registry of the mixers that a configuration can name. The file of a layer registers the layer's mixers."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn


class Mixer(NamedTuple):
    """build: constructs the layer from a configuration. fields: the fields that `build` reads, except
    hidden_size and num_heads, which every mixer reads.

    compared: whether `girih.compare` trains this mixer by default.
    has_mlp: whether blocks with this mixer have a feed-forward layer.
    on_attention: the variant that `girih.replace_attention` builds, for a mixer that cannot use the
        projections of an attention; None: this mixer.
    """

    build: Callable[[Any], nn.Module]
    fields: tuple[str, ...]
    compared: bool = True
    has_mlp: bool = True
    on_attention: "Mixer | None" = None


MIXERS: dict[str, Mixer] = {}


def register(name: str, build: Callable[[Any], nn.Module], *fields: str, **more: Any) -> None:
    """Registers a mixer. The C++ registry (csrc/nn/mixers.h) has the same names and fields, and the ranges of
    the fields.

    more: fields of `Mixer`.
    """
    MIXERS[name] = Mixer(build, fields, **more)
    for known in sorted(MIXERS):
        MIXERS[known] = MIXERS.pop(known)


def make_builder(layer: type[nn.Module], *fields: str, **fixed: Any) -> Callable[[Any], nn.Module]:
    """Returns `Mixer.build` for a layer: passes each field of the configuration as the keyword of the same
    name.

    A field that is None is not passed: the value of `fixed`, or else the layer's default, holds.
    """

    def build(config: Any) -> nn.Module:
        values = {field: value for field in fields if (value := getattr(config, field)) is not None}
        return layer(config.hidden_size, config.num_heads, **(fixed | values))

    return build


def register_layer(
    name: str, layer: type[nn.Module], *fields: str, compared: bool = True, **fixed: Any
) -> None:
    """Registers a mixer with the builder `make_builder`; `fixed`: keyword arguments of this mixer."""
    register(name, make_builder(layer, *fields, **fixed), *fields, compared=compared)
