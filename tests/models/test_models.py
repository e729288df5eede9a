"""Properties of language models, checked for every mixer, for hybrids and for the CAT model."""

import doctest
import importlib
import itertools
import math
import pkgutil

import girih.models
import pytest
import torch
import torch.nn.functional as F
import transformers
from girih.models import (
    MIXERS,
    GirihCache,
    GirihConfig,
    GirihForCausalLM,
    GirihForSequenceClassification,
    GirihModel,
)
from girih.nn import CompressAttend, ShortConv, map_state
from packaging import version
from small_models import config_of
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

MODELS = {name: {"mixer": name} for name in MIXERS} | {
    "hybrid": {"mixer": ["gsa", "attention", "cat", "trellis"], "num_hidden_layers": 4},
    "gated_deltanet_h1": {
        "mixer": ["gated_deltanet", "attention"] * 2,
        "num_hidden_layers": 4,
        "window": 4,
    },
    "mag_learned": {
        "mixer": "mag",
        "mag_base": "gsa",
        "mag_mixer": "trellis",
        "mag_learned": True,
        "mag_cross": True,
    },
    "cat_running": {"mixer": "cat", "running_positions": True},
    "delta_product_gelu": {"mixer": "delta_product", "between_chunks": "gelu"},
    "window": {"mixer": "attention", "window": 5},
    "gsa_no_gate": {"mixer": "gsa", "data_dependent_decay": False},
    "trellis_options": {
        "mixer": "trellis",
        "shared_qk": True,
        "normalize_kv": False,
        "value_read": "phi",
        "post_norm": False,
    },
    "lattice_options": {"mixer": "lattice", "chunk": 1, "shrinkage": 0.05, "post_norm": True},
    "lattice_any_length": {"mixer": "lattice", "chunk": 1, "normalize": False},
}


def small(**options):
    sizes = {
        "vocab_size": 32,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "num_slots": 8,
        "chunk": 4,
        "max_position_embeddings": 64,
    }
    return config_of(**(sizes | options))


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    # Weights larger than the training default, so that a wrong token or state changes the logits.
    return GirihForCausalLM(small(**MODELS[request.param], initializer_range=0.2)).eval()


def tokens(*shape, seed=1):
    return torch.randint(1, 32, shape, generator=torch.Generator().manual_seed(seed))


def close(a, b, tolerance=1e-4):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "module", [module.name for module in pkgutil.walk_packages(girih.models.__path__, "girih.models.")]
)
def test_examples_in_docstrings_run(module):
    module = importlib.import_module(module)
    assert doctest.testmod(module, extraglobs={"torch": torch}).failed == 0


def test_loss_is_the_cross_entropy_of_the_next_token(model):
    ids = tokens(3, 11)
    labels = ids.masked_fill(torch.rand(3, 11) < 0.2, -100)
    output = model(ids, labels=labels)
    log_probability = output.logits[:, :-1].log_softmax(-1)
    expected = torch.nn.functional.nll_loss(log_probability.flatten(0, 1), labels[:, 1:].flatten())
    close(output.loss, expected)
    assert output.logits.shape == (3, 11, 32)
    close(model(ids, logits_to_keep=2).logits, output.logits[:, -2:])
    as_tuple = model(ids, labels=labels, return_dict=False)
    close(as_tuple[0], output.loss)
    assert len(model(ids, output_hidden_states=True).hidden_states) == model.config.num_hidden_layers + 1


def test_logits_depend_on_the_past_alone(model):
    """Gradients reach only the embeddings of past tokens, in the decoder and compressor of CAT too."""
    embedded = []

    def record_output(module, arguments, output):
        embedded.append((arguments[0], output.requires_grad_(True)))
        output.retain_grad()

    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and "position" not in model_name(model, module):
            module.register_forward_hook(record_output)
    ids = torch.randperm(31)[None, :14] + 1  # all tokens differ
    for t in (0, 2, 3, 4, 9):
        embedded.clear()
        model(ids).logits[:, t].square().sum().backward()
        seen = set()
        for token, vector in embedded:
            has_gradient = vector.grad.abs().sum(-1) > 0
            seen |= set(token[has_gradient].tolist())
        assert ids[0, t].item() in seen
        assert not seen & set(ids[0, t + 1 :].tolist())


