"""Decoding steps run as CUDA graphs, and the generated text is the text without graphs.

On the CPU, GraphRecorder replaces torch.cuda.CUDAGraph. A replay runs the recorded operators again with the
tensors and numbers of the recording. As in the shared memory of CUDA graphs, a replay overwrites the outputs
of all other recorders.
"""

import copy
import gc
import itertools
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import needs_cuda
from girih.models import MIXERS, GirihForCausalLM, graph
from girih.nn import Attention
from girih.nn.functional.step import MAX_ROWS
from girih.nn.layers import attention
from small_models import config_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MODELS = {name: {"mixer": name} for name in MIXERS} | {
    "hybrid": {"mixer": ["gsa", "attention", "gated_deltanet"], "num_hidden_layers": 3},
    "grouped": {"mixer": ["attention", "gsa"], "num_heads": 4, "num_kv_heads": 2},
    "between_chunks": {"mixer": "delta_product", "chunk": 4, "between_chunks": "gelu"},
    "mag_with_convolutions": {"mixer": "mag", "mag_base": "attention", "mag_mixer": "trellis"},
    "adaptive_cat": {"mixer": "cat", "chunks": [4, 8]},
    "layers_of_cat": {"mixer": ["cat", "gsa"]},
    "window": {"mixer": "attention", "window": 5},
    "no_gate": {"mixer": "gsa", "data_dependent_decay": False},
    "trellis_options": {"mixer": "trellis", "shared_qk": True, "value_read": "phi", "post_norm": False},
    "lattice_options": {"mixer": "lattice", "chunk": 1, "normalize": False, "post_norm": True},
}
NEW = 30


def tensors(out):
    return [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]


class GraphRecorder(TorchDispatchMode):
    """Records operators, and undoes their writes to tensors that existed before the recording."""

    def __init__(self):
        super().__init__()
        self.calls, self.undo, self.new_storages = [], [], set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = function._schema
        if "is_nonzero" in schema.name or "_local_scalar_dense" in schema.name:
            raise RuntimeError("a graph tells the host nothing")
        arguments = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        for a in schema.arguments:
            if a.alias_info is not None and a.alias_info.is_write and arguments[a.name] is not None:
                tensor = arguments[a.name]
                if tensor.untyped_storage().data_ptr() not in self.new_storages:
                    self.undo.append((tensor, tensor.clone()))
        out = function(*args, **kwargs)
        aliases = [r.alias_info for r in schema.returns]
        fresh = [] if any(aliases) else tensors(out)
        self.new_storages |= {x.untyped_storage().data_ptr() for x in fresh}
        if not any(aliases) or any(alias is not None and alias.is_write for alias in aliases):
            self.calls.append((function, args, kwargs, fresh))  # all calls except views
        return out

    def overwrite_outputs(self):
        """Overwrite the outputs, as the replay of another graph does."""
        for *_, outs in self.calls:
            for x in outs:
                x.fill_(torch.nan if x.is_floating_point() else 1)

    def replay(self):
        for function, args, kwargs, outs in self.calls:
            new = function(*args, **kwargs)
            for x, y in zip(outs, tensors(new) if outs else [], strict=True):
                x.copy_(y)


@pytest.fixture
def graphs(monkeypatch, device):
    """Counts captures and replays of graphs. `off()` makes every step run without graphs. Replays call
    `before` and `after`."""
    counts = {"recorded": 0, "replayed": 0}
    on_device, can_capture, recorders = graph.record, graph.can_capture, []

    def record(call, stream):
        counts["recorded"] += 1
        if device == "cuda":
            replay = on_device(call, stream)
        else:
            recorder = GraphRecorder()
            try:
                with recorder:
                    call()
            finally:
                with torch.no_grad():
                    for tensor, before in reversed(recorder.undo):
                        tensor.copy_(before)
            recorders.append(weakref.ref(recorder))

            def replay():
                for other in [*recorders]:
                    if other() not in (None, recorder):
                        other().overwrite_outputs()
                recorder.replay()

        def counted_replay():
            graphs.before()
            counts["replayed"] += 1
            replay()
            graphs.after()

        return counted_replay

    class Graphs:
        recorded = property(lambda _: counts["recorded"])
        replayed = property(lambda _: counts["replayed"])
        before = after = staticmethod(lambda: None)

        def off(self, now=True):
            monkeypatch.setattr(
                graph, "can_capture", lambda x: not now and (device == "cpu" or can_capture(x))
            )

    monkeypatch.setattr(graph, "record", record)
    graphs = Graphs()
    graphs.off(False)
    return graphs


