"""A cell of the comparison: one mixer trained and measured on one task at one learning rate and seed."""

import math
from pathlib import Path

import torch
from transformers import TrainerCallback

from girih.comparison.tasks import parse_label
from girih.data import Corpus
from girih.nn import MIXERS
from girih.training.recipe import Recipe, model_of_size
from girih.training.trainer import fit

COMPARED = tuple(name for name, mixer in MIXERS.items() if mixer.compared)


def rates_of(recipe: Recipe) -> tuple[float, ...]:
    """Three learning rates: a third of the recipe's, the recipe's, three times as much."""
    return tuple(float(f"{recipe.learning_rate * factor:.2g}") for factor in (1 / 3, 1, 3))


def is_cell(cell: dict, task: str, recipe: Recipe) -> bool:
    """Whether a cell's file has every number that the table and the figure show."""
    diverged = cell.get("diverged")
    numbers = [cell.get(name) for name in ("parameters", "steps")]
    if not isinstance(diverged, bool) or not all(isinstance(number, int | float) for number in numbers):
        return False
    return diverged or parse_label(task)[0].has_score(cell, recipe)


class StopsWhenDiverged(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if not math.isfinite(logs.get("loss", 0.0)):
            control.should_training_stop = True


def run_cell(label: str, mixer: str, recipe: Recipe, corpus: Corpus, scratch: Path, seed: int) -> dict:
    """Train one mixer on one task and measure it. task, mixer: a name, or a name with options."""
    task, _ = parse_label(label)
    name, _, options = mixer.partition(" ")
    torch.manual_seed(seed)
    model = model_of_size(name, recipe, task.vocab_size(recipe), options)
    data = task.training_data(recipe, corpus, seed)
    trainer = fit(
        model, recipe, data, None, scratch, seed, task.unit, trainer=task.trainer, save_strategy="no"
    )
    for callback in (StopsWhenDiverged(), *task.callbacks(model, recipe, seed)):
        trainer.add_callback(callback)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    diverged = not all(math.isfinite(log["loss"]) for log in logs)
    score = {} if diverged else task.measure(trainer, recipe, corpus, seed)
    if not math.isfinite(score.get("bits_per_byte", 0.0)):
        diverged, score = True, {}
    tokens = recipe.batch * recipe.context
    return {
        "task": label,
        "mixer": mixer,
        "parameters": model.num_parameters(),
        "steps": trainer.state.global_step,
        "diverged": diverged,
        **score,
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else "CPU",
        "loss": [[log["step"] * tokens, log["loss"]] for log in logs if math.isfinite(log["loss"])],
    }
