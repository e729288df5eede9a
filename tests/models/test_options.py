"""Options of a configuration: unread options are refused, and models train with every option."""

import json
import os
import random
import subprocess

import pytest
import torch
from conftest import TREE
from girih import _C
from girih.models import MIXERS, GirihConfig, GirihForCausalLM
from girih.models.config import OWN_FIELDS, TRANSFORMERS_KEYWORDS
from girih.nn import GatedLinearAttention
from girih.training.command import Refusal
from girih.training.recipe import SIZES, config_of_size, with_context
from training_runs import LARGEST, RUNS, SOME, train
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

# A value other than the default for every option.
NON_DEFAULT = {
    "num_slots": 32,
    "chunk": 8,
    "chunks": [4, 8],
    "n": 3,
    "gated": False,
    "conv_size": 3,
    "expand_k": 0.25,
    "expand_v": 1.5,
    "state_size": 16,
    "num_groups": 2,
    "topk": 8,
    "slot_decay": True,
    "router_score": "softmax",
    "router_mlp": True,
    "router_bias": True,
    "router_noise": True,
    "output_gate": True,
    "phi": "identity",
    "f": "softmax",
    "objective": "encode",
    "feature": "relu",
    "between_chunks": "gelu",
    "allow_neg_eigval": True,
    "normalize": False,
    "shrinkage": 0.1,
    "post_norm": True,
    "shared_qk": True,
    "normalize_kv": False,
    "value_read": "phi",
    "data_dependent_decay": False,
    "window": 4,
    "rotary": False,
    "mag_base": "gla",
    "mag_mixer": "gsa",
    "mag_weight": 0.25,
    "mag_learned": True,
    "mag_cross": True,
    "compressor_hidden_size": 64,
    "compressor_layers": 1,
    "running_positions": True,
    "rope_theta": 100.0,
}
COMMON_FIELDS = {
    "vocab_size", "hidden_size", "num_hidden_layers", "mixer", "num_heads", "num_kv_heads", "head_dim",
    "intermediate_size", "max_position_embeddings", "norm_eps", "initializer_range", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip
DELTA = ("delta_product", "deltanet", "gated_deltanet")


def test_every_field_is_an_option_or_common():
    assert {*NON_DEFAULT} | COMMON_FIELDS == {*OWN_FIELDS} and not {*NON_DEFAULT} & COMMON_FIELDS


def reads_option(mixer, option):
    if mixer == "cat" and option in ("chunks", "compressor_hidden_size", "compressor_layers"):
        return True
    parts = [mixer, "attention", "delta_product"] if mixer == "mag" else [mixer]
    if option == "chunk" and not {*parts} & {"trellis", "ttt", "lattice", "cat"}:
        return False
    return any(option in MIXERS[part].fields for part in parts)


@pytest.mark.parametrize("mixer", list(MIXERS))
def test_options_of_other_mixers_are_refused_by_name(mixer):
    for option, value in NON_DEFAULT.items():
        if option == "chunks" and mixer != "cat":
            with pytest.raises(ValueError, match="^chunks is "):
                GirihConfig(mixer=mixer, chunks=value)
        elif reads_option(mixer, option):
            extra = {"normalize": {"chunk": 1}, "shrinkage": {"chunk": 1}, "chunks": {"chunk": 8}}
            config = GirihConfig(**{"mixer": mixer, option: value} | extra.get(option, {}))
            assert getattr(config, option) == value
        else:
            default = getattr(GirihConfig(), option)
            with pytest.raises(
                ValueError, match=f"^{option} is .* which mixer {mixer} does not read.*default"
            ):
                GirihConfig(mixer=mixer, **{option: value})
            GirihConfig(mixer=mixer, **{option: default})  # the default is accepted


@pytest.mark.parametrize("mixer", ["hgrn2", "mamba2", "trellis", "ttt", "lattice"])
def test_groups_of_queries_are_refused_where_no_layer_has_any(mixer):
    has = "no groups of queries" if mixer == "mamba2" else "a memory for each query head"
    with pytest.raises(ValueError, match=f"num_kv_heads is 2; {mixer} has {has}: expected num_heads, 4"):
        GirihConfig(mixer=mixer, num_kv_heads=2)
    with pytest.raises(ValueError, match="num_kv_heads is 2"):
        GirihConfig(mixer=["mamba2", mixer], num_hidden_layers=2, num_kv_heads=2)


def test_groups_of_queries_may_be_those_of_other_layers():
    for mixer in ("hgrn2", "mamba2"):
        hybrid = GirihConfig(mixer=[mixer, "attention"], num_hidden_layers=2, num_kv_heads=2)
        assert hybrid.num_kv_heads == 2


def test_groups_of_heads_of_gated_delta_product():
    with pytest.raises(ValueError, match="num_groups is 3; expected a divisor of num_heads, 4"):
        GirihConfig(mixer="gated_delta_product", num_groups=3)
    with pytest.raises(
        ValueError, match="num_kv_heads is 2; gated_delta_product has no groups of queries.*4"
    ):
        GirihConfig(mixer="gated_delta_product", num_kv_heads=2)
    hybrid = GirihConfig(
        mixer=["gated_delta_product", "gsa"], num_hidden_layers=2, num_kv_heads=2, num_groups=4
    )
    assert (hybrid.num_kv_heads, hybrid.num_groups) == (2, 4)


def test_raven_chooses_at_most_all_slots():
    with pytest.raises(ValueError, match="topk is 9; expected 1 to num_slots, 8"):
        GirihConfig(mixer="raven", num_slots=8, topk=9)
    assert GirihConfig(mixer="raven", num_slots=8, topk=8).topk == 8
    assert GirihForCausalLM(GirihConfig(mixer="raven", num_slots=8)).model.layers[0].mixer.topk == 8


def test_chunk_of_the_delta_rule_needs_between_chunks():
    with pytest.raises(ValueError, match="mixer deltanet does not read without between_chunks"):
        GirihConfig(mixer="deltanet", chunk=8)
    assert GirihConfig(mixer="deltanet", chunk=8, between_chunks="tanh").chunk == 8


def test_mamba2_has_no_feed_forward_layer():
    with pytest.raises(ValueError, match="intermediate_size is 64, which mixer mamba2 does not read.* null"):
        GirihConfig(mixer="mamba2", intermediate_size=64)
    assert GirihConfig(mixer="mamba2").intermediate_size is None
    hybrid = GirihConfig(mixer=["mamba2", "gsa"], num_hidden_layers=2, intermediate_size=64)
    assert [block.mlp is None for block in GirihForCausalLM(hybrid).model.layers] == [True, False]


def test_rope_theta_of_retnet_needs_rotary():
    with pytest.raises(ValueError, match="rope_theta is 100.0, which mixer retnet does not read"):
        GirihConfig(mixer="retnet", rotary=False, rope_theta=100.0)
    assert GirihConfig(mixer="retnet", rope_theta=100.0).rope_theta == 100.0
    hybrid = GirihConfig(
        mixer=["retnet", "gla", "attention"], num_hidden_layers=3, rotary=False, rope_theta=9.0
    )
    retnet, gla, attention = (block.mixer for block in GirihForCausalLM(hybrid).model.layers)
    assert (retnet.rope_theta, gla.rope_theta, attention.rope_theta) == (10000.0, 10000.0, 9.0)
    with pytest.raises(ValueError, match="head_dim is 3 and keys have 3 channels; rotary positions turn"):
        GirihConfig(mixer="retnet", head_dim=3)
    assert GirihConfig(mixer="retnet", head_dim=3, rotary=False).head_dim == 3


def test_the_heads_of_mamba2_are_a_whole_number():
    with pytest.raises(ValueError, match="expand_v is 1.3 and num_heads is 4, which makes 5.2 heads of mam"):
        GirihConfig(mixer="mamba2", expand_v=1.3)


@pytest.mark.parametrize("mixer", ["gsa", "cat"])
def test_sizes_may_change_after_a_configuration_is_made(mixer):
    config = GirihConfig(mixer=mixer)
    smaller = GirihConfig(**config.to_dict() | {"num_hidden_layers": 2, "intermediate_size": 64})
    assert smaller.num_hidden_layers == 2
    config.num_hidden_layers = 2
    assert len(GirihForCausalLM(config).model.layers) == 2
    config.window = 4
    with pytest.raises(ValueError, match=f"window is 4, which mixer {mixer} does not read"):
        GirihForCausalLM(config)


def test_unread_fields_of_earlier_files_are_ignored(tmp_path):
    GirihForCausalLM(GirihConfig(mixer="attention", hidden_size=32, num_heads=2)).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text()) | {"num_slots": 32, "compressor_layers": 2, "chunk": 8, "n": 1}
    file.write_text(json.dumps(fields))
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.num_slots, config.compressor_layers, config.chunk, config.n) == (64, None, 16, 2)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    GirihForCausalLM.from_pretrained(tmp_path)
    _C.LanguageModel.from_pretrained(str(tmp_path))


