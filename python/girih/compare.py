"""Train mixers of equal size on the same data and compare the results: `python -m girih.compare`.

The tasks are those of `girih.comparison.tasks`: bits per byte of held-out text, and the share of right
answers in associative recall, state tracking and a needle in a haystack, trained until they are learned.
Every mixer gets the same data, in the same order, and is trained at the same learning rates: what counts is
the best, and all are shown. A finished cell (a task, a mixer, a width, a rate and a seed) is one file; only
cells without their file are trained; table.md and figure.png are made from the files that were trained on
the same data in the same way.

With `--options "chunk=1"` a mixer is a row of its own, "trellis chunk=1", beside the one without options;
with `--setting "pairs=8"` a task is a table of its own, "mqar_256 pairs=8".
"""

import argparse
import contextlib
import json
import shutil
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch

from girih.comparison.cell import COMPARED, run_cell
from girih.comparison.plan import Plan
from girih.comparison.results import best_of, rows_of
from girih.comparison.table import draw, write_table
from girih.comparison.tasks import TASKS, parse_label
from girih.data import read_corpus
from girih.models import MIXERS
from girih.training.command import (
    Parser,
    Refusal,
    answer,
    disk_full,
    numbers,
    path,
    refuse_steps,
    refuse_unknown,
    seed,
)
from girih.training.folder import lock_folder, make_folder, publish, refuse_unusable
from girih.training.processes import Interrupt, Interrupted, together, use_one_device
from girih.training.recipe import SIZES, config_of_size


def rates(text: str) -> tuple[float, ...]:
    """The argument of `--rates`."""
    values = []
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            rate = 0.0
        if not 0 < rate < 1:
            raise argparse.ArgumentTypeError(f"{part} should be a number between 0 and 1")
        values.append(rate)
    return tuple(dict.fromkeys(values))


def seeds(text: str) -> tuple[int, ...]:
    """The argument of `--seeds`: "3" is the seeds 0, 1 and 2; "1,5" is these two."""
    if "," in text:
        return tuple(dict.fromkeys(map(seed, text.split(","))))
    if not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text} should be from 1 to 1000, or seeds with commas")
    return tuple(range(int(text)))


def refuse_misplaced(options: argparse.Namespace, names: list[str]) -> None:
    """Refuses an option that some task, or none of them, reads."""
    has_widths = [bool(TASKS[name].widths) for name in names]
    if options.context is not None and "text" not in names:
        raise Refusal(f"context {options.context}: expected none, as it is that of the task text")
    if options.size and all(has_widths):
        raise Refusal(f"size {options.size}: expected none, the models of task {names[0]} go by --widths")
    if options.widths and not all(has_widths):
        other = names[has_widths.index(False)]
        raise Refusal(f"widths {options.widths[0]}: expected none, the models of task {other} go by --size")


def plan_of(options: argparse.Namespace) -> Plan:
    names = list(dict.fromkeys(options.tasks.split(",")))
    mixers = options.mixers.split(",") if options.mixers else COMPARED
    size = options.size or ("10m" if torch.cuda.is_available() else "small")
    refuse_unknown("size", [size], SIZES)
    refuse_unknown("task", names, TASKS)
    refuse_unknown("mixer", mixers, MIXERS)
    if (processes := together().num_processes) > 1:
        raise Refusal(f"{processes} processes: a comparison runs in one, on one device")
    refuse_misplaced(options, names)
    mixer_options = " ".join(sorted(options.options.split()))
    plan = Plan(
        tuple(TASKS[name].label(options.setting) for name in names),
        tuple(f"{mixer} {mixer_options}" if mixer_options else mixer for mixer in mixers),
        size,
        options.seeds or (options.seed,),
        options.folder,
        tuple(dict.fromkeys(options.widths)) if options.widths else None,
        options.rates,
        options.steps,
        options.context,
    )
    for task in plan.tasks:
        for width in plan.widths_of(task):
            recipe = plan.recipe(task, width)
            parse_label(task)[0].check(recipe)
            refuse_steps(recipe.steps, recipe.bytes_a_step)
            if mixer_options:
                for mixer in mixers:
                    config_of_size(mixer, recipe, options=mixer_options)  # refuses what it does not read
    return replace(plan, corpus=read_corpus(options.corpus, plan.recipe("text", None).context))


def train_missing(plan: Plan) -> list[str]:
    """Train the cells that have no file with these settings. Returns a line for each cell that failed."""
    failed = []
    scratch = plan.folder / ".scratch"
    for cell in plan.cells(plan.tasks, plan.mixers):
        result, other = plan.read_result(cell)
        if result and not other:
            print(f"{cell}: there already")
            continue
        recipe = plan.recipe_of(cell)
        reason = f", again: the finished one has another {other}" if other else ""
        print(f"{cell}: {recipe.steps} steps{reason}", flush=True)
        try:
            result = run_cell(cell.task, cell.mixer, recipe, plan.corpus, scratch, cell.seed)
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
    """Train the missing cells, then create the table and the figure. Returns false if a cell failed, or if a
    mixer diverged at every rate."""
    everything = plan.known_cells()
    for cell in everything:
        plan.read_result(cell)  # reports damage before hours of training
    failed = train_missing(plan)
    cells, left_out = {}, []
    for cell in everything:
        result, other = plan.read_result(cell)
        if other:
            left_out.append(f"{cell} (another {other})")
        elif result:
            cells.setdefault(cell.task, []).append(result)
    for label, task_cells in cells.items():
        rows = rows_of(parse_label(label)[0], task_cells)
        failed += [f"{label} {row}: diverged" for row in rows.keys() - best_of(parse_label(label)[0], rows)]
    if cells:
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
    parser.add_argument("--tasks", default="text,mqar", help=f"some of {', '.join(TASKS)}, with commas")
    parser.add_argument("--setting", default="", help="numbers of the tasks, as 'pairs=4,8 vocab_size=256'")
    parser.add_argument(
        "--rates",
        type=rates,
        help="learning rates with commas, instead of the recipe's, a third and three times",
    )
    parser.add_argument("--steps", type=int, help="instead of the recipes'; of all tasks but text the most")
    parser.add_argument(
        "--options", default="", help="fields of the mixers' configuration, as 'chunk=1 phi=identity'"
    )
    parser.add_argument(
        "--context", type=int, help="tokens of a sequence of text; a step has as many as the size's own"
    )
    parser.add_argument(
        "--size", help=f"of text and mqar: {', '.join(SIZES)} (default: 10m on a GPU, small without)"
    )
    parser.add_argument(
        "--widths", type=numbers, help="of the other tasks' models, with commas, instead of the tasks' own"
    )
    parser.add_argument("--corpus", type=path, help="a file or folder (default: Python's standard library)")
    parser.add_argument(
        "--folder", type=path, default=Path("runs/compare"), help="where the cells' files are"
    )
    seed_group = parser.add_mutually_exclusive_group()
    seed_group.add_argument("--seed", type=seed, default=0)
    seed_group.add_argument(
        "--seeds", type=seeds, help="how many, or several with commas: the table has means"
    )
    use_one_device()

    def run_command() -> int:
        Interrupt()
        together()
        plan = plan_of(parser.parse_args(argv))
        with contextlib.ExitStack() as lock:
            with refuse_unusable(plan.folder):
                make_folder(plan.folder)
                lock.enter_context(lock_folder(plan.folder))
            return 0 if compare(plan) else 1

    return answer("girih.compare", run_command)


if __name__ == "__main__":
    sys.exit(main())
