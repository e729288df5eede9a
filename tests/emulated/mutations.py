"""Whether the emulated tests would see a mistake in a kernel: `python tests/emulated/mutations.py`.

Draws mistakes in the kernels' sources, a sign, an index, a bound, a wait or a fence that is missing, makes
each in a copy of them, and runs the emulated tests of the operator on that copy. A mistake that they do not
see is shown; it may be one that changes nothing, as a wait that a later one hides, or in what the emulator
does not run.
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WAITS = r"wait|acquire|release|arrive|commit|fence|barrier|__sync"
LONGEST = 300  # seconds of an operator's tests
# By kind: what a line must hold, and what comes in its place.
KINDS = {
    "sign": (r"(?<=[\w)\]] )[-+](?= [\w(])|[-+](?==)", lambda found: "+" if found == "-" else "-"),
    "index": (r"(?<=[+*%/] )\d+\b", lambda found: str(int(found) + 1)),
    "bound": (r"(?<= )<=?(?= )", lambda found: "<" if found == "<=" else "<="),
    "wait": (rf"^ +[\w.>-]*({WAITS})\w*(<\w+>)?\(.*\);$", lambda found: ""),
}
# What stands on these lines is no arithmetic of a kernel.
OTHER = re.compile(
    r"^\s*(//|#|\*|template|static_assert|using|struct|constexpr)|ptx::|inline|launch_|constexpr|for \("
)


def candidates(operator: str, kind: str) -> list[tuple[Path, int, re.Match]]:
    """Places in an operator's kernels, (file, line, match)."""
    pattern, found = re.compile(KINDS[kind][0]), []
    for file in sorted((ROOT / "kernels" / operator).rglob("*.cuh")):
        for number, line in enumerate(file.read_text().splitlines()):
            if OTHER.search(line) is None or (kind == "bound" and "for (" in line):
                code = line.split(" //")[0]
                found += [(file, number, match) for match in pattern.finditer(code)]
    return found


def fails(operator: str, kernels: Path, jobs: int) -> bool | None:
    """Whether a test of the operator does, with these kernels, or does not end; None: they do not compile."""
    tests = sorted(map(str, (ROOT / "tests" / "emulated").glob(f"test_emulated_{operator}*.py")))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", str(jobs), "-p", "no:cacheprovider", *tests]
    package = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"GIRIH_KERNELS": str(kernels), "OMP_NUM_THREADS": "1", "PYTHONPATH": package}
    with subprocess.Popen(
        command,
        env=os.environ | own,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as ran:
        try:
            printed, _ = ran.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(ran.pid, signal.SIGKILL)
            return True
    if "CalledProcessError" in printed:
        return None
    if ran.returncode != 0 and " failed" not in printed:  # no test ran
        raise RuntimeError(printed)
    return ran.returncode != 0


def seen(operator: str, file: Path, number: int, match: re.Match, kind: str, jobs: int) -> bool | None:
    """Whether a test fails with this mistake, or None."""
    with tempfile.TemporaryDirectory() as folder:
        kernels = Path(folder) / "kernels"
        shutil.copytree(ROOT / "kernels", kernels)
        changed = kernels / file.relative_to(ROOT / "kernels")
        lines = changed.read_text().splitlines(keepends=True)
        line = lines[number]
        lines[number] = line[: match.start()] + KINDS[kind][1](match[0]) + line[match.end() :]
        changed.write_text("".join(lines))
        print(
            f"{file.relative_to(ROOT)}:{number + 1}: {kind}\n- {line.strip()}\n+ {lines[number].strip()}",
            flush=True,
        )
        return fails(operator, kernels, jobs)


def emulated_operators() -> list[str]:
    return sorted(
        p.name
        for p in (ROOT / "kernels").iterdir()
        if list((ROOT / "tests" / "emulated").glob(f"test_emulated_{p.name}*.py")) and list(p.rglob("*.cuh"))
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="mutations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operators", help="names with commas (default: all)")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes of a test run")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    known = emulated_operators()
    operators = options.operators.split(",") if options.operators else known
    if unknown := [name for name in operators if name not in known]:
        parser.error(f"operator {unknown[0]}: unknown; expected one of {', '.join(known)}")
    draw.shuffle(operators)
    for operator in operators[: options.count]:
        if fails(operator, ROOT / "kernels", options.jobs) is not False:
            raise SystemExit(f"{operator}: its tests fail without a mistake")
    caught = 0
    for i in range(options.count):
        operator, turn = operators[i % len(operators)], i % len(KINDS)
        # Not every operator's kernels have a wait, say: then a mistake of the next kind.
        of_kinds = ((kind, candidates(operator, kind)) for kind in [*KINDS][turn:] + [*KINDS][:turn])
        kind, places = next((kind, places) for kind, places in of_kinds if places)
        was_seen = None
        while was_seen is None:
            was_seen = seen(operator, *draw.choice(places), kind, options.jobs)
        caught += was_seen
        print("  seen\n" if was_seen else "  NOT SEEN\n", flush=True)
    print(f"{caught} of {options.count} mistakes were seen, seed {options.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
