"""What a girih language model is made of."""

import functools
from collections.abc import Iterable
from dataclasses import fields
from os import PathLike
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig, PretrainedConfig

from girih import remote_code
from girih.nn.functional.fields import complete_fields, fields_to_json

# What the module beside a saved model names, by transformers' Auto classes.
REMOTE = {
    "AutoConfig": "GirihConfig",
    "AutoModel": "GirihModel",
    "AutoModelForCausalLM": "GirihForCausalLM",
    "AutoModelForSequenceClassification": "GirihForSequenceClassification",
}


class GirihConfig(PretrainedConfig):
    """Configuration of `GirihModel` and `GirihForCausalLM`.

    mixer: one of `MIXERS` for every layer, or a list with one name a layer (a hybrid). "cat" alone is the
        whole CAT model, with its compressor; in a list it is CAT as a layer. "mag" mixes `mag_base` and
        `mag_mixer`.
    num_heads, num_kv_heads, head_dim: queries, memories, width of each; by default one memory a query.
    num_slots: M of gsa, abc, trellis and lattice.
    chunk: C of trellis, lattice, cat and between_chunks.
    chunks: of the CAT model, the chunk lengths that a call may choose, `chunk` among them: ascending
        multiples of the first, as [4, 8, 16, 32].
    n: Householder steps of delta_product.
    gated: whether delta_product, trellis and lattice forget.
    conv_size: width of the short convolutions, 0 for none; by default what each mixer's paper has.
    expand_k, expand_v: width of keys and values as multiples of head_dim, by default what each mixer's paper
        has: gla 0.5 and 1, gated_deltanet and retnet 1 and 2; linear_attention, hgrn2, deltanet and
        delta_product 1 and 1. Others do not read them, but for mamba2: it has expand_v * num_heads heads of
        head_dim, by default twice num_heads, and keys (B, C) of state_size, which its heads share. Its blocks
        have no feed-forward layer: without other mixers intermediate_size is None, and a number is refused.
    feature: gsa, abc. data_dependent_decay: gsa. phi, f, shared_qk, normalize_kv, value_read: trellis.
        objective, normalize, shrinkage: lattice. between_chunks, allow_neg_eigval: the delta rule mixers.
        window: attention. rotary: retnet, whose rope_theta it needs. The layers of `girih.nn` explain them.
    post_norm: whether trellis and lattice have an RMSNorm before the gate, by default as the papers:
        Trellis has one and Lattice has none.
    compressor_hidden_size, compressor_layers: of the CAT model, by default half the decoder's.
    running_positions: rotary positions of cat, model and layer, continue across chunks instead of starting at
    0 in each. initializer_range: deviation that weights start with, by default hidden_size^-1/2: models of a
    few hundred
        channels learn far sooner from it than from 0.02.
    max_position_embeddings: bounds a sequence in the CAT model only, which learns a vector for each chunk's
        place.
    loss_in_chunks: in training, with labels, the model's output has its loss and no logits, which are made
        and left a part of the tokens after another (`girih.nn.functional.loss`): of a large vocabulary they
        take more memory than the layers. For trainers that read logits beside the loss leave it off.

    A value that does not fit raises a ValueError that names it: `girih::nn::Config` in C++ checks both. So
    does an option that is not at its default and that no mixer reads, and a keyword that is neither a field
    nor one of transformers'.

    >>> GirihConfig(mixer=["gsa", "attention"], num_hidden_layers=2).mixers
    ['gsa', 'attention']
    """

    model_type = "girih"
    keys_to_ignore_at_inference: ClassVar = ["cache", "past_key_values"]
    auto_map: ClassVar = {}  # trl and transformers look into it; one that was saved has its own
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
    chunks: list[int] | None = None
    n: int = 2
    gated: bool = True
    conv_size: int | None = None
    expand_k: float | None = None
    expand_v: float | None = None
    state_size: int = 128
    phi: str = "ln_silu"
    f: str = "ln_silu"
    objective: str = "decode"
    feature: str = "softmax"
    between_chunks: str | None = None
    allow_neg_eigval: bool = False
    normalize: bool = True
    shrinkage: float = 0.0
    post_norm: bool | None = None
    shared_qk: bool = False
    normalize_kv: bool = True
    value_read: str = "linear"
    data_dependent_decay: bool = True
    window: int | None = None
    rotary: bool = True
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
    loss_in_chunks: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __new__(cls, *_: Any, **kwargs: Any) -> "GirihConfig":
        """Refuses two different values of a field under its two names."""
        for alias, name in cls.attribute_map.items():
            if alias in kwargs and kwargs.get(name, kwargs[alias]) != kwargs[alias]:
                raise ValueError(
                    f"{name} is {kwargs[name]!r} and {alias} is {kwargs[alias]!r}; expected one of them"
                )
        return super().__new__(cls)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """transformers' own. A file may have entries of other libraries, which become attributes, and options
        that its mixers do not read, as earlier versions wrote them; keywords may not."""
        refuse_misspelt([*config_dict, *kwargs])
        saved_fields = {name: config_dict[name] for name in OWN_FIELDS if name in config_dict}
        unread = torch.ops.girih.unread_options(fields_to_json(saved_fields))
        values = {"transformers_version": ""} | {n: x for n, x in config_dict.items() if n not in unread}
        config = super().from_dict(values, **kwargs)
        complete_fields(
            (config[0] if isinstance(config, tuple) else config).own_fields()
        )  # with the keywords
        return config

    def __post_init__(self, **kwargs: Any) -> None:
        unknown = [name for name in kwargs if not is_keyword(name)]
        if self.transformers_version is None and unknown:
            near, _ = torch.ops.girih.nearest_field(unknown[0])
            raise ValueError(f"{unknown[0]} is not a field of a configuration; did you mean {near}?")
        refuse_misspelt(unknown)  # of what `to_dict` or a file has
        if not isinstance(self.loss_in_chunks, bool):
            raise ValueError(f"loss_in_chunks is {self.loss_in_chunks!r}; expected True or False")
        for alias, name in self.attribute_map.items():  # before what follows from them is completed
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))
        for name, value in complete_fields(self.own_fields()).items():
            if name in OWN_FIELDS:
                setattr(self, name, value)
        super().__post_init__(**kwargs)

    def save_pretrained(self, save_directory: str | PathLike, *args: Any, **kwargs: Any) -> None:
        """transformers' own, with the module by which `trust_remote_code=True` finds girih's classes."""
        remote_code.write_module(save_directory, "girih.models", REMOTE.values())
        self.auto_map = remote_code.auto_map(REMOTE)
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing: transformers would write a copy of this file beside a model, and name that."""

    def own_fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OWN_FIELDS}

    @property
    def mixers(self) -> list[str]:
        """The mixer of each layer."""
        return [self.mixer] * self.num_hidden_layers if isinstance(self.mixer, str) else list(self.mixer)

    @property
    def is_whole_cat(self) -> bool:
        """Whether this is the CAT model, with its compressor, rather than layers one above the other."""
        return self.mixer == "cat"


# What `girih::nn::Config` has too; the rest is transformers'.
OWN_FIELDS = tuple(
    field.name
    for field in fields(GirihConfig)
    if field.name in GirihConfig.__annotations__ and field.name not in ("use_cache", "loss_in_chunks")
)

# Keywords of transformers' configurations that are not fields of theirs.
TRANSFORMERS_KEYWORDS = (
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "girih",  # what `girih.inject` and `replace_attention` write
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "per_layer_config",
    "quantization_config",
    "torch_dtype",
    "use_return_dict",
)


@functools.cache
def generation_fields() -> frozenset[str]:
    """Fields of generation that transformers moves out of a configuration saved by older versions."""
    return frozenset(vars(GenerationConfig()))


def is_keyword(name: str) -> bool:
    """Whether a configuration takes it: a field, another name of one, or one of transformers' keywords."""
    names = {field.name for field in fields(GirihConfig)} | set(GirihConfig.attribute_map)
    return (
        name in names or name in TRANSFORMERS_KEYWORDS or name.startswith("_") or name in generation_fields()
    )


def refuse_misspelt(names: Iterable[str]) -> None:
    """Raises a ValueError for a name that is nearly a field's."""
    for name in names:
        near, is_misspelt = torch.ops.girih.nearest_field(name)
        if is_misspelt and not is_keyword(name):
            raise ValueError(f"{name} is not a field of a configuration; did you mean {near}?")
