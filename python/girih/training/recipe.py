"""Sizes of models and how each is trained, from `recipes.json`, which girih-train reads too."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from girih.models import MIXERS, GirihConfig, GirihForCausalLM
from girih.training.command import Refusal

STEP = 8  # the width of an MLP is a multiple of this
# Fields of a configuration that the size or another argument of the command sets.
SIZE_FIELDS = (
    "mixer",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_heads",
    "head_dim",
    "intermediate_size",
    "chunks",
)


@dataclass(frozen=True)
class Recipe:
    """A size of model and how to train it. Lengths in tokens, batch in sequences over all devices.

    parameters: the width of the MLPs is chosen for this number of parameters; None: the configuration's
    default width.
    """

    parameters: int | None
    layers: int
    heads: int
    head_dim: int
    slots: int
    context: int
    batch: int
    steps: int
    learning_rate: float
    held_out: int  # windows

    @property
    def bytes_a_step(self) -> int:
        """The memory of a step's data: the start of each window."""
        return 8 * self.batch


SIZES = {
    name: Recipe(**fields)
    for name, fields in json.loads(Path(__file__).with_name("recipes.json").read_text()).items()
}


AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


def with_context(size: AnyRecipe, context: int | None) -> AnyRecipe:
    """The recipe with sequences of another length and the same number of tokens in a step and held out.

    >>> with_context(SIZES["small"], 1024).batch * 1024 == SIZES["small"].batch * SIZES["small"].context
    True
    """
    if context is None:
        return size
    tokens = size.batch * size.context
    if context < 1 or tokens % context:
        raise Refusal(f"context {context}: expected a divisor of the {tokens} tokens of a step")
    held_out = max(1, size.held_out * size.context // context)
    return replace(size, context=context, batch=tokens // context, held_out=held_out)


def read_options(options: str) -> dict:
    """Parses "chunk=1 phi=identity" to fields of a configuration. Raises for fields that the size sets."""
    try:
        fields = json.loads(torch.ops.girih.read_options(options))
    except ValueError as error:
        raise Refusal(f"options {options!r}: {error}") from error
    for name in fields:
        if name in SIZE_FIELDS:
            raise Refusal(f"options {options!r}: {name} is not an option; the size or --{name} sets it")
    return fields


def config_of_size(
    mixer: str, size: Recipe, vocab_size: int = 256, chunks: list[int] | None = None, options: str = ""
) -> GirihConfig:
    """The configuration of a model with `size.parameters` parameters, within 2 percent.

    The width of the MLPs is fitted to the number of parameters. If no block has an MLP, the number of layers
    is fitted, within half a layer. If size.parameters is None, nothing is fitted.
    mixer: a name, or several names separated by commas, which the layers use in turn. chunks: chunk lengths
    of an adaptive CAT; its default chunk is 16 if that is one of them, else the first. options: other fields
    of the configuration, such as "chunk=1 phi=identity".
    """
    names = mixer.split(",")
    fields = read_options(options)
    parts = names + [fields[part] for part in ("mag_base", "mag_mixer") if part in fields]
    if any("num_slots" in MIXERS[name].fields for name in parts if name in MIXERS):
        fields = {"num_slots": size.slots} | fields
    if chunks:
        fields = {"chunks": chunks, "chunk": 16 if 16 in chunks else chunks[0]} | fields
    if size.context > GirihConfig.max_position_embeddings:
        fields = {"max_position_embeddings": size.context} | fields
    if len(names) > size.layers:
        raise Refusal(f"mixer {mixer}: {len(names)} cannot take turns over {size.layers} layers")

    has_mlp = any(name not in MIXERS or MIXERS[name].has_mlp for name in names)

    def config(steps: int | None) -> GirihConfig:
        layers = size.layers if has_mlp or steps is None else steps * len(names)
        return GirihConfig(
            vocab_size=vocab_size,
            hidden_size=size.heads * size.head_dim,
            num_hidden_layers=layers,
            num_heads=size.heads,
            head_dim=size.head_dim,
            intermediate_size=steps * STEP if has_mlp and steps is not None else None,
            mixer=[names[i % len(names)] for i in range(layers)] if len(names) > 1 else mixer,
            **fields,
        )

    def count(steps: int) -> int:
        with torch.device("meta"):
            return GirihForCausalLM(config(steps)).num_parameters()

    try:
        if size.parameters is None:
            return config(None)
        least = count(1)
    except ValueError as error:  # a mixer that this size or this hybrid cannot hold
        raise Refusal(f"mixer {mixer}: {error}") from error
    step_parameters = count(2) - least
    steps = max(1, 1 + round((size.parameters - least) / step_parameters))
    allowed = 0.02 * size.parameters if has_mlp else step_parameters / 2
    if abs(count(steps) - size.parameters) > allowed:
        raise Refusal(f"mixer {mixer}: it has {least:,} parameters or more, asked for {size.parameters:,}")
    return config(steps)


def model_of_size(mixer: str, size: Recipe, vocab_size: int = 256, options: str = "") -> GirihForCausalLM:
    return GirihForCausalLM(config_of_size(mixer, size, vocab_size, options=options))
