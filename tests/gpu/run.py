"""`make test-gpu`: all tests on a GPU, including compute-sanitizer, and the record of the green stages.

    make test-gpu [STAGES=kernels,memcheck] [PARTS=gsa,gla] [RECORD=file] [PYTHON=python3] [BUILD=no]

    cpp         the C++ tests
    cuda        the Python tests that run on a GPU, except the kernels' tests
    python      all other Python tests, which CI runs too; not recorded
    kernels     test_*_kernels.py, in several processes
    large       the kernels' tests that need tens of GiB, one after the other
    memcheck    compute-sanitizer over some calls of every kernel test, with exact allocation sizes
racecheck   races in shared memory, with kernels built for racecheck (-DGIRIH_RACECHECK=ON): random calls of
operators (tests/fuzz/right_calls.py), because their tests would take hours, and the tests of the
                other parts
    synccheck   compute-sanitizer's checks of barriers over the kernels' tests
    fuzz        10,000 random calls of every operator (tests/fuzz/calls.py)

A part is an operator with kernels. `record.json` in this folder holds, for one state of every part's kernels
and tests (`state_hash`), the green stages. The record accumulates stages over several commands. A change of a
part clears its stages, and a failed stage is removed from the record. PARTS restricts the run to these parts
and their kernel tests. test_gpu_record.py compares the record with the tree and requires the stages
`kernels`, `large` and `memcheck`; other green stages are recorded, but not required.

BUILD=no uses the libraries of python/girih/lib, and for racecheck the libraries of
build/racecheck/python/girih/lib.
"""

import argparse
import ast
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from source_text import source_text

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "gpu" / "record.json"
RACECHECK = ROOT / "build" / "racecheck"
TORCH_FOLDER = f"torch{'.'.join(version('torch').split('.')[:2])}"  # the libraries of a torch version

LIBRARIES = ROOT / "python" / "girih" / "lib"
SUPPORT = ROOT / "tests" / "support"
KERNEL_TESTS = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("tests/kernels/test_*_kernels.py"))
# A graph capture allows no permanent allocations, and long runs take too long under a sanitizer.
SANITIZER_SELECTION = "not large", "not graph and not hundred and not long and not 2_31"
RECORDED = ("cpp", "cuda", "kernels", "large", "memcheck", "racecheck", "synccheck", "fuzz")
REQUIRED = ("kernels", "large", "memcheck")
STAGES = (*RECORDED, "python")
JOBS = min(16, os.cpu_count())
CALLS = 10_000
RACECHECK_CALLS = 1_000  # maximum number of valid calls under racecheck


# ---- state of a part ---------------------------------------------------------------------------------------


def closure(files: list[Path], imported) -> set[Path]:
    """The files and everything that they include or import, transitively."""
    found, pending = set(), list(files)
    while pending:
        file = pending.pop()
        if file not in found:
            found.add(file)
            pending += [other for other in imported(file) if other.is_file()]
    return found


def includes(file: Path) -> list[Path]:
    names = re.findall(r'#include ["<]([\w./]+)[">]', file.read_text())
    folders = [file.parent, ROOT / "kernels", ROOT / "csrc" / "include"]
    found = [Path(os.path.normpath(folder / name)) for name in names for folder in folders]
    return [*found, file.with_suffix(".cu")]  # the definitions of a header


def module_beside(file: Path, name: str) -> Path:
    """The module that `import name` means in a test: from the test's folder, else from tests/support."""
    own = file.with_name(f"{name}.py")
    return own if own.is_file() else SUPPORT / own.name


def imports(file: Path) -> list[Path]:
    names = re.findall(r"^(?:from|import) (\w+)", file.read_text(), re.MULTILINE)
    return [module_beside(file, name) for name in names]


def parts() -> list[str]:
    """The operators with kernels."""
    return sorted(p.parent.name for p in (ROOT / "csrc" / "ops").glob("*/cuda.cpp"))


def tests_of(part: str) -> list[Path]:
    """The kernel test files that mention the operator."""
    return [p for p in map(ROOT.joinpath, KERNEL_TESTS) if re.search(rf"\b{part}\b", p.read_text())]


