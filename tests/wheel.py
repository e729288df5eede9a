"""`make check-wheel`: the wheel in dist/ in clean environments, each with a torch of its own.

    make check-wheel [TORCHES=2.11,2.15]

An environment is made in build/wheels/environments, gets the wheel, its torch and what a user of C++ has
(cmake, ninja), and runs tests/smoke.py from an empty folder; the checkout's package is not in its path.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / "build" / "wheels" / "environments"


def environment_of(release: str, python: str) -> Path:
    return ENVIRONMENTS / f"torch{release}-{Path(python).name}"


def check(release: str, wheel: Path, python: str) -> bool:
    """Whether all of the smoke tests pass beside this torch."""
    folder = environment_of(release, python)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    own = folder / "bin" / "python"
    packages = [str(wheel), f"torch=={release}", "cmake", "ninja", "numpy"]
    install = [str(own), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    subprocess.run([*install, *packages], check=True)
    copies = [str(file) for file in own.parent.parent.glob("lib/python*/site-packages/girih.libs/*")]
    assert not copies, f"the wheel has libraries that are not girih's: {copies}"
    empty = folder / "empty"
    empty.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(own), str(ROOT / "tests" / "smoke.py")]
    return subprocess.run(command, cwd=empty, env=environment).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torches", help="minor versions of torch with commas; all by default")
    parser.add_argument("--python", default=sys.executable, help="the Python of the environments")
    parser.add_argument("--keep", action="store_true", help="leave the environments where they are")
    options = parser.parse_args()
    wheels = sorted((ROOT / "dist").glob("girih-*.whl"))
    if len(wheels) != 1:
        print(f"dist/ has {len(wheels)} wheels; expected one: run make wheel", file=sys.stderr)
        return 2
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    releases = {release.rpartition(".")[0]: release for release in project["tool"]["girih"]["torch"]}
    chosen = options.torches.split(",") if options.torches else list(releases)
    if unknown := [minor for minor in chosen if minor not in releases]:
        print(f"torch {unknown[0]}: girih supports {', '.join(releases)}", file=sys.stderr)
        return 2
    failed = []
    for minor in chosen:
        if not check(releases[minor], wheels[0], options.python):
            failed.append(minor)
        if not options.keep:
            shutil.rmtree(environment_of(releases[minor], options.python))
    print(f"{wheels[0].name}: {f'FAILED beside torch {failed}' if failed else 'passed'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
