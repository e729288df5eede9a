"""`girih.replace_attention` and `girih.inject`, which convert models of transformers in place."""

import copy
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from girih._auto import FIELD
from girih.conversion.attention import (
    MASKED,
    PART_NAME,
    ConvertedAttention,
    convert,
    refuse_replaced_forward,
    refuse_unknown_returns,
    restore,
)
from girih.conversion.config import Injection, Replacement, to_json
from girih.conversion.liza import Liza
from girih.conversion.mixer import mixer_of
from girih.conversion.projections import Projections, find
from girih.conversion.tokens import TokensForLayers
from girih.models.base import GirihPreTrainedModel

# Fields of quantization configurations with the modules that are not quantized: bitsandbytes', others'.
SKIPPED = ("llm_int8_skip_modules", "modules_to_not_convert")


class Conversion:
    """A conversion of a model by `replace_attention` or `inject`.

    layers: the converted modules by name. spec: the options. `undo()`, or the end of a `with`, restores the
    model.
    """

    def __init__(self, model: nn.Module, conversion: Replacement | Injection):
        self.spec, self.model = conversion, outermost(model)
        adapted = hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False)
        if adapted and isinstance(conversion, Replacement):
            raise ValueError(
                "model is one of peft's, which would not save the mixers' weights; call replace_attention "
                'first, then get_peft_model with modules_to_save=["girih"]'
            )
        if adapted and conversion.learned:
            raise ValueError(
                "learned: model is one of peft's, which would not save the weight; call inject first, then "
                'get_peft_model with modules_to_save=["girih"]'
            )
        if getattr(conversion, "max_self_attn_length", None) and isinstance(self.model, GirihPreTrainedModel):
            raise ValueError(
                f"max_self_attn_length is {conversion.max_self_attn_length}; expected none: girih's own "
                "attention keeps all keys, and its window is in its configuration"
            )
        self.layers: dict[str, nn.Module] = {}
        found = attention_of(self.model, conversion.layers, isinstance(conversion, Replacement))
        if not any(isinstance(module, ConvertedAttention) for module in self.model.modules()):
            copy_config(model, self.model.config)
        # All parts are built, and all errors raised, before the model changes.
        parts = [self._part(attention, sizes, trains=not adapted) for attention, sizes in found.values()]
        for (name, (attention, sizes)), part in zip(found.items(), parts, strict=True):
            convert(attention, conversion, sizes, part)
            self.layers[name] = attention
        self._hooks = [
            owner.register_forward_pre_hook(TokensForLayers(owner), with_kwargs=True)
            for owner in owners(self.model, self.layers.values())
            if not isinstance(owner, GirihPreTrainedModel)  # its layers get the bounds from the model
        ]
        config = self.model.config
        setattr(config, FIELD, [*(getattr(config, FIELD, None) or []), to_json(conversion)])
        self._skipped = skip_quantization(self.model, [f"{name}.{PART_NAME}" for name in self.layers])
        self.model._is_stateful = True  # a state cannot be rolled back: assisted decoding is refused

    def _part(self, attention: nn.Module, sizes: Projections, trains: bool) -> nn.Module:
        refuse_replaced_forward(attention)
        if isinstance(self.spec, Replacement):
            refuse_unknown_returns(attention)
            part = mixer_of(attention, sizes, self.spec)
        else:
            if self.spec.max_self_attn_length is not None and not hasattr(attention, "config"):
                raise ValueError(
                    f"max_self_attn_length: a {type(attention).__name__} has no config that names its "
                    f"attn_implementation; expected None, or attention of {' or '.join(MASKED)} with one"
                )
            part = Liza(sizes, self.spec)
        weight = sizes.weight(attention)
        # A quantized weight may be stored as numbers of any dtype.
        is_plain = weight.is_floating_point() and not hasattr(weight, "quant_state")
        dtype = weight.dtype if is_plain else self.model.dtype
        return part.to(weight.device, dtype).requires_grad_(trains).train(attention.training)

    def undo(self) -> None:
        """Restores the model, with its current weights. A second call does nothing."""
        if not self.layers:
            return
        for name, attention in self.layers.items():
            if not isinstance(attention, ConvertedAttention) or "original" not in vars(type(attention)):
                raise ValueError(
                    f"undo: {name} has become a {type(attention).__name__} since; undo that first"
                )
        for attention in self.layers.values():
            restore(attention)
        for hook in self._hooks:
            hook.remove()
        self.layers = {}
        if self._skipped:
            config, field, patterns = self._skipped
            setattr(config, field, [pattern for pattern in getattr(config, field) if pattern not in patterns])
        remaining = list(getattr(self.model.config, FIELD))
        remaining.remove(to_json(self.spec))
        setattr(self.model.config, FIELD, remaining)
        if not remaining:
            delattr(self.model.config, FIELD)
            del self.model._is_stateful  # the class's own value counts again

    def __enter__(self) -> "Conversion":
        return self

    def __exit__(self, *error: Any) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"Conversion of {len(self.layers)} layers by {self.spec}"


