"""Rollback of tokens: checkpoints of a cache, cropping, assisted decoding and prompt lookup."""

import pytest
import torch
from girih.models import MIXERS, GirihForCausalLM
from small_models import config_of

MODELS = {name: {"mixer": name} for name in MIXERS} | {
    "hybrid": {"mixer": ["gsa", "attention", "delta_product"], "num_hidden_layers": 3},
    "between_chunks": {"mixer": "delta_product", "chunk": 4, "between_chunks": "gelu"},
}
SIZES = {
    "vocab_size": 11,
    "hidden_size": 32,
    "num_heads": 2,
    "num_slots": 8,
    "num_hidden_layers": 2,
    "chunk": 8,
}


def model_of(name, seed=0):
    """In double precision, so that several calls and one call choose the same tokens."""
    torch.manual_seed(seed)
    # Weights larger than the training default, so that the logits depend on the past.
    config = config_of(**SIZES | MODELS[name], initializer_range=0.2)
    return GirihForCausalLM(config).double().eval()


def tokens(B, T, seed=0):
    return torch.randint(SIZES["vocab_size"], (B, T), generator=torch.Generator().manual_seed(seed))


def tensors(state):
    if isinstance(state, torch.Tensor):
        return [state]
    return [x for part in state for x in tensors(part)] if isinstance(state, tuple) else []


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


@pytest.fixture(params=MODELS)
def model(request):
    return model_of(request.param)


@torch.no_grad()
@pytest.mark.parametrize("further", [1, 7, 64, 65])
def test_a_restored_cache_equals_its_checkpoint(model, further):
    prompt, others, rest = tokens(2, 19), tokens(2, further, seed=1), tokens(2, 5, seed=2)
    cache = model(prompt, use_cache=True).past_key_values
    checkpoint = cache.checkpoint()
    saved = [x.clone() for x in tensors(tuple(layer.state for layer in checkpoint.layers))]
    expected = model(rest, past_key_values=checkpoint.checkpoint()).logits
    for _ in range(2):
        for part in others.split([1, further - 1] if further > 1 else [1], 1):
            model(part, past_key_values=cache)
        assert cache.restore(checkpoint).get_seq_length() == 19
        assert model(rest, past_key_values=cache).logits.equal(expected)
        assert cache.get_seq_length() == 24
        cache.restore(checkpoint)
    now = tensors(tuple(layer.state for layer in checkpoint.layers))
    assert all(a.equal(b) for a, b in zip(saved, now, strict=True))


@torch.no_grad()
@pytest.mark.parametrize(
    "calls, wrong",
    [((9,), 0), ((9,), 9), ((1, 1, 1), 1), ((1, 1, 1), 3), ((4, 1, 3), 5), ((100,), 65), ((70, 2), 40)],
)
def test_a_cropped_cache_continues_from_the_right_tokens(model, calls, wrong):
    length = sum(calls)
    prompt, others, rest = tokens(2, 7), tokens(2, length, seed=1), tokens(2, 4, seed=2)
    cache = model(prompt, use_cache=True).past_key_values
    cache.activate_past_recording()
    for part in others.split(calls, 1):
        model(part, past_key_values=cache)
    cache.crop(-wrong)
    assert cache.get_seq_length() == 7 + length - wrong
    text = torch.cat((prompt, others[:, : length - wrong], rest), 1)
    expected = model(text, use_cache=False).logits
    # One token is read and rolled back first.
    close(model(rest[:, :1], past_key_values=cache).logits, expected[:, -4:-3])
    cache.crop(-1)
    close(model(rest, past_key_values=cache).logits, expected[:, -4:])


@torch.no_grad()
def test_rollback_of_tokens_read_with_a_mask(model):
    text = tokens(2, 12)
    valid = torch.ones(2, 12, dtype=torch.long)
    valid[0, :3] = 0
    cache = model(text[:, :5], attention_mask=valid[:, :5], use_cache=True).past_key_values
    cache.activate_past_recording()
    model(text[:, 5:10], attention_mask=valid[:, :10], past_key_values=cache)
    cache.crop(-3)
    logits = model(text[:, 7:], past_key_values=cache).logits
    expected = model(text, attention_mask=valid, use_cache=False).logits
    close(logits, expected[:, 7:])


