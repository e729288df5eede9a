"""Loads what `save_pretrained` wrote of a converted model."""

from os import PathLike
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from girih import models
from girih.conversion.config import from_json
from girih.conversion.convert import FIELD, Conversion


def from_pretrained(
    folder: str | PathLike, *args: Any, model_class: type[PreTrainedModel] | None = None, **kwargs: Any
) -> PreTrainedModel:
    """A model that was saved after `replace_attention` or `inject`, converted and with all its weights.

    folder: a folder, or a name on the hub. model_class: by default the class that was saved; the model is one
    of it. Other arguments are those of its `from_pretrained`: dtype, device_map, attn_implementation, ...

    The class's own `from_pretrained` loads the model without its conversion, whose weights it reports as
    unexpected: `model.layers.0.self_attn.girih...`.

    Raises ValueError for a model that was not converted, and OSError where there is none.
    """
    of_hub = ("revision", "token", "cache_dir", "subfolder", "local_files_only", "trust_remote_code")
    config = kwargs.pop("config", None)
    if config is None:
        options = {name: kwargs[name] for name in of_hub if name in kwargs}
        config = AutoConfig.from_pretrained(folder, **options)
    saved = getattr(config, FIELD, None)
    if not saved:
        raise ValueError(
            f"{folder}: its configuration has no {FIELD!r}: this model was not converted, and transformers' "
            "own from_pretrained loads it"
        )
    told = [from_json(entry) for entry in saved]
    model_class = model_class or class_of(config, folder)

    def __init__(self, config: Any, *inputs: Any, **options: Any) -> None:
        model_class.__init__(self, config, *inputs, **options)
        for each in told:
            Conversion(self, each)

    # Converted as soon as it is made, on the meta device, so that its weights are loaded with all others.
    names = {"__init__": __init__, "__module__": model_class.__module__}
    converted = type(model_class.__name__, (model_class,), names)
    loaded = converted.from_pretrained(folder, *args, config=config, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
    model.__class__ = model_class
    return loaded


def class_of(config: PretrainedConfig, folder: str | PathLike) -> type[PreTrainedModel]:
    """The class that a configuration names."""
    for name in config.architectures or []:
        for module in (transformers, models):
            if hasattr(module, name):
                return getattr(module, name)
    raise ValueError(
        f"model_class: {folder} names {config.architectures} as its class, which neither transformers nor "
        "girih has"
    )
