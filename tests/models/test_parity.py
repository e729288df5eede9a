"""One model in Python and in C++: names and numbers are the same, and each language reads the
other's files."""

import json

import pytest
import torch
from girih import _C
from girih.models import MIXERS, GirihConfig, GirihForCausalLM
from girih.models.config import OWN_FIELDS
from small_models import config_of

# A value other than the default for every field but router_noise, which draws random numbers in training, and
# a new model of C++ is in training. Trellis and Lattice have as many memories as queries.
NON_DEFAULT = {
    "head_dim": 6,
    "intermediate_size": 40,
    "num_slots": 5,
    "chunk": 3,
    "n": 3,
    "gated": False,
    "conv_size": 3,
    "expand_k": 2.0,
    "expand_v": 1.5,
    "state_size": 10,
    "num_groups": 2,
    "topk": 3,
    "slot_decay": True,
    "router_score": "softmax",
    "router_mlp": True,
    "router_bias": True,
    "output_gate": True,
    "phi": "l2_silu",
    "f": "softmax",
    "objective": "similarity",
    "feature": "relu2",
    "between_chunks": "tanh",
    "allow_neg_eigval": True,
    "shared_qk": True,
    "normalize_kv": False,
    "value_read": "phi",
    "post_norm": True,  # the default of Trellis; a variant below has the other value
    "data_dependent_decay": False,
    "window": 5,
    "rotary": False,
    "mag_base": "gla",
    "mag_mixer": "attention",
    "mag_weight": 0.3,
    "mag_learned": True,
    "mag_cross": True,
    "compressor_hidden_size": 12,
    "compressor_layers": 1,
    "running_positions": True,
    "rope_theta": 7.0,
    "norm_eps": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": 3,
    "eos_token_id": [21, 22],
    "pad_token_id": 4,
}
GROUPED = [name for name in MIXERS if name not in ("trellis", "ttt", "lattice")]
VARIANTS = {
    **{mixer: {"mixer": mixer} for mixer in MIXERS},
    **{
        f"every field, grouped, {some}": NON_DEFAULT
        | {"mixer": mixers, "num_hidden_layers": len(mixers), "num_kv_heads": 2}
        for some, mixers in {"even": GROUPED[::2], "odd": GROUPED[1::2]}.items()
    },
    "every field": NON_DEFAULT | {"mixer": ["trellis", "ttt", "lattice"], "num_hidden_layers": 3},
    "every field, cat": NON_DEFAULT | {"mixer": "cat", "num_kv_heads": 2, "chunks": [3, 6]},
    "hybrid": {"mixer": ["gsa", "attention", "cat"], "num_hidden_layers": 3},
    "gated_deltanet_h1": {"mixer": ["gated_deltanet", "attention"], "window": 4},
    "grouped": {"mixer": ["gsa", "mamba2", "delta_product"], "num_hidden_layers": 3, "num_kv_heads": 2},
    "hgrn2": {"mixer": ["hgrn2", "mag", "hgrn2"], "mag_mixer": "hgrn2", "num_hidden_layers": 3},
    "mamba2 alone": {"mixer": "mamba2", "state_size": 10, "expand_v": 1.5, "conv_size": 0},
    "retnet, grouped": {"mixer": "retnet", "num_kv_heads": 2, "rope_theta": 20.0, "expand_k": 0.5},
    "convolved": {"mixer": ["abc", "gla"], "conv_size": 3, "feature": "relu2"},
    "untied": {"mixer": "gsa", "tie_word_embeddings": False, "head_dim": 6},
    "negative eigenvalues": {"mixer": "delta_product", "n": 3, "allow_neg_eigval": True, "gated": False},
    "between chunks": {"mixer": "delta_product", "between_chunks": "gelu"},
    "trellis identity": {"mixer": "trellis", "phi": "identity", "f": "softmax", "gated": False},
    "trellis without a norm": {"mixer": "trellis", "post_norm": False},
    "lattice, shrinking": {"mixer": "lattice", "chunk": 1, "shrinkage": 0.05, "objective": "encode"},
    "lattice, any length": {"mixer": "lattice", "chunk": 1, "normalize": False},
    "lattice encode": {"mixer": "lattice", "objective": "encode", "gated": False},
    "grouped keys": {"mixer": "gated_delta_product", "n": 3, "num_groups": 2, "state_size": 10},
    "raven, all slots": {
        "mixer": "raven",
        "topk": 6,
        "slot_decay": True,
        "output_gate": True,
        "num_kv_heads": 2,
    },
    "raven, router": {"mixer": "raven", "topk": 2, "router_mlp": True, "router_bias": True},
    "learned mixture": {"mixer": "mag", "mag_base": "gsa", "mag_learned": True, "mag_cross": True},
    "hybrid running": {"mixer": ["cat", "gsa"], "running_positions": True},
    "cat adaptive": {"mixer": "cat", "chunks": [2, 4, 8]},
    "cat running": {"mixer": "cat", "running_positions": True, "num_kv_heads": 2, "num_hidden_layers": 4},
}
SIZES = {
    "vocab_size": 23,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "num_slots": 6,
    "chunk": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # large enough for distinct logits
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    torch.manual_seed(0)
    python = GirihForCausalLM(config_of(**SIZES | VARIANTS[request.param])).eval()
    folder = tmp_path_factory.mktemp("model")
    python.save_pretrained(folder)
    return python, _C.LanguageModel.from_pretrained(str(folder))


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_parameters_have_the_same_names_and_shapes(pair):
    python, cpp = (tensors(model) for model in pair)
    assert {name: p.shape for name, p in python.items()} == {name: p.shape for name, p in cpp.items()}


@torch.no_grad()
def test_logits_are_equal(pair):
    python, cpp = pair
    ids = torch.randint(SIZES["vocab_size"], (3, 15))
    mask = torch.arange(15) >= torch.tensor([[0], [6], [3]])
    cu_seqlens = torch.tensor([0, 6, 15])
    close(cpp.forward(ids)[0], python(ids).logits)
    real = mask[..., None]
    close(cpp.forward(ids, mask)[0] * real, python(ids, attention_mask=mask).logits * real)
    packed = {"cu_seqlens": cu_seqlens, "use_cache": False}
    close(cpp.forward(ids[:1], **packed)[0], python(ids[:1], **packed).logits)


@torch.no_grad()
def test_states_continue_equally(pair):
    python, cpp = pair
    ids = torch.randint(SIZES["vocab_size"], (2, 9))
    cache, state = None, _C.State()
    for piece in ids.split([6, 1, 2], 1):
        output = python(piece, past_key_values=cache, use_cache=True)
        logits, state = cpp.forward(piece, state=state, use_cache=True)
        cache = output.past_key_values
        close(logits, output.logits)


@torch.no_grad()
def test_masked_calls_are_equal(pair):
    python, cpp = pair
    cache, state = None, _C.State()
    for T in (6, 7, 1, 5):
        ids, mask = torch.randint(SIZES["vocab_size"], (3, T)), torch.rand(3, T) < 0.6
        output = python(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        logits, state = cpp.forward(ids, mask, state, use_cache=True)
        cache = output.past_key_values
        close(logits * mask[..., None], output.logits * mask[..., None])


@torch.no_grad()
def test_mask_may_cover_past_tokens(pair):
    python, cpp = pair
    ids = torch.randint(SIZES["vocab_size"], (3, 9))
    mask = torch.arange(9) >= torch.tensor([[0], [3], [7]])
    first, last = ids.split([5, 4], 1)
    cache = python(first, attention_mask=mask[:, :5], use_cache=True).past_key_values
    _, state = cpp.forward(first, mask[:, :5], use_cache=True)
    want = python(last, attention_mask=mask, past_key_values=cache).logits
    real = mask[:, 5:, None]
    close(cpp.forward(last, mask, state)[0] * real, want * real)
    close(want[:1], python(ids[:1]).logits[:, 5:])


@torch.no_grad()
def test_state_is_unchanged_without_use_cache(pair):
    cpp = pair[1]
    ids = torch.randint(SIZES["vocab_size"], (2, 7))
    _, state = cpp.forward(ids[:, :6], use_cache=True)
    first, second = (cpp.forward(ids[:, 6:], state=state)[0] for _ in range(2))
    assert first.equal(second)


@pytest.mark.parametrize(
    "wrong",
    [{"attention_mask": torch.ones(2, 4)}, {"cu_seqlens": torch.tensor([[0, 5]]), "use_cache": False}],
    ids=["mask", "packing"],
)
def test_errors_of_masks_and_packing_are_equal(pair, wrong):
    python, cpp = pair
    ids = torch.randint(SIZES["vocab_size"], (1, 4))
    messages = []
    for call in (python, cpp.forward):
        with pytest.raises(ValueError) as error:
            call(ids, **wrong)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_gradients_are_equal(pair):
    python, cpp = pair
    ids = torch.randint(SIZES["vocab_size"], (2, 11))
    for p in [*python.parameters(), *cpp.named_parameters().values()]:
        p.grad = None
    python(ids, labels=ids).loss.backward()
    cpp.loss(ids).backward()
    grads = {name: p.grad for name, p in cpp.named_parameters().items()}
    for name, p in python.named_parameters():
        close(grads[name], p.grad)


@torch.no_grad()
def test_losses_are_equal_with_ignored_labels(pair):
    python, cpp = pair
    ids = torch.randint(SIZES["vocab_size"], (3, 12))
    labels = ids.masked_fill(torch.rand(3, 12) < 0.4, -100)
    labels[2] = torch.randint(SIZES["vocab_size"], (12,))
    for targets in (labels, labels.masked_fill(torch.arange(12) > 3, -100), ids):
        close(cpp.loss(ids, targets), python(ids, labels=targets).loss)
    close(cpp.loss(ids), python(ids, labels=ids).loss)


# Rounding errors grow with every token where the memory is not a linear function of its past.
TOKENS = dict.fromkeys(MIXERS, 2000) | {"trellis": 48, "lattice": 48}


@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_bf16_logits_are_equal_after_many_tokens(mixer, tmp_path):
    """Both compute angles, gates and step sizes in fp32. In bf16, position 2000 would be off by 4."""
    torch.manual_seed(0)
    config = config_of(**SIZES | {"mixer": mixer, "chunk": 16, "max_position_embeddings": 4096})
    python = GirihForCausalLM(config).to(torch.bfloat16).eval()
    python.save_pretrained(tmp_path)
    cpp = _C.LanguageModel.from_pretrained(str(tmp_path))
    ids = torch.randint(SIZES["vocab_size"], (1, TOKENS[mixer]))
    found, want = cpp.forward(ids)[0], python(ids).logits
    assert found.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(found, want, atol=2**-7 * want.abs().max().item(), rtol=0)


@torch.no_grad()
def test_cat_position_limit_over_several_calls():
    messages = []
    fields = SIZES | {"mixer": "cat", "max_position_embeddings": 12}
    python = GirihForCausalLM(config_of(**fields)).eval()
    cpp = _C.LanguageModel(json.dumps(fields | {"num_slots": 64}))
    for more in (1, 2):
        cache, state = None, _C.State()
        for T in (6, 1, 5 - more):
            ids = torch.randint(SIZES["vocab_size"], (2, T))
            cache = python(ids, past_key_values=cache, use_cache=True).past_key_values
            _, state = cpp.forward(ids, state=state, use_cache=True)
        ids = torch.randint(SIZES["vocab_size"], (2, more + 1))
        for call in (
            lambda ids=ids, cache=cache: python(ids, past_key_values=cache),
            lambda ids=ids, state=state: cpp.forward(ids, state=state, use_cache=True),
        ):
            with pytest.raises(
                ValueError, match="13 tokens; expected at most max_position_embeddings"
            ) as error:
                call()
            messages.append(str(error.value))
    assert len(set(messages)) == 1


def test_greedy_generation_is_equal(pair):
    python, cpp = pair
    ids = torch.randint(SIZES["vocab_size"], (2, 5))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    pad = python.config.pad_token_id or 0
    expected = python.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=pad)
    assert cpp.generate(ids, 8, attention_mask=mask).equal(expected)


@torch.no_grad()
def test_python_loads_what_cpp_saved(pair, tmp_path):
    python, _ = pair
    cpp = _C.LanguageModel(python.config.to_json_string(use_diff=False))
    cpp.save_pretrained(str(tmp_path))
    loaded = GirihForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.mixer == python.config.mixer
    ids = torch.randint(SIZES["vocab_size"], (2, 7))
    close(loaded(ids).logits, cpp.forward(ids)[0])


def test_initialisation_is_the_same(pair):
    """Over several new models, mean and deviation of a parameter differ by at most four standard errors."""
    config, times = pair[0].config, 6
    torch.manual_seed(0)
    python = [tensors(GirihForCausalLM(config)) for _ in range(times)]
    cpp = [tensors(_C.LanguageModel(config.to_json_string(use_diff=False))) for _ in range(times)]
    for name in python[0]:
        a, b = (torch.stack([model[name] for model in models]) for models in (python, cpp))
        spread, tolerance = a.std(correction=0), 4 * (2 / a.numel()) ** 0.5
        assert abs(a.mean() - b.mean()) <= tolerance * spread + 1e-6, name
        assert abs(spread - b.std(correction=0)) <= tolerance * spread + 1e-6, name


def test_shards_and_their_dtype_are_read(tmp_path):
    python = GirihForCausalLM(config_of(**SIZES)).to(torch.bfloat16).eval()
    python.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    cpp = _C.LanguageModel.from_pretrained(str(tmp_path)).named_parameters()
    for name, p in python.named_parameters():
        assert cpp[name].equal(p) and cpp[name].dtype == p.dtype, name


@pytest.mark.parametrize(
    "wrong",
    [
        {"mixer": "lstm"},
        {"mixer": ["gsa"]},
        {"mixer": "mag", "mag_base": "mag"},
        {"vocab_size": 0},
        {"hidden_size": 30},
        {"mixer": "trellis", "chunk": 65},
        {"mixer": "delta_product", "between_chunks": "tanh", "chunk": 65},
        {"num_kv_heads": 0},
        {"head_dim": 0},
        {"between_chunks": "relu"},
        {"n": 1.9},
        {"hidden_size": 10**9},
        {"mixer": "cat", "chunk": 1},
        {"mixer": ["cat", "gsa", "gsa", "trellis"], "chunk": 65},
        {"num_kv_heads": 3},
        {"mixer": "lattice", "num_kv_heads": 2},
        {"mixer": "attention", "head_dim": 3},
        {"mixer": "gla", "head_dim": 3},
        {"mixer": "deltanet", "expand_v": 0.3},
        {"mixer": ["gla"] * 3 + ["gated_deltanet"], "expand_k": 0},
        {"mixer": "cat", "compressor_hidden_size": 33},
        {"mixer": "cat", "chunks": [4, 6]},
        {"mixer": "cat", "chunks": [8, 32]},
        {"mixer": "cat", "chunks": [16, 8]},
        {"mixer": "cat", "chunks": [8, 16, 16]},
        {"mixer": "cat", "chunks": [1, 16]},
        {"mixer": "cat", "chunks": []},
        {"mixer": "cat", "head_dim": 3},
        {"mixer": ["cat", "gsa", "gsa", "gsa"], "head_dim": 3},
        {"mixer": "mag", "mag_mixer": "gsa", "head_dim": 3},
        {"mixer": "mag", "mag_mixer": "lattice", "mag_base": "trellis", "num_kv_heads": 2},
        {"mag_mixer": "nothing"},
        {"mag_base": "mag"},
        {"mixer": "mag", "mag_learned": True, "mag_weight": 0.0},
        {"mixer": "mag", "mag_learned": True, "mag_weight": 1},
        {"eos_token_id": [5, -2]},
        {"mixer": ["cat"] * 4, "chunks": [16]},
        {"chunks": [0]},
        {"mixer": "cat", "intermediate_size": 1},
        {"feature": "sine"},
        {"phi": "sine"},
        {"objective": "sine"},
    ],
    ids=str,
)
def test_errors_of_configurations_are_equal(wrong):
    with pytest.raises(ValueError) as python:
        GirihConfig(**wrong)
    with pytest.raises(ValueError) as cpp:
        _C.LanguageModel(json.dumps(wrong))
    assert str(cpp.value) == str(python.value)


WRONG = [0, -1, 1.5, "word", True, None, [1], {"a": 1}, 10**12, 2**70, -(2**63), float("nan"), float("inf")]


@pytest.mark.parametrize("field", OWN_FIELDS)
def test_every_field_accepts_a_value_or_refuses_it_by_name(field):
    """Zero, negative, wrong type, absent, huge: no value is accepted as another one."""
    accepted = 0
    for value in WRONG:
        try:
            config = GirihConfig(**{field: value})
        except ValueError as error:
            assert str(error).startswith(f"{field} is ") or f"; {field} " in str(error), str(error)
        else:
            found = getattr(config, field)
            assert (type(found), found) == (type(value), value) or value is None or isinstance(found, float)
            accepted += 1
    assert accepted < len(WRONG)


def test_mixers_and_their_fields_are_the_same_in_both_languages():
    described = json.loads(torch.ops.girih.describe_mixers())
    assert list(described) == list(MIXERS)
    for name, mixer in MIXERS.items():
        assert sorted(described[name]) == sorted(mixer.fields), name
        assert set(mixer.fields) <= set(OWN_FIELDS), name


def test_defaults_are_the_same_in_both_languages():
    assert {name: getattr(GirihConfig(), name) for name in OWN_FIELDS} == {
        name: value
        for name, value in json.loads(torch.ops.girih.complete_configuration("{}")).items()
        if name in OWN_FIELDS
    }