# Options that rebuild the layers of earlier versions under these names.
EARLIER = {
    "gla": {"expand_k": 1.0},
    "gated_deltanet": {"expand_v": 1.0},
    "retnet": {"expand_v": 1.0, "rotary": False},
}


@pytest.mark.parametrize("mixer", EARLIER)
@torch.no_grad()
def test_folders_of_earlier_mixers_need_the_options_that_the_error_names(mixer, tmp_path):
    sizes = {"hidden_size": 32, "num_heads": 2, "num_hidden_layers": 2}
    model = GirihForCausalLM(GirihConfig(mixer=mixer, **sizes, **EARLIER[mixer])).eval()
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    for name in EARLIER[mixer]:
        del fields[name]
    file.write_text(json.dumps(fields))
    for load in (GirihForCausalLM.from_pretrained, _C.LanguageModel.from_pretrained):
        with pytest.raises(ValueError, match=f"; {mixer} of earlier versions had ") as error:
            load(str(tmp_path))
        named = str(error.value).partition("of earlier versions had ")[2]
        assert named == ", ".join(f"{name} = {json.dumps(x)}" for name, x in EARLIER[mixer].items()).replace(
            ".0", ""
        )
    file.write_text(json.dumps(fields | EARLIER[mixer]))
    ids = torch.randint(256, (2, 9))
    want = model(ids).logits
    assert GirihForCausalLM.from_pretrained(tmp_path).eval()(ids).logits.equal(want)
    torch.testing.assert_close(_C.LanguageModel.from_pretrained(str(tmp_path)).forward(ids)[0], want)


