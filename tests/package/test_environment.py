import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "tools" / "environment.py"


@pytest.fixture
def environment(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("environment", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "TORCHES", tmp_path / "torches")
    return module


def pip_runs(venv: Path) -> bool:
    python = venv / "bin" / "python"
    return subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0


def test_incomplete_venv_is_rebuilt_and_complete_venv_is_kept(environment):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment.VENV], check=True)
    assert not pip_runs(environment.VENV)
    environment.make_venv(environment.VENV)
    assert pip_runs(environment.VENV)
    marker = environment.VENV / "kept"
    marker.touch()
    environment.make_venv(environment.VENV)
    assert marker.exists()


def test_venv_without_its_python_is_rebuilt(environment):
    python = environment.VENV / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/nowhere/python")
    environment.make_venv(environment.VENV)
    assert pip_runs(environment.VENV)


PROJECT = {"tool": {"girih": {"torch": ["2.14.0", "2.15.1"]}}}


def test_each_torch_has_an_environment_and_the_newest_is_the_default(environment):
    assert environment.environment(PROJECT, "2.15") == environment.VENV
    assert environment.environment(PROJECT, "2.14").name == ".venv-torch2.14"
    assert environment.find_release(PROJECT, "2.15") == "2.15.1"


def test_the_oldest_torch_goes_with_the_oldest_packages(environment):
    project = {
        "tool": {"girih": PROJECT["tool"]["girih"] | {"oldest": ["transformers==5.17.0"]}},
        "dependency-groups": {"environment": ["numpy==2.4.6", "transformers==5.24.0"]},
    }
    oldest, newest = (environment.list_packages(project, minor) for minor in ("2.14", "2.15"))
    assert oldest == ["torch==2.14.0", "numpy==2.4.6", "transformers==5.17.0"]
    assert newest == ["torch==2.15.1", "numpy==2.4.6", "transformers==5.24.0"]


def test_a_torch_outside_of_the_range_is_refused(environment):
    with pytest.raises(SystemExit, match=r"girih supports torch 2.14, 2.15, not 2.16"):
        environment.find_release(PROJECT, "2.16")


def test_a_torch_to_build_with_is_downloaded_once(environment, monkeypatch):
    calls = []

    def pip_install(python, *arguments):
        calls.append(arguments)
        folder = Path(arguments[arguments.index("--target") + 1]) / "torch"
        folder.mkdir(parents=True)
        (folder / "version.py").write_text("__version__ = '2.14.0+cu130'\n")

    monkeypatch.setattr(environment, "pip_install", pip_install)
    folder = environment.download_headers(PROJECT, "2.14")
    assert folder == environment.download_headers(PROJECT, "2.14") == environment.TORCHES / "2.14"
    assert len(calls) == 1 and "torch==2.14.0" in calls[0]


def test_a_torch_that_an_environment_has_is_not_downloaded(environment, monkeypatch):
    packages = environment.VENV / "lib" / "python3.12" / "site-packages"
    (packages / "torch").mkdir(parents=True)
    (packages / "torch" / "version.py").write_text("__version__ = '2.15.1'\n")
    monkeypatch.setattr(environment, "pip_install", None)
    assert environment.download_headers(PROJECT, "2.15") == packages
