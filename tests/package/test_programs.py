"""girih-generate and girih-train, which run without Python, compared with Python."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import TREE, needs_cuda
from girih import _C, train
from girih.data import Windows, read_corpus
from girih.models import MIXERS, GirihConfig, GirihForCausalLM
from girih.nn import decay_parameter_names
from girih.training.command import Refusal
from girih.training.recipe import SIZE_FIELDS, SIZES, config_of_size, model_of_size, with_context
from girih.training.report import write_sample
from girih.training.trainer import ByteTrainer
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM

BIN = TREE / "bin"
pytestmark = pytest.mark.skipif(not BIN.exists(), reason="the programs were not built here")
PROMPTS = ["a", "girih", "The quick brown fox jumps over the lazy dog, twice."]


def run(program, *arguments, stdin="", code=0):
    done = subprocess.run([BIN / program, *map(str, arguments)], capture_output=True, input=stdin.encode())
    assert done.returncode == code, done.stderr.decode()
    return done.stdout, done.stderr.decode()


@pytest.fixture(scope="module", params=[*MIXERS, "gsa,attention"])
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    names = request.param.split(",")
    config = GirihConfig(
        mixer=request.param if len(names) == 1 else names,
        vocab_size=256,
        hidden_size=32,
        num_heads=2,
        num_hidden_layers=2,
        initializer_range=0.5,
    )
    folder = tmp_path_factory.mktemp("model")
    GirihForCausalLM(config).save_pretrained(folder)
    return folder


def python_text(folder, prompt, **options):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([list(prompt.encode())])
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)[0].tolist()


def test_greedy_text_matches_python_alone_and_in_a_batch(folder):
    texts = [bytes(python_text(folder, prompt, max_new_tokens=24)) for prompt in PROMPTS]
    stdout, stderr = run("girih-generate", folder, PROMPTS[1], "--max-new-tokens", 24)
    assert stdout == texts[1] + b"\n"
    assert re.fullmatch(
        r"24 tokens in [^;]+ s, \d+ tokens/s; [^;]+, then \d+ tokens/s, [\d.]+ ms a token\n", stderr
    )
    together, stderr = run("girih-generate", folder, *PROMPTS, "--max-new-tokens", 24)
    assert together == b"".join(text + b"\n" for text in texts)
    assert stderr.startswith("72 tokens in ")


@needs_cuda
@pytest.mark.parametrize("batch", [1, 3])
def test_text_on_cuda_matches_python(folder, batch):
    """A token is one CUDA graph in both. In CAT, a token that ends a chunk is another graph."""
    prompts = ["girih", "tiles", "lines"][:batch]
    ids = torch.tensor([[*prompt.encode()] for prompt in prompts], device="cuda")
    model = AutoModelForCausalLM.from_pretrained(folder).eval().cuda()
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
    stdout, _ = run("girih-generate", folder, *prompts, "--max-new-tokens", 64, "--device", "cuda")
    assert stdout == b"".join(bytes(row) + b"\n" for row in text.tolist())


def save_gsa(folder, vocab_size):
    torch.manual_seed(0)
    sizes = {"vocab_size": vocab_size, "hidden_size": 16, "num_heads": 2, "num_hidden_layers": 1}
    GirihForCausalLM(GirihConfig(mixer="gsa", initializer_range=0.5, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gsa(tmp_path_factory):
    return save_gsa(tmp_path_factory.mktemp("model"), vocab_size=300)


def ids_of(folder, *options, prompt="7 8 299", quiet=("--quiet",)):
    stdout, stderr = run("girih-generate", folder, "--ids", *quiet, *options, stdin=prompt)
    assert bool(stderr) != bool(quiet)
    return [int(word) for word in stdout.split()]


def test_token_ids_go_in_and_out(gsa):
    model = AutoModelForCausalLM.from_pretrained(gsa).eval()
    ids = torch.tensor([[7, 8, 299]])
    want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    assert ids_of(gsa, "--max-new-tokens", 9) == want[0].tolist()
    both, _ = run("girih-generate", gsa, "--ids", "--lines", "--max-new-tokens", 9, stdin="7 8 299\n5\n")
    assert [int(word) for word in both.splitlines()[0].split()] == want[0].tolist()
    assert len(both.splitlines()[1].split()) == 10


def test_line_endings_of_both_systems(tmp_path):
    sizes = {"vocab_size": 256, "hidden_size": 16, "num_heads": 2, "num_hidden_layers": 1}
    GirihForCausalLM(GirihConfig(mixer="gsa", initializer_range=0.5, **sizes)).save_pretrained(tmp_path)
    options = ("--lines", "--quiet", "--max-new-tokens", 4)
    one, other = (
        run("girih-generate", tmp_path, *options, stdin=f"ab{end}c{end}")[0] for end in ("\n", "\r\n")
    )
    assert one == other and one.startswith(b"ab")


def test_samples_follow_seed_top_k_and_top_p(gsa):
    def sample(*options):
        return ids_of(gsa, "--max-new-tokens", 40, "--temperature", 2, *options)

    greedy = ids_of(gsa, "--max-new-tokens", 40)
    assert sample("--seed", 1) == sample("--seed", 1) != sample("--seed", 2)
    assert sample("--seed", 1) != greedy
    assert sample("--seed", 1, "--top-p", 1e-6) == greedy == sample("--seed", 1, "--top-k", 1)
    # Each sampled token is among the most likely tokens with this total probability.
    model, text = AutoModelForCausalLM.from_pretrained(gsa).eval(), sample("--seed", 3, "--top-p", 0.6)
    with torch.no_grad():
        chances = (model(torch.tensor([text])).logits[0] / 2).softmax(-1)
    ranks = []
    for t in range(2, len(text) - 1):
        rank = (chances[t] > chances[t, text[t + 1]]).sum()
        before = chances[t].sort(descending=True).values[:rank].sum()
        assert before < 0.6
        ranks.append(rank)
    assert max(ranks) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_text_of_a_dtype_matches_python(gsa, dtype):
    """The dtypes give different texts."""
    texts = {}
    for name in ("float32", "bfloat16", "float16"):
        model = AutoModelForCausalLM.from_pretrained(gsa, dtype=getattr(torch, name)).eval()
        ids = torch.tensor([[1, 2, 3]])
        call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
        texts[name] = model.generate(ids, **call)[0].tolist()
    assert len(set(map(tuple, texts.values()))) == 3
    assert ids_of(gsa, "--max-new-tokens", 20, "--dtype", dtype, prompt="1 2 3") == texts[dtype]


def test_text_ends_at_eos(gsa):
    text = ids_of(gsa, "--max-new-tokens", 40)
    end = next(i for i in range(4, len(text)) if text[i] not in text[3:i])
    assert ids_of(gsa, "--max-new-tokens", 40, "--eos", f"{text[end]},298") == text[:end]


@pytest.mark.parametrize(
    "arguments, stdin, word",
    [
        (["{}", "1 300", "--ids"], "", "300"),
        (["{}", "1 x", "--ids"], "", "x"),
        (["{}", "1 12x", "--ids"], "", "12x is not a token id; expected numbers from 0 to 299"),
        (["{}", "--ids"], "1 -1", "-1 is not a token id"),
        (["{}", "9" * 30, "--ids"], "", "is not a token id"),
        (["{}", "1", "--ids", "--eos=-1"], "", "--eos is -1; expected numbers from 0 to 299"),
        (["{}", "text"], "", "vocab_size is 300"),
        (["{}", "--ids"], "", "number 1 is empty"),
        (["{}", "1", "--ids", "--temperature", "-1"], "", "temperature"),
        (["{}", "1", "--ids", "--temperature", "1", "--top-p", "1.5"], "", "top_p"),
        (["{}", "1", "--ids", "--temperature", "1", "--top-k", "0"], "", "top_k"),
        (["{}", "1", "--ids", "--dtype", "int8"], "", "--dtype"),
        (["{}", "1", "--ids", "--device", "tpu"], "", "--device"),
        (["{}", "1", "--ids", "--eos", "300"], "", "--eos"),
        (["{}/none", "1", "--ids"], "", "config.json"),
    ],
)
def test_errors_are_one_line(gsa, arguments, stdin, word):
    arguments = [str(a).format(gsa) for a in arguments]
    stdout, stderr = run("girih-generate", *arguments, stdin=stdin, code=2)
    assert not stdout and stderr.count("\n") == 1 and word in stderr


@pytest.mark.parametrize(
    "arguments", [["--seed", "-1"], ["--max-new-tokens", "-1"], ["--lines", "1"], ["--top-k", "x"], ["--odd"]]
)
def test_invalid_arguments_are_refused(gsa, arguments):
    stdout, stderr = run("girih-generate", gsa, "--ids", *arguments, stdin="1", code=2)
    assert not stdout and arguments[0] in stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device here")
def test_failed_write_is_an_error(gsa):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [BIN / "girih-generate", gsa, "1", "--ids", "--quiet"], stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 2 and b"standard output" in done.stderr


def test_help_shows_the_defaults():
    """--help is not an error."""
    documented = {
        "girih-generate": {"--max-new-tokens": "64", "--temperature": "0"},
        "girih-train": {"--mixer": "gsa", "--size": "small", "--at-once": "32768", "--seed": "0"},
    }
    for program, options in documented.items():
        usage = run(program, "--help")[0].decode()
        for name, value in options.items():
            assert re.search(rf"^ +{name} [^\n]*[=\[]{value}\b", usage, re.MULTILINE), name


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    return save_gsa(tmp_path_factory.mktemp("model"), vocab_size=256)


def test_standard_input_is_one_prompt_with_all_its_lines(byte_model):
    options = ("--quiet", "--max-new-tokens", 6)
    stdout, _ = run("girih-generate", byte_model, *options, stdin="two\nlines\n")
    assert stdout == run("girih-generate", byte_model, "two\nlines\n", *options)[0]
    assert stdout.startswith(b"two\nlines\n") and len(stdout) == 10 + 6 + 1


def test_prompts_without_a_token_are_counted_from_1(gsa):
    for stdin, words in (
        ("1\n\n2\n", "prompts: number 2 is empty"),
        ("", "prompts is empty; expected at least one"),
    ):
        stdout, stderr = run("girih-generate", gsa, "--ids", "--lines", stdin=stdin, code=2)
        assert not stdout and stderr == f"girih-generate: {words}\n"


def test_text_without_new_tokens_is_the_prompt(gsa):
    assert run("girih-generate", gsa, "--ids", "7 8", "--max-new-tokens", 0) == (b"7 8\n", "")
    both = run("girih-generate", gsa, "--ids", "7 8", "9", "--max-new-tokens", 0)
    assert both == (b"7 8\n9\n", "")


def test_each_text_of_a_batch_ends_at_eos(gsa):
    """eos comes from the call, from the model, or is absent. Rows that have ended wait for the others."""
    prompts, fixed = ["7 8 299", "5", "1 2"], ("--ids", "--quiet", "--max-new-tokens", 12)

    def texts(folder, *options):
        stdout, _ = run("girih-generate", folder, *prompts, *fixed, *options)
        return stdout.decode().splitlines()

    def cut(text, prompt, ends):
        words, prompt_length = text.split(), len(prompt.split())
        stop = next((i for i in range(prompt_length, len(words)) if words[i] in ends), len(words))
        return " ".join(words[:stop])

    whole = texts(gsa)
    assert [len(text.split()) for text in whole] == [15, 13, 14]
    ends = [whole[0].split()[6], whole[1].split()[9]]
    want = [cut(text, prompt, ends) for text, prompt in zip(whole, prompts, strict=True)]
    assert len(set(map(len, want)) | set(map(len, whole))) > 2
    assert texts(gsa, "--eos", ",".join(ends)) == want
    model = gsa.parent / f"{gsa.name}-with-ends"
    shutil.copytree(gsa, model)
    config = json.loads((gsa / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": [int(end) for end in ends]}))
    assert texts(model) == want
    alone, _ = run("girih-generate", model, prompts[1], *fixed)
    assert alone.decode() == want[1] + "\n"
    one = [cut(text, prompt, ends[:1]) for text, prompt in zip(whole, prompts, strict=True)]
    assert texts(model, "--eos", ends[0]) == one


def test_times_of_the_last_line_add_up(gsa):
    stderr = run("girih-generate", gsa, "--ids", "1", "2 3", "4", "--max-new-tokens", 400)[1]
    tokens, seconds, rate, first, rest_rate, each = map(float, re.findall(r"\d+(?:\.\d+)?", stderr))
    assert tokens == 1200 and rate == pytest.approx(1200 / seconds, rel=0.01 / seconds)
    assert first + 399 * each / 1e3 == pytest.approx(seconds, abs=0.02)
    assert rest_rate * each / 1e3 == pytest.approx(3, rel=0.02)
    stderr = run("girih-generate", gsa, "--ids", "1", "--max-new-tokens", 1)[1]
    assert re.fullmatch(r"1 tokens in \S+ s, \d+ tokens/s; the first after \S+ s\n", stderr)


def test_text_is_printed_during_generation(byte_model):
    command = [BIN / "girih-generate", byte_model, "prompt", "--max-new-tokens", "1000000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        try:
            found = os.read(process.stdout.fileno(), 1 << 16)
        finally:
            process.kill()
    assert found.startswith(b"prompt") and len(found) < 1000


def test_samples_without_a_seed_differ(gsa):
    options = ("--max-new-tokens", 40, "--temperature", 2)
    assert ids_of(gsa, *options) != ids_of(gsa, *options)


def test_top_k_above_the_vocabulary_size(gsa):
    options = ("--max-new-tokens", 20, "--temperature", 2, "--seed", 1)
    assert (
        ids_of(gsa, *options, "--top-k", 1000)
        == ids_of(gsa, *options)
        == ids_of(gsa, *options, "--top-k", 300)
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_device_is_refused(gsa, tmp_path):
    for program, arguments in (("girih-generate", ["1", "--ids"]), ("girih-train", ["--size", "tiny"])):
        _, stderr = run(program, gsa, *arguments, "--device", "cuda", code=2)
        assert stderr == f"{program}: --device is cuda, but no GPU is available\n"


# ---- girih-train ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    text = "".join(f"{i} times {i} is {i * i}.\n" for i in range(1500))
    (folder / "one.txt").write_text(text)
    (folder / "copy.txt").write_text(text)
    (folder / "more.txt").write_text(text[::-1])
    (folder / "zero.bin").write_bytes(b"\0" * 100)
    (folder / ".hidden").write_text("no")
    return folder


def test_python_loads_the_model_of_a_run(corpus, tmp_path):
    stdout, _ = run("girih-train", corpus, "--size", "tiny", "--steps", 60, "--folder", tmp_path / "run")
    lines = [line for line in stdout.decode(errors="replace").splitlines() if line.startswith("step ")]
    bits = [float(line.split()[2]) for line in lines]
    assert bits[-1] < 5 < 7.5 < bits[0]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(result["folder"])
    python = model_of_size("gsa", SIZES["tiny"])
    config, expected = model.config.to_diff_dict(), python.config.to_diff_dict()
    for name in ("architectures", "dtype", "transformers_version"):
        config.pop(name, None), expected.pop(name, None)
    assert config == expected
    assert model.num_parameters() == result["parameters"]
    again, _ = run("girih-train", corpus, "--size", "tiny", "--steps", 60, "--folder", tmp_path / "run")
    assert again.startswith(b"this run is finished")
    _, stderr = run("girih-train", corpus, "--size", "tiny", "--folder", tmp_path / "run", code=2)
    assert "other arguments" in stderr


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    "model",
    [
        ["--mixer", "delta_product,attention"],
        ["--mixer", "trellis,attention", "--options", "chunk=1  phi=l2_silu window=9", "--context", 128],
    ],
    ids=["plain", "options"],
)
def test_run_matches_python_from_the_same_initial_weights(model, tmp_path, monkeypatch, capsys):
    """Both runs read the same windows in the same order. Losses, final weights, the held-out result of 29
    windows (8 at a time) and the sample match. The learning rate of the first step is 0, so a run of one step
    saves the initial weights."""
    corpus = tmp_path / "text"
    corpus.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(1500))[: 20 * 64 * 29])
    options = [*model, "--size", "tiny", "--seed", 3]
    run("girih-train", corpus, *options, "--steps", 1, "--folder", tmp_path / "first", "--device", "cpu")
    options += ["--steps", 40]
    stdout, _ = run("girih-train", corpus, *options, "--folder", tmp_path / "cpp", "--device", "cpu")
    first = tmp_path / "first" / "model"
    monkeypatch.setattr(train, "GirihForCausalLM", lambda config: GirihForCausalLM.from_pretrained(first))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ByteTrainer, "_get_train_sampler", lambda self, data: SequentialSampler(data))
    capsys.readouterr()
    assert (
        train.main([*map(str, options), "--corpus", str(corpus), "--folder", str(tmp_path / "python")]) == 0
    )

    def losses(text):
        return [float(line.split()[2]) for line in text.splitlines() if line.startswith("step ")]

    cpp_losses, python_losses = losses(stdout.decode(errors="replace")), losses(capsys.readouterr().out)
    assert len(cpp_losses) == 40 and cpp_losses == pytest.approx(python_losses, abs=0.003)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("cpp", "python")]
    configs = [(tmp_path / name / "model" / "config.json").read_text() for name in ("cpp", "python")]
    if "--options" in model:
        for result, config in zip(results, map(json.loads, configs), strict=True):
            assert result["options"] == "chunk=1 phi=l2_silu window=9" and result["context"] == 128
            assert (config["chunk"], config["phi"], config["window"]) == (1, "l2_silu", 9)
    assert results[0]["bits_per_byte"] == pytest.approx(results[1]["bits_per_byte"], abs=0.002)
    start, cpp, python = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("first", "cpp", "python")
    )
    for name, x in python.items():
        moved = (x - start[name]).norm()
        assert moved > 0 and (cpp[name] - x).norm() < 0.02 * moved, name
    model = GirihForCausalLM.from_pretrained(tmp_path / "cpp" / "model").eval()
    prompt = bytes(read_corpus(corpus, 64).held_out[:64].tolist())
    assert (tmp_path / "cpp" / "sample.txt").read_bytes().decode(errors="replace") == write_sample(
        model, prompt, 256, 3
    )


@pytest.mark.parametrize("seed", [0, 3, 4])
def test_chunks_are_drawn_by_the_seed_and_the_part(seed, corpus, tmp_path):
    """The header of a chunk does not decay, so it changes only if the chunk is drawn."""
    headers = []
    for steps in (1, 2):  # the first of two steps changes nothing
        options = ["--mixer", "cat", "--chunks", "4,8,16", "--size", "tiny", "--steps", steps, "--seed", seed]
        run("girih-train", corpus, *options, "--folder", tmp_path / str(steps), "--device", "cpu")
        headers.append(load_file(tmp_path / str(steps) / "model" / "model.safetensors")["model.header"])
    moved = (headers[1] != headers[0]).any(1).nonzero()[:, 0].tolist()
    drawn = [torch.randint(3, (), generator=torch.Generator().manual_seed(seed + part)) for part in (0, 1)]
    assert moved == sorted({int(chunk) for chunk in drawn})


@pytest.mark.parametrize("chunks, chunk", [([4, 8], 4), ([8, 16, 32], 16), ([8, 24], 8)], ids=str)
def test_default_chunk_of_an_adaptive_model(chunks, chunk, corpus, tmp_path):
    options = ["--mixer", "cat", "--chunks", ",".join(map(str, chunks)), "--size", "tiny", "--steps", 1]
    run("girih-train", corpus, *options, "--folder", tmp_path / "run", "--device", "cpu")
    cpp = GirihConfig.from_pretrained(tmp_path / "run" / "model")
    for config in (cpp, config_of_size("cat", SIZES["tiny"], chunks=chunks)):
        assert (config.chunk, config.chunks) == (chunk, chunks)


@pytest.mark.parametrize("mixer", ["gsa", "attention,gla", "gla,attention", "trellis,delta_product", "cat"])
def test_configuration_of_a_run_matches_python(mixer, corpus, tmp_path):
    options = ["--mixer", mixer, "--size", "tiny", "--steps", 1, "--context", 32]
    run("girih-train", corpus, *options, "--folder", tmp_path / "run", "--device", "cpu")
    found = GirihConfig.from_pretrained(tmp_path / "run" / "model")
    want = config_of_size(mixer, with_context(SIZES["tiny"], 32))
    assert found.own_fields() == want.own_fields()


def test_adaptive_run_saves_one_model_for_all_chunks(corpus, tmp_path):
    options = ["--mixer", "cat", "--chunks", "8,16,32", "--size", "tiny", "--steps", 40, "--device", "cpu"]
    run("girih-train", corpus, *options, "--folder", tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    by_chunk = result["bits_per_byte_by_chunk"]
    assert by_chunk.keys() == {"8", "16", "32"} and by_chunk["16"] == result["bits_per_byte"]
    assert len(set(by_chunk.values())) == 3 and all(bits < 7 for bits in by_chunk.values())
    model = AutoModelForCausalLM.from_pretrained(result["folder"])
    assert (model.config.chunk, model.config.chunks) == (16, [8, 16, 32])
    prompt = bytes(read_corpus(corpus, 64).held_out[:64].tolist())
    sample = (tmp_path / "run" / "sample.txt").read_bytes().decode(errors="replace")
    assert sample == write_sample(model.eval(), prompt, 256, 0)  # in chunks of 16


def test_corpus_is_identified_by_its_bytes(tmp_path):
    texts = [tmp_path / name for name in ("one.txt", "other.txt")]
    options = ["--size", "tiny", "--steps", 1, "--folder", tmp_path / "run"]
    for text in texts:
        text.write_text("one " * 2000)
    run("girih-train", texts[0], *options)
    again, _ = run("girih-train", texts[1], *options)
    assert again.startswith(b"this run is finished")
    texts[0].write_text("two " * 2000)
    _, stderr = run("girih-train", texts[0], *options, code=2)
    assert "a run of other arguments is in it" in stderr


def test_batch_in_parts_matches_the_whole_batch(corpus, tmp_path):
    found = []
    for at_once, parts in ((512, ""), (200, ", in 4 parts each,")):
        options = ["--size", "tiny", "--steps", 12, "--at-once", at_once, "--device", "cpu"]
        stdout, _ = run("girih-train", corpus, *options, "--folder", tmp_path / str(at_once))
        first, *lines = stdout.decode(errors="replace").splitlines()[1:]
        assert first.startswith(f"12 steps of 8 x 64 bytes{parts} of ")
        found.append([float(line.split()[2]) for line in lines if line.startswith("step ")])
    assert len(found[0]) == 12 and found[1] == pytest.approx(found[0], abs=0.005)


def test_the_corpus_is_split_as_in_python(corpus, tmp_path):
    run("girih-train", corpus, "--size", "tiny", "--steps", 20, "--folder", tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    size = SIZES["tiny"]
    windows = Windows.spread(read_corpus(corpus, size.context).held_out, size.held_out, size.context)
    model = AutoModelForCausalLM.from_pretrained(result["folder"]).eval()
    ids = torch.stack([window["input_ids"] for window in windows])
    with torch.no_grad():
        bits = model(input_ids=ids, labels=ids).loss / torch.log(torch.tensor(2.0))
    assert float(bits) == pytest.approx(result["bits_per_byte"], abs=1e-3)


def test_resumed_run_matches_an_uninterrupted_run(corpus, tmp_path):
    options = ["--mixer", "delta_product", "--size", "tiny", "--steps", "150"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run("girih-train", corpus, *options, "--folder", whole)
    command = [BIN / "girih-train", corpus, *options, "--folder", stopped]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not list(stopped.glob("checkpoints/step-*")) and process.poll() is None:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGTERM)
        _, stderr = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, stderr
    assert b"the same command continues" in stderr
    stdout, _ = run("girih-train", corpus, *options, "--folder", stopped)
    assert b", from step " in stdout.splitlines()[1]
    files = [folder / "model" / "model.safetensors" for folder in (whole, stopped)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_folder_has_one_run_and_may_be_inside_the_corpus(corpus, tmp_path):
    texts = tmp_path / "texts"
    shutil.copytree(corpus, texts)
    options = [texts, "--size", "tiny", "--steps", "3000", "--folder", texts / "run"]
    with subprocess.Popen([BIN / "girih-train", *options], stdout=subprocess.PIPE) as process:
        while not list(texts.glob("run/checkpoints/step-*")) and process.poll() is None:
            time.sleep(0.01)
        _, stderr = run("girih-train", *options, code=2)
        assert "another run is at work" in stderr
        os.kill(process.pid, signal.SIGINT)
        process.communicate()
    assert process.returncode == 128 + signal.SIGINT
    (texts / "run" / "checkpoints" / "step-old").mkdir()
    with subprocess.Popen(
        [BIN / "girih-train", f"{texts}/../texts", *options[1:]], stdout=subprocess.PIPE
    ) as again:
        lines = [again.stdout.readline() for _ in range(2)]
        os.kill(again.pid, signal.SIGINT)
        again.communicate()
    assert b", from step " in lines[1] and not (texts / "run" / ".lock").exists()


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["{}", "--size", "huge"], "size huge"),
        (["{}", "--mixer", "nothing"], "nothing"),
        (["{}", "--mixer", "gsa,gla,gsa", "--size", "tiny"], "2 layers"),
        (["{}", "--chunks", "4,8", "--size", "tiny"], "chunks is"),
        (["{}", "--steps", "0"], "--steps is 0"),
        (["{}", "--at-once", "0"], "--at-once is 0"),
        (["{}/none"], "no such file"),
        (["{}/.hidden"], "too short"),
    ],
)
def test_invalid_run_is_refused_in_one_line(corpus, tmp_path, arguments, word):
    arguments = [a.format(corpus) for a in arguments]
    stdout, stderr = run("girih-train", *arguments, "--folder", tmp_path / "run", code=2)
    assert not stdout and stderr.count("\n") == 1 and word in stderr
    assert not (tmp_path / "run").exists()


def digest_of(data):
    """FNV-1a with 64 bits."""
    digest = 14695981039346656037
    for byte in data:
        digest = (digest ^ byte) * 1099511628211 % 2**64
    return digest


def tiny(corpus, folder, *options, steps=1, code=0):
    fixed = ["--size", "tiny", "--steps", steps, "--device", "cpu", "--folder", folder]
    return run("girih-train", corpus, *fixed, *options, code=code)


def test_a_corpus_is_its_files_in_the_order_of_their_names(tmp_path):
    """Copies, links, hidden files, binary files and folders of runs are not part of the corpus."""
    texts = tmp_path / "texts"
    (texts / "sub").mkdir(parents=True)
    (texts / "b.txt").write_text("b" * 700)
    (texts / "a.txt").write_text("a" * 600)
    (texts / "sub" / "c.txt").write_text("c" * 500)
    want = b"a" * 600 + b"b" * 700 + b"c" * 500
    (texts / "sub" / "copy.txt").write_text("a" * 600)
    (texts / ".hidden").mkdir()
    (texts / ".hidden" / "text").write_text("x" * 99)
    (texts / "sub" / "data.bin").write_bytes(b"y" * 99 + b"\0")
    (tmp_path / "elsewhere").write_text("z" * 99)
    (texts / "link").symlink_to(tmp_path / "elsewhere")
    (texts / "old" / "model").mkdir(parents=True)
    (texts / "old" / "arguments.json").write_text("{}")
    (texts / "old" / "model" / "text").write_text("v" * 99)
    tiny(texts, tmp_path / "run")
    arguments = json.loads((tmp_path / "run" / "arguments.json").read_text())
    assert arguments["corpus_digest"] == digest_of(want)
    python = read_corpus(texts, 64)
    assert len(python.train) + len(python.held_out) == len(want)


def test_a_large_corpus_is_split_into_stretches_of_64_kib(tmp_path):
    """The windows of the held-out text are spread evenly. Each window has a different text."""
    size = with_context(SIZES["tiny"], 128)
    text = "".join(f"{i:07d}\n" for i in range(2 * 20 * 2**13))
    (tmp_path / "text").write_text(text)
    tiny(tmp_path / "text", tmp_path / "run", "--context", 128)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(result["folder"]).eval()
    held_out = torch.tensor(list((text[19 * 2**16 : 20 * 2**16] + text[39 * 2**16 :]).encode()))
    assert (tmp_path / "run" / "sample.txt").read_bytes()[:64] == bytes(held_out[:64].tolist())
    ids = torch.stack([held_out[i * 1024 // 16 * 128 :][:128] for i in range(16)])
    assert size.held_out == 16
    with torch.no_grad():
        bits = model(input_ids=ids, labels=ids).loss / torch.log(torch.tensor(2.0))
    assert float(bits) == pytest.approx(result["bits_per_byte"], abs=1e-4)


def test_a_corpus_may_be_as_short_as_20_contexts(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(1, 129)) * 10)
    tiny(tmp_path / "text", tmp_path / "run")
    (tmp_path / "text").write_bytes((tmp_path / "text").read_bytes()[:-1])
    _, stderr = tiny(tmp_path / "text", tmp_path / "other", code=2)
    assert "1279 bytes are too short, 1280 or more are needed" in stderr


def test_files_and_output_of_a_finished_run(corpus, tmp_path):
    """The parent folders are created. Files that only a resumed run needs are removed."""
    folder = tmp_path / "some" / "where"
    options = ["--mixer", "trellis,cat", "--options", " chunk=8   gated=false", "--context", 32, "--seed", 5]
    stdout, _ = tiny(corpus, folder, *options, steps=3)
    names = {path.name for path in folder.iterdir()}
    assert names == {"arguments.json", "model", "result.json", "sample.txt"}
    result = json.loads((folder / "result.json").read_text())
    bits, parameters = result["bits_per_byte"], result["parameters"]
    common = {"mixer": "trellis,cat", "size": "tiny", "steps": 3, "corpus": str(corpus)}
    common |= {"context": 32, "options": "chunk=8 gated=false"}
    assert result == common | {
        "parameters": parameters,
        "tokens": 3 * 512,
        "bits_per_byte": round(bits, 4),
        "folder": str(folder / "model"),
    }
    arguments = json.loads((folder / "arguments.json").read_text())
    digest = arguments["corpus_digest"]
    assert arguments == common | {"seed": 5, "trainer": "girih-train", "corpus_digest": digest}
    lines = stdout.splitlines()
    assert lines[0].decode() == f"trellis,cat, {parameters} parameters, on cpu"
    assert lines[1].decode() == f"3 steps of 16 x 32 bytes of {corpus}"
    assert json.loads(lines[-1]) == result


def test_model_with_an_untied_head_has_the_parameters_of_its_size(corpus, tmp_path):
    """The run has more steps than the size."""
    steps, option = SIZES["tiny"].steps + 1, "tie_word_embeddings=false"
    stdout, _ = tiny(corpus, tmp_path / "run", "--context", 32, "--options", option, steps=steps)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    model = GirihForCausalLM.from_pretrained(tmp_path / "run" / "model")
    want = config_of_size("gsa", with_context(SIZES["tiny"], 32), options=option)
    assert model.config.intermediate_size == want.intermediate_size
    assert model.num_parameters() == result["parameters"] == GirihForCausalLM(want).num_parameters()
    assert result["steps"] == steps and result["tokens"] == steps * 512
    assert stdout.splitlines()[1].decode() == f"{steps} steps of 16 x 32 bytes of {corpus}"


def test_whole_sample_is_printed(corpus, tmp_path):
    """The sample of an untrained model may have a zero byte."""
    options = ["--mixer", "trellis,cat", "--options", "chunk=8 gated=false", "--context", 32, "--seed", 5]
    stdout, _ = tiny(corpus, tmp_path / "run", *options, steps=3)
    sample = (tmp_path / "run" / "sample.txt").read_bytes()
    assert len(sample) == 64 + 256 and b"\n\n" + sample + b"\n\n" in stdout


def test_an_adaptive_run_is_measured_by_each_of_its_chunks(corpus, tmp_path):
    tiny(corpus, tmp_path / "run", "--mixer", "cat", "--chunks", "4,8,16", steps=3)
    found = json.loads((tmp_path / "run" / "result.json").read_text())["bits_per_byte_by_chunk"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    windows = Windows.spread(read_corpus(corpus, 64).held_out, SIZES["tiny"].held_out, 64)
    ids = torch.stack([window["input_ids"] for window in windows])
    with torch.no_grad():
        want = {
            str(chunk): float(model(ids, labels=ids, chunk=chunk).loss / torch.log(torch.tensor(2.0)))
            for chunk in (4, 8, 16)
        }
    assert found == pytest.approx(want, abs=1e-4)


def test_old_lock_does_not_block_a_folder(corpus, tmp_path):
    (tmp_path / ".lock").touch()
    tiny(corpus, tmp_path)
    assert (tmp_path / "result.json").exists() and not (tmp_path / ".lock").exists()


ARGUMENTS = {"--mixer": "cat", "--chunks": "4,8", "--options": "compressor_layers=2"}
ARGUMENTS |= {"--context": 32, "--seed": 1, "--steps": 1}


def run_of(corpus, folder, changes, code=0):
    values = {name: value for name, value in (ARGUMENTS | changes).items() if value is not None}
    steps = values.pop("--steps")
    return tiny(corpus, folder, *(x for item in values.items() for x in item), steps=steps, code=code)


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    run_of(corpus, folder, {})
    assert run_of(corpus, folder, {})[0].startswith(b"this run is finished")
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"--mixer": "trellis", "--chunks": None, "--options": None},
        {"--chunks": None},
        {"--options": None},
        {"--options": "compressor_layers=1"},
        {"--context": None},
        {"--seed": 2},
        {"--steps": 2},
    ],
    ids=str,
)
def test_run_with_any_changed_argument_is_another_run(changes, corpus, finished):
    assert "a run of other arguments is in it" in run_of(corpus, finished, changes, code=2)[1]


@pytest.mark.parametrize("seed", [0, 7])
def test_initial_weights_are_those_of_a_new_model_after_the_seed(seed, corpus, tmp_path):
    """The learning rate of the first step is 0, so a run of one step saves the initial weights."""
    tiny(corpus, tmp_path / "run", "--mixer", "mamba2,gla", "--seed", seed)
    torch.manual_seed(seed)
    new = _C.LanguageModel((tmp_path / "run" / "model" / "config.json").read_text()).named_parameters()
    found = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(found[name].equal(p) for name, p in new.items())


def test_step_is_adamw_with_gradients_clipped_to_norm_1(corpus, tmp_path):
    """The first of two steps has a learning rate of 0, the second has the highest."""
    found, options = {}, ["--mixer", "attention", "--options", "initializer_range=0.5", "--seed", 2]
    for steps in (1, 2):
        tiny(corpus, tmp_path / str(steps), *options, steps=steps)
        found[steps] = load_file(tmp_path / str(steps) / "model" / "model.safetensors")
    windows = Windows.drawn(read_corpus(corpus, 64).train, 16, 64, 2)
    ids = torch.stack([window["input_ids"] for window in windows]).split(8)

    def relative_error(longest):
        """Distance between the weights of the run and of a step here, relative to the length of the step."""
        model = GirihForCausalLM.from_pretrained(tmp_path / "1" / "model")
        decayed = set(decay_parameter_names(model))
        groups = [
            {
                "params": [p for n, p in model.named_parameters() if (n in decayed) == has],
                "weight_decay": decay,
            }
            for has, decay in ((True, 0.1), (False, 0.0))
        ]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
        for batch, rate in zip(ids, (0.0, 3e-3), strict=True):
            optimizer.zero_grad()
            model(input_ids=batch, labels=batch).loss.backward()
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), longest) > 1
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        want = dict(model.named_parameters())
        step_length, error = (
            sum((p - x[n]).square().sum() for n, p in want.items()) for x in (found[1], found[2])
        )
        return (error / step_length).sqrt().item()

    assert relative_error(1.0) < 1e-4 < relative_error(1e9)


def test_progress_is_printed_every_fortieth_and_at_the_end(corpus, tmp_path):
    start = time.monotonic()
    stdout, _ = tiny(corpus, tmp_path / "run", "--mixer", "attention", steps=41)
    elapsed = time.monotonic() - start
    form = r"step (\d+)/41  ([\d.]+) bits per byte  (\d+) tokens/s"
    lines = re.findall(form, stdout.decode(errors="replace"))
    steps, bits, rates = ([float(x) for x in column] for column in zip(*lines, strict=True))
    assert steps == [*range(2, 41, 2), 41]
    assert all(abs(a - b) < 1.5 for a, b in pairwise(bits))
    lengths = [2] * 20 + [1]
    seconds = sum(length * 512 / rate for length, rate in zip(lengths, rates, strict=True))
    assert elapsed / 50 < seconds < elapsed


def test_run_is_saved_every_tenth_and_when_stopped(corpus, tmp_path):
    """The two newest checkpoints are kept. The run resumes from the newest."""
    command = [BIN / "girih-train", corpus, "--size", "tiny", "--steps", "100", "--mixer", "attention"]
    command += ["--folder", tmp_path / "run", "--device", "cpu"]

    def read_until(process, words):
        return next(line for line in process.stdout if line.startswith(words))

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        read_until(process, b"step 33/100")
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    last = max(int(name.removeprefix("step-")) for name in names)
    assert last >= 33 and names == {f"step-{last}", f"step-{(last - 1) // 10 * 10}"}
    (tmp_path / "run" / "checkpoints" / "step-99.part").mkdir()  # left by an interrupted save
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert f", from step {last} on".encode() in read_until(process, b"100 steps of ")
        process.kill()


def test_a_second_signal_ends_a_run_at_once(corpus, tmp_path):
    command = [BIN / "girih-train", corpus, "--steps", "5", "--folder", tmp_path / "run", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not (tmp_path / "run" / ".lock").exists() and process.poll() is None:
            time.sleep(0.01)
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        stderr = process.communicate()[1]
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert not stderr and not (tmp_path / "run" / "checkpoints").exists()


def test_default_folder_of_a_run(corpus, tmp_path):
    """A folder with other files is refused."""
    trellis_options = ["--mixer", "trellis", "--options", "phi=l2_silu  chunk=1"]
    for options, name in (
        ([], "gsa-small"),
        (["--size", "tiny", "--mixer", "cat", "--chunks", "4,8"], "cat-adaptive-tiny"),
        (["--size", "tiny", "--mixer", "gsa,attention"], "gsa-attention-tiny"),
        ([*trellis_options, "--size", "tiny", "--context", "32"], "trellis-chunk=1-phi=l2_silu-tiny-32"),
    ):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "other").touch()
        command = [BIN / "girih-train", corpus, "--device", "cpu", *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.stderr == f"girih-train: folder runs/{name}: there is something else in it\n"
        assert done.returncode == 2 and not done.stdout


@pytest.mark.parametrize("name, text", [("result.json", "{"), ("arguments.json", "[1]")])
def test_damaged_files_of_a_run_are_named(name, text, corpus, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / name).write_text(text)
    _, stderr = run_of(corpus, tmp_path / "run", {}, code=2)
    assert f"file {tmp_path}/run/{name}: it is damaged; remove it or its folder" in stderr


def test_a_corpus_may_have_any_name(tmp_path):
    """The name may also be invalid UTF-8."""
    name = os.fsencode(tmp_path) + b"/\xff text"
    Path(os.fsdecode(name)).write_text("some text " * 200)
    for words in (b"gsa, ", b"this run is finished"):
        command = [BIN / "girih-train", name, "--size", "tiny", "--steps", "1", "--folder", tmp_path / "run"]
        done = subprocess.run(command, capture_output=True)
        assert done.returncode == 0 and done.stdout.startswith(words), done.stderr


def test_parts_are_of_one_sequence_at_least(corpus, tmp_path):
    stdout, _ = tiny(corpus, tmp_path / "run", "--at-once", 1)
    assert stdout.splitlines()[1].startswith(b"1 steps of 8 x 64 bytes, in 8 parts each, of ")
    stdout, _ = tiny(corpus, tmp_path / "other", "--at-once", 511)
    assert stdout.splitlines()[1].startswith(b"1 steps of 8 x 64 bytes, in 2 parts each, of ")


def test_a_size_may_be_two_percent_off_and_no_more(tmp_path):
    """The size is checked before the corpus. A model of a valid size is refused because its corpus is
    missing."""

    def fits(slots):
        try:
            return bool(config_of_size("trellis", SIZES["tiny"], options=f"num_slots={slots}"))
        except Refusal:
            return False

    least, most = 64, 1024
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    for slots, words in ((least, "no such file"), (most, " parameters or more, asked for 100000")):
        options = ["--mixer", "trellis", "--options", f"num_slots={slots}"]
        assert words in tiny(tmp_path / "none", tmp_path / "run", *options, code=2)[1]


@pytest.mark.parametrize("name", SIZE_FIELDS)
def test_fields_of_the_size_are_not_options(name, tmp_path):
    value = {"mixer": "gla", "chunks": "[4]"}.get(name, "8")
    _, stderr = tiny(tmp_path / "none", tmp_path / "run", "--options", f"num_slots=4 {name}={value}", code=2)
    assert f"{name} is not an option; the size or --{name} sets it" in stderr


@pytest.mark.parametrize("context", [0, -1, 3 * 64, 1024])
def test_a_context_that_does_not_divide_a_step_is_refused(context, tmp_path):
    _, stderr = tiny(tmp_path / "none", tmp_path / "run", "--context", context, code=2)
    assert f"context {context}: expected a divisor of the 512 tokens of a step" in stderr