def test_folders_of_the_earlier_mamba2_are_refused_by_name(tmp_path):
    sizes = {"hidden_size": 32, "num_heads": 2, "num_hidden_layers": 2}
    model = GirihForCausalLM(GirihConfig(mixer="attention", **sizes))
    for block in model.model.layers:
        block.mixer = GatedLinearAttention(32, 2, gate="scalar", conv_size=4)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mixer": "mamba2"}))
    for load in (GirihForCausalLM.from_pretrained, _C.LanguageModel.from_pretrained):
        with pytest.raises(ValueError, match="; mamba2 of earlier versions had no state_size and cannot be"):
            load(str(tmp_path))


def test_keywords_of_from_pretrained_are_checked(tmp_path):
    GirihForCausalLM(GirihConfig(hidden_size=32, num_heads=2)).save_pretrained(tmp_path)
    for make in (AutoConfig, AutoModelForCausalLM, GirihForCausalLM):
        with pytest.raises(ValueError, match="window is 4, which mixer gsa does not read"):
            make.from_pretrained(tmp_path, window=4)
        with pytest.raises(
            ValueError, match="num_slotz is not a field of a configuration; did you mean num_slots"
        ):
            make.from_pretrained(tmp_path, num_slotz=4)


def test_layers_of_several_mixers_take_the_options_of_each():
    both = {"mixer": ["trellis", "attention"], "num_hidden_layers": 2}
    assert GirihConfig(**both, phi="silu", window=3, num_slots=8, chunk=4).window == 3
    with pytest.raises(ValueError, match="n is 3, which mixers attention, trellis do not read"):
        GirihConfig(**both, n=3)
    mixed = {"mixer": "mag", "mag_base": "lattice", "mag_mixer": "gsa"}
    assert GirihConfig(**mixed, objective="encode", feature="relu").objective == "encode"
    with pytest.raises(ValueError, match="window is 4, which mixer mag does not read"):
        GirihConfig(**mixed, window=4)


