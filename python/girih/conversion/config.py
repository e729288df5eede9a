"""The options of conversions, which are saved with the model."""

import functools
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import nn

from girih.models.config import GirihConfig
from girih.nn import MIXERS
from girih.nn.layers.mix_attention import check_mixture
from girih.nn.layers.mixers import Mixer
from girih.nn.layers.recurrent_layer import RecurrentLayer
from girih.ops import words

VIRTUAL_TOKENS = ("derivative", "rotary", "both")
GATES = ("k", "v", "kv")
GATES_PER = ("channel", "head")
POOLS = ("past", "window")
# The options that only the path of this mixer reads; other options apply to every path.
PATH_OPTIONS = {
    "delta_product": (
        "n",
        "virtual_tokens",
        "gate",
        "gate_per",
        "pool",
        "between_chunks",
        "chunk",
        "norm_eps",
    ),
    "linear_attention": (),
}
INJECTED = tuple(PATH_OPTIONS)
# A mixer can use the projections of an attention if it has one of these sets.
PROJECTIONS = (
    ("qkv_proj", "o_proj"),
    ("qk_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
)
# The mixers with a bidirectional form. Trellis, Lattice and TTT update their memories by chunks that are
# counted from the first token.
BOTH_WAYS = (
    "abc",
    "delta_product",
    "deltanet",
    "gated_deltanet",
    "gla",
    "gsa",
    "linear_attention",
    "mamba2",
    "retnet",
)
# The values that their options must have in an encoder, and the reasons.
BOTH_WAYS_OPTIONS = {
    "conv_size": (0, "a short convolution looks back only"),
    "n": (1, "further steps would have the same keys and values, with no short convolution to part them"),
    "between_chunks": (None, "chunks are counted from the first token"),
    "chunk": (None, "it is for between_chunks"),
}
# Sizes that the attention determines; a configuration cannot set them.
_SIZES = ("num_kv_heads", "head_dim", "expand_k", "expand_v")


@functools.cache
def replacing() -> tuple[str, ...]:
    """The mixers that can replace attention: recurrent mixers with one of the sets PROJECTIONS."""

    def fits(name: str) -> bool:
        config = GirihConfig(mixer=name, num_hidden_layers=1, hidden_size=8, num_heads=1)
        layer = on_attention(name).build(config)
        return isinstance(layer, RecurrentLayer) and projections_of(layer) is not None

    with torch.device("meta"):
        return tuple(name for name in MIXERS if fits(name))


def on_attention(name: str) -> Mixer:
    """The variant of a mixer that uses an attention's projections (`Mixer.on_attention`)."""
    return MIXERS[name].on_attention or MIXERS[name]


def projections_of(layer: nn.Module) -> tuple[str, ...] | None:
    return next((names for names in PROJECTIONS if all(hasattr(layer, name) for name in names)), None)


def check_choice(name: str, value: Any, expected: tuple) -> None:
    if value not in expected:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, expected))}")


def check_whole_number(name: str, value: Any, least: int, most: int | None = None) -> None:
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not fits or (most is not None and value > most):
        expected = f"{least} or more" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} is {value!r}; expected a whole number, {expected}")


