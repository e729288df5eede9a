"""Short runs of the programs in tests/fuzz; their docstrings describe longer runs."""

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[1] / "fuzz"
SLICES = {
    "calls": ["calls.py", "--count=400"],
    "right calls": ["right_calls.py", "--count=60", "--device=cpu"],
    "folders from C++": ["files.py", "--count=300", "--language=cpp", "--memory=8"],
    "folders from Python": ["files.py", "--count=150", "--language=python", "--memory=8"],
}


@pytest.mark.parametrize("name", SLICES)
def test_every_program_succeeds(name):
    program, *options = SLICES[name]
    run = subprocess.run(
        [sys.executable, str(FUZZ / program), *options], capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


def test_right_calls_cover_every_operator():
    command = [sys.executable, str(FUZZ / "right_calls.py"), "--device=cpu", "--count=10"]
    command.append("--operators=delta_product,lattice")
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stdout.startswith("10 calls of delta_product,lattice on cpu: all well")
    empty = subprocess.run([*command, "--seconds=0"], capture_output=True, text=True, timeout=120)
    assert empty.returncode == 1 and empty.stdout.startswith("no call was made of delta_product, lattice")


def test_a_dead_worker_is_reported_and_the_others_continue(tmp_path):
    program = tmp_path / "tries.py"
    program.write_text(
        f"import os, sys\nsys.path.insert(0, {str(FUZZ)!r})\nimport workers\n"
        "workers.PATIENCE = 2\n"
        "def attempt(seed, number, where):\n"
        "    if number == 3: os.kill(os.getpid(), 11)\n"
        "    if number == 4:\n"
        "        while True: pass\n"
        "    if number == 6: return 'six', 'it is wrong'\n"
        "    if number == 7: bytearray(2**32)\n"
        "    open(os.path.join(where, str(number)), 'w')\n"
        "    return 'tried', None\n"
        f"sys.exit(workers.main(__file__, 'Tries.', 'try', ('where', [{str(tmp_path)!r}]), attempt))\n"
    )
    run = subprocess.run(
        [sys.executable, str(program), "--count=9", "--jobs=2", "--memory=1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = run.stdout.splitlines()
    assert run.returncode == 1 and lines[-1].endswith("some are wrong")
    assert sorted(lines[:-1]) == [
        "try 3: the process died with -11",
        "try 4: the process died with 1",
        "try 6: six: it is wrong",
        "try 7: the process died with 1",
    ]
    assert {p.name for p in tmp_path.iterdir() if p.name.isdigit()} == {"0", "1", "2", "5", "8"}
