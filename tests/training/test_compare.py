import json
import statistics
import subprocess
import sys
from dataclasses import replace

import pytest
from girih import compare
from girih.comparison import cell, tasks
from girih.training.folder import LOCK
from girih.training.recipe import SIZES

MIXERS = ["gsa", "attention"]
CELLS = [f"{task}-{mixer}-tiny-3-0.003.json" for task in ("text", "mqar") for mixer in MIXERS]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "words.txt"
    file.write_text(" ".join(str(i * i) for i in range(4000)))
    return file


@pytest.fixture
def run(words, tmp_path, handlers):
    """Compares two tiny mixers on both tasks. Options are added at the end."""

    def run(*options: str) -> int:
        fixed = ["--size", "tiny", "--steps", "3", "--mixers", ",".join(MIXERS), "--corpus", str(words)]
        fixed += ["--rates", "0.003"]
        return compare.main([*fixed, "--folder", str(tmp_path), *options])

    return run


def test_every_cell_is_a_file_and_a_rerun_does_only_what_is_missing(run, tmp_path, capsys):
    assert run() == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*CELLS, "table.md", "figure.png"])
    assert (tmp_path / "figure.png").read_bytes()[1:4] == b"PNG"
    table = (tmp_path / "table.md").read_text()
    assert table in capsys.readouterr().out
    for part in table.split("\n\n")[1::2]:
        assert [line.split("|")[1].strip() for line in part.splitlines()[2:]] == sorted(MIXERS)

    (tmp_path / CELLS[1]).unlink()
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in CELLS if name != CELLS[1]}
    assert run() == 0
    assert capsys.readouterr().out.count("there already") == 3
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in before} == before
    assert (tmp_path / CELLS[1]).exists()


def test_a_mixer_with_options_is_a_row_beside_the_one_without(run, tmp_path):
    assert run("--mixers", "gsa") == 0
    assert run("--mixers", "gsa", "--options", "feature=relu  num_slots=4") == 0
    label = "gsa feature=relu num_slots=4"
    found = json.loads((tmp_path / f"text-{label.replace(' ', ',')}-tiny-3-0.003.json").read_text())
    plain = json.loads((tmp_path / CELLS[0]).read_text())
    assert found["mixer"] == label and found["loss"] != plain["loss"]
    for part in (tmp_path / "table.md").read_text().split("\n\n")[1::2]:
        assert [line.split("|")[1].strip() for line in part.splitlines()[2:]] == ["gsa", label]
    assert run("--tasks", "text", "--mixers", "attention") == 0  # rows of earlier runs stay
    assert label in (tmp_path / "table.md").read_text()


def test_context_applies_to_text_and_keeps_the_tokens_of_a_step(run, tmp_path, capsys):
    assert run("--tasks", "text", "--mixers", "gsa", "--context", "128") == 0
    assert run("--tasks", "text", "--mixers", "gsa") == 0
    plain, other = (
        json.loads((tmp_path / f"text-gsa-tiny{c}-3-0.003.json").read_text()) for c in ("", "-128")
    )
    settings, size = other["settings"], SIZES["tiny"]
    assert plain["settings"]["context"] == size.context
    assert settings["context"] == 128 and settings["batch"] * 128 == size.batch * size.context
    for wrong, message in (
        (("--context", "100"), "context 100: expected a divisor of the 512 tokens of a step"),
        (("--tasks", "mqar", "--context", "64"), "context 64: expected none"),
        (("--options", "chunk=1"), "chunk is 1, which mixer gsa does not read"),
        (("--options", "chonk=1"), "chonk is not a field of a configuration; did you mean chunk?"),
    ):
        assert run("--mixers", "gsa", *wrong) == 2
        assert message in capsys.readouterr().err


def test_mixers_are_compared_at_equal_size_and_on_equal_data(run, tmp_path):
    assert run() == 0
    for task, parameters in (("text", SIZES["tiny"].parameters), ("mqar", tasks.MQAR["tiny"].parameters)):
        cells = [json.loads((tmp_path / name).read_text()) for name in CELLS if name.startswith(task)]
        assert all(abs(c["parameters"] / parameters - 1) < 0.02 for c in cells)
        assert {c["steps"] for c in cells} == {3}
        assert cells[0]["settings"] == cells[1]["settings"]


