import contextlib
import fcntl
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from girih import train
from girih.data import Windows, read_corpus
from girih.models import GirihForCausalLM
from girih.models.cat import CatModel
from girih.nn import decay_parameter_names
from girih.training.command import Refusal
from girih.training.folder import LOCK, WHOLE, check_space, lock_folder, newest_whole
from girih.training.recipe import SIZES, model_of_size
from girih.training.trainer import BITS, ByteTrainer, fit
from safetensors.torch import load_file
from transformers import AutoTokenizer

STEPS = 24
FULL = "girih.train: the disk or a file is full; nothing half-written counts, the same command continues"

pytestmark = pytest.mark.usefixtures("handlers")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """40 KB of words in a random order with a fixed seed."""
    draw = random.Random(0)
    words = ["memory", "slot", "chunk", "decay", "the", "a", "of", "reads", "writes", "key", "value", "."]
    file = tmp_path_factory.mktemp("corpus") / "words.txt"
    file.write_text(" ".join(draw.choice(words) for _ in range(8000)))
    return file


def arguments(corpus: Path, folder: Path, steps: int = STEPS, mixer: str = "gsa") -> list[str]:
    options = {"mixer": mixer, "size": "tiny", "steps": steps, "corpus": corpus, "folder": folder}
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def last_line(text: str) -> dict:
    return json.loads(text.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> tuple[Path, str]:
    """An undisturbed run: its folder and its output."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert train.main(arguments(corpus, folder)) == 0
    return folder, printed.getvalue()


def test_files_and_last_line_of_a_run(finished):
    folder, printed = finished
    result = last_line(printed)
    assert result["mixer"] == "gsa" and result["folder"] == str(folder / "model")
    assert abs(result["parameters"] / SIZES["tiny"].parameters - 1) < 0.02
    assert 0 < result["bits_per_byte"] < 6 and result["tokens_per_second"] > 0
    model = GirihForCausalLM.from_pretrained(result["folder"])
    assert model.num_parameters() == result["parameters"]
    tokenizer = AutoTokenizer.from_pretrained(result["folder"])
    assert tokenizer("Øg")["input_ids"] == list("Øg".encode())
    assert (folder / "loss.png").read_bytes()[1:4] == b"PNG"
    assert (folder / "sample.txt").read_text() in printed
    assert list((folder / "logs").glob("events*"))
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        ["arguments.json", "logs", "loss.png", "model", "result.json", "sample.txt"]
    )


def test_the_saved_model_is_the_one_that_was_measured(finished, corpus):
    folder, printed = finished
    size = SIZES["tiny"]
    model = GirihForCausalLM.from_pretrained(folder / "model")
    text = read_corpus(corpus, size.context).held_out
    windows = Windows.spread(text, size.held_out, size.context)
    ids = torch.stack([windows[i]["input_ids"] for i in range(len(windows))])
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
    assert float(loss) * BITS == pytest.approx(last_line(printed)["bits_per_byte"], abs=1e-3)


def test_a_finished_run_says_so_and_is_not_trained_again(finished, corpus, capsys):
    folder, printed = finished
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    assert train.main(arguments(corpus, folder)) == 0
    again = capsys.readouterr().out
    assert "finished" in again and "step" not in again.splitlines()[0]
    assert last_line(again) == last_line(printed)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_run_resumes_and_matches_an_uninterrupted_run(number, finished, corpus, tmp_path, capsys):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "girih.train", *arguments(corpus, folder)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in run.stdout:
        if line.startswith("step 5/"):
            run.send_signal(number)
            break
    _, complaint = run.communicate(timeout=300)
    assert run.returncode == 128 + number
    assert complaint.strip().splitlines()[-1] == "girih.train: stopped; the same command continues"
    newest = newest_whole(folder / "checkpoints")
    stopped = int(newest.name.split("-")[1])
    assert 5 <= stopped < STEPS

    partial = folder / "checkpoints" / f"checkpoint-{stopped + 1}"
    shutil.copytree(newest, partial, ignore=shutil.ignore_patterns(WHOLE, "trainer_state.json"))
    (partial / "optimizer.pt").write_bytes(b"cut off")

    assert train.main(arguments(corpus, folder)) == 0
    printed = capsys.readouterr().out
    assert f"from step {stopped} on" in printed
    assert last_line(printed)["bits_per_byte"] == pytest.approx(
        last_line(finished[1])["bits_per_byte"], abs=2e-3
    )


def test_killed_run_resumes_bitwise_equal_to_an_uninterrupted_run(finished, corpus, tmp_path, capsys):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "girih.train", *arguments(corpus, folder)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=one_thread
    )
    for line in run.stdout:
        if line.startswith("step 11/"):
            run.kill()
            break
    assert run.wait(timeout=300) == -signal.SIGKILL
    run.stdout.close()
    newest = newest_whole(folder / "checkpoints")
    assert newest is not None and not (folder / "result.json").exists()
    assert train.main(arguments(corpus, folder)) == 0
    assert f"from step {newest.name.split('-')[1]} on" in capsys.readouterr().out
    want, found = (load_file(run / "model" / "model.safetensors") for run in (finished[0], folder))
    assert want.keys() == found.keys() and all(found[name].equal(want[name]) for name in want)


def test_other_arguments_are_another_run_and_the_first_is_kept(finished, corpus, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    assert train.main(arguments(corpus, folder, steps=2)) == 0
    printed = capsys.readouterr().out
    assert last_line(printed)["steps"] == 2
    assert json.loads((tmp_path / "run.1" / "result.json").read_text())["steps"] == STEPS


def test_folder_of_an_active_run_is_locked_and_not_moved(corpus, tmp_path, capsys):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "girih.train", *arguments(corpus, folder, steps=1000)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert "parameters" in run.stdout.readline()
        for seed in ("0", "1"):
            line = refusal([*arguments(corpus, folder, steps=1000), "--seed", seed], capsys)
            assert line == f"girih.train: folder {folder}: another run is at work in it\n"
        assert [p.name for p in tmp_path.iterdir()] == ["run"]
    finally:
        run.kill()
        run.communicate()
    assert train.main(arguments(corpus, folder, steps=1)) == 0  # the lock of the killed run is released
    assert (tmp_path / "run.1").exists() and not list(tmp_path.glob("*/" + LOCK))


def test_lock_of_a_moved_folder_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setattr(fcntl, "lockf", lambda *_: folder.rename(tmp_path / "run.1"))
    with pytest.raises(Refusal, match="another run was at work in it just now"), lock_folder(folder):
        pass


def test_lock_of_another_run_is_not_removed(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with lock_folder(folder):
        folder.rename(tmp_path / "run.1")
        folder.mkdir()
        (folder / LOCK).touch()
    assert (folder / LOCK).exists()


def test_mixers_alternate_over_the_layers(corpus, tmp_path, capsys):
    assert train.main(arguments(corpus, tmp_path / "run", steps=1, mixer="gsa,attention")) == 0
    result = last_line(capsys.readouterr().out)
    assert list(GirihForCausalLM.from_pretrained(result["folder"]).config.mixer) == ["gsa", "attention"]


def test_adaptive_run_saves_one_model_for_all_chunks(corpus, tmp_path, capsys, monkeypatch):
    chunk_draws = []
    choose_chunk = CatModel.choose_chunk
    monkeypatch.setattr(
        CatModel,
        "choose_chunk",
        lambda model, *args: (
            chunk_draws.append((model.training, choose_chunk(model, *args))) or chunk_draws[-1][1]
        ),
    )
    argv = [*arguments(corpus, tmp_path / "run", mixer="cat"), "--chunks", "4,8,16"]
    assert train.main(argv) == 0
    result = last_line(capsys.readouterr().out)
    assert {chunk for training, chunk in chunk_draws if training} == {4, 8, 16}
    by_chunk = result["bits_per_byte_by_chunk"]
    assert by_chunk.keys() == {"4", "8", "16"} and by_chunk["16"] == result["bits_per_byte"]
    assert len(set(by_chunk.values())) == 3 and all(bits < 7 for bits in by_chunk.values())
    config = GirihForCausalLM.from_pretrained(result["folder"]).config
    assert (config.chunk, config.chunks) == (16, [4, 8, 16])


def test_parameters_that_decay_are_those_that_the_layers_name(corpus, tmp_path):
    model = model_of_size("trellis", SIZES["tiny"])
    trainer = fit(model, SIZES["tiny"], None, None, tmp_path, 0)
    groups = {g["weight_decay"]: g["params"] for g in trainer.create_optimizer().param_groups}
    decayed = {id(model.get_parameter(name)) for name in decay_parameter_names(model)}
    assert {id(p) for p in groups[0.1]} == decayed
    undecayed = {id(p) for p in groups[0.0]}
    assert undecayed == {id(p) for p in model.parameters()} - decayed
    assert id(model.model.layers[0].mixer.key_memory) in undecayed


def refusal(argv: list[str], capsys) -> str:
    """The one-line error that refuses `argv`."""
    assert train.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    return printed.err


def test_invalid_arguments_are_refused_in_one_line_and_leave_no_folder(corpus, tmp_path, capsys):
    folder, empty, short = tmp_path / "run", tmp_path / "empty", tmp_path / "short.txt"
    empty.mkdir()
    short.write_text("too short")
    wrong = {
        "nowhere": arguments(tmp_path / "nowhere", folder),
        "empty": arguments(empty, folder),
        "short": arguments(short, folder),
        "no_mixer": arguments(corpus, folder, mixer="gsa,no_mixer"),
        "huge": [*arguments(corpus, folder), "--size", "huge"],
        "2 layers": arguments(corpus, folder, mixer="gsa,gla,abc"),
        "steps": arguments(corpus, folder, steps=0),
        "at most": arguments(corpus, folder, steps=10**15),
        "argument --corpus: the name is empty": arguments("", folder),
        "argument --folder: the name is empty": arguments(corpus, ""),
        "chunks": [*arguments(corpus, folder), "--chunks", "4,8"],
        "ascending": [*arguments(corpus, folder, mixer="cat"), "--chunks", "8,4"],
        "argument --chunks: invalid numbers value: 'few'": [*arguments(corpus, folder), "--chunks", "few"],
        "argument --seed: -1 ": [*arguments(corpus, folder), "--seed", "-1"],
        "at-once 0": [*arguments(corpus, folder), "--at-once", "0"],
        f"argument --seed: {2**32} ": [*arguments(corpus, folder), "--seed", str(2**32)],
        "argument --seed: invalid seed value: 'one'": [*arguments(corpus, folder), "--seed", "one"],
    }
    for word, argv in wrong.items():
        assert word in refusal(argv, capsys)
        assert not folder.exists()


def test_out_of_memory_error_suggests_a_smaller_at_once(corpus, tmp_path, capsys, monkeypatch):
    def raise_out_of_memory(*arguments, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ByteTrainer, "training_step", raise_out_of_memory)
    assert train.main(arguments(corpus, tmp_path / "run")) == 2
    message = (
        "the GPU's memory is full with 512 tokens at once; the same command with --at-once 256 continues"
    )
    assert capsys.readouterr().err == f"girih.train: {message}\n"


def test_invalid_option_value_is_refused_in_one_line(capsys):
    assert "many" in refusal(["--steps", "many"], capsys)


def test_a_folder_with_something_else_in_it_is_not_touched(corpus, tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    assert "something else" in refusal(arguments(corpus, tmp_path), capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("name", ["arguments.json", "result.json"])
@pytest.mark.parametrize("content", [b'{"mixer": "g', b"\xff\xfe", b"[]"])
def test_a_damaged_file_is_refused_in_one_line(name, content, finished, corpus, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    (folder / name).write_bytes(content)
    assert f"file {folder / name}: it is damaged" in refusal(arguments(corpus, folder), capsys)


def test_unusable_folder_is_refused_in_one_line(corpus, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("mine")
    for folder in (file, file / "below", Path("/proc/girih")):
        assert f"folder {folder}: " in refusal(arguments(corpus, folder), capsys)
    assert file.read_text() == "mine"


def test_folder_without_write_permission_is_refused_before_training(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert "Permission denied" in refusal(arguments(corpus, tmp_path / "run"), capsys)


@pytest.fixture(scope="module")
def half_done(corpus, tmp_path_factory) -> Path:
    """A run that was stopped after its last step, 12, with two checkpoints."""
    folder = tmp_path_factory.mktemp("half_done") / "run"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(train, "finish", lambda *rest: (_ for _ in ()).throw(Refusal("stopped")))
        assert train.main(arguments(corpus, folder, steps=12)) == 2
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json", WHOLE])
def test_truncated_checkpoint_is_reported_and_left_out(name, half_done, corpus, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(half_done, folder)
    newest = folder / "checkpoints" / "checkpoint-12"
    os.truncate(newest / name, (newest / name).stat().st_size // 2)
    for odd in ("checkpoint-", "checkpoint-13.old", "checkpoint-last"):
        shutil.copytree(newest, newest.with_name(odd))
    newest.with_name("checkpoint-14").touch()
    assert train.main(arguments(corpus, folder, steps=12)) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{newest} is damaged and left out\n")
    assert "from step 11 on" in printed and last_line(printed)["steps"] == 12


def test_without_a_whole_checkpoint_a_run_starts_from_the_beginning(half_done, corpus, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(half_done, folder)
    for file in (folder / "checkpoints").glob("*/optimizer.pt"):
        os.truncate(file, 0)
    assert newest_whole(folder / "checkpoints") is None
    assert capsys.readouterr().out.count("is damaged and left out\n") == 2
    assert not list((folder / "checkpoints").iterdir())


# the first limit stops the weights, the second the optimizer state
@pytest.mark.parametrize("limit", [200_000, 600_000])
def test_a_limit_of_file_sizes_is_a_full_disk(limit, corpus, tmp_path, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        assert train.main(arguments(corpus, tmp_path / "run", steps=1)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert capsys.readouterr().err.splitlines() == [FULL]
    assert newest_whole(tmp_path / "run" / "checkpoints") is None
    assert train.main(arguments(corpus, tmp_path / "run", steps=1)) == 0


def test_truncated_file_of_arguments_does_not_block_the_folder(corpus, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    partial = folder / "arguments.json.part"
    partial.symlink_to("/dev/full")
    assert train.main(arguments(corpus, folder, steps=1)) == 2
    assert capsys.readouterr().err.splitlines() == [FULL]
    partial.unlink()
    partial.write_text('{"mixer": "g')
    assert train.main(arguments(corpus, folder, steps=1)) == 0
    assert not partial.exists()


def test_a_disk_without_room_is_refused_before_training(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert "MB are free" in refusal(arguments(corpus, tmp_path / "run"), capsys)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_disk_needs_room_for_three_checkpoints_and_the_model(missing, tmp_path, monkeypatch):
    """Three checkpoints of weights and two moments, and the weights once more: 40 bytes a parameter."""
    room = SimpleNamespace(free=40 * 10**6 - missing)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
    if missing:
        with pytest.raises(Refusal, match="40 MB are needed, 40 MB are free"):
            check_space(tmp_path, 10**6)
    else:
        check_space(tmp_path, 10**6)


def test_a_corpus_of_one_name_and_other_bytes_is_another_run(tmp_path, capsys):
    folder, corpus = tmp_path / "run", tmp_path / "words.txt"
    for word in ("one ", "two "):
        corpus.write_text(word * 2000)
        assert train.main(arguments(corpus, folder, steps=1)) == 0
        assert "finished" not in capsys.readouterr().out
    first, second = (
        json.loads((tmp_path / name / "arguments.json").read_text()) for name in ("run.1", "run")
    )
    assert {name for name in first if first[name] != second[name]} == {"corpus_sha256"}


def test_full_disk_at_the_end_leaves_no_result_and_the_rerun_finishes(corpus, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    full = folder / "sample.txt.part"
    with monkeypatch.context() as patch:
        patch.setattr(train, "check_space", lambda folder, parameters: full.symlink_to("/dev/full"))
        assert train.main(arguments(corpus, folder, steps=2)) == 2
    assert capsys.readouterr().err.splitlines() == [FULL]
    assert not (folder / "result.json").exists() and not (folder / "sample.txt").exists()
    full.unlink()
    assert train.main(arguments(corpus, folder, steps=2)) == 0
    printed = capsys.readouterr().out
    assert "from step 2 on" in printed and last_line(printed)["steps"] == 2


@pytest.fixture
def small_disk(tmp_path) -> Path:
    """A disk with room for one checkpoint of a tiny model and a part of a second one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2200k", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if mount.returncode:
        pytest.skip("no disk can be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_full_disk_during_a_checkpoint_keeps_the_previous_checkpoint(corpus, small_disk, capsys, monkeypatch):
    monkeypatch.setattr(train, "check_space", lambda folder, parameters: None)
    folder = small_disk / "run"
    assert train.main(arguments(corpus, folder, steps=20)) == 2
    assert capsys.readouterr().err.splitlines() == [FULL]
    assert newest_whole(folder / "checkpoints").name == "checkpoint-2"
