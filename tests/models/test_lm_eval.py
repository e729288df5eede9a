"""lm-evaluation-harness on folders of girih's models: results do not depend on the size of the batches.

The command and the harness's classes are tested if lm_eval is installed. The tokenizer and the calls that the
harness makes are always tested.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import girih
import pytest
import torch
from converted import converted
from girih.models import MIXERS, GirihForCausalLM, byte_tokenizer
from small_models import config_of
from transformers import AutoModelForCausalLM, AutoTokenizer

needs_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm_eval")
SIZES = {"vocab_size": 256, "hidden_size": 32, "num_heads": 2, "num_slots": 8, "chunk": 4}
QUESTIONS = ["a b", "Ø and\n two lines", "the longest of the three questions, with 日本 in it"]
CHOICES = [" c", " dd", " and eee"]
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}{{choices[2]}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "text": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[1]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}
MODELS = [*MIXERS, "hybrid", "converted"]


def make_model(name):
    """A model that ends its text at the zero byte, as the tokenizer says: random weights may write it."""
    torch.manual_seed(0)
    if name == "converted":
        model = converted("llama", "gsa", vocab_size=256)
        model.generation_config.eos_token_id = model.generation_config.pad_token_id = 0
        return model
    mixer = ["gsa", "attention", "delta_product"] if name == "hybrid" else name
    layers = 3 if name == "hybrid" else 2
    model = GirihForCausalLM(config_of(**SIZES, mixer=mixer, num_hidden_layers=layers)).eval()
    with torch.no_grad():  # with the initial weights, the most likely token is the last one
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=2 * p[0].numel() ** -0.5)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    """The folder of a model with the tokenizer."""
    path = tmp_path_factory.mktemp(request.param)
    make_model(request.param).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


ALL_BYTES = "".join(map(chr, [*range(256), 0x7FF, 0x800, 0xFFFF, 0x10FFFF]))


@pytest.mark.parametrize("text", ["", "abc", "  Ā Øg\n\n x\t ", "日本語🙂", "a\0b", ALL_BYTES, "x" * 5000])
def test_tokens_are_the_bytes_of_a_text(text, tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    for tokenizer in (byte_tokenizer(), AutoTokenizer.from_pretrained(tmp_path)):
        assert tokenizer(text)["input_ids"] == list(text.encode())
        assert tokenizer.decode(list(text.encode()), skip_special_tokens=False) == text
        assert len(tokenizer) == tokenizer.vocab_size == 256
        assert tokenizer.all_special_ids == [tokenizer.bos_token_id] == [0]
        assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0


def test_the_zero_byte_alone_is_special():
    tokenizer = byte_tokenizer()
    assert tokenizer.decode([97, 0, 10, 98], skip_special_tokens=True) == "a\nb"
    assert [tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(b)) for b in range(256)] == list(
        range(256)
    )


@torch.no_grad()
def test_rows_padded_on_the_right_without_a_mask_have_the_likelihoods_of_single_rows(folder):
    """The harness pads rows by zeros on the right, gives no mask, and reads the logits before the padding."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    rows = [list((q + c).encode()) for q, c in zip(QUESTIONS, CHOICES, strict=True)]
    length = max(map(len, rows))
    batch = model(torch.tensor([row + [0] * (length - len(row)) for row in rows])).logits.log_softmax(-1)
    for row, found in zip(rows, batch, strict=True):
        want = model(torch.tensor([row])).logits[0].log_softmax(-1)
        assert (found[: len(row)] - want).abs().max() < 1e-4


def test_prompts_padded_by_the_tokenizer_have_the_text_of_single_prompts(folder):
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    batch = tokenizer(QUESTIONS, padding=True, return_tensors="pt")
    assert batch["attention_mask"][0, 0] == 0 and batch["attention_mask"][:, -1].all()
    found = model.generate(**batch, **options)[:, batch["input_ids"].shape[1] :]
    for question, row in zip(QUESTIONS, found, strict=True):
        single = tokenizer(question, return_tensors="pt")
        text = model.generate(**single, **options)[0, single["input_ids"].shape[1] :]
        assert row[: len(text)].equal(text) and not row[len(text) :].any()  # the row ends at its first 0


# With lm_eval.


def write_tasks(folder):
    """Tasks made of a local file; returns the folder of their descriptions."""
    rows = [{"question": q, "choices": CHOICES} for q in QUESTIONS]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    for name, task in TASKS.items():
        data = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        }
        description = {"task": f"girih_{name}", "test_split": "test"} | data | task
        (folder / f"{name}.yaml").write_text(json.dumps(description))  # JSON is YAML
    return folder


def responses(samples):
    """The raw answers of the model by task and row."""
    return {
        (task, row["doc_id"]): [part[0] if isinstance(part, list | tuple) else part for part in row["resps"]]
        for task, rows in samples.items()
        for row in rows
    }


def compare(found, want):
    assert found.keys() == want.keys() and len(want) == len(TASKS) * len(QUESTIONS)
    for key, answers in want.items():
        for x, y in zip(found[key], answers, strict=True):
            if key[0] == "girih_text":
                assert x == y, key
            else:
                x, y = (float(answer[0] if isinstance(answer, list | tuple) else answer) for answer in (x, y))
                assert x == pytest.approx(y, abs=1e-3), key


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "tasks").mkdir()
    return write_tasks(tmp_path / "tasks")


@needs_harness
def test_the_harness_answers_the_same_in_batches_and_one_by_one(folder, tasks):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = []
    for size in (1, 4):
        model = HFLM(pretrained=str(folder), device="cpu", batch_size=size)
        names = [f"girih_{name}" for name in TASKS]
        result = lm_eval.simple_evaluate(model, tasks=names, task_manager=manager, bootstrap_iters=0)
        found.append(responses(result["samples"]))
    compare(*found)
    # A single row by hand: the likelihood of a choice after its question.
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt, choice = (torch.tensor([list(text.encode())]) for text in (QUESTIONS[0], CHOICES[1]))
    with torch.no_grad():
        logits = loaded(torch.cat((prompt, choice), 1)).logits.log_softmax(-1)[0, -choice.shape[1] - 1 : -1]
    want = float(logits.gather(1, choice.T).sum())
    answer = found[0]["girih_choice", 0][1]
    assert float(answer[0] if isinstance(answer, list | tuple) else answer) == pytest.approx(want, abs=1e-3)


@needs_harness
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_command_needs_girih_to_be_installed_only(dtype, tmp_path):
    folder, tasks = tmp_path / "model", tmp_path / "tasks"
    tasks.mkdir()
    write_tasks(tasks)
    make_model("gsa").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--batch_size", "4"]
    command += ["--model_args", f"pretrained={folder},trust_remote_code=True,dtype={dtype},max_length=64"]
    command += ["--tasks", ",".join(f"girih_{name}" for name in TASKS), "--include_path", str(tasks)]
    command += ["--output_path", str(tmp_path / "out")]
    python = str(Path(girih.__file__).parents[1])
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": python}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    assert results.keys() == {f"girih_{name}" for name in TASKS}
    assert 0 < results["girih_rolling"]["bits_per_byte,none"] < 40
