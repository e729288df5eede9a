"""record.json, written by `make test-gpu`, matches the kernels and their tests."""

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


def test_states_cover_kernels_callers_and_tests():
    files = {
        part: {p.relative_to(gpu.ROOT).as_posix() for p in gpu.files_of_state(part)} for part in gpu.parts()
    }
    found = [p for kind in ("*.cu*", "instances.txt") for p in (gpu.ROOT / "kernels").rglob(kind)]
    sources = {p.relative_to(gpu.ROOT).as_posix() for p in found}
    assert "kernels/gsa/instances.txt" in sources and "kernels/instance.cu.in" in sources
    assert sources <= set().union(*files.values())
    assert set(gpu.KERNEL_TESTS) <= set().union(*files.values())
    assert {"csrc/ops/gsa/cuda.cpp", "csrc/ops/gated/gated_kernels.h", "csrc/ops/gsa/problem.h"} <= files[
        "gsa"
    ]
    assert {
        "tests/kernels/test_gsa_kernels.py",
        "tests/support/kernel_accuracy.py",
        "tests/support/recurrences.py",
    } <= files["gsa"]
    assert "csrc/ops/gsa/cpu.cpp" not in files["gsa"] and "kernels/trellis/scan.cuh" not in files["gsa"]
    assert {"kernels/trellis/maps.cuh", "kernels/time/chunks.h"} <= files["trellis"]
    assert "kernels/tile/matrix.h" in files["gsa"] and "kernels/tile/tf32.h" not in files["gsa"]


def states():
    return {part: gpu.state_hash(part) for part in gpu.parts()}


def add_to(monkeypatch, file, text):
    """Appends this text to the file, for readers of bytes."""
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + text * (path == file))


@pytest.mark.parametrize(
    "changed, parts",
    [
        ("kernels/gsa/scan.cu", {"gsa", "gla", "trellis", "ttt"}),
        ("kernels/short_conv/step.cu", {"short_conv"}),
        ("kernels/fp32/abc.cu", {"gsa", "gla", "trellis", "ttt"}),
        ("kernels/gsa/instances.txt", {"gsa", "gla", "trellis", "ttt"}),
        ("kernels/instance.cu.in", None),
        ("kernels/tile/tf32.h", {"cat_attention", "delta_product", "trellis", "ttt"}),
        ("csrc/ops/arguments/aligned_rows.h", None),
        ("tests/support/padding.py", None),
        ("tests/kernels/test_short_conv_kernels.py", {"short_conv"}),
    ],
)
def test_a_changed_file_makes_the_record_stale(changed, parts, monkeypatch):
    record = gpu.updated_record({}, states(), dict.fromkeys(gpu.RECORDED, GREEN))
    assert gpu.complaint(record) is None
    add_to(monkeypatch, gpu.ROOT / changed, b"\nprint(1)\n")
    complaint = gpu.complaint(record)
    assert complaint.endswith(": changed since the last green run on a GPU: run make test-gpu")
    assert set(complaint.split(":")[0].split(", ")) == (set(gpu.parts()) if parts is None else parts)


@pytest.mark.parametrize(
    "changed, text",
    [
        ("kernels/gsa/scan.cu", b"\n// word\n/* and\n another */\n\n"),
        ("csrc/ops/gsa/problem.h", b"  // return 1\n"),
        ("kernels/instance.cu.in", b"// word"),
        ("tests/kernels/test_gsa_kernels.py", b"\n\n# changed = 1\n"),
        ("tests/support/recurrences.py", b"  # word\n"),
    ],
)
def test_comments_do_not_change_the_state(changed, text, monkeypatch):
    before = states()
    add_to(monkeypatch, gpu.ROOT / changed, text)
    assert states() == before


CPP = 'asm("x // y" : : "r"(a));  // why\nint b = 1\'000;\n#define F(x) \\\n  x'
PY = 'from a import b\n\n\ndef f(x):\n    """What."""\n    return "# 1" + x  # why\n'


