"""Training of converted models: adapters, schedules of the weight, checkpointing, compilation."""

import copy
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import girih
import pytest
import torch
import torch.nn.functional as F
from converted import IDS, WAYS, attention, base_model, close, convert, converted
from girih.conversion.rows import silu_normalize
from girih.data import read_corpus
from girih.nn import decay_parameter_names
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

peft = pytest.importorskip("peft")


@pytest.fixture(params=["llama", "gpt2"])
def family(request):
    return request.param


def lora(family, **options):
    targets = ["c_attn", "c_proj"] if family == "gpt2" else ["q_proj", "v_proj", "o_proj"]
    return peft.LoraConfig(
        r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False, **options
    )


def train_model(model, steps=6, lr=3e-2):
    model.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=lr)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in trainable)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    assert losses[-1] < losses[0]
    return model


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("way", WAYS)
def test_adapters_on_a_converted_model_train_are_saved_and_loaded(family, way, tmp_path):
    """The new part, named girih, also trains if peft is asked to save it."""
    model = converted(family, way)
    model.save_pretrained(tmp_path / "model")
    adapted = peft.get_peft_model(model, lora(family, modules_to_save=["girih"]))
    names = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert any("lora_" in name for name in names) and any(".girih." in name for name in names)
    train_model(adapted).save_pretrained(tmp_path / "adapter")
    base = girih.from_pretrained(tmp_path / "model")
    before = logits(base)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert logits(loaded).equal(logits(adapted)) and not torch.allclose(before, logits(loaded), atol=1e-2)
    merged = loaded.merge_and_unload()
    close(logits(merged), logits(adapted), 1e-4)
    merged.save_pretrained(tmp_path / "merged")
    assert logits(girih.from_pretrained(tmp_path / "merged")).equal(logits(merged))


def test_an_adapted_model_is_injected(family, tmp_path):
    adapted = peft.get_peft_model(base_model(family), lora(family))
    without = logits(adapted.eval())
    girih.inject(adapted, weight=0.5, n=2)
    assert not torch.allclose(logits(adapted), without, atol=1e-2)
    assert all("lora_" in name for name, p in adapted.named_parameters() if p.requires_grad)
    train_model(adapted).save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base_model(family), tmp_path).eval()
    girih.inject(loaded, weight=0.5, n=2)
    assert logits(loaded).equal(logits(adapted))


def test_both_paths_go_through_the_adapters(family):
    """Both orders of inject and get_peft_model give the same model."""
    models = []
    for first in ("inject", "adapt"):
        model = base_model(family)
        if first == "inject":
            girih.inject(model, weight=1.0)
        torch.manual_seed(7)
        model = peft.get_peft_model(model, lora(family)).eval()
        if first == "adapt":
            girih.inject(model, weight=1.0)
        models.append(logits(model))
        with model.disable_adapter():
            assert not torch.allclose(logits(model), models[-1], atol=1e-2)
    assert models[0].equal(models[1])


def test_what_peft_would_not_save_is_refused():
    adapted = peft.get_peft_model(base_model(), lora("llama"))
    with pytest.raises(ValueError, match="call replace_attention first, then get_peft_model"):
        girih.replace_attention(adapted)
    with pytest.raises(ValueError, match="learned: .* call inject first, then get_peft_model"):
        girih.inject(adapted, learned=True)
    model = base_model()
    model._hf_peft_config_loaded = True  # set by add_adapter of transformers
    with pytest.raises(ValueError, match="call replace_attention first, then get_peft_model"):
        girih.replace_attention(model)
    girih.inject(model)
    assert not any(p.requires_grad for name, p in model.named_parameters() if ".girih." in name)


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return {"input_ids": IDS[i % 2], "labels": IDS[i % 2]}


def trainer(model, folder, schedule, **options):
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{"max_steps": 6, "save_strategy": "no", "seed": 0} | options,
    )
    return Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[schedule])


SCHEDULES = {
    "constant": ({"final": 0.25}, [0.25] * 6),
    "gradual": ({"first": 0.0, "final": 0.5, "steps": 4}, [0.0, 0.125, 0.25, 0.375, 0.5, 0.5]),
    "cyclic": ({"levels": (0.0, 0.5, 1.0), "steps": 2}, [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]),
}


