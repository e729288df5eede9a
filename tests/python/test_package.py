import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import girih
import pytest
from girih import _build

ROOT = Path(__file__).parents[2]


def test_a_package_ships_the_extension_of_its_own_python_alone(tmp_path):
    own = "_C" + sysconfig.get_config_var("EXT_SUFFIX")
    files = ["__init__.py", "_build.py", "lib/libgirih.so", "py.typed", own]
    files.append("_C.cpython-399-x86_64-linux-gnu.so")
    for name in files:
        file = tmp_path / "python" / "girih" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(empty NONE)\n"
        "file(GLOB built python/girih/_*)\nfile(COPY ${built} DESTINATION ${GIRIH_PACKAGE})\n"
        "install(FILES python/girih/lib/libgirih.so DESTINATION ${CMAKE_INSTALL_LIBDIR})\n"
    )
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-lib", "built"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    built = tmp_path / "built"
    assert sorted(str(p.relative_to(built / "girih")) for p in built.rglob("*") if p.is_file()) == sorted(
        files[:-1]
    )


def test_a_source_distribution_is_the_repository_and_nothing_built(tmp_path):
    """What `build` and the tests need of it, then, is there; CI's and git's own files are not."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (sources,) = tmp_path.glob("*.egg-info/SOURCES.txt")
    shipped = set(sources.read_text().splitlines())
    assert tracked - shipped <= {".ci/run", ".gitignore", "MANIFEST.in"}
    assert not [name for name in shipped if "_build.py" in name or "/lib/" in name or name.endswith(".so")]


def test_the_licence_is_the_one_that_the_package_names(tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "dist_info", "--output-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    assert "License-Expression: BSD-3-Clause" in metadata.read_text()
    (licence,) = metadata.parent.rglob("LICENSE")
    assert licence.read_text() == (ROOT / "LICENSE").read_text()
    assert licence.read_text().splitlines()[2] == "Copyright (c) 2026, The girih authors"


@pytest.mark.skipif(_build.cuda, reason="built with kernels")
def test_a_library_without_kernels_asks_for_no_cuda():
    library = Path(girih.__file__).parent / "lib" / "libgirih.so"
    said = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    needed = [line for line in said.splitlines() if "NEEDED" in line]
    assert any("libtorch_cpu" in line for line in needed)
    assert not any("cuda" in line for line in needed)
