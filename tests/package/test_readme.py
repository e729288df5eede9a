"""READMEs and pages of docs/: their Python examples run, the names in the text exist, the tables are up to
date.

test_installed.py compiles their C++ blocks.
"""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import girih.models
import girih.nn
import pytest
import torch
from cases import ONE_EACH, path_of
from girih import compare, ops, train

ROOT = Path(__file__).parents[2]
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md")
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    (page.name, example)
    for page in PAGES
    for example in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
OPTIONS = set(re.findall(r"call (?:option|given),(\w+)", (ROOT / "Makefile").read_text()))


def test_there_are_examples():
    assert sum(name == "README.md" for name, _ in EXAMPLES) >= 2


@pytest.mark.parametrize("name, example", EXAMPLES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(EXAMPLES)])
def test_an_example_runs(name, example):
    exec(compile(example, name, "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_files_and_make_targets_of_a_page_exist(page):
    """Links, files of this repository, targets of make and their options."""
    # A capture list and the parameters of a C++ lambda look like a link.
    text = re.sub(r"```cpp\n.*?```", "", page.read_text(), flags=re.DOTALL)
    for link, anchor in re.findall(r"\]\(([^)#]*)(?:#([\w-]+))?\)", text):
        if not link.startswith("http"):
            linked_file = page.parent / link if link else page
            assert linked_file.exists(), link
            assert not anchor or anchor in anchors(linked_file), f"{link}#{anchor}"
    folders = "csrc|docs|examples|kernels|python|tests|tools"
    for file in re.findall(rf"`((?:{folders})/[\w./-]*)`", text):
        assert (ROOT / file).exists(), file
    for file in re.findall(r"`(\w+\.(?:py|h|cuh|cu|cpp|md))`", text):
        assert list(ROOT.glob(f"[a-z]*/**/{file}")) or (ROOT / file).exists(), file
    for target, options in re.findall(r"(?:`|^)make ([a-z-]+)((?: [A-Z]+=\S*)*)", text, re.MULTILINE):
        assert target in TARGETS, f"make {target}"
        for option in re.findall(r"([A-Z]+)=", options):
            assert option in OPTIONS | {"CUDA", "PYTHON"}, f"make {target} {option}="
    for option in re.findall(r"`([A-Z]+)=", text):
        assert option in OPTIONS | {"CUDA", "PYTHON", "PYTHONPATH"}, option


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


HEADERS = "".join(file.read_text() for file in (ROOT / "csrc" / "include" / "girih").glob("*.h"))
COMMANDS = "".join(inspect.getsource(module) for module in (train, compare))
COMMANDS += "".join(file.read_text() for file in (ROOT / "csrc" / "programs").glob("*.cpp"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_names_of_a_page_exist(page):
    """Names of Python and C++, options of commands, and calls of operators with their arguments."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for name in re.findall(r"`(girih(?:\.\w+)+)", text):
        thing = girih
        for part in name.split(".")[1:]:
            thing = getattr(thing, part)
    for name in re.findall(r"`girih::(?:\w+::)*(\w+)", text):
        assert re.search(rf"\b{name}\b", HEADERS), name
    for option in re.findall(r"`(--[\w-]+)`", text):
        assert f'"{option}"' in COMMANDS, option
    for name, arguments in re.findall(r"`(?:girih\.)?(?:ops\.)?(\w+)\(([^`)]*)\)", text):
        if name in ops.__all__:
            call = inspect.signature(getattr(ops, name))
            positional = [part.strip() for part in arguments.split(",") if part.strip() and "=" not in part]
            assert positional == list(call.parameters)[: len(positional)], f"{name}({arguments})"
            for keyword in re.findall(r"(\w+)=", arguments):
                assert keyword in call.parameters, f"{name}({arguments})"


def test_tables_are_up_to_date():
    """`make docs` would change nothing."""
    command = [sys.executable, str(ROOT / "tests" / "bench" / "pages.py"), "--check"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_numerics_names_every_operator_on_tensor_cores_and_its_tests():
    text = (ROOT / "docs" / "numerics.md").read_text()
    (listed,) = re.findall(r"on the tensor cores \| (.*)", text)
    exact = text[text.index("## How exact") : text.index("## What to know")]
    cited = [ROOT / "tests" / "kernels" / name for name in re.findall(r"(test_\w+_kernels\.py)", exact)]
    halves = [case.draw(20, dtype=torch.bfloat16, gate_dtype=torch.float32) for case in ONE_EACH]
    for op in {inputs.case.op for inputs in halves if path_of(inputs) == "tensor cores"}:
        assert f"`{op}`" in listed
        assert any(re.search(rf"\b{op}\b", file.read_text()) for file in cited), op


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