def misspell(names, count):
    """Names with one letter changed, dropped or doubled, or two letters exchanged."""
    draw = random.Random(0)
    for _ in range(count):
        name = draw.choice(names)
        i = draw.randrange(len(name))
        other = draw.choice("abcdefghijklmnopqrstuvwxyz_")
        wrong = draw.choice(
            [name[:i] + other + name[i + 1 :], name[:i] + name[i + 1 :], name[:i] + name[i] + name[i:],
             name[: max(0, i - 1)] + name[max(0, i - 1) : i + 1][::-1] + name[i + 1 :]]
        )  # fmt: skip
        if wrong and wrong not in names and wrong not in TRANSFORMERS_KEYWORDS and not wrong.startswith("_"):
            yield name, wrong


def test_misspelt_options_are_refused_and_the_nearest_is_named():
    with pytest.raises(
        ValueError, match=r"num_slotz is not a field of a configuration; did you mean num_slots\?"
    ):
        GirihConfig(mixer="gsa", num_slotz=32)
    names, hits = sorted({*OWN_FIELDS, "use_cache", "loss_in_chunks"}), []
    for name, wrong in misspell([n for n in names if len(n) > 1], 300):
        with pytest.raises(
            ValueError, match=f"{wrong} is not a field of a configuration; did you mean "
        ) as error:
            GirihConfig(**{wrong: 1})
        found = str(error.value).rpartition(" ")[2].rstrip("?")
        assert found in (*OWN_FIELDS, "mixer")
        if name in OWN_FIELDS:
            hits.append(found == name)
    assert sum(hits) > 0.9 * len(hits)
    for anything in ("foo", "x", "kernel"):
        with pytest.raises(ValueError, match="is not a field of a configuration; did you mean "):
            GirihConfig(**{anything: 1})


def test_misspelt_options_of_a_file_are_refused_in_both_languages():
    for _, wrong in misspell([n for n in OWN_FIELDS if len(n) >= 8 and "_token" not in n], 100):
        with pytest.raises(ValueError, match=f"{wrong} is not a field of a configuration"):
            torch.ops.girih.complete_configuration(f'{{"{wrong}": 1}}')
        with pytest.raises(ValueError, match="is not a field of a configuration"):
            GirihConfig.from_dict({wrong: 1})


def test_transformers_keywords_pass():
    keywords = {"output_hidden_states": True, "return_dict": False, "dtype": "bfloat16", "id2label": {0: "a"}}
    keywords |= {"architectures": ["A"], "problem_type": "regression", "transformers_version": "5"}
    config = GirihConfig(**keywords, name_or_path="here", attn_implementation="sdpa", num_attention_heads=2)
    assert config.num_heads == 2 and config.output_hidden_states and config.dtype == torch.bfloat16
    assert GirihConfig(num_labels=3).num_labels == 3 and GirihConfig(torch_dtype="float16").dtype is not None
    saved_fields = set(PretrainedConfig().to_dict()) | set(GirihConfig().to_dict())
    for name in saved_fields | set(GenerationConfig().to_dict()):
        GirihConfig.from_dict({name: getattr(GirihConfig(), name, None)})


