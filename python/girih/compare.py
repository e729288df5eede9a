"""Train mixers at equal size on equal data and lay the results side by side: `python -m girih.compare`.

Two tasks: `text`, bits per byte of held-out text, and `mqar`, the share of right answers in multi-query
associative recall. Every mixer gets the same data, in the same order, and the same learning rate. A
finished cell (a task and a mixer) is one file; only cells without their file are trained; table.md and
figure.png are made from the files that were trained on the same data in the same way.
"""

import argparse
import contextlib
import json
import shutil
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from girih.comparison.cell import DEFAULTS, is_cell, recipe_of, run_cell
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
from girih.training.recipe import SIZES, Recipe


@dataclass(frozen=True)
class Plan:
    """What is compared: tasks, their mixers, and the recipe and settings that all cells of a task share."""

    tasks: dict[str, tuple[str, ...]]
    recipes: dict[str, Recipe]
    settings: dict[str, dict]
    corpus: Corpus
    folder: Path
    size: str
    seed: int

    def file(self, task: str, mixer: str) -> Path:
        return self.folder / f"{task}-{mixer}-{self.size}-{self.recipes[task].steps}.json"


def plan_of(options: argparse.Namespace) -> Plan:
    size = options.size or ("10m" if torch.cuda.is_available() else "small")
    tasks = options.tasks.split(",")
    mixers = tuple(options.mixers.split(",")) if options.mixers else ()
    refuse_unknown("size", [size], SIZES)
    refuse_unknown("task", tasks, DEFAULTS)
    refuse_unknown("mixer", mixers, MIXERS)
    if (processes := together().num_processes) > 1:
        raise Refusal(f"{processes} processes: a comparison runs in one, on one device")
    recipes = {task: recipe_of(task, size, options.steps) for task in DEFAULTS}
    for task in tasks:
        refuse_steps(recipes[task].steps, recipes[task].bytes_a_step)
    corpus = read_corpus(options.corpus, recipes["text"].context)
    settings = {
        task: json.loads(json.dumps({**asdict(recipe), "seed": options.seed}))
        for task, recipe in recipes.items()
    }
    settings["text"]["corpus_sha256"] = corpus.digest
    tasks = {task: mixers or DEFAULTS[task] for task in tasks}
    return Plan(tasks, recipes, settings, corpus, options.folder, size, options.seed)


def finished(plan: Plan, task: str, mixer: str) -> tuple[dict | None, str]:
    """The cell that its file holds, if any, and the settings in which it differs from the plan's."""
    if not plan.file(task, mixer).exists():
        return None, ""
    cell = read_json(plan.file(task, mixer))
    has, wanted = cell.get("settings"), plan.settings[task]
    if not isinstance(has, dict) or (has == wanted and not is_cell(cell, task, plan.recipes[task])):
        raise damaged(plan.file(task, mixer))
    other = [name for name in sorted({*has, *wanted}) if has.get(name) != wanted.get(name)]
    return cell, " and ".join(name.removesuffix("_sha256") for name in other)


def train_missing(plan: Plan) -> list[str]:
    """Train the cells without a file, or whose file is of other settings; a line for each that failed."""
    failed = []
    scratch = plan.folder / ".scratch"
    for task, mixer in ((task, mixer) for task, mixers in plan.tasks.items() for mixer in mixers):
        cell, other = finished(plan, task, mixer)
        if cell and not other:
            print(f"{task} {mixer}: there already")
            continue
        again = f", again: the finished one has another {other}" if other else ""
        print(f"{task} {mixer}: {plan.recipes[task].steps} steps{again}", flush=True)
        try:
            cell = run_cell(task, mixer, plan.recipes[task], plan.corpus, scratch, plan.seed)
        except Exception as error:
            if isinstance(error, Interrupted) or disk_full(error):
                raise
            traceback.print_exc()
            failed.append(f"{task} {mixer}: {type(error).__name__}: {error}")
            continue
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        cell["settings"] = plan.settings[task]
        publish(plan.file(task, mixer), json.dumps(cell, indent=1) + "\n")
    return failed


def compare(plan: Plan) -> bool:
    """Train what is missing, then make the table and the figure. False if a cell failed."""
    for task in DEFAULTS:
        for mixer in MIXERS:
            finished(plan, task, mixer)  # what is damaged is said before hours of training
    failed = train_missing(plan)
    cells, left_out = {task: {} for task in DEFAULTS}, []
    for task in DEFAULTS:
        for mixer in MIXERS:
            cell, other = finished(plan, task, mixer)
            if other:
                left_out.append(f"{task} {mixer} (another {other})")
            elif cell:
                cells[task][mixer] = cell
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
    parser.add_argument("--mixers", help="names with commas (default: all for text, seven for mqar)")
    parser.add_argument("--tasks", default="text,mqar", help="text, mqar or both with a comma")
    parser.add_argument("--steps", type=int, help="instead of 300 of text and the recall task's own")
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