def model_of(name, device, **options):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 31,
        "hidden_size": 32,
        "num_heads": 2,
        "num_slots": 8,
        "num_hidden_layers": 2,
        "chunk": 8,
        "initializer_range": 0.2,  # larger than the training default, so that the logits depend on the past
    }
    model = GirihForCausalLM(config_of(**sizes | MODELS[name] | options)).eval()
    return model.to(device, torch.float64 if device == "cpu" else torch.float32)


@pytest.fixture(params=MODELS)
def model(request, device):
    return model_of(request.param, device)


@pytest.fixture
def hybrid(device):
    return model_of("hybrid", device)


def tokens(model, *shape, seed=1):
    ids = torch.randint(1, 31, shape, generator=torch.Generator().manual_seed(seed))
    return ids.to(model.device)


def generate_text(model, ids, **options):
    return model.generate(
        ids, **{"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "use_cache": True} | options
    )


def check_same_text(graphs, model, ids, **options):
    """Checks that the text is the same with and without graphs. Returns the number of replayed steps."""
    before = graphs.replayed
    text = generate_text(model, ids, **options)
    replayed = graphs.replayed - before
    graphs.off()
    expected = generate_text(model, ids, **options)
    graphs.off(False)
    assert text.equal(expected) and graphs.replayed == before + replayed
    return replayed


def expected_replays(model, lengths=(7,), new=NEW):
    """The prompt gives the first new token, and the first step of each kind runs eagerly. The kind of a CAT
    step is the number of chunks that end, rounded up to a power of two if the lengths differ."""
    kinds = set()
    if "cat" not in model.config.mixers:
        kinds.add(0)
    else:
        level, N = len({*lengths}) == 1, len(lengths)
        for t in range(1, new):
            count = sum((n + t) % model.config.chunk == 0 for n in lengths)
            kinds.add(min(N, 2 ** (count - 1).bit_length()) if count and not level else count)
    return new - 1 - len(kinds)


@pytest.mark.parametrize("batch", [1, 5])
def test_graphs_generate_the_same_text(graphs, model, batch):
    ids = tokens(model, batch, 7)
    assert check_same_text(graphs, model, ids) == expected_replays(model)
    text = ids
    with torch.no_grad():
        for _ in range(NEW):
            text = torch.cat((text, model(text, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    assert generate_text(model, ids).equal(text)


def test_padded_prompts(graphs, model):
    ids, lengths = tokens(model, 3, 7), (7, 3, 1)
    mask = torch.stack([torch.arange(7) >= 7 - n for n in lengths]).long().to(model.device)
    assert check_same_text(graphs, model, ids, attention_mask=mask) == expected_replays(model, lengths)


def test_beam_search(graphs, model):
    replayed = check_same_text(graphs, model, tokens(model, 2, 7), num_beams=3, num_return_sequences=2)
    assert replayed == expected_replays(model)


def test_sampling(graphs, model):
    def sample():
        torch.manual_seed(5)
        return generate_text(model, tokens(model, 2, 7), do_sample=True, top_k=10)

    text = sample()
    assert graphs.replayed == expected_replays(model)
    graphs.off()
    assert sample().equal(text)


def test_a_prompt_of_one_token_and_of_pieces(graphs, model):
    check_same_text(graphs, model, tokens(model, 2, 1))
    check_same_text(graphs, model, tokens(model, 2, 9), prefill_chunk_size=4)


def test_inference_mode(graphs, hybrid):
    with torch.inference_mode():
        assert check_same_text(graphs, hybrid, tokens(hybrid, 2, 7)) == NEW - 2
        Steps(hybrid).take(5)


def test_assisted_decoding_uses_no_graphs(graphs, hybrid):
    ids = tokens(hybrid, 1, 9)
    text = generate_text(hybrid, ids)
    before = graphs.replayed
    assert generate_text(hybrid, ids, prompt_lookup_num_tokens=4).equal(text)
    assert generate_text(hybrid, ids, assistant_model=hybrid).equal(text)
    assert graphs.replayed == before == NEW - 2


@pytest.mark.parametrize("name", ["attention", "hybrid", "grouped"])
@pytest.mark.parametrize("way", [{}, {"num_beams": 2}], ids=str)
def test_cache_grows_when_full(graphs, name, way, device, monkeypatch):
    """A larger cache has new tensors, so the step is captured again."""
    monkeypatch.setattr(attention, "choose_capacity", lambda n: n + 8)
    model = model_of(name, device)
    assert 0 < check_same_text(graphs, model, tokens(model, 2, 7), **way) < NEW - 6
    assert graphs.recorded == 4


@pytest.mark.parametrize("name", ["cat", "layers_of_cat"])
@pytest.mark.parametrize("padded", [False, True])
def test_cat_cache_grows_when_full(graphs, name, device, padded):
    """A cache has room for 16 headers."""
    model = model_of(name, device, chunk=2)
    mask = torch.ones(2, 7, dtype=torch.long, device=device)
    mask[0, :3] = not padded
    replayed = check_same_text(graphs, model, tokens(model, 2, 7), attention_mask=mask, max_new_tokens=60)
    assert 45 < replayed < 60 - 1 - 2 * 2


@pytest.mark.parametrize("name", ["cat", "layers_of_cat"])
def test_cat_sequences_at_every_position_of_a_chunk(graphs, name, device):
    """One graph serves all steps with the same number of ending chunks, in any sequences, also after beams
    move."""
    model, lengths = model_of(name, device), range(1, 10)
    mask = torch.stack([torch.arange(9) >= 9 - n for n in lengths]).long().to(device)
    ids = tokens(model, len(lengths), 9)
    assert check_same_text(graphs, model, ids, attention_mask=mask) == expected_replays(model, lengths)
    assert check_same_text(graphs, model, ids, attention_mask=mask, num_beams=2) > 0
    text = generate_text(model, ids, attention_mask=mask)
    for n, padded, row in zip(lengths, ids, text, strict=True):
        assert row[9:].equal(generate_text(model, padded[None, 9 - n :])[0, n:])


@pytest.mark.parametrize("name", ["cat", "layers_of_cat"])
@torch.no_grad()
def test_a_cache_of_equal_lengths_is_restored_to_others(graphs, name, device):
    """A graph for equal lengths does not check which chunks have ended."""
    model, ids = model_of(name, device), tokens(model_of(name, device), 4, 8)
    mask = torch.ones(4, 8, dtype=torch.long, device=device)
    mask[3, :3] = 0
    padded = model.new_cache()
    model(ids, attention_mask=mask, past_key_values=padded)
    cache = model.new_cache()
    model(ids, past_key_values=cache)
    for t in range(17):
        model(tokens(model, 4, 1, seed=t), past_key_values=cache)
    cache.restore(padded)
    for t in range(17):
        token = tokens(model, 4, 1, seed=t)
        found = model(token, past_key_values=cache).logits
        graphs.off()
        want = model(token, past_key_values=padded).logits
        graphs.off(False)
        torch.testing.assert_close(found, want)


def test_texts_in_sequence_and_in_turn(graphs, model):
    """Texts of different batch sizes in sequence, then two caches of one model in turn."""
    for batch in (2, 1, 2):
        check_same_text(graphs, model, tokens(model, batch, 7, seed=batch))
    prompts = [tokens(model, 2, 7, seed=seed) for seed in (1, 2)]
    expected = [generate_text(model, ids)[:, 7:] for ids in prompts]
    with torch.no_grad():
        outputs = [model(ids, use_cache=True) for ids in prompts]
        ids = [output.logits[:, -1:].argmax(-1) for output in outputs]
        texts = [[first] for first in ids]
        for _ in range(NEW - 1):
            for text, output in zip(texts, outputs, strict=True):
                logits = model(text[-1], past_key_values=output.past_key_values).logits
                text.append(logits.argmax(-1))
    assert all(torch.cat(text, 1).equal(e) for text, e in zip(texts, expected, strict=True))


def test_texts_of_several_threads(graphs, hybrid):
    """The threads share one stream and one memory pool."""
    graphs.after = lambda: time.sleep(1e-3)
    steps = [Steps(hybrid, prompt=n) for n in (7, 8, 9)]
    with ThreadPoolExecutor(len(steps)) as threads:
        for future in [threads.submit(one.take, 15) for one in steps]:
            future.result()
    assert graphs.replayed == 3 * 14


class Steps:
    """Generates token by token, and compares the logits with a forward of the whole text."""

    def __init__(self, model, batch=2, prompt=7):
        self.model, self.text = model, tokens(model, batch, prompt)
        with torch.no_grad():
            self.cache = model(self.text, use_cache=True).past_key_values

    @torch.no_grad()
    def take(self, count=1, **options):
        for _ in range(count):
            token = tokens(self.model, self.text.shape[0], 1, seed=self.text.shape[1])
            self.text = torch.cat((self.text, token), 1)
            output = self.model(token, past_key_values=self.cache, **options)
            self.check(output.logits)
        return output

    def check(self, logits):
        with torch.no_grad():
            expected = self.model(self.text, use_cache=False).logits[:, -logits.shape[1] :]
        tolerance = 1e-7 if logits.dtype == torch.float64 else 1e-3
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=tolerance)
        assert self.cache.get_seq_length() == self.text.shape[1]


def test_step_does_not_overwrite_earlier_outputs(graphs, hybrid):
    steps = Steps(hybrid)
    first = steps.take(3)
    saved = first.logits.clone()
    steps.take(2)
    assert first.logits.equal(saved) and graphs.replayed == 4
    with torch.no_grad():
        states = [hybrid.model(tokens(hybrid, 2, 1), past_key_values=steps.cache)[0] for _ in range(2)]
    assert not states[0].equal(states[1])


def test_a_cache_is_restored_and_copied_between_steps(graphs, model):
    steps = Steps(model)
    steps.take(4)
    checkpoint, text, copied = steps.cache.checkpoint(), steps.text, copy.deepcopy(steps.cache)
    steps.take(5)
    for cache in (checkpoint.checkpoint(), copied):
        other = Steps(model)
        other.cache, other.text = cache, text
        other.take(5)
    steps.cache.restore(checkpoint)
    steps.text = text
    before = graphs.replayed
    steps.take(4)
    if expected_replays(model) == NEW - 2:
        assert graphs.replayed == before + 4


def test_other_graphs_do_not_overwrite_the_cache(graphs, model):
    """The first token after the prompt is rolled back, so the next step is captured. Other graphs run in
    between."""
    steps, other = Steps(model), Steps(model, prompt=5)
    checkpoint, text = steps.cache.checkpoint(), steps.text
    steps.take()
    steps.cache.restore(checkpoint)
    steps.text = text
    steps.take(2)
    other.take(5)
    steps.take(output_hidden_states=True)
    steps.take(3)


def test_cache_is_reordered_outside_inference_mode(graphs, hybrid):
    steps = Steps(hybrid)
    with torch.inference_mode():
        steps = Steps(hybrid)
        steps.take(4)
    order = torch.tensor([1, 0], device=hybrid.device)
    steps.cache.reorder_cache(order)
    steps.text = steps.text[order]
    steps.take(4)
    assert graphs.replayed == 3 + 3


def test_reset_cache_frees_its_state(graphs, hybrid):
    steps = Steps(hybrid)
    steps.take(4)
    keys = weakref.ref(steps.cache.layers[1].state.k)
    steps.cache.reset()
    gc.collect()
    assert keys() is None
    with torch.no_grad():
        hybrid(steps.text, past_key_values=steps.cache)
    assert replayed(graphs, steps, 4) == 3


def test_cache_does_not_keep_the_model_alive(graphs, device):
    model = model_of("hybrid", device)
    steps = Steps(model)
    steps.take(4)
    cache, base_model = steps.cache, weakref.ref(model.model)
    assert cache.steps.graphs and cache.steps.snapshot is not None
    del model, steps
    gc.collect()
    assert base_model() is None and not cache.steps.graphs and cache.steps.snapshot is None
    other = model_of("hybrid", device)
    with torch.no_grad():
        assert other(tokens(other, 2, 1), past_key_values=cache).logits.isfinite().all()


def test_calls_of_several_tokens_between_steps(graphs, model):
    steps = Steps(model)
    for more in (3, 1, 20):
        steps.take(4)
        ids = tokens(model, 2, more, seed=more)
        steps.text = torch.cat((steps.text, ids), 1)
        with torch.no_grad():
            steps.check(model(ids, past_key_values=steps.cache).logits)
    steps.take(4)


def test_cache_rows_are_repeated_and_selected(graphs, model):
    steps = Steps(model)
    steps.take(4)
    steps.cache.batch_repeat_interleave(2)
    steps.text = steps.text.repeat_interleave(2, 0)
    steps.take(4)
    order = torch.tensor([2, 0, 1], device=model.device)
    steps.cache.batch_select_indices(order)
    steps.text = steps.text[order]
    steps.take(4)


def replayed(graphs, steps, count=1, **options):
    before = graphs.replayed
    steps.take(count, **options)
    return graphs.replayed - before


def test_calls_without_graph_support_run_eagerly(graphs, hybrid):
    steps = Steps(hybrid)
    steps.take(2)
    assert replayed(graphs, steps) == 1
    assert replayed(graphs, steps, output_hidden_states=True) == 0
    hybrid.train()
    assert replayed(graphs, steps) == 0
    hybrid.eval()
    assert replayed(graphs, steps) == 1
    with torch.autograd.graph.save_on_cpu(), NoOpDispatchMode():
        assert replayed(graphs, steps) == 0
    assert replayed(graphs, steps) == 1
    mask = torch.ones(2, steps.text.shape[1] + 1, dtype=torch.long, device=hybrid.device)
    assert replayed(graphs, steps, attention_mask=mask) == 0
    assert replayed(graphs, steps, 3) == 2
    with torch.enable_grad():
        token = tokens(hybrid, 2, 1)
        output = hybrid(token, past_key_values=steps.cache)
        assert output.logits.requires_grad
        output.logits.sum().backward()


class NoOpDispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.model.layers[1].mixer.register_forward_hook(lambda *_: None),
        lambda model: setattr(model.model.layers[0].mlp, "forward", model.model.layers[0].mlp.forward),
        lambda model: setattr(model.model.layers[1], "mixer", copy.deepcopy(model.model.layers[1].mixer)),
        lambda model: setattr(
            model.model.layers[2].mlp.up_proj,
            "weight",
            torch.nn.Parameter(model.model.layers[2].mlp.up_proj.weight * 2),
        ),
        lambda model: setattr(model.model.norm.weight, "data", torch.randn_like(model.model.norm.weight) + 1),
        lambda model: setattr(
            model.model.layers[1].mixer.o_proj.weight,
            "data",
            model.model.layers[1].mixer.o_proj.weight.data.t(),
        ),
    ],
    ids=["hook", "forward", "module", "weight", "data", "transposed"],
)
def test_changes_of_the_model_take_effect(graphs, hybrid, change):
    steps = Steps(hybrid)
    assert replayed(graphs, steps, 4) == 3
    change(hybrid)
    # the old cache holds keys from before the change, so only a new text can be checked
    steps_alone = Steps(hybrid)
    steps_alone.take(4)
    with torch.no_grad():
        token = tokens(hybrid, 2, 1)
        checkpoint = steps.cache.checkpoint()
        found = hybrid(token, past_key_values=steps.cache).logits
        graphs.off()
        assert hybrid(token, past_key_values=checkpoint).logits.equal(found)


def test_hook_disables_graphs_until_removed(graphs, hybrid):
    steps, seen = Steps(hybrid), []
    steps.take()
    hook = hybrid.model.norm.register_forward_hook(lambda *_: seen.append(1))
    assert replayed(graphs, steps, 2) == 0 and len(seen) == 4  # the reference forwards make two of the calls
    hook.remove()
    assert replayed(graphs, steps, 4) >= 3


def test_failed_step_leaves_the_cache_unchanged(graphs, hybrid, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    steps = Steps(hybrid)
    steps.take()
    for place, name in ((Attention, "step"), (graphs, "before")):  # during the capture; at the first replay
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), torch.no_grad():
            patch.setattr(place, name, fail)
            hybrid(tokens(hybrid, 2, 1), past_key_values=steps.cache)
        assert steps.cache.get_seq_length() == steps.text.shape[1]
        steps.take()
    assert replayed(graphs, steps, 3) == 3


def test_in_place_weight_changes_reuse_the_graph(graphs, hybrid):
    steps = Steps(hybrid)
    steps.take(3)
    with torch.no_grad():
        hybrid.model.layers[0].mlp.up_proj.weight.mul_(2)
        checkpoint, token = steps.cache.checkpoint(), tokens(hybrid, 2, 1)
        before = graphs.replayed
        found = hybrid(token, past_key_values=steps.cache).logits
        assert graphs.replayed == before + 1
        graphs.off()
        assert hybrid(token, past_key_values=checkpoint).logits.equal(found)


class CountingAttention(Attention):
    """A module class of the user, which may do anything."""

    calls = 0

    def forward(self, *args, **kwargs):
        CountingAttention.calls += 1
        return super().forward(*args, **kwargs)


def test_user_modules_run_eagerly(graphs, hybrid):
    mixer = hybrid.model.layers[1].mixer
    mixer.__class__, CountingAttention.calls = CountingAttention, 0
    text = generate_text(hybrid, tokens(hybrid, 2, 7))
    assert graphs.replayed == 0 and CountingAttention.calls == NEW
    mixer.__class__ = Attention
    assert generate_text(hybrid, tokens(hybrid, 2, 7)).equal(text)


def test_step_that_cannot_be_captured_runs_eagerly(graphs, hybrid, monkeypatch):
    step = Attention.step
    calls = itertools.count()

    def read_on_host(self, qkv, state, now):
        next(calls)
        state.place[0].item()
        return step(self, qkv, state, now)

    monkeypatch.setattr(Attention, "step", read_on_host)
    with pytest.warns(UserWarning, match="a decoding step cannot be captured as a CUDA graph"):
        text = generate_text(hybrid, tokens(hybrid, 2, 7))
    assert graphs.replayed == 0 and next(calls) == NEW  # one of the calls is the attempted capture
    monkeypatch.setattr(Attention, "step", step)
    assert generate_text(hybrid, tokens(hybrid, 2, 7)).equal(text)


@needs_cuda
def test_failed_capture_leaves_generator_and_memory_unchanged(monkeypatch):
    """The random generator of PyTorch and the allocated memory are unchanged."""
    model, step = model_of("hybrid", "cuda"), Attention.step

    def sample():
        torch.manual_seed(5)
        return generate_text(model, tokens(model, 2, 7), do_sample=True, top_k=10)

    def read_on_host(self, qkv, state, now):
        state.place[0].item()
        return step(self, qkv, state, now)

    text = sample()
    monkeypatch.setattr(Attention, "step", read_on_host)
    for _ in range(2):
        with pytest.warns(UserWarning, match="a decoding step cannot be captured as a CUDA graph"):
            assert sample().equal(text)
    monkeypatch.setattr(Attention, "step", step)
    assert sample().equal(text)
    torch.rand(1, device="cuda")
    gc.collect()
    # While PyTorch believes that a capture is active, memory used by another stream is not freed.
    torch.cuda.synchronize()
    other, before = torch.cuda.Stream(), torch.cuda.memory_allocated()
    used = torch.zeros(1 << 20, device="cuda")
    used.record_stream(other)
    del used
    torch.cuda.synchronize()
    torch.zeros(1, device="cuda")
    assert torch.cuda.memory_allocated() == before


def test_cat_refuses_tokens_beyond_its_positions(graphs, device):
    model = model_of("cat", device, max_position_embeddings=16)
    steps = Steps(model)
    steps.take(9)
    assert graphs.replayed > 4
    with pytest.raises(ValueError, match="input_ids has 17 tokens"):
        steps.take()
    with pytest.raises(ValueError, match="chunk is 4"), torch.no_grad():
        model(tokens(model, 2, 1), past_key_values=steps.cache, chunk=4)


def test_step_inside_a_capture_of_the_user(device):
    """Inside a capture of the user, girih captures nothing."""
    if device == "cpu":
        pytest.skip("of CUDA alone")
    from graphs import capture

    model = model_of("hybrid", device)
    token = tokens(model, 2, 1)
    with torch.no_grad():
        cache = model(tokens(model, 2, 7), use_cache=True).past_key_values
        model(token, past_key_values=cache)
        checkpoint = cache.checkpoint()
        replay, output = capture(lambda: model(token, past_key_values=cache).logits)
        for layer, before in zip(cache.layers, checkpoint.layers, strict=True):
            for part, saved in zip(
                graph.tensors_of(layer.state), graph.tensors_of(before.state), strict=True
            ):
                part.copy_(saved)
        replay.replay()
        torch.testing.assert_close(output, model(token, past_key_values=checkpoint).logits)


def test_graphs_of_other_streams_and_of_many_texts(graphs, device):
    """A graph belongs to the stream of its capture. Finished texts free their memory."""
    if device == "cpu":
        pytest.skip("of CUDA alone")
    model = model_of("hybrid", device)
    ids = tokens(model, 2, 7)
    expected, reserved = generate_text(model, ids), []
    steps = Steps(model)
    steps.take(4)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert replayed(graphs, steps, 4) == 3
        torch.cuda.synchronize()
    assert replayed(graphs, steps, 4) == 3
    for _ in range(12):
        assert generate_text(model, ids).equal(expected)
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] <= reserved[2]


