"""The emulator's headers in place of those of kernels/tile, and what only nvcc compiles in other files."""

import re
from pathlib import Path

import pytest

EMULATED = Path(__file__).parent
KERNELS = EMULATED.parents[1] / "kernels"
TWINS = sorted(p.relative_to(EMULATED).as_posix() for p in EMULATED.glob("*/*.h"))
SOURCES = [p for p in sorted(KERNELS.rglob("*")) if p.suffix in (".h", ".cuh", ".cu")]


def declared(file):
    """Functions, constants and the macro of dynamic shared memory that a header declares."""
    text = re.sub(r"//.*", "", file.read_text())
    functions = re.findall(
        r"^(?:__device__ |inline |constexpr )*[\w:]+\*? (\w+)\([^;]*?\) \{", text, re.MULTILINE
    )
    constants = re.findall(r"^(?:inline|constexpr) \w+ (k\w+)\b", text, re.MULTILINE)
    return {*functions, *constants, *re.findall(r"^#define (GIRIH_DYNAMIC_\w+)", text, re.MULTILINE)}


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_declares_what_its_header_declares(name):
    names = declared(KERNELS / name)
    assert names and names <= declared(EMULATED / name)


def test_only_one_header_has_inline_assembly():
    assert [p.relative_to(KERNELS).as_posix() for p in SOURCES if re.search(r"\basm\b", p.read_text())] == [
        "tile/ptx.h"
    ]


@pytest.mark.parametrize("pattern", ["<<<", r"extern __shared__"])
def test_no_kernel_has_syntax_that_only_nvcc_compiles(pattern):
    found = [p.relative_to(KERNELS).as_posix() for p in SOURCES if re.search(pattern, p.read_text())]
    assert found == (["tile/ptx.h"] if "extern" in pattern else [])
