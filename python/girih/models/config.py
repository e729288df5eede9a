"""What a girih language model is made of."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn
from transformers import PretrainedConfig

from girih.nn import (
    Attention,
    CompressAttend,
    DeltaProduct,
    GatedLinearAttention,
    GatedSlotAttention,
    Lattice,
    MixAttention,
    Trellis,
)

Mixer = Callable[["GirihConfig"], nn.Module]


def _sizes(config: "GirihConfig", conv_size: int | None = None) -> dict[str, Any]:
    """What every mixer takes; `conv_size`: the width in its paper, None if it has no short convolution."""
    sizes = {"hidden_size": config.hidden_size, "num_heads": config.num_heads, "head_dim": config.head_dim}
    if conv_size is not None:
        sizes["conv_size"] = conv_size if config.conv_size is None else config.conv_size
        sizes["norm_eps"] = config.norm_eps
    return sizes


def _slots(config: "GirihConfig", gated: bool) -> nn.Module:
    return GatedSlotAttention(
        **_sizes(config, 0),
        num_kv_heads=config.num_kv_heads,
        num_slots=config.num_slots,
        gated=gated,
        feature=config.feature,
    )


def _linear(config: "GirihConfig", gate: str, conv_size: int = 0) -> nn.Module:
    return GatedLinearAttention(**_sizes(config, conv_size), num_kv_heads=config.num_kv_heads, gate=gate)


def _delta(config: "GirihConfig", n: int, gated: bool) -> nn.Module:
    return DeltaProduct(
        **_sizes(config, 4),
        num_kv_heads=config.num_kv_heads,
        n=n,
        gated=gated,
        allow_neg_eigval=config.allow_neg_eigval,
        between_chunks=config.between_chunks,
        chunk=config.chunk,
    )


def _trellis(config: "GirihConfig") -> nn.Module:
    return Trellis(
        **_sizes(config, 4),
        num_slots=config.num_slots,
        chunk=config.chunk,
        phi=config.phi,
        f=config.f,
        gated=config.gated,
    )


def _lattice(config: "GirihConfig") -> nn.Module:
    return Lattice(
        **_sizes(config, 4),
        num_slots=config.num_slots,
        chunk=config.chunk,
        objective=config.objective,
        gated=config.gated,
    )


def _attention(config: "GirihConfig") -> nn.Module:
    return Attention(**_sizes(config), num_kv_heads=config.num_kv_heads, rope_theta=config.rope_theta)


def _cat(config: "GirihConfig") -> nn.Module:
    return CompressAttend(
        **_sizes(config),
        num_kv_heads=config.num_kv_heads,
        chunk=config.chunk,
        rope_theta=config.rope_theta,
        running_positions=config.running_positions,
    )


def _mag(config: "GirihConfig") -> nn.Module:
    return MixAttention(
        MIXERS[config.mag_base](config),
        MIXERS[config.mag_mixer](config),
        weight=config.mag_weight,
        learned=config.mag_learned,
        cross=config.mag_cross,
    )


MIXERS: dict[str, Mixer] = {
    "gsa": lambda config: _slots(config, gated=True),
    "abc": lambda config: _slots(config, gated=False),
    "linear_attention": lambda config: _linear(config, "none"),
    "retnet": lambda config: _linear(config, "fixed"),
    "gla": lambda config: _linear(config, "vector"),
    "mamba2": lambda config: _linear(config, "scalar", conv_size=4),
    "delta_product": lambda config: _delta(config, config.n, config.gated),
    "deltanet": lambda config: _delta(config, 1, False),
    "gated_deltanet": lambda config: _delta(config, 1, True),
    "trellis": _trellis,
    "lattice": _lattice,
    "attention": _attention,
    "cat": _cat,
    "mag": _mag,
}

CHOICES = {
    "phi": ("identity", "silu", "l2norm", "layer_norm", "l2_silu", "ln_silu", "softmax"),
    "f": ("identity", "silu", "l2norm", "layer_norm", "l2_silu", "ln_silu", "softmax"),
    "objective": ("decode", "encode", "similarity"),
    "feature": ("softmax", "none", "silu", "relu", "relu2"),
    "between_chunks": (None, "gelu", "tanh"),
}


class GirihConfig(PretrainedConfig):
    """Configuration of `GirihModel` and `GirihForCausalLM`.

    mixer: one of `MIXERS` for every layer, or a list with one name a layer (a hybrid). "cat" alone is the
        whole CAT model, with its compressor; in a list it is CAT as a layer. "mag" mixes `mag_base` and
        `mag_mixer`.
    num_heads, num_kv_heads, head_dim: queries, memories, width of each; by default one memory a query.
    num_slots: M of gsa, abc, trellis and lattice.
    chunk: C of trellis, lattice, cat and between_chunks.
    n: Householder steps of delta_product.
    gated: whether delta_product, trellis and lattice forget.
    conv_size: width of the short convolutions, 0 for none; by default what each mixer's paper has.
    feature: gsa, abc. phi, f: trellis. objective: lattice. between_chunks, allow_neg_eigval: the delta rule
        mixers.
    compressor_hidden_size, compressor_layers: of the CAT model, by default half the decoder's.
    running_positions: rotary positions of cat, model and layer, run over the chunks instead of starting anew.
    initializer_range: deviation that weights start with, by default hidden_size^-1/2: models of a few hundred
        channels learn far sooner from it than from 0.02.
    max_position_embeddings: bounds a sequence in the CAT model only, which learns a vector for each chunk's
        place.

    A value that does not fit raises a ValueError that names it.

    >>> GirihConfig(mixer=["gsa", "attention"], num_hidden_layers=2).mixers
    ['gsa', 'attention']
    """

    model_type = "girih"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]
    attribute_map: ClassVar = {"num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads"}

    vocab_size: int = 256
    hidden_size: int = 256
    num_hidden_layers: int = 4
    mixer: str | list[str] = "gsa"
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    num_slots: int = 64
    chunk: int = 16
    n: int = 2
    gated: bool = True
    conv_size: int | None = None
    phi: str = "ln_silu"
    f: str = "ln_silu"
    objective: str = "decode"
    feature: str = "softmax"
    between_chunks: str | None = None
    allow_neg_eigval: bool = False
    mag_base: str = "attention"
    mag_mixer: str = "delta_product"
    mag_weight: float = 0.5
    mag_learned: bool = False
    mag_cross: bool = False
    compressor_hidden_size: int | None = None
    compressor_layers: int | None = None
    running_positions: bool = False
    max_position_embeddings: int = 8192
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    initializer_range: float | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_heads",
            "num_slots",
            "chunk",
            "n",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        self.num_kv_heads = self.num_kv_heads or self.num_heads
        if self.head_dim is None:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"num_heads is {self.num_heads}, which does not divide hidden_size {self.hidden_size}; "
                    "give head_dim"
                )
            self.head_dim = self.hidden_size // self.num_heads
        if self.intermediate_size is None:  # a gated layer of 8/3 has the parameters of a plain one of 4
            self.intermediate_size = -(-8 * self.hidden_size // 96) * 32
        if self.compressor_hidden_size is None:
            self.compressor_hidden_size = max(
                self.head_dim, self.hidden_size // 2 // self.head_dim * self.head_dim
            )
        self.compressor_layers = self.compressor_layers or max(1, self.num_hidden_layers // 2)
        if self.initializer_range is None:
            self.initializer_range = self.hidden_size**-0.5
        self._check()
        super().__post_init__(**kwargs)

    @property
    def mixers(self) -> list[str]:
        """The mixer of each layer."""
        return [self.mixer] * self.num_hidden_layers if isinstance(self.mixer, str) else list(self.mixer)

    @property
    def is_whole_cat(self) -> bool:
        """Whether this is the CAT model, with its compressor, rather than layers one above the other."""
        return self.mixer == "cat"

    def _check(self) -> None:
        if len(self.mixers) != self.num_hidden_layers:
            raise ValueError(
                f"mixer names {len(self.mixers)} layers; expected num_hidden_layers, {self.num_hidden_layers}"
            )
        parts = {"mag_base": self.mag_base, "mag_mixer": self.mag_mixer} if "mag" in self.mixers else {}
        used = set(self.mixers) | set(parts.values())
        for argument, names in {
            "mixer": self.mixers,
            **{part: [name] for part, name in parts.items()},
        }.items():
            allowed = [name for name in MIXERS if argument == "mixer" or name != "mag"]
            for name in names:
                if name not in allowed:
                    raise ValueError(f"{argument} is {name!r}; expected one of {', '.join(allowed)}")
        for argument, allowed in CHOICES.items():
            if (value := getattr(self, argument)) not in allowed:
                raise ValueError(f"{argument} is {value!r}; expected one of {', '.join(map(str, allowed))}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads}; expected a divisor of num_heads {self.num_heads}"
            )
        for name in ("trellis", "lattice"):
            if name in used and self.num_kv_heads != self.num_heads:
                raise ValueError(
                    f"num_kv_heads is {self.num_kv_heads}; "
                    f"{name} projects q and k together: expected num_heads, {self.num_heads}"
                )
        most = 256 if self.is_whole_cat else 255 if "cat" in used else 64
        if used & {"trellis", "lattice"} or self.between_chunks is not None:
            most = min(most, 64)
        least = 2 if self.is_whole_cat else 1
        if not least <= self.chunk <= most:
            raise ValueError(
                f"chunk is {self.chunk}; expected {least} to {most} for {', '.join(sorted(used))}"
            )
        if used & {"attention", "cat"} and self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary positions turn pairs and need an even one")
        if self.is_whole_cat and self.compressor_hidden_size % self.head_dim:
            raise ValueError(
                f"compressor_hidden_size is {self.compressor_hidden_size}; "
                f"expected a multiple of head_dim {self.head_dim}"
            )
