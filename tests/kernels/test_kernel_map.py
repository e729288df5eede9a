"""kernels/README.md names existing files, functions and lines, and every folder, kernel and file with a
kernel."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels"
PAGE = KERNELS / "README.md"
TEXT = PAGE.read_text()
SOURCES = [p for p in sorted(KERNELS.rglob("*")) if p.suffix in (".h", ".cuh", ".cu")]
FOLDERS = sorted(p.name for p in KERNELS.iterdir() if p.is_dir())


def sections():
    """(folders, text) of every operator's section."""
    (part,) = re.findall(r"^## The operators\n(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)
    found = re.findall(r"^### (.*?)\n(.*?)(?=^### |\Z)", part, re.MULTILINE | re.DOTALL)
    return [(re.findall(r"`(\w+)`", heading), text) for heading, text in found]


def find_files(name, folders=()):
    """Files that match the name in the section's folders, in kernels/ or in the root of the repository."""
    base = [*(KERNELS / folder for folder in folders), KERNELS, ROOT]
    return [path for folder in base for path in folder.glob(name)]


def files_in(text):
    inline = re.findall(r"`([\w./*-]+)`", re.sub(r"^    .*", "", text, flags=re.MULTILINE))
    return [name for name in inline if re.search(r"[\w*]\.(h|cuh|cu|cpp|py|txt|json)$", name)]


def words_of(*files):
    return set(re.findall(r"\w+", "\n".join(file.read_text() for file in files)))


every_section = pytest.mark.parametrize(
    "folders, text", sections(), ids=["+".join(folders) for folders, _ in sections()]
)


def test_every_operator_with_kernels_has_a_section():
    named = [folder for folders, _ in sections() for folder in folders]
    assert sorted([*named, "pipe", "tile", "time"]) == FOLDERS


@every_section
def test_files_of_a_section_exist_in_its_folders(folders, text):
    names = files_in(text)
    assert names
    for name in names:
        assert find_files(name, folders), f"{name}: not in {', '.join(folders)}, nor where its folders say"


def test_other_files_on_the_page_exist():
    rest = TEXT
    for _, text in sections():
        rest = rest.replace(text, "")
    names_elsewhere = {file.name for file in ROOT.glob("csrc/ops/*/*")} | {p.name for p in SOURCES}
    names = files_in(rest)
    assert len(names) > 20
    for name in names:
        assert find_files(name) or name in names_elsewhere or list(KERNELS.rglob(name)), name


@every_section
def test_a_section_names_every_kernel_of_its_folder(folders, text):
    sources = [p for p in SOURCES if p.relative_to(KERNELS).parts[0] in folders and p.suffix != ".h"]
    source = "\n".join(p.read_text() for p in sources)
    kernels = re.findall(r"__global__[^;{]*?\s(\w+)\((?:const|int64_t)\b", source)
    assert len(kernels) == source.count("__global__") > 0
    for kernel in kernels:
        assert re.search(rf"\b{kernel}\b", text), kernel


@every_section
def test_a_section_names_every_file_with_a_kernel(folders, text):
    named = [file for name in files_in(text) for file in find_files(name, folders)]
    for file in SOURCES:
        if file.relative_to(KERNELS).parts[0] in folders and "__global__" in file.read_text():
            assert file in named or file.name == "step.cu", file


def test_named_functions_and_types_exist():
    known = words_of(*SOURCES, *ROOT.glob("csrc/ops/**/*.h"), *ROOT.glob("csrc/ops/**/*.cpp"))
    known |= words_of(*ROOT.glob("tests/emulated/*.py"), *ROOT.glob("tests/gpu/*.py")) | set(FOLDERS)
    inline = re.findall(r"`((?:\w+::)*\w+)(?:\(\))?`", re.sub(r"^    .*", "", TEXT, flags=re.MULTILINE))
    (shared,) = re.findall(r"^## Shared memory\n(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)
    types = re.findall(r"\b[A-Z]\w+\b", "\n".join(re.findall(r"^    (.*)", shared, re.MULTILINE)))
    assert len(inline) > 80 and len(types) > 20
    for name in [*inline, *types]:
        assert set(name.split("::")) <= known, name


def test_quoted_lines_are_in_the_sources():
    (part,) = re.findall(r"^## Three calls\n(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^    (.*?) \| (.*) \| (\S+)$", part, re.MULTILINE)
    assert len(rows) >= 15
    for step, line, file in rows:
        (source,) = find_files(file)
        assert line in re.sub(r"\s+", " ", source.read_text()), f"{step}: {file} has no {line}"


def test_includes_between_folders_match_the_page():
    (part,) = re.findall(r"^## Folders\n(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)
    listed = re.findall(r"    (\w+) -> (\w+(?:, \w+)*)(?=    |$)", part, re.MULTILINE)
    rules = {folder: set(others.split(", ")) for folder, others in listed}
    found = {}
    for file in SOURCES:
        folder, text = file.relative_to(KERNELS).parts[0], file.read_text()
        assert not re.search(r"#include [<\"](torch|ATen|c10)/", text), file
        for other in set(re.findall(r'#include "(\w+)/', text)) - {folder}:
            found.setdefault(folder, set()).add(other)
    assert rules == found


def launches():
    """(section, number, text of reads and writes) of every launch in the figures."""
    for folders, text in sections():
        figures = "\n".join(re.findall(r"^    .*", text, re.MULTILINE))
        for number, launch in re.findall(
            r"^    (\d+) +\w(.*?)(?=^    \S|\Z)", figures, re.MULTILINE | re.DOTALL
        ):
            yield folders[0], int(number), launch


def test_a_figure_reads_what_its_earlier_launches_write():
    found_sections, last, outputs = set(), 0, {}
    for section, number, launch in launches():
        if number == 1:
            last, outputs = 0, {}
        assert number == last + 1, f"{section} {number}"
        found_sections.add(section)
        read = re.findall(r" reads   (.*?)(?= writes  |\Z)", launch, re.DOTALL)
        results = re.findall(r" writes  (.*?)(?= reads   |\Z)", launch, re.DOTALL)
        assert len(read) == len(results) > 0, f"{section} {number}"
        for tensor, source in re.findall(r"(\w+)#(\d+)", " ".join(read)):
            assert tensor in outputs[int(source)], f"{section} {number}: {source} does not write {tensor}"
        last, outputs[number] = number, set(re.findall(r"\w+", " ".join(results)))
    assert found_sections == {"gsa", "gla", "delta_product", "fp32", "trellis", "lattice", "cat_attention"}


def test_the_lines_of_the_page_are_short():
    assert max(map(len, TEXT.splitlines())) <= 120
