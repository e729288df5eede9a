"""The table and the figure of the finished cells."""

import os
from pathlib import Path

from girih.models import MIXERS
from girih.training.folder import publish


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
