"""Sequences that are cut over two and four processes: outputs, losses and gradients equal those of one
process."""

import os
import subprocess
import sys

import pytest
from conftest import SUPPORT


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("part", ["operators attentions rows_and_precision refusals", "models", "training"])
def test_cut_sequences_equal_whole_ones(part, processes):
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    run = subprocess.run(
        [*command, SUPPORT / "cut.py", *part.split()], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr[-6000:]
