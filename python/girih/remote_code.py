"""The module that `save_pretrained` writes beside a model, for processes that do not import girih.

transformers' Auto classes read a folder with `trust_remote_code=True` by the classes that `auto_map` in its
config.json names. They are girih's own: the module imports girih, which has to be installed.
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
    """The entry of config.json. classes: of the module, by the names of Auto classes."""
    return {auto: f"{MODULE}.{name}" for auto, name in classes.items()}


def is_own(entry: dict[str, str] | None) -> bool:
    """Whether an `auto_map` is empty, or one that names the module written here."""
    return not entry or any(MODULE in str(value) for value in entry.values())


def write_module(folder: str | PathLike, source: str, names: Iterable[str]) -> None:
    """Write the module that imports these names from source into a folder, which is made."""
    folder, names = Path(folder), sorted(set(names))
    if folder.is_file():
        return  # save_pretrained refuses a file
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["\n".join(f"    {template.format(name)}," for name in names) for template in ("{}", '"{}"')]
    text = TEXT.format(source=source, names=lines[0], quoted=lines[1])
    (folder / f"{MODULE}.py").write_text(text, encoding="utf-8")
