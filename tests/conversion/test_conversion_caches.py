"""Converted models generate the text of their full forward, in every generation mode of transformers."""

import copy

import girih
import pytest
import torch
from converted import FAMILIES, IDS, WAYS, base_model, close, converted, supports
from transformers import CompileConfig, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

pytestmark = pytest.mark.filterwarnings("ignore")
ONES = torch.ones_like(IDS)
CASES = [
    (family, way) for family in FAMILIES for way in ("window", "both, gelu", "gsa") if supports(family, way)
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def converted_model(request):
    return converted(*request.param)


@pytest.fixture(scope="module", params=WAYS)
def model(request):
    return converted("llama", request.param)


@torch.no_grad()
def greedy(model, ids, n, mask=None):
    """Greedy text. Each token comes from a full forward without a cache."""
    for _ in range(n):
        mask = torch.ones_like(ids) if mask is None else mask
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), 1)
        mask = torch.cat((mask, mask.new_ones(mask.shape[0], 1)), 1)
    return ids


def generate_text(model, ids, mask=None, n=8, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=n, **({"do_sample": False, "eos_token_id": None} | options)
    )


def test_greedy_text_matches_full_forwards(converted_model):
    assert generate_text(converted_model, IDS).equal(greedy(converted_model, IDS, 8))


def test_greedy_text_with_left_padding(converted_model):
    mask = ONES.clone()
    mask[0, :7] = 0
    assert generate_text(converted_model, IDS, mask).equal(greedy(converted_model, IDS, 8, mask))
    assert generate_text(converted_model, IDS, mask)[:1, 7:].equal(
        generate_text(converted_model, IDS[:1, 7:])
    )


@torch.no_grad()
@pytest.mark.parametrize("cuts", [(7,), (1, 2, 3), (19,), (5, 10, 15)], ids=str)
def test_logits_of_several_calls_match_one_call(converted_model, cuts):
    """Calls of several tokens and of one token, with padding in two of the calls."""
    converted_model = copy.deepcopy(converted_model).double()  # float64, so that rounding does not matter
    mask = ONES.clone()
    mask[0, :6] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    whole = converted_model(IDS, attention_mask=mask, position_ids=positions, use_cache=False).logits
    cache, parts = (
        converted_model.new_cache() if converted_model.config.model_type == "girih" else DynamicCache(),
        [],
    )
    for a, b in zip((0, *cuts), (*cuts, 20), strict=True):
        call = {"attention_mask": mask[:, :b], "position_ids": positions[:, a:b], "past_key_values": cache}
        parts.append(converted_model(IDS[:, a:b], **call).logits)
    parts = torch.cat(parts, 1)
    assert parts.dtype == torch.float64
    close(parts[1], whole[1], 1e-8)
    close(parts[0, 6:], whole[0, 6:], 1e-8)


def test_beam_search_matches_beam_search_without_a_cache(model):
    options = {"num_beams": 3, "n": 6}
    assert generate_text(model, IDS, **options).equal(generate_text(model, IDS, use_cache=False, **options))


def test_samples_match_samples_without_a_cache(model):
    options = {"do_sample": True, "num_return_sequences": 2, "temperature": 1.5}
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        texts.append(generate_text(model, IDS, use_cache=use_cache, **options))
    assert texts[0].equal(texts[1]) and not texts[0][0].equal(texts[0][1])


@torch.no_grad()
@pytest.mark.parametrize("repeats", [2, 3])
def test_a_cache_repeats_and_selects_its_rows(model, repeats):
    """Keys and states together. A row and its copies are adjacent."""
    model = copy.deepcopy(model).double()
    cache = model(IDS[:, :12]).past_key_values
    cache.batch_repeat_interleave(repeats)
    rows = torch.arange(2).repeat_interleave(repeats)
    whole = model(IDS, use_cache=False).logits
    close(model(IDS[rows, 12:15], past_key_values=cache).logits, whole[rows, 12:15], 1e-8)
    cache.batch_select_indices(torch.tensor([repeats]))
    close(model(IDS[1:, 15:16], past_key_values=cache).logits, whole[1:, 15:16], 1e-8)
    close(model(IDS[1:, 16:], past_key_values=cache).logits, whole[1:, 16:], 1e-8)


@torch.no_grad()
@pytest.mark.parametrize("model_window", [4, 6])
@pytest.mark.parametrize("window", [4, 6, 9])
def test_the_narrower_of_two_windows_counts(model_window, window):
    """At weight 0 the model equals a model of transformers with that window, with and without a cache."""
    narrow = base_model("mistral", sliding_window=min(model_window, window))
    want = narrow(IDS).logits
    model = base_model("mistral", sliding_window=model_window)
    girih.inject(model, weight=0.0, max_self_attn_length=window)
    close(model(IDS, use_cache=False).logits, want)
    for cuts in ([20], [7, 9, 4], [5, *[1] * 15], [1] * 20):
        cache = DynamicCache(config=model.config)
        parts = [model(part, past_key_values=cache).logits for part in IDS.split(cuts, 1)]
        close(torch.cat(parts, 1), want)
        assert cache.layers[0].num_keys == min(model_window, window) - 1