def model_name(model, module):
    return next(name for name, m in model.named_modules() if m is module)


@torch.no_grad()
def test_cached_tokens_give_the_same_logits(model):
    ids = tokens(2, 11)
    whole = model(ids).logits
    cache, parts = None, []
    for cut in (slice(0, 3), slice(3, 4), slice(4, 5), slice(5, 10), slice(10, 11)):
        output = model(ids[:, cut], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    assert isinstance(cache, GirihCache) and cache.get_seq_length() == 11
    close(torch.cat(parts, 1), whole)


@torch.no_grad()
def test_padding_on_the_left_does_nothing(model):
    ids, lengths = tokens(3, 11), (11, 6, 1)
    mask = torch.stack([torch.arange(11) >= 11 - n for n in lengths]).long()
    logits = model(ids, attention_mask=mask).logits
    for i, n in enumerate(lengths):
        close(logits[i, 11 - n :], model(ids[i : i + 1, 11 - n :]).logits[0])


def test_packed_sequences_equal_a_loop(model):
    ids, cuts = tokens(1, 14), [0, 1, 6, 6, 14]
    output = model(ids, labels=ids, cu_seqlens=torch.tensor(cuts, dtype=torch.int32), use_cache=False)
    losses, count = 0.0, 0
    for a, b in itertools.pairwise(cuts):
        if b > a:
            close(output.logits[:, a:b], model(ids[:, a:b]).logits)
        if b > a + 1:
            losses += model(ids[:, a:b], labels=ids[:, a:b]).loss * (b - a - 1)
            count += b - a - 1
    close(output.loss, losses / count)


GENERATION = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 5},
    "beam": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
}


@pytest.mark.parametrize("way", GENERATION)
def test_generation_is_the_same_with_and_without_the_cache(model, way):
    ids = tokens(3, 7)
    mask = torch.ones_like(ids)
    mask[1, :3], mask[2, :6] = 0, 0
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        texts.append(
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=7,
                use_cache=use_cache,
                pad_token_id=0,
                **GENERATION[way],
            )
        )
    assert texts[0].equal(texts[1])


def test_padded_prompt_generates_the_text_of_the_prompt_alone(model):
    """A padded prompt in a batch is continued like the prompt alone."""
    ids = tokens(2, 6)
    mask = torch.tensor([[1] * 6, [0] * 4 + [1] * 2])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    together = model.generate(ids, attention_mask=mask, **options)
    assert together[1, 4:].equal(model.generate(ids[1:, 4:], **options)[0])


@pytest.mark.parametrize("piece", [2, 3, 5, 6])
def test_prompt_in_several_calls(model, piece):
    """The padding may be on either side. The last call may be one masked token."""
    ids = tokens(3, 6)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert model.generate(ids, prefill_chunk_size=piece, **options).equal(model.generate(ids, **options))


def test_saved_and_loaded_models_agree(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    loaded, report = GirihForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.config.to_dict()
    auto = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(auto) is GirihForCausalLM and type(loaded.config) is GirihConfig
    ids = tokens(2, 9)
    with torch.no_grad():
        expected = model(ids).logits
        assert loaded(ids).logits.equal(expected) and auto(ids).logits.equal(expected)
    for name, buffer in model.named_buffers():
        assert loaded.get_buffer(name).equal(buffer), name
    if model.config.tie_word_embeddings:
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_missing_weight_is_initialised_and_no_other_is_touched(model, tmp_path):
    model.save_pretrained(tmp_path, safe_serialization=True)
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "model.safetensors")
    missing = next(name for name in reversed(sorted(weights)) if "mixer" in name and "proj" not in name)
    del weights[missing]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = GirihForCausalLM.from_pretrained(tmp_path)
    for name, value in loaded.state_dict().items():
        assert value.isfinite().all()
        if name != missing:
            assert value.equal(model.state_dict()[name]), name


