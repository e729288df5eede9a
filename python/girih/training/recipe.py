"""The sizes of model, and how each is trained: `recipes.json`, which girih-train reads too."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from girih.models import GirihConfig, GirihForCausalLM
from girih.training.command import Refusal

STEP = 8  # what the width of an MLP is a multiple of


@dataclass(frozen=True)
class Recipe:
    """A size of model and how to train it. Lengths in tokens, batch in sequences over all devices."""

    parameters: int
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
        """What a step's data takes of the memory: where each window starts."""
        return 8 * self.batch


SIZES = {
    name: Recipe(**fields)
    for name, fields in json.loads(Path(__file__).with_name("recipes.json").read_text()).items()
}


def config_of_size(
    mixer: str, size: Recipe, vocab_size: int = 256, chunks: list[int] | None = None
) -> GirihConfig:
    """A model of `size.parameters` parameters, within 2 percent: the width of its MLPs is fitted.

    mixer: a name, or several with commas that take turns over the layers. chunks: of an adaptive CAT, which
    goes by 16 where it is one of them and else by the first unless a call says otherwise.
    """
    names = mixer.split(",")
    if len(names) > size.layers:
        raise Refusal(f"mixer {mixer}: {len(names)} cannot take turns over {size.layers} layers")

    def config(intermediate: int) -> GirihConfig:
        return GirihConfig(
            vocab_size=vocab_size,
            hidden_size=size.heads * size.head_dim,
            num_hidden_layers=size.layers,
            num_heads=size.heads,
            head_dim=size.head_dim,
            num_slots=size.slots,
            intermediate_size=intermediate,
            mixer=[names[i % len(names)] for i in range(size.layers)] if len(names) > 1 else mixer,
            **({"chunks": chunks, "chunk": 16 if 16 in chunks else chunks[0]} if chunks else {}),
        )

    def count(intermediate: int) -> int:
        with torch.device("meta"):
            return GirihForCausalLM(config(intermediate)).num_parameters()

    try:
        least = count(STEP)
    except ValueError as error:  # a mixer that this size or this hybrid cannot hold
        raise Refusal(f"mixer {mixer}: {error}") from error
    a_step = count(2 * STEP) - least
    intermediate = STEP * max(1, 1 + round((size.parameters - least) / a_step))
    if abs(count(intermediate) / size.parameters - 1) > 0.02:
        raise Refusal(f"mixer {mixer}: it has {least:,} parameters or more, asked for {size.parameters:,}")
    return config(intermediate)


def model_of_size(mixer: str, size: Recipe, vocab_size: int = 256) -> GirihForCausalLM:
    return GirihForCausalLM(config_of_size(mixer, size, vocab_size))
