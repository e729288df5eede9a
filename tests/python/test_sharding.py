"""DTensor operands, over two processes: cut along the batch or the heads, the result is the whole one's."""

import os
import subprocess
import sys
from pathlib import Path


def test_sharded_operands_give_the_whole_result():
    program = Path(__file__).with_name("sharded.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        str(program),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
