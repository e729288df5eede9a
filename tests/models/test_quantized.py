"""Models in 4 and 8 bits by bitsandbytes: they compute with the quantized weights, and saved folders load bit
for bit.

The models are in training mode: bitsandbytes has another product for inference on CPUs.
"""

import copy

import girih
import pytest
import torch
from converted import base_model
from girih.models import GirihForCausalLM, GirihForSequenceClassification
from small_models import ADAPTIVE_CAT, CAT, HYBRID, config_of
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    LlamaForCausalLM,
    LlamaModel,
)

bnb = pytest.importorskip("bitsandbytes")

SIZES = {"vocab_size": 64, "hidden_size": 64, "num_heads": 2, "num_slots": 8, "chunk": 4, "pad_token_id": 0}
MODELS = {
    "gsa": {"mixer": "gsa", "num_hidden_layers": 2},
    "hybrid": {"mixer": [*HYBRID["mixer"], "cat"], "num_hidden_layers": 7, "mag_learned": True},
    "cat": CAT,
    "adaptive cat": ADAPTIVE_CAT,
}
CONVERSIONS = {
    "injected": {},
    "gsa for attention": {"mixer": "gsa", "num_slots": 8},
    "delta_product for attention": {"mixer": "delta_product"},
    "trellis for attention": {"mixer": "trellis", "num_slots": 8},
}
IDS = torch.randint(3, 64, (2, 13), generator=torch.Generator().manual_seed(0))
LINEAR = {4: bnb.nn.Linear4bit, 8: bnb.nn.Linear8bitLt}


def quantization(bits):
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    return BitsAndBytesConfig(load_in_4bit=True, **options)


def llama():
    heads = {"num_attention_heads": 2, "head_dim": 32}
    return base_model("llama", hidden_size=64, intermediate_size=128, **heads)


def convert(model, kind):
    torch.manual_seed(1)
    options = CONVERSIONS[kind]
    return girih.replace_attention(model, **options) if options else girih.inject(model)


def model_of(kind):
    torch.manual_seed(0)
    if kind in MODELS:
        return GirihForCausalLM(config_of(**SIZES, **MODELS[kind]))
    model = llama()
    convert(model, kind)
    return model


def logits(model, **options):
    torch.manual_seed(2)
    with torch.no_grad():
        return model.train()(input_ids=IDS, **options).logits


def quantized_layers(model, bits):
    return {name: m for name, m in model.named_modules() if isinstance(m, LINEAR[bits])}


def assert_same_model(loaded, model, bits):
    """The loaded model has the modules, dtypes and results of the saved model."""
    assert quantized_layers(loaded, bits).keys() == quantized_layers(model, bits).keys() != set()
    dtypes = [{name: p.dtype for name, p in m.named_parameters()} for m in (loaded, model)]
    assert dtypes[0] == dtypes[1]
    assert logits(loaded).equal(logits(model))


@pytest.mark.parametrize("kind", [*MODELS, *CONVERSIONS])
def test_a_model_in_4_bits_computes_with_its_weights(kind, tmp_path):
    """The model equals the model whose weights are rounded to 4 bits, with every option of a call."""
    model = model_of(kind)
    model.save_pretrained(tmp_path)
    low = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantization(4))
    layers = quantized_layers(low, 4)
    assert len(layers) > 4 and type(low) is type(model)
    with torch.no_grad():
        for name, layer in layers.items():
            weight = layer.weight
            rounded = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
            model.get_submodule(name).weight.copy_(rounded)
    options = [{}, {"chunk": 8}] if kind == "adaptive cat" else [{}]
    for call_options in options:
        torch.testing.assert_close(
            logits(low, **call_options), logits(model, **call_options), atol=2e-4, rtol=1e-4
        )


@pytest.mark.parametrize("auto", [False, True], ids=["own class", "auto class"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", [*MODELS, *CONVERSIONS])
def test_a_quantized_model_is_saved_and_loaded(kind, bits, auto, tmp_path):
    model = model_of(kind)
    model.save_pretrained(tmp_path / "plain")
    load = (AutoModelForCausalLM if auto else type(model)).from_pretrained
    low = load(tmp_path / "plain", quantization_config=quantization(bits), dtype=torch.bfloat16)
    low.save_pretrained(tmp_path / "low")
    assert_same_model(load(tmp_path / "low"), low, bits)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", CONVERSIONS)
def test_a_quantized_model_that_is_converted_is_saved_and_loaded(kind, bits, tmp_path):
    """The new parts are not quantized, also after a second save and load."""
    llama().save_pretrained(tmp_path / "plain")
    options = {"quantization_config": quantization(bits), "dtype": torch.bfloat16}
    low = LlamaForCausalLM.from_pretrained(tmp_path / "plain", **options)
    conversion = convert(low, kind)
    low.save_pretrained(tmp_path / "first")
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    assert_same_model(first, low, bits)
    # transformers cannot save quantized weights in the original format after loading them.
    first.save_pretrained(tmp_path / "second", save_original_format=False)
    assert_same_model(girih.from_pretrained(tmp_path / "second"), low, bits)
    base = AutoModel.from_pretrained(tmp_path / "first")
    assert type(base) is LlamaModel and not any(".girih." in name for name in quantized_layers(base, bits))
    patterns = low.config.quantization_config.llm_int8_skip_modules
    assert sum("girih" in pattern for pattern in patterns) == 2
    conversion.undo()
    assert not any("girih" in name for name in low.config.quantization_config.llm_int8_skip_modules)


@pytest.mark.parametrize("kind", ["hybrid", "cat"])
def test_a_quantized_classifier_is_saved_and_loaded(kind, tmp_path):
    torch.manual_seed(0)
    model = GirihForSequenceClassification(config_of(**SIZES, **MODELS[kind], num_labels=3))
    model.save_pretrained(tmp_path / "plain")
    load = AutoModelForSequenceClassification.from_pretrained
    low = load(tmp_path / "plain", quantization_config=quantization(4))
    low.save_pretrained(tmp_path / "low")
    assert_same_model(load(tmp_path / "low"), low, 4)


def test_a_loaded_quantized_model_writes_the_same_text(tmp_path):
    """The sizes fit the product of bitsandbytes for inference on CPUs: multiples of 32 by multiples of 64."""
    model = GirihForCausalLM(config_of(**SIZES | {"num_slots": 16}, **MODELS["gsa"]))
    model.save_pretrained(tmp_path / "plain")
    low = GirihForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=quantization(4))
    low.save_pretrained(tmp_path / "low")
    again = GirihForCausalLM.from_pretrained(tmp_path / "low")
    texts = [m.eval().generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0) for m in (low, again)]
    assert texts[0].shape == (2, 19) and texts[0].equal(texts[1])


def test_conversion_leaves_a_copied_configuration_unchanged(tmp_path):
    """Conversion of one model does not change the configuration of its copy."""
    llama().save_pretrained(tmp_path)
    low = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=quantization(4))
    other = copy.deepcopy(low)
    convert(low, "injected")
    assert other.config.quantization_config.llm_int8_skip_modules is None
