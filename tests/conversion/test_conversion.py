"""Models of transformers whose attention is replaced by girih's mixers, or has a mixer beside it."""

import copy
import doctest
import json
import pickle
import subprocess
import sys

import girih
import girih.conversion.convert
import girih.conversion.schedule
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from converted import (
    FAMILIES,
    IDS,
    MORE_FAMILIES,
    WAYS,
    attention,
    base_model,
    close,
    convert,
    converted,
    supports,
)
from girih.conversion import Conversion, Injection
from girih.conversion.config import from_json, replacing, to_json
from girih.conversion.projections import find
from girih.nn import MIXERS
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    DynamicCache,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaAttention


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def base(family):
    return base_model(family)


@pytest.fixture(params=WAYS)
def way(family, request):
    if not supports(family, request.param):
        pytest.skip("girih's own attention keeps all keys")
    return request.param


@torch.no_grad()
def test_injection_at_weight_0_keeps_the_logits_bitwise(base):
    model = copy.deepcopy(base)
    with girih.inject(model, weight=0.0, cross=True):
        assert model(IDS).logits.equal(base(IDS).logits)
        attention(model).girih.set_weight(0.5)
        assert (model(IDS).logits - base(IDS).logits).abs().max() > 0.1


def test_training_step_changes_every_parameter_and_is_saved(base, way, tmp_path):
    model = copy.deepcopy(base).train()
    convert(model, way)
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    no_gradient = [
        name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0
    ]
    assert no_gradient == []
    optimizer.step()
    for name, p in model.named_parameters():
        exceeds_rounding = 0.1 * p.grad.abs().max() > torch.finfo(p.dtype).eps * p.abs().max()
        assert not exceeds_rounding or not p.equal(before[name]), name
    assert model(IDS, labels=IDS, use_cache=False).loss < loss
    model.eval().save_pretrained(tmp_path)
    loaded = girih.from_pretrained(tmp_path)
    assert type(loaded) is type(base) and not loaded.training
    with torch.no_grad():
        assert loaded(IDS).logits.equal(model(IDS).logits)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    texts = [
        m.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=3, do_sample=False)
        for m in (model, loaded)
    ]
    assert texts[0].equal(texts[1])


def test_every_class_loads_a_converted_model_converted(base, way, tmp_path):
    """If a class loaded the plain model, the reference of DPO or GRPO would differ from the policy."""
    model = copy.deepcopy(base)
    convert(model, way)
    assert {name for name in model.state_dict() if ".girih." not in name} == set(base.state_dict())
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.no_grad():
        want = model(IDS, output_hidden_states=True)
        for loaded in (
            AutoModelForCausalLM.from_pretrained(tmp_path),
            AutoModelForCausalLM.from_pretrained(str(tmp_path), config=config),
            type(base).from_pretrained(tmp_path),
        ):
            assert type(loaded) is type(base) and loaded(IDS).logits.equal(want.logits)
        body = AutoModel.from_pretrained(tmp_path)
        assert body(IDS).last_hidden_state.equal(want.hidden_states[-1])


WITHOUT_GIRIH = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert "girih" not in sys.modules
torch.save(model(torch.load(sys.argv[2])).logits, sys.argv[3])
"""


@pytest.mark.parametrize("way", ["injected", "gsa"])
def test_without_girih_the_base_model_loads_with_a_warning(way, tmp_path):
    """The keys of the base model are unchanged. The names of the unexpected keys contain girih."""
    base = base_model("llama")
    converted(way=way).save_pretrained(tmp_path)
    torch.save(IDS, tmp_path / "ids")
    files = (tmp_path, tmp_path / "ids", tmp_path / "logits")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_GIRIH, *map(str, files)], check=True, capture_output=True, text=True
    )
    assert ".girih." in done.stderr + done.stdout and "UNEXPECTED" in done.stderr + done.stdout
    close(torch.load(tmp_path / "logits"), base(IDS).logits)


def test_loading_by_a_path_of_a_configuration_is_refused(tmp_path):
    """The configuration of the model is a path, not an object."""
    converted().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is a converted model: load it by girih\.from_pretrained"):
        LlamaForCausalLM.from_pretrained(tmp_path, config=str(tmp_path))


def test_undo_restores_the_model(base):
    model = copy.deepcopy(base)
    config, keys = model.config.to_dict(), list(model.state_dict())
    for way in ("injected", "delta_product"):
        conversion = convert(model, way)
        assert "converted" not in repr(type(attention(model))) and "girih" in model.config.to_dict()
        conversion.undo()
        conversion.undo()
        assert model.config.to_dict() == config and list(model.state_dict()) == keys
        assert [type(m) for m in model.modules()] == [type(m) for m in base.modules()]
        assert model._is_stateful == base._is_stateful
        with torch.no_grad():
            assert model(IDS).logits.equal(base(IDS).logits)


@torch.no_grad()
@pytest.mark.parametrize("mixer", replacing())
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_every_mixer_replaces_attention(kind, mixer):
    """The models have grouped queries, norms and biases."""
    model = base_model(kind)
    girih.replace_attention(model, mixer)
    whole = model(IDS)
    assert whole.logits.isfinite().all()
    cache = model(IDS[:, :9]).past_key_values
    close(model(IDS[:, 9:], past_key_values=cache).logits, whole.logits[:, 9:], 1e-4)
    length = {"max_new_tokens": 3, "min_new_tokens": 3}
    text = model.generate(IDS, attention_mask=torch.ones_like(IDS), do_sample=False, **length)
    assert text.shape == (2, 23)


def project_qkv(attn, x):
    """q, k and v of Qwen3's attention before rotary positions."""

    def apply_norm(x, weight):
        x = x.unflatten(-1, (-1, 8))
        return (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight).flatten(2)

    q, k, v = (x @ getattr(attn, name).weight.T for name in ("q_proj", "k_proj", "v_proj"))
    return apply_norm(q, attn.q_norm.weight), apply_norm(k, attn.k_norm.weight), v


