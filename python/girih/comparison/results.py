"""The results of finished cells: mean and spread of a row over seeds, and its best learning rate."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from girih.comparison.tasks import Task, Text


@dataclass(frozen=True)
class Runs:
    """The cells of one row at one learning rate, one a seed."""

    cells: tuple[dict, ...]

    @property
    def settings(self) -> dict:
        return self.cells[0]["settings"]

    @property
    def parameters(self) -> int:
        return self.cells[0]["parameters"]

    @property
    def diverged(self) -> bool:
        return any(cell["diverged"] for cell in self.cells)

    @property
    def steps(self) -> float:
        return statistics.mean(cell["steps"] for cell in self.cells)

    @property
    def learned(self) -> bool:
        """Training ended before its last step, with every seed."""
        return all(cell["steps"] < cell["settings"]["steps"] for cell in self.cells)

    def mean(self, score: Callable[[dict], float]) -> float:
        return statistics.mean(map(score, self.cells))

    def format_mean(self, score: Callable[[dict], float]) -> str:
        """Mean, and of several seeds the sample's standard deviation."""
        spread = statistics.stdev(map(score, self.cells)) if len(self.cells) > 1 else None
        return f"{self.mean(score):.3f}" + ("" if spread is None else f" ± {spread:.3f}")


@dataclass(frozen=True, order=True)
class Row:
    mixer: str  # its name, or name and options
    width: int  # 0 where the size says how wide the models are

    def __str__(self) -> str:
        return f"{self.mixer}, {self.width}" if self.width else self.mixer


def rows_of(task: Task, cells: Iterable[dict]) -> dict[Row, dict[float, Runs]]:
    """The cells of a task by row and learning rate."""
    cells_by_row: dict[Row, dict[float, list[dict]]] = {}
    for cell in sorted(cells, key=lambda cell: cell["settings"]["seed"]):
        settings = cell["settings"]
        row = Row(cell["mixer"], settings["heads"] * settings["head_dim"] if task.widths else 0)
        cells_by_row.setdefault(row, {}).setdefault(settings["learning_rate"], []).append(cell)
    return {
        row: {rate: Runs(tuple(runs)) for rate, runs in by_rate.items()}
        for row, by_rate in sorted(cells_by_row.items())
    }


def bits(cell: dict) -> float:
    return cell["bits_per_byte"]


def mean_accuracy(cell: dict) -> float:
    return statistics.mean(cell["accuracy"].values())


def best_of(task: Task, rows: dict[Row, dict[float, Runs]]) -> dict[Row, Runs]:
    """The runs of each row at its best learning rate, among the rates where no seed diverged.

    Text is ordered by bits per byte. Answers are ordered by whether they were learned, then by the fewest
    steps, or, if they were not learned, by the most right answers. Rows that diverged at every rate are left
    out."""

    def order(runs: Runs) -> tuple:
        if isinstance(task, Text):
            return (runs.mean(bits),)
        return (not runs.learned, runs.steps if runs.learned else 0, -runs.mean(mean_accuracy))

    converged = {
        row: [runs for runs in by_rate.values() if not runs.diverged] for row, by_rate in rows.items()
    }
    return {row: min(candidates, key=order) for row, candidates in converged.items() if candidates}
