"""The study of conversions, tests/bench/conversion.py, at a size of seconds."""

import json
import math
import signal
import sys
from itertools import pairwise
from pathlib import Path

import girih
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import conversion
import curves

BASE_STEPS, STEPS = 8, 7
SPREAD = (
    0.02 if torch.cuda.is_available() else 0.0
)  # of a run repeated: gradients of sdpa there are not exact
SCHEDULES = ["constant", "gradual", "cyclic", "learned"]
NAMES = [
    "base",
    "attention",
    "gsa",
    "delta_product",
    *(f"inject {schedule}" for schedule in SCHEDULES),
    "gsa from scratch",
    "delta_product from scratch",
]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "words.txt"
    file.write_text(" ".join(str(i * i) for i in range(8000)))
    return file


@pytest.fixture(scope="module")
def run(words):
    """The command, at a size of seconds; options are added at the end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    fixed = ["--size", "tiny", "--base-tokens", str(512 * BASE_STEPS), "--tokens", str(512 * STEPS + 9)]
    yield lambda *options: conversion.main([*fixed, "--corpus", str(words), *map(str, options)])
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def trainers():
    """What every `fit` of the module has made, with the batches that its model was trained on."""
    made, fit = [], conversion.fit

    def recorded(*arguments, **options):
        trainer = fit(*arguments, **options)
        trainer.batches, step = [], trainer.training_step

        def training_step(model, inputs, *rest):
            trainer.batches.append(inputs["input_ids"].clone())
            return step(model, inputs, *rest)

        trainer.training_step = training_step
        made.append(trainer)
        return trainer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "fit", recorded)
        yield made


@pytest.fixture(scope="module")
def studied(run, trainers, tmp_path_factory):
    """The folder of a study that ran to its end, and its trainers by the names of their runs."""
    folder = tmp_path_factory.mktemp("study")
    assert run("--folder", folder, "--work", folder) == 0
    return folder, dict(zip(NAMES, trainers, strict=True))


@pytest.fixture
def folder(studied, tmp_path):
    """A copy of that folder."""
    for file in studied[0].rglob("*"):
        if file.is_file():
            there = tmp_path / file.relative_to(studied[0])
            there.parent.mkdir(exist_ok=True)
            there.write_bytes(file.read_bytes())
    return tmp_path


def read(folder):
    return json.loads((folder / "conversion.json").read_text())


def write(folder, result):
    (folder / "conversion.json").write_text(json.dumps(result))


def without(folder, *names):
    """Takes runs out of the file; returns what it had."""
    result = read(folder)
    write(folder, result | {"runs": {name: r for name, r in result["runs"].items() if name not in names}})
    return result


def test_every_run_is_in_the_file_with_finite_losses_from_token_0_on(studied):
    runs = read(studied[0])["runs"]
    assert list(runs) == NAMES
    for name, run in runs.items():
        steps = BASE_STEPS if name == "base" else STEPS
        assert run["tokens"] == [512 * step for step in range(steps + 1)]
        assert len(run["bits_per_byte"]) == steps + 1 and all(map(math.isfinite, run["bits_per_byte"]))
        assert {"device", "versions", "date", "seconds", "parameters"} <= run.keys()
        assert run["from_scratch"] == (name == "base" or name.endswith("from scratch"))


def test_what_starts_at_weight_0_starts_as_the_transformer(studied):
    runs = read(studied[0])["runs"]
    first = {name: run["bits_per_byte"][0] for name, run in runs.items()}
    checkpoint = runs["base"]["bits_per_byte"][-1]
    assert first["attention"] == first["inject gradual"] == first["inject cyclic"] == checkpoint
    assert first["inject constant"] == first["inject learned"]
    assert checkpoint not in [first[name] for name in ("inject constant", "gsa", "delta_product")]


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_a_last_smaller_batch_counts_by_its_rows(batch):
    model = conversion.transformer(conversion.SIZES["tiny"]).train()
    rows = torch.randint(256, (5, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        log_p = model(rows).logits[:, :-1].double().log_softmax(-1)
    want = -log_p.gather(-1, rows[:, 1:, None]).mean().item() / math.log(2)
    assert conversion.bits_per_byte(model, rows, batch) == pytest.approx(want, rel=1e-5)
    assert model.training


def test_weights_follow_their_schedules(studied):
    runs = read(studied[0])["runs"]
    for schedule in SCHEDULES[:3]:
        run = runs[f"inject {schedule}"]
        moved = girih.MixSchedule(**run["schedule"])
        assert run["weight"] == pytest.approx([moved.weight(max(step - 1, 0)) for step in range(STEPS + 1)])
        at_its_own = {f"{m:g}": m for m in conversion.LEVELS if m == run["weight"][-1]}
        assert [run["bits_per_byte_at_weight"][m] for m in at_its_own] == [run["bits_per_byte"][-1]]
    learned = runs["inject learned"]
    assert learned["weight"][0] == 0.5 != learned["weight"][-1] and len(set(learned["weights"])) == 2
    for run in (runs[f"inject {schedule}"] for schedule in SCHEDULES):
        assert len(set(run["bits_per_byte_at_weight"].values())) == 3


def test_all_see_the_same_bytes_in_the_same_order_at_the_same_learning_rates(studied):
    _, trainers = studied
    control = trainers["attention"]
    assert len(control.batches) == STEPS and len(trainers["base"].batches) == BASE_STEPS
    assert not control.batches[0].equal(trainers["base"].batches[0])

    def rates(trainer):
        return [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]

    assert len(rates(control)) == STEPS
    for name in NAMES[2:]:
        pairs = zip(trainers[name].batches, control.batches, strict=True)
        assert all(ours.equal(theirs) for ours, theirs in pairs), name
        assert rates(trainers[name]) == rates(control), name


def test_all_weights_are_trained(studied):
    _, trainers = studied
    for trainer in trainers.values():
        groups = trainer.optimizer.param_groups
        assert sum(len(group["params"]) for group in groups) == len(list(trainer.model.parameters()))
        assert all(p.requires_grad for p in trainer.model.parameters())


def test_a_rerun_trains_only_what_is_missing(run, trainers, folder, capsys):
    before = read(folder)
    made = len(trainers)
    assert run("--folder", folder, "--work", folder) == 0
    assert len(trainers) == made and read(folder) == before
    without(folder, "gsa", "inject learned")
    assert run("--folder", folder, "--work", folder) == 0
    assert len(trainers) == made + 2
    for name, kept in read(folder)["runs"].items():
        again = pytest.approx(kept["bits_per_byte"], rel=0, abs=SPREAD)
        assert before["runs"][name]["bits_per_byte"] == again
    assert list(read(folder)["runs"]) == NAMES
    assert capsys.readouterr().out.count("there already") == 9 + 7


def test_runs_of_a_checkpoint_that_is_gone_do_not_count(run, trainers, folder, capsys):
    """Those from scratch do."""
    for file in (folder / "base").iterdir():
        file.unlink()
    before = without(folder, "gsa")
    made = len(trainers)
    assert run("--folder", folder, "--work", folder, "--runs", "gsa,gsa from scratch") == 0
    assert len(trainers) == made + 2
    assert "count no more: base, attention, delta_product" in capsys.readouterr().out
    runs = read(folder)["runs"]
    assert list(runs) == ["base", "gsa", "gsa from scratch", "delta_product from scratch"]
    again = pytest.approx(runs["gsa"]["bits_per_byte"], rel=0, abs=SPREAD)
    assert before["runs"]["gsa"]["bits_per_byte"] == again


def test_runs_from_scratch_can_be_left_out_and_need_no_checkpoint(run, trainers, folder):
    without(folder, "gsa from scratch")
    for file in (folder / "base").iterdir():
        file.unlink()
    made = len(trainers)
    assert run("--folder", folder, "--work", folder, "--no-scratch") == 0
    assert len(trainers) == made
    assert run("--folder", folder, "--work", folder) == 0
    assert len(trainers) == made + 1 and list(read(folder)["runs"]) == NAMES


def test_after_the_minutes_no_run_begins(run, trainers, folder, capsys):
    without(folder, "gsa", "delta_product")
    made = len(trainers)
    assert run("--folder", folder, "--work", folder, "--minutes", 0) == 0
    assert len(trainers) == made
    assert "gsa: not begun, 0 minutes are over; the same command continues" in capsys.readouterr().out


def test_a_run_that_fails_is_reported_and_the_others_are_trained(run, folder, capsys, monkeypatch):
    without(folder, "gsa", "delta_product")
    real = conversion.trained

    def fails(plan, way, *rest):
        model, result = real(plan, way, *rest)
        if result["conversion"]["mixer"] == "gsa":
            raise FloatingPointError("the held-out loss is not finite")
        return model, result

    monkeypatch.setattr(conversion, "trained", fails)
    assert run("--folder", folder, "--work", folder) == 1
    assert "conversion: failed: gsa: FloatingPointError: the held-out loss" in capsys.readouterr().err
    assert list(read(folder)["runs"]) == [name for name in NAMES if name != "gsa"]


def test_a_loss_that_is_not_finite_is_a_failure(run, folder, monkeypatch, capsys):
    without(folder, "attention")
    monkeypatch.setattr(conversion, "bits_per_byte", lambda *_: math.nan)
    assert run("--folder", folder, "--work", folder) == 1
    assert "attention" not in read(folder)["runs"]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--tokens", 512], "it is of another steps; name another folder"),
        (["--seed", 1], "it is of another seed"),
        (["--tokens", 511], "steps 0: at least 1"),
        (["--base-tokens", 0], "steps 0: at least 1"),
        (["--size", "huge"], "size huge: unknown"),
        (["--runs", "gsa,cat"], "run cat: unknown"),
        (["--draw", "--folder", "/nowhere"], "/nowhere/conversion.json: no such file"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(run, folder, capsys, options, message):
    before = (folder / "conversion.json").read_bytes()
    assert run("--folder", folder, "--work", folder, *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("conversion: ") and message in line
    assert (folder / "conversion.json").read_bytes() == before


def test_table_figure_and_words_are_made_from_the_file(run, studied, trainers, tmp_path, capsys):
    result = read(studied[0])
    result["runs"]["gsa"]["bits_per_byte"][-1] = 0.125
    result["runs"]["base"]["bits_per_byte"][-1] = 0.375
    write(tmp_path, result)
    made = len(trainers)
    assert run("--draw", "--folder", tmp_path) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(trainers) == made and len(table) == 2 + len(NAMES) - 1
    assert table[2].startswith("| replaced by gsa | ") and " | 0.125 | -" in table[2]
    assert (tmp_path / "conversion.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "conversion.png").read_bytes() != (studied[0] / "conversion.png").read_bytes()
    assert "came to 0.375 bits a held-out byte" in curves.words(result).replace("\n", " ")


def test_labels_beside_lines_that_end_near_each_other_can_be_read():
    values = [1.0, 1.01, 1.02, 2.0, 2.05, 3.0]
    placed = curves.legible(values, 0.1)
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(placed))
    assert placed[:3] == pytest.approx([0.91, 1.01, 1.11]) and placed[-1] == 3.0
    heap = curves.legible([1.0, 1.04, 1.08, 1.21], 0.1)  # a heap that grows takes in its neighbour
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(heap))


@pytest.mark.parametrize("size", ["tiny", "small", "10m", "25m"])
def test_a_transformer_has_the_parameters_of_its_size(size):
    recipe = conversion.SIZES[size]
    with torch.device("meta"):
        assert conversion.transformer(recipe).num_parameters() == pytest.approx(recipe.parameters, rel=0.02)