def repeat_for_queries(x):
    """Repeats two heads for the four query heads that read them: 0, 0, 1, 1."""
    return torch.cat([x[..., :8], x[..., :8], x[..., 8:], x[..., 8:]], -1)


@torch.no_grad()
@pytest.mark.parametrize("mixer", replacing())
def test_every_mixer_starts_from_attentions_projections(mixer):
    """The filters pass q, k and v unchanged. A mixer with one projection for q and k reads their mean."""
    check_start(mixer)


@torch.no_grad()
def test_trellis_with_one_projection_starts_from_the_mean_of_q_and_k():
    check_start("trellis", shared_qk=True)


def check_start(mixer, **options):
    model = base_model("qwen3")
    attn, x = attention(model), torch.randn(2, 9, 32)
    q, k, v = project_qkv(attn, x)
    girih.replace_attention(model, mixer, **({"n": 1} if mixer == "delta_product" else {}), **options)
    part = attention(model).girih
    close(part.o_proj(q), q @ attn.o_proj.weight.T)
    if hasattr(part, "qkv_proj"):
        found, want = part.qkv_proj(x), torch.cat((q, k, v), -1)
    else:
        close(part.v_proj(x), repeat_for_queries(v))
        if hasattr(part, "q_proj"):
            close(part.q_proj(x), q)
            found, want = part.k_proj(x), repeat_for_queries(k)
        else:
            found, want = part.qk_proj(x), (q + repeat_for_queries(k)) / 2
    close(found, want)
    filters = [name for name in ("conv", "q_conv", "k_conv") if getattr(part, name, None) is not None]
    has_filters = "conv_size" in MIXERS[mixer].fields
    assert filters == (["conv"] if hasattr(part, "qkv_proj") else ["q_conv", "k_conv"] if has_filters else [])
    for name in filters:
        conv = getattr(part, name)
        close(conv(want)[0], want * want.sigmoid() if conv.activation else want)


@torch.no_grad()
@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_families_of_the_papers_are_converted(family, tmp_path):
    """The families of TPTT: Qwen2.5, OLMo and OLMoE."""
    want = base_model(family)(IDS).logits
    model = base_model(family)
    girih.inject(model, weight=0.0)
    assert model(IDS).logits.equal(want)
    for way in ("injected", "gsa"):
        model = converted(family, way)
        whole = model(IDS).logits
        assert not torch.allclose(whole, want, atol=0.05)
        cache, parts = None, []
        for piece in IDS.split([9, 1, 1, 9], 1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
        close(torch.cat(parts, 1), whole, 1e-4)
        model.save_pretrained(tmp_path / way)
        assert girih.from_pretrained(tmp_path / way)(IDS).logits.equal(whole)
    text = model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, do_sample=False)
    assert text.shape == (2, 24)


@torch.no_grad()
def test_further_steps_start_from_differences_of_k_and_of_v():
    """TPTT, eq. 22: the m-th difference over time, divided by 2^m."""
    model = base_model("qwen3")
    attn, x = attention(model), torch.randn(2, 9, 32)
    q, k, v = project_qkv(attn, x)
    girih.replace_attention(model, "delta_product", n=4)
    part = attention(model).girih
    qkv = part.qkv_proj(x)
    close(qkv, torch.cat((q, *[k] * 4, *[v] * 4), -1))

    def differences(x):
        a, b, c = (torch.nn.functional.pad(x, (0, 0, m, 0))[:, : x.shape[1]] for m in (1, 2, 3))
        return x, (x - a) / 2, (x - 2 * a + b) / 4, (x - 3 * a + 3 * b - c) / 8

    want = torch.cat((q, *differences(k), *differences(v)), -1)
    close(part.conv(qkv)[0], want * want.sigmoid())