def is_finite(value: Any) -> bool:
    """Whether value is a finite number, 0 or more."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0.0 <= value <= sys.float_info.max


def check_layers(layers: Iterable[int] | None) -> tuple[int, ...] | None:
    """Checks layers and returns them as a tuple; configurations from JSON have lists."""
    if layers is None:
        return None
    indices = tuple(layers) if isinstance(layers, Iterable) else (None,)
    if not indices:
        raise ValueError(f"layers is {layers!r}; expected one index at least, or None for all layers")
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in indices):
        raise ValueError(f"layers is {layers!r}; expected indices of layers, from 0")
    return indices


@dataclass(frozen=True)
class Replacement:
    """The options of `girih.replace_attention`.

    mixer: one of `replacing()`. layers: the `layer_idx` of the attention to replace; default: all.
    options: options of the mixer, by the names of `GirihConfig`'s fields: num_slots, n, gated, conv_size, ...
    """

    how: ClassVar[str] = "replace"

    mixer: str = "gsa"
    layers: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("mixer", self.mixer, replacing())
        object.__setattr__(self, "layers", check_layers(self.layers))
        names = [name for name in on_attention(self.mixer).fields if name not in _SIZES]
        for name in self.options:
            if name not in names:
                raise ValueError(
                    f"{name}: {self.mixer} has no such option; expected one of {', '.join(names)}"
                )

    def both_ways_options(self) -> dict[str, Any]:
        """The options that the bidirectional form of the mixer requires. Raises for other values."""
        if self.mixer not in BOTH_WAYS:
            raise ValueError(
                f"mixer is {self.mixer!r}, of which no reversed pass is defined; expected, for attention "
                f"that is not causal, one of {', '.join(map(repr, BOTH_WAYS))}"
            )
        required = {n: of for n, of in BOTH_WAYS_OPTIONS.items() if n in MIXERS[self.mixer].fields}
        for name, (value, reason) in required.items():
            if self.options.get(name, value) != value:
                raise ValueError(
                    f"{name} is {self.options[name]!r}; expected {value} where attention is not causal: "
                    f"{reason}"
                )
        return {name: value for name, (value, _) in required.items() if value is not None}

    def mixer_config(self, **sizes: Any) -> GirihConfig:
        """The configuration that builds the mixer with an attention's sizes. Raises for wrong values.

        The configuration's checks are those of the mixer itself. A field that only the variant `on_attention`
        reads would fail them, so it is set after the checks; the layer checks it.
        """
        values = self.options | sizes
        unchecked = set(on_attention(self.mixer).fields) - set(MIXERS[self.mixer].fields)
        checked = {name: value for name, value in values.items() if name not in unchecked}
        config = GirihConfig(mixer=self.mixer, num_hidden_layers=1, **checked)
        for name in values.keys() & unchecked:
            setattr(config, name, values[name])
        return config


@dataclass(frozen=True)
class Injection:
    """The options of `girih.inject`: the linear path of LiZA, and its mixture with attention by MaG (Furfaro
    2025).

    mixer: "delta_product", or "linear_attention": linear attention with phi = elu + 1 and a denominator (eq.
        3, Algorithm 1), which does not read the options from n to chunk and norm_eps.
    layers: the `layer_idx` of the attention that gets a path; default: all.
    n: delta-rule updates of a token, 1 to 4. The first uses the token's k and v, the others virtual tokens.
    virtual_tokens: "derivative": the m-th difference of k and v over tokens, over 2^m (eq. 22). "rotary":
        their channel pairs rotated by 2 pi m / n (eq. 23); at n = 2 this repeats the first update, because
        writing -v to -k equals writing v to k. "both": the mean of the two.
    gate: the step size beta is the sigmoid of a causal mean of "k" or of "v" (eq. 5), or for "kv" the product
        of both sigmoids.
    pool: the mean is over the "past", or over a "window" of the last three tokens.
    gate_per: "channel": one beta for each channel. "head": the mean of these for each head.
    between_chunks: None, "gelu" or "tanh", applied to the memory after every `chunk` tokens (eq. 24).
    weight: the weight m of the linear path, 0 to 1. learned: m is a parameter of each layer with initial
        value `weight`. cross: adds the product of both paths (eq. 7, 8).
    max_self_attn_length: number of tokens that attention attends to, including the query's own; None: all.
    """

    how: ClassVar[str] = "inject"

    mixer: str = "delta_product"
    layers: tuple[int, ...] | None = None
    n: int = 2
    virtual_tokens: str = "derivative"
    gate: str = "k"
    gate_per: str = "channel"
    pool: str = "past"
    between_chunks: str | None = None
    chunk: int = 64
    weight: float = 0.5
    learned: bool = False
    cross: bool = False
    max_self_attn_length: int | None = None
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_choice("mixer", self.mixer, INJECTED)
        self.refuse_unread(f.name for f in fields(self) if getattr(self, f.name) != f.default)
        object.__setattr__(self, "layers", check_layers(self.layers))
        check_whole_number("n", self.n, 1, 4)
        check_choice("virtual_tokens", self.virtual_tokens, VIRTUAL_TOKENS)
        check_choice("gate", self.gate, GATES)
        check_choice("gate_per", self.gate_per, GATES_PER)
        check_choice("pool", self.pool, POOLS)
        check_choice("between_chunks", self.between_chunks, (None, *words("delta_product", "between_chunks")))
        check_whole_number("chunk", self.chunk, 1, 64)
        self.refuse_idle(f.name for f in fields(self) if getattr(self, f.name) != f.default)
        if self.max_self_attn_length is not None:
            check_whole_number("max_self_attn_length", self.max_self_attn_length, 1)
        check_mixture(self.weight, self.learned)
        if not is_finite(self.norm_eps):
            raise ValueError(f"norm_eps is {self.norm_eps!r}; expected a number, 0 or more")

    def refuse_idle(self, names: Iterable[str]) -> None:
        """Raises for options of these names that have no effect with the values of the other options."""
        reasons = {"chunk": "between_chunks"} if self.between_chunks is None else {}
        reasons |= {"virtual_tokens": "n above 1"} if self.n == 1 else {}
        for name in names:
            if name in reasons:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; expected none: it is for {reasons[name]}"
                )

    def read_names(self) -> list[str]:
        """The names of the fields that the path of this mixer reads."""
        unread = set().union(*PATH_OPTIONS.values()) - set(PATH_OPTIONS[self.mixer])
        return [f.name for f in fields(self) if f.name not in unread]

    def refuse_unread(self, names: Iterable[str]) -> None:
        """Raises for options of these names that the path does not read."""
        known = self.read_names()
        for name in names:
            if name not in known:
                expected = ", ".join(name for name in known if name not in ("mixer", "layers"))
                raise ValueError(f"{name}: {self.mixer} has no such option; expected one of {expected}")


CONVERSIONS = {kind.how: kind for kind in (Replacement, Injection)}


def to_json(conversion: Replacement | Injection) -> dict[str, Any]:
    """The entry of config.json. An injection saves only the fields that its path reads."""
    saved = asdict(conversion)
    if isinstance(conversion, Injection):
        saved = {name: saved[name] for name in conversion.read_names()}
    return {"how": conversion.how} | saved


def from_json(saved: Any) -> Replacement | Injection:
    if not isinstance(saved, dict) or saved.get("how") not in CONVERSIONS:
        raise ValueError(
            f"config.girih holds {saved!r:.80}; expected what girih.inject or replace_attention saved"
        )
    kind = CONVERSIONS[saved["how"]]
    options = {name: value for name, value in saved.items() if name != "how"}
    unknown = options.keys() - {f.name for f in fields(kind)}
    if unknown:
        raise ValueError(
            f"config.girih has {', '.join(sorted(unknown))}, which this version of girih does not know"
        )
    return kind(**options)
