"""Registers girih with other libraries when these are imported.

Models: transformers has tables with the names of the classes of each model type, and imports
`transformers.models.<type>` when a class is used. This file adds girih's names when the tables are imported,
and makes `transformers.models.girih` an alias of girih.models. Mappings that transformers created before get
the classes themselves.
Converted models: `from_pretrained` of every class of transformers calls `girih.from_pretrained` for a folder
of a model that `girih.inject` or `girih.replace_attention` converted. `save_pretrained` writes a module that
imports girih with the model, for processes that do not import girih (`girih.remote_code`).
Layers: they accept the call of transformers' attention modules.
accelerate: it refuses `ParallelismConfig(cp_size=...)` for a model with girih's layers.
PyTorch: DTensor gets the sharding rules of the operators (`girih.ops._sharding`), and FSDP2's error about
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
    """Registers girih's classes with the mappings that this module created from its tables before
    `add_classes`. They have a copy of CONFIG_MAPPING_NAMES.
    """
    models = import_module("girih.models")
    for table, name in TABLES[module.__name__].items():
        mapping = getattr(module, table.removesuffix("_NAMES"))
        mapping.register(models.GirihConfig, getattr(models, name), exist_ok=True)


def set_attention_call(module: ModuleType) -> None:
    """Makes girih.nn's layers accept the call of transformers' attention modules (`SequenceLayer`).

    girih.models is imported at the first such call, because it needs transformers, which the caller has
    imported.
    """

    def attention_call(layer: Any, hidden_states: Any, layer_idx: int | None, **call: Any) -> Any:
        from girih.models.adapters.attention_call import attend

        return attend(layer, hidden_states, layer_idx, **call)

    module.SequenceLayer.attention_call = staticmethod(attention_call)


def register_sharding(_: ModuleType) -> None:
    import_module("girih.ops._sharding")


def explain_fp32(groups: ModuleType) -> None:
    """Adds the name of `girih.distributed.shard` to FSDP2's error about two dtypes in a block of girih's
    layers."""

    def note(modules: list[Any]) -> str | None:
        if not any(getattr(part, "fp32", ()) for module in modules for part in module.modules()):
            return None
        return (
            "girih: time scales, memories and gate biases stay in fp32; girih.distributed.shard(model, ...) "
            "in place of fully_shard gives them groups of their own"
        )

    import_module("girih._torch_internals").note_on_mixed_dtypes(groups, note)


FIELD = "girih"  # field of a converted model's configuration: the list of its conversions


def is_converted(folder: Any, config: Any, subfolder: str) -> bool:
    """Whether a configuration has a conversion; config None: the configuration of a local folder."""
    if hasattr(config, "to_dict"):
        return bool(getattr(config, FIELD, None))
    if folder is None or config is not None:
        return False
    try:
        values = json.loads(Path(folder, subfolder, "config.json").read_text(encoding="utf-8"))
        return isinstance(values, dict) and bool(values.get(FIELD))
    except (OSError, ValueError, TypeError, RecursionError):
        return False  # a model on the hub, or an error that transformers reports


def load_converted(module: ModuleType) -> None:
    """Makes `from_pretrained` of every class load converted models with `girih.from_pretrained`."""
    original = module.PreTrainedModel.from_pretrained.__func__

    @functools.wraps(original)
    def from_pretrained(cls: type, folder: Any, *args: Any, **kwargs: Any) -> Any:
        converts_itself = hasattr(cls, "converts_itself")  # the class that `girih.from_pretrained` creates
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
    """Makes `save_pretrained` write the module of `girih.remote_code` with a converted model. The
    configuration of a girih model writes its own module, and models with other remote code keep that code."""
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
            # Later saves, after `undo` or another conversion, write other entries.
            vars(config).pop("auto_map", None)
            if entry is not None:
                config.auto_map = entry

    module.PreTrainedModel.save_pretrained = save_pretrained


def refuse_context_parallel(module: ModuleType) -> None:
    """Makes accelerate refuse `ParallelismConfig(cp_size=...)` for a model with girih's layers. It cuts
    sequences as PyTorch's attention needs them, two parts for each process that do not follow each other."""
    original = getattr(module.Accelerator, "_prepare_cp", None)
    if original is None:  # a later accelerate: its import still succeeds, and the tests fail
        return

    @functools.wraps(original)
    def _prepare_cp(self: Any, *args: Any) -> Any:
        layers = [layer for arg in args if hasattr(arg, "modules") for layer in arg.modules()]
        own = [type(layer).__name__ for layer in layers if type(layer).__module__.startswith("girih.")]
        if own:
            raise ValueError(
                f"cp_size is {self.parallelism_config.cp_size}; expected 1: {own[0]} cannot read sequences "
                "as accelerate cuts them. Call the model within girih.context_parallel(mesh) instead"
            )
        return original(self, *args)

    module.Accelerator._prepare_cp = _prepare_cp


def convert_saved_and_loaded(module: ModuleType) -> None:
    load_converted(module)
    save_converted(module)


# Functions to call after the import of a module.
HOOKS: dict[str, Callable[[ModuleType], None]] = dict.fromkeys(TABLES, add_classes) | {
    "torch.distributed.tensor": register_sharding,
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": explain_fp32,
    "accelerate.accelerator": refuse_context_parallel,
    "transformers.modeling_utils": convert_saved_and_loaded,
    "girih.nn.layers.sequence_layer": set_attention_call,
}


class ModelsLoader(Loader):
    """Loads girih.models as `transformers.models.girih`."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module("girih.models")


class AfterImport(MetaPathFinder):
    """A finder for the modules in `HOOKS` that calls their hooks after they have been executed."""

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
