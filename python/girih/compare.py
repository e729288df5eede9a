"""Train mixers at equal size on equal data and lay the results side by side: `python -m girih.compare`.

Two tasks: `text`, bits per byte of held-out text, and `mqar`, the share of right answers in multi-query
associative recall, trained until it is learned. Every mixer gets the same data, in the same order, and is
trained at the same learning rates: what counts is the best, and all are shown. A finished cell (a task, a
mixer and a rate) is one file; only cells without their file are trained; table.md and figure.png are made
from the files that were trained on the same data in the same way.

With `--options "chunk=1"` a mixer is a row of its own, "trellis chunk=1", beside the one without options.
"""

import argparse
import contextlib
import json
import shutil
import sys
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from girih.comparison.cell import COMPARED, TASKS, best_of, is_cell, rates_of, recipe_of, run_cell
from girih.comparison.table import draw, write_table
from girih.data import Corpus, read_corpus
from girih.models import MIXERS
from girih.training.command import (
    Parser,
    Refusal,
    answer,
    disk_full,
    path,
    refuse_steps,
    refuse_unknown,
    seed,
)
from girih.training.folder import alone_in, damaged, make, publish, read_json, usable
from girih.training.processes import Interrupt, Interrupted, on_one_device, together
from girih.training.recipe import SIZES, Recipe, config_of_size, with_context


class Cell(NamedTuple):
    task: str
    mixer: str  # its name, or name and options: "trellis chunk=1"
    rate: float

    def __str__(self) -> str:
        return f"{self.task} {self.mixer} {self.rate:g}"

    @property
    def file_name(self) -> str:
        return f"{self.task}-{self.mixer.replace(' ', ',').replace('/', '_')}"


@dataclass(frozen=True)
class Plan:
    """What is compared: tasks, mixers, the rates and the recipe that all mixers of a task share."""

    tasks: tuple[str, ...]
    mixers: tuple[str, ...]
    recipes: dict[str, Recipe]
    rates: dict[str, tuple[float, ...]]
    corpus: Corpus
    folder: Path
    size: str
    seed: int
    context: int | None = None  # of text, where it is not the size's

    def cells(self, tasks: tuple[str, ...], mixers: tuple[str, ...]) -> list[Cell]:
        return [Cell(task, mixer, rate) for task in tasks for mixer in mixers for rate in self.rates[task]]

    def file(self, cell: Cell) -> Path:
        steps = self.recipes[cell.task].steps
        context = f"-{self.context}" if self.context and cell.task == "text" else ""
        return self.folder / f"{cell.file_name}-{self.size}{context}-{steps}-{cell.rate:g}.json"

    def all_mixers(self) -> tuple[str, ...]:
        """Every mixer, those of this plan, and those with options that have a file."""
        found = dict.fromkeys((*MIXERS, *self.mixers))
        for file in sorted(self.folder.glob("*=*.json")):
            label = read_json(file).get("mixer")
            if isinstance(label, str) and label.split(" ")[0] in MIXERS:
                found[label] = None
        return tuple(found)

    def recipe_of(self, cell: Cell) -> Recipe:
        return replace(self.recipes[cell.task], learning_rate=cell.rate)

    def settings_of(self, cell: Cell) -> dict:
        """As a file has them."""
        settings = asdict(self.recipe_of(cell)) | {"seed": self.seed}
        if cell.task == "text":
            settings["corpus_sha256"] = self.corpus.digest
        return json.loads(json.dumps(settings))


def rates(text: str) -> tuple[float, ...]:
    """The argument of `--rates`."""
    found = []
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            rate = 0.0
        if not 0 < rate < 1:
            raise argparse.ArgumentTypeError(f"{part} should be a number between 0 and 1")
        found.append(rate)
    return tuple(dict.fromkeys(found))


def plan_of(options: argparse.Namespace) -> Plan:
    size = options.size or ("10m" if torch.cuda.is_available() else "small")
    tasks = tuple(options.tasks.split(","))
    mixers = tuple(options.mixers.split(",")) if options.mixers else COMPARED
    of_mixer = " ".join(options.options.split())
    refuse_unknown("size", [size], SIZES)
    refuse_unknown("task", tasks, TASKS)
    refuse_unknown("mixer", mixers, MIXERS)
    if (processes := together().num_processes) > 1:
        raise Refusal(f"{processes} processes: a comparison runs in one, on one device")
    recipes = {task: recipe_of(task, size, options.steps) for task in TASKS}
    if options.context is not None and "text" not in tasks:
        raise Refusal(f"context {options.context}: expected none, as it is that of the task text")
    recipes["text"] = with_context(recipes["text"], options.context)
    if of_mixer:
        for mixer in mixers:
            config_of_size(mixer, recipes[tasks[0]], options=of_mixer)  # refuses what it does not read
        mixers = tuple(f"{mixer} {of_mixer}" for mixer in mixers)
    for task in tasks:
        refuse_steps(recipes[task].steps, recipes[task].bytes_a_step)
    corpus = read_corpus(options.corpus, recipes["text"].context)
    rates = {task: options.rates or rates_of(recipe) for task, recipe in recipes.items()}
    return Plan(tasks, mixers, recipes, rates, corpus, options.folder, size, options.seed, options.context)


