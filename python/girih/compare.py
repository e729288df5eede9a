"""Train mixers at equal size on equal data and lay the results side by side: `python -m girih.compare`.

Two tasks: `text`, bits per byte of held-out text, and `mqar`, the share of right answers in multi-query
associative recall. Every mixer gets the same data, in the same order, and the same learning rate. A
finished cell (a task and a mixer) is one file; only cells without their file are trained; table.md and
figure.png are made from the files.
"""

import argparse
import json
import math
import os
import shutil
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from girih.data import Recall, Windows, read_corpus
from girih.models import MIXERS
from girih.train import (
    BITS,
    SIZES,
    Interrupted,
    Parser,
    Recipe,
    Refusal,
    answer,
    disk_full,
    fit,
    model_of_size,
    publish,
    refuse_unknown,
)

# The mixers of a task when none are named.
DEFAULTS = {
    "text": (
        "gsa",
        "abc",
        "gla",
        "linear_attention",
        "mamba2",
        "delta_product",
        "deltanet",
        "gated_deltanet",
        "trellis",
        "lattice",
        "attention",
        "cat",
    ),
    "mqar": ("gsa", "linear_attention", "deltanet", "delta_product", "trellis", "lattice", "attention"),
}
TEXT_STEPS = 300


@dataclass(frozen=True, kw_only=True)
class RecallRecipe(Recipe):
    """`context` tokens a row over `vocab_size` tokens; rows take turns over the numbers of `pairs`."""

    vocab_size: int
    pairs: tuple[int, ...]


# Two layers, as in Zoology; the size of the text models tells how much time there is.
RECALL = {
    "tiny": RecallRecipe(60_000, 2, 2, 16, 16, 32, 8, 20, 3e-3, 32, vocab_size=32, pairs=(2, 4)),
    "small": RecallRecipe(200_000, 2, 1, 64, 64, 64, 64, 400, 5e-3, 1024, vocab_size=256, pairs=(4, 8, 16)),
}
RECALL_LARGE = RecallRecipe(
    700_000, 2, 2, 64, 64, 256, 256, 800, 5e-3, 1024, vocab_size=512, pairs=(4, 8, 16, 32, 64)
)


def recipe_of(task: str, size: str, steps: int | None) -> Recipe:
    if task == "text":
        return replace(SIZES[size], steps=steps or TEXT_STEPS)
    recipe = RECALL.get(size, RECALL_LARGE)
    return replace(recipe, steps=steps or recipe.steps)


@torch.no_grad()
def recall_accuracy(model, data: Recall, batch: int) -> dict[str, float]:
    """Share of right answers for every number of pairs, queries alone counted."""
    model.eval()
    right = dict.fromkeys(data.pairs.unique().tolist(), 0)
    asked = dict.fromkeys(right, 0)
    for rows in torch.arange(len(data)).split(batch):
        ids, labels = data.input_ids[rows].long(), data.labels[rows, 1:]
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
            guess = model(ids.to(model.device), use_cache=False).logits[:, :-1].argmax(-1).cpu()
        for pairs in right:
            of = data.pairs[rows] == pairs
            right[pairs] += int((guess[of] == labels[of]).sum())
            asked[pairs] += int((labels[of] >= 0).sum())
    return {str(pairs): right[pairs] / asked[pairs] for pairs in right}


