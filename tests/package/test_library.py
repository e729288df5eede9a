"""The choice of libgirih.so, and the errors if none fits: in Python, in CMake and at load time."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import girih
import pytest
import torch
from conftest import TREE
from girih import _library
from girih._library import NEWEST, OLDEST

ROOT = Path(__file__).parents[2]
PACKAGE = Path(girih.__file__).parent
RUNNING = ".".join(torch.__version__.split(".")[:2])
BEFORE, AFTER = "2.10.0", "2.16.0"
OUTSIDE = [BEFORE, AFTER, "2.16.0.dev20261101+cu130", "3.0.0", "1.13.1"]


def folders(tmp_path, monkeypatch, *minors):
    for minor in minors:
        (tmp_path / f"torch{minor}").mkdir()
        (tmp_path / f"torch{minor}" / "libgirih.so").touch()
    monkeypatch.setattr(_library, "LIBRARIES", tmp_path)


def single_line(text):
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) == 1, text
    return lines[0]


def test_the_running_torch_is_within_the_range():
    assert (
        _library.parse_version(OLDEST)
        <= _library.parse_version(torch.__version__)
        <= _library.parse_version(NEWEST)
    )
    assert _library.loaded == PACKAGE / "lib" / f"torch{RUNNING}"


@pytest.mark.parametrize("version", OUTSIDE)
def test_torch_outside_the_range_is_refused_in_one_line(version, tmp_path, monkeypatch):
    folders(tmp_path, monkeypatch, OLDEST, NEWEST)
    with pytest.raises(ImportError) as error:
        _library.find_folder(version)
    message = single_line(str(error.value))
    assert f"torch {OLDEST} to {NEWEST}" in message and f"torch {version} is installed" in message


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cpu", "2.13.0a0+gitabc"])
def test_library_of_the_minor_version_is_found(version, tmp_path, monkeypatch):
    folders(tmp_path, monkeypatch, "2.12", "2.13", "2.14")
    assert _library.find_folder(version) == tmp_path / "torch2.13"


def test_error_names_the_missing_and_the_built_versions(tmp_path, monkeypatch):
    folders(tmp_path, monkeypatch, "2.11", "2.14")
    with pytest.raises(
        ImportError, match=r"built for torch 2.11, 2.14, but torch 2.13.0 is installed.*torch 2.13"
    ):
        _library.find_folder("2.13.0")


def test_error_without_a_library_names_the_build(tmp_path, monkeypatch):
    folders(tmp_path, monkeypatch)
    with pytest.raises(ImportError, match="girih is not built: run `make build`"):
        _library.find_folder("2.13.0")


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("libcudart.so.13: cannot open shared object file", r"kernels need libcudart\.so\.13, but torch"),
        ("libc10_cuda.so: cannot open shared object file", r"kernels need libc10_cuda\.so, but torch"),
        (
            "/cuda/libgirih.so: undefined symbol: f",
            r"libgirih\.so cannot be loaded: /cuda/libgirih\.so: undefined",
        ),
    ],
)
def test_load_error_names_the_reason(reason, message, monkeypatch):
    """The error of PyTorch has only the path of the library. Its cause is the error of the linker."""

    def load_library(path):
        raise OSError(f"Could not load this library: {path}") from OSError(reason)

    monkeypatch.setattr(torch.ops, "load_library", load_library)
    with pytest.raises(ImportError, match=message) as error:
        _library.load()
    single_line(str(error.value))


@pytest.fixture(params=[BEFORE, AFTER])
def other_torch(request, tmp_path):
    """A folder for PYTHONPATH with a torch that has another version and nothing else."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"__version__ = {request.param!r}\n")
    found = tmp_path / f"torch-{request.param}.dist-info"
    found.mkdir()
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {request.param}\n")
    return request.param, tmp_path


def python(path, *arguments):
    paths = os.pathsep.join([str(path), str(PACKAGE.parent)])
    return subprocess.run(
        [sys.executable, *arguments], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )


def test_import_refuses_another_torch_in_one_line(other_torch):
    version, path = other_torch
    done = python(path, "-c", "import girih")
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith("ImportError: girih supports torch") and version in message


def test_programs_of_pip_refuse_another_torch_in_one_line(other_torch):
    version, path = other_torch
    done = python(path, "-c", "import girih_programs; girih_programs.generate()")
    assert done.returncode == 1
    message = single_line(done.stderr)
    assert message.startswith("girih-generate: girih supports torch") and version in message


def cmake(*arguments):
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["cmake", *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | {"PATH": tools}, capture_output=True, text=True)
    return done.returncode, " ".join(done.stderr.split())  # CMake breaks lines


@pytest.fixture(params=[BEFORE, AFTER])
def other_libtorch(request, tmp_path):
    """A folder for CMAKE_PREFIX_PATH with a LibTorch of another version."""
    folder = tmp_path / "libtorch"
    folder.mkdir()
    (folder / "TorchConfig.cmake").write_text("set(TORCH_INSTALL_PREFIX ${CMAKE_CURRENT_LIST_DIR})\n")
    (folder / "TorchConfigVersion.cmake").write_text(
        f'set(PACKAGE_VERSION "{request.param}")\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n'
    )
    return request.param, folder


def test_a_build_refuses_another_torch(other_libtorch, tmp_path):
    version, folder = other_libtorch
    options = ["-DGIRIH_CUDA=OFF", "-DGIRIH_PYTHON=OFF", "-DGIRIH_TESTS=OFF", f"-DTorch_DIR={folder}"]
    code, message = cmake("-S", ROOT, "-B", tmp_path / "build", *options)
    assert code != 0 and f"girih supports torch {OLDEST} to {NEWEST}, but" in message and version in message


def test_find_package_refuses_another_torch(other_libtorch, tmp_path):
    version, folder = other_libtorch
    if not (TREE / "cmake_install.cmake").exists():
        pytest.skip("girih was not built here")
    cmake("--install", TREE, "--prefix", tmp_path / "prefix")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(other LANGUAGES CXX)\nfind_package(girih REQUIRED)\n"
    )
    prefix = f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'}"
    code, message = cmake("-S", tmp_path, "-B", tmp_path / "build", prefix, f"-DTorch_DIR={folder}")
    assert (
        code != 0
        and f"girih was built for torch {RUNNING}, but" in message
        and f"is torch {version}" in message
    )


@pytest.mark.parametrize("minor", [10, 16])
def test_program_that_loads_another_torch_ends_with_one_line(minor, tmp_path):
    """The test preloads a library with the function that returns the version of torch."""
    program = TREE / "bin" / "girih-generate"
    if not program.exists() or not shutil.which("cc"):
        pytest.skip("the programs were not built here")
    (tmp_path / "version.c").write_text(
        f"unsigned long aoti_torch_abi_version(void) {{ return 2ul << 56 | {minor}ul << 48; }}\n"
    )
    library = tmp_path / "version.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "version.c"], check=True)
    done = subprocess.run(
        [program, "--help"], env=os.environ | {"LD_PRELOAD": str(library)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    message = single_line(done.stderr)
    assert f"built for torch {RUNNING}, but torch 2.{minor} is loaded" in message
    assert f"girih supports torch {OLDEST} to {NEWEST}" in message
