"""Makes .venv and everything that the build needs; does nothing when nothing has changed.

Runs on the system's own Python with the standard library alone. Versions stand in pyproject.toml.
"""

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
READY = VENV / "ready"  # holds a digest of what was installed
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


def make_venv() -> None:
    """Make .venv. One that was cut off, or whose Python has gone, has no pip that runs and is made anew."""
    python = VENV / "bin" / "python"
    if python.exists():
        pip = subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True)
        if pip.returncode == 0:
            return
    run(sys.executable, "-m", "venv", "--clear", str(VENV))


def link_libraries() -> None:
    """The linker looks for libX.so; the wheels hold libX.so.13."""
    for cu13 in VENV.glob("lib/python*/site-packages/nvidia/cu13"):
        for library in (cu13 / "lib").glob("*.so.*"):
            link = library.with_name(library.name.split(".so.")[0] + ".so")
            if not link.exists():
                link.symlink_to(library.name)
        if not (cu13 / "lib64").exists():
            (cu13 / "lib64").symlink_to("lib")


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    packages = project["build-system"]["requires"] + groups["environment"]
    toolkit = not nvcc_in_path()
    if toolkit:
        packages += groups["toolkit"]
    asked = [sys.version, *packages, Path(__file__).read_text()]
    digest = hashlib.sha256("\n".join(asked).encode()).hexdigest()
    if READY.exists() and READY.read_text() == digest:
        return
    system()
    print(f"setting up {VENV} (a few minutes the first time)", flush=True)
    make_venv()
    run(
        str(VENV / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        *packages,
    )
    if toolkit:
        link_libraries()
    READY.write_text(digest)


if __name__ == "__main__":
    main()
