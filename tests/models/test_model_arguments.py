"""Arguments that transformers and users pass to a model: each is used or refused by name."""

import subprocess
import sys

import pytest
import torch
from girih.models import CatModel, GirihForCausalLM, GirihModel
from small_models import config_of
from transformers import AutoModel, AutoModelForCausalLM


def small(mixer="gsa", **options):
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "num_slots": 8}
    return config_of(mixer=mixer, **(sizes | {"chunk": 4, "max_position_embeddings": 64} | options))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GirihForCausalLM(small(["gsa", "attention"], initializer_range=0.2)).eval()


def ids(*shape):
    return torch.randint(1, 32, shape, generator=torch.Generator().manual_seed(1))


LAZY = """
import sys, girih
assert "transformers" not in sys.modules and "girih.nn" not in sys.modules
{first}
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
config = AutoConfig.from_pretrained({folder!r})
models = AutoModelForCausalLM.from_pretrained({folder!r}), AutoModel.from_pretrained({folder!r})
print(type(config).__name__, *[type(model).__name__ for model in models])
assert girih.models.GirihConfig is type(config) and girih.nn.Trellis
"""


@pytest.mark.parametrize("first", ["", "from transformers import Trainer"])
def test_import_registers_auto_classes_lazily(first, tmp_path):
    """Trainer imports transformers' tables of models while transformers itself is being imported."""
    GirihForCausalLM(small()).save_pretrained(tmp_path)
    program = LAZY.format(first=first, folder=str(tmp_path))
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == ["GirihConfig", "GirihForCausalLM", "GirihModel"]


def test_import_after_transformers_registers_auto_classes():
    program = "from transformers import AutoConfig; import girih; print(AutoConfig.for_model('girih').mixer)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert run.stdout.split() == ["gsa"], run.stderr[-2000:]


def test_import_after_auto_classes_registers_models():
    program = (
        "from transformers import AutoModel, AutoModelForCausalLM; import girih;"
        "config = girih.models.GirihConfig(hidden_size=64, num_hidden_layers=1, num_heads=2);"
        "print(*[type(auto.from_config(config)).__name__ for auto in (AutoModel, AutoModelForCausalLM)])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert run.stdout.split() == ["GirihModel", "GirihForCausalLM"], run.stderr[-2000:]


def test_the_base_model_of_mixer_cat_is_cat(tmp_path):
    model = GirihForCausalLM(small("cat")).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path).eval()
    assert type(loaded) is CatModel and type(AutoModel.from_config(model.config)) is CatModel
    torch.testing.assert_close(loaded(ids(1, 9)).last_hidden_state, model.model(ids(1, 9)).last_hidden_state)
    assert type(AutoModel.from_config(small(["cat", "gsa"]))) is GirihModel


def test_generation_starts_from_embeddings(model):
    prompt, options = ids(2, 6), {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    embedded = model.get_input_embeddings()(prompt)
    text = model.generate(inputs_embeds=embedded, **options)
    assert text.equal(model.generate(prompt, **options)[:, 6:])
    with pytest.raises(ValueError, match="inputs_embeds: CAT"):
        GirihForCausalLM(small("cat")).generate(inputs_embeds=embedded, **options)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attn_implementation_is_accepted(model, implementation, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation).eval()
    assert loaded(ids(1, 5)).logits.equal(model(ids(1, 5)).logits)


def test_a_configuration_asks_for_hidden_states_and_tuples(model):
    assert model(ids(1, 5)).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(ids(1, 5)).hidden_states) == len(model.model(ids(1, 5)).hidden_states) == 3
    assert model(ids(1, 5), output_hidden_states=False).hidden_states is None
    model.config.return_dict = False
    assert type(model(ids(1, 5))) is tuple and type(model.model(ids(1, 5))) is tuple
    assert type(model(ids(1, 5), return_dict=True)) is not tuple


def test_attention_weights_are_refused(model):
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids(1, 5), output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions"):
        model.model(ids(1, 5), output_attentions=True)


@pytest.mark.parametrize("part", ["model", "base model", "layer", "cat"])
@pytest.mark.parametrize("name", ["cu_seqlen", "attention_masks", "head_mask"])
def test_unknown_arguments_are_refused_by_name(model, part, name):
    parts = {"model": model, "base model": model.model, "layer": model.model.layers[0].mixer}
    module = parts.get(part) or GirihForCausalLM(small("cat"))
    inputs = torch.zeros(1, 4, 32) if part == "layer" else ids(1, 4)
    with pytest.raises(TypeError, match=f"'{name}'"):
        module(inputs, **{name: torch.tensor([0, 4])})


def test_arguments_of_transformers_are_accepted(model):
    known = {"cache_position": torch.arange(5), "cu_seq_lens_k": None, "max_length_q": 5, "max_length_k": 5}
    assert model(ids(1, 5), **known).logits.equal(model(ids(1, 5)).logits)
    mean = model(ids(2, 5), labels=ids(2, 5)).loss
    total = model(ids(2, 5), labels=ids(2, 5), num_items_in_batch=torch.tensor(16)).loss
    torch.testing.assert_close(total, mean * 8 / 16)


@pytest.mark.parametrize("mixer", ["gsa", "cat", ["cat", "attention"]], ids=str)
def test_models_export_with_any_number_of_tokens(mixer):
    model = GirihForCausalLM(small(mixer)).eval()
    program = torch.export.export(
        model,
        (ids(2, 13),),
        {"use_cache": False},
        dynamic_shapes={"input_ids": {1: torch.export.Dim("T", min=8, max=64)}, "use_cache": None},
        prefer_deferred_runtime_asserts_over_guards=True,
    ).module()
    for T in (8, 9, 31):
        torch.testing.assert_close(program(ids(2, T), use_cache=False).logits, model(ids(2, T)).logits)


def test_trainer_passes_the_number_of_tokens(model, tmp_path):
    """The loss over several micro-batches is the mean over all tokens, not the mean of the means."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    assert Trainer(model=model, args=arguments).model_accepts_loss_kwargs


def test_aliases_have_one_value():
    for alias, name in (("num_attention_heads", "num_heads"), ("num_key_value_heads", "num_kv_heads")):
        assert getattr(small(**{alias: 2, name: 2}), alias) == 2
        with pytest.raises(ValueError, match=f"{name} is 2 and {alias} is 1; expected one of them"):
            small(**{alias: 1, name: 2})
    config = small(num_key_value_heads=1)
    assert config.num_kv_heads == config.num_key_value_heads == 1 and config.num_attention_heads == 2
