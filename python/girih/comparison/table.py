"""The tables and the figure of the finished cells."""

import os
from pathlib import Path

from girih.comparison.cell import best_of, mean_accuracy
from girih.training.folder import publish

WHAT = {
    "text": "Text: held-out bits per byte after {steps:,} steps of {tokens:,} bytes, at the best learning "
    "rate (lr) and at each.",
    "mqar": "Recall (MQAR): share of right answers at the best learning rate (lr); at each the mean over the "
    "numbers of pairs, and the steps until all were recalled, at most {steps:,}.",
}


def figures(task: str, cell: dict) -> list[str]:
    """What is shown of a mixer's best cell."""
    if task == "text":
        return [f"{cell['parameters']:,}", f"{cell['bits_per_byte']:.3f}"]
    return [f"{cell['parameters']:,}", *(f"{share:.3f}" for share in cell["accuracy"].values())]


def of_rate(task: str, cell: dict | None) -> str:
    if cell is None:
        return ""
    if cell["diverged"]:
        return "diverged"
    if task == "text":
        return f"{cell['bits_per_byte']:.3f}"
    return f"{mean_accuracy(cell):.3f} ({cell['steps']:,})"


def table_of(cells: dict[str, dict[str, dict[float, dict]]]) -> str:
    """Markdown, one row a mixer. cells[task][mixer][learning rate]: what run_cell gave, with its settings."""
    parts = []
    for task, of_mixer in cells.items():
        best = best_of(task, of_mixer)
        if not best:
            continue
        some = next(iter(best.values()))
        rates = sorted({rate for of in of_mixer.values() for rate in of})
        shown = ["bits per byte"] if task == "text" else [f"{pairs} pairs" for pairs in some["accuracy"]]
        heads = ["parameters", *shown, *(f"lr {rate:g}" for rate in rates)]
        lines = [["mixer", *heads], ["---", *("---:" for _ in heads)]]
        for mixer in sorted(best):
            grid = (of_rate(task, of_mixer[mixer].get(rate)) for rate in rates)
            lines.append([mixer, *figures(task, best[mixer]), *grid])
        recipe = some["settings"]
        what = WHAT[task].format(steps=recipe["steps"], tokens=recipe["batch"] * recipe["context"])
        parts.append(what + "\n\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines))
    return "\n".join(parts)


def write_table(cells: dict[str, dict[str, dict[float, dict]]], file: Path) -> str:
    """That of `table_of`; returns it too."""
    publish(file, table := table_of(cells))
    return table


def draw(cells: dict[str, dict[str, dict[float, dict]]], file: Path) -> None:
    """Of every mixer's best learning rate. Text: bits per byte, best on top. Recall: a square for every mixer
    and number of pairs."""
    from matplotlib.figure import Figure

    best = {task: best_of(task, of_mixer) for task, of_mixer in cells.items()}
    shown = [task for task in best if best[task]]
    if not shown:
        return
    most = max(len(best[task]) for task in shown)
    figure = Figure(figsize=(5.6 * len(shown), 1.6 + 0.36 * most), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        some = next(iter(best[task].values()))
        if task == "text":
            order = sorted(best[task], key=lambda m: best[task][m]["bits_per_byte"])
            values = [best[task][m]["bits_per_byte"] for m in order]
            axes.barh(order, values, color="C0", height=0.7)
            for i, value in enumerate(values):
                axes.text(value, i, f" {value:.3f}", va="center")
            axes.set(xlabel="held-out bits per byte (lower is better)", xlim=(0, 1.18 * max(values)))
            axes.invert_yaxis()
            title = f"text: {some['parameters'] / 1e6:.0f}M parameters, {some['steps']:,} steps"
        else:
            pairs = list(some["accuracy"])
            order = sorted(best[task], key=lambda m: -mean_accuracy(best[task][m]))
            grid = [[best[task][m]["accuracy"][p] for p in pairs] for m in order]
            axes.imshow(grid, vmin=0, vmax=1, cmap="Blues", aspect="auto")
            for i, row in enumerate(grid):
                for j, value in enumerate(row):
                    color = "white" if value > 0.6 else "black"
                    axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=color)
            axes.set(xticks=range(len(pairs)), xticklabels=pairs, yticks=range(len(order)), yticklabels=order)
            axes.set(xlabel="key-value pairs (share of right answers, higher is better)")
            title = f"recall (MQAR): {some['parameters'] / 1e6:.1f}M parameters"
        axes.set_title(title)
    draft = file.with_name("part-" + file.name)
    figure.savefig(draft, dpi=100)
    os.replace(draft, file)