def logged_weights(trainer):
    """The logged weight of every step."""
    history = trainer.state.log_history
    steps = [entry["mag_weight"] for entry in history if set(entry) == {"mag_weight", "step"}]
    return steps


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_moves_the_weight_of_every_layer_and_logs_it(schedule, tmp_path):
    options, expected = SCHEDULES[schedule]
    model = converted()
    run = trainer(model, tmp_path, girih.MixSchedule(schedule, **options))
    run.train()
    assert logged_weights(run) == expected
    assert [attention(model, i).girih.weight.item() for i in range(2)] == [expected[-1]] * 2
    model.save_pretrained(tmp_path)
    assert attention(girih.from_pretrained(tmp_path)).girih.weight.item() == expected[-1]


def test_default_schedule_is_gradual():
    schedule = girih.MixSchedule()
    weights = [schedule.weight(step) for step in (0, 50, 100, 1000)]
    assert weights == pytest.approx([0.01, 0.255, 0.5, 0.5])


def test_a_learned_weight_is_logged(tmp_path):
    model = base_model()
    girih.inject(model, learned=True, weight=0.25)
    run = trainer(model, tmp_path, girih.MixSchedule("learned"))
    run.train()
    weights = logged_weights(run)
    assert len(weights) == 6 and len(set(weights)) == 6 and weights[0] == pytest.approx(0.25, abs=0.01)
    assert weights[-1] == pytest.approx(
        sum(attention(model, i).girih.current_weight().item() for i in range(2)) / 2
    )


def test_reporters_receive_the_weight(tmp_path):
    """Reporters such as TensorBoard, which the Trainer calls before the callbacks of the user."""
    seen, started = [], []

    class Reporter(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            started.append(type(self))

        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    class LaterReporter(Reporter):
        pass

    schedule = girih.MixSchedule("gradual", first=0.0, final=0.5, steps=4)
    run = trainer(converted(), tmp_path, Reporter())
    run.add_callback(schedule)
    run.add_callback(LaterReporter())
    run.train()
    assert started == [Reporter, LaterReporter]
    step_weights = [logs["mag_weight"] for logs in seen if "loss" in logs]
    assert step_weights == [0.125, 0.125, 0.375, 0.375, 0.5, 0.5]
    assert run.callback_handler.callbacks.count(schedule) == 1


def test_resumed_training_matches_uninterrupted_training(tmp_path):
    schedule = {"first": 0.0, "final": 0.5, "steps": 6}
    models, logs = [], []
    for kind in ("whole", "resumed"):
        options = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
        if kind == "resumed":
            run = trainer(
                converted(), tmp_path / kind, girih.MixSchedule("gradual", **schedule), **options, max_steps=3
            )
            run.train()
        model = converted()
        run = trainer(model, tmp_path / kind, girih.MixSchedule("gradual", **schedule), **options)
        run.train(resume_from_checkpoint=kind == "resumed" or None)
        models.append(model)
        logs.append(logged_weights(run))
    assert logs[0] == logs[1] == [step / 12 for step in range(6)]
    for (name, a), b in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        assert a.equal(b), name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: girih.MixSchedule("linear"), "schedule is 'linear'; expected one of constant, gradual"),
        (lambda: girih.MixSchedule("constant", steps=3), "steps: the schedule 'constant' has no such option"),
        (lambda: girih.MixSchedule("gradual", steps=0), "steps is 0; expected a whole number, 1 or more"),
        (lambda: girih.MixSchedule("gradual", final=1.5), "final is 1.5; expected weights from 0 to 1"),
        (lambda: girih.MixSchedule("cyclic", levels=(0, 2)), r"levels is \(0, 2\); expected weights"),
        (lambda: girih.MixSchedule("constant", final="a"), "final is 'a'; expected weights from 0 to 1"),
        (lambda: girih.MixSchedule("cyclic", levels=3), "levels is 3; expected weights"),
        (lambda: girih.MixSchedule("cyclic", levels=()), r"levels is \(\); expected weights"),
    ],
)
def test_invalid_schedules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_schedule_must_match_the_model(tmp_path):
    with pytest.raises(ValueError, match="model has no mixture .* call girih.inject first"):
        trainer(base_model(), tmp_path, girih.MixSchedule()).train()
    with pytest.raises(ValueError, match="schedule is 'learned', but the model was made with learned=False"):
        trainer(converted(), tmp_path, girih.MixSchedule("learned")).train()
    model = base_model()
    girih.inject(model, layers=[0])
    girih.inject(model, layers=[1], learned=True)
    for schedule, learned in (("gradual", True), ("constant", True), ("learned", False)):
        message = f"schedule is '{schedule}', but the model was made with learned={learned}"
        with pytest.raises(ValueError, match=message):
            trainer(model, tmp_path, girih.MixSchedule(schedule)).train()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(way, reentrant):
    model = converted("llama", way).train()
    mask = torch.ones_like(IDS)
    mask[0, 15:] = 0

    def gradients():
        model.zero_grad()
        model(IDS, attention_mask=mask, labels=IDS).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for name, grad in gradients().items():
        close(grad, expected[name])