def run_cell(task: str, mixer: str, recipe: Recipe, corpus, scratch: Path, seed: int) -> dict:
    """Train one mixer on one task and measure it."""
    torch.manual_seed(seed)
    count = recipe.steps * recipe.batch
    if task == "text":
        model = model_of_size(mixer, recipe)
        data = Windows.drawn(corpus.train, count, recipe.context, seed)
        held_out = Windows.spread(corpus.held_out, recipe.held_out, recipe.context)
    else:
        model = model_of_size(mixer, recipe, recipe.vocab_size)
        data = Recall(count, recipe.context, recipe.pairs, recipe.vocab_size, seed)
        held_out = Recall(recipe.held_out, recipe.context, recipe.pairs, recipe.vocab_size, seed + 1)
    unit = "bits per byte" if task == "text" else "bits per answer"
    trainer = fit(model, recipe, data, held_out, scratch, seed, unit, save_strategy="no")
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    if task == "text":
        score = {"bits_per_byte": trainer.evaluate()["eval_loss"] * BITS}
    else:
        score = {"accuracy": recall_accuracy(model, held_out, recipe.batch)}
    logs = [log for log in trainer.state.log_history if "loss" in log]
    if not all(math.isfinite(x) for x in [logs[-1]["loss"], score.get("bits_per_byte", 0.0)]):
        raise FloatingPointError("the loss is not finite")
    tokens = recipe.batch * recipe.context
    return {
        "task": task,
        "mixer": mixer,
        "parameters": model.num_parameters(),
        **score,
        "tokens": recipe.steps * tokens,
        "tokens_per_second": round(recipe.steps * tokens / seconds),
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else "CPU",
        "loss": [[log["step"] * tokens, log["loss"]] for log in logs],
    }


def write_table(cells: dict[str, dict[str, dict]], file: Path) -> str:
    """cells[task][mixer]: what run_cell gave. One row a mixer; returns the Markdown too."""
    columns = []  # task, heading, what a cell shows there
    if cells["text"]:
        columns += [
            ("text", "text: parameters", lambda cell: f"{cell['parameters']:,}"),
            ("text", "tokens/s", lambda cell: f"{cell['tokens_per_second']:,}"),
            ("text", "bits per byte", lambda cell: f"{cell['bits_per_byte']:.3f}"),
        ]
    if cells["mqar"]:
        columns.append(("mqar", "MQAR: parameters", lambda cell: f"{cell['parameters']:,}"))
        for pairs in next(iter(cells["mqar"].values()))["accuracy"]:
            columns.append(
                ("mqar", f"{pairs} pairs", lambda cell, pairs=pairs: f"{cell['accuracy'][pairs]:.3f}")
            )
    lines = [["mixer", *(heading for _, heading, _ in columns)], ["---", *("---:" for _ in columns)]]
    for mixer in MIXERS:
        if any(mixer in of_task for of_task in cells.values()):
            shown = (show(cells[task][mixer]) if mixer in cells[task] else "" for task, _, show in columns)
            lines.append([mixer, *shown])
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    publish(file, table)
    return table