def rows_of(table: str) -> list[list[str]]:
    """The cells of the table's rows, without the headings."""
    lines = (line for line in table.splitlines() if line.startswith("| "))
    cells = [[part.strip() for part in line.strip("| ").split("|")] for line in lines]
    return [row for row in cells if row[0] not in ("mixer", "---")]


def test_seeds_are_files_of_their_own_and_the_table_has_mean_and_spread(run, tmp_path, capsys):
    gsa_options = ("--tasks", "text", "--mixers", "gsa")
    assert run(*gsa_options) == 0
    assert run(*gsa_options, "--seeds", "3") == 0
    out = capsys.readouterr().out
    assert out.count("text gsa 0.003: there already") == 1 and "text gsa 0.003 seed 2: 3 steps" in out
    files = [tmp_path / CELLS[0].replace(".json", end) for end in (".json", "-seed1.json", "-seed2.json")]
    results = [json.loads(file.read_text()) for file in files]
    assert [result["settings"]["seed"] for result in results] == [0, 1, 2]
    bits = [result["bits_per_byte"] for result in results]
    assert len(set(bits)) == 3
    expected = f"{statistics.mean(bits):.3f} ± {statistics.stdev(bits):.3f}"
    table = (tmp_path / "table.md").read_text()
    assert "standard deviation over 3 seeds" in table
    assert rows_of(table) == [["gsa", f"{results[0]['parameters']:,}", expected, expected]]

    assert run("--tasks", "text", "--mixers", "attention", "--seeds", "1,2") == 0  # only these seeds
    two, one = rows_of((tmp_path / "table.md").read_text())[::-1]
    assert two[2] == f"{statistics.mean(bits[1:]):.3f} ± {statistics.stdev(bits[1:]):.3f}"
    assert one[0] == "attention"
    assert run("--tasks", "text", "--mixers", "lattice", "--seed", "1") == 0
    assert run("--tasks", "text", "--mixers", "gsa", "--seeds", "1,7") == 0
    names = [row[0] for row in rows_of((tmp_path / "table.md").read_text())]
    assert names == ["attention (1 of 2 seeds)", "gsa", "lattice (1 of 2 seeds)"]


def test_cells_of_another_corpus_are_left_out_of_the_table_and_named(run, words, tmp_path, capsys):
    assert run() == 0
    other = tmp_path / "other.txt"
    other.write_text(words.read_text() + "one line more")
    capsys.readouterr()
    assert run("--corpus", str(other), "--mixers", "gsa") == 0
    printed = capsys.readouterr()
    assert "text gsa 0.003: 3 steps, again: the finished one has another corpus" in printed.out
    assert printed.err.splitlines() == [
        "girih.compare: left out of the table: text attention 0.003 (another corpus)"
    ]
    (line,) = (s for s in (tmp_path / "table.md").read_text().splitlines() if s.startswith("| attention"))
    recall = json.loads((tmp_path / CELLS[3]).read_text())
    assert line.split("|")[2].strip() == f"{recall['parameters']:,}"  # parameters of the recall model only


def test_a_damaged_cell_is_refused_in_one_line_before_any_is_trained(run, tmp_path, capsys):
    """The file is truncated, or lacks settings or shown values. A file that was not requested
    is checked too."""
    assert run("--mixers", "gsa", "--tasks", "mqar") == 0
    cell = json.loads((tmp_path / CELLS[2]).read_text())
    capsys.readouterr()
    for damage in (
        '{"task": "te',
        "{}",
        json.dumps(cell | {"settings": 1}),
        json.dumps(cell | {"parameters": None}),
        json.dumps(cell | {"accuracy": {}}),
        json.dumps(cell | {"diverged": None}),
    ):
        (tmp_path / CELLS[2]).write_text(damage)
        assert run("--mixers", "attention", "--tasks", "text") == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert line.startswith(f"girih.compare: file {tmp_path / CELLS[2]}: it is damaged")


def test_a_damaged_cell_of_text_is_refused_in_one_line(run, tmp_path, capsys):
    (tmp_path / CELLS[0]).write_text('{"task": "te')
    assert run() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"girih.compare: file {tmp_path / CELLS[0]}: it is damaged")


