"""Answers on rows made by rule: training loss and share of right answers, at labels that are not ignored."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import TrainerCallback

from girih.data import IGNORED, Rows
from girih.training.trainer import ByteTrainer

LEARNED = 0.99  # share of right answers, in every group


def answers(model: Any, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits `[answers, vocab_size]` and labels `[answers]`, in the order of rows. Few tokens have a label;
    the logits of all others, which would take most of the time, are not computed."""
    x = model.model(input_ids, use_cache=False).last_hidden_state[:, :-1]
    is_counted = labels[:, 1:] != IGNORED
    return model.lm_head(x[is_counted]), labels[:, 1:][is_counted]


class AnswerTrainer(ByteTrainer):
    """`ByteTrainer` that makes logits for labels alone."""

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:
        logits, labels = answers(model, inputs["input_ids"], inputs["labels"])
        num_items = len(labels) if num_items_in_batch is None else num_items_in_batch
        return F.cross_entropy(logits.float(), labels, reduction="sum") / num_items


@torch.no_grad()
def accuracy(model: Any, rows: Rows, batch: int) -> dict[int, float]:
    """The share of right answers in each group of rows, over labels that are not ignored."""
    model.eval()
    device, num_right, num_answers = model.device.type, {}, {}
    for indices in torch.arange(len(rows)).split(batch):
        ids, labels = rows.input_ids[indices].long(), rows.labels[indices].long()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits, expected = answers(model, ids.to(model.device), labels.to(model.device))
        is_right = (logits.argmax(-1) == expected).cpu()
        group = rows.group[indices].repeat_interleave((labels[:, 1:] != IGNORED).sum(1))
        for g in group.unique().tolist():
            num_right[g] = num_right.get(g, 0) + int(is_right[group == g].sum())
            num_answers[g] = num_answers.get(g, 0) + int((group == g).sum())
    return {g: num_right[g] / num_answers[g] for g in sorted(num_answers)}


class StopsWhenLearned(TrainerCallback):
    """Ends training when every share is LEARNED, measured after each `check` steps."""

    def __init__(self, shares: Callable[[], dict[str, float]], check: int):
        self.shares, self.check = shares, check

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.check == 0:
            control.should_training_stop |= min(self.shares().values()) >= LEARNED