def test_a_file_keeps_entries_of_other_libraries():
    config = GirihConfig.from_dict({"mixer": "gla", "some_tools_entry": {"a": 1}})
    assert config.some_tools_entry == {"a": 1} and config.to_dict()["some_tools_entry"] == {"a": 1}
    for again in (GirihConfig.from_dict(config.to_dict()), GirihConfig(**config.to_dict())):
        assert again.some_tools_entry == {"a": 1}
    changed = GirihConfig.from_dict(config.to_dict(), some_tools_entry=2)
    assert changed.some_tools_entry == 2
    GirihConfig.from_dict({"sep_token_id": 3, "pad_token": "x", "num_beams": 1, "is_decoder": True})
    saved = {"mixer": "gla", "some_tools_entry": 2}
    config, unused = GirihConfig.from_dict(saved, return_unused_kwargs=True, use_cache=False, other=3)
    assert (config.some_tools_entry, config.mixer, config.use_cache) == (2, "gla", False)
    assert unused == {"other": 3}


# ---- training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer, options", RUNS if os.environ.get("GIRIH_FULL") else SOME, ids=str)
def test_every_mixer_trains_with_every_option(mixer, options):
    """Chunks range from 1, the exact recurrence of the paper, to 64."""
    found = train(mixer, options, rate=3e-3)
    assert found.largest <= LARGEST
    assert found.last < 0.8 * found.first


# ---- options of commands -----------------------------------------------------------------------------------


def test_options_of_a_run_are_those_of_the_configuration():
    assert config_of_size("mag", SIZES["tiny"], options="mag_mixer=gsa").num_slots == SIZES["tiny"].slots
    adaptive = config_of_size("cat", SIZES["tiny"], chunks=[4, 8], options="chunk=8")
    assert (adaptive.chunk, adaptive.chunks) == (8, [4, 8])
    config = config_of_size("trellis", SIZES["tiny"], options="chunk=1 phi=identity gated=false")
    assert (config.chunk, config.phi, config.gated) == (1, "identity", False)
    config = config_of_size("gsa,attention", SIZES["tiny"], options="window=8  feature=relu")
    assert (config.window, config.feature, config.num_slots) == (8, "relu", SIZES["tiny"].slots)
    assert config_of_size("gsa", SIZES["tiny"], options="num_slots=8").num_slots == 8


@pytest.mark.parametrize(
    "mixer, options, message",
    [
        ("trellis", "chonk=1", "chonk is not a field of a configuration; did you mean chunk"),
        ("trellis", "chunk", "'chunk' is not name=value"),
        ("trellis", "chunk=1 chunk=2", "chunk is given twice"),
        ("trellis", "chunk=one", 'chunk is "one"; expected an integer'),
        ("trellis", "chunk=65", "chunk is 65; expected 1 to 64 for trellis"),
        ("trellis", "gated=1", "gated is 1; expected true or false"),
        ("trellis", "window=4", "window is 4, which mixer trellis does not read"),
        ("trellis", "hidden_size=64", "hidden_size is not an option; the size or --hidden_size sets it"),
        ("trellis", "mixer=gsa", "mixer is not an option; the size or --mixer sets it"),
    ],
)
def test_wrong_options_of_a_run_are_refused_in_both_languages(mixer, options, message, tmp_path):
    with pytest.raises(Refusal) as error:
        config_of_size(mixer, SIZES["tiny"], options=options)
    assert message in str(error.value)
    (tmp_path / "text").write_bytes(b"some text " * 100)
    command = [TREE / "bin" / "girih-train", tmp_path / "text", "--size=tiny", f"--mixer={mixer}"]
    done = subprocess.run([*command, f"--options={options}"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr, done


def test_a_context_keeps_the_tokens_of_a_step():
    size = SIZES["tiny"]
    longer = with_context(size, 2 * size.context)
    assert longer.batch * longer.context == size.batch * size.context
    assert longer.held_out * longer.context == size.held_out * size.context
    for wrong in (0, -1, 2 * size.batch * size.context, size.context * 3):
        with pytest.raises(Refusal, match=f"context {wrong}: expected a divisor of the "):
            with_context(size, wrong)
