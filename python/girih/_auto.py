"""Makes girih known to others, without importing them or its own parts before they are used: its models to
transformers' auto classes, its operators to DTensor.

transformers keeps tables of names, of a model type and its classes, and imports `transformers.models.<type>`
when a class is asked for. So the names are added once the tables are there, and that module is girih.models.
DTensor is told how operands may be cut (`girih.ops._sharding`) once it is there.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

AUTO, ALIAS = "transformers.models.auto", "transformers.models.girih"
TABLES = {
    f"{AUTO}.configuration_auto": {"CONFIG_MAPPING_NAMES": "GirihConfig"},
    f"{AUTO}.modeling_auto": {
        "MODEL_MAPPING_NAMES": "GirihModel",
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "GirihForCausalLM",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "GirihForSequenceClassification",
    },
}


def add(module: ModuleType) -> None:
    """Adds girih's classes to the tables of this module."""
    for table, name in TABLES[module.__name__].items():
        getattr(module, table)["girih"] = name


def shard(_: ModuleType) -> None:
    import_module("girih.ops._sharding")


# What is done when a module has run.
AFTER: dict[str, Callable[[ModuleType], None]] = dict.fromkeys(TABLES, add) | {
    "torch.distributed.tensor": shard
}


class Models(Loader):
    """`transformers.models.girih` is girih.models."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module("girih.models")


class Awaited(MetaPathFinder):
    """Finds the modules of `AFTER` where they are, and does what is to be done when they have run."""

    def find_spec(self, fullname: str, path, target=None) -> ModuleSpec | None:
        if fullname == ALIAS:
            return ModuleSpec(ALIAS, Models())
        if fullname not in AFTER or (spec := PathFinder.find_spec(fullname, path)) is None:
            return None
        run = spec.loader.exec_module

        def run_and_tell(module: ModuleType) -> None:
            run(module)
            AFTER[fullname](module)

        spec.loader.exec_module = run_and_tell
        return spec


def register() -> None:
    there = [sys.modules[name] for name in AFTER if name in sys.modules]
    sys.meta_path.insert(0, Awaited())
    for module in there:
        AFTER[module.__name__](module)
    if any(module.__name__ in TABLES for module in there):
        import_module("girih.models")  # what was made of the tables before does not see a new name