def test_file_names(chosen: list[str]) -> list[str]:
    """The kernel test files of these parts, as arguments of pytest."""
    files = {file for part in chosen for file in tests_of(part)}
    return [str(p.relative_to(ROOT)) for p in sorted(files)]


def has_kernels(folder: Path) -> bool:
    return any("__global__" in p.read_text() for p in folder.glob("*.cu*"))


def files_of_state(part: str) -> list[Path]:
    """The part's kernels, their callers and their tests: the inputs of the required stages."""
    kernels = ROOT / "kernels"
    found = closure([ROOT / "csrc" / "ops" / part / "cuda.cpp"], includes)
    while True:
        # A header declares launches that are defined in the same folder, so all sources of folders with
        # kernels count. In folders without kernels only included files count.
        folders = {p.parent for p in found if kernels in p.parents and has_kernels(p.parent)}
        near = {p for f in folders for p in f.iterdir() if p.suffix in (".cu", ".cuh", ".h", ".txt")}
        more = closure(sorted(near - found), includes) - found
        if not more:
            break
        found |= more
    build = (kernels / "CMakeLists.txt", kernels / "instance.cu.in", kernels / "exports.map")
    return sorted({*found, *build, *closure(tests_of(part), imports)})


@dataclass(frozen=True)
class Statement:
    """A top-level statement of a module: its text, the names that it defines (none for code that runs at
    import), and the names that it mentions."""

    text: str
    defines: frozenset[str]
    mentions: frozenset[str]


@functools.cache
def statements(text: str) -> list[Statement]:
    """The top-level statements of a module, without imports and docstring."""
    lines, found = text.splitlines(), []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        names = {name.id for target in targets if target for name in ast.walk(target) if hasattr(name, "id")}
        names |= {node.name} if hasattr(node, "name") else set()
        own = "\n".join(lines[first - 1 : node.end_lineno])
        found.append(Statement(own, frozenset(names), frozenset(re.findall(r"\w+", own))))
    return found


