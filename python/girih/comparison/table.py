"""The tables and the figure of the finished cells."""

import os
from collections.abc import Iterable
from pathlib import Path

from girih.comparison.results import Row, Runs, best_of, bits, mean_accuracy, rows_of
from girih.comparison.tasks import Answers, Task, Text, parse_label
from girih.training.folder import publish


def format_rate(task: Task, runs: Runs | None) -> str:
    if runs is None:
        return ""
    if runs.diverged:
        return "diverged"
    if isinstance(task, Text):
        return runs.format_mean(bits)
    return f"{runs.format_mean(mean_accuracy)} ({runs.steps:,.0f})"


def columns(task: Task, runs: Runs) -> dict[str, str]:
    """The score columns of a row, at its best learning rate."""
    if isinstance(task, Text):
        return {"bits per byte": runs.format_mean(bits)}
    names = task.columns(runs.cells[0]["accuracy"])
    return {
        name: runs.format_mean(lambda cell, name=name: task.columns(cell["accuracy"])[name]) for name in names
    }


def title_of(label: str, runs: Runs, seeds: int) -> str:
    task, setting = parse_label(label)
    settings = {
        name: ", ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in runs.settings.items()
    }
    title = task.title.format(tokens=settings["batch"] * settings["context"], **settings)
    if setting:
        title += f"; with {setting.replace(' ', ', ')}"
    return title + (f". Mean ± standard deviation over {seeds} seeds." if seeds > 1 else ".")


def table_of(cells: dict[str, Iterable[dict]]) -> str:
    """The tables in Markdown, one row a mixer and width. cells: the contents of each task's files."""
    parts = []
    for label, task_cells in cells.items():
        task, _ = parse_label(label)
        rows = rows_of(task, task_cells)
        best = best_of(task, rows)
        if not best:
            continue
        first_runs = next(iter(best.values()))
        rates = sorted({rate for by_rate in rows.values() for rate in by_rate})
        seeds = max(len(runs.cells) for runs in best.values())
        heads = [*(["width"] if task.widths else []), "parameters", *columns(task, first_runs)]
        heads += [f"lr {rate:g}" for rate in rates]
        lines = [["mixer", *heads], ["---", *("---:" for _ in heads)]]
        for row, runs in best.items():
            fewer = f" ({len(runs.cells)} of {seeds} seeds)" if len(runs.cells) < seeds else ""
            lines.append(
                [
                    row.mixer + fewer,
                    *([f"{row.width}"] if task.widths else []),
                    f"{runs.parameters:,}",
                    *columns(task, runs).values(),
                    *(format_rate(task, rows[row].get(rate)) for rate in rates),
                ]
            )
        table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
        parts.append(f"{title_of(label, first_runs, seeds)}\n\n{table}")
    return "\n".join(parts)


def write_table(cells: dict[str, Iterable[dict]], file: Path) -> str:
    """Writes `table_of(cells)` to a file and returns it."""
    publish(file, table := table_of(cells))
    return table


def draw_text(axes, best: dict[Row, Runs]) -> str:
    """Bits per byte, the fewest on top. Returns the title."""
    order = sorted(best, key=lambda row: best[row].mean(bits))
    values = [best[row].mean(bits) for row in order]
    axes.barh([str(row) for row in order], values, color="C0", height=0.7)
    for i, value in enumerate(values):
        axes.text(value, i, f" {value:.3f}", va="center")
    axes.set(xlabel="held-out bits per byte (lower is better)", xlim=(0, 1.18 * max(values)))
    axes.invert_yaxis()
    runs = best[order[-1]]
    return f"text: {runs.parameters / 1e6:.0f}M parameters, {runs.steps:,.0f} steps"


def draw_answers(axes, task: Answers, best: dict[Row, Runs]) -> None:
    """A square for every row and column of the table, the most right answers on top."""
    order = sorted(best, key=lambda row: -best[row].mean(mean_accuracy))
    names = list(task.columns(best[order[0]].cells[0]["accuracy"]))
    grid = [
        [best[row].mean(lambda cell, name=name: task.columns(cell["accuracy"])[name]) for name in names]
        for row in order
    ]
    axes.imshow(grid, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    for i, shares in enumerate(grid):
        for j, value in enumerate(shares):
            color = "white" if value > 0.6 else "black"
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=color)
    axes.set(xticks=range(len(names)), xticklabels=names, yticks=range(len(order)))
    axes.set(yticklabels=list(map(str, order)), xlabel="share of right answers (higher is better)")


def draw(cells: dict[str, Iterable[dict]], file: Path) -> None:
    """Draws a panel for each task: every row at its best learning rate."""
    from matplotlib.figure import Figure

    best = {
        label: best_of(parse_label(label)[0], rows_of(parse_label(label)[0], task_cells))
        for label, task_cells in cells.items()
    }
    format_mean = [label for label in best if best[label]]
    if not format_mean:
        return
    most = max(len(best[label]) for label in format_mean)
    figure = Figure(figsize=(5.6 * len(format_mean), 1.6 + 0.36 * most), layout="constrained")
    for axes, label in zip(figure.subplots(1, len(format_mean), squeeze=False)[0], format_mean, strict=True):
        task, _ = parse_label(label)
        if isinstance(task, Text):
            axes.set_title(draw_text(axes, best[label]))
        else:
            draw_answers(axes, task, best[label])
            axes.set_title(label)
    draft = file.with_name("part-" + file.name)
    figure.savefig(draft, dpi=100)
    os.replace(draft, file)