@torch.no_grad()
def test_cropped_cache_selects_rows(model):
    text = tokens(2, 12)
    cache = model(text[:, :5], use_cache=True).past_key_values
    cache.activate_past_recording()
    model(text[:, 5:10], past_key_values=cache)
    cache.crop(-2)
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    close(
        model(text[[1, 0, 1], 8:], past_key_values=cache).logits,
        model(text, use_cache=False).logits[[1, 0, 1], 8:],
    )


def test_impossible_rollbacks_are_refused():
    model = model_of("gsa")
    with torch.no_grad():
        cache = model(tokens(1, 5), use_cache=True).past_key_values
        with pytest.raises(ValueError, match="cannot be cropped"):
            cache.crop(-1)
        cache.activate_past_recording()
        with pytest.raises(ValueError, match="at most the 0 tokens since the last crop"):
            cache.crop(-1)
        model(tokens(1, 3), past_key_values=cache)
        with pytest.raises(ValueError, match="at most the 3 tokens"):
            cache.crop(-4)
        with pytest.raises(ValueError, match="tokens_to_remove is 2"):
            cache.crop(2)
        with pytest.raises(ValueError, match="cu_seqlens"):
            model(tokens(1, 3), past_key_values=cache, cu_seqlens=torch.tensor([0, 1, 3]))
        with pytest.raises(ValueError, match="checkpoint has 3 layers; expected 2"):
            cache.restore(model_of("hybrid")(tokens(1, 2), use_cache=True).past_key_values)


def generate_text(model, prompt, **options):
    return model.generate(prompt, max_new_tokens=24, do_sample=False, **options)


def test_assisted_decoding_writes_the_same_tokens(model, request):
    """One assistant is nearly the same model and often right; the other is seldom right."""
    prompt = tokens(1, 9)
    expected = generate_text(model, prompt)
    name = request.node.callspec.params["model"]
    near = model_of(name)
    for parameter in near.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    for assistant in (near, model_of("gsa", seed=1)):
        calls = []
        hook = model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        assert generate_text(model, prompt, assistant_model=assistant).equal(expected)
        hook.remove()
        if assistant is near:
            assert len(calls) < 24  # some tokens were accepted


def test_prompt_lookup_writes_the_same_tokens(model):
    prompt = tokens(1, 6).repeat(1, 15)  # 90 tokens: a call in two parts
    assert generate_text(model, prompt, prompt_lookup_num_tokens=4).equal(generate_text(model, prompt))


def test_two_prompts_that_share_their_start_read_it_once():
    model = model_of("gsa")
    shared, ends = tokens(1, 60), tokens(2, 4, seed=1)
    with torch.no_grad():
        start = model(shared, use_cache=True).past_key_values
    read = []
    hook = model.model.embed_tokens.register_forward_hook(lambda _, ids, __: read.append(ids[0].shape[1]))
    for end in ends.split(1):
        prompt = torch.cat((shared, end), 1)
        text = generate_text(model, prompt, past_key_values=start.checkpoint())
        assert read[0] == 4 and set(read[1:]) == {1}
        read.clear()
        assert text.equal(generate_text(model, prompt))
        read.clear()
    hook.remove()


def test_rollback_of_many_tokens_does_not_read_the_prompt_each_time():
    model, prompt = model_of("gsa"), tokens(1, 8).repeat(1, 50)
    read = []
    mixer = model.model.layers[0].mixer
    hook = mixer.register_forward_pre_hook(lambda _, args: read.append(args[0].shape[1]))
    text = generate_text(model, prompt, prompt_lookup_num_tokens=100)
    hook.remove()
    assert text.equal(generate_text(model, prompt))
    assert sum(n > 250 for n in read) <= 3