@torch.no_grad()
@pytest.mark.parametrize("cross", [False, True])
def test_weight_mixes_the_outputs_of_both_paths(cross):
    model = base_model("llama")
    girih.inject(model, cross=cross, weight=0.0)
    layer = attention(model)
    x = torch.randn(2, 9, 32)
    rotary = model.model.rotary_emb(x, torch.arange(9)[None])

    def output_at(weight):
        layer.girih.set_weight(weight)
        return layer(hidden_states=x, position_embeddings=rotary, attention_mask=None)[0]

    base, linear = output_at(0.0), output_at(1.0)
    expected = 0.7 * base + 0.3 * linear + (0.7 * base * 0.3 * linear if cross else 0.0)
    close(output_at(0.3), expected)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
def test_paths_share_one_output_projection_unless_crossed(family, cross):
    model = base_model(family)
    girih.inject(model, weight=0.5, cross=cross)
    layer, calls = attention(model), []
    getattr(layer, layer.projections.out).register_forward_hook(lambda *_: calls.append(1))
    model(IDS)
    assert len(calls) == (2 if cross else 1)


def test_models_that_share_a_configuration_are_converted_separately(tmp_path):
    config = base_model("gemma3_text").config
    models = [type(base_model("gemma3_text"))(config).eval() for _ in range(3)]
    girih.replace_attention(models[0], num_slots=8)
    girih.inject(models[1])
    assert not hasattr(config, "girih") and models[2].config is config
    for i, model in enumerate(models[:2]):
        model.save_pretrained(tmp_path / str(i))
        loaded = girih.from_pretrained(tmp_path / str(i))
        assert loaded(IDS).logits.equal(model(IDS).logits)
        loaded.save_pretrained(tmp_path / f"{i} again")
        assert girih.from_pretrained(tmp_path / f"{i} again")(IDS).logits.equal(model(IDS).logits)
        model.set_attn_implementation("eager")
        assert (
            attention(model).config._attn_implementation == "eager" and config._attn_implementation == "sdpa"
        )


@torch.no_grad()
def test_copy_of_a_model_is_independent():
    model = converted(way="gsa")
    other = copy.deepcopy(model)
    expected = model(IDS).logits
    attention(other).q_proj.weight.zero_()
    assert model(IDS).logits.equal(expected) and not other(IDS).logits.equal(expected)
    attention(model).q_proj.weight.zero_()
    close(model(IDS).logits[:, 0], other(IDS).logits[:, 0])


@torch.no_grad()
@pytest.mark.parametrize("way", ["injected", "gsa"])
@pytest.mark.parametrize("kind", ["llama", "girih"])
def test_a_converted_model_can_be_pickled(kind, way):
    model = converted(kind, way)
    assert pickle.loads(pickle.dumps(model))(IDS).logits.equal(model(IDS).logits)


