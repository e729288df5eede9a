"""A cell of the comparison: one mixer trained and measured on one task."""

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from girih.data import Recall, Windows
from girih.nn import MIXERS
from girih.training.recipe import SIZES, Recipe, model_of_size
from girih.training.trainer import BITS, fit

# The mixers of a task when none are named.
DEFAULTS = {
    task: tuple(name for name, mixer in MIXERS.items() if task in mixer.tasks) for task in ("text", "mqar")
}
TEXT_STEPS = 300


@dataclass(frozen=True, kw_only=True)
class RecallRecipe(Recipe):
    """`context` tokens a row over `vocab_size` tokens; rows take turns over the numbers of `pairs`."""

    vocab_size: int
    pairs: tuple[int, ...]

    @property
    def bytes_a_step(self) -> int:
        """The rows themselves: tokens and labels of four bytes."""
        return 8 * self.batch * self.context


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
        recipe = replace(SIZES[size], steps=TEXT_STEPS)
    else:
        recipe = RECALL.get(size, RECALL_LARGE)
    return recipe if steps is None else replace(recipe, steps=steps)


def is_cell(cell: dict, task: str, recipe: Recipe) -> bool:
    """Whether all is there that the table and the figure show."""
    shown = [cell.get(name) for name in ("parameters", "tokens", "tokens_per_second")]
    if task == "text":
        shown.append(cell.get("bits_per_byte"))
    else:
        accuracy = cell.get("accuracy")
        pairs = map(str, recipe.pairs)
        shown += [accuracy.get(p) for p in pairs] if isinstance(accuracy, dict) else [None]
    return all(isinstance(number, int | float) for number in shown)


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