def test_checkpointing_leaves_gradients_as_they_are(model):
    ids = tokens(2, 9)
    model.train()
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in gradients[0].items():
        assert grad is not None and grad.any(), name
        close(gradients[1][name], grad, 1e-6)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_few_steps_at_1e_3_learn_a_sequence(name, bf16):
    torch.manual_seed(0)
    model = GirihForCausalLM(small(**MODELS[name]))
    ids = tokens(4, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(25):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] < math.log(32) + 1.0  # close to uniform; a tied head favours the last token
    assert losses[-1] < losses[0] - 0.5


def test_training_keeps_no_cache(model):
    ids = tokens(1, 5)
    assert model.train()(ids).past_key_values is None
    assert isinstance(model.eval()(ids).past_key_values, GirihCache)


def test_lower_bounds_of_hgrn2_rise_with_the_layer_in_mixtures_too():
    config = small(mixer=["hgrn2", "mag", "gsa", "hgrn2"], mag_mixer="hgrn2", num_hidden_layers=4)
    layers = GirihForCausalLM(config).model.layers
    found = [layers[0].mixer, layers[1].mixer.mixer, layers[3].mixer]
    assert [layer.lower_bound for layer in found] == [0.0, 0.25, 0.75]


def test_every_layer_receives_its_depth(monkeypatch):
    """set_depth also reaches modules inside a mixer."""

    class Deep(ShortConv):
        def set_depth(self, layer, num_layers):
            self.depth = layer, num_layers

    build = lambda config: torch.nn.Sequential(Deep(config.hidden_size), ShortConv(config.hidden_size))  # noqa: E731
    monkeypatch.setitem(MIXERS, "gsa", MIXERS["gsa"]._replace(build=build))
    layers = GirihForCausalLM(small(mixer="gsa", num_hidden_layers=3)).model.layers
    assert [layer.mixer[0].depth for layer in layers] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("running", [False, True])
def test_cat_as_a_layer_takes_its_positions_from_the_configuration(running):
    options = {"mixer": ["cat", "gsa"], "running_positions": running}
    layer = GirihForCausalLM(small(**options)).model.layers[0].mixer
    assert layer.attention.running_positions is running
    assert GirihConfig().running_positions is CompressAttend(16, 2).attention.running_positions


def test_weights_are_untied_on_request(tmp_path):
    model = GirihForCausalLM(small(tie_word_embeddings=False))
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight.equal(model.lm_head.weight)