@torch.no_grad()
@pytest.mark.parametrize("way", ["injected", "gsa"])
def test_hooks_of_accelerate_still_run(way):
    """device_map adds such hooks. A hook calls the forward that the module had when the hook was added."""
    model, seen = base_model(), []

    class RecordingHook(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(type(module).__name__)
            return args, kwargs

    add_hook_to_module(attention(model), RecordingHook())
    expected = converted(way=way)(IDS).logits
    conversion = convert(model, way)
    assert model(IDS).logits.equal(expected) and len(seen) == 1
    conversion.undo()
    assert model(IDS).logits.equal(base_model()(IDS).logits) and seen[-1] == "LlamaAttention"


@torch.no_grad()
def test_two_conversions_of_different_layers(tmp_path):
    model = base_model("llama", num_hidden_layers=3)
    girih.replace_attention(model, "gated_deltanet", layers=[1])
    girih.inject(model, layers=[2], weight=0.25)
    kinds = [type(layer.self_attn).__name__ for layer in model.model.layers]
    assert kinds == ["LlamaAttention", "ReplacedLlamaAttention", "InjectedLlamaAttention"]
    model.save_pretrained(tmp_path)
    assert girih.from_pretrained(tmp_path)(IDS).logits.equal(model(IDS).logits)


@pytest.mark.parametrize("convert_layers", [girih.inject, girih.replace_attention])
def test_layers_may_be_any_iterable(convert_layers):
    conversion = convert_layers(base_model(), layers=(layer for layer in (0,)))
    assert conversion.spec.layers == (0,) and len(conversion.layers) == 1


@torch.no_grad()
@pytest.mark.parametrize("way", ["window", "delta_product"])
def test_fp32_parameters_of_a_bf16_model_stay_in_fp32(way, tmp_path):
    base_model("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    convert(model, way)
    dtypes = {name: p.dtype for name, p in attention(model).girih.state_dict().items()}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    assert model(IDS).logits.isfinite().all()
    model.save_pretrained(tmp_path)
    loaded = girih.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {name: p.dtype for name, p in attention(loaded).girih.state_dict().items()} == dtypes
    assert loaded(IDS).logits.equal(model(IDS).logits)


def test_attentions_and_hidden_states_are_returned():
    model = base_model("llama")
    model.set_attn_implementation("eager")
    girih.inject(model, layers=[0])
    output = model(IDS, output_attentions=True, output_hidden_states=True)
    assert [a.shape for a in output.attentions] == [(2, 4, 20, 20)] * 2 and len(output.hidden_states) == 3


# Options that linear attention does not read. Some values, such as n=2 and "derivative", are the defaults.
UNREAD = {"n": 2, "virtual_tokens": "derivative", "gate": "v", "gate_per": "head", "pool": "window"} | {
    "between_chunks": "gelu",
    "chunk": 4,
    "norm_eps": 1e-6,
}


def wrong(**options):
    return lambda: girih.inject(base_model(), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (wrong(mixer="gsa"), "mixer is 'gsa'; expected one of 'delta_product'"),
        (wrong(n=5), "n is 5; expected a whole number, 1 to 4"),
        (wrong(virtual_tokens="none"), "virtual_tokens is 'none'; expected one of 'derivative'"),
        (wrong(gate="q"), "gate is 'q'"),
        (wrong(pool=3), "pool is 3"),
        (wrong(gate_per="token"), "gate_per is 'token'"),
        (
            lambda: girih.replace_attention(base_model(), "lattice", num_slots=4),
            "num_slots is 4; lattice reads keys of so many channels, and attention's have 8",
        ),
        (wrong(between_chunks="relu"), "between_chunks is 'relu'"),
        (wrong(chunk=65), "chunk is 65; expected a whole number, 1 to 64"),
        (wrong(chunk=0, between_chunks="gelu"), "chunk is 0; expected a whole number, 1 to 64"),
        (wrong(chunk=16), "chunk is 16; expected none: it is for between_chunks"),
        (lambda: Injection(chunk=16), "chunk is 16; expected none: it is for between_chunks"),
        (
            wrong(n=1, virtual_tokens="derivative"),
            "virtual_tokens is 'derivative'; expected none: it is for n above 1",
        ),
        (
            lambda: from_json({"how": "inject", "n": 1, "virtual_tokens": "rotary"}),
            "virtual_tokens is 'rotary'; expected none: it is for n above 1",
        ),
        *(
            (
                wrong(mixer="linear_attention", **{name: value}),
                f"{name}: linear_attention has no such option; expected",
            )
            for name, value in UNREAD.items()
        ),
        (
            lambda: Injection("linear_attention", gate="kv"),
            "gate: linear_attention has no such option; expected one of weight, learned, cross, max_",
        ),
        (wrong(n=0), "n is 0; expected a whole number, 1 to 4"),
        (wrong(n=True), "n is True; expected a whole number"),
        (wrong(weight=True), "weight is True; expected a number"),
        (wrong(weight=-0.1), "weight is -0.1"),
        (wrong(weight=1.0, learned=True), "weight is 1.0; .* between them if it is learned"),
        (wrong(max_self_attn_length=True), "max_self_attn_length is True"),
        (wrong(layers=[True]), r"layers is \[True\]"),
        (
            lambda: girih.replace_attention(base_model(), "gsa", num_kv_heads=1),
            "num_kv_heads: gsa has no such option",
        ),
        (
            lambda: girih.replace_attention(base_model(), "gsa", head_dim=4),
            "head_dim: gsa has no such option",
        ),
        (
            lambda: girih.inject(base_model("girih"), layers=[0, 3]),
            "layers has 3; attention that can be converted is at 0, 1",
        ),
        (wrong(weight=1.5), "weight is 1.5"),
        (wrong(weight=0.0, learned=True), "weight is 0.0"),
        (wrong(max_self_attn_length=0), "max_self_attn_length is 0; expected a whole number, 1 or more"),
        (wrong(n=1.9), "n is 1.9; expected a whole number"),
        (wrong(weight=float("nan")), "weight is nan"),
        (wrong(norm_eps=-1.0), "norm_eps is -1.0"),
        (wrong(weight="x"), "weight is 'x'; expected a number from 0 to 1"),
        (wrong(weight=None), "weight is None"),
        (wrong(norm_eps="a"), "norm_eps is 'a'; expected a number"),
        (wrong(norm_eps=float("inf")), "norm_eps is inf"),
        (wrong(layers=[]), r"layers is \[\]; expected one index at least"),
        (
            lambda: girih.replace_attention(base_model(), layers=[]),
            r"layers is \[\]; expected one index at least",
        ),
        (
            lambda: girih.inject(base_model("girih"), max_self_attn_length=4),
            "max_self_attn_length is 4; expected none: girih's own attention keeps all keys",
        ),
        (
            lambda: girih.inject(base_model("girih", mixer="gsa")),
            "GatedSlotAttention: it is a mixer of girih's",
        ),
        (wrong(layers=[2]), "layers has 2; attention that can be converted is at 0, 1"),
        (wrong(layers="01"), "layers is '01'"),
        (wrong(layers=1), "layers is 1; expected indices"),
        (wrong(layers=[-1]), r"layers is \[-1\]"),
        (wrong(slots=3), "slots: inject has no such option; expected one of n, virtual_tokens"),
        (
            lambda: girih.replace_attention(base_model(), "cat"),
            "mixer is 'cat'; expected one of 'abc'",
        ),
        (
            lambda: girih.replace_attention(base_model(), "gsa", n=2),
            "n: gsa has no such option; expected one of data_dependent_decay, num_slots, feature",
        ),
        (lambda: girih.replace_attention(base_model(), "gsa", num_slots=0), "num_slots"),
        (lambda: girih.inject(converted()), "model has been converted at model.layers.0.self_attn"),
        (lambda: girih.inject(torch.nn.Linear(2, 2)), "model is a Linear; expected a model of transformers"),
        (
            lambda: girih.inject(
                BertModel(
                    BertConfig(
                        hidden_size=8,
                        num_attention_heads=1,
                        num_hidden_layers=1,
                        intermediate_size=8,
                        vocab_size=8,
                    )
                )
            ),
            "model is a BertModel without attention that can be converted .*BertSelfAttention",
        ),
        (
            lambda: girih.inject(
                T5ForConditionalGeneration(
                    T5Config(vocab_size=8, d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8)
                )
            ),
            "with an encoder; expected a decoder",
        ),
    ],
)
def test_invalid_arguments_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


UNSUPPORTED = {
    "bloom": ({"n_layer": 2, "n_head": 4}, "BloomAttention: its forward takes residual"),
    "codegen": (
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
        "CodeGenAttention: the channels of its qkv_proj go by blocks",
    ),
    "bitnet": ({"num_key_value_heads": 2}, "BitNetAttention: its attn_sub_norm stands between"),
    "diffllama": ({"num_key_value_heads": 2}, "DiffLlamaAttention: its groupnorm stands between"),
    "afmoe": ({"num_key_value_heads": 2, "head_dim": 8}, "AfmoeAttention: its gate_proj stands between"),
    "gpt_neox_japanese": ({}, "GPTNeoXJapaneseAttention: its dense_bias is added outside"),
    "olmo": ({"clip_qkv": 0.1}, "OlmoAttention: its q, k and v are clipped: clip_qkv is 0.1"),
}
SIZES = {"vocab_size": 64, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def other_model(kind, **options):
    """A model of a family that is not supported, or not in every configuration."""
    if "n_head" not in options:
        sizes = {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        options = sizes | options
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | options)).eval()


@pytest.mark.parametrize("convert", [girih.inject, girih.replace_attention])
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_attention_is_refused(kind, convert):
    options, message = UNSUPPORTED[kind]
    with pytest.raises(ValueError, match=message):
        convert(other_model(kind, **options))


@torch.no_grad()
@pytest.mark.parametrize("multi_query", [False, True])
def test_the_fused_projection_of_bigcode_is_read_in_its_order(multi_query):
    model = other_model("gpt_bigcode", n_layer=2, n_head=4, n_positions=64, multi_query=multi_query)
    girih.replace_attention(model, "delta_product", n=1)
    layer, x = attention(model), torch.randn(2, 9, 32)
    fused = layer.c_attn(x)
    if multi_query:
        expected = fused
    else:
        expected = torch.cat([part.flatten(-2) for part in fused.view(2, 9, 4, 24).split(8, -1)], -1)
    assert layer.girih.qkv_proj(x).equal(expected)


def linear(inputs, outputs):
    return torch.nn.Linear(inputs, outputs, bias=False)


NOT_CONVERTED = [
    ({"layer_idx": None}, "it has no layer_idx"),
    ({"is_causal": False}, "it is not causal self-attention"),
    ({"is_cross_attention": True}, "it is not causal self-attention"),
    ({"clip_qkv": 4.0}, "clip_qkv is 4.0"),
    ({"k_proj": None}, "it has neither q_proj, k_proj, v_proj nor c_attn nor qkv_proj nor query_key_value"),
    ({"o_proj": None}, "it has none of o_proj, dense, c_proj, out_proj"),
    ({"head_dim": None}, "it has no head_dim"),
    ({"head_dim": 6}, "have 32, 16, 16 and 32 channels, no heads of 6"),
    ({"k_proj": linear(32, 8)}, "have 32, 8, 16 and 32 channels"),
    ({"k_proj": linear(32, 24), "v_proj": linear(32, 24)}, "have 32, 24, 24 and 32 channels"),
    ({"o_proj": linear(16, 32)}, "have 32, 16, 16 and 16 channels"),
    ({"q_norm": torch.nn.RMSNorm(8), "k_norm": torch.nn.RMSNorm(6)}, r"its k_norm has a weight of \[6\]"),
    ({"q_norm": torch.nn.RMSNorm(32), "k_norm": torch.nn.RMSNorm(32)}, r"its k_norm has a weight of \[32\]"),
    ({"q_norm": torch.nn.RMSNorm(16), "k_norm": torch.nn.RMSNorm(16)}, r"its q_norm has a weight of \[16\]"),
]


@pytest.mark.parametrize(
    ("attributes", "reason"), NOT_CONVERTED, ids=lambda part: part if isinstance(part, str) else ""
)
def test_refused_attention_names_the_reason(attributes, reason):
    model = base_model("llama")
    for layer in model.model.layers:
        for name, value in attributes.items():
            setattr(layer.self_attn, name, value)
    with pytest.raises(ValueError, match=f"LlamaAttention: .*{reason}"):
        girih.inject(model)


@pytest.mark.parametrize(
    ("attributes", "names"),
    [
        ({"head_dim": None, "head_size": 8}, None),
        ({"is_causal": None, "causal": True}, None),
        ({"q_norm": torch.nn.RMSNorm(8), "k_norm": torch.nn.RMSNorm(8)}, ("q_norm", "k_norm")),
        (
            {"q_layernorm": torch.nn.RMSNorm(32), "k_layernorm": torch.nn.RMSNorm(16)},
            ("q_layernorm", "k_layernorm"),
        ),
    ],
    ids=str,
)
def test_attention_is_found_under_other_attribute_names(attributes, names):
    layer = attention(base_model("llama"))
    for name, value in attributes.items():
        delattr(layer, name) if value is None else setattr(layer, name, value)
    assert find(layer) == (("q_proj", "k_proj", "v_proj"), "o_proj", names, 32, 4, 2, 8, False, True)


SHARED_KEYS = {
    "gemma4_text": {
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
    },
    "gemma3n_text": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "laurel_rank": 4,
        "activation_sparsity_pattern": None,
    },
}


