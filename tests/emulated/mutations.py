"""Mutation test of the emulated tests: `python tests/emulated/mutations.py`.

The script draws random mistakes in the kernel sources: a wrong sign, index or bound, or a missing wait or
fence. For each mistake it changes a copy of the kernels and runs the emulated tests of the operator with this
copy. It prints every mistake and whether a test fails. A mistake can be undetected because it has no effect
(a later wait can cover a missing one) or because the emulator does not run the changed code.
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
TIMEOUT = 300  # of the tests of an operator, in seconds
# For each kind of mistake, a pattern and the replacement of its match.
KINDS = {
    "sign": (r"(?<=[\w)\]] )[-+](?= [\w(])|[-+](?==)", lambda text: "+" if text == "-" else "-"),
    "index": (r"(?<=[+*%/] )\d+\b", lambda text: str(int(text) + 1)),
    "bound": (r"(?<= )<=?(?= )", lambda text: "<" if text == "<=" else "<="),
    "wait": (rf"^ +[\w.>()-]*({WAITS})\w*(<\w+>)?\(.*\);$", lambda text: ""),
}
# Lines without arithmetic of a kernel.
SKIPPED_LINE = re.compile(
    r"^\s*(//|#|\*|template|static_assert|using|struct|constexpr)|ptx::|inline|launch_|constexpr|for \("
)


def candidates(operator: str, kind: str) -> list[tuple[Path, int, re.Match]]:
    """Possible mistakes in the kernels of an operator: (file, line, match)."""
    pattern, matches = re.compile(KINDS[kind][0]), []
    for file in sorted((ROOT / "kernels" / operator).rglob("*.cuh")):
        for number, line in enumerate(file.read_text().splitlines()):
            if SKIPPED_LINE.search(line) is None or (kind == "bound" and "for (" in line):
                code = line.split(" //")[0]
                matches += [(file, number, match) for match in pattern.finditer(code)]
    return matches


def fails(operator: str, kernels: Path, jobs: int) -> bool | None:
    """Whether a test of the operator fails or times out. None: the kernels do not compile."""
    tests = sorted(map(str, (ROOT / "tests" / "emulated").glob(f"test_emulated_{operator}*.py")))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", str(jobs), "-p", "no:cacheprovider", *tests]
    package = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"GIRIH_KERNELS": str(kernels), "OMP_NUM_THREADS": "1", "PYTHONPATH": package}
    with subprocess.Popen(
        command,
        env=os.environ | variables,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return True
    if "CalledProcessError" in output:
        return None
    if process.returncode != 0 and " failed" not in output:  # no test ran
        raise RuntimeError(output)
    return process.returncode != 0


def is_detected(operator: str, file: Path, number: int, match: re.Match, kind: str, jobs: int) -> bool | None:
    """Whether a test fails with this mistake. None: the kernels do not compile."""
    with tempfile.TemporaryDirectory() as folder:
        kernels = Path(folder) / "kernels"
        shutil.copytree(ROOT / "kernels", kernels)
        mutated_file = kernels / file.relative_to(ROOT / "kernels")
        lines = mutated_file.read_text().splitlines(keepends=True)
        line = lines[number]
        lines[number] = line[: match.start()] + KINDS[kind][1](match[0]) + line[match.end() :]
        mutated_file.write_text("".join(lines))
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
    generator = random.Random(options.seed)
    known_operators = emulated_operators()
    operators = options.operators.split(",") if options.operators else known_operators
    if unknown := [name for name in operators if name not in known_operators]:
        parser.error(f"operator {unknown[0]}: unknown; expected one of {', '.join(known_operators)}")
    generator.shuffle(operators)
    for operator in operators[: options.count]:
        if fails(operator, ROOT / "kernels", options.jobs) is not False:
            raise SystemExit(f"{operator}: the tests fail without a mistake")
    detected_count = 0
    for i in range(options.count):
        operator, first = operators[i % len(operators)], i % len(KINDS)
        # The first kind of mistake that the kernels of the operator can have.
        kinds = [*KINDS][first:] + [*KINDS][:first]
        mistakes = ((kind, candidates(operator, kind)) for kind in kinds)
        kind, places = next((kind, places) for kind, places in mistakes if places)
        detected = None
        while detected is None:
            detected = is_detected(operator, *generator.choice(places), kind, options.jobs)
        detected_count += detected
        print("  detected\n" if detected else "  NOT DETECTED\n", flush=True)
    print(f"{detected_count} of {options.count} mistakes are detected, seed {options.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
