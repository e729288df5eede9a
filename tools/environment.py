"""Makes an environment with everything that the build needs; does nothing when nothing has changed.

    python3 tools/environment.py                     .venv, with the newest torch that girih supports
    python3 tools/environment.py --torch 2.13        .venv-torch2.13
    python3 tools/environment.py --headers 2.11,...  build/torches/2.11, ...: torch alone, to build a wheel;
                                                     prints these folders

Runs on the system's own Python with the standard library alone. Versions are those of pyproject.toml.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

if sys.version_info < (3, 11):
    sys.exit(f"girih needs Python 3.11 or newer; this is {sys.version.split()[0]}")

import tomllib

ROOT = Path(__file__).parent.parent.resolve()
VENV = ROOT / ".venv"
TORCHES = ROOT / "build" / "torches"
CUDA = "13."  # what torch was built with


def run(*command: str) -> None:
    result = subprocess.run(command)
    if result.returncode:
        sys.exit(f"failed with code {result.returncode}: {' '.join(command)}")


def system_packages(packages: list[str], why: str) -> None:
    """Install with apt-get as root; say what to install otherwise."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.exit(f"{why}: please install {' '.join(packages)} (sudo apt-get install {' '.join(packages)})")
    run("apt-get", "update", "-qq")
    run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages)


def header(*candidates: str) -> bool:
    return any(
        (Path(root) / c).exists() for root in ("/usr/include", "/usr/local/include") for c in candidates
    )


def system() -> None:
    missing = []
    if shutil.which("g++") is None:
        missing.append("g++")
    if not header("catch2/catch.hpp", "catch2/catch_test_macros.hpp"):
        missing.append("catch2")
    if not header("nlohmann/json.hpp"):
        missing.append("nlohmann-json3-dev")
    if not header("CLI/CLI.hpp"):
        missing.append("libcli11-dev")
    try:
        import ensurepip  # noqa: F401  (Debian ships it apart)
    except ImportError:
        missing.append("python3-venv")
    config = Path(
        subprocess.check_output(
            [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('include'))"], text=True
        ).strip()
    )
    if not (config / "Python.h").exists():
        missing.append("python3-dev")
    if missing:
        system_packages(missing, "the build needs more than this machine has")


def nvcc_in_path() -> bool:
    """A toolkit that fits torch's."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        return False
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\S+),", version)
    return found is not None and found[1].startswith(CUDA)


def make_venv(venv: Path) -> None:
    """Make an environment. One that was cut off, or whose Python has gone, is replaced: its pip fails."""
    python = venv / "bin" / "python"
    if python.exists():
        pip = subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True)
        if pip.returncode == 0:
            return
    run(sys.executable, "-m", "venv", "--clear", str(venv))


def link_libraries(venv: Path) -> None:
    """The linker looks for libX.so; the wheels hold libX.so.13."""
    for cu13 in venv.glob("lib/python*/site-packages/nvidia/cu13"):
        for library in (cu13 / "lib").glob("*.so.*"):
            link = library.with_name(library.name.split(".so.")[0] + ".so")
            if not link.exists():
                link.symlink_to(library.name)
        if not (cu13 / "lib64").exists():
            (cu13 / "lib64").symlink_to("lib")


def pip_install(python: Path, *arguments: str) -> None:
    run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def list_releases(project: dict) -> dict[str, str]:
    """The release of torch that stands for each minor version: {"2.11": "2.11.0", ...}, the oldest first."""
    return {release.rpartition(".")[0]: release for release in project["tool"]["girih"]["torch"]}


def find_release(project: dict, minor: str) -> str:
    releases = list_releases(project)
    if minor not in releases:
        sys.exit(f"girih supports torch {', '.join(releases)}, not {minor}")
    return releases[minor]


def environment(project: dict, minor: str) -> Path:
    newest = list(list_releases(project))[-1]
    return VENV if minor == newest else VENV.with_name(f".venv-torch{minor}")


def has_torch(packages: Path, release: str) -> bool:
    version = packages / "torch" / "version.py"
    return version.exists() and f"'{release}" in version.read_text()


def index_by_name(packages: list[str]) -> dict[str, str]:
    return {package.partition("==")[0]: package for package in packages}


def list_packages(project: dict, minor: str) -> list[str]:
    """What the environment of a torch holds: the oldest torch goes with the oldest of other packages."""
    packages = index_by_name(project["dependency-groups"]["environment"])
    if minor == next(iter(list_releases(project))):
        packages |= index_by_name(project["tool"]["girih"]["oldest"])
    return [f"torch=={find_release(project, minor)}", *packages.values()]


def make_environment(project: dict, minor: str) -> None:
    venv = environment(project, minor)
    packages = list_packages(project, minor)
    toolkit = not nvcc_in_path()
    if toolkit:
        packages += project["dependency-groups"]["toolkit"]
    ready = venv / "ready"  # holds a digest of what was installed
    inputs = [sys.version, *packages, Path(__file__).read_text()]
    digest = hashlib.sha256("\n".join(inputs).encode()).hexdigest()
    if ready.exists() and ready.read_text() == digest:
        return
    system()
    print(f"setting up {venv} (a few minutes the first time)", flush=True)
    make_venv(venv)
    pip_install(venv / "bin" / "python", *packages)
    if toolkit:
        link_libraries(venv)
    ready.write_text(digest)


def download_headers(project: dict, minor: str) -> Path:
    """A folder of packages with torch, though not with all that it needs to run: enough to build with it."""
    release = find_release(project, minor)
    for python in environment(project, minor).glob("lib/python*/site-packages"):
        if has_torch(python, release):
            return python
    folder = TORCHES / minor
    if not has_torch(folder, release):
        shutil.rmtree(folder, ignore_errors=True)
        download = TORCHES / f"{minor}.part"
        shutil.rmtree(download, ignore_errors=True)
        print(f"downloading torch {release} into {folder}", file=sys.stderr, flush=True)
        options = ("--no-deps", "--no-compile", "--target", str(download))
        python = environment(project, list(list_releases(project))[-1]) / "bin" / "python"
        if not python.exists():
            python = Path(sys.executable)  # which may have no pip
        pip_install(python, *options, f"torch=={release}")
        download.rename(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch", help="a minor version of torch; the newest by default")
    parser.add_argument("--headers", help="minor versions of torch with commas, or all")
    options = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if options.headers:
        minors = list(list_releases(project)) if options.headers == "all" else options.headers.split(",")
        print(os.pathsep.join(str(download_headers(project, minor)) for minor in minors))
        return
    make_environment(project, options.torch or list(list_releases(project))[-1])


if __name__ == "__main__":
    main()
