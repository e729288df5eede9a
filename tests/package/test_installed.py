"""`cmake --install`, and programs of other projects that use the installed girih without Python.

The C++ blocks of README.md and docs/ are compiled with one of these programs.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TREE
from girih.models import GirihConfig, GirihForCausalLM

ROOT = Path(__file__).parents[2]
CACHE = TREE / "CMakeCache.txt"

EXAMPLES = ROOT / "examples"
BLOCKS = [
    block
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if page.name != "writing-a-kernel.md"  # a kernel, which test_emulated_example.py compiles
    for block in re.findall(r"```cpp\n(.*?)```", page.read_text(), re.DOTALL)
]
# The C++ blocks of the pages are compiled with the example: all headers first, then a function for each
# block.
INCLUDE = re.compile(r"#include .*\n")
FUNCTION = "void block{}(Tensor q, Tensor k, Tensor v, Tensor g, Tensor ids) {{\n{}}}\n"


def value_of(name):
    found = re.search(rf"^{name}:\\w+=(.*)$", CACHE.read_text(), re.MULTILINE)
    return found[1] if found else ""


def run(*command):
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [str(part) for part in command]
    done = subprocess.run(command, env=os.environ | {"PATH": tools}, capture_output=True)
    assert done.returncode == 0, (done.stdout[-2000:] + done.stderr[-2000:]).decode(errors="replace")
    return done.stdout.decode(errors="replace")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    if not (TREE / "cmake_install.cmake").exists():
        pytest.skip("girih was not built here")
    prefix = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", TREE, "--prefix", prefix)
    return prefix


def build_against(prefix, source, build, *options):
    """A program names only the prefix. girih finds its torch."""
    options = [f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_CXX_FLAGS=-O0", *options]
    run("cmake", "-G", "Ninja", "-S", source, "-B", build, *options)
    run("cmake", "--build", build)
    return build


# As on a machine without a CUDA toolkit.
WITHOUT_TOOLKIT = "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON"


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 16, "num_heads": 2, "num_hidden_layers": 1}
    model = GirihForCausalLM(GirihConfig(mixer="delta_product", initializer_range=0.5, **sizes))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_program_of_another_project_finds_girih(prefix, model, tmp_path, monkeypatch, capfd):
    """The C++ example prints the text of the Python example."""
    source = tmp_path / "source"
    shutil.copytree(EXAMPLES / "complete", source)
    assert BLOCKS
    with (source / "complete.cpp").open("a") as program:
        program.writelines(INCLUDE.findall("".join(BLOCKS)))
        program.write("using torch::Tensor;\n")
        for i, block in enumerate(BLOCKS):
            program.write(FUNCTION.format(i, INCLUDE.sub("", block)))
    build = build_against(prefix, source, tmp_path / "made")
    output = run(build / "complete", model, "giri\u1e2b")  # the last letter has three bytes
    monkeypatch.setattr(sys, "argv", ["complete.py", str(model), "giri\u1e2b"])
    capfd.readouterr()
    runpy.run_path(str(EXAMPLES / "complete.py"))
    assert capfd.readouterr().out == output
    assert output.startswith("giri\u1e2b") and len(set(output)) > 10
    programs = [prefix / "bin" / name for name in ("girih-generate", "girih-train")]
    assert run(programs[0], model, "giri\u1e2b", "--max-new-tokens", 100) == output
    (library,) = prefix.glob(f"lib*/{TREE.name}/libgirih.so")
    for file in (library, build / "complete", *programs):
        assert "libpython" not in run("readelf", "-d", file)
    for file in (build / "complete", *programs):
        assert "libpython" not in run("ldd", file)


def test_a_program_runs_a_model_that_python_exported(prefix, model, tmp_path):
    """AOTInductor runs the model on texts of other lengths than the exported one."""
    run(sys.executable, EXAMPLES / "exported" / "export.py", model, tmp_path / "model.pt2")
    build = build_against(prefix, EXAMPLES / "exported", tmp_path / "made")
    python = GirihForCausalLM.from_pretrained(model).eval()
    for text in (b"girih", bytes(range(32, 127))):
        with torch.no_grad():
            want = python(torch.tensor([list(text)])).logits[0].argmax(-1)
        assert run(build / "exported", tmp_path / "model.pt2", text.decode()).split() == [
            str(x) for x in want.tolist()
        ]


def test_a_program_trains_a_model_that_python_reads(prefix, tmp_path):
    """Python generates the text that the program prints after training."""
    build = build_against(prefix, EXAMPLES / "train", tmp_path / "made", WITHOUT_TOOLKIT)
    assert "CMAKE_CUDA_COMPILER" not in (tmp_path / "made" / "CMakeCache.txt").read_text()
    text = "".join(f"{i} girihs have {5 * i} tiles. " for i in range(40))
    (tmp_path / "text").write_text(text)
    short_output = run(build / "train", tmp_path / "text", tmp_path / "few", 1)
    output = run(build / "train", tmp_path / "text", tmp_path / "model", 60)
    assert output.startswith(text[:16]) and short_output.startswith(text[:16])
    losses = []
    for folder in ("few", "model"):
        model = GirihForCausalLM.from_pretrained(tmp_path / folder).eval()
        ids = torch.tensor([list(text.encode())])
        with torch.no_grad():
            losses.append(model(input_ids=ids, labels=ids).loss.item())
    assert losses[1] < losses[0] / 2, losses
    again = model.generate(ids[:, :16], attention_mask=torch.ones(1, 16), max_new_tokens=100)
    assert bytes(again[0].tolist()).decode(errors="replace") == output[:-1]
    missing = [build / "train", tmp_path / "missing", tmp_path / "none"]
    no_text = subprocess.run(missing, capture_output=True, text=True)
    assert no_text.returncode == 1 and "0 bytes are too few, 128" in no_text.stderr


def test_filesystem_symbols_come_from_libstdcxx(prefix, tmp_path):
    """libtorch also has a std::filesystem, without versions. The layout of its iterators may differ."""
    (tmp_path / "CMakeLists.txt").write_text(
        """cmake_minimum_required(VERSION 3.25)
        project(other LANGUAGES CXX)
        find_package(girih REQUIRED)
        add_executable(program program.cpp)
        target_link_libraries(program girih::girih)
        """
    )
    (tmp_path / "program.cpp").write_text(
        """#include <girih/girih.h>

        #include <filesystem>
        int main(int count, char** folders) {
          for (std::filesystem::recursive_directory_iterator at(folders[count - 1]), end; at != end; ++at)
            at.disable_recursion_pending();
          return girih::nn::mixer_names().empty();
        }
        """
    )
    program = build_against(prefix, tmp_path, tmp_path / "build") / "program"
    symbols = [
        line for line in run("nm", "-D", program).splitlines() if "recursive_directory_iterator" in line
    ]
    assert symbols and all("@GLIBCXX" in line for line in symbols), symbols
    run(program, tmp_path)


@pytest.mark.skipif(not CACHE.exists(), reason="girih was not built here")
@pytest.mark.parametrize("cmake", ["cmake", "/usr/bin/cmake"])  # the cmake of the system may be years older
def test_subproject_builds_only_the_library(cmake, tmp_path):
    """With FetchContent there is one target, no Python and no Catch2, and no file is written to
    the sources."""
    if cmake != "cmake" and not Path(cmake).exists():
        pytest.skip("the system has none")
    (tmp_path / "CMakeLists.txt").write_text(
        f"""cmake_minimum_required(VERSION 3.25)
        project(other LANGUAGES CXX)
        add_subdirectory({ROOT} girih)
        foreach(target _C girih_tests girih-generate girih-train)
          if(TARGET ${{target}})
            message(FATAL_ERROR "builds ${{target}} too")
          endif()
        endforeach()
        add_executable(program {EXAMPLES / "complete" / "complete.cpp"})
        target_link_libraries(program girih::girih)
        """
    )
    paths = [torch.utils.cmake_prefix_path, *value_of("CMAKE_PREFIX_PATH").split(";")]
    options = ["-DGIRIH_CUDA=OFF", "-G", "Ninja"]
    options += [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ("Python", "Catch2")]
    options += [f"-DCMAKE_PREFIX_PATH={';'.join(filter(None, paths))}"]
    before = {p: p.stat().st_mtime_ns for p in (ROOT / "python" / "girih").rglob("*")}
    run(cmake, "-S", tmp_path, "-B", tmp_path / "build", *options)
    graph = (tmp_path / "build" / "build.ninja").read_text()
    assert str(ROOT / "python") not in graph
    assert {p: p.stat().st_mtime_ns for p in (ROOT / "python" / "girih").rglob("*")} == before
