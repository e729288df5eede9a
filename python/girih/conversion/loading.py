"""Loads converted models that `save_pretrained` wrote."""

from os import PathLike
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from girih import models
from girih.conversion import auto_classes
from girih.conversion.attention import PART_NAME
from girih.conversion.config import from_json
from girih.conversion.convert import FIELD, Conversion

# Options that are not passed to the configuration: "auto" is not a dtype, and a saved quantization stays.
LOADING_OPTIONS = (
    "dtype",
    "torch_dtype",
    "quantization_config",
    "attn_implementation",
    "experts_implementation",
    "output_loading_info",
)
# Options for both the configuration and the weights.
SHARED_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)
# Options for remote code.
CODE_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "token",
    "code_revision",
)


def from_pretrained(
    folder: str | PathLike, *args: Any, model_class: type[PreTrainedModel] | None = None, **kwargs: Any
) -> PreTrainedModel:
    """Loads a model that was saved after `replace_attention` or `inject`, with its conversions and all
    weights.

    folder: a folder, or a name on the hub. model_class: the class of the model; default: the saved class.
    Other arguments are passed to its `from_pretrained`: dtype, device_map, attn_implementation, ... Arguments
    with names of configuration fields change the configuration: use_cache, num_labels, ...

    Once girih is imported, `from_pretrained` of every class of transformers and of the Auto classes calls
    this function for converted models. If girih is installed but not imported, Auto classes with
    trust_remote_code=True import it. Otherwise they load the model without its conversions, and report the
    weights named `.girih.` as unexpected.

    Raises ValueError for a model that was not converted or was saved without the weights of its conversion,
    and OSError if the folder has no model.
    """
    config = kwargs.pop("config", None)
    if config is None:
        config, kwargs = configuration(folder, kwargs)
    saved = getattr(config, FIELD, None)
    if not saved:
        raise ValueError(
            f"{folder}: its configuration has no {FIELD!r}: this model was not converted, and transformers' "
            "own from_pretrained loads it"
        )
    conversions = [from_json(entry) for entry in saved]
    model_class = model_class or class_of(config, folder, kwargs)

    def __init__(self, config: Any, *inputs: Any, **options: Any) -> None:
        model_class.__init__(self, config, *inputs, **options)
        for conversion in conversions:
            Conversion(self, conversion)

    # The model is converted in its constructor, on the meta device, so that all weights are loaded together.
    names = {"__init__": __init__, "__module__": model_class.__module__, "converts_itself": True}
    converted = type(model_class.__name__, (model_class,), names)
    returns_info = kwargs.pop("output_loading_info", False)
    model, info = converted.from_pretrained(folder, *args, config=config, output_loading_info=True, **kwargs)
    refuse_missing(folder, info)
    model.__class__ = model_class
    return (model, info) if returns_info else model


def configuration(folder: str | PathLike, options: dict[str, Any]) -> tuple[PretrainedConfig, dict[str, Any]]:
    """The configuration, changed by the options that name its fields, and the options for the weights."""
    config_options = {name: value for name, value in options.items() if name not in LOADING_OPTIONS}
    config, unused = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **config_options)
    # Locations and attention's implementation are options of the weights too.
    return config, {
        name: options[name]
        for name in options
        if name in unused or name in (*LOADING_OPTIONS, *SHARED_OPTIONS)
    }


def refuse_missing(folder: str | PathLike, info: dict[str, Any]) -> None:
    """Raises for a folder without the conversion's weights, which transformers cannot initialize."""
    missing = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    missing = sorted(key for key in missing if f".{PART_NAME}." in key)
    if missing:
        shown = ", ".join(missing[:4]) + f" and {len(missing) - 4} more" * (len(missing) > 4)
        raise ValueError(
            f"{folder}: weights of the conversion that its configuration names are missing, {shown}: it was "
            f"saved after it had been loaded without girih. Delete {FIELD!r} from its config.json, load it "
            "and convert it again"
        )


def class_of(
    config: PretrainedConfig, folder: str | PathLike, options: dict[str, Any]
) -> type[PreTrainedModel]:
    """The class that a configuration names: a class of transformers or girih, a class registered with an Auto
    class, or, with trust_remote_code among the options, a class of remote code."""
    names = config.architectures or []
    for name in names:
        for module in (transformers, models):
            if hasattr(module, name):
                return getattr(module, name)
    for registered in auto_classes.models_for(config):
        if registered.__name__ in names:
            return registered
    if options.get("trust_remote_code"):
        location = {name: options[name] for name in CODE_OPTIONS if name in options}
        for reference in (getattr(config, "auto_map", None) or {}).values():
            if str(reference).rpartition(".")[2] in names:
                return get_class_from_dynamic_module(reference, folder, **location)
    raise ValueError(
        f"model_class: {folder} names {config.architectures} as its class, which neither transformers nor "
        "girih has"
    )