def skip_quantization(model: PreTrainedModel, names: list[str]) -> tuple[Any, str, list[str]] | None:
    """Adds modules to the list of modules that are not quantized, in a quantized model's configuration.

    The modules of a conversion are saved unquantized, and a loader would otherwise read their weights as
    quantized ones. A pattern begins with `.*`, because the names of a base model lack the prefix of the model
    with a head.

    Returns the configuration, its field and the patterns; None for a model that is not quantized.
    """
    quantizer, config = (
        getattr(model, "hf_quantizer", None),
        getattr(model.config, "quantization_config", None),
    )
    field = next((name for name in SKIPPED if hasattr(config, name)), None)
    if quantizer is None or field is None:
        return None
    # A list in the configuration replaces the default (the head and tied weights), so the default is written
    # too.
    skipped = getattr(config, field) or getattr(quantizer, "modules_to_not_convert", None) or []
    prefix = f"{model.base_model_prefix}."
    patterns = [f".*{name.removeprefix(prefix)}" for name in names]
    setattr(config, field, [*skipped, *patterns])
    return config, field, patterns


def outermost(model: nn.Module) -> PreTrainedModel:
    """The outermost model of transformers among the model and its submodules."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ValueError(f"model is a {type(model).__name__}; expected a model of transformers, wrapped or not")


def copy_config(model: nn.Module, config: PretrainedConfig) -> None:
    """Replaces a model's configuration by a copy, because models that are not converted may share it."""
    copies: dict[int, Any] = {}
    copy.deepcopy(config, copies)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PretrainedConfig) and id(value) in copies:
                config_copy = copies[id(value)]
                config_copy.__dict__.pop(FIELD, None)
                setattr(module, name, config_copy)