def test_cache_of_assisted_decoding_continues_without_assistant():
    model, prompt = model_of("hybrid"), tokens(1, 9)
    text = generate_text(model, prompt, assistant_model=model_of("gsa", seed=1), return_dict_in_generate=True)
    cache = text.past_key_values
    more = torch.cat((text.sequences, tokens(1, 2, seed=3)), 1)
    assert generate_text(model, more, past_key_values=cache).equal(generate_text(model, more))
    assert not any(layer.calls for layer in cache.layers)


@torch.no_grad()
def test_failed_call_leaves_the_cache_unchanged():
    model = model_of("cat")
    limit = model.config.max_position_embeddings = 80
    cache = model(tokens(1, 10), use_cache=True).past_key_values
    cache.activate_past_recording()
    model(tokens(1, 6, seed=1), past_key_values=cache)
    cache.crop(-2)
    with pytest.raises(ValueError, match="max_position_embeddings"):
        model(tokens(1, limit), past_key_values=cache)
    rest = tokens(1, 5, seed=2)
    whole = torch.cat((tokens(1, 10), tokens(1, 6, seed=1)[:, :4], rest), 1)
    close(model(rest, past_key_values=cache).logits, model(whole, use_cache=False).logits[:, -5:])


@torch.no_grad()
def test_cat_keeps_its_chunk_length_after_a_rollback():
    torch.manual_seed(0)
    config = config_of(**SIZES | {"mixer": "cat", "chunks": [4, 8]}, initializer_range=0.2)
    model = GirihForCausalLM(config).double().eval()
    cache, text = model.new_cache(), tokens(1, 24)
    cache.activate_past_recording()
    model(text[:, :20], past_key_values=cache, chunk=4)
    cache.crop(-3)
    logits = model(text[:, 17:], past_key_values=cache).logits
    close(logits, model(text, use_cache=False, chunk=4).logits[:, 17:])


@torch.no_grad()
def test_a_restored_cache_has_the_chunk_length_of_its_checkpoint():
    """The checkpoint is restored into a cache of another chunk length and into a new cache, with and without
    tokens."""
    torch.manual_seed(0)
    config = config_of(**SIZES | {"mixer": "cat", "chunks": [4, 8]}, initializer_range=0.2)
    model = GirihForCausalLM(config).double().eval()
    text = tokens(1, 24)
    for length in (0, 17):
        cache, other = model.new_cache(), model.new_cache()
        model(text[:, :length], past_key_values=cache, chunk=4)
        model(text[:, :5], past_key_values=other, chunk=8)
        checkpoint = cache.checkpoint()
        assert checkpoint.layers[0].chunk == 4
        for restored in (other.restore(checkpoint), checkpoint.checkpoint()):
            assert restored.layers[0].chunk == 4
            logits = [model(part, past_key_values=restored).logits for part in text[:, length:].split(1, 1)]
            close(torch.cat(logits, 1), model(text, use_cache=False, chunk=4).logits[:, length:])
        assert model.new_cache().restore(model.new_cache()).layers[0].chunk is None
    # A cache that is rolled back to its start keeps its chunk length.
    cache = model.new_cache()
    cache.activate_past_recording()
    model(text[:, :3], past_key_values=cache, chunk=4)
    cache.crop(-3)
    restored = model.new_cache().restore(cache)
    close(model(text, past_key_values=restored).logits, model(text, use_cache=False, chunk=4).logits)


@torch.no_grad()
def test_call_without_tokens():
    model = model_of("gsa")
    cache = model(tokens(1, 5), use_cache=True).past_key_values
    cache.activate_past_recording()
    model(tokens(1, 5), past_key_values=cache)
    cache.crop(-2)
    assert model(tokens(1, 0), past_key_values=cache).logits.shape == (1, 0, SIZES["vocab_size"])


def test_early_exit_is_refused():
    model = model_of("gsa")
    with pytest.raises(ValueError, match="assistant_early_exit"):
        generate_text(model, tokens(1, 5), assistant_early_exit=1)
    assert model.config.num_hidden_layers == 2