@pytest.mark.parametrize(
    "name, text, same",
    [
        (
            "f.cuh",
            CPP,
            '/* a\n */ asm( "x // y" : : "r"( a ) );\n\nint b\n  = 1\'000;\n#define F(x) x  // b\n',
        ),
        (
            "f.h",
            '#include "a/b.h"\n#include <girih/ops.h>',
            '#include "b.h"\n#include <girih/ops.h>  // a',
        ),
        ("f.h", "char q = '\"';  // say \"a\nint b;", "char q = '\"'; int b;"),
        ("f.cpp", 'auto s = R"x(// a)")x";', 'auto  s=R"x(// a)")x" ; // b'),
        ("f.py", PY, PY.replace('"""What."""', "'''Other\n\n    words.'''\n")),
        ("f.py", "from girih.nn.a import b", "from girih.nn.layers.c import b  # d"),
        ("f.py", PY, 'from a import b\ndef f(x):\n    # why\n    return  "# 1"+x\n'),
    ],
)
def test_comments_docstrings_and_formatting_do_not_count(name, text, same):
    assert gpu.source_text(name, text) == gpu.source_text(name, same)


@pytest.mark.parametrize(
    "name, text, other",
    [
        ("f.cuh", CPP, CPP.replace("// y", "")),
        ("f.cuh", CPP, CPP.replace("x // y", "x  // y")),
        ("f.cuh", CPP, CPP.replace("000", "001")),
        ("f.cuh", CPP, CPP.replace("int b", "int c")),
        ("f.cuh", CPP, "#include <cmath>\n" + CPP),
        ("f.cuh", CPP, '#include "a.h"\n' + CPP),
        ("f.cuh", '#include "a.h"', '#include "b.h"'),
        ("f.cuh", "--x", "- -x"),
        ("f.cuh", "x++ + y", "x + ++y"),
        ("f.cuh", "#define F(x) x", "#define F (x) x"),
        ("f.cuh", 'L"a"', 'L "a"'),
        ("f.cuh", 'auto q = L\'"\'; asm("a // b");', 'auto q = L\'"\'; asm("a // c");'),
        ("f.cuh", 'R"--(a // b)--"', 'R"--(a // c)--"'),
        ("f.cuh", "int a;\n#define A\nint b;", "#define A\nint a; int b;"),
        ("f.h", "char q = '\"';  // say \"a\nint b;", "char q = '\"';"),
        ("f.cpp", 'auto s = R"x(// a)")x";', 'auto s = R"x(// b)")x";'),
        ("f.py", PY, PY.replace("import b", "import c")),
        ("f.py", PY, PY.replace("# 1", "# 2")),
        ("f.py", "if a:\n    b()\nc()\n", "if a:\n    b()\n    c()\n"),
        ("f.py", PY, PY.replace("from a", "from c")),
        ("f.py", '"a"; x = 1', '"a"; x = 2'),
        ("f.py", 'def f(a): "b"', 'def g(a): "b"'),
        ("instances.txt", "a | b", "a |  b"),
    ],
)
def test_code_counts(name, text, other):
    assert gpu.source_text(name, text) != gpu.source_text(name, other)


def test_swapped_files_change_the_state(monkeypatch):
    before, read = states(), Path.read_bytes
    scan, step = (gpu.ROOT / "kernels" / "gsa" / name for name in ("scan.cu", "step.cu"))
    other = {scan: step, step: scan}
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(other.get(path, path)))
    assert {part for part, state in states().items() if state != before[part]} == {
        "gsa",
        "gla",
        "trellis",
        "ttt",
    }


def test_unused_definitions_do_not_count(monkeypatch):
    before, read = states(), Path.read_bytes
    file = gpu.ROOT / "tests" / "support" / "recurrences.py"

    def with_line(line):
        monkeypatch.setattr(Path, "read_bytes", lambda p: read(p) + line * (p == file))
        return {part for part, state in states().items() if state != before[part]}

    assert not with_line(b"\n\ndef no_operator():\n    return lattice\n")
    changed = with_line(b"\n\ndef lattice():\n    return 0\n")
    assert "lattice" in changed and "gsa" not in changed
    assert {"gsa", "lattice"} <= with_line(b"\n\nprint(0)\n")


