"""LoRA of peft: a girih model is trained, saved, loaded and merged."""

import pytest
import torch
from girih.models import GirihForCausalLM
from small_models import ADAPTIVE_CAT, CAT, HYBRID, SIZES, config_of

peft = pytest.importorskip("peft")

MODELS = {"hybrid": HYBRID, "cat": CAT, "adaptive cat": ADAPTIVE_CAT}
IDS = torch.randint(32, (3, 13), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return GirihForCausalLM(config_of(**SIZES | MODELS[request.param]))


@pytest.mark.parametrize("targets", ["all-linear", ["o_proj", "gate_proj"]], ids=str)
def test_lora_trains_is_saved_loaded_and_merged(model, targets, tmp_path):
    model.save_pretrained(tmp_path / "model")
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with torch.no_grad():
        plain = model.eval()(IDS).logits
    lora = peft.get_peft_model(
        model.train(), peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    )
    trainable = {name: p for name, p in lora.named_parameters() if p.requires_grad}
    assert trainable and all("lora_" in name for name in trainable)
    optimizer = torch.optim.AdamW(trainable.values(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = lora(input_ids=IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in trainable.values())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    lora.eval().save_pretrained(tmp_path / "lora")
    with torch.no_grad():
        trained = lora(input_ids=IDS).logits
        assert not torch.allclose(trained, plain, atol=1e-2)
        base = GirihForCausalLM.from_pretrained(tmp_path / "model").eval()
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "lora").eval()
        torch.testing.assert_close(loaded(input_ids=IDS).logits, trained, atol=1e-5, rtol=0)
        texts = [m.generate(input_ids=IDS, max_new_tokens=4, do_sample=False) for m in (lora, loaded)]
        assert texts[0].equal(texts[1])
        merged = loaded.merge_and_unload()
        assert type(merged) is GirihForCausalLM
        torch.testing.assert_close(merged(IDS).logits, trained, atol=1e-4, rtol=0)
    adapted = {
        name.split(".lora_A")[0].removeprefix("base_model.model.") for name in trainable if "lora_A" in name
    }
    changed = {name for name, p in merged.state_dict().items() if not p.equal(before[name])}
    assert changed == {f"{name}.weight" for name in adapted}
    merged.save_pretrained(tmp_path / "merged")
    again = GirihForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        assert again(IDS).logits.equal(merged(IDS).logits)


@pytest.mark.parametrize("reentrant", [True, False])
def test_adapters_train_behind_checkpoints(model, reentrant):
    """The model is prepared as by `prepare_model_for_kbit_training`. The gradients equal those without
    checkpoints."""
    lora = peft.get_peft_model(
        model.train(), peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    )
    trainable = {name: p for name, p in lora.named_parameters() if p.requires_grad}
    lora(input_ids=IDS, labels=IDS).loss.backward()
    want = {name: p.grad.clone() for name, p in trainable.items()}
    lora.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    lora(input_ids=IDS, labels=IDS).loss.backward()
    for name, p in trainable.items():
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad, want[name], atol=1e-5, rtol=1e-4)


def test_hooks_of_embeddings_are_removed(model):
    model.enable_input_require_grads()
    model.disable_input_require_grads()
    assert not [name for name, module in model.named_modules() if module._forward_hooks]


def test_a_folder_of_adapters_is_loaded_with_its_model(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    base = GirihForCausalLM.from_pretrained(tmp_path / "model").eval()
    options = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    lora = peft.get_peft_model(base, options)
    lora.save_pretrained(tmp_path / "lora")
    again = GirihForCausalLM.from_pretrained(tmp_path / "lora").eval()
    torch.testing.assert_close(again(IDS).logits, lora.eval()(IDS).logits, atol=1e-6, rtol=0)