def test_prefill_in_chunks_matches_one_prefill(model):
    assert generate_text(model, IDS, prefill_chunk_size=6).equal(generate_text(model, IDS))


def test_two_turns_of_a_chat_go_on_from_one_cache(model):
    first = model.generate(
        IDS,
        attention_mask=ONES,
        max_new_tokens=4,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
    )
    turn = torch.cat((first.sequences, IDS[:, :5]), 1)
    copied = copy.deepcopy(first.past_key_values)
    for cache in (first.past_key_values, copied):  # a copy of a cache belongs to another conversation
        assert generate_text(model, turn, past_key_values=cache).equal(greedy(model, turn, 8))
        assert cache.get_seq_length() == turn.shape[1] + 7


def test_assisted_decoding_is_refused(model):
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        generate_text(model, IDS[:1], assistant_model=base_model("llama", seed=1))
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        generate_text(model, IDS[:1], prompt_lookup_num_tokens=2)


def test_cropping_a_cache_is_refused(model):
    cache = model(IDS).past_key_values
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="a recurrent state cannot be cropped"):
        cache.crop(-1)
    # the converted model as the assistant
    with pytest.raises(ValueError, match="a recurrent state cannot be cropped"):
        generate_text(base_model("llama"), IDS[:1], assistant_model=model)


def tensors(x):
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, tuple | list):
        return [t for part in x for t in tensors(part)]
    if hasattr(x, "__dict__") and not isinstance(x, type):
        return [t for part in vars(x).values() for t in tensors(part)]
    return []


def size(cache):
    storages = {t.data_ptr(): t.untyped_storage().nbytes() for layer in cache.layers for t in tensors(layer)}
    return sum(storages.values())


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral", "gpt2"])
@pytest.mark.parametrize("options", [{"weight": 1.0, "max_self_attn_length": 5}, {"mixer": "gsa"}], ids=str)
def test_memory_a_token_is_constant(family, options):
    model = base_model(family)
    girih.replace_attention(model, **options) if "mixer" in options else girih.inject(model, **options)
    cache, sizes = DynamicCache(config=model.config), []
    for i in range(40):
        model(IDS[:, i % 20, None], past_key_values=cache)
        sizes.append(size(cache))
    assert sizes[0] > 0 and len(set(sizes[6:])) == 1
    growing = converted(family, "injected")
    caches = [growing(IDS[:, :n]).past_key_values for n in (10, 20)]
    assert family == "mistral" or size(caches[0]) < size(caches[1])


@torch.no_grad()
def test_window_limits_attention_but_not_the_linear_path():
    model = base_model("llama", num_hidden_layers=1)
    girih.inject(model, weight=0.0, max_self_attn_length=5)
    other = IDS.clone()
    other[:, 8] = (other[:, 8] + 1) % 64
    changed = (model(IDS).logits != model(other).logits).any(-1).any(0)
    assert changed.tolist() == [8 <= t < 13 for t in range(20)]
    model.model.layers[0].self_attn.girih.set_weight(1.0)
    changed = (model(IDS).logits != model(other).logits).any(-1).any(0)
    assert changed.tolist() == [t >= 8 for t in range(20)]


@torch.no_grad()
def test_eager_attention_has_the_same_window():
    model = converted("llama", "window")
    expected = model(IDS).logits
    model.set_attn_implementation("eager")
    close(model(IDS).logits, expected)
    assert generate_text(model, IDS).equal(greedy(model, IDS, 8))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="max_self_attn_length: attn_implementation is 'flash_attention_2'"):
        model(IDS)


