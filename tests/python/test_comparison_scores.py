"""What a comparison shows: scores of hand-made models, on rows not trained on, each in its own column."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from girih.comparison import cell
from girih.comparison.table import write_table
from girih.data import Corpus, Recall
from girih.models import MIXERS
from girih.training.recipe import SIZES


class ByHand(torch.nn.Module):
    """Answers a query by the value that follows its key, where `knows(keys)`; anything elsewhere."""

    device = torch.device("cpu")

    def __init__(self, vocab_size, knows):
        super().__init__()
        self.vocab_size, self.knows = vocab_size, knows

    def forward(self, ids, use_cache):
        guess = torch.full_like(ids, 5)
        for row, tokens in enumerate(ids.tolist()):
            values = {}
            for t, token in enumerate(tokens):
                if token in values:
                    guess[row, t] = values[token] if self.knows(list(values), token) else 0
                elif t % 2 == 0 and token:  # pairs come first
                    values[token] = tokens[t + 1]
        return SimpleNamespace(logits=torch.nn.functional.one_hot(guess, self.vocab_size).float())


@pytest.mark.parametrize(
    "knows, score",
    [
        (lambda keys, key: True, 1.0),
        (lambda keys, key: keys.index(key) < len(keys) // 2, 0.5),
        (lambda keys, key: False, 0.0),
    ],
    ids=["all", "the first half", "none"],
)
def test_accuracy_is_the_share_of_queries_answered(knows, score):
    data = Recall(30, 64, [4, 8, 16], 64, seed=0)
    found = cell.recall_accuracy(ByHand(64, knows), data, batch=7)
    assert found == {"4": score, "8": score, "16": score}


def test_recall_is_measured_on_rows_that_were_not_trained_on(tmp_path, monkeypatch):
    trained, measured = [], []

    def fit(model, recipe, data, held_out, *rest, **options):
        trained.extend(data.input_ids.tolist())
        state = SimpleNamespace(log_history=[{"step": 1, "loss": 1.0}], global_step=1)
        return SimpleNamespace(train=lambda: None, add_callback=lambda callback: None, state=state)

    def accuracy(model, data, batch):
        measured.extend(data.input_ids.tolist())
        return {}

    monkeypatch.setattr(cell, "fit", fit)
    monkeypatch.setattr(cell, "recall_accuracy", accuracy)
    recipe = cell.RECALL["small"]
    recipe = replace(recipe, steps=recipe.held_out // recipe.batch)  # as many: the same seed draws the same
    cell.run_cell("mqar", "attention", recipe, None, tmp_path, seed=0)
    assert len(trained) == recipe.steps * recipe.batch and len(measured) == recipe.held_out
    assert not set(map(tuple, trained)) & set(map(tuple, measured))


def test_text_is_measured_on_the_held_out_text_alone(tmp_path, monkeypatch):
    """Bytes below 128 are trained on, those from 128 on are held out."""
    seen = {}

    def fit(model, recipe, data, held_out, *rest, **options):
        seen.update(data=data, held_out=held_out)
        state = SimpleNamespace(log_history=[{"step": 1, "loss": 1.0}], global_step=1)
        trainer = SimpleNamespace(train=lambda: None, add_callback=lambda callback: None, state=state)
        trainer.evaluate = lambda: {"eval_loss": 2.0}
        return trainer

    monkeypatch.setattr(cell, "fit", fit)
    recipe = replace(SIZES["tiny"], steps=3)
    whole = (torch.arange(9000) % 128).to(torch.uint8)
    corpus = Corpus("two halves", whole, whole + 128, "")
    found = cell.run_cell("text", "attention", recipe, corpus, tmp_path, seed=0)
    assert found["bits_per_byte"] == pytest.approx(2 / math.log(2))
    trained, measured = (torch.stack([w["input_ids"] for w in seen[name]]) for name in ("data", "held_out"))
    assert trained.shape == (3 * recipe.batch, recipe.context) and trained.max() < 128
    assert measured.shape == (recipe.held_out, recipe.context) and measured.min() >= 128
    starts = seen["held_out"].starts
    assert (starts.diff() >= recipe.context).all()


def text(parameters, bits):
    settings = {"steps": 7, "batch": 2, "context": 3}
    return {
        "parameters": parameters,
        "steps": 7,
        "diverged": False,
        "bits_per_byte": bits,
        "settings": settings,
    }


def recall(parameters, steps, *shares):
    accuracy = dict(zip(("4", "8"), shares, strict=True))
    settings = {"steps": 5000, "batch": 2, "context": 3}
    return {
        "parameters": parameters,
        "steps": steps,
        "diverged": False,
        "accuracy": accuracy,
        "settings": settings,
    }


def test_every_column_shows_its_own(tmp_path):
    first, second, *_ = MIXERS
    diverged = {"parameters": 1, "steps": 1, "diverged": True}
    cells = {
        "text": {
            first: {0.001: text(1000, 3.0), 0.01: text(1000, 2.5)},
            second: {0.001: text(1001, 4.0), 0.01: diverged},
        },
        "mqar": {
            first: {0.001: recall(4000, 5000, 0.1, 0.2), 0.003: recall(4000, 5000, 0.3, 0.5)},
            second: {0.001: recall(4001, 900, 0.99, 1.0), 0.003: recall(4001, 800, 0.99, 0.99)},
        },
    }
    of_text, table, of_recall, other = write_table(cells, tmp_path / "table.md").split("\n\n")
    assert "after 7 steps of 6 bytes" in of_text and "at most 5,000" in of_recall
    rows = [
        [[part.strip() for part in line.strip("| ").split("|")] for line in part.splitlines()]
        for part in (table, other)
    ]
    assert rows[0][0] == ["mixer", "parameters", "bits per byte", "lr 0.001", "lr 0.01"]
    assert rows[0][2:] == [
        [first, "1,000", "2.500", "3.000", "2.500"],
        [second, "1,001", "4.000", "4.000", "diverged"],
    ]
    assert rows[1][0] == ["mixer", "parameters", "4 pairs", "8 pairs", "lr 0.001", "lr 0.003"]
    assert rows[1][2:] == [
        [first, "4,000", "0.300", "0.500", "0.150 (5,000)", "0.400 (5,000)"],
        [second, "4,001", "0.990", "0.990", "0.995 (900)", "0.990 (800)"],
    ]
