"""Recipe of training: learning rate, checkpoint that a run resumes from, sample, size and speed."""

import errno
import json
import math
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from girih.data import Windows
from girih.models import GirihForCausalLM
from girih.training import trainer as trainer_module
from girih.training.command import Refusal, disk_full, refuse_steps
from girih.training.folder import MarkWhole, lock_run, newest_whole, read_result
from girih.training.recipe import SIZES, config_of_size, model_of_size, with_context
from girih.training.report import draw_curve, finish, write_sample
from girih.training.trainer import BITS, Clock, fit

pytestmark = pytest.mark.usefixtures("handlers")

STEPS = 40
RECIPE = replace(SIZES["tiny"], steps=STEPS, context=8, batch=2)
TEXT = (torch.arange(4000) * 7 % 251).to(torch.uint8)


def trainer_of(recipe, folder, **options):
    torch.manual_seed(0)
    model = model_of_size("attention", recipe)
    windows = Windows.drawn(TEXT, recipe.steps * recipe.batch, recipe.context, 0)
    return fit(model, recipe, windows, windows, folder, 0, save_strategy="no", **options)


def test_the_learning_rate_warms_up_and_falls_to_zero_along_a_cosine(tmp_path):
    trainer = trainer_of(RECIPE, tmp_path)
    used_rates = []
    step = trainer.create_optimizer().step

    def record_rates(*args, **kwargs):
        used_rates.append([group["lr"] for group in trainer.optimizer.param_groups])
        return step(*args, **kwargs)

    trainer.optimizer.step = record_rates
    trainer.train()
    warm, most = STEPS // 20, RECIPE.learning_rate

    def rate(done):
        if done < warm:
            return most * done / warm
        return most / 2 * (1 + math.cos(math.pi * (done - warm) / (STEPS - warm)))

    assert len(used_rates) == STEPS and all(len(set(rates)) == 1 for rates in used_rates)
    assert [rates[0] for rates in used_rates] == pytest.approx([rate(i) for i in range(STEPS)], rel=1e-6)
    logged = {
        log["step"]: log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log
    }
    assert list(logged) == list(range(1, STEPS + 1))
    assert list(logged.values()) == pytest.approx([rate(i) for i in range(STEPS)], rel=1e-6)
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0, abs=1e-12)


def test_optimizer_is_adamw_with_these_settings(tmp_path):
    trainer = trainer_of(RECIPE, tmp_path)
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (RECIPE.learning_rate, (0.9, 0.95), 1e-8)
        assert not group["amsgrad"] and not group["maximize"]
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 0.1]
    assert trainer.args.max_grad_norm == 1.0 and trainer.args.label_smoothing_factor == 0.0


@pytest.mark.parametrize(
    "batch, context, parts", [(128, 2048, 8), (128, 1024, 4), (32, 512, 1), (3, 40000, 3), (6, 7000, 2)]
)
def test_parts_divide_a_batch_and_are_as_large_as_possible(batch, context, parts):
    assert trainer_module.count_passes(batch, context, 2**15) == parts


