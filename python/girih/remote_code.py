"""The module that `save_pretrained` writes with a model, for processes that do not import girih.

With `trust_remote_code=True` transformers' Auto classes load the classes that `auto_map` in config.json
names. The module imports these classes from girih, which must be installed.
"""

from collections.abc import Iterable
from os import PathLike
from pathlib import Path

MODULE = "modeling_girih"
TEXT = '''"""girih's classes, for transformers' Auto classes with trust_remote_code=True."""

from {source} import (
{names}
)

__all__ = [
{quoted}
]
'''


def auto_map(classes: dict[str, str]) -> dict[str, str]:
    """The entry `auto_map` of config.json. classes: names of Auto classes -> names of classes of the
    module."""
    return {auto: f"{MODULE}.{name}" for auto, name in classes.items()}


def is_own(entry: dict[str, str] | None) -> bool:
    """Whether an `auto_map` is empty or names the module that `write_module` writes."""
    return not entry or any(MODULE in str(value) for value in entry.values())


def write_module(folder: str | PathLike, source: str, names: Iterable[str]) -> None:
    """Write the module that imports `names` from `source` into a folder, which is created if it does not
    exist."""
    folder, names = Path(folder), sorted(set(names))
    if folder.is_file():
        return  # save_pretrained raises an error for a file
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["\n".join(f"    {template.format(name)}," for name in names) for template in ("{}", '"{}"')]
    text = TEXT.format(source=source, names=lines[0], quoted=lines[1])
    (folder / f"{MODULE}.py").write_text(text, encoding="utf-8")
