import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import girih
import pytest
from girih import _library
from girih.nn.functional.fused import WITH_CUDA

ROOT = Path(__file__).parents[2]
GITHUB_FILES = {str(p.relative_to(ROOT)) for p in (ROOT / ".github").rglob("*") if p.is_file()}


def test_wheel_ships_installed_files_and_no_extension_of_one_python(tmp_path):
    """Every Python can install the wheel. The wheel has no files that were built in place."""
    files = ["__init__.py", "py.typed"]
    in_place = ["lib/torch2.15/libgirih.so", "lib/torch2.15/_C.cpython-399-x86_64-linux-gnu.so"]
    for name in files + in_place:
        file = tmp_path / "python" / "girih" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "python/girih_programs.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(empty NONE)\n"
        "install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_LIBDIR}/torch2.15 RENAME libgirih.so)\n"
        "install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_BINDIR} RENAME girih-generate)\n"
    )
    minor = _library.loaded.name
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", "dist"]
    subprocess.run(
        command, cwd=tmp_path, check=True, capture_output=True, env=os.environ | {"GIRIH_CUDA": "OFF"}
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert (
            "Root-Is-Purelib: false"
            in archive.read(next(name for name in archive.namelist() if name.endswith("/WHEEL"))).decode()
        )
    installed = ["lib/torch2.15/libgirih.so", f"bin/{minor}/girih-generate"]
    assert shipped == {f"girih/{name}" for name in files + installed} | {"girih_programs.py"}


def test_a_source_distribution_is_the_repository_and_nothing_built(tmp_path):
    """The distribution has all tracked files except those of CI and git."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (sources,) = tmp_path.glob("*.egg-info/SOURCES.txt")
    shipped = set(sources.read_text().splitlines())
    assert tracked - shipped <= {".ci/run", ".gitignore", "MANIFEST.in", *GITHUB_FILES}
    assert not [name for name in shipped if "/lib/" in name or name.endswith(".so")]


def test_the_licence_is_the_one_that_the_package_names(tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "dist_info", "--output-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    assert "License-Expression: BSD-3-Clause" in metadata.read_text()
    (licence,) = metadata.parent.rglob("LICENSE")
    assert licence.read_text() == (ROOT / "LICENSE").read_text()
    assert licence.read_text().splitlines()[2] == "Copyright (c) 2026, The girih authors"


@pytest.mark.parametrize("variable", ["GIRIH_CUDA", "GIRIH_WARNINGS"])
def test_invalid_build_variable_is_refused(variable, tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    environment = os.environ | {"GIRIH_CUDA": "OFF", variable: "yes"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(f"{variable} is 'yes'; expected")


def needed_libraries(library):
    """The libraries that a library needs."""
    output = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    return [line for line in output.splitlines() if "NEEDED" in line]


@pytest.mark.skipif(WITH_CUDA, reason="built with kernels")
def test_a_library_without_kernels_asks_for_no_cuda():
    names = needed_libraries(_library.loaded / "libgirih.so")
    assert any("libtorch_cpu" in line for line in names)
    assert not any("cuda" in line for line in names)


@pytest.mark.skipif(not WITH_CUDA, reason="built without kernels")
def test_the_kernels_ask_for_neither_torch_nor_the_cuda_runtime():
    """One libgirih_kernels.so serves every torch with every CUDA runtime."""
    names = needed_libraries(_library.LIBRARIES / "libgirih_kernels.so")
    assert not [line for line in names if "torch" in line or "c10" in line or "cuda" in line]


def test_every_library_links_the_shared_libstdcxx():
    """A second copy inside a library has its own locales, which crashes the streams of PyTorch."""
    for library in [_library.loaded / "libgirih.so", *_library.LIBRARIES.glob("*.so")]:
        assert any("libstdc++.so.6" in line for line in needed_libraries(library)), library


def test_no_library_is_linked_with_python():
    for library in [_library.loaded / "libgirih.so", *_library.LIBRARIES.glob("*.so")]:
        assert not [line for line in needed_libraries(library) if "python" in line]


def test_all_files_name_the_same_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    minors = [release.rpartition(".")[0] for release in project["tool"]["girih"]["torch"]]
    assert (minors[0], minors[-1]) == (_library.OLDEST, _library.NEWEST)
    major, newest = map(int, _library.NEWEST.split("."))
    requirement = f"torch>={_library.OLDEST},<{major}.{newest + 1}"
    assert requirement in project["project"]["dependencies"]
    assert requirement in project["build-system"]["requires"]
    assert project["project"]["version"] == girih.__version__
    cmake_versions = re.findall(r"project\(girih\w* VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())
    cmake_versions += re.findall(
        r"project\(girih\w* VERSION ([\d.]+)", (ROOT / "kernels/CMakeLists.txt").read_text()
    )
    assert cmake_versions == [girih.__version__] * 2
    pages = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/cpp.md"]
    pages += ["examples/train/CMakeLists.txt", "examples/complete/CMakeLists.txt"]
    for page in pages:
        trees = set(re.findall(r"build/torch([\d.]+\d)", (ROOT / page).read_text()))
        assert trees == {_library.NEWEST}, page


def test_github_files_match_their_schemas():
    check = Path(sys.executable).parent / "check-jsonschema"
    if not check.exists() or not (ROOT / ".github").exists():
        pytest.skip("no check-jsonschema, or no checkout")
    for schema, files in {
        "vendor.github-workflows": (ROOT / ".github" / "workflows").glob("*.yml"),
        "vendor.github-issue-forms": (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"),
    }.items():
        command = [check, "--builtin-schema", schema, *files]
        assert len(command) > 3
        subprocess.run(command, check=True, capture_output=True)