def test_stages_accumulate_while_the_state_is_unchanged():
    first, second = gpu.RECORDED[:3], gpu.RECORDED[3:]
    state = states()
    everything = ",".join(gpu.parts())
    record = gpu.updated_record({}, state, dict.fromkeys(first, GREEN))
    assert gpu.complaint(record).endswith(f"STAGES=large PARTS={everything}")
    whole = gpu.updated_record(record, state, dict.fromkeys(second, GREEN))
    assert gpu.complaint(whole) is None and list(whole["gsa"]["stages"]) == list(gpu.RECORDED)
    assert gpu.complaint(gpu.updated_record(whole, state, {"memcheck": RED})).endswith(
        f"STAGES=memcheck PARTS={everything}"
    )
    assert "racecheck" not in gpu.updated_record(whole, state, {"racecheck": RED})["gsa"]["stages"]
    other = gpu.updated_record(whole, {"gla": "another"}, {"cpp": GREEN})
    assert list(other["gla"]["stages"]) == ["cpp"] and gpu.complaint(other).startswith("gla: changed")
    assert other["gsa"] == whole["gsa"]


@pytest.mark.parametrize(
    "code, printed, green, counts",
    [
        (0, "10000 calls on cuda: all well\n", True, (10_000, 0)),
        (
            1,
            "call 7: gla of {}: wrong\ncall 9: died\n10000 calls on cuda: some are wrong\n",
            False,
            (9_998, 2),
        ),
        (124, "", False, (0, 0)),
    ],
)
def test_fuzz_is_recorded_but_not_required(code, printed, green, counts, monkeypatch):
    commands = []
    monkeypatch.setattr(gpu.Runner, "run", lambda self, command: commands.append(command) or (code, printed))
    result = gpu.Runner(1, False, []).fuzz()
    assert (result["green"], result["passed"], result["failed"]) == (green, *counts)
    assert (
        (gpu.ROOT / commands[0][1]).exists() and "--device=cuda" in commands[0] and "--seed=0" in commands[0]
    )
    assert "fuzz" in gpu.RECORDED and "fuzz" not in gpu.REQUIRED


RACES = "40 calls of gsa on cuda: all well\n== RACECHECK SUMMARY: {} hazards displayed\n"


def race(kernel):
    read, written = f"Read access at {kernel}+0xa0", f"Write access at {kernel}+0xb0 [8 hazards]"
    return f"== Error: Race reported between {read}\n==     and {written}\n== \n"


@pytest.mark.parametrize(
    "printed, green, counts",
    [
        ("40 calls of gsa on cuda: all well\n== RACECHECK SUMMARY: 0 hazards displayed\n", True, (40, 0)),
        ("40 calls of gsa on cuda: all well\n== RACECHECK SUMMARY: 2 hazards displayed\n", False, (40, 2)),
        (race("fmha(Params)") + RACES.format(1), True, (40, 0)),  # a race of PyTorch
        (race("fmha(Params)") + race("void girih::kernels::f<int>()") + RACES.format(2), False, (40, 1)),
        ("40 calls of gsa on cuda: all well\n", False, (40, 0)),  # no summary: the tool did not run
        ("40 calls of gsa on cuda: 3 are wrong\n== RACECHECK SUMMARY: 0 hazards\n", False, (37, 3)),
        ("", False, (0, 0)),
        (race("fmha(Params)"), False, (0, 0)),  # no summary: the run was interrupted
    ],
)
def test_racecheck_runs_valid_calls(printed, green, counts, monkeypatch):
    commands = []
    code = int("wrong" in printed or not printed)
    monkeypatch.setattr(
        gpu.Runner, "run", lambda self, command, **own: commands.append(command) or (code, printed)
    )
    result = gpu.Runner(100, False, ["gsa"]).racecheck()
    assert (result["green"], result["passed"], result["failed"]) == (green, *counts)
    (command,) = commands
    assert command[:3] == ["compute-sanitizer", "--tool", "racecheck"]
    program = next(i for i, word in enumerate(command) if word.endswith(".py"))
    assert (gpu.ROOT / command[program]).exists() and "--operators=gsa" in command


def test_racecheck_runs_the_tests_of_other_parts(monkeypatch):
    commands = []
    output = "5 calls of gsa on cuda: all well\n5 passed\n== RACECHECK SUMMARY: 0 hazards\n"
    monkeypatch.setattr(
        gpu.Runner, "run", lambda self, command, **own: commands.append(command) or (0, output)
    )
    result = gpu.Runner(100, False, ["gsa", "gate_activations"]).racecheck()
    assert result["green"] and result["passed"] == 10
    call_command, test_command = commands
    assert (
        "--operators=gsa" in call_command and "tests/kernels/test_gate_activations_kernels.py" in test_command
    )
    assert "tests/kernels/test_gsa_kernels.py" not in test_command
