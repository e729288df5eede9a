"""Trainers of trl on folders of girih's models, converted models and accelerated models, a few steps each.

Before the first step the reference equals the policy: the loss of DPO is log 2, and the KL divergence of GRPO
is 0. A reference that is loaded without its conversion would be another model.
"""

import contextlib
import math
from importlib.util import find_spec

import girih
import pytest
import torch
from girih.models import GirihForCausalLM
from small_models import config_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BambaConfig,
    BambaForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    TrainerCallback,
)

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
PAIRS = [{"prompt": "a b", "chosen": " c d", "rejected": " x y"}] * 8
ACCELERATED = {
    "qwen3_next": lambda **sizes: Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **sizes,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            intermediate_size=64,
            layer_types=["linear_attention", "full_attention"],
            mlp_only_layers=[0],
            num_experts=3,
            num_experts_per_tok=2,
            router_aux_loss_coef=0.0,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )
    ),
    "bamba": lambda **sizes: BambaForCausalLM(
        BambaConfig(
            **sizes,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=64,
            attn_layer_indices=[1],
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_n_groups=1,
            mamba_d_state=16,
        )
    ),
}
KINDS = ["gsa", "cat", "injected", "replaced", *ACCELERATED]


def tokenizer():
    """A tokenizer with a token for each byte."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL.values(), *letters])}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>")
    byte_tokenizer = tokenizers.Tokenizer(model)
    byte_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer, **SPECIAL)


def model_of(kind):
    sizes = {"vocab_size": len(tokenizer()), "hidden_size": 32, "num_hidden_layers": 2}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    torch.manual_seed(0)
    if kind in ACCELERATED:
        return ACCELERATED[kind](**sizes, **ends)
    if kind in ("injected", "replaced"):
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **ends, **heads))
        girih.inject(model) if kind == "injected" else girih.replace_attention(model, num_slots=8)
    else:
        model = GirihForCausalLM(config_of(**sizes, **ends, mixer=kind, num_heads=2, num_slots=8, chunk=4))
    return model


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    """The folder of a model. Models of transformers are accelerated when they are loaded."""
    model_of(request.param).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    with contextlib.ExitStack() as stack:
        if request.param in ACCELERATED:
            with pytest.warns(UserWarning, match="without a GPU"):
                acceleration = stack.enter_context(girih.accelerate())
        yield str(tmp_path / "model")
        if request.param in ACCELERATED:
            assert repr(acceleration) != "Acceleration of 0 functions"


def train_and_log(trainer, config, model, rows, options, folder=None, **arguments):
    """The logs of the steps, two by default. model: a folder, or the model of a folder."""
    args = config(
        **{
            "output_dir": f"{folder or model}-trained",
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "report_to": "none",
            "use_cpu": True,
            "logging_steps": 1,
            "save_strategy": "no",
            "bf16": False,
        }
        | options
    )
    data = datasets.Dataset.from_list(rows)
    instance = trainer(model=model, args=args, train_dataset=data, processing_class=tokenizer(), **arguments)
    instance.train()
    return [entry for entry in instance.state.log_history if "loss" in entry]


def test_dpo(folder):
    first, second = train_and_log(trl.DPOTrainer, trl.DPOConfig, folder, PAIRS, {})
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5) and second["loss"] != first["loss"]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_grpo(folder, bf16):
    """With bf16 the logits of the texts are computed under autocast. Generation runs partly
    outside autocast."""

    def reward(completions, **_):
        return [float(len(set(text))) for text in completions]

    options = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1, "bf16": bf16}
    rows = [{"prompt": "a b"}] * 8
    first, second = train_and_log(trl.GRPOTrainer, trl.GRPOConfig, folder, rows, options, reward_funcs=reward)
    assert first["kl"] == pytest.approx(0, abs=1e-6) and math.isfinite(second["loss"])


def test_sft(folder):
    first, second = train_and_log(trl.SFTTrainer, trl.SFTConfig, folder, [{"text": "a b c d e f"}] * 8, {})
    assert second["loss"] < first["loss"]


def test_reward(folder):
    if AutoConfig.from_pretrained(folder).model_type == "bamba":
        pytest.skip("transformers has no Bamba for sequence classification")
    assert len(train_and_log(trl.RewardTrainer, trl.RewardConfig, folder, PAIRS, {})) == 2


class Gradients(TrainerCallback):
    """The largest gradient of each trainable parameter, over all steps."""

    def __init__(self):
        self.most = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for name, p in model.named_parameters():
            if p.requires_grad:
                grad = 0.0 if p.grad is None else p.grad.abs().max().item()
                self.most[name] = max(self.most.get(name, 0.0), grad)


@pytest.mark.parametrize("bits", [None, 4], ids=["lora", "qlora"])
def test_adapters_of_every_linear_layer_train(folder, bits):
    """peft prepares the model as for quantization: frozen, unquantized parameters in fp32, with
    checkpoints."""
    peft = pytest.importorskip("peft")
    options = {}
    if bits is not None:
        if find_spec("bitsandbytes") is None:
            pytest.skip("bitsandbytes is not installed")
        nf4 = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
        options = {"quantization_config": nf4}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    linear = {
        name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"
    }
    model = peft.prepare_model_for_kbit_training(model)
    if bits is None:
        model = model.float()
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora)
    gradients = Gradients()
    rows, steps = [{"text": "a b c d e f"}] * 8, {"max_steps": 6, "learning_rate": 1e-2}
    log = train_and_log(
        trl.SFTTrainer, trl.SFTConfig, model, rows, steps, folder=folder, callbacks=[gradients]
    )
    assert log[-1]["loss"] < log[0]["loss"] - 0.02
    adapted = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in gradients.most}
    if any("experts" in name for name in adapted):  # peft adapts experts instead of other linear layers
        linear = {name for name in linear if ".mlp." not in name}
    assert adapted >= linear
    assert not [name for name, most in gradients.most.items() if not most > 0]
