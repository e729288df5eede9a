"""DTensor operands on two processes, sharded along the batch or the heads: the result equals the unsharded
one. Layers refuse sharded projections.
"""

import os
import subprocess
import sys

import pytest
from conftest import SUPPORT

CALL = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
mesh = init_device_mesh("cpu", (1,))
q, k, v = (distribute_tensor(torch.randn(2, 5, 2, 4), mesh, [Shard(0)]) for _ in range(3))
assert girih.ops.gla(q, k, v)[0].placements == (Shard(0),)
"""


@pytest.mark.parametrize("first", ["girih", "torch.distributed.tensor", "girih.ops._sharding"])
def test_dtensor_support_does_not_depend_on_import_order(first):
    code = f"import torch, {first}\n"
    if first == "girih":
        code += "import sys; assert 'torch.distributed.tensor' not in sys.modules\n"
    program = code + "import girih\n" + CALL
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]


def test_the_example_of_shard_runs():
    """Runs in a separate process, because it starts a process group."""
    program = "import doctest, torch; from girih.distributed import fsdp as d\n"
    program += "result = doctest.testmod(d, extraglobs={'torch': torch})\n"
    program += "assert result.attempted > 3 and result.failed == 0"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


@pytest.mark.parametrize("program", ["sharded.py", "parallel.py"])
def test_over_two_processes(program):
    """Sharded operands give the whole result; layers refuse sharded projections."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command.append(str(SUPPORT / program))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
