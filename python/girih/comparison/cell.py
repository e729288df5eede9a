"""A cell of the comparison: one mixer trained and measured on one task at one learning rate."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import TrainerCallback

from girih.data import Recall, Windows
from girih.nn import MIXERS
from girih.training.recipe import SIZES, Recipe, model_of_size
from girih.training.trainer import BITS, fit

TASKS = ("text", "mqar")
COMPARED = tuple(name for name, mixer in MIXERS.items() if mixer.compared)
TEXT_STEPS, TEXT_RATE = 600, 3e-3  # fewer steps than `make train` takes, which go by a larger rate
LEARNED = 0.99  # share of right answers, for every number of pairs


@dataclass(frozen=True, kw_only=True)
class RecallRecipe(Recipe):
    """`context` tokens a row over `vocab_size` tokens; rows take turns over the numbers of `pairs`.

    rows: how many are drawn, and gone through as often as the steps ask for. check: after so many steps it
    is looked whether all pairs are recalled, which ends training; `steps` are the most.
    """

    vocab_size: int
    pairs: tuple[int, ...]
    rows: int
    check: int


# Two layers, as in Zoology; the size of the text models tells how much time there is.
RECALL = {
    "tiny": RecallRecipe(
        60_000, 2, 2, 16, 16, 32, 8, 20, 3e-3, 32, vocab_size=32, pairs=(2, 4), rows=160, check=10
    ),
    "small": RecallRecipe(
        200_000, 2, 1, 64, 64, 64, 64, 1000, 3e-3, 1024,
        vocab_size=256, pairs=(4, 8, 16), rows=25_600, check=50,
    ),
}  # fmt: skip
RECALL_LARGE = RecallRecipe(
    700_000, 2, 2, 64, 64, 256, 128, 10_000, 3e-3, 1024,
    vocab_size=512, pairs=(4, 8, 16, 32, 64), rows=102_400, check=100,
)  # fmt: skip


def recipe_of(task: str, size: str, steps: int | None) -> Recipe:
    if task == "text":
        recipe = replace(SIZES[size], steps=TEXT_STEPS, learning_rate=TEXT_RATE)
    else:
        recipe = RECALL.get(size, RECALL_LARGE)
    return recipe if steps is None else replace(recipe, steps=steps)


def rates_of(recipe: Recipe) -> tuple[float, ...]:
    """Three learning rates: a third of the recipe's, the recipe's, three times as much."""
    return tuple(float(f"{recipe.learning_rate * by:.2g}") for by in (1 / 3, 1, 3))


def is_cell(cell: dict, task: str, recipe: Recipe) -> bool:
    """Whether all is there that the table and the figure show."""
    diverged = cell.get("diverged")
    shown = [cell.get(name) for name in ("parameters", "steps")]
    if task == "text" and not diverged:
        shown.append(cell.get("bits_per_byte"))
    elif not diverged:
        accuracy = cell.get("accuracy")
        pairs = map(str, recipe.pairs)
        shown += [accuracy.get(p) for p in pairs] if isinstance(accuracy, dict) else [None]
    return isinstance(diverged, bool) and all(isinstance(number, int | float) for number in shown)


def mean_accuracy(cell: dict) -> float:
    return sum(cell["accuracy"].values()) / len(cell["accuracy"])


def is_learned(cell: dict) -> bool:
    """Of recall: its training ended before its last step."""
    return cell["steps"] < cell["settings"]["steps"]


def best_of(task: str, cells: dict[str, dict[float, dict]]) -> dict[str, dict]:
    """Of every mixer's cells, by learning rate, the best that did not diverge: the fewest bits per byte; in
    recall what was learned, in the fewest steps, or else the most right answers. Of a mixer that always
    diverged none."""

    def order(cell: dict) -> tuple:
        if task == "text":
            return (cell["bits_per_byte"],)
        learned = is_learned(cell)
        return (not learned, cell["steps"] if learned else 0, -mean_accuracy(cell))

    kept = {mixer: [c for c in of.values() if not c["diverged"]] for mixer, of in cells.items()}
    return {mixer: min(some, key=order) for mixer, some in kept.items() if some}


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


class StopsWhenDiverged(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if not math.isfinite(logs.get("loss", 0.0)):
            control.should_training_stop = True


class StopsWhenLearned(TrainerCallback):
    """Measures on rows of its own, neither trained on nor those that the result is of."""

    def __init__(self, model, data: Recall, recipe: RecallRecipe):
        self.model, self.data, self.recipe = model, data, recipe

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.recipe.check == 0:
            accuracy = recall_accuracy(self.model, self.data, self.recipe.batch)
            control.should_training_stop |= min(accuracy.values()) >= LEARNED


def run_cell(task: str, mixer: str, recipe: Recipe, corpus, scratch: Path, seed: int) -> dict:
    """Train one mixer, by its name or name and options, on one task and measure it."""
    name, _, options = mixer.partition(" ")
    torch.manual_seed(seed)
    count = recipe.steps * recipe.batch
    if task == "text":
        model = model_of_size(name, recipe, options=options)
        data = Windows.drawn(corpus.train, count, recipe.context, seed)
        held_out = Windows.spread(corpus.held_out, recipe.held_out, recipe.context)
    else:
        model = model_of_size(name, recipe, recipe.vocab_size, options)
        data, held_out, looked_at = (
            Recall(rows, recipe.context, recipe.pairs, recipe.vocab_size, seed + i)
            for i, rows in enumerate((min(count, recipe.rows), recipe.held_out, recipe.held_out))
        )
    unit = "bits per byte" if task == "text" else "bits per answer"
    trainer = fit(model, recipe, data, held_out, scratch, seed, unit, save_strategy="no")
    trainer.add_callback(StopsWhenDiverged())
    if task == "mqar":
        trainer.add_callback(StopsWhenLearned(model, looked_at, recipe))
    trainer.train()
    score = {}
    logs = [log for log in trainer.state.log_history if "loss" in log]
    diverged = not all(math.isfinite(log["loss"]) for log in logs)
    if not diverged and task == "text":
        score = {"bits_per_byte": trainer.evaluate()["eval_loss"] * BITS}
        diverged = not math.isfinite(score["bits_per_byte"])
    elif not diverged:
        score = {"accuracy": recall_accuracy(model, held_out, recipe.batch)}
    tokens = recipe.batch * recipe.context
    return {
        "task": task,
        "mixer": mixer,
        "parameters": model.num_parameters(),
        "steps": trainer.state.global_step,
        "diverged": diverged,
        **({} if diverged else score),
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else "CPU",
        "loss": [[log["step"] * tokens, log["loss"]] for log in logs if math.isfinite(log["loss"])],
    }
