"""The record of the last green run on a GPU, which `make test-gpu` writes, vouches for these kernels."""

import importlib.util
import json
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "gpu" / "run.py"
spec = importlib.util.spec_from_file_location("gpu_run", FILE)
gpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu)

GREEN = {"green": True, "passed": 3, "failed": 0, "seconds": 1}
RED = GREEN | {"green": False}


def test_the_kernels_are_those_of_the_last_green_run_on_a_gpu():
    assert gpu.RECORD.exists(), "no green run on a GPU yet: run make test-gpu"
    why = gpu.complaint(json.loads(gpu.RECORD.read_text()))
    assert why is None, why


def test_the_state_is_the_kernels_what_calls_them_and_their_tests():
    files = {p.relative_to(gpu.ROOT).as_posix() for p in gpu.files_of_state()}
    sources = {p.relative_to(gpu.ROOT).as_posix() for p in (gpu.ROOT / "kernels").rglob("*.cu*")}
    assert sources <= files
    assert {"csrc/ops/gsa/cuda.cpp", "csrc/ops/gated_kernels.h", "csrc/ops/gsa/problem.h"} <= files
    assert {
        "tests/python/test_gsa_kernels.py",
        "tests/python/kernel_accuracy.py",
        "tests/python/cases.py",
    } <= files
    assert "csrc/ops/gsa/cpu.cpp" not in files


@pytest.mark.parametrize("changed", ["kernels/gsa/scan.cu", "csrc/ops/packs.h", "tests/python/padding.py"])
def test_any_change_of_them_makes_a_record_stale(changed, monkeypatch):
    stages = dict.fromkeys(gpu.RECORDED, GREEN)
    record = gpu.added({}, gpu.state_hash(), stages)
    assert gpu.complaint(record) is None
    read = Path.read_bytes
    file = gpu.ROOT / changed
    monkeypatch.setattr(Path, "read_bytes", lambda p: read(p) + b" " * (p == file))
    assert gpu.complaint(record) == "kernels changed since the last green run on a GPU: run make test-gpu"


def test_stages_of_several_commands_add_up_while_the_state_stays():
    first, second = gpu.RECORDED[:3], gpu.RECORDED[3:]
    state = gpu.state_hash()
    record = gpu.added({}, state, dict.fromkeys(first, GREEN))
    assert gpu.complaint(record).endswith("STAGES=large,memcheck")
    whole = gpu.added(record, state, dict.fromkeys(second, GREEN))
    assert gpu.complaint(whole) is None and list(whole["stages"]) == list(gpu.RECORDED)
    assert gpu.complaint(gpu.added(whole, state, {"memcheck": RED})).endswith("STAGES=memcheck")
    assert "racecheck" not in gpu.added(whole, state, {"racecheck": RED})["stages"]
    other = gpu.added(whole, "another", {"cpp": GREEN})
    assert list(other["stages"]) == ["cpp"] and "changed" in gpu.complaint(other)
