"""What a comparison shows: scores of hand-made models, on rows not trained on, each in its own column."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from girih.comparison import cell
from girih.comparison.table import write_table
from girih.data import Recall
from girih.models import MIXERS


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
        log = [{"step": 1, "loss": 1.0}]
        return SimpleNamespace(train=lambda: None, state=SimpleNamespace(log_history=log))

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


def test_every_column_shows_its_own(tmp_path):
    first, second, *_ = MIXERS
    cells = {"text": {}, "mqar": {}}
    for i, mixer in enumerate((first, second)):
        text = {"parameters": 1000 + i, "tokens_per_second": 2000 + i, "bits_per_byte": 3 + i}
        cells["text"][mixer] = text
        accuracy = {"4": 0.1 + i / 100, "8": 0.2 + i / 100, "16": 0.3 + i / 100}
        cells["mqar"][mixer] = {"parameters": 4000 + i, "accuracy": accuracy}
    lines = write_table(cells, tmp_path / "table.md").splitlines()
    assert [[part.strip() for part in line.strip("|").split("|")][1:] for line in lines[2:]] == [
        ["1,000", "2,000", "3.000", "4,000", "0.100", "0.200", "0.300"],
        ["1,001", "2,001", "4.000", "4,001", "0.110", "0.210", "0.310"],
    ]