@pytest.mark.parametrize("at_once", [16, 1])
def test_batch_in_parts_matches_the_whole_batch(at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a GPU would train in bf16

    def run_training(at_once):
        seen, trainer = (
            [],
            trainer_of(replace(RECIPE, steps=8, batch=6), tmp_path / str(at_once), at_once=at_once),
        )
        trainer.model.register_forward_pre_hook(
            lambda module, arguments, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
        )
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        return seen, losses, [p.detach() for p in trainer.model.parameters()]

    (seen, losses, parameters), (all_at_once, whole_losses, whole_parameters) = (
        run_training(at_once),
        run_training(48),
    )
    rows = max(1, at_once // 8)
    assert seen == [(rows, 8)] * (8 * 6 // rows) and all_at_once == [(6, 8)] * 8
    assert losses == pytest.approx(whole_losses, rel=1e-4)
    for part, whole in zip(parameters, whole_parameters, strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-3, atol=1e-4)


def test_the_newest_checkpoint_is_that_of_the_most_steps(tmp_path):
    for step in (90, 100, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
        state = SimpleNamespace(global_step=step, is_world_process_zero=True)
        MarkWhole().on_save(SimpleNamespace(output_dir=tmp_path), state, None)
    (tmp_path / "checkpoint-110").mkdir()  # an incomplete checkpoint
    assert newest_whole(tmp_path).name == "checkpoint-100"
    assert newest_whole(tmp_path / "none") is None


def test_seed_determines_the_sample():
    torch.manual_seed(0)
    model = model_of_size("attention", RECIPE).eval()
    same = [write_sample(model, b"seed", 40, seed) for seed in (3, 3, 4)]
    assert same[0] == same[1] != same[2]


@pytest.mark.parametrize("over, is_accepted", [(1.01, True), (1.05, False)])
def test_a_model_may_be_two_percent_off_its_size_and_no_more(over, is_accepted):
    least = model_of_size("attention", replace(RECIPE, parameters=1_000_000))
    config = least.config.to_dict() | {"intermediate_size": 8}
    smallest = GirihForCausalLM(type(least.config)(**config)).num_parameters()
    recipe = replace(RECIPE, parameters=round(smallest / over))
    if is_accepted:
        assert model_of_size("attention", recipe).num_parameters() == smallest
    else:
        with pytest.raises(Refusal, match=f"it has {smallest:,} parameters or more"):
            model_of_size("attention", recipe)


def test_without_an_mlp_the_number_of_layers_is_fitted():
    for name, layers in {"tiny": 6, "small": 6, "10m": 14}.items():
        size = SIZES[name]
        found = config_of_size("mamba2", size)
        assert (found.num_hidden_layers, found.intermediate_size) == (layers, None)
    model = model_of_size("mamba2", SIZES["tiny"])
    assert all(block.mlp is None and block.mlp_norm is None for block in model.model.layers)
    layer_size = sum(p.numel() for p in model.model.layers[0].parameters())
    assert abs(model.num_parameters() - SIZES["tiny"].parameters) <= layer_size / 2
    hybrid = model_of_size("mamba2,attention", SIZES["tiny"])
    assert abs(hybrid.num_parameters() / SIZES["tiny"].parameters - 1) <= 0.02
    assert [block.mlp is None for block in hybrid.model.layers] == [True, False]
    with pytest.raises(Refusal, match="mixer mamba2: it has .* parameters or more, asked for 10,000"):
        config_of_size("mamba2", replace(SIZES["tiny"], parameters=10_000))


def test_gated_deltanet_and_a_window_of_attention_take_turns_and_train():
    config = config_of_size("gated_deltanet,attention", SIZES["tiny"], options="window=8")
    assert config.mixer == ["gated_deltanet", "attention"] and config.window == 8
    torch.manual_seed(0)
    model = GirihForCausalLM(config).train()
    assert model.model.layers[1].mixer.window == 8
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids, losses = torch.randint(256, (4, 32)), []
    for _ in range(3):
        losses.append(model(ids, labels=ids).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[2] < losses[1] < losses[0]


def test_the_speed_of_a_resumed_run_counts_its_own_steps(tmp_path, monkeypatch):
    trainer = trainer_of(RECIPE, tmp_path)
    now = 100.0
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: now)
    Clock(trainer).on_train_begin(None, SimpleNamespace(global_step=30), None)
    now, trainer.state.global_step, logs = 104.0, 40, {"loss": 1.0}
    trainer.log(logs)
    assert logs["tokens_per_second"] == 10 * RECIPE.batch * RECIPE.context / 4
    assert logs["bits"] == pytest.approx(1 / math.log(2))


@pytest.mark.parametrize(
    "steps, warm, log_steps", [(5, 1, 1), (39, 1, 1), (41, 2, 2), (81, 4, 3), (400, 20, 10)]
)
def test_a_run_of_any_length_warms_up_and_logs_forty_times_at_most(steps, warm, log_steps, tmp_path):
    model = model_of_size("attention", RECIPE)
    recipe = replace(RECIPE, steps=steps, batch=6)
    trainer = fit(model, recipe, None, None, tmp_path, 7, at_once=16, save_steps=3)
    arguments = trainer.args
    assert (arguments.warmup_steps, arguments.logging_steps, arguments.max_steps) == (warm, log_steps, steps)
    assert (arguments.seed, arguments.save_steps, arguments.output_dir) == (7, 3, str(tmp_path))
    assert arguments.per_device_train_batch_size == arguments.per_device_eval_batch_size == 2
    assert arguments.gradient_accumulation_steps == 3
    assert arguments.bf16 == torch.cuda.is_available() and not arguments.logging_nan_inf_filter


def test_run_prints_one_line_for_each_log(tmp_path, capsys):
    trainer = trainer_of(replace(RECIPE, steps=2), tmp_path, unit="bits per word")
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    logs = [log for log in trainer.state.log_history if "bits" in log]
    assert len(lines) == len(logs) == 2
    for step, (line, log) in enumerate(zip(lines, logs, strict=True), 1):
        speed = f"{log['tokens_per_second']:,.0f} tokens/s"
        assert line == f"step {step}/2  {log['bits']:.3f} bits per word  {speed}"


def test_a_sample_is_drawn_from_all_bytes():
    class Model:
        device = "cpu"

        def generate(self, ids, **arguments):
            self.arguments = arguments
            return torch.cat((ids, torch.tensor([[104, 105, 255]])), 1)

    model = Model()
    assert write_sample(model, b"oh ", 3, 0) == "oh hi\ufffd"
    mask = model.arguments.pop("attention_mask")
    assert mask.tolist() == [[1, 1, 1]]
    assert model.arguments == {"max_new_tokens": 3, "do_sample": True, "temperature": 0.7, "top_k": 0}


@pytest.mark.parametrize("chunks", [None, [4, 8]])
def test_result_describes_training_and_measurement(chunks, tmp_path):
    config = SimpleNamespace(chunk=4, chunks=chunks)
    trainer = SimpleNamespace(
        model=SimpleNamespace(config=config, num_parameters=lambda: 123),
        evaluate=lambda: {"eval_loss": config.chunk / 2 / BITS},
        state=SimpleNamespace(
            log_history=[{"tokens_per_second": 10.0}, {"mag_weight": 1}, {"tokens_per_second": 30.0}]
        ),
        tokens_per_step=64,
        is_world_process_zero=lambda: False,
    )
    arguments = {"mixer": "cat", "size": "tiny", "corpus": "words.txt", "seed": 3}
    size = replace(RECIPE, context=32)
    want = arguments | {"context": 32, "parameters": 123, "steps": STEPS, "tokens": 64 * STEPS}
    want |= {"bits_per_byte": 2.0, "tokens_per_second": 15, "folder": str(tmp_path / "model")}
    del want["seed"]
    if chunks:
        want["bits_per_byte_by_chunk"] = {"4": 2.0, "8": 4.0}
    assert finish(trainer, size, arguments, tmp_path, b"") == want
    with_options = finish(trainer, size, arguments | {"options": "n=3"}, tmp_path, b"")
    assert with_options == want | {"options": "n=3"} and config.chunk == 4


def test_a_curve_is_bits_over_millions_of_tokens(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *to, **options: figures.append(figure) or save(figure, *to)
    )
    history = [{"step": 5, "bits": 4.0}, {"step": 5, "mag_weight": 0.1}, {"step": 10, "bits": 3.0}]
    draw_curve(history, 2 * 10**6, 2.5, "a title", tmp_path / "loss.png")
    (axes,) = figures[0].axes
    training, held_out = axes.lines
    assert training.get_xydata().tolist() == [[10.0, 4.0], [20.0, 3.0]]
    assert list(held_out.get_ydata()) == [2.5, 2.5] and axes.get_ylim()[0] == 0
    assert axes.get_title() == "a title" and axes.get_ylabel() == "bits per byte"
    assert held_out.get_label() == "held out, at the end: 2.500"
    assert [file.name for file in tmp_path.iterdir()] == ["loss.png"]


def test_default_chunk_of_an_adaptive_model():
    for chunks, chunk in (([4, 8], 4), ([8, 16, 32], 16), ([16, 32], 16), ([32, 64], 32)):
        config = config_of_size("cat", SIZES["tiny"], chunks=chunks)
        assert (config.chunk, config.chunks) == (chunk, chunks)


def test_positions_cover_the_training_context():
    for context, room in ((64, 8192), (8192, 8192), (16384, 16384)):
        config = config_of_size("attention", replace(SIZES["tiny"], context=context))
        assert config.max_position_embeddings == room
    longer = config_of_size(
        "attention", replace(SIZES["tiny"], context=16384), options="max_position_embeddings=20000"
    )
    assert longer.max_position_embeddings == 20000


def test_one_window_at_least_is_held_out():
    size = replace(SIZES["tiny"], context=64, batch=8, held_out=4)
    assert [with_context(size, n).held_out for n in (32, 64, 128, 256, 512)] == [8, 4, 2, 1, 1]
    assert with_context(size, None) == size
    assert with_context(size, 512).batch == 1 and with_context(size, 1).batch == 512


def test_number_of_steps_is_limited_by_memory(monkeypatch):
    """The start of a window is an int64. All starts are drawn before the first step and must
    fit into memory."""
    assert SIZES["tiny"].bytes_a_step == 64
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10}.get)
    refuse_steps(640, 64)
    refuse_steps(1, 64)
    for steps, words in ((641, "steps 641: at most 640"), (0, "steps 0: at least 1")):
        with pytest.raises(Refusal, match=words):
            refuse_steps(steps, 64)


def with_cause(error, cause, attribute):
    setattr(error, attribute, cause)
    return error


FULL_DISKS = [
    *(OSError(number, "") for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
    RuntimeError("[enforce fail] PytorchStreamWriter failed writing file data/0"),
    RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    RuntimeError("File too large"),
    RuntimeError("basic_ios::clear: iostream error"),
    *(
        with_cause(ValueError("x"), OSError(errno.ENOSPC, ""), attribute)
        for attribute in ("__cause__", "__context__")
    ),
]


@pytest.mark.parametrize("error", FULL_DISKS, ids=repr)
def test_full_disk_is_recognized_by_number_or_message(error):
    assert disk_full(error)


def test_other_errors_are_no_full_disk():
    others = (
        None,
        OSError(errno.EACCES, "denied"),
        ValueError("28"),
        with_cause(ValueError(), KeyError(), "__cause__"),
    )
    assert not any(map(disk_full, others))


def test_moved_runs_are_numbered(tmp_path, capsys):
    folder = tmp_path / "run"
    for i in range(3):
        with lock_run(folder, {"seed": i}):
            (folder / "mine").write_text(str(i))
        with lock_run(folder, {"seed": i}):  # an unfinished run of the same arguments stays
            assert (folder / "mine").read_text() == str(i)
    for name, i in (("run", 2), ("run.1", 0), ("run.2", 1)):
        assert (tmp_path / name / "mine").read_text() == str(i)
        assert json.loads((tmp_path / name / "arguments.json").read_text()) == {"seed": i}
    (folder / "result.json").write_text('{"bits": 1}')
    assert read_result(folder, {"seed": 2}) == {"bits": 1}
    assert read_result(folder, {"seed": 1}) is None and read_result(tmp_path / "run.1", {"seed": 0}) is None
