"""tests/bench/converted_llama.py at a small size on the CPU: models, texts, caches and tables."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import converted_llama as bench
from girih.conversion.attention import InjectedAttention, ReplacedAttention

SMALL = {
    "vocab_size": 31,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,  # with tied embeddings a token predicts itself
}
WINDOW = 5


@pytest.fixture(autouse=True)
def small(monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.setattr(bench, "LLAMA", bench.LLAMA | SMALL)
    for name, value in {"ROWS": 2, "TOKENS": 9, "WARM_UPS": 1, "STEPS": 2, "RANK": 2}.items():
        monkeypatch.setattr(bench, name, value)
    for name, value in {"CONTEXTS": (20, 8), "MOST": 3, "UNTIMED": 2, "TIMED": 4}.items():
        monkeypatch.setattr(bench, name, value)
    window = {"weight": 1.0, "max_self_attn_length": WINDOW}
    monkeypatch.setitem(bench.DECODING, "LiZA, window", ("inject", window))


def prompt(tokens):
    return torch.randint(31, (1, tokens), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", bench.DECODING)
@torch.no_grad()
def test_text_matches_generate_after_the_whole_prompt(name):
    """The prompt is read once, and its cache is repeated or copied to a static cache. The text does not
    change."""
    model = bench.llama(bench.DECODING[name], "cpu").eval().float()
    ids = prompt(21)
    text, row = bench.generate(model, ids, 3, name == bench.COMPILED)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[:, 21:]
    assert text.equal(expected.expand(3, -1)) and text.unique().numel() > 1
    assert row["sequences"] == 3 and row["tokens_per_second"] > 0
    assert row["ms_a_token"] == pytest.approx(1e3 * 3 / row["tokens_per_second"], rel=0.1, abs=2e-3)


@torch.no_grad()
def test_only_the_cache_of_the_llama_grows():
    cache_bytes = {}
    for name, conversion in bench.DECODING.items():
        model = bench.llama(conversion, "cpu").eval()
        rows = [bench.generate(model, prompt(n), 2, name == bench.COMPILED)[1] for n in (9, 21)]
        cache_bytes[name] = [row["cache_bytes"] for row in rows]
    # The last generated token is not read.
    assert cache_bytes["Llama"] == [bench.keys_of_a_sequence(n + 6 - 1) for n in (9, 21)]
    assert cache_bytes["Llama, compiled"] == [bench.keys_of_a_sequence(n + 6) for n in (9, 21)]
    slots, layers = 64, 2
    assert cache_bytes["gsa"] == [4 * layers * 2 * slots * 32] * 2  # fp32; keys and values, 32 wide together
    assert cache_bytes["gated_deltanet"][0] == cache_bytes["gated_deltanet"][1] > 4 * layers * 2 * 16 * 16
    small, large = cache_bytes["LiZA, window"]
    assert small == large > bench.keys_of_a_sequence(WINDOW - 1)


@pytest.mark.parametrize("name", bench.TRAINING)
def test_training_changes_only_the_adapters(name):
    model = bench.add_lora(bench.llama(bench.TRAINING[name], "cpu"))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    losses = [bench.training_step(model, optimizer, prompt(18).view(2, 9)).item() for _ in range(4)]
    assert losses[-1] < losses[0]
    changed = {key for key, value in model.state_dict().items() if not value.equal(before[key])}
    assert changed == {key for key in before if ".lora_" in key}
    assert sum(p.numel() for p in trainable) == 2 * 4 * 2 * bench.RANK * 32
    kinds = [type(m) for m in model.modules() if isinstance(m, InjectedAttention)]
    assert len(kinds) == (0 if name == bench.UNCHANGED else 2)


def test_batch_fits_the_free_memory():
    whole = bench.keys_of_a_sequence(20 + 6)
    assert whole == 2 * 2 * 2 * 32 * 26  # k and v, 2 bytes, 2 layers, 32 channels, 26 tokens
    free = 2.5 * whole / bench.ROOM
    assert (
        bench.count_sequences(20, free) == 2
        and bench.count_sequences(8, free) == 3
        and bench.count_sequences(20, 0) == 1
    )
    assert [*bench.texts("Llama", free)] == [(20, 2), (8, 3)]
    assert [*bench.texts("gsa", free)] == [(20, 2), (20, 3), (8, 3)]


def test_everything_is_measured_and_shown():
    whole = bench.keys_of_a_sequence(20 + 6)
    found = {"training": bench.trainings("cpu"), "texts": bench.generations("cpu", 2.5 * whole / bench.ROOM)}
    rows = {part: [*states][-1] for part, states in found.items()}
    assert [*rows["training"]] == [*bench.TRAINING] and [*rows["texts"]] == ["8", "20"]
    assert {name: [*batches] for name, batches in rows["texts"]["20"].items()} == {
        name: ["2"] if conversion is None else ["2", "3"] for name, conversion in bench.DECODING.items()
    }
    place = {"device": "a card", "versions": "torch", "date": "2026-01-01"}
    text = bench.table({part: {"rows": part_rows} | place for part, part_rows in rows.items()})
    assert len(text.splitlines()) == (2 + 4) + 2 + 1 + (2 + 5 + 8) + 2
    assert "| Llama | 0.0M of 0M |" in text and "- a card, torch, 2026-01-01" in text


def test_the_table_compares_with_the_better_of_the_llamas_caches():
    fast, slow = ({"ms_a_token": 1.0, "tokens_per_second": n, "cache_bytes": 2**20} for n in (400, 100))
    rows = {
        "Llama": {"9": slow},
        "Llama, compiled": {"9": slow | {"tokens_per_second": 200}},
        "gsa": {"9": fast, "256": {"error": "more memory than the card has"}},
    }
    text = bench.table_of_texts({"16384": rows})
    assert "| 16,384 | gsa | 9 | 1.0 | 400 | 2.00x | 1.0 |" in text
    assert "| 16,384 | Llama | 9 | 1.0 | 100 | 0.50x | 1.0 |" in text
    assert "| 16,384 | gsa | 256 |  | more memory than the card has |  |  |" in text
    rows = {
        "Llama": {"error": "more memory than the card has"},
        "LiZA": {"tokens_per_second": 5} | training_row(),
    }
    text = bench.table_of_training(rows)
    assert "| Llama |  | more memory than the card has |  |  |  |" in text
    assert "| LiZA | 2.0M of 340M | 5 |  | 1.5 |  |" in text


def training_row():
    return {"trained": 2_000_000, "parameters": 340_000_000, "peak_bytes": 3 * 2**29}


def test_replaced_models_have_no_attention_left():
    model = bench.llama(bench.DECODING["gsa"], "cpu")
    assert sum(isinstance(m, ReplacedAttention) for m in model.modules()) == SMALL["num_hidden_layers"]
    assert next(model.parameters()).dtype == torch.bfloat16
