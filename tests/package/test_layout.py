"""Dependencies of the Python packages have one direction: girih.ops <- girih.nn <- girih.models."""

import ast
from pathlib import Path

import girih
import pytest

PACKAGE = Path(girih.__file__).parent
# girih.nn.functional.fused knows RMSNorm by its type; that file imports nothing of girih.nn.
FORBIDDEN = [
    ("ops", ("girih.nn", "girih.models", "girih.conversion"), set()),
    ("nn", ("girih.models", "girih.conversion", "transformers"), set()),
    ("nn/functional", ("girih.nn.layers",), {"girih.nn.layers.norm", "girih.nn.layers.norm.RMSNorm"}),
    ("nn/layers/norm.py", ("girih.nn",), set()),
    ("models", ("girih.conversion",), set()),
]


def imported(file: Path, text: str) -> set[str]:
    """Every module that a file imports, with the names from it, those in functions too; also of
    `import_module("name")` and `__import__("name")`."""
    package, found = ["girih", *file.relative_to(PACKAGE).parent.parts], set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and node.args:
            function = getattr(node.func, "id", getattr(node.func, "attr", None))
            if function in ("import_module", "__import__"):
                found.add(ast.literal_eval(node.args[0]))
    return found


def is_in(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


@pytest.mark.parametrize(("folder", "modules", "allowed"), FORBIDDEN, ids=[each[0] for each in FORBIDDEN])
def test_no_file_imports_what_is_built_on_it(folder, modules, allowed):
    place = PACKAGE / folder
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    assert files
    found = {
        file.relative_to(PACKAGE).as_posix(): names
        for file in files
        if (
            names := {
                name
                for name in imported(file, file.read_text())
                if is_in(name, modules) and name not in allowed
            }
        )
    }
    assert not found


@pytest.mark.parametrize(
    "statement",
    [
        "import girih.models",
        "from girih import models",
        "from girih.models.cache import StateLayer",
        "def f():\n    from girih.models import cache",
        "def f():\n    from ...models import cache",
        "class A:\n    def f(self):\n        import girih.models.cache as cache",
        "importlib.import_module('girih.models')",
    ],
)
def test_every_form_of_import_is_found(statement):
    names = imported(PACKAGE / "nn" / "layers" / "layer.py", statement)
    assert any(is_in(name, ("girih.models",)) for name in names)


def test_layers_lie_in_two_folders():
    assert [p.name for p in (PACKAGE / "nn").glob("*.py")] == ["__init__.py"]