@functools.cache
def imported_names(text: str) -> list[tuple[str, str | None, str]]:
    """(module, name in the module, local name); the second is None for an imported module."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(alias.name, None, alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, alias.name, alias.asname or alias.name) for alias in node.names]
    return found


def used_statements(tests: list[Path]) -> dict[Path, list[Statement]]:
    """For every module that the tests import, the statements that the tests use, transitively. For a module
    that is passed as a whole, these are the definitions whose names the importing code mentions."""
    text_of = functools.cache(lambda file: file.read_bytes().decode())
    used: dict[Path, set[int]] = {}
    pending = [(test, frozenset(re.findall(r"\w+", text_of(test)))) for test in tests]
    while pending:
        file, mentions = pending.pop()
        requested = [(file, name) for name in mentions if file not in tests]
        for module, name, local_name in imported_names(text_of(file)):
            other = module_beside(file, module)
            if local_name in mentions and other.is_file():
                requested += [(other, n) for n in ([name] if name else mentions)]
        for other in {other for other, _ in requested}:
            names = {name for of, name in requested if of == other}
            for i, statement in enumerate(statements(text_of(other))):
                counts = not statement.defines or statement.defines & names
                if counts and i not in used.setdefault(other, set()):
                    used[other].add(i)
                    pending.append((other, statement.mentions))
    return {file: [statements(text_of(file))[i] for i in sorted(indices)] for file, indices in used.items()}


@functools.cache
def text_hash(file_name: str, text: str) -> str:
    return f"{file_name} {hashlib.sha256(source_text(file_name, text).encode()).hexdigest()}"


def hashes_of_state(part: str) -> list[str]:
    """Hashes of all files: of modules imported by tests only the used statements, of other files the whole
    text."""
    tests = tests_of(part)
    modules = closure(tests, imports) - set(tests)
    used = [
        text_hash(file.name, "\n".join(s.text for s in own)) for file, own in used_statements(tests).items()
    ]
    whole = [text_hash(f.name, f.read_bytes().decode()) for f in files_of_state(part) if f not in modules]
    return sorted(used + whole)


def state_hash(part: str) -> str:
    """The hash does not depend on folders, comments, docstrings and formatting."""
    return hashlib.sha256("\n".join(hashes_of_state(part)).encode()).hexdigest()


def updated_record(record: dict, states: dict[str, str], results: dict[str, dict]) -> dict:
    """The record with the results of these stages for parts in these states: green stages are added, red ones
    removed."""
    record = dict(record)
    for part, state in states.items():
        previous = record.get(part, {})
        stages = dict(previous.get("stages", {})) if previous.get("state") == state else {}
        for stage, result in results.items():
            stages.pop(stage, None)
            if result["green"]:
                stages[stage] = {name: x for name, x in result.items() if name != "green"}
        record[part] = {"state": state, "stages": {s: stages[s] for s in RECORDED if s in stages}}
    return record


def complaint(record: dict) -> str | None:
    """Why the record is not valid for the tree, or None."""
    changed = [part for part in parts() if record.get(part, {}).get("state") != state_hash(part)]
    if changed:
        return f"{', '.join(changed)}: changed since the last green run on a GPU: run make test-gpu"
    for stage in REQUIRED:
        if missing := [part for part in parts() if stage not in record[part]["stages"]]:
            how = f"STAGES={stage} PARTS={','.join(missing)}"
            return f"not green on a GPU in this state: run make test-gpu {how}"
    return None


# ---- stages ------------------------------------------------------------------------------------------------


class Runner:
    def __init__(self, limit: int, build: bool, chosen: list[str]):
        self.limit, self.build, self.parts = limit, build, chosen
        self.kernel_tests = test_file_names(chosen)
        self.own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": self.path(ROOT / "python")}

    def path(self, package: Path) -> str:
        return os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(self, command: list[str], **own: str) -> tuple[int, str]:
        """Prints the output while the command runs; returns the exit code (124 after a timeout) and the
        output."""
        print(f"\n$ {' '.join(command)}", flush=True)
        limited = ["timeout", "--kill-after=10", str(self.limit), *command]
        environment = {**os.environ, **self.own, **own}
        child = subprocess.Popen(
            limited, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        lines = []
        for line in child.stdout:
            lines.append(line)
            print(line, end="", flush=True)
        return child.wait(), "".join(lines)

    def pytest(self, *arguments: str, before: tuple[str, ...] = (), jobs: int, **own: str) -> dict:
        command = [*before, sys.executable, "-m", "pytest", "-q", "-n", str(jobs), *arguments]
        code, printed = self.run(command, **own)
        counts = {
            n: int(m[1]) if (m := re.search(rf"(\d+) {n}", printed)) else 0 for n in ("passed", "failed")
        }
        counts["failed"] += sum(int(n) for n in re.findall(r"(\d+) errors? in", printed))
        return {"green": code == 0 and counts["passed"] > 0, **counts, "code": code, "printed": printed}

    def sanitizer(self, before: tuple[str, ...], each: int, tests: list[str], **own: str) -> dict:
        """before: the command prefix of sanitizer_command(). each: number of parametrisations per test.
        Checks all launches of girih's kernels. Runs in one process: several processes on a card are ten times
        slower under the tool."""
        marks, names = SANITIZER_SELECTION
        chosen = ("--each", str(each), "-m", marks, "-k", names, *tests)
        return with_tool_errors(self.pytest(*chosen, before=before, jobs=0, GIRIH_SANITIZED="1", **own))

    def cpp(self) -> dict:
        program = ROOT / "build" / TORCH_FOLDER / "tests" / "cpp" / "girih_tests"
        if not program.exists():
            return {"green": False, "passed": 0, "failed": 1, "why": f"no {program.relative_to(ROOT)}"}
        code, printed = self.run([str(program)])
        passed = re.search(r"in (\d+) test cases|(\d+) passed", printed)
        count = int(passed[1] or passed[2]) if passed else 0
        return {"green": code == 0, "passed": count, "failed": int(code != 0), "code": code}

    def cuda(self) -> dict:
        return self.other_tests("cuda")

    def python(self) -> dict:
        return self.other_tests("not cuda")

    def other_tests(self, names: str) -> dict:
        """Excludes test_gpu_record.py, because this run writes the record, and tests of girih._C if the
        extension is not built for this Python."""
        left_out = [*KERNEL_TESTS, "tests/gpu/test_gpu_record.py"]
        if not list(LIBRARIES.glob(f"{TORCH_FOLDER}/_C*" + sysconfig.get_config_var("EXT_SUFFIX"))):
            tests = sorted(ROOT.glob("tests/*/test_*.py"))
            left_out += [str(p.relative_to(ROOT)) for p in tests if re.search(r"\b_C\b|fuzz", p.read_text())]
            print(f"girih._C is not built for this Python, left out: {' '.join(left_out)}")
        chosen = (*(f"--ignore={f}" for f in left_out), "-k", names, "tests")
        return self.pytest(*chosen, jobs=JOBS)

    def kernels(self) -> dict:
        return self.pytest("-m", "not large", *self.kernel_tests, jobs=JOBS)

    def large(self) -> dict:
        result = self.pytest("-m", "large", *self.kernel_tests, jobs=0)
        if result["code"] == 5:  # no tests selected
            return result | {"green": True}
        if result["code"] == 0 and not result["passed"]:
            result["why"] = "the card has too little memory: all were skipped"
        return result

    def memcheck(self) -> dict:
        return self.sanitizer(
            sanitizer_command("memcheck"), 2, self.kernel_tests, PYTORCH_NO_CUDA_MEMORY_CACHING="1"
        )

    def synccheck(self) -> dict:
        # Barriers per launch; with the default, launches of many blocks end in an error.
        before = sanitizer_command("synccheck", "--num-cuda-barriers", "8192")
        return self.sanitizer(before, 1, self.kernel_tests)

    def racecheck(self) -> dict:
        package = RACECHECK / "python" / "girih"
        if self.build:
            build_for_racecheck(package)
        own = {"PYTHONPATH": self.path(package.parent)}
        operators = [part for part in self.parts if (ROOT / "csrc" / "ops" / part / "cpu.cpp").exists()]
        others = [part for part in self.parts if part not in operators]
        results = [self.right_calls(operators, **own)] if operators else []
        if others:
            results.append(self.sanitizer(sanitizer_command("racecheck"), 1, test_file_names(others), **own))
        sums = {name: sum(result[name] for result in results) for name in ("passed", "failed")}
        return sums | {
            "green": all(result["green"] for result in results),
            "code": max(result["code"] for result in results),
        }

    def right_calls(self, operators: list[str], **own: str) -> dict:
        program = (sys.executable, "tests/fuzz/right_calls.py", f"--operators={','.join(operators)}")
        options = (f"--count={RACECHECK_CALLS}", f"--seconds={0.8 * self.limit:.0f}")
        code, printed = self.run([*sanitizer_command("racecheck"), *program, *options], **own)
        counts = re.search(r"^(\d+) calls of .*: (?:(\d+) are wrong|all well)$", printed, re.MULTILINE)
        called, wrong = (int(counts[1]), int(counts[2] or 0)) if counts else (0, 0)
        result = {
            "green": code == 0 and called > wrong,
            "passed": called - wrong,
            "failed": wrong,
            "code": code,
        }
        return with_tool_errors(result | {"printed": printed})

    def fuzz(self) -> dict:
        """Every process has a CUDA context, so half as many processes as for tests."""
        options = ("--device=cuda", f"--count={CALLS}", "--seed=0", f"--jobs={max(1, JOBS // 2)}")
        code, printed = self.run([sys.executable, "tests/fuzz/calls.py", *options])
        wrong = len(re.findall(r"^call \d+:", printed, re.MULTILINE))
        green = code == 0 and f"{CALLS} calls on cuda: all well" in printed
        return {
            "green": green,
            "passed": CALLS - wrong if green or wrong else 0,
            "failed": wrong,
            "code": code,
        }


def sanitizer_command(tool: str, *options: str) -> tuple[str, ...]:
    """The command prefix that runs a command under the tool."""
    before = ("compute-sanitizer", "--tool", tool, "--target-processes", "all")
    before += ("--report-api-errors", "no", "--print-limit", "100", *options)
    # With a filter on kernels, racecheck breaks launches of clusters.
    return before if tool == "racecheck" else (*before, "--kernel-name", "kns=girih")


def with_tool_errors(result: dict) -> dict:
    """Adds the errors that the tool reports in one summary per process. Races within PyTorch's kernels, which
    racecheck also watches, do not count; races beyond its print limit count."""
    found = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", result["printed"])
    races = re.findall(r"Error: Race reported between \w+ access at (.*)", result["printed"])
    others = sum("girih::" not in kernel for kernel in races)
    errors = max(0, sum(int(a or b) for a, b in found) - others)
    green = result["green"] and bool(found) and not errors
    return result | {"green": green, "failed": result["failed"] + errors}


def build_for_racecheck(package: Path) -> None:
    """Builds kernels that racecheck can follow, in a separate package, for this card only."""
    import torch

    shutil.copytree(
        ROOT / "python" / "girih",
        package,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("libgirih_kernels.so"),
    )
    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}{minor}{'a' * (major >= 9)}-real"
    options = ["-DGIRIH_RACECHECK=ON", f"-DCMAKE_CUDA_ARCHITECTURES={architecture}", "-G", "Ninja"]
    options += [f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={package / 'lib'}"]
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for command in (
        ["cmake", "-S", str(ROOT / "kernels"), "-B", str(RACECHECK), *options],
        ["cmake", "--build", str(RACECHECK)],
    ):
        subprocess.run(command, check=True, env={**os.environ, "PATH": tools})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", default=",".join(STAGES), help="names separated by commas")
    parser.add_argument("--parts", default=",".join(parts()), help="operators separated by commas")
    parser.add_argument("--record", type=Path, default=RECORD, help="file of the record")
    parser.add_argument("--limit", type=int, default=1800, help="maximum seconds per command")
    parser.add_argument("--build", choices=["yes", "no"], default="yes")
    options = parser.parse_args()
    stages = options.stages.split(",")
    if unknown := [stage for stage in stages if stage not in STAGES]:
        print(f"test-gpu: stage {unknown[0]}: unknown; expected one of {', '.join(STAGES)}", file=sys.stderr)
        return 2
    chosen = options.parts.split(",")
    if unknown := [part for part in chosen if part not in parts()]:
        print(f"test-gpu: part {unknown[0]}: unknown; expected one of {', '.join(parts())}", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print("test-gpu: no CUDA device here; it runs on a GPU alone", file=sys.stderr)
        return 2
    runner, results = Runner(options.limit, options.build == "yes", chosen), {}
    machine = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(date.today())}
    for stage in stages:
        start_time, states = time.monotonic(), {part: state_hash(part) for part in chosen}
        try:
            result = getattr(runner, stage)()
        except (OSError, subprocess.CalledProcessError) as error:
            result = {"green": False, "passed": 0, "failed": 1, "why": str(error)}
        result["seconds"] = round(time.monotonic() - start_time)
        results[stage] = result
        known = {n: result[n] for n in ("green", "passed", "failed", "seconds")} | machine
        # Written after every stage, so that an interrupted command keeps its finished stages.
        previous = options.record if options.record.exists() else RECORD
        record = json.loads(previous.read_text()) if previous.exists() else {}
        options.record.write_text(json.dumps(updated_record(record, states, {stage: known}), indent=1) + "\n")
    print(f"\n{'stage':<12}{'passed':>8}{'failed':>8}{'seconds':>9}")
    for stage, result in results.items():
        why = result.get("why") or ("ran out of time" if result.get("code") == 124 else "")
        red = "" if result["green"] else f"  RED {why}"
        print(f"{stage:<12}{result['passed']:>8}{result['failed']:>8}{result['seconds']:>9}{red}")
    reason = complaint(json.loads(options.record.read_text()))
    print(reason or f"every stage is green in this state: {options.record}")
    return int(not all(result["green"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