@torch.no_grad()
@pytest.mark.parametrize("kind", SHARED_KEYS)
def test_layers_that_share_keys_are_converted_together(kind):
    """Layers 2 and 3 have no keys. They read the keys of layers 0 and 1, or 1 and 2 in the model of five
    layers."""

    def model(n):
        types = [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
            "full_attention",
        ]
        sizes = {"num_hidden_layers": n, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5}
        return other_model(kind, **SHARED_KEYS[kind] | sizes, layer_types=types[:n], num_kv_shared_layers=2)

    with pytest.raises(
        ValueError, match=r"layers is None.*num_kv_shared_layers.*at 2, 3; expected some of 0, 1"
    ):
        girih.inject(model(4))
    with pytest.raises(ValueError, match="at 2, 3; expected some of 0, 1"):
        girih.inject(model(4), layers=[1, 2])
    with pytest.raises(ValueError, match="at 0, 1, 2, 3; expected some of none"):
        girih.replace_attention(model(4))
    with pytest.raises(ValueError, match="at 1, 2, 3, 4; expected some of 0"):
        girih.replace_attention(model(5), layers=[0, 1])
    for convert_model in (
        lambda m: girih.inject(m, layers=[0, 1]),
        lambda m: girih.replace_attention(m, layers=[0], num_slots=4),
    ):
        converted = model(5)
        convert_model(converted)
        text = converted.generate(
            IDS[:1],
            attention_mask=torch.ones_like(IDS[:1]),
            max_new_tokens=4,
            do_sample=False,
            eos_token_id=None,
        )
        logits = converted(text[:, :-1], use_cache=False).logits[:, 19:]
        assert text[:, 20:].equal(logits.argmax(-1))