@torch.no_grad()
@pytest.mark.parametrize("way", ["injected", "gsa"])
def test_logits_with_a_static_cache(way):
    model = converted("llama", way)
    cache = StaticCache(config=model.config, max_cache_len=32)
    mask = ONES.clone()
    mask[0, :3] = 0
    whole = model(IDS, attention_mask=mask, use_cache=False).logits
    parts = [
        model(IDS[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits
        for a, b in ((0, 9), (9, 20))
    ]
    close(torch.cat(parts, 1)[1], whole[1])
    close(torch.cat(parts, 1)[0, 3:], whole[0, 3:])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
@pytest.mark.parametrize("layers", [None, [0], [1]], ids=str)
def test_generation_with_a_static_cache(family, layers):
    for options in ({"weight": 0.5}, {"mixer": "gsa", "num_slots": 8}):
        model = base_model(family)
        if "mixer" in options:
            girih.replace_attention(model, layers=layers, **options)
        else:
            girih.inject(model, layers=layers, **options)
        mask = ONES.clone()
        mask[0, :3] = 0
        for attention_mask in (ONES, mask):
            assert generate_text(model, IDS, attention_mask, cache_implementation="static").equal(
                generate_text(model, IDS, attention_mask)
            )


def test_compiled_decoding_generates_the_same_text():
    model = converted("llama", "injected", num_hidden_layers=1)
    compile_config = CompileConfig(backend="eager", mode=None)
    compile_config._compile_all_devices = True
    static = generate_text(model, IDS, n=5, cache_implementation="static", compile_config=compile_config)
    assert static.equal(generate_text(model, IDS, n=5))


def test_window_refuses_a_static_cache():
    model = converted("llama", "window")
    with pytest.raises(ValueError, match="max_self_attn_length: cache has a StaticLayer"):
        model(IDS, past_key_values=StaticCache(config=model.config, max_cache_len=32))


@pytest.mark.parametrize("way", ["injected", "gsa"])
def test_paged_cache_is_refused(way):
    with pytest.raises(ValueError, match="a state has no pages"):
        # Continuous batching calls a layer in this way.
        model = converted("llama", way)
        layer = model.model.layers[0].self_attn
        x = torch.zeros(1, 4, model.config.hidden_size)
        rotary = model.model.rotary_emb(x, torch.arange(4)[None])
        layer(x, position_embeddings=rotary, attention_mask=None, cache=object())


def test_cache_without_states_is_refused():
    base = base_model("llama")
    cache = base(IDS).past_key_values
    girih.inject(base)
    with pytest.raises(ValueError, match="cache holds keys of layer 0"):
        base(IDS, past_key_values=cache)


@torch.no_grad()
def test_a_hybrid_has_masks_of_the_right_size():
    for family, layers in (("llama", [0]), ("gemma3_text", [1]), ("gemma3_text", [0]), ("mistral", [0])):
        for options in ({"max_self_attn_length": 5}, {}):
            model = base_model(family)
            girih.inject(model, layers=layers, **options)
            assert generate_text(model, IDS).equal(greedy(model, IDS, 8))
        model = base_model(family)
        girih.replace_attention(model, layers=layers, num_slots=8)
        assert generate_text(model, IDS).equal(greedy(model, IDS, 8))


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right", None])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_unconverted_layer_has_masks_of_its_own_window(family, side):
    """Layer 0 keeps fewer keys than the other layers. Their masks depend on the layer's
    position in a cache."""
    types = {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]} if family != "mistral" else {}
    model = base_model(family, num_hidden_layers=3, **types).double()
    girih.inject(model, layers=[0], max_self_attn_length=3)
    mask = ONES.clone()
    if side is not None:
        mask[0, slice(0, 7) if side == "left" else slice(13, 20)] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    whole = model(IDS, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for cuts in ([9, 4, 1, 1, 5], [2, 5, 1, 12], [20]):
        cache, parts, start = DynamicCache(config=model.config), [], 0
        for n in cuts:
            call = {"attention_mask": mask[:, : start + n], "position_ids": positions[:, start : start + n]}
            parts.append(model(IDS[:, start : start + n], past_key_values=cache, **call).logits)
            start += n
        valid = mask.bool()
        close(torch.cat(parts, 1)[valid], whole[valid], 1e-8)
    if side != "right":
        assert generate_text(model, IDS, mask).equal(greedy(model, IDS, 8, mask))


# transformers 5.17 sets the keys of attention to zero and still counts them.
RESET_DROPS_KEYS = "reset" in vars(DynamicLayer)


@torch.no_grad()
def test_reset_cache_is_empty(model):
    model = copy.deepcopy(model).double()
    cache = model(IDS[:, :12]).past_key_values
    cache.reset()
    assert cache.get_seq_length() == 0
    if not RESET_DROPS_KEYS and any(hasattr(layer, "keys") for layer in cache.layers):
        pytest.skip("this transformers keeps keys of zeros in a cache that is reset")
    whole = model(IDS, use_cache=False).logits
    parts = [model(part, past_key_values=cache).logits for part in IDS.split([7, 1, 12], 1)]
    close(torch.cat(parts, 1), whole, 1e-8)


def test_cache_layer_keeps_its_length_limit_and_offloading(monkeypatch):
    """The limit of the length, and moving the keys from the device and back."""
    calls = []
    monkeypatch.setattr(DynamicLayer, "offload", lambda layer: calls.append("off"))
    monkeypatch.setattr(DynamicLayer, "prefetch", lambda layer: calls.append("on"))
    model = base_model("mistral", sliding_window=6)
    expected = DynamicCache(config=model.config).layers[0].get_max_length()
    girih.inject(model, max_self_attn_length=4)
    cache = DynamicCache(config=model.config)
    model(IDS, past_key_values=cache)
    assert cache.layers[0].get_max_length() == expected == 6
    cache.layers[0].offload()
    cache.layers[0].prefetch()
    assert calls == ["off", "on"]
