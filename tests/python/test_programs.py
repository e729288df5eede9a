"""girih-generate and girih-train, which have no Python in their process, beside what Python makes of it."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from conftest import TREE, needs_cuda
from girih import train
from girih.data import Windows, read_corpus
from girih.models import MIXERS, GirihConfig, GirihForCausalLM
from girih.training.recipe import SIZES, config_of_size, model_of_size, with_context
from girih.training.report import write_sample
from girih.training.trainer import ByteTrainer
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM

BIN = TREE / "bin"
pytestmark = pytest.mark.skipif(not BIN.exists(), reason="the programs were not built here")
PROMPTS = ["a", "girih", "The quick brown fox jumps over the lazy dog, twice."]


def run(program, *arguments, given="", code=0):
    done = subprocess.run([BIN / program, *map(str, arguments)], capture_output=True, input=given.encode())
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


def test_greedy_text_is_that_of_python_alone_and_in_a_batch(folder):
    texts = [bytes(python_text(folder, prompt, max_new_tokens=24)) for prompt in PROMPTS]
    written, said = run("girih-generate", folder, PROMPTS[1], "--max-new-tokens", 24)
    assert written == texts[1] + b"\n"
    assert re.fullmatch(
        r"24 tokens in [^;]+ s, \d+ tokens/s; [^;]+, then \d+ tokens/s, [\d.]+ ms a token\n", said
    )
    together, said = run("girih-generate", folder, *PROMPTS, "--max-new-tokens", 24)
    assert together == b"".join(text + b"\n" for text in texts)
    assert said.startswith("72 tokens in ")


@needs_cuda
@pytest.mark.parametrize("batch", [1, 3])
def test_text_on_cuda_is_that_of_python(folder, batch):
    """In both a token is a CUDA graph there; of CAT, one that ends a chunk another."""
    prompts = ["girih", "tiles", "lines"][:batch]
    ids = torch.tensor([[*prompt.encode()] for prompt in prompts], device="cuda")
    model = AutoModelForCausalLM.from_pretrained(folder).eval().cuda()
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
    written, _ = run("girih-generate", folder, *prompts, "--max-new-tokens", 64, "--device", "cuda")
    assert written == b"".join(bytes(row) + b"\n" for row in text.tolist())


@pytest.fixture(scope="module")
def gsa(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 300, "hidden_size": 16, "num_heads": 2, "num_hidden_layers": 1}
    GirihForCausalLM(GirihConfig(mixer="gsa", initializer_range=0.5, **sizes)).save_pretrained(folder)
    return folder


def ids_of(folder, *options, prompt="7 8 299", quiet=("--quiet",)):
    written, said = run("girih-generate", folder, "--ids", *quiet, *options, given=prompt)
    assert bool(said) != bool(quiet)
    return [int(word) for word in written.split()]


def test_token_ids_go_in_and_out(gsa):
    model = AutoModelForCausalLM.from_pretrained(gsa).eval()
    ids = torch.tensor([[7, 8, 299]])
    want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    assert ids_of(gsa, "--max-new-tokens", 9) == want[0].tolist()
    both, _ = run("girih-generate", gsa, "--ids", "--lines", "--max-new-tokens", 9, given="7 8 299\n5\n")
    assert [int(word) for word in both.splitlines()[0].split()] == want[0].tolist()
    assert len(both.splitlines()[1].split()) == 10


def test_lines_end_as_either_system_ends_them(tmp_path):
    sizes = {"vocab_size": 256, "hidden_size": 16, "num_heads": 2, "num_hidden_layers": 1}
    GirihForCausalLM(GirihConfig(mixer="gsa", initializer_range=0.5, **sizes)).save_pretrained(tmp_path)
    how = ("--lines", "--quiet", "--max-new-tokens", 4)
    one, other = (run("girih-generate", tmp_path, *how, given=f"ab{end}c{end}")[0] for end in ("\n", "\r\n"))
    assert one == other and one.startswith(b"ab")


def test_samples_follow_the_seed_and_what_is_left_to_choose_from(gsa):
    def sample(*options):
        return ids_of(gsa, "--max-new-tokens", 40, "--temperature", 2, *options)

    greedy = ids_of(gsa, "--max-new-tokens", 40)
    assert sample("--seed", 1) == sample("--seed", 1) != sample("--seed", 2)
    assert sample("--seed", 1) != greedy
    assert sample("--seed", 1, "--top-p", 1e-6) == greedy == sample("--seed", 1, "--top-k", 1)
    # The most likely tokens that have a share together, at every step.
    model, text = AutoModelForCausalLM.from_pretrained(gsa).eval(), sample("--seed", 3, "--top-p", 0.6)
    with torch.no_grad():
        chances = (model(torch.tensor([text])).logits[0] / 2).softmax(-1)
    taken = []
    for t in range(2, len(text) - 1):
        rank = (chances[t] > chances[t, text[t + 1]]).sum()
        before = chances[t].sort(descending=True).values[:rank].sum()
        assert before < 0.6
        taken.append(rank)
    assert max(taken) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dtype_is_that_of_python(gsa, dtype):
    """Each dtype writes its own text."""
    texts = {}
    for name in ("float32", "bfloat16", "float16"):
        model = AutoModelForCausalLM.from_pretrained(gsa, dtype=getattr(torch, name)).eval()
        ids = torch.tensor([[1, 2, 3]])
        call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
        texts[name] = model.generate(ids, **call)[0].tolist()
    assert len(set(map(tuple, texts.values()))) == 3
    assert ids_of(gsa, "--max-new-tokens", 20, "--dtype", dtype, prompt="1 2 3") == texts[dtype]


def test_a_text_ends_at_its_end(gsa):
    text = ids_of(gsa, "--max-new-tokens", 40)
    at = next(i for i in range(4, len(text)) if text[i] not in text[3:i])
    assert ids_of(gsa, "--max-new-tokens", 40, "--eos", f"{text[at]},298") == text[:at]


@pytest.mark.parametrize(
    "arguments, given, word",
    [
        (["{}", "1 300", "--ids"], "", "300"),
        (["{}", "1 x", "--ids"], "", "x"),
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
def test_what_cannot_be_done_is_a_line(gsa, arguments, given, word):
    arguments = [str(a).format(gsa) for a in arguments]
    written, said = run("girih-generate", *arguments, given=given, code=2)
    assert not written and said.count("\n") == 1 and word in said


@pytest.mark.parametrize(
    "arguments", [["--seed", "-1"], ["--max-new-tokens", "-1"], ["--lines", "1"], ["--top-k", "x"], ["--odd"]]
)
def test_arguments_that_do_not_fit_are_refused(gsa, arguments):
    written, said = run("girih-generate", gsa, "--ids", *arguments, given="1", code=2)
    assert not written and arguments[0] in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device here")
def test_a_text_that_cannot_be_written_is_an_error(gsa):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [BIN / "girih-generate", gsa, "1", "--ids", "--quiet"], stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 2 and b"standard output" in done.stderr


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


def test_a_run_ends_in_a_model_for_python(corpus, tmp_path):
    written, _ = run("girih-train", corpus, "--size", "tiny", "--steps", 60, "--folder", tmp_path / "run")
    lines = [line for line in written.decode(errors="replace").splitlines() if line.startswith("step ")]
    bits = [float(line.split()[2]) for line in lines]
    assert bits[-1] < 5 < 7.5 < bits[0]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(result["folder"])
    python = model_of_size("gsa", SIZES["tiny"])
    ours, theirs = model.config.to_diff_dict(), python.config.to_diff_dict()
    for name in ("architectures", "dtype", "transformers_version"):
        ours.pop(name, None), theirs.pop(name, None)
    assert ours == theirs
    assert model.num_parameters() == result["parameters"]
    again, _ = run("girih-train", corpus, "--size", "tiny", "--steps", 60, "--folder", tmp_path / "run")
    assert again.startswith(b"this run is finished")
    _, said = run("girih-train", corpus, "--size", "tiny", "--folder", tmp_path / "run", code=2)
    assert "other arguments" in said


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    "model",
    [
        ["--mixer", "delta_product,attention"],
        ["--mixer", "trellis,attention", "--options", "chunk=1  phi=l2_silu window=9", "--context", 128],
    ],
    ids=["plain", "options"],
)
def test_a_run_is_that_of_python_from_the_same_first_weights(model, tmp_path, monkeypatch, capsys):
    """Loss by loss, in the weights at the end, in the held-out figure of 29 windows, 8 at a time, and in the
    sample, on the same windows in one order. The first step's learning rate is 0: a run of one step leaves
    the first weights."""
    corpus = tmp_path / "text"
    corpus.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(1500))[: 20 * 64 * 29])
    options = [*model, "--size", "tiny", "--seed", 3]
    run("girih-train", corpus, *options, "--steps", 1, "--folder", tmp_path / "first", "--device", "cpu")
    options += ["--steps", 40]
    written, _ = run("girih-train", corpus, *options, "--folder", tmp_path / "cpp", "--device", "cpu")
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

    ours, theirs = losses(written.decode(errors="replace")), losses(capsys.readouterr().out)
    assert len(ours) == 40 and ours == pytest.approx(theirs, abs=0.003)
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
    """The header of a chunk, which does not decay, moves where the chunk was drawn."""
    headers = []
    for steps in (1, 2):  # of two steps the first moves nothing
        options = ["--mixer", "cat", "--chunks", "4,8,16", "--size", "tiny", "--steps", steps, "--seed", seed]
        run("girih-train", corpus, *options, "--folder", tmp_path / str(steps), "--device", "cpu")
        headers.append(load_file(tmp_path / str(steps) / "model" / "model.safetensors")["model.header"])
    moved = (headers[1] != headers[0]).any(1).nonzero()[:, 0].tolist()
    drawn = [torch.randint(3, (), generator=torch.Generator().manual_seed(seed + part)) for part in (0, 1)]
    assert moved == sorted({int(chunk) for chunk in drawn})


@pytest.mark.parametrize("chunks, chunk", [([4, 8], 4), ([8, 16, 32], 16), ([8, 24], 8)], ids=str)
def test_an_adaptive_model_goes_by_16_or_else_by_its_first_chunk(chunks, chunk, corpus, tmp_path):
    options = ["--mixer", "cat", "--chunks", ",".join(map(str, chunks)), "--size", "tiny", "--steps", 1]
    run("girih-train", corpus, *options, "--folder", tmp_path / "run", "--device", "cpu")
    cpp = GirihConfig.from_pretrained(tmp_path / "run" / "model")
    for config in (cpp, config_of_size("cat", SIZES["tiny"], chunks=chunks)):
        assert (config.chunk, config.chunks) == (chunk, chunks)


@pytest.mark.parametrize("mixer", ["gsa", "attention,gla", "gla,attention", "trellis,delta_product", "cat"])
def test_a_run_has_the_configuration_that_python_gives_it(mixer, corpus, tmp_path):
    options = ["--mixer", mixer, "--size", "tiny", "--steps", 1, "--context", 32]
    run("girih-train", corpus, *options, "--folder", tmp_path / "run", "--device", "cpu")
    found = GirihConfig.from_pretrained(tmp_path / "run" / "model")
    want = config_of_size(mixer, with_context(SIZES["tiny"], 32))
    assert found.own_fields() == want.own_fields()


def test_chunks_are_one_model_that_reads_by_each_of_them(corpus, tmp_path):
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
    assert sample == write_sample(model.eval(), prompt, 256, 0)  # by chunks of 16


def test_a_corpus_is_known_by_its_bytes(tmp_path):
    texts = [tmp_path / name for name in ("one.txt", "other.txt")]
    options = ["--size", "tiny", "--steps", 1, "--folder", tmp_path / "run"]
    for text in texts:
        text.write_text("one " * 2000)
    run("girih-train", texts[0], *options)
    again, _ = run("girih-train", texts[1], *options)
    assert again.startswith(b"this run is finished")
    texts[0].write_text("two " * 2000)
    _, said = run("girih-train", texts[0], *options, code=2)
    assert "a run of other arguments is in it" in said


def test_a_batch_that_is_read_in_parts_is_trained_as_one(corpus, tmp_path):
    found = []
    for at_once, said in ((512, ""), (200, ", in 4 parts each,")):
        options = ["--size", "tiny", "--steps", 12, "--at-once", at_once, "--device", "cpu"]
        written, _ = run("girih-train", corpus, *options, "--folder", tmp_path / str(at_once))
        first, *lines = written.decode(errors="replace").splitlines()[1:]
        assert first.startswith(f"12 steps of 8 x 64 bytes{said} of ")
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


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(corpus, tmp_path):
    options = ["--mixer", "delta_product", "--size", "tiny", "--steps", "150"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run("girih-train", corpus, *options, "--folder", whole)
    command = [BIN / "girih-train", corpus, *options, "--folder", stopped]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not list(stopped.glob("checkpoints/step-*")) and process.poll() is None:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGTERM)
        _, said = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, said
    assert b"the same command continues" in said
    written, _ = run("girih-train", corpus, *options, "--folder", stopped)
    assert b", from step " in written.splitlines()[1]
    files = [folder / "model" / "model.safetensors" for folder in (whole, stopped)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_folder_has_one_run_at_a_time_which_may_be_part_of_the_corpus_folder(corpus, tmp_path):
    texts = tmp_path / "texts"
    shutil.copytree(corpus, texts)
    options = [texts, "--size", "tiny", "--steps", "3000", "--folder", texts / "run"]
    with subprocess.Popen([BIN / "girih-train", *options], stdout=subprocess.PIPE) as process:
        while not list(texts.glob("run/checkpoints/step-*")) and process.poll() is None:
            time.sleep(0.01)
        _, said = run("girih-train", *options, code=2)
        assert "another run is at work" in said
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
def test_a_run_that_cannot_be_is_refused_in_a_line(corpus, tmp_path, arguments, word):
    arguments = [a.format(corpus) for a in arguments]
    written, said = run("girih-train", *arguments, "--folder", tmp_path / "run", code=2)
    assert not written and said.count("\n") == 1 and word in said
    assert not (tmp_path / "run").exists()
