"""Sequences that are cut over two and four processes: outputs, losses and gradients equal those of one
process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SUPPORT

EXAMPLE = Path(__file__).parents[2] / "examples" / "context_parallel.py"


def launch(processes):
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize(
    "part",
    ["operators attentions rows_and_precision refusals", "models converted", "training compiled threads"],
)
def test_cut_sequences_equal_whole_ones(part, processes):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    run = subprocess.run(
        [*launch(processes), SUPPORT / "cut.py", *part.split()],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.returncode == 0, run.stderr[-6000:]


def test_the_example_has_the_losses_of_one_process():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    losses = []
    for processes in (1, 2):
        run = subprocess.run(
            [*launch(processes), EXAMPLE, "--steps=10", "--tokens=150"],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert run.returncode == 0, run.stderr[-6000:]
        losses.append([float(x) for x in re.findall(r"loss ([\d.]+) of 150 tokens", run.stdout)])
    assert len(losses[0]) == 3 and losses[0][2] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)
