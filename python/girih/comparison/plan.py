"""The cells of a comparison, the file of each cell, and the recipe that all mixers of a task share."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from girih.comparison.cell import is_cell, rates_of
from girih.comparison.tasks import TASKS, parse_label
from girih.data import Corpus
from girih.models import MIXERS
from girih.training.command import Refusal
from girih.training.folder import damaged, read_json
from girih.training.recipe import Recipe, with_context


class Cell(NamedTuple):
    task: str  # its name, or name and setting: "mqar_256 pairs=8"
    mixer: str  # its name, or name and options: "trellis chunk=1"
    width: int | None  # of the models, of a task that has widths
    rate: float
    seed: int

    def __str__(self) -> str:
        width = f" width {self.width}" if self.width else ""
        seed = f" seed {self.seed}" if self.seed else ""
        return f"{self.task} {self.mixer}{width} {self.rate:g}{seed}"


@dataclass(frozen=True)
class Plan:
    """Labels of tasks and mixers, values that replace those of the recipes, and the folder of the files."""

    tasks: tuple[str, ...]
    mixers: tuple[str, ...]
    size: str
    seeds: tuple[int, ...]
    folder: Path
    widths: tuple[int, ...] | None = None
    rates: tuple[float, ...] | None = None
    steps: int | None = None
    context: int | None = None  # of text
    corpus: Corpus | None = None

    def widths_of(self, task: str) -> tuple[int | None, ...]:
        task_widths = parse_label(task)[0].widths
        return (self.widths or task_widths) if task_widths else (None,)

    def recipe(self, task: str, width: int | None) -> Recipe:
        named_task, setting = parse_label(task)
        recipe = named_task.apply_setting(named_task.recipe(self.size, width), setting)
        if named_task is TASKS["text"]:
            recipe = with_context(recipe, self.context)
        return recipe if self.steps is None else replace(recipe, steps=self.steps)

    def recipe_of(self, cell: Cell) -> Recipe:
        return replace(self.recipe(cell.task, cell.width), learning_rate=cell.rate)

    def cells(self, tasks: Iterable[str], mixers: Iterable[str]) -> Iterator[Cell]:
        for task in tasks:
            for mixer in mixers:
                for width in self.widths_of(task):
                    for rate in self.rates or rates_of(self.recipe(task, width)):
                        yield from (Cell(task, mixer, width, rate, seed) for seed in self.seeds)

    def known_cells(self) -> list[Cell]:
        """The cells of every task and mixer, and of labels with a setting or options that have a file."""
        tasks, mixers = dict.fromkeys((*TASKS, *self.tasks)), dict.fromkeys((*MIXERS, *self.mixers))
        for file in sorted(self.folder.glob("*=*.json")):
            cell = read_json(file)
            task, mixer = cell.get("task"), cell.get("mixer")
            if isinstance(task, str) and is_task(task):
                tasks[task] = None
            if isinstance(mixer, str) and mixer.split(" ")[0] in MIXERS:
                mixers[mixer] = None
        return list(self.cells(tasks, list(mixers)))

    def file(self, cell: Cell) -> Path:
        name = f"{cell.task}-{cell.mixer}".replace(" ", ",").replace("/", "_")
        context = f"-{self.context}" if self.context and cell.task == "text" else ""
        steps = self.recipe_of(cell).steps
        seed = f"-seed{cell.seed}" if cell.seed else ""
        return self.folder / f"{name}-{cell.width or self.size}{context}-{steps}-{cell.rate:g}{seed}.json"

    def settings_of(self, cell: Cell) -> dict:
        """The settings as a cell's file stores them."""
        settings = asdict(self.recipe_of(cell)) | {"seed": cell.seed}
        if cell.task == "text":
            settings["corpus_sha256"] = self.corpus.digest
        return json.loads(json.dumps(settings))

    def read_result(self, cell: Cell) -> tuple[dict | None, str]:
        """The content of the cell's file, or None, and the names of settings that differ from the plan's."""
        file = self.file(cell)
        if not file.exists():
            return None, ""
        result = read_json(file)
        saved, expected = result.get("settings"), self.settings_of(cell)
        if not isinstance(saved, dict) or (
            saved == expected and not is_cell(result, cell.task, self.recipe_of(cell))
        ):
            raise damaged(file)
        differing = [name for name in sorted({*saved, *expected}) if saved.get(name) != expected.get(name)]
        return result, " and ".join(name.removesuffix("_sha256") for name in differing)


def is_task(label: str) -> bool:
    """Whether a label is a task's name, or a name and a setting of this task."""
    try:
        task, setting = parse_label(label)
        task.apply_setting(task.recipe("tiny", next(iter(task.widths), None)), setting)
    except Refusal:
        return False
    return True