def draw(cells: dict[str, dict[str, dict]], file: Path) -> None:
    """Text: bits per byte, best on top. Recall: a square for every mixer and number of pairs."""
    from matplotlib.figure import Figure

    shown = [task for task in ("text", "mqar") if cells[task]]
    most = max(len(cells[task]) for task in shown)
    figure = Figure(figsize=(5.6 * len(shown), 1.6 + 0.36 * most), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        some = next(iter(cells[task].values()))
        if task == "text":
            order = sorted(cells[task], key=lambda m: cells[task][m]["bits_per_byte"])
            values = [cells[task][m]["bits_per_byte"] for m in order]
            axes.barh(order, values, color="C0", height=0.7)
            for i, value in enumerate(values):
                axes.text(value, i, f" {value:.3f}", va="center")
            axes.set(xlabel="held-out bits per byte (lower is better)", xlim=(0, 1.18 * max(values)))
            axes.invert_yaxis()
            title = f"text: {some['parameters'] / 1e6:.1f}M parameters"
        else:
            pairs = list(some["accuracy"])
            order = sorted(cells[task], key=lambda m: -sum(cells[task][m]["accuracy"].values()))
            grid = [[cells[task][m]["accuracy"][p] for p in pairs] for m in order]
            axes.imshow(grid, vmin=0, vmax=1, cmap="Blues", aspect="auto")
            for i, row in enumerate(grid):
                for j, value in enumerate(row):
                    axes.text(
                        j,
                        i,
                        f"{value:.2f}",
                        ha="center",
                        va="center",
                        color="white" if value > 0.6 else "black",
                    )
            axes.set(xticks=range(len(pairs)), xticklabels=pairs, yticks=range(len(order)), yticklabels=order)
            axes.set(xlabel="key-value pairs (share of right answers, higher is better)")
            title = f"recall (MQAR): {some['parameters'] / 1e6:.1f}M parameters"
        axes.set_title(f"{title}, {some['tokens'] / 1e6:.1f}M tokens")
    draft = file.with_name("part-" + file.name)
    figure.savefig(draft, dpi=150)
    os.replace(draft, file)


def finished(file: Path, settings: dict) -> dict | None:
    """The cell in `file` if it was trained with these settings."""
    if not file.exists():
        return None
    cell = json.loads(file.read_text())
    return cell if cell.get("settings") == settings else None


def compare(options: argparse.Namespace) -> bool:
    """Train what is missing, then make the table and the figure. False if a cell failed."""
    size = options.size or ("10m" if torch.cuda.is_available() else "small")
    tasks = options.tasks.split(",")
    mixers = options.mixers.split(",") if options.mixers else None
    refuse_unknown("size", [size], SIZES)
    refuse_unknown("task", tasks, DEFAULTS)
    refuse_unknown("mixer", mixers or [], MIXERS)
    if options.steps is not None and options.steps < 1:
        raise Refusal(f"steps {options.steps}: at least 1")
    recipes = {task: recipe_of(task, size, options.steps) for task in ("text", "mqar")}
    corpus = read_corpus(options.corpus, recipes["text"].context)
    settings = {
        task: json.loads(json.dumps({**asdict(recipe), "seed": options.seed}))
        for task, recipe in recipes.items()
    }
    settings["text"]["corpus_sha256"] = corpus.digest

    def file(task: str, mixer: str) -> Path:
        return options.folder / f"{task}-{mixer}-{size}-{recipes[task].steps}.json"

    options.folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for task in tasks:
        for mixer in mixers or DEFAULTS[task]:
            if finished(file(task, mixer), settings[task]):
                print(f"{task} {mixer}: there already")
                continue
            print(f"{task} {mixer}: {recipes[task].steps} steps", flush=True)
            scratch = options.folder / ".scratch"
            try:
                cell = run_cell(task, mixer, recipes[task], corpus, scratch, options.seed)
            except Exception as error:
                if isinstance(error, Interrupted) or disk_full(error):
                    raise
                traceback.print_exc()
                failed.append(f"{task} {mixer}: {type(error).__name__}: {error}")
                continue
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            publish(file(task, mixer), json.dumps({**cell, "settings": settings[task]}, indent=1) + "\n")
    cells = {
        task: {m: cell for m in MIXERS if (cell := finished(file(task, m), settings[task]))}
        for task in ("text", "mqar")
    }
    if any(cells.values()):
        print("\n" + write_table(cells, options.folder / "table.md"))
        draw(cells, options.folder / "figure.png")
        print(f"{options.folder / 'table.md'}\n{options.folder / 'figure.png'}")
    for line in failed:
        print(f"girih.compare: failed: {line}", file=sys.stderr)
    return not failed


def stop(number, frame):
    raise Interrupted(number)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="girih.compare", description="Train mixers at equal size on equal data and compare.")
    parser.add_argument("--mixers", help="names with commas (default: all for text, seven for mqar)")
    parser.add_argument("--tasks", default="text,mqar", help="text, mqar or both with a comma")
    parser.add_argument("--steps", type=int, help="instead of 300 of text and the recall task's own")
    parser.add_argument("--size", help=f"{', '.join(SIZES)} (default: 10m on a GPU, small without)")
    parser.add_argument("--corpus", type=Path, help="a file or folder (default: Python's standard library)")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/compare"), help="where the cells' files are"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # a cell runs on one device, or its batch would grow
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    good = True

    def work():
        nonlocal good
        good = compare(options)

    return answer("girih.compare", work) or (0 if good else 1)


if __name__ == "__main__":
    sys.exit(main())
