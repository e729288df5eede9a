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


def run(*command):
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [str(part) for part in command]
    done = subprocess.run(command, env=os.environ | {"PATH": tools}, capture_output=True)
    assert done.returncode == 0, (done.stdout[-2000:] + done.stderr[-2000:]).decode(errors="replace")
    return done.stdout.decode(errors="replace")


def toolkit():
    """A torch built with CUDA asks for one."""
    names = {"CMAKE_CUDA_COMPILER": "GIRIH_NVCC", "CUDA_TOOLKIT_ROOT_DIR": "CUDA_TOOLKIT_ROOT_DIR"}
    return [f"-D{name}={value}" for name, own in names.items() if (value := value_of(own))]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    if not (BUILD / "cmake_install.cmake").exists():
        pytest.skip("girih was not built here")
    prefix = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--prefix", prefix)
    return prefix


def made_against(prefix, source, build):
    paths = f"-DCMAKE_PREFIX_PATH={prefix};{torch.utils.cmake_prefix_path}"
    run("cmake", "-G", "Ninja", "-S", source, "-B", build, paths, "-DCMAKE_CXX_FLAGS=-O0", *toolkit())
    run("cmake", "--build", build)
    return build


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 16, "num_heads": 2, "num_hidden_layers": 1}
    model = GirihForCausalLM(GirihConfig(mixer="delta_product", initializer_range=0.5, **sizes))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_program_of_another_project_finds_girih(prefix, model, tmp_path, monkeypatch, capfd):
    """The example in C++ writes what the one in Python does."""
    source = tmp_path / "source"
    shutil.copytree(EXAMPLES / "complete", source)
    assert BLOCKS
    with (source / "complete.cpp").open("a") as program:
        program.write("using torch::Tensor;\n")
        for i, block in enumerate(BLOCKS):
            program.write(FUNCTION.format(i, block.replace("#include <girih/girih.h>\n", "")))
    made = made_against(prefix, source, tmp_path / "made")
    written = run(made / "complete", model, "giri\u1e2b")  # a letter of three bytes
    monkeypatch.setattr(sys, "argv", ["complete.py", str(model), "giri\u1e2b"])
    capfd.readouterr()
    runpy.run_path(str(EXAMPLES / "complete.py"))
    assert capfd.readouterr().out == written
    assert written.startswith("giri\u1e2b") and len(set(written)) > 10
    programs = [prefix / "bin" / name for name in ("girih-generate", "girih-train")]
    assert run(programs[0], model, "giri\u1e2b", "--max-new-tokens", 100) == written
    (library,) = prefix.glob("lib*/libgirih.so")
    for file in (library, made / "complete", *programs):
        assert "libpython" not in run("readelf", "-d", file)
    for file in (made / "complete", *programs):
        assert "libpython" not in run("ldd", file)


def test_a_program_runs_a_model_that_python_exported(prefix, model, tmp_path):
    """By AOTInductor, with texts of other lengths than it was exported with."""
    run(sys.executable, EXAMPLES / "exported" / "export.py", model, tmp_path / "model.pt2")
    made = made_against(prefix, EXAMPLES / "exported", tmp_path / "made")
    python = GirihForCausalLM.from_pretrained(model).eval()
    for text in (b"girih", bytes(range(32, 127))):
        with torch.no_grad():
            want = python(torch.tensor([list(text)])).logits[0].argmax(-1)
        assert run(made / "exported", tmp_path / "model.pt2", text.decode()).split() == [
            str(x) for x in want.tolist()
        ]


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
    options = [*toolkit(), "-DGIRIH_CUDA=OFF", "-G", "Ninja"]
    options += [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ("Python", "Catch2")]
    options += [f"-DCMAKE_PREFIX_PATH={';'.join(filter(None, paths))}"]
    before = {p: p.stat().st_mtime_ns for p in (ROOT / "python" / "girih").rglob("*")}
    run("cmake", "-S", tmp_path, "-B", tmp_path / "build", *options)
    graph = (tmp_path / "build" / "build.ninja").read_text()
    assert str(ROOT / "python") not in graph
    assert {p: p.stat().st_mtime_ns for p in (ROOT / "python" / "girih").rglob("*")} == before
