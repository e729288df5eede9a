"""Several processes that train together, here two or three of a CPU."""

import os
import signal
import subprocess
import sys

import pytest
import torch
import transformers
from girih.training import processes
from girih.training.folder import newest_whole
from packaging import version

RUN_ON = """import sys
from girih.training.processes import run_on
sys.exit(run_on({}, "girih.train", sys.argv[1:]))
"""


@pytest.fixture
def start(tmp_path):
    """Start a training of a tiny model in so many processes; its folder is tmp_path / "run"."""
    corpus = tmp_path / "squares.txt"
    corpus.write_text(" ".join(str(i * i) for i in range(4000)))
    fixed = ["--size", "tiny", "--corpus", str(corpus), "--folder", str(tmp_path / "run")]
    started = []

    def start(count: int, *options: str) -> subprocess.Popen:
        command = [sys.executable, "-c", RUN_ON.format(count), *fixed, *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, **pipes, text=True))
        return started[-1]

    yield start
    for run in started:
        run.terminate()


def test_a_batch_that_processes_cannot_share_is_refused_in_one_line(start, tmp_path):
    run = start(3)
    printed, complaint = run.communicate(timeout=300)
    assert (run.returncode, printed) == (2, "")
    assert complaint == "girih.train: batch 8: 3 processes cannot share its sequences evenly\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse("5.23") and not torch.cuda.is_available(),
    reason="this transformers cannot continue several processes without a GPU: torch.load knows no 'cpu:0'",
)
def test_processes_stop_together_saved_and_the_same_command_goes_on(start, tmp_path):
    in_parts = ("--steps", "40", "--at-once", "128")
    run = start(2, *in_parts)
    for line in run.stdout:
        if line.startswith("step 5/"):
            run.send_signal(signal.SIGINT)
            run.send_signal(signal.SIGINT)  # the same press, delivered twice
            break
    _, complaint = run.communicate(timeout=300)
    assert run.returncode == 128 + signal.SIGINT
    assert complaint == "girih.train: stopped; the same command continues\n"
    newest = newest_whole(tmp_path / "run" / "checkpoints")
    assert sorted(p.name for p in newest.glob("rng*")) == ["rng_state_0.pth", "rng_state_1.pth"]
    stopped = int(newest.name.split("-")[1])
    assert 5 <= stopped < 40

    run = start(2, *in_parts)
    printed, complaint = run.communicate(timeout=300)
    assert (run.returncode, complaint) == (0, "")
    assert f"from step {stopped} on" in printed
    assert len([line for line in printed.splitlines() if line.startswith("step 40/40")]) == 1


def test_one_that_crashes_ends_the_others_and_its_code_is_the_answer(tmp_path, monkeypatch):
    module = tmp_path / "waits.py"
    module.write_text("import os, sys, time\nsys.exit(7) if os.environ['RANK'] == '1' else time.sleep(300)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(processes, "PATIENCE", 0.2)
    assert processes.run_on(2, "waits", []) == 7


@pytest.mark.parametrize(
    ("batch", "gpus", "used"), [(8, 3, 2), (8, 8, 8), (32, 7, 4), (128, 6, 4), (8, 0, 0)]
)
def test_as_many_gpus_train_as_share_the_batch_evenly(batch, gpus, used, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert processes.gpus_for(batch) == used
