"""The configuration of girih's language models."""

import functools
from collections.abc import Iterable
from dataclasses import fields
from os import PathLike
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig, PretrainedConfig

from girih import remote_code
from girih.nn.functional.fields import complete_fields, fields_to_json

# The classes that the module beside a saved model names, by transformers' Auto classes.
REMOTE = {
    "AutoConfig": "GirihConfig",
    "AutoModel": "GirihModel",
    "AutoModelForCausalLM": "GirihForCausalLM",
    "AutoModelForSequenceClassification": "GirihForSequenceClassification",
}


class GirihConfig(PretrainedConfig):
    """Configuration of `GirihModel` and `GirihForCausalLM`.

    mixer: one of `MIXERS` for all layers, or a list with one name for each layer (a hybrid). The string "cat"
        is the whole CAT model, with its compressor; in a list "cat" is CAT as a layer. "mag" mixes `mag_base`
        and `mag_mixer`.
    num_heads, num_kv_heads, head_dim: num_heads query heads read num_kv_heads memories; head_dim is the width
        of a head. Default: num_kv_heads = num_heads.
    num_slots: number of memory slots M of gsa, abc, raven, trellis and lattice.
    chunk: chunk length C of trellis, lattice, ttt, cat and between_chunks.
    chunks: chunk lengths that a call of the CAT model may choose. It includes `chunk`. The lengths are
        ascending multiples of the first, such as [4, 8, 16, 32].
    n: delta-rule updates of a token in delta_product and gated_delta_product.
    gated: whether the memories of delta_product, trellis and lattice decay.
    conv_size: width of the short convolutions; 0: none. Default: that of the mixer's paper.
    expand_k, expand_v: width of keys and values as multiples of head_dim. Defaults are those of the papers:
        gla 0.5 and 1; gated_deltanet and retnet 1 and 2; linear_attention, hgrn2, deltanet and
        delta_product 1 and 1. mamba2 reads expand_v only: it has expand_v * num_heads heads, by default 2 *
        num_heads. raven: 1 and 1. Other mixers read neither.
    state_size: width of the keys (B, C) of mamba2, which all of its heads share, and of the keys of
        gated_delta_product, which the heads of a group share. num_groups: groups of heads of
        gated_delta_product; a divisor of num_heads.
    topk: how many slots a token of raven changes, 1 to num_slots. Default: 32, or num_slots if that is less.
    router_score (sigmoid or softmax), router_mlp, router_bias, router_noise, slot_decay, output_gate: options
        of raven; `girih.nn.Raven` documents them.
    intermediate_size: width of the feed-forward layers. Blocks of mamba2 have none: if all layers are mamba2,
        intermediate_size must be None.
    feature: gsa, abc. data_dependent_decay: gsa. phi, f, shared_qk, normalize_kv, value_read: trellis.
        objective, normalize, shrinkage: lattice. between_chunks, allow_neg_eigval: the delta-rule mixers.
        window: attention. rotary: retnet, which then reads rope_theta. `girih.nn` documents them.
    post_norm: whether trellis and lattice have an RMSNorm before the output gate. Default, as in the papers:
        True for trellis, False for lattice.
    compressor_hidden_size, compressor_layers: sizes of the CAT model's compressor. Default: half the
        decoder's.
    running_positions: rotary positions of CAT (model and layer) continue across chunks instead of starting at
        0 in each chunk.
    initializer_range: standard deviation of initial weights. Default: hidden_size^-1/2; with it, models of a
        few hundred channels learn much faster than with 0.02.
    max_position_embeddings: the longest sequence of the CAT model, whose compressor learns a vector for each
        chunk index. Other mixers do not read it.
    loss_in_chunks: with labels, the output of a training call has the loss and no logits. The loss is
        computed for parts of the tokens (`girih.nn.functional.loss`), so that the logits of all tokens do not
        exist at once; with a large vocabulary these need more memory than the layers. Leave it False for
        trainers that read logits.

    `girih::nn::Config` in C++ checks the fields and their combinations. A wrong value raises a ValueError
    that names the field. An option that differs from its default and that no mixer reads, and an unknown
    keyword, raise one too.

    >>> GirihConfig(mixer=["gsa", "attention"], num_hidden_layers=2).mixers
    ['gsa', 'attention']
    """

    model_type = "girih"
    keys_to_ignore_at_inference: ClassVar = ["cache", "past_key_values"]
    auto_map: ClassVar = {}  # trl and transformers read it; save_pretrained sets it on the instance
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
    num_groups: int = 1
    topk: int | None = None
    slot_decay: bool = False
    router_score: str = "sigmoid"
    router_mlp: bool = False
    router_bias: bool = False
    router_noise: bool = False
    output_gate: bool = False
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
        """Raises if a field has different values under its two names (`attribute_map`)."""
        for alias, name in cls.attribute_map.items():
            if alias in kwargs and kwargs.get(name, kwargs[alias]) != kwargs[alias]:
                raise ValueError(
                    f"{name} is {kwargs[name]!r} and {alias} is {kwargs[alias]!r}; expected one of them"
                )
        return super().__new__(cls)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """`PretrainedConfig.from_dict`, with the checks for a file: config_dict may have entries of other
        libraries, which become attributes, and options that its mixers do not read, which earlier versions
        wrote and which are dropped. kwargs may have neither."""
        refuse_misspelt([*config_dict, *kwargs])
        saved_fields = {name: config_dict[name] for name in OWN_FIELDS if name in config_dict}
        unread = torch.ops.girih.unread_options(fields_to_json(saved_fields))
        values = {"transformers_version": ""} | {n: x for n, x in config_dict.items() if n not in unread}
        config = super().from_dict(values, **kwargs)
        # Checks kwargs too.
        complete_fields((config[0] if isinstance(config, tuple) else config).own_fields())
        return config

    def __post_init__(self, **kwargs: Any) -> None:
        unknown = [name for name in kwargs if not is_keyword(name)]
        if self.transformers_version is None and unknown:
            near, _ = torch.ops.girih.nearest_field(unknown[0])
            raise ValueError(f"{unknown[0]} is not a field of a configuration; did you mean {near}?")
        refuse_misspelt(unknown)  # names from `to_dict` or a file may be unknown, but not misspelt
        if not isinstance(self.loss_in_chunks, bool):
            raise ValueError(f"loss_in_chunks is {self.loss_in_chunks!r}; expected True or False")
        for alias, name in self.attribute_map.items():  # set fields before the defaults that depend on them
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))
        for name, value in complete_fields(self.own_fields()).items():
            if name in OWN_FIELDS:
                setattr(self, name, value)
        super().__post_init__(**kwargs)

    def save_pretrained(self, save_directory: str | PathLike, *args: Any, **kwargs: Any) -> None:
        """Also writes the module with which `trust_remote_code=True` finds girih's classes."""
        remote_code.write_module(save_directory, "girih.models", REMOTE.values())
        self.auto_map = remote_code.auto_map(REMOTE)
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Does nothing: transformers would save a copy of this file with the model and name the copy."""

    def own_fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OWN_FIELDS}

    @property
    def mixers(self) -> list[str]:
        """The mixer of each layer."""
        return [self.mixer] * self.num_hidden_layers if isinstance(self.mixer, str) else list(self.mixer)

    @property
    def is_whole_cat(self) -> bool:
        """Whether the model is `CatModel`, with a compressor, and not `GirihModel`."""
        return self.mixer == "cat"


# The fields of `girih::nn::Config`. Other fields are those of transformers, use_cache and loss_in_chunks.
OWN_FIELDS = tuple(
    field.name
    for field in fields(GirihConfig)
    if field.name in GirihConfig.__annotations__ and field.name not in ("use_cache", "loss_in_chunks")
)

# Keywords that transformers' configurations accept and that are not dataclass fields.
TRANSFORMERS_KEYWORDS = (
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "girih",  # written by `girih.inject` and `girih.replace_attention`
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
    """Whether `name` is a field, an alias of a field, or a keyword that transformers accepts."""
    names = {field.name for field in fields(GirihConfig)} | set(GirihConfig.attribute_map)
    return (
        name in names or name in TRANSFORMERS_KEYWORDS or name.startswith("_") or name in generation_fields()
    )


def refuse_misspelt(names: Iterable[str]) -> None:
    """Raises a ValueError for a name that is similar to a field's name and not a keyword."""
    for name in names:
        near, is_misspelt = torch.ops.girih.nearest_field(name)
        if is_misspelt and not is_keyword(name):
            raise ValueError(f"{name} is not a field of a configuration; did you mean {near}?")