def test_folder_that_is_a_file_is_refused_in_one_line(run, words, capsys):
    assert run("--folder", str(words)) == 2
    assert capsys.readouterr().err == f"girih.compare: folder {words}: File exists\n"


def test_a_cell_that_fails_is_reported_and_the_others_are_trained(run, tmp_path, capsys, monkeypatch):
    original = compare.run_cell

    def run_or_fail(task, mixer, *rest):
        if mixer == "gsa":
            raise FloatingPointError("the loss is not finite")
        return original(task, mixer, *rest)

    monkeypatch.setattr(compare, "run_cell", run_or_fail)
    assert run() == 1
    assert "failed: text gsa 0.003: FloatingPointError: the loss is not finite" in capsys.readouterr().err
    assert [name for name in CELLS if (tmp_path / name).exists()] == [CELLS[1], CELLS[3]]
    assert "attention" in (tmp_path / "table.md").read_text()


def test_divergence_is_a_result_and_a_failure_if_all_rates_diverge(run, tmp_path, capsys, monkeypatch):
    original = compare.run_cell

    def run_cell(task, mixer, recipe, *rest):
        if recipe.learning_rate == 0.5:  # the loss is NaN after the first step
            recipe = replace(recipe, learning_rate=1e30)
        return original(task, mixer, recipe, *rest)

    monkeypatch.setattr(compare, "run_cell", run_cell)
    gsa_options = ("--tasks", "text", "--mixers", "gsa")
    assert run(*gsa_options, "--rates", "0.5") == 1
    assert capsys.readouterr().err.splitlines()[-1] == "girih.compare: failed: text gsa: diverged"
    assert json.loads((tmp_path / "text-gsa-tiny-3-0.5.json").read_text())["diverged"]
    assert run(*gsa_options, "--rates", "0.5,0.003") == 0
    assert "text gsa 0.5: there already" in capsys.readouterr().out
    (line,) = (s for s in (tmp_path / "table.md").read_text().splitlines() if s.startswith("| gsa"))
    _, _, best, *grid = (part.strip() for part in line.strip("| ").split("|"))
    assert grid == [best, "diverged"]


def test_default_rates_are_a_third_one_and_three_times_the_recipes():
    assert cell.rates_of(tasks.TASKS["text"].recipe("10m", None)) == (0.001, 0.003, 0.009)


def test_training_ends_when_all_pairs_are_recalled(run, tmp_path, monkeypatch):
    """Accuracy is checked every tenth step, on rows that are neither trained on nor measured at the end."""
    seen = []

    def accuracy(model, data, batch):
        seen.append(data.input_ids)
        return {2: 1.0, 4: 0.98 if len(seen) < 2 else 0.99}

    monkeypatch.setattr(tasks, "accuracy", accuracy)
    gsa_options = ("--tasks", "mqar", "--mixers", "gsa", "--steps", "100")
    assert run(*gsa_options) == 0
    result = json.loads((tmp_path / "mqar-gsa-tiny-100-0.003.json").read_text())
    assert result["steps"] == 20 and len(seen) == 3
    assert seen[0] is seen[1] and not set(map(tuple, seen[0].tolist())) & set(map(tuple, seen[2].tolist()))


# Each task of rows, at a size that takes seconds.
SMALL = "head_dim=8 context=32 layers=1 batch=4 rows=8 check=2 held_out=8"
SETTINGS = {
    "mqar_512": f"pairs=2 vocab_size=32 {SMALL}",
    "mqar_256": f"pairs=2,4 vocab_size=32 {SMALL}",
    "parity": f"lengths=32,64 {SMALL}",
    "s3": f"lengths=16,48 {SMALL}",
    "s5": f"lengths=40 {SMALL}",
    "needle": f"lengths=16,64 vocab_size=32 {SMALL}",
}
COLUMNS = {
    "mqar_512": ["2 pairs"],
    "mqar_256": ["2 pairs", "4 pairs"],
    "parity": ["32 tokens", "64 tokens"],
    "s3": ["16 tokens", "48 tokens"],
    "s5": ["40 tokens"],
    "needle": ["16 tokens", "64 tokens", *(f"depth {depth}" for depth in tasks.NeedleTask.DEPTHS)],
}


def test_every_task_has_a_setting_here():
    assert SETTINGS.keys() == COLUMNS.keys() == tasks.TASKS.keys() - {"text", "mqar"}