def test_bf16_logits_are_bitwise_equal(graphs, device):
    model = model_of("hybrid", device, hidden_size=128).bfloat16()
    batch = MAX_ROWS + 1  # few_rows, which rounds less often, takes no more than MAX_ROWS
    with torch.no_grad():
        caches = [model(tokens(model, batch, 40), use_cache=True).past_key_values]
        caches.append(caches[0].checkpoint())
        for t in range(8):
            token, found = tokens(model, batch, 1, seed=t), []
            for off, cache in enumerate(caches):
                graphs.off(bool(off))
                found.append(model(token, past_key_values=cache).logits)
            assert found[0].equal(found[1])
    assert graphs.replayed == 7


@needs_cuda
@pytest.mark.parametrize("batch", [1, 5, 17])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_bf16_graph_is_as_accurate_as_the_layers(name, batch):
    """The products of a graph round where the products of the layers round."""
    model = model_of(name, "cuda", hidden_size=64).to(torch.bfloat16)
    exact = copy.deepcopy(model).double()
    ids = tokens(model, batch, 24)
    expected = exact(ids).logits[:, 4:]

    def error(graphs):
        cache, found = model.new_cache(), []
        model(ids[:, :4], past_key_values=cache)
        cache.steps.refused = not graphs
        for t in range(4, 24):
            found.append(model(ids[:, t : t + 1], past_key_values=cache).logits)
        assert bool(cache.steps.graphs) == graphs
        return (torch.cat(found, 1).double() - expected).norm()

    assert error(True) <= 1.5 * error(False)
