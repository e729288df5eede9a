"""docs/adding-a-mixer.md lists the files that a mixer with its own operator changes."""

import ast
import re
from pathlib import Path

import pytest
from girih.nn import MIXERS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding-a-mixer.md").read_text()
LISTED = re.findall(r"^\d+\. `([\w./-]+)`", PAGE, re.MULTILINE)
OWN_FILES = re.findall(r"^\| `([\w./<>-]+)` \|", PAGE, re.MULTILINE)
# Only these folders are searched: other tests use mixers as examples.
FOLDERS = ["csrc", "kernels", "python/girih", "tools", "tests/bench", "tests/fuzz"]
# Mixers whose operator is built from the operator of another mixer.
BASE_OPERATORS = {"trellis": "csrc/ops/ttt/"}
SUFFIXES = {".h", ".cpp", ".cuh", ".cu", ".py", ".txt"}


def code_of(file: Path) -> str:
    """A file without its comments and docstrings."""
    if file.suffix != ".py":
        return re.sub(r"//.*|^\s*#(?!include).*", "", file.read_text(), flags=re.MULTILINE)
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return ast.unparse(tree)


def test_list_is_short_and_its_files_exist():
    assert len(LISTED) <= 12 and all((ROOT / name).is_file() for name in LISTED)


@pytest.mark.parametrize("mixer", ["trellis", "lattice"])
def test_mixer_is_named_only_in_its_files_and_in_the_list(mixer):
    own_files = [name.replace("<mixer>", mixer) for name in OWN_FILES] + [
        *filter(None, [BASE_OPERATORS.get(mixer)])
    ]
    assert all(
        (ROOT / name).exists() for name in own_files if not name.startswith("kernels") and "cuda" not in name
    )
    found = {
        name
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*")
        if file.suffix in SUFFIXES
        and not file.name.startswith("test_")
        and mixer in code_of(file).lower()
        and not (name := str(file.relative_to(ROOT))).startswith((*own_files, f"csrc/ops/{mixer}/"))
    }
    assert found <= set(LISTED)
    fields = "|".join(MIXERS[mixer].fields)
    for name in LISTED:
        assert re.search(rf"{mixer}|\b({fields})\b", code_of(ROOT / name), re.IGNORECASE), name
