"""`cmake --install`, and a program of another project that finds girih there: no Python is in its process.

With it what README.md and docs/ show in C++ is compiled.
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
from girih.models import GirihConfig, GirihForCausalLM

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
CACHE = BUILD / "CMakeCache.txt"

EXAMPLES = ROOT / "examples"
BLOCKS = [
    block
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for block in re.findall(r"```cpp\n(.*?)```", page.read_text(), re.DOTALL)
]
# What the pages show in C++ is compiled with the example, a function each.
FUNCTION = "void block{}(Tensor q, Tensor k, Tensor v, Tensor g, Tensor ids) {{\n{}}}\n"


def value_of(name):
    found = re.search(rf"^{name}:\\w+=(.*)$", CACHE.read_text(), re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.skipif(not (BUILD / "cmake_install.cmake").exists(), reason="girih was not built here")
def test_a_program_of_another_project_finds_girih(tmp_path, monkeypatch, capfd):
    """The example in C++ writes what the one in Python does."""
    prefix, source, made = (tmp_path / name for name in ("prefix", "source", "made"))
    shutil.copytree(EXAMPLES / "complete", source)
    assert BLOCKS
    with (source / "complete.cpp").open("a") as program:
        program.write("using torch::Tensor;\n")
        for i, block in enumerate(BLOCKS):
            program.write(FUNCTION.format(i, block.replace("#include <girih/girih.h>\n", "")))
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 16, "num_heads": 2, "num_hidden_layers": 1}
    model = GirihForCausalLM(GirihConfig(mixer="delta_product", initializer_range=0.5, **sizes))
    model.save_pretrained(tmp_path / "model")

    def run(*command):
        tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        command = [str(part) for part in command]
        done = subprocess.run(command, env=os.environ | {"PATH": tools}, capture_output=True)
        assert done.returncode == 0, (done.stdout[-2000:] + done.stderr[-2000:]).decode(errors="replace")
        return done.stdout.decode(errors="replace")

    run("cmake", "--install", BUILD, "--prefix", prefix)
    paths = f"-DCMAKE_PREFIX_PATH={prefix};{torch.utils.cmake_prefix_path}"
    # A torch built with CUDA asks for a toolkit.
    names = {"CMAKE_CUDA_COMPILER": "GIRIH_NVCC", "CUDA_TOOLKIT_ROOT_DIR": "CUDA_TOOLKIT_ROOT_DIR"}
    toolkit = [f"-D{name}={value}" for name, own in names.items() if (value := value_of(own))]
    run("cmake", "-G", "Ninja", "-S", source, "-B", made, paths, "-DCMAKE_CXX_FLAGS=-O0", *toolkit)
    run("cmake", "--build", made)
    written = run(made / "complete", tmp_path / "model", "giri\u1e2b")  # a letter of three bytes
    monkeypatch.setattr(sys, "argv", ["complete.py", str(tmp_path / "model"), "giri\u1e2b"])
    capfd.readouterr()
    runpy.run_path(str(EXAMPLES / "complete.py"))
    assert capfd.readouterr().out == written
    assert written.startswith("giri\u1e2b") and len(set(written)) > 10
    programs = [prefix / "bin" / name for name in ("girih-generate", "girih-train")]
    asked = [programs[0], tmp_path / "model", "giri\u1e2b", "--max-new-tokens", 100]
    assert run(*asked) == written
    (library,) = prefix.glob("lib*/libgirih.so")
    for file in (library, made / "complete", *programs):
        assert "libpython" not in run("readelf", "-d", file)
    for file in (made / "complete", *programs):
        assert "libpython" not in run("ldd", file)


@pytest.mark.skipif(not CACHE.exists(), reason="girih was not built here")
def test_within_another_project_it_is_a_library_alone(tmp_path):
    """As FetchContent has it: one target, no Python, Catch2 or CLI11, nothing written into the sources."""
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
    names = {"CMAKE_CUDA_COMPILER": "GIRIH_NVCC", "CUDA_TOOLKIT_ROOT_DIR": "CUDA_TOOLKIT_ROOT_DIR"}
    options = [f"-D{name}={value}" for name, own in names.items() if (value := value_of(own))]
    options += [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ("Python", "Catch2")]
    options += ["-DGIRIH_CUDA=OFF", f"-DCMAKE_PREFIX_PATH={';'.join(filter(None, paths))}", "-G", "Ninja"]
    before = {p: p.stat().st_mtime_ns for p in (ROOT / "python" / "girih").rglob("*")}
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["cmake", "-S", tmp_path, "-B", tmp_path / "build", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": tools})
    assert done.returncode == 0, done.stderr[-2000:]
    graph = (tmp_path / "build" / "build.ninja").read_text()
    assert str(ROOT / "python") not in graph
    assert {p: p.stat().st_mtime_ns for p in (ROOT / "python" / "girih").rglob("*")} == before
