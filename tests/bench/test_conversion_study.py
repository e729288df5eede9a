"""The study of conversions, tests/bench/conversion.py, at a size that takes seconds."""

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
)  # between two runs: gradients of sdpa are not deterministic on a GPU
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
    """The command at a size that takes seconds. Options are added at the end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    fixed = ["--size", "tiny", "--base-tokens", str(512 * BASE_STEPS), "--tokens", str(512 * STEPS + 9)]
    yield lambda *options: conversion.main([*fixed, "--corpus", str(words), *map(str, options)])
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def trainers():
    """All trainers from `fit` in this module, with the batches of their training."""
    trainers_made, fit = [], conversion.fit

    def record_fit(*arguments, **options):
        trainer = fit(*arguments, **options)
        trainer.batches, step = [], trainer.training_step

        def training_step(model, inputs, *rest):
            trainer.batches.append(inputs["input_ids"].clone())
            return step(model, inputs, *rest)

        trainer.training_step = training_step
        trainers_made.append(trainer)
        return trainer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "fit", record_fit)
        yield trainers_made


@pytest.fixture(scope="module")
def finished_study(run, trainers, tmp_path_factory):
    """The folder of a finished study, and its trainers by the names of their runs."""
    folder = tmp_path_factory.mktemp("study")
    assert run("--folder", folder, "--work", folder) == 0
    return folder, dict(zip(NAMES, trainers, strict=True))


@pytest.fixture
def folder(finished_study, tmp_path):
    """A copy of the folder of the finished study."""
    for file in finished_study[0].rglob("*"):
        if file.is_file():
            target = tmp_path / file.relative_to(finished_study[0])
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(file.read_bytes())
    return tmp_path


def read(folder):
    return json.loads((folder / "conversion.json").read_text())


def write(folder, result):
    (folder / "conversion.json").write_text(json.dumps(result))


def remove_runs(folder, *names):
    """Removes runs from the file. Returns its earlier contents."""
    result = read(folder)
    write(folder, result | {"runs": {name: r for name, r in result["runs"].items() if name not in names}})
    return result


def test_every_run_is_in_the_file_with_finite_losses_from_token_0_on(finished_study):
    runs = read(finished_study[0])["runs"]
    assert list(runs) == NAMES
    for name, run in runs.items():
        steps = BASE_STEPS if name == "base" else STEPS
        assert run["tokens"] == [512 * step for step in range(steps + 1)]
        assert len(run["bits_per_byte"]) == steps + 1 and all(map(math.isfinite, run["bits_per_byte"]))
        assert {"device", "versions", "date", "seconds", "parameters"} <= run.keys()
        assert run["from_scratch"] == (name == "base" or name.endswith("from scratch"))


def test_runs_at_weight_0_start_at_the_loss_of_the_transformer(finished_study):
    runs = read(finished_study[0])["runs"]
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


def test_weights_follow_their_schedules(finished_study):
    runs = read(finished_study[0])["runs"]
    for schedule in SCHEDULES[:3]:
        run = runs[f"inject {schedule}"]
        mix_schedule = girih.MixSchedule(**run["schedule"])
        assert run["weight"] == pytest.approx(
            [mix_schedule.weight(max(step - 1, 0)) for step in range(STEPS + 1)]
        )
        last_level = {f"{m:g}": m for m in conversion.LEVELS if m == run["weight"][-1]}
        assert [run["bits_per_byte_at_weight"][m] for m in last_level] == [run["bits_per_byte"][-1]]
    learned = runs["inject learned"]
    assert learned["weight"][0] == 0.5 != learned["weight"][-1] and len(set(learned["weights"])) == 2
    for run in (runs[f"inject {schedule}"] for schedule in SCHEDULES):
        assert len(set(run["bits_per_byte_at_weight"].values())) == 3


def test_all_runs_have_the_same_batches_and_learning_rates(finished_study):
    _, trainers = finished_study
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


def test_all_weights_are_trained(finished_study):
    _, trainers = finished_study
    for trainer in trainers.values():
        groups = trainer.optimizer.param_groups
        assert sum(len(group["params"]) for group in groups) == len(list(trainer.model.parameters()))
        assert all(p.requires_grad for p in trainer.model.parameters())


def test_a_rerun_trains_only_what_is_missing(run, trainers, folder, capsys):
    before = read(folder)
    num_before = len(trainers)
    assert run("--folder", folder, "--work", folder) == 0
    assert len(trainers) == num_before and read(folder) == before
    remove_runs(folder, "gsa", "inject learned")
    assert run("--folder", folder, "--work", folder) == 0
    assert len(trainers) == num_before + 2
    for name, run_after in read(folder)["runs"].items():
        again = pytest.approx(run_after["bits_per_byte"], rel=0, abs=SPREAD)
        assert before["runs"][name]["bits_per_byte"] == again
    assert list(read(folder)["runs"]) == NAMES
    assert capsys.readouterr().out.count("there already") == 9 + 7


def test_runs_of_a_missing_checkpoint_are_dropped(run, trainers, folder, capsys):
    """Runs from scratch still count."""
    for file in (folder / "base").iterdir():
        file.unlink()
    before = remove_runs(folder, "gsa")
    num_before = len(trainers)
    assert run("--folder", folder, "--work", folder, "--runs", "gsa,gsa from scratch") == 0
    assert len(trainers) == num_before + 2
    assert "count no more: base, attention, delta_product" in capsys.readouterr().out
    runs = read(folder)["runs"]
    assert list(runs) == ["base", "gsa", "gsa from scratch", "delta_product from scratch"]
    again = pytest.approx(runs["gsa"]["bits_per_byte"], rel=0, abs=SPREAD)
    assert before["runs"]["gsa"]["bits_per_byte"] == again


def test_runs_from_scratch_can_be_left_out_and_need_no_checkpoint(run, trainers, folder):
    remove_runs(folder, "gsa from scratch")
    for file in (folder / "base").iterdir():
        file.unlink()
    num_before = len(trainers)
    assert run("--folder", folder, "--work", folder, "--no-scratch") == 0
    assert len(trainers) == num_before
    assert run("--folder", folder, "--work", folder) == 0
    assert len(trainers) == num_before + 1 and list(read(folder)["runs"]) == NAMES


def test_no_run_starts_after_the_time_limit(run, trainers, folder, capsys):
    remove_runs(folder, "gsa", "delta_product")
    num_before = len(trainers)
    assert run("--folder", folder, "--work", folder, "--minutes", 0) == 0
    assert len(trainers) == num_before
    assert "gsa: not begun, 0 minutes are over; the same command continues" in capsys.readouterr().out


def test_a_run_that_fails_is_reported_and_the_others_are_trained(run, folder, capsys, monkeypatch):
    remove_runs(folder, "gsa", "delta_product")
    original = conversion.train_model

    def train_or_fail(plan, way, *rest):
        model, result = original(plan, way, *rest)
        if result["conversion"]["mixer"] == "gsa":
            raise FloatingPointError("the held-out loss is not finite")
        return model, result

    monkeypatch.setattr(conversion, "train_model", train_or_fail)
    assert run("--folder", folder, "--work", folder) == 1
    assert "conversion: failed: gsa: FloatingPointError: the held-out loss" in capsys.readouterr().err
    assert list(read(folder)["runs"]) == [name for name in NAMES if name != "gsa"]


def test_a_loss_that_is_not_finite_is_a_failure(run, folder, monkeypatch, capsys):
    remove_runs(folder, "attention")
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
def test_invalid_options_are_refused_in_one_line(run, folder, capsys, options, message):
    before = (folder / "conversion.json").read_bytes()
    assert run("--folder", folder, "--work", folder, *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("conversion: ") and message in line
    assert (folder / "conversion.json").read_bytes() == before


def test_table_figure_and_words_are_made_from_the_file(run, finished_study, trainers, tmp_path, capsys):
    result = read(finished_study[0])
    result["runs"]["gsa"]["bits_per_byte"][-1] = 0.125
    result["runs"]["base"]["bits_per_byte"][-1] = 0.375
    write(tmp_path, result)
    num_before = len(trainers)
    assert run("--draw", "--folder", tmp_path) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(trainers) == num_before and len(table) == 2 + len(NAMES) - 1
    assert table[2].startswith("| replaced by gsa | ") and " | 0.125 | -" in table[2]
    assert (tmp_path / "conversion.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "conversion.png").read_bytes() != (finished_study[0] / "conversion.png").read_bytes()
    assert "came to 0.375 bits a held-out byte" in curves.describe_study(result).replace("\n", " ")


def test_labels_of_close_lines_do_not_overlap():
    values = [1.0, 1.01, 1.02, 2.0, 2.05, 3.0]
    placed = curves.spread_labels(values, 0.1)
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(placed))
    assert placed[:3] == pytest.approx([0.91, 1.01, 1.11]) and placed[-1] == 3.0
    heap = curves.spread_labels([1.0, 1.04, 1.08, 1.21], 0.1)  # a group that grows merges with its neighbour
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(heap))


@pytest.mark.parametrize("size", ["tiny", "small", "10m", "25m"])
def test_a_transformer_has_the_parameters_of_its_size(size):
    recipe = conversion.SIZES[size]
    with torch.device("meta"):
        assert conversion.transformer(recipe).num_parameters() == pytest.approx(recipe.parameters, rel=0.02)