@pytest.mark.parametrize("way", WAYS)
def test_converted_layer_compiles_as_one_graph(way):
    torch.compiler.reset()
    model = converted("llama", way)
    layer = attention(model)
    x = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(0))
    call = {
        "hidden_states": x,
        "position_embeddings": model.model.rotary_emb(x, torch.arange(20)[None]),
        "attention_mask": None,
    }
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    close(compiled(**call)[0], layer(**call)[0])
    call["girih_tokens"] = None
    call["attention_mask"] = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    close(compiled(**call)[0], layer(**call)[0])
    # a change of the buffer does not recompile
    if hasattr(layer.girih, "set_weight") and not layer.girih.learned:
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        layer.girih.set_weight(0.125)
        close(compiled(**call)[0], layer(**call)[0])
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize("way", ["window", "both, gelu", "gsa"])
def test_converted_model_compiles_as_one_graph(way):
    torch.compiler.reset()
    model = converted("llama", way, num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    mask = torch.ones_like(IDS)
    mask[0, :6] = 0

    def gradients(call, options):
        model.zero_grad()
        loss = call(IDS, labels=IDS, use_cache=False, **options).loss
        loss.backward()
        return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters()}

    for options in ({}, {"attention_mask": mask}):
        found, want = gradients(compiled, options), gradients(model, options)
        for name, grad in want.items():
            assert (found[name] - grad).norm() <= 1e-3 * grad.norm(), name
        assert all(grad.any() for name, grad in want.items() if "proj" in name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_unit_rows_have_the_same_gradients_in_every_mode(dtype):
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    dz = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    wide = x.detach().double().requires_grad_()
    want = F.normalize(F.silu(wide), dim=-1, eps=1e-6)
    (exact,) = torch.autograd.grad(want, wide, dz.double())
    torch.compiler.reset()
    ways = (
        silu_normalize,
        torch.compile(silu_normalize, fullgraph=True, backend="aot_eager"),
        torch.func.vmap(silu_normalize),
    )
    for way in ways:
        z = way(x)
        (dx,) = torch.autograd.grad(z, x, dz)
        assert z.dtype == dx.dtype == dtype
        torch.testing.assert_close(z.double(), want, rtol=0, atol=4 * torch.finfo(dtype).eps)
        torch.testing.assert_close(dx.double(), exact, rtol=0, atol=20 * torch.finfo(dtype).eps)


def test_norms_and_the_weight_do_not_decay():
    model = converted("llama", "window")
    decayed = [name for name in decay_parameter_names(model) if ".girih." in name]
    assert decayed == [] and any(".girih." in name for name, _ in model.named_parameters())


def test_fp16_and_autocast_stay_finite():
    for way in WAYS:
        model = converted("llama", way).train()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())
        half = copy.deepcopy(model).half().eval()
        assert half(IDS).logits.isfinite().all()


def test_the_tutorial_runs(tmp_path, monkeypatch, capsys):
    """Two steps on a small model and a short text."""
    base_model("girih", vocab_size=256).save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("the memory reads what it is told " * 800)
    found = spec_from_file_location("tutorial", Path(__file__).parents[2] / "examples" / "inject_memory.py")
    tutorial = module_from_spec(found)
    found.loader.exec_module(tutorial)
    monkeypatch.setattr(tutorial, "STEPS", 2)
    monkeypatch.setattr(tutorial, "CONTEXT", 32)
    monkeypatch.setattr(tutorial, "read_corpus", lambda: read_corpus(tmp_path / "text", 32))
    monkeypatch.setattr("sys.argv", ["inject_memory.py", str(tmp_path)])
    tutorial.main()
    bits = dict(
        line.split(" bits a byte  ")[::-1] for line in capsys.readouterr().out.splitlines() if " bits" in line
    )
    assert bits["with the memory, at weight 0"] == bits["the Transformer"]
    assert bits["the same, saved and loaded"] == bits["with the memory, at weight 0.5, fine-tuned by LoRA"]
    assert len(set(bits.values())) == 4


def test_an_unconverted_copy_is_not_touched():
    base = base_model()
    model = copy.deepcopy(base)
    convert(model, "injected")
    assert type(attention(base)).__name__ == "LlamaAttention"
