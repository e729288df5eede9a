"""`python -m girih.environment` describes a machine for a bug report."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from girih import environment, ops

PACKAGE = Path(environment.__file__).parent


def test_the_report_has_the_torch_that_runs_and_a_path_for_each_operator():
    text = environment.report()
    assert re.search(rf"^torch +{re.escape(torch.__version__)},", text, re.MULTILINE)
    assert str(PACKAGE / "lib") in text
    assert not re.search(r"^error", text, re.MULTILINE)
    on_cpu, *on_cuda = text.split("path of a call")[1:]
    for name in ops.describe():
        assert re.search(rf"^  {name} +aten: \w", on_cpu, re.MULTILINE), name
    if torch.cuda.is_available() and environment.has_kernels():
        (on_card,) = on_cuda
        for name in ops.describe():
            assert re.search(rf"^  {name} +(?!unknown)[\w ]+: \w", on_card, re.MULTILINE), name


def test_a_package_that_cannot_be_imported_has_a_report(tmp_path):
    """For example, libgirih.so may be older than the Python code."""
    (tmp_path / "girih").mkdir()
    for file in PACKAGE.iterdir():
        if file.name != "ops":
            (tmp_path / "girih" / file.name).symlink_to(file)
    (tmp_path / "girih" / "ops.py").write_text("raise AttributeError('no such operator')\n")
    for command in (["-m", "girih.environment"], ["-mgirih.environment"]):
        run = subprocess.run(
            [sys.executable, *command],
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        assert re.search(r"^error +AttributeError: no such operator$", run.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    "command",
    [[str(PACKAGE / "environment.py")], ["-m", "girih.environment"]],
    ids=["file", "module"],
)
def test_with_a_torch_outside_of_the_range_the_report_has_one_line_of_error(command, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('__version__ = "2.16.0"\n')
    paths = os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])
    run = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"^torch +2\.16\.0, without CUDA$", run.stdout, re.MULTILINE)
    (error,) = re.findall(r"^error +(.*)$", run.stdout, re.MULTILINE)
    assert error.startswith("ImportError: ") and "2.16.0" in error
    assert "path of a call" not in run.stdout and "Traceback" not in run.stdout + run.stderr