def test_base_model_loads_from_a_language_model(tmp_path):
    model = GirihForCausalLM(small())
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is GirihModel
    ids = tokens(1, 5)
    with torch.no_grad():
        close(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
        close(base(inputs_embeds=base.embed_tokens(ids)).last_hidden_state, base(ids).last_hidden_state)


@torch.no_grad()
def test_a_cache_can_be_kept_for_another_continuation(model):
    from copy import deepcopy

    prompt, ends = tokens(1, 6), tokens(2, 3, seed=2)
    cache = model(prompt, use_cache=True).past_key_values
    for end in ends.split(1):
        logits = model(end, past_key_values=deepcopy(cache), use_cache=True).logits
        close(logits, model(torch.cat((prompt, end), 1)).logits[:, 6:])
    cache.batch_repeat_interleave(2)
    logits = model(ends, past_key_values=cache, use_cache=True).logits
    close(logits, model(torch.cat((prompt.expand(2, -1), ends), 1)).logits[:, 6:])


@torch.no_grad()
def test_cache_rows_are_repeated_and_selected(model):
    """generate() repeats rows for several sequences a prompt, then selects some rows."""
    prompts, ends = tokens(2, 6), tokens(4, 3, seed=2)
    cache = model(prompts, use_cache=True).past_key_values
    cache.batch_repeat_interleave(2)
    expected = model(torch.cat((prompts.repeat_interleave(2, 0), ends), 1)).logits[:, 6:]
    close(model(ends, past_key_values=cache, use_cache=True).logits, expected)
    cache.batch_select_indices(torch.tensor([3, 0]))
    more = tokens(2, 2, seed=3)
    whole = torch.cat((prompts[[1, 0]], ends[[3, 0]], more), 1)
    close(model(more, past_key_values=cache, use_cache=True).logits, model(whole).logits[:, 9:])
    assert cache.get_seq_length() == 11


def test_trains_under_a_schedule_of_the_mixture():
    """A mixer has gradients while its weight is not 0. The loss follows the weight of the step."""
    from girih.nn import MixAttention, mix_weight

    torch.manual_seed(0)
    model = GirihForCausalLM(small(mixer="mag", mag_weight=1.0))
    mixtures = [module for module in model.modules() if isinstance(module, MixAttention)]
    ids = tokens(4, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, shares = [], []
    for step in range(30):
        weight = mix_weight("gradual", step, final=0.5, first=0.0, steps=20)
        for mixture in mixtures:
            mixture.set_weight(weight)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        has_gradient = [
            any(p.grad is not None and p.grad.any() for p in part.parameters())
            for mixture in mixtures
            for part in (mixture.base, mixture.mixer)
        ]
        assert has_gradient == [True, weight > 0] * len(mixtures)
        optimizer.step()
        losses.append(loss.item())
        shares.append(mixtures[0].weight.item())
    assert shares[:3] == pytest.approx([0.0, 0.025, 0.05]) and shares[20:] == [0.5] * 10
    assert losses[-1] < losses[0] - 0.5
    before = model(ids, labels=ids).loss.item()
    for mixture in mixtures:
        mixture.set_weight(0.0)
    assert abs(model(ids, labels=ids).loss.item() - before) > 0.01


def test_names_of_transformers_are_aliases():
    config = GirihConfig(hidden_size=64, num_heads=8, num_kv_heads=4)
    aliased = GirihConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=4)
    assert aliased.to_dict() == config.to_dict() and aliased.head_dim == 8
    assert GirihConfig(hidden_size=64, num_heads=8, num_attention_heads=8).num_heads == 8
    for number in (8, 4):  # 4 is the default
        with pytest.raises(ValueError, match=f"num_heads is {number} and num_attention_heads is 2"):
            GirihConfig(hidden_size=64, num_heads=number, num_attention_heads=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixer": "mamba3"}, "mixer is 'mamba3'; expected one of abc, attention"),
        ({"mixer": ["gsa"]}, "mixer names 1 layers; expected num_hidden_layers, 2"),
        ({"mixer": ["gsa"] * 3}, "mixer names 3 layers; expected num_hidden_layers, 2"),
        ({"mixer": ["gsa", "lstm"]}, "mixer is 'lstm'"),
        ({"mixer": "mag", "mag_mixer": "mag"}, "mag_mixer is 'mag'"),
        ({"hidden_size": 33}, "num_heads is 2, which does not divide hidden_size 33"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads is 3; expected a divisor of num_heads 4"),
        ({"num_kv_heads": 1, "mixer": "trellis"}, "num_kv_heads is 1; trellis"),
        ({"num_heads": 0}, "num_heads is 0; expected 1 to "),
        ({"num_kv_heads": 0}, "num_kv_heads is 0; expected 1 to "),
        ({"head_dim": 0}, "head_dim is 0; expected 1 to "),
        (
            {"mag_learned": True, "mag_weight": 1.0, "mixer": "mag"},
            "mag_weight is 1; expected a number between",
        ),
        ({"chunk": 65, "mixer": "lattice"}, "chunk is 65; expected 1 to 64"),
        ({"chunk": 1, "mixer": "cat"}, "chunk is 1; expected 2 to 256"),
        ({"head_dim": 15, "mixer": "attention"}, "head_dim is 15"),
        ({"phi": "tanh"}, "phi is 'tanh'; expected one of identity"),
        ({"f": "tanh"}, "f is 'tanh'"),
        ({"objective": "mse"}, "objective is 'mse'"),
        ({"feature": "gelu"}, "feature is 'gelu'"),
        ({"between_chunks": "relu"}, "between_chunks is 'relu'"),
        ({"mixer": "cat", "compressor_hidden_size": 24}, "compressor_hidden_size is 24"),
    ],
)
def test_invalid_configuration_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GirihConfig(**{"hidden_size": 32, "num_heads": 2, "num_hidden_layers": 2} | options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model, ids: model(), "input_ids, inputs_embeds"),
        (
            lambda model, ids: model(ids, attention_mask=torch.ones(1, 1, 5, 5)),
            "attention_mask has 4 dimensions",
        ),
        (lambda model, ids: model(ids, attention_mask=torch.ones(1, 3)), "attention_mask covers 3 tokens"),
        (lambda model, ids: model(ids, attention_mask=torch.ones(2, 5)), "attention_mask has shape"),
        (lambda model, ids: model(ids, cu_seqlens=torch.tensor([[0, 5]])), "cu_seqlens has shape"),
        (lambda model, ids: model(ids, past_key_values=object()), "cache has type object"),
        (
            lambda model, ids: model.generate(ids, cache_implementation="static", max_new_tokens=2),
            "cache_implementation",
        ),
    ],
)
def test_invalid_call_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(GirihForCausalLM(small()), tokens(1, 5))


