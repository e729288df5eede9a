"""Training in several processes, here two or three on a CPU."""

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
    """Starts a training of a tiny model in `count` processes. Its folder is `tmp_path / "run"`."""
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
def test_processes_save_stop_and_resume_together(start, tmp_path):
    options = ("--steps", "40", "--at-once", "128")
    run = start(2, *options)
    for line in run.stdout:
        if line.startswith("step 5/"):
            run.send_signal(signal.SIGINT)
            run.send_signal(signal.SIGINT)  # one key press, delivered twice
            break
    _, complaint = run.communicate(timeout=300)
    assert run.returncode == 128 + signal.SIGINT
    assert complaint == "girih.train: stopped; the same command continues\n"
    newest = newest_whole(tmp_path / "run" / "checkpoints")
    assert sorted(p.name for p in newest.glob("rng*")) == ["rng_state_0.pth", "rng_state_1.pth"]
    stopped = int(newest.name.split("-")[1])
    assert 5 <= stopped < 40

    run = start(2, *options)
    printed, complaint = run.communicate(timeout=300)
    assert (run.returncode, complaint) == (0, "")
    assert f"from step {stopped} on" in printed
    assert len([line for line in printed.splitlines() if line.startswith("step 40/40")]) == 1


def test_crash_of_one_process_ends_all_with_its_exit_code(tmp_path, monkeypatch):
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


def test_exit_code_after_a_signal_is_that_of_a_shell(tmp_path, monkeypatch):
    (tmp_path / "waits.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert processes.run_on(1, "waits", []) == 128 + signal.SIGKILL


def test_each_process_gets_its_rank_and_its_arguments(tmp_path, monkeypatch):
    variables = "['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'OMP_NUM_THREADS']"
    (tmp_path / "says.py").write_text(
        "import os, sys\n"
        f"words = [os.environ[name] for name in {variables}] + sys.argv[1:]\n"
        f"open(os.path.join({str(tmp_path)!r}, os.environ['RANK']), 'w').write(' '.join(words))\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for threads in ("1", "3"):
        assert processes.run_on(2, "says", ["--a", "b"]) == 0
        for rank in ("0", "1"):
            assert (tmp_path / rank).read_text() == f"{rank} {rank} 2 2 127.0.0.1 {threads} --a b"
            (tmp_path / rank).unlink()
        monkeypatch.setenv("OMP_NUM_THREADS", "3")  # the value of the user takes precedence
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("visible, used", [(None, "0"), ("2,3", "2"), ("1", "1"), ("", "")])
def test_a_run_without_a_launcher_sees_one_gpu(visible, used, monkeypatch):
    def visible_devices(launched):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setenv("RANK", "1") if launched else monkeypatch.delenv("RANK", raising=False)
        assert processes.is_speaker() != launched
        processes.use_one_device()
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the end of the test restores the variable
    assert visible_devices(launched=False) == used and visible_devices(launched=True) == visible


@pytest.mark.usefixtures("handlers")
def test_second_interrupt_stops_at_once_and_a_duplicate_does_not(monkeypatch):
    now = 100.0
    monkeypatch.setattr(processes.time, "monotonic", lambda: now)
    interrupt, control = processes.Interrupt(), transformers.TrainerControl()

    def stops_at_once(number):
        try:
            signal.raise_signal(number)
        except processes.Interrupted as stop:
            assert stop.number == number
            return True
        return False

    assert stops_at_once(signal.SIGINT) and stops_at_once(signal.SIGTERM)  # before training
    interrupt.on_train_begin(None, None, control)
    interrupt.on_step_end(None, None, control)
    assert not control.should_save and not control.should_training_stop
    assert not stops_at_once(signal.SIGINT)
    now = 100.9  # a launcher and a terminal have both delivered the signal
    assert not stops_at_once(signal.SIGINT)
    now = 101.1
    assert not stops_at_once(signal.SIGTERM) and interrupt.number == signal.SIGINT
    assert stops_at_once(signal.SIGINT)
    interrupt.on_step_end(None, None, control)
    assert control.should_save and control.should_training_stop
    interrupt.on_train_end(None, None, control)
    assert stops_at_once(signal.SIGTERM)
