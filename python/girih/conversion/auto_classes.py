"""Classes with the names of transformers' Auto classes, for models that are loaded with
trust_remote_code=True.

A converted model has a class of transformers, and the Auto classes load it once girih is imported. The module
that is saved with the model imports girih, and its classes call the Auto classes of transformers again.
"""

from typing import Any, ClassVar

import transformers
from transformers.models.auto import modeling_auto

SOURCE = __name__


class _AutoClass:
    auto: ClassVar[type]

    @classmethod
    def from_pretrained(cls, folder: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the Auto class without remote code: once girih is imported, it converts the model."""
        return cls.auto.from_pretrained(folder, *args, **kwargs | {"trust_remote_code": False})

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        return cls.auto.from_config(config, **kwargs, trust_remote_code=False)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Does nothing: models are saved with the module that names these classes."""


def auto_classes_of(config: Any) -> dict[str, type]:
    """The Auto classes that have a model for this configuration, by name."""
    classes = {
        name: getattr(modeling_auto, name) for name in dir(modeling_auto) if name.startswith("AutoModel")
    }
    return {
        n: auto
        for n, auto in classes.items()
        if type(config) in (getattr(auto, "_model_mapping", None) or ())
    }


def names_for(config: Any) -> list[str]:
    """The Auto classes that have a model for this configuration, and AutoConfig."""
    return ["AutoConfig", *(name for name in auto_classes_of(config) if hasattr(transformers, name))]


def models_for(config: Any) -> list[type]:
    """The classes of models that Auto classes have for this configuration."""
    entries = [auto._model_mapping[type(config)] for auto in auto_classes_of(config).values()]
    return [each for entry in entries for each in (entry if isinstance(entry, tuple) else (entry,))]


def __getattr__(name: str) -> Any:
    if not name.startswith("Auto") or not hasattr(transformers, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = auto_class = type(name, (_AutoClass,), {"auto": getattr(transformers, name)})
    return auto_class
