"""Registers girih with other libraries, when they are imported: its models with transformers' auto classes,
converted models with every class that loads one, its operators with DTensor, the call of transformers'
attention modules with its layers.

transformers keeps tables of names, of a model type and its classes, and imports `transformers.models.<type>`
when a class is asked for. The names are added when the tables are imported, and that module is girih.models.
Only this file registers the models: mappings that transformers made before the names were added get the
classes themselves.
A class of transformers that is asked for a folder which `girih.inject` or `girih.replace_attention` wrote
loads it converted (`girih.from_pretrained`): without the conversion it would be another model. A converted
model is saved with a module that imports girih, for processes that do not (`girih.remote_code`). DTensor gets
the sharding rules of the operators (`girih.ops._sharding`) when it is imported, and FSDP2's error about
parameters of two dtypes names `girih.distributed.shard`.
"""

import functools
import json
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from girih import remote_code

AUTO, ALIAS = "transformers.models.auto", "transformers.models.girih"
TABLES = {
    f"{AUTO}.configuration_auto": {"CONFIG_MAPPING_NAMES": "GirihConfig"},
    f"{AUTO}.modeling_auto": {
        "MODEL_MAPPING_NAMES": "GirihModel",
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "GirihForCausalLM",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "GirihForSequenceClassification",
    },
}


def add_classes(module: ModuleType) -> None:
    """Adds girih's classes to the tables of this module."""
    for table, name in TABLES[module.__name__].items():
        getattr(module, table)["girih"] = name


def register_classes(module: ModuleType) -> None:
    """Registers girih's classes with the mappings that this module made of its tables before `add_classes`.

    A mapping looks up the type of a model by a copy of CONFIG_MAPPING_NAMES.
    """
    models = import_module("girih.models")
    for table, name in TABLES[module.__name__].items():
        mapping = getattr(module, table.removesuffix("_NAMES"))
        mapping.register(models.GirihConfig, getattr(models, name), exist_ok=True)


def set_attention_call(module: ModuleType) -> None:
    """Lets girih.nn's layers answer the call of transformers' attention modules (`SequenceLayer`).

    The import waits for the first such call: girih.models needs transformers, which the caller has.
    """

    def attention_call(layer: Any, hidden_states: Any, layer_idx: int | None, **call: Any) -> Any:
        from girih.models.adapters.attention_call import attend

        return attend(layer, hidden_states, layer_idx, **call)

    module.SequenceLayer.attention_call = staticmethod(attention_call)


def register_sharding(_: ModuleType) -> None:
    import_module("girih.ops._sharding")


def explain_fp32(groups: ModuleType) -> None:
    """Lets FSDP2's error about two dtypes in a block of girih's layers say what to call."""

    def note(modules: list[Any]) -> str | None:
        if not any(getattr(part, "fp32", ()) for module in modules for part in module.modules()):
            return None
        return (
            "girih: time scales, memories and gate biases stay in fp32; girih.distributed.shard(model, ...) "
            "in place of fully_shard gives them groups of their own"
        )

    import_module("girih._torch_internals").note_on_mixed_dtypes(groups, note)


FIELD = "girih"  # in the configuration of a converted model: what was converted


def is_converted(folder: Any, config: Any, subfolder: str) -> bool:
    """Whether a configuration, that of a local folder where none is given, names a conversion."""
    if hasattr(config, "to_dict"):
        return bool(getattr(config, FIELD, None))
    if folder is None or config is not None:
        return False
    try:
        values = json.loads(Path(folder, subfolder, "config.json").read_text(encoding="utf-8"))
        return isinstance(values, dict) and bool(values.get(FIELD))
    except (OSError, ValueError, TypeError, RecursionError):
        return False  # of the hub, or for transformers to report


def load_converted(module: ModuleType) -> None:
    """Lets `from_pretrained` of every class load a converted model as it was saved."""
    original = module.PreTrainedModel.from_pretrained.__func__

    @functools.wraps(original)
    def from_pretrained(cls: type, folder: Any, *args: Any, **kwargs: Any) -> Any:
        converts_itself = hasattr(cls, "converts_itself")  # the class that `girih.from_pretrained` makes
        if not converts_itself and is_converted(folder, kwargs.get("config"), kwargs.get("subfolder", "")):
            load = import_module("girih.conversion").from_pretrained
            return load(folder, *args, model_class=cls, **kwargs)
        loaded = original(cls, folder, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if not converts_itself and is_converted(None, model.config, ""):
            raise ValueError(f"{folder}: is a converted model: load it by girih.from_pretrained")
        return loaded

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def save_converted(module: ModuleType) -> None:
    """Lets `save_pretrained` write, beside a converted model, the module by which processes that do not
    import girih load it converted. A girih model's configuration writes its own, and a model that comes with
    code of others keeps theirs."""
    original = module.PreTrainedModel.save_pretrained

    @functools.wraps(original)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        config, entry = self.config, vars(self.config).get("auto_map")
        if (
            not is_converted(None, config, "")
            or config.model_type == "girih"
            or not remote_code.is_own(entry)
        ):
            return original(self, save_directory, *args, **kwargs)
        auto_classes = import_module("girih.conversion.auto_classes")
        names = auto_classes.names_for(config)
        if kwargs.get("is_main_process", True):
            remote_code.write_module(save_directory, auto_classes.SOURCE, names)
        config.auto_map = remote_code.auto_map({name: name for name in names})
        try:
            return original(self, save_directory, *args, **kwargs)
        finally:
            vars(config).pop("auto_map", None)  # it is undone, or saved, with what it is then
            if entry is not None:
                config.auto_map = entry

    module.PreTrainedModel.save_pretrained = save_pretrained


def convert_saved_and_loaded(module: ModuleType) -> None:
    load_converted(module)
    save_converted(module)


# Functions to call after the import of a module.
HOOKS: dict[str, Callable[[ModuleType], None]] = dict.fromkeys(TABLES, add_classes) | {
    "torch.distributed.tensor": register_sharding,
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": explain_fp32,
    "transformers.modeling_utils": convert_saved_and_loaded,
    "girih.nn.layers.sequence_layer": set_attention_call,
}


class ModelsLoader(Loader):
    """`transformers.models.girih` is girih.models."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module("girih.models")


class AfterImport(MetaPathFinder):
    """Finds the modules of `HOOKS`, and calls their hooks after they have run."""

    def find_spec(self, fullname: str, path, target=None) -> ModuleSpec | None:
        if fullname == ALIAS:
            return ModuleSpec(ALIAS, ModelsLoader())
        if fullname not in HOOKS or (spec := PathFinder.find_spec(fullname, path)) is None:
            return None
        execute = spec.loader.exec_module

        def run_with_hook(module: ModuleType) -> None:
            execute(module)
            HOOKS[fullname](module)

        spec.loader.exec_module = run_with_hook
        return spec


def register() -> None:
    loaded = [sys.modules[name] for name in HOOKS if name in sys.modules]
    sys.meta_path.insert(0, AfterImport())
    for module in loaded:
        HOOKS[module.__name__](module)
    if modeling_auto := sys.modules.get(f"{AUTO}.modeling_auto"):
        register_classes(modeling_auto)