@pytest.fixture
def run_small(words, tmp_path, handlers):
    """A short comparison of one task with a width of 16. Options are added at the end."""

    def run_small(task: str, *options: str) -> int:
        fixed = ["--tasks", task, "--steps", "3", "--mixers", "delta_product", "--corpus", str(words)]
        fixed += ["--rates", "0.003", "--widths", "16", "--setting", SETTINGS[task]]
        return compare.main([*fixed, "--folder", str(tmp_path), *options])

    return run_small


@pytest.mark.parametrize("task", SETTINGS)
def test_every_task_is_trained_measured_and_resumed(run_small, tmp_path, capsys, task):
    assert run_small(task, "--seeds", "2") == 0
    files = sorted(tmp_path.glob("*.json"))
    assert len(files) == 2
    times = [file.stat().st_mtime_ns for file in files]
    for file in files:
        result = json.loads(file.read_text())
        assert result["steps"] == 3 and not result["diverged"]
        assert all(0 <= share <= 1 for share in result["accuracy"].values())
        for field in SETTINGS[task].split():
            name, numbers = field.split("=")
            value = result["settings"][name]
            assert ",".join(map(str, value if isinstance(value, list) else [value])) == numbers
        assert result["settings"]["heads"] * result["settings"]["head_dim"] == 16
    table = (tmp_path / "table.md").read_text()
    (heads,) = (line for line in table.splitlines() if line.startswith("| mixer"))
    assert [part.strip() for part in heads.strip("| ").split("|")] == [
        "mixer",
        "width",
        "parameters",
        *COLUMNS[task],
        "lr 0.003",
    ]
    assert "over 2 seeds" in table and rows_of(table)[0][:2] == ["delta_product", "16"]

    capsys.readouterr()
    assert run_small(task, "--seeds", "3") == 0  # the first two seeds exist
    assert capsys.readouterr().out.count("there already") == 2
    assert [file.stat().st_mtime_ns for file in files] == times
    assert run_small(task, "--seeds", "3", "--steps", "4") == 0  # these runs have files of their own
    assert len(list(tmp_path.glob("*.json"))) == 6
    assert [file.stat().st_mtime_ns for file in files] == times


def test_each_setting_of_a_task_has_its_own_table(run_small, tmp_path):
    """The order of the fields has no effect. A damaged file of a setting is also found."""
    assert run_small("s3") == 0
    (first,) = tmp_path.glob("*.json")
    assert run_small("s3", "--setting", " ".join(SETTINGS["s3"].split()[::-1])) == 0
    assert [*tmp_path.glob("*.json")] == [first]
    assert run_small("s3", "--setting", SETTINGS["s3"].replace("16,48", "24"), "--widths", "16,8") == 0
    assert len(list(tmp_path.glob("*.json"))) == 3
    table = (tmp_path / "table.md").read_text()
    assert table.count("| mixer | width |") == 2
    assert "with lengths=24, head_dim=8" in table and "with lengths=16,48, head_dim=8" in table
    assert [row[1] for row in rows_of(table)] == ["8", "16", "16"]
    first.write_text(first.read_text()[:50])
    assert run_small("s3") == 2


def test_one_command_trains_tasks_of_both_kinds(run, tmp_path):
    assert run("--tasks", "mqar,parity", "--mixers", "gsa", "--steps", "1") == 0
    names = sorted(file.name for file in tmp_path.glob("*.json"))
    assert names == ["mqar-gsa-tiny-1-0.003.json", "parity-gsa-64-1-0.003.json"]


