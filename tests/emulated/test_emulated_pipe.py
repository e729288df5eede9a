"""The rings of kernels/pipe on the emulator: five roles, tails, clusters, and waits that a kernel omits."""

import ctypes
import subprocess
import sys

import pytest
from emulated import load_kernels, needs_headers

pytestmark = needs_headers


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return load_kernels(tmp_path_factory, "pipe", sizes=("run_ring", "run_cluster"))


def wrong_results(run, count, stages, omit=0):
    return run(*map(ctypes.c_int64, (count, stages, omit)))


@pytest.mark.parametrize("rows", [1, 16, 17, 150])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_ring_of_five_roles(kernels, stages, rows):
    assert wrong_results(kernels.run_ring, rows, stages) == 0


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("tiles", [1, 3, 40])
def test_a_ring_over_a_cluster(kernels, stages, tiles):
    assert wrong_results(kernels.run_cluster, tiles, stages) == 0


@pytest.mark.parametrize("run, waits", [("run_ring", 4), ("run_cluster", 2)])
def test_an_omitted_wait_is_seen(kernels, run, waits):
    # In a process of its own, which the emulator may end.
    for omit in range(1, waits + 1):
        call = f"ctypes.CDLL({kernels._name!r}).{run}(*map(ctypes.c_int64, (150, 2, {omit})))"
        child = subprocess.run(
            [sys.executable, "-c", f"import ctypes, sys; sys.exit({call} != 0)"], timeout=120
        )
        assert child.returncode != 0, omit