def attention_of(
    model: PreTrainedModel, layers: tuple[int, ...] | None, replaces: bool = False
) -> dict[str, tuple[nn.Module, Projections]]:
    """The attention modules with a `layer_idx` among `layers` that can be converted, by name. They belong to
    a decoder; with `replaces` they may belong to an encoder."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"model is a {type(model).__name__}, with an encoder; expected a decoder alone")
    found, reasons = {}, {}
    encoders: dict[str, tuple[nn.Module, Projections]] = {}
    has_decoder = False
    for name, module in model.named_modules():
        is_chosen = layers is None or getattr(module, "layer_idx", None) in layers
        if isinstance(module, ConvertedAttention):
            if is_chosen:
                raise ValueError(
                    f"model has been converted at {name}; undo that first, or leave it out of layers"
                )
            has_decoder |= module.projections.causal
            continue
        sizes = find(module)
        if isinstance(sizes, Projections) and not sizes.causal:
            encoders[name] = module, sizes
        elif isinstance(sizes, Projections) and (replaces or sizes.out is not None):
            found[name] = module, sizes
        elif isinstance(sizes, Projections):
            reasons[type(module).__name__] = (
                "its output projection is in another module; replace_attention takes it"
            )
        elif "Attention" in type(module).__name__:
            reasons.setdefault(type(module).__name__, sizes)
    # In a model with both kinds, such as an image encoder and a decoder, the decoder is converted.
    has_decoder |= bool(found)
    if encoders and replaces and not has_decoder:
        found = encoders
    elif encoders:
        reason = "it is not causal self-attention"
        if not has_decoder:
            reason += (
                ", and the linear path of inject reads the past alone; girih.replace_attention(model, "
                '"linear_attention") reads both ways'
            )
            reasons = {}
        reasons |= {type(module).__name__: reason for module, _ in encoders.values()}
    explanation = "; ".join(f"{kind}: {reason}" for kind, reason in reasons.items())
    refuse_shared(model, layers, {module.layer_idx for module, _ in found.values()}, replaces)
    if not found:
        raise ValueError(
            f"model is a {type(model).__name__} without attention that can be converted"
            + f" ({explanation})" * bool(explanation)
        )
    if layers is None:
        return found
    convertible = {module.layer_idx for module, _ in found.values()}
    if missing := set(layers) - convertible:
        raise ValueError(
            f"layers has {', '.join(map(str, sorted(missing)))}; attention that can be converted is at "
            f"{', '.join(map(str, sorted(convertible)))}" + f" ({explanation})" * bool(explanation)
        )
    return {name: (module, sizes) for name, (module, sizes) in found.items() if module.layer_idx in layers}


def refuse_shared(
    model: PreTrainedModel, layers: tuple[int, ...] | None, convertible: set[int], replaces: bool
) -> None:
    """Raises for layers that read the keys of other layers (Gemma 3n, 4), and with `replaces` also for the
    layers whose keys are read."""
    readers = [m.layer_idx for m in model.modules() if getattr(m, "is_kv_shared_layer", False) is True]
    sources = {m.layer_idx for m in model.modules() if getattr(m, "store_full_length_kv", False) is True}
    if not readers:
        return
    refused = set(readers) | (sources if replaces else set())
    if layers is None or refused & set(layers):
        raise ValueError(
            f"layers is {layers}: the model's layers share keys and values (num_kv_shared_layers); it cannot "
            f"be converted at {', '.join(map(str, sorted(refused)))}; expected some of "
            f"{', '.join(map(str, sorted(convertible - refused))) or 'none'}"
        )


def owners(model: PreTrainedModel, layers: Iterable[nn.Module]) -> list[PreTrainedModel]:
    """The innermost models that contain the layers: their forward gets the mask from which the masks of
    attention are computed."""
    innermost = {}
    for module in model.modules():  # outer models come first
        if isinstance(module, PreTrainedModel):
            innermost |= {id(child): module for child in module.modules()}
    return list({id(owner): owner for layer in layers if (owner := innermost[id(layer)])}.values())


def replace_attention(
    model: nn.Module, mixer: str = "gsa", *, layers: Iterable[int] | None = None, **options: Any
) -> Conversion:
    """Replaces attention by a recurrent mixer that uses its q, k, v and output projections, in place.

    The projections keep their names, biases, norms and adapters. The other parameters of the mixer (gates,
    convolutions, norms) are in the submodule `girih`. They are new and random, so the model needs training
    (Zhang et al. 2024, section 3.3). The mixer has no rotary positions, and its cache has a constant size.

    model: a decoder of transformers, or an encoder such as BERT and ModernBERT, wrapped or not. Attention is
        recognized by the names of its projections: q_proj, k_proj, v_proj, or fused c_attn, qkv_proj, with
        o_proj, dense, c_proj or out_proj; query, key, value; Wqkv, Wo. In an encoder the mixer scans in both
        directions, counts the current token once, and has no short convolutions.
    mixer: gsa, abc, delta_product, deltanet, gated_deltanet, gla, linear_attention, mamba2, retnet, trellis,
        lattice or ttt. The last three cannot be used in an encoder.
    layers: the `layer_idx` of the attention to replace; default: all. Fewer layers make a hybrid.
    options: options of the mixer, by the names of `GirihConfig`'s fields: num_slots, n, gated, conv_size, ...

    Returns the `Conversion`, whose `undo()` restores the model. `save_pretrained` writes the conversion to
    config.json, and `girih.from_pretrained` loads it.

    Raises a ValueError that names the argument: for a model without such attention, an unknown mixer or
    option, and for layers that do not exist or have been converted.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=1, **sizes))
    >>> conversion = replace_attention(model, mixer="gsa", num_slots=8)
    >>> model(torch.randint(64, (2, 12))).logits.shape, sorted(conversion.layers)
    (torch.Size([2, 12, 64]), ['model.layers.0.self_attn', 'model.layers.1.self_attn'])
    """
    return Conversion(model, Replacement(mixer, layers, options))


def inject(
    model: nn.Module, mixer: str = "delta_product", *, layers: Iterable[int] | None = None, **options: Any
) -> Conversion:
    """Mixes attention with a linear path that reads the same q, k and v (LiZA), in place.

        y = (1 - m) attention(x) + m W_o RMSNorm(delta_product(q, k, v))          TPTT: Furfaro 2025, eq. 7
        y = (1 - m) attention(x) + m W_o S^T phi(q) / (z^T phi(q))                eq. 3, Algorithm 1

    The path shares all projections: the norm of delta_product is the only new parameter of a layer, and
    adapters on q_proj or o_proj apply to both. The weight m is a buffer, which `MixSchedule` changes during
    training, or learned. At m = 0 the outputs are bitwise those of the original model.

    model: a decoder, as for `replace_attention`.
    mixer: "delta_product", or "linear_attention", with a denominator and phi = elu + 1.
    layers: the `layer_idx` of the attention that gets a path; default: all.
    options: the fields of `Injection`: n, virtual_tokens, gate, gate_per, pool, between_chunks, chunk,
        weight, learned, cross, max_self_attn_length, norm_eps. linear_attention reads weight, learned, cross
        and max_self_attn_length only. With max_self_attn_length the cache has a bounded size.

    Returns the `Conversion`, whose `undo()` restores the model. `save_pretrained` writes the conversion to
    config.json, and `girih.from_pretrained` loads it.

    Raises a ValueError that names the argument.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=1, **sizes))
    >>> conversion = inject(model, n=2, virtual_tokens="derivative", weight=0.25)
    >>> model(torch.randint(64, (2, 12))).logits.shape, model.model.layers[0].self_attn.girih.weight.item()
    (torch.Size([2, 12, 64]), 0.25)
    """
    names = [field.name for field in fields(Injection) if field.name not in ("mixer", "layers")]
    for name in options:
        if name not in names:
            raise ValueError(f"{name}: inject has no such option; expected one of {', '.join(names)}")
    injection = Injection(mixer, layers, **options)
    injection.refuse_unread(options)
    injection.refuse_idle(options)
    return Conversion(model, injection)