def test_dropout_after_the_output_projection_is_kept():
    """The dropout of GPT-2 applies to the mixer that replaces attention and to the path beside attention."""
    for convert_model in (
        lambda m: girih.replace_attention(m, num_slots=4),
        lambda m: girih.inject(m, weight=1.0),
    ):
        model = base_model("gpt2", resid_pdrop=0.5)
        convert_model(model)
        layer, x = attention(model).train(), torch.randn(1, 9, 32)
        y = layer(x)[0]
        assert 0.3 < (y == 0).float().mean() < 0.7
        assert (layer.eval()(x)[0] != 0).all()


def test_refused_model_is_unchanged():
    model = base_model()
    with pytest.raises(ValueError, match="layers has 7"):
        girih.inject(model, layers=[0, 7])
    attention(model, 1).forward = attention(model, 1).forward
    with pytest.raises(ValueError, match="the forward of a LlamaAttention has been replaced"):
        girih.inject(model)
    assert type(attention(model)).__name__ == "LlamaAttention" and not hasattr(model.config, "girih")


def test_from_pretrained_refuses_an_unconverted_model(tmp_path):
    base_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no 'girih': this model was not converted"):
        girih.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "module", [girih.conversion.convert, girih.conversion.schedule], ids=lambda m: m.__name__
)
def test_examples_in_docstrings_run(module):
    found = doctest.testmod(module, extraglobs={"torch": torch})
    assert found.failed == 0 < found.attempted


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"how": "guess"}, "config.girih holds .*guess"),
        ({"how": "inject", "order": 2}, "config.girih has order, which this version of girih does not know"),
        ({"how": "inject", "n": 7}, "n is 7"),
        ({"how": "inject", "mixer": "linear_attention", "n": 3}, "n: linear_attention has no such option"),
    ],
)
def test_a_configuration_of_another_version_is_refused(entry, message, tmp_path):
    converted().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"girih": [entry]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        girih.from_pretrained(tmp_path)


