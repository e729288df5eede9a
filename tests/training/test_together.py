"""Two processes that train a model together, by DDP or FSDP2, have the losses and gradients of
one process."""

import os
import subprocess
import sys

from conftest import SUPPORT


def test_two_processes_have_the_losses_and_gradients_of_one():
    program = SUPPORT / "together.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [*command, str(program)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
