"""Dependencies of the Python packages have one direction: girih.ops <- girih.nn <- girih.models."""

import ast
from pathlib import Path

import girih
import pytest

PACKAGE = Path(girih.__file__).parent
# girih.nn.functional.fused checks for the type RMSNorm. girih.nn.layers.norm imports nothing from girih.nn.
FORBIDDEN = [
    ("ops", ("girih.nn", "girih.models", "girih.conversion"), set()),
    ("nn", ("girih.models", "girih.conversion", "transformers"), set()),
    ("nn/functional", ("girih.nn.layers",), {"girih.nn.layers.norm", "girih.nn.layers.norm.RMSNorm"}),
    ("nn/layers/norm.py", ("girih.nn",), set()),
    ("models", ("girih.conversion",), set()),
    ("fla", ("girih.models", "girih.conversion", "girih.acceleration", "transformers"), set()),
]


def imported_names(file: Path, text: str) -> set[str]:
    """All modules and names that a file imports, also inside functions and by `import_module("name")` or
    `__import__("name")`."""
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
def test_no_file_imports_a_higher_package(folder, modules, allowed):
    place = PACKAGE / folder
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    assert files
    found = {
        file.relative_to(PACKAGE).as_posix(): names
        for file in files
        if (
            names := {
                name
                for name in imported_names(file, file.read_text())
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
    names = imported_names(PACKAGE / "nn" / "layers" / "layer.py", statement)
    assert any(is_in(name, ("girih.models",)) for name in names)


def test_nn_has_no_modules_of_its_own():
    assert [p.name for p in (PACKAGE / "nn").glob("*.py")] == ["__init__.py"]