@pytest.mark.parametrize(
    "options, message",
    [
        (("--tasks", "text", "--setting", "batch=4"), "batch is no setting of task text, expected none"),
        (
            ("--tasks", "s3", "--setting", "pairs=4"),
            "pairs is no setting of task s3, expected lengths, head_dim",
        ),
        (("--tasks", "s3", "--setting", "vocab_size=4"), "vocab_size is no setting of task s3"),
        (
            ("--tasks", "s3", "--setting", "head_dim=24"),
            "head_dim=24: expected an even divisor of the width 64",
        ),
        (("--tasks", "mqar", "--setting", "head_dim=8"), "head_dim is no setting of task mqar"),
        (("--tasks", "s3", "--setting", "lengths"), "setting lengths: expected whole numbers from 1 on"),
        (("--tasks", "s3", "--setting", "lengths=0"), "setting lengths=0: expected whole numbers from 1 on"),
        (("--tasks", "s3", "--setting", "context=8,16"), "setting context=8,16: expected one number"),
        (("--tasks", "s3", "--setting", "lengths=3"), "task s3: length 3 is below 4"),
        (("--tasks", "s3", "--setting", "rows=99999999999"), "rows 99999999999: at most"),
        (("--tasks", "s3", "--setting", "lengths=99999999999"), "held_out 256: at most 0"),
        (("--tasks", "needle", "--setting", "vocab_size=9999999999"), "vocab_size 9999999999: at most"),
        (("--tasks", "mqar", "--setting", "pairs=64"), "task mqar: length 32 is below the 256 tokens"),
        (
            ("--tasks", "mqar_256", "--setting", "vocab_size=64"),
            "vocab_size 64 has too few keys for 64 pairs",
        ),
        (("--tasks", "needle", "--setting", "lengths=7"), "task needle: length 7 is below the 8 tokens"),
        (("--tasks", "needle", "--setting", "held_out=3"), "task needle: held_out 3: at least 4"),
        (("--tasks", "s3,mqar", "--widths", "64"), "widths 64: expected none, the models of task mqar go by"),
        (
            ("--tasks", "s3", "--size", "tiny"),
            "size tiny: expected none, the models of task s3 go by --widths",
        ),
        (("--tasks", "s3", "--widths", "96"), "width 96: expected a multiple of 64, or an even number below"),
        (("--tasks", "s3", "--widths", "-64"), "width -64: expected a multiple of 64"),
        (("--tasks", "s3", "--widths", "7"), "width 7: expected a multiple of 64, or an even number below"),
        (("--tasks", "s3", "--context", "64"), "context 64: expected none"),
        (("--seeds", "0"), "0 should be from 1 to 1000, or seeds with commas"),
        (("--seeds", "1,-2"), "-2 should be from 0 to"),
        (("--seeds", "2", "--seed", "1"), "not allowed with argument"),
        (("--tasks", "s3", "--mixers", "delta_product", "--options", "n=0"), "n"),
    ],
)
def test_options_of_tasks_are_checked_and_named(words, tmp_path, handlers, capsys, options, message):
    fixed = [] if "s3" in options[1] or "_" in options[1] or "needle" in options[1] else ["--size", "tiny"]
    fixed += ["--corpus", str(words), "--folder", str(tmp_path / "new")]
    assert compare.main([*fixed, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("girih.compare: ") and message in line
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "options",
    [
        ("--mixers", "gsa,none"),
        ("--tasks", "talk"),
        ("--size", "huge"),
        ("--corpus", "/nowhere"),
        ("--corpus", ""),
        ("--folder", ""),
        ("--seed", "-1"),
        ("--seed", str(2**63)),
        ("--rates", "0.1,2"),
        ("--rates", "fast"),
        ("--steps", "0"),
        ("--steps", str(10**15)),
    ],
)
def test_invalid_options_are_refused_in_one_line(run, capsys, options):
    assert run(*options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("girih.compare: ") and options[1].split(",")[-1] in line


def test_a_full_disk_is_one_line_and_leaves_no_cell(run, tmp_path, capsys):
    (tmp_path / (CELLS[0] + ".part")).symlink_to("/dev/full")
    assert run() == 2
    assert "the disk or a file is full" in capsys.readouterr().err.splitlines()[-1]
    assert not any((tmp_path / name).exists() for name in CELLS)


def test_folder_has_one_comparison_at_a_time(run, tmp_path, capsys):
    (tmp_path / LOCK).touch()
    holder = f"""import fcntl, sys
fcntl.lockf(lock := open({str(tmp_path / LOCK)!r}, "w"), fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", holder], **pipes) as other:
        assert other.stdout.readline() == "held\n"
        assert run() == 2
        assert capsys.readouterr().err == f"girih.compare: folder {tmp_path}: another run is at work in it\n"
        other.communicate()
    assert run("--tasks", "mqar", "--mixers", "gsa") == 0
    assert not (tmp_path / LOCK).exists()