def test_entry_holds_the_options_of_its_path():
    spec = Injection("linear_attention", weight=0.25, cross=True, max_self_attn_length=4)
    assert to_json(spec) == {
        "how": "inject",
        "mixer": "linear_attention",
        "layers": None,
        "weight": 0.25,
        "learned": False,
        "cross": True,
        "max_self_attn_length": 4,
    }
    assert from_json(to_json(spec)) == spec
    delta = Injection(n=3, gate="kv")
    assert {"n", "gate", "virtual_tokens", "norm_eps"} < to_json(delta).keys() and from_json(
        to_json(delta)
    ) == delta
    assert from_json({"how": "inject"}) == Injection("delta_product")


@torch.no_grad()
def test_a_linear_path_shares_every_weight(tmp_path):
    """The path has no weights of its own. Its state has the same size after 20 tokens and after 3."""
    model = base_model("llama")
    keys = set(model.state_dict())
    girih.inject(model, "linear_attention", weight=1.0, max_self_attn_length=4)
    assert {name.rpartition(".")[2] for name in set(model.state_dict()) - keys} == {"weight"}
    assert not any(".girih." in name for name, _ in model.named_parameters())
    sizes = [
        [part.shape for state in model(IDS[:, :n]).past_key_values.layers[0].state for part in state]
        for n in (3, 20)
    ]
    assert sizes[0] == sizes[1] == [(2, 2, 8, 8), (2, 2, 8, 1)]
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.girih[0]["mixer"] == "linear_attention" and loaded(IDS).logits.equal(
        model(IDS).logits
    )


def test_loading_info_is_returned(tmp_path):
    converted().save_pretrained(tmp_path)
    model, info = girih.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model).__name__ == "LlamaForCausalLM" and not info["missing_keys"]


@pytest.mark.parametrize("way", ["injected", "gsa"])
def test_missing_weights_are_reported(way, tmp_path):
    """A process without girih saves a model with this configuration and without the weights."""
    plain = base_model("llama")
    plain.config.girih = converted(way=way).config.girih
    plain.save_pretrained(tmp_path / "plain")
    with pytest.raises(
        ValueError, match=r"weights of the conversion .* missing, model\.layers\.0\.self_attn\.girih"
    ):
        girih.from_pretrained(tmp_path / "plain")


def test_from_pretrained_changes_fields_of_the_configuration(tmp_path):
    model = converted()
    model.save_pretrained(tmp_path)
    loaded = girih.from_pretrained(
        tmp_path,
        use_cache=False,
        num_labels=3,
        dtype="auto",
        attn_implementation="eager",
        local_files_only=True,
    )
    assert not loaded.config.use_cache and loaded.config.num_labels == 3
    assert loaded.config._attn_implementation == "eager" and loaded.dtype == torch.float32
    half, info = girih.from_pretrained(
        tmp_path, dtype=torch.float16, output_loading_info=True, use_cache=False
    )
    assert half.dtype == torch.float16 and not info["missing_keys"]
    with pytest.raises(TypeError, match="no_such"):
        girih.from_pretrained(tmp_path, no_such=1)


def state_of(model):
    """Class, training mode, attributes and number of hooks of every module."""
    hooks = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks")
    return [
        (type(m), m.training, set(vars(m)), [len(getattr(m, name)) for name in hooks])
        for m in model.modules()
    ]


@pytest.mark.parametrize("training", [True, False])
def test_with_block_undoes_the_conversion(base, way, training):
    model = copy.deepcopy(base).train(training)
    before = state_of(model)
    with convert(model, way):
        assert {m.training for m in model.modules()} == {training} and state_of(model) != before
    assert state_of(model) == before and not hasattr(model.config, "girih")