def finished(plan: Plan, cell: Cell) -> tuple[dict | None, str]:
    """What the cell's file holds, if any, and the settings in which it differs from the plan's."""
    file = plan.file(cell)
    if not file.exists():
        return None, ""
    result = read_json(file)
    has, wanted = result.get("settings"), plan.settings_of(cell)
    if not isinstance(has, dict) or (
        has == wanted and not is_cell(result, cell.task, plan.recipes[cell.task])
    ):
        raise damaged(file)
    other = [name for name in sorted({*has, *wanted}) if has.get(name) != wanted.get(name)]
    return result, " and ".join(name.removesuffix("_sha256") for name in other)


def train_missing(plan: Plan) -> list[str]:
    """Train the cells without a file, or whose file is of other settings; a line for each that failed."""
    failed = []
    scratch = plan.folder / ".scratch"
    for cell in plan.cells(plan.tasks, plan.mixers):
        result, other = finished(plan, cell)
        if result and not other:
            print(f"{cell}: there already")
            continue
        recipe = plan.recipe_of(cell)
        again = f", again: the finished one has another {other}" if other else ""
        print(f"{cell}: {recipe.steps} steps{again}", flush=True)
        try:
            result = run_cell(cell.task, cell.mixer, recipe, plan.corpus, scratch, plan.seed)
        except Exception as error:
            if isinstance(error, Interrupted) or disk_full(error):
                raise
            traceback.print_exc()
            failed.append(f"{cell}: {type(error).__name__}: {error}")
            continue
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        result["settings"] = plan.settings_of(cell)
        publish(plan.file(cell), json.dumps(result) + "\n")
    return failed


def compare(plan: Plan) -> bool:
    """Train what is missing, then make the table and the figure. False if a cell failed, or a mixer diverged
    at every rate."""
    everything = plan.cells(TASKS, plan.all_mixers())
    for cell in everything:
        finished(plan, cell)  # what is damaged is said before hours of training
    failed = train_missing(plan)
    cells, left_out = {task: {} for task in TASKS}, []
    for cell in everything:
        result, other = finished(plan, cell)
        if other:
            left_out.append(f"{cell} (another {other})")
        elif result:
            cells[cell.task].setdefault(cell.mixer, {})[cell.rate] = result
    for task, of_mixer in cells.items():
        failed += [f"{task} {mixer}: diverged" for mixer in sorted(of_mixer.keys() - best_of(task, of_mixer))]
    if any(cells.values()):
        print("\n" + write_table(cells, plan.folder / "table.md"))
        draw(cells, plan.folder / "figure.png")
        print(f"{plan.folder / 'table.md'}\n{plan.folder / 'figure.png'}")
    if left_out:
        print(f"girih.compare: left out of the table: {', '.join(left_out)}", file=sys.stderr)
    for line in failed:
        print(f"girih.compare: failed: {line}", file=sys.stderr)
    return not failed


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="girih.compare", description="Train mixers at equal size on equal data and compare.")
    parser.add_argument("--mixers", help=f"names with commas (default: {','.join(COMPARED)})")
    parser.add_argument("--tasks", default="text,mqar", help="text, mqar or both with a comma")
    parser.add_argument(
        "--rates",
        type=rates,
        help="learning rates with commas, instead of the recipe's, a third and three times",
    )
    parser.add_argument("--steps", type=int, help="instead of 600 of text and at most 10,000 of recall")
    parser.add_argument(
        "--options", default="", help="fields of the mixers' configuration, as 'chunk=1 phi=identity'"
    )
    parser.add_argument(
        "--context", type=int, help="tokens of a sequence of text; a step has as many as the size's own"
    )
    parser.add_argument("--size", help=f"{', '.join(SIZES)} (default: 10m on a GPU, small without)")
    parser.add_argument("--corpus", type=path, help="a file or folder (default: Python's standard library)")
    parser.add_argument(
        "--folder", type=path, default=Path("runs/compare"), help="where the cells' files are"
    )
    parser.add_argument("--seed", type=seed, default=0)
    on_one_device()

    def work() -> int:
        Interrupt()
        together()
        plan = plan_of(parser.parse_args(argv))
        with contextlib.ExitStack() as held:
            with usable(plan.folder):
                make(plan.folder)
                held.enter_context(alone_in(plan.folder))
            return 0 if compare(plan) else 1

    return answer("girih.compare", work)


if __name__ == "__main__":
    sys.exit(main())
