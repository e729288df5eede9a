"""Scores of a comparison, on models made by hand: rows are not trained on, and each column shows its own
scores."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from girih.comparison import cell, tasks
from girih.comparison.answers import AnswerTrainer, accuracy
from girih.comparison.table import write_table
from girih.comparison.tasks import TASKS
from girih.data import Corpus, Recall
from girih.models import MIXERS, GirihConfig, GirihForCausalLM
from girih.training.recipe import SIZES
from torch.utils.data import default_collate


class HandMadeModel(torch.nn.Module):
    """Answers a query with the value that follows its key if `knows(keys)` is true, and with anything
    elsewhere. Logits are computed only at labels, so `model` returns the answers and `lm_head` their logits.
    """

    device = torch.device("cpu")

    def __init__(self, vocab_size, knows):
        super().__init__()
        self.vocab_size, self.knows = vocab_size, knows

    def model(self, ids, use_cache):
        guess = torch.full_like(ids, 5)
        for row, tokens in enumerate(ids.tolist()):
            values = {}
            for t, token in enumerate(tokens):
                if token in values:
                    guess[row, t] = values[token] if self.knows(list(values), token) else 0
                elif t % 2 == 0 and token:  # pairs come first
                    values[token] = tokens[t + 1]
        return SimpleNamespace(last_hidden_state=guess)

    def lm_head(self, guess):
        return torch.nn.functional.one_hot(guess, self.vocab_size).float()


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
    assert accuracy(HandMadeModel(64, knows), data, batch=7) == {4: score, 8: score, 16: score}


def test_accuracy_of_each_group():
    data = Recall(30, 64, [4, 8, 16], 64, seed=0)
    model = HandMadeModel(64, lambda keys, key: len(keys) != 8)
    assert accuracy(model, data, batch=7) == {4: 1.0, 8: 0.0, 16: 1.0}


@pytest.mark.parametrize("mixer", ["gsa", "cat"])
def test_loss_at_labels_matches_the_loss_of_the_model(mixer):
    """The gradients are also the same."""
    config = GirihConfig(mixer=mixer, vocab_size=64, hidden_size=32, num_hidden_layers=1, num_heads=2)
    model = GirihForCausalLM(config).double()
    batch = default_collate([Recall(6, 64, [4, 8], 64, seed=0)[i] for i in range(6)])
    trainer = SimpleNamespace()
    losses, gradients = [], []
    for loss in (
        model(**batch).loss,
        AnswerTrainer.compute_loss(trainer, model, batch),
        AnswerTrainer.compute_loss(trainer, model, batch, num_items_in_batch=torch.tensor(18)) / 2,
    ):
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)  # the loss is rounded to fp32
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-5, atol=1e-7)


def fake_fit(seen):
    """A replacement of `fit` that trains nothing and stores the arguments of the trainer in `seen`."""

    def fit(model, recipe, data, held_out, *rest, **options):
        state = SimpleNamespace(log_history=[{"step": 1, "loss": 1.0}], global_step=1)
        seen.update(trained=data, callbacks=[])

        def evaluate(rows):
            seen["measured"] = rows
            return {"eval_loss": 2.0}

        return SimpleNamespace(
            model=model,
            train=lambda: None,
            add_callback=seen["callbacks"].append,
            evaluate=evaluate,
            state=state,
        )

    return fit


@pytest.mark.parametrize("name", [name for name in TASKS if name != "text"])
def test_answers_are_measured_on_rows_that_were_not_trained_on(name, tmp_path, monkeypatch):
    """Training rows, rows that end the training and measured rows are disjoint. Their numbers are equal, so
    equal seeds would draw equal rows."""
    seen, measured = {}, []

    def record_rows(model, data, batch):
        measured.append({tuple(row) for row in data.input_ids.tolist()})
        return dict.fromkeys(range(1100), 0.0)

    monkeypatch.setattr(cell, "fit", fake_fit(seen))
    monkeypatch.setattr(tasks, "accuracy", record_rows)
    task = TASKS[name]
    recipe = task.recipe("small", 64 if task.widths else None)
    recipe = replace(recipe, held_out=80, batch=8, steps=10)
    cell.run_cell(name, "attention", recipe, None, tmp_path, seed=0)
    training_rows = {tuple(row) for row in seen["trained"].input_ids.tolist()}
    assert len(training_rows) == 80 and len(measured) == len(task.lengths(recipe))
    (stopper,) = [callback for callback in seen["callbacks"] if hasattr(callback, "shares")]
    stopper.shares()
    assert all(len(rows) == 80 for rows in measured)
    for one, other in itertools.combinations([training_rows, *measured], 2):
        assert not one & other


def test_text_is_measured_on_the_held_out_text_alone(tmp_path, monkeypatch):
    """Training bytes are below 128, held-out bytes are 128 and above."""
    seen = {}
    monkeypatch.setattr(cell, "fit", fake_fit(seen))
    recipe = replace(SIZES["tiny"], steps=3)
    whole = (torch.arange(9000) % 128).to(torch.uint8)
    corpus = Corpus("two halves", whole, whole + 128, "")
    found = cell.run_cell("text", "attention", recipe, corpus, tmp_path, seed=0)
    assert found["bits_per_byte"] == pytest.approx(2 / math.log(2))
    training_rows, measured = (
        torch.stack([w["input_ids"] for w in seen[name]]) for name in ("trained", "measured")
    )
    assert training_rows.shape == (3 * recipe.batch, recipe.context) and training_rows.max() < 128
    assert measured.shape == (recipe.held_out, recipe.context) and measured.min() >= 128
    starts = seen["measured"].starts
    assert (starts.diff() >= recipe.context).all()


def cell_of(mixer, rate, seed=0, *, steps=7, most=7, parameters=1000, width=64, **score):
    settings = {"steps": most, "batch": 2, "context": 3, "seed": seed, "learning_rate": rate}
    settings |= {"heads": width // 64, "head_dim": 64, "pairs": [4, 8]}
    fields = {"mixer": mixer, "parameters": parameters, "steps": steps, "diverged": not score}
    return fields | score | {"settings": settings}


def text(mixer, rate, parameters, bits):
    return cell_of(mixer, rate, parameters=parameters, bits_per_byte=bits)


def recall(mixer, rate, parameters, steps, *shares, seed=0, width=64):
    accuracy = dict(zip(("4", "8"), shares, strict=True))
    fields = {"steps": steps, "most": 5000, "parameters": parameters, "width": width}
    return cell_of(mixer, rate, seed, **fields, accuracy=accuracy)


HEADS = ["parameters", "4 pairs", "8 pairs", "lr 0.001", "lr 0.003"]  # headings of the cells of `recall`


def rows_of(table):
    return [[part.strip() for part in line.strip("| ").split("|")] for line in table.splitlines()]


def test_every_column_shows_the_scores_of_its_task(tmp_path):
    first, second, *_ = MIXERS
    cells = {
        "text": [
            text(first, 0.001, 1000, 3.0),
            text(first, 0.01, 1000, 2.5),
            text(second, 0.001, 1001, 4.0),
            cell_of(second, 0.01),
        ],
        "mqar": [
            recall(first, 0.001, 4000, 5000, 0.1, 0.2),
            recall(first, 0.003, 4000, 5000, 0.3, 0.5),
            recall(second, 0.001, 4001, 900, 0.99, 1.0),
            recall(second, 0.003, 4001, 800, 0.99, 0.99),
        ],
    }
    text_title, table, recall_title, other = write_table(cells, tmp_path / "table.md").split("\n\n")
    assert "after 7 steps of 6 bytes" in text_title and "at most 5,000" in recall_title
    rows = [rows_of(part) for part in (table, other)]
    assert rows[0][0] == ["mixer", "parameters", "bits per byte", "lr 0.001", "lr 0.01"]
    assert rows[0][2:] == [
        [first, "1,000", "2.500", "3.000", "2.500"],
        [second, "1,001", "4.000", "4.000", "diverged"],
    ]
    assert rows[1][0] == ["mixer", *HEADS]
    assert rows[1][2:] == [
        [first, "4,000", "0.300", "0.500", "0.150 (5,000)", "0.400 (5,000)"],
        [second, "4,001", "0.990", "0.990", "0.995 (900)", "0.990 (800)"],
    ]


def test_best_rate_has_the_best_mean_over_seeds(tmp_path):
    cells = [
        recall("gsa", 0.001, 10, 5000, 0.5, 0.5),
        recall("gsa", 0.001, 10, 5000, 0.7, 0.5, seed=1),
        recall("gsa", 0.003, 10, 5000, 0.9, 0.9),
        recall("gsa", 0.003, 10, 5000, 0.1, 0.0, seed=1),  # the best seed has the worse rate
        recall("gsa", 0.001, 20, 900, 1.0, 1.0, width=128),
        recall("gsa", 0.001, 20, 1100, 1.0, 0.98, width=128, seed=1),
        recall("gsa", 0.003, 20, 800, 1.0, 1.0, width=128),  # one seed of this rate diverged
        cell_of("gsa", 0.003, 1, width=128),
    ]
    label = "mqar_256 pairs=4,8 vocab_size=32"
    title, table = write_table({label: cells}, tmp_path / "table.md").split("\n\n")
    assert "with pairs=4,8, vocab_size=32. Mean ± standard deviation over 2 seeds." in title
    assert rows_of(table)[0] == [
        "mixer",
        "width",
        *["parameters", "4 pairs", "8 pairs", "lr 0.001", "lr 0.003"],
    ]
    spread = f"{0.2 / math.sqrt(2):.3f}"
    assert rows_of(table)[2:] == [
        [
            "gsa",
            "64",
            "10",
            f"0.600 ± {spread}",
            "0.500 ± 0.000",
            "0.550 ± 0.071 (5,000)",
            "0.475 ± 0.601 (5,000)",
        ],
        ["gsa", "128", "20", "1.000 ± 0.000", "0.990 ± 0.014", "0.995 ± 0.007 (1,000)", "diverged"],
    ]


def test_needles_are_shown_by_length_and_by_depth(tmp_path):
    shares = {
        f"{length} tokens, depth {depth}": share
        for length, depth_shares in ((128, (1.0, 0.8, 0.6, 0.4)), (256, (0.0, 0.2, 0.4, 0.8)))
        for depth, share in zip(TASKS["needle"].DEPTHS, depth_shares, strict=True)
    }
    _, table = write_table({"needle": [cell_of("gsa", 0.001, accuracy=shares)]}, tmp_path / "table.md").split(
        "\n\n"
    )
    heads, _, row = rows_of(table)
    assert dict(zip(heads[3:9], row[3:9], strict=True)) == {
        "128 tokens": "0.700",
        "256 tokens": "0.350",
        "depth 0-25%": "0.500",
        "depth 25-50%": "0.500",
        "depth 50-75%": "0.500",
        "depth 75-100%": "0.600",
    }
