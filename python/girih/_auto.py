"""Makes girih's models known to transformers' auto classes, without importing either before it is used.

transformers keeps tables of names, of a model type and its classes, and imports `transformers.models.<type>`
when a class is asked for. So the names are added once the tables are there, and that module is girih.models.
"""

import sys
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
    },
}


def add(module: ModuleType) -> None:
    """Adds girih's classes to the tables of this module."""
    for table, name in TABLES[module.__name__].items():
        getattr(module, table)["girih"] = name


class Models(Loader):
    """`transformers.models.girih` is girih.models."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module("girih.models")


class Tables(MetaPathFinder):
    """Finds the modules of `TABLES` where they are, and adds to their tables when they have run."""

    def find_spec(self, fullname: str, path, target=None) -> ModuleSpec | None:
        if fullname == ALIAS:
            return ModuleSpec(ALIAS, Models())
        if fullname not in TABLES or (spec := PathFinder.find_spec(fullname, path)) is None:
            return None
        run = spec.loader.exec_module

        def run_and_add(module: ModuleType) -> None:
            run(module)
            add(module)

        spec.loader.exec_module = run_and_add
        return spec


def register() -> None:
    there = [sys.modules[name] for name in TABLES if name in sys.modules]
    sys.meta_path.insert(0, Tables())
    for module in there:
        add(module)
    if there:  # what was made of the tables before does not see a new name
        import_module("girih.models")
