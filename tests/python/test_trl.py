"""trl's trainers on folders of girih's and of converted models, a few steps each.

Before the first step the reference is the policy: DPO's loss is log 2 and GRPO's KL divergence 0. A reference
that was loaded without its conversion would be another model.
"""

import math

import girih
import pytest
import torch
from girih.models import GirihConfig, GirihForCausalLM
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
PAIRS = [{"prompt": "a b", "chosen": " c d", "rejected": " x y"}] * 8
KINDS = ["gsa", "cat", "injected", "replaced"]


def tokenizer():
    """A token for each byte."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL.values(), *letters])}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>")
    of_bytes = tokenizers.Tokenizer(model)
    of_bytes.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=of_bytes, **SPECIAL)


def model_of(kind):
    sizes = {"vocab_size": len(tokenizer()), "hidden_size": 32, "num_hidden_layers": 2}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    torch.manual_seed(0)
    if kind in ("injected", "replaced"):
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **ends, **heads))
        girih.inject(model) if kind == "injected" else girih.replace_attention(model, num_slots=8)
    else:
        model = GirihForCausalLM(GirihConfig(**sizes, **ends, mixer=kind, num_heads=2, num_slots=8, chunk=4))
    return model


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    model_of(request.param).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def trained(trainer, config, folder, rows, options, **arguments):
    """What two steps have logged."""
    args = config(
        output_dir=f"{folder}-trained",
        max_steps=2,
        per_device_train_batch_size=2,
        report_to="none",
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        bf16=False,
        **options,
    )
    data = datasets.Dataset.from_list(rows)
    made = trainer(model=folder, args=args, train_dataset=data, processing_class=tokenizer(), **arguments)
    made.train()
    return [entry for entry in made.state.log_history if "loss" in entry]


def test_dpo(folder):
    first, second = trained(trl.DPOTrainer, trl.DPOConfig, folder, PAIRS, {})
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5) and second["loss"] != first["loss"]


def test_grpo(folder):
    def reward(completions, **_):
        return [float(len(set(text))) for text in completions]

    options = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
    rows = [{"prompt": "a b"}] * 8
    first, _ = trained(trl.GRPOTrainer, trl.GRPOConfig, folder, rows, options, reward_funcs=reward)
    assert first["kl"] == pytest.approx(0, abs=1e-6)


def test_sft(folder):
    first, second = trained(trl.SFTTrainer, trl.SFTConfig, folder, [{"text": "a b c d e f"}] * 8, {})
    assert second["loss"] < first["loss"]


def test_reward(folder):
    assert len(trained(trl.RewardTrainer, trl.RewardConfig, folder, PAIRS, {})) == 2
