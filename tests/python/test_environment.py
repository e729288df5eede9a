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
    return module


def pip_runs(venv: Path) -> bool:
    python = venv / "bin" / "python"
    return subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0


def test_a_venv_that_was_cut_off_is_made_anew_and_a_whole_one_stays(environment):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment.VENV], check=True)
    assert not pip_runs(environment.VENV)
    environment.make_venv()
    assert pip_runs(environment.VENV)
    kept = environment.VENV / "kept"
    kept.touch()
    environment.make_venv()
    assert kept.exists()


def test_a_venv_whose_python_has_gone_is_made_anew(environment):
    python = environment.VENV / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/nowhere/python")
    environment.make_venv()
    assert pip_runs(environment.VENV)