def test_cat_refuses_unsupported_calls():
    model = GirihForCausalLM(small(mixer="cat"))
    for call in (
        {"input_ids": tokens(1, 65)},
        {"input_ids": tokens(1, 65), "attention_mask": torch.ones(1, 65)},
        {"input_ids": tokens(1, 1), "past_key_values": model(tokens(1, 64), use_cache=True).past_key_values},
    ):
        with pytest.raises(ValueError, match="has 65 tokens; expected at most max_position_embeddings, 64"):
            model(**call)
    with pytest.raises(ValueError, match="CAT has no cache for packed sequences"):
        model(tokens(1, 5), cu_seqlens=torch.tensor([0, 2, 5]), use_cache=True)
    with pytest.raises(ValueError, match="inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 3, 32))
    with pytest.raises(ValueError, match="CatModel"):
        GirihModel(small(mixer="cat"))


@torch.no_grad()
def test_a_cache_has_two_names(model):
    """Calls accept both names. Outputs use the name of the installed transformers."""
    name = "cache" if version.parse(transformers.__version__) >= version.parse("5.24") else "past_key_values"
    ids = tokens(2, 9)
    whole = model(ids)
    assert type(whole[name]) is GirihCache
    for keyword in ("cache", "past_key_values"):
        start = model.new_cache()
        first = model(ids[:, :5], **{keyword: start})
        assert first[name] is start and start.get_seq_length() == 5
        close(model(ids[:, 5:], **{keyword: start.checkpoint()}).logits, whole.logits[:, 5:])
        text = model.generate(ids, **{keyword: start.checkpoint()}, max_new_tokens=4, do_sample=False)
        assert text.equal(model.generate(ids, max_new_tokens=4, do_sample=False))
    for call in (model, model.model):
        with pytest.raises(ValueError, match="cache, past_key_values: two names"):
            call(ids, cache=model.new_cache(), past_key_values=model.new_cache())


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("new", [1, 5])
def test_cache_of_another_batch_size_is_refused_and_unchanged(model, rows, new):
    ids = tokens(3, 14)
    cache = model.new_cache()
    model(ids[:, :9], cache=cache)
    with pytest.raises(ValueError, match="state"):
        model(tokens(rows, new, seed=2), cache=cache)
    close(model(ids[:, 9:], cache=cache).logits, model(ids).logits[:, 9:])


def test_sequence_classification(model, tmp_path):
    """The logits of a sequence come from its last token, as in the models of transformers."""
    model.save_pretrained(tmp_path)
    options = {"num_labels": 3, "pad_token_id": 0}
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, **options).eval()
    assert type(classifier) is GirihForSequenceClassification
    ids = tokens(2, 9)
    ids[1, 6:] = 0
    mask = (ids != 0).long()
    output = classifier(ids, attention_mask=mask, labels=torch.tensor([2, 0]))
    x = model.model(ids, attention_mask=mask).last_hidden_state
    want = classifier.score(x[torch.arange(2), torch.tensor([8, 5])])
    close(output.logits, want)
    close(output.loss, F.cross_entropy(want, torch.tensor([2, 0])))
    output.loss.backward()
    assert all(p.grad is not None for p in classifier.parameters())
    classifier.save_pretrained(tmp_path / "classifier")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier").eval()
    close(again(ids, attention_mask=mask).logits, want, 1e-6)