@torch.no_grad()
@pytest.mark.parametrize("first", [0, 1])
def test_either_of_two_conversions_is_undone_alone(first, tmp_path):
    model = base_model("llama")
    conversions = [girih.replace_attention(model, "gla", layers=[0]), girih.inject(model, layers=[1])]
    conversions[first].undo()
    kinds = ["ReplacedLlamaAttention", "InjectedLlamaAttention"]
    kinds[first] = "LlamaAttention"
    assert [type(layer.self_attn).__name__ for layer in model.model.layers] == kinds
    assert [spec["how"] for spec in model.config.girih] == [["replace", "inject"][1 - first]]
    assert model._is_stateful
    model.save_pretrained(tmp_path)
    loaded = girih.from_pretrained(tmp_path)
    assert [type(layer.self_attn).__name__ for layer in loaded.model.layers] == kinds
    assert loaded(IDS).logits.equal(model(IDS).logits)
    conversions[1 - first].undo()
    assert model(IDS).logits.equal(base_model("llama")(IDS).logits) and not model._is_stateful


def test_undo_refuses_a_layer_whose_class_changed():
    model = base_model()
    conversion = girih.inject(model)
    layer = attention(model, 1)
    layer.__class__ = type("Other", (type(layer),), {})
    with pytest.raises(ValueError, match=r"undo: model\.layers\.1\.self_attn has become a Other since"):
        conversion.undo()
    assert type(attention(model)).__name__ == "InjectedLlamaAttention" and model.config.girih


@torch.no_grad()
def test_subfolder_and_model_class(tmp_path):
    model = converted()
    model.save_pretrained(tmp_path / "within")
    loaded = girih.from_pretrained(tmp_path, subfolder="within")
    assert loaded(IDS).logits.equal(model(IDS).logits)
    body = girih.from_pretrained(tmp_path / "within", model_class=type(model.model))
    assert type(body) is type(model.model)
    assert body(IDS).last_hidden_state.equal(model.model(IDS).last_hidden_state)
    config = json.loads((tmp_path / "within" / "config.json").read_text()) | {"architectures": ["Another"]}
    (tmp_path / "within" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"model_class: .*within names \['Another'\] as its class"):
        girih.from_pretrained(tmp_path / "within")


def test_weights_of_other_sizes_are_reported(tmp_path):
    converted(way="gsa").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["girih"][0]["options"]["num_slots"] = 5
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"are missing, model\.layers\.0\.self_attn\.girih\.f_proj"):
        girih.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


@torch.no_grad()
@pytest.mark.parametrize("width", [0, 1, 2, 3])
def test_narrow_filters_start_from_as_many_differences_as_they_hold(width):
    model = base_model("llama")
    layer, x = attention(model), torch.randn(2, 9, 32)
    v = layer.v_proj(x)
    girih.replace_attention(model, "delta_product", n=4, conv_size=width)
    part = layer.girih
    rows = part.qkv_proj(x)
    if width:
        rows = part.conv(rows)[0]
    rows = rows.split([32, 4 * 16, 4 * 16], -1)[2].split(16, -1)
    a, b = (torch.nn.functional.pad(v, (0, 0, m, 0))[:, :9] for m in (1, 2))
    want = [v, (v - a) / 2, (v - 2 * a + b) / 4, v][:width]
    want += [v] * (4 - len(want))
    for row, expected in zip(rows, want, strict=True):
        close(row, expected * expected.sigmoid() if width else expected)


def model_with_attention(write):
    """A Llama whose attention returns its values. `write(attention, values)` computes the output."""

    class ValueAttention(LlamaAttention):
        def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **call):
            q, _, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
            return write(self, torch.cat((v, v), -1) + 0 * q), None

        def project(self, o):
            return self.o_proj(o)

    model = base_model("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = ValueAttention
    return model


@torch.no_grad()
def test_output_projection_inside_a_method():
    found = []
    for write in (lambda attn, o: attn.o_proj(o), lambda attn, o: attn.project(o)):
        for cross in (False, True):
            model = model_with_attention(write)
            girih.inject(model, weight=0.4, cross=cross)
            cache, parts = DynamicCache(config=model.config), []
            for part in IDS.split([12, 1, 7], 1):
                parts.append(model(part, past_key_values=cache).logits)
            found.append(torch.cat(parts, 1))
            close(found[-1], model(IDS, use_cache=False).logits)
    close(found[2], found[0])
    close(found[3], found[1])
    assert (found[0] - found[1]).abs().max() > 1e-2


def test_an_output_projection_that_is_called_twice_is_refused():
    model = model_with_attention(lambda attn, o: attn.o_proj(o) + attn.o_proj(o))
    girih.inject(model)
    with pytest.raises(RuntimeError, match="o_proj was called a second time in one forward of .*Value"):
        model(IDS)


def test_repr_of_a_conversion():
    conversion = convert(base_model(), "gsa")
    assert isinstance(conversion, Conversion) and "mixer='gsa'" in repr(conversion)
