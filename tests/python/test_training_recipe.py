"""How models are trained: the learning rate, what a run continues from, its sample, its size, its speed."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from girih.data import Windows
from girih.models import GirihForCausalLM
from girih.training import trainer as trainer_module
from girih.training.command import Refusal
from girih.training.folder import Whole, newest_whole
from girih.training.recipe import SIZES, model_of_size
from girih.training.report import write_sample
from girih.training.trainer import Clock, fit

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
    used = []
    step = trainer.create_optimizer().step

    def noted(*args, **kwargs):
        used.append([group["lr"] for group in trainer.optimizer.param_groups])
        return step(*args, **kwargs)

    trainer.optimizer.step = noted
    trainer.train()
    warm, most = STEPS // 20, RECIPE.learning_rate

    def rate(done):
        if done < warm:
            return most * done / warm
        return most / 2 * (1 + math.cos(math.pi * (done - warm) / (STEPS - warm)))

    assert len(used) == STEPS and all(len(set(rates)) == 1 for rates in used)
    assert [rates[0] for rates in used] == pytest.approx([rate(i) for i in range(STEPS)], rel=1e-6)
    logged = {
        log["step"]: log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log
    }
    assert list(logged) == list(range(1, STEPS + 1))
    assert list(logged.values()) == pytest.approx([rate(i) for i in range(STEPS)], rel=1e-6)
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0, abs=1e-12)


def test_the_optimizer_is_adamw_by_these_numbers(tmp_path):
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
def test_parts_divide_a_batch_and_are_as_large_as_may_be(batch, context, parts):
    assert trainer_module.passes_of(batch, context, 2**15) == parts


@pytest.mark.parametrize("at_once", [16, 1])
def test_a_batch_that_is_read_in_parts_is_trained_as_one(at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # where it would be trained in bf16

    def trained(at_once):
        seen, trainer = (
            [],
            trainer_of(replace(RECIPE, steps=8, batch=6), tmp_path / str(at_once), at_once=at_once),
        )
        trainer.model.register_forward_pre_hook(
            lambda module, arguments, named: seen.append(named["input_ids"].shape), with_kwargs=True
        )
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        return seen, losses, [p.detach() for p in trainer.model.parameters()]

    (seen, losses, parameters), (all_at_once, of_all, wanted) = trained(at_once), trained(48)
    rows = max(1, at_once // 8)
    assert seen == [(rows, 8)] * (8 * 6 // rows) and all_at_once == [(6, 8)] * 8
    assert losses == pytest.approx(of_all, rel=1e-4)
    for part, whole in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-3, atol=1e-4)


def test_the_newest_checkpoint_is_that_of_the_most_steps(tmp_path):
    for step in (90, 100, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
        state = SimpleNamespace(global_step=step, is_world_process_zero=True)
        Whole().on_save(SimpleNamespace(output_dir=tmp_path), state, None)
    (tmp_path / "checkpoint-110").mkdir()  # cut off
    assert newest_whole(tmp_path).name == "checkpoint-100"
    assert newest_whole(tmp_path / "none") is None


def test_a_seed_is_a_sample():
    torch.manual_seed(0)
    model = model_of_size("attention", RECIPE).eval()
    same = [write_sample(model, b"seed", 40, seed) for seed in (3, 3, 4)]
    assert same[0] == same[1] != same[2]


@pytest.mark.parametrize("over, taken", [(1.01, True), (1.05, False)])
def test_a_model_may_be_two_percent_off_its_size_and_no_more(over, taken):
    least = model_of_size("attention", replace(RECIPE, parameters=1_000_000))
    config = least.config.to_dict() | {"intermediate_size": 8}
    smallest = GirihForCausalLM(type(least.config)(**config)).num_parameters()
    asked = replace(RECIPE, parameters=round(smallest / over))
    if taken:
        assert model_of_size("attention", asked).num_parameters() == smallest
    else:
        with pytest.raises(Refusal, match=f"it has {smallest:,} parameters or more"):
            model_of_size("attention", asked)


def test_the_speed_of_a_resumed_run_counts_its_own_steps(tmp_path, monkeypatch):
    trainer = trainer_of(RECIPE, tmp_path)
    now = 100.0
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: now)
    Clock(trainer).on_train_begin(None, SimpleNamespace(global_step=30), None)
    now, trainer.state.global_step, logs = 104.0, 40, {"loss": 1.0}
    trainer.log(logs)
    assert logs["tokens_per_second"] == 10 * RECIPE.batch * RECIPE.context / 4
    assert logs["bits"] == pytest.approx(1 / math.log(2))