def test_from_pretrained_with_a_state_dict(model):
    again = GirihForCausalLM.from_pretrained(None, config=model.config, state_dict=model.state_dict()).eval()
    ids = tokens(2, 9)
    close(again(ids).logits, model(ids).logits, 0.0)


@torch.no_grad()
@pytest.mark.parametrize("first", [True, False], ids=["in autocast", "outside"])
@pytest.mark.parametrize("later", [True, False], ids=["in autocast", "outside"])
@pytest.mark.parametrize("new", [1, 5])
def test_cache_inside_and_outside_autocast(model, first, later, new):
    ids, cache = tokens(3, 19), model.new_cache()
    logits = []
    for i, part in enumerate(ids.split([9, *[new] * (10 // new)], 1)):
        with torch.autocast("cpu", torch.bfloat16, enabled=later if i else first):
            logits.append(model(part, cache=cache).logits.float())
    want = model(ids).logits
    assert (torch.cat(logits, 1) - want).norm() < 0.1 * want.norm()


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_cache_of_inference_mode_continues_in_other_modes(model, mode, new):
    ids, cache = tokens(3, 14), model.new_cache()
    want = model(ids).logits[:, 9:]
    with torch.inference_mode():
        model(ids[:, :9], cache=cache)
    with mode():
        logits = torch.cat([model(part, cache=cache).logits for part in ids[:, 9:].split(new, 1)], 1)
    close(logits, want)
    if logits.requires_grad:
        logits.square().sum().backward()


@pytest.mark.parametrize("size", [40, 20])
def test_a_vocabulary_is_resized(model, size, tmp_path):
    ids = tokens(2, 9) % 16
    want = model(ids).logits
    model.resize_token_embeddings(size)
    assert model.config.vocab_size == size
    found = model(ids).logits
    close(found[..., :20], want[..., :20])
    new = torch.full((2, 9), size - 1)
    logits = model(new).logits
    assert logits.shape == (2, 9, size) and logits.isfinite().all()
    model.save_pretrained(tmp_path)
    close(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(new).logits, logits, 0.0)
    padded = model.resize_token_embeddings(size + 1, pad_to_multiple_of=8)
    assert padded.num_embeddings % 8 == 0 and model(new + 1).logits.shape[-1] == padded.num_embeddings


@torch.no_grad()
@pytest.mark.parametrize("mixer", [["gsa", "deltanet"], ["attention", "gsa"], ["mag", "cat"]], ids=str)
def test_a_model_checks_the_states_of_all_layers_before_it_writes(mixer):
    config = GirihConfig(vocab_size=17, hidden_size=32, num_hidden_layers=2, num_heads=2, mixer=mixer)
    model, ids = GirihForCausalLM(config).eval(), torch.randint(17, (2, 6))
    cache = model.new_cache()
    model(ids, cache=cache)
    for i, layer in enumerate(cache.layers):
        saved = layer.state
        for wrong, message in (
            (None, f"state of layer {i} is missing; pass the state"),
            (map_state(lambda part: part[:1], saved), "state has 1 sequences; expected 2"),
        ):
            layer.state = wrong
            parts = []
            map_state(parts.append, tuple(each.state for each in cache.layers))
            before = [part.clone() for part in parts]
            for tokens in (1, 2):
                with pytest.raises(ValueError, match=message):
                    model(ids[:, :tokens], cache=cache)
            assert all(now.equal(old) for now, old in zip(parts, before, strict=True))
            assert [each.tokens for each in cache.layers] == [6, 6]
            layer.state = saved
    model(ids[:, :1], cache=cache)
