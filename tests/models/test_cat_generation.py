"""CAT generates from headers and the current chunk: the text of full forwards, one row a token, one
compression a chunk."""

import itertools
import json
from copy import deepcopy

import pytest
import torch
from girih import _C
from girih.models import CatModel, GirihConfig, GirihForCausalLM
from girih.nn import ChunkAttention, CompressAttend, map_state, rotary
from girih.nn.layers.chunk_attention import ROOM
from small_models import config_of

CHUNK = 4
MODELS = {
    "model": {"mixer": "cat"},
    "running": {"mixer": "cat", "running_positions": True, "num_heads": 4, "num_kv_heads": 2},
    "layers": {"mixer": ["cat", "cat"]},
    "layers running": {"mixer": ["cat", "gsa"], "running_positions": True, "num_heads": 4, "num_kv_heads": 2},
}


def build_model(dtype=torch.double, **options):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 31,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "num_slots": 4,
        "chunk": CHUNK,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,  # large enough for distinct logits
    }
    return GirihForCausalLM(config_of(**sizes | options)).to(dtype).eval()


@pytest.fixture(params=MODELS)
def model(request):
    return build_model(**MODELS[request.param])


def tokens(*shape, seed=1):
    return torch.randint(31, shape, generator=torch.Generator().manual_seed(seed))


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def bytes_of(cache):
    """Bytes of the tensors in the states of a cache."""
    found = []
    map_state(found.append, tuple(layer.state for layer in cache.layers))
    return sum(part.nbytes for part in found)


@torch.no_grad()
def reference_logits(model, ids):
    """Logits `[T, vocab_size]` of ids `[T]`, computed row by row as in maths.md, section 5."""
    cat, config = model.model, model.config
    C, T, theta = config.chunk, len(ids), config.rope_theta

    def attention(layer, x, position, see):
        q, k, v = layer.qkv_proj(x).unflatten(-1, (-1, layer.head_dim)).split(layer.heads, 1)
        q, k = (rotary(p[None], position, theta)[0] for p in (q, k))
        k, v = (p.repeat_interleave(layer.heads[0] // layer.heads[1], 1) for p in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.head_dim**-0.5
        p = scores.masked_fill(~see, -torch.inf).softmax(-1)
        return layer.o_proj(torch.einsum("hqk,khd->qhd", p, v).flatten(1))

    def block(b, x, position, see):
        x = x + attention(b.mixer, b.mixer_norm(x), position, see)
        return x + b.mlp(b.mlp_norm(x))

    def compress(chunk, k):
        x = torch.cat((cat.compressor.position.weight[k : k + 1], cat.compressor.embed_tokens(chunk)))
        for b in cat.compressor.layers:
            x = block(b, x, torch.arange(C + 1), torch.ones(C + 1, C + 1, dtype=torch.bool))
        return cat.compressor.proj(cat.compressor.norm(x)[1:].flatten())

    rows, place = [], []
    for r in range(T + 1):
        k, j = divmod(r, C)
        header = cat.header if k == 0 else compress(ids[(k - 1) * C : k * C], k - 1) if j == 0 else None
        rows.append(header if j == 0 else cat.embed_tokens.weight[ids[r - 1]])
        place.append((k, j))
    see = torch.tensor([[(j == 0 and k <= K) or (k == K and j <= J) for k, j in place] for K, J in place])
    position = torch.tensor([j + (k if config.running_positions else 0) for k, j in place])
    x = torch.stack(rows)
    for b in cat.layers:
        x = block(b, x, position, see)
    return model.lm_head(cat.norm(x))[1:]


@pytest.mark.parametrize("name", ["model", "running"])
@torch.no_grad()
def test_logits_match_the_equations(name):
    model, ids = build_model(**MODELS[name]), tokens(1, 3 * CHUNK + 2)
    expected = reference_logits(model, ids[0])
    close(model(ids).logits[0], expected)
    cache = model.new_cache()
    stepped = [model(token, past_key_values=cache).logits[0] for token in ids.split(1, 1)]
    close(torch.cat(stepped), expected)


def test_logits_depend_only_on_past_tokens(model):
    """The logits at t have a gradient for exactly the tokens 0..t. Earlier chunks act through their headers,
    the current chunk through its tokens. The header of the current chunk has no effect."""
    T, embedded = 3 * CHUNK + 2, []

    def keep(module, arguments, output):
        if arguments[0].is_floating_point() or "position" in names[module]:
            return
        output.requires_grad_(True).retain_grad()
        embedded.append((arguments[0], output))

    names = {module: name for name, module in model.named_modules()}
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.register_forward_hook(keep)
    ids = torch.randperm(31)[None, :T]
    for t in range(T):
        embedded.clear()
        model(ids).logits[:, t].square().sum().backward()
        seen = set()
        for token, vector in embedded:
            seen |= set(token[vector.grad.abs().sum(-1) > 0].tolist())
        assert seen == set(ids[0, : t + 1].tolist()) | (seen & {0}), t  # 0 pads the last chunk


@pytest.mark.parametrize("cached", [False, True])
@torch.no_grad()
def test_changed_token_affects_only_later_logits(model, cached):
    T = 3 * CHUNK + 1
    ids = tokens(1, T)

    def logits(ids):
        if not cached:
            return model(ids).logits[0]
        cache = model.new_cache()
        return torch.cat(
            [model(part, past_key_values=cache).logits[0] for part in ids.split([6, *[1] * 7], 1)]
        )

    before = logits(ids)
    for t in range(T):
        other = ids.clone()
        other[0, t] = (other[0, t] + 1) % 31
        difference = (logits(other) - before).abs().amax(-1)
        assert difference[:t].max().item() < 1e-12 if t else True
        assert difference[t] > 1e-6


@torch.no_grad()
def test_compressed_chunk_affects_only_later_chunks():
    """f(c_k) changes the rows of chunk k + 1 and later: the logits from the last token of chunk k on."""
    model, ids = build_model(mixer="cat"), tokens(1, 4 * CHUNK)
    before = model(ids).logits[0]
    for k in range(3):

        def perturb(module, arguments, output, k=k):
            output[:, k] += 1.0
            return output

        handle = model.model.compressor.register_forward_hook(perturb)
        difference = (model(ids).logits[0] - before).abs().amax(-1) > 1e-9
        handle.remove()
        assert difference.tolist() == [t >= (k + 1) * CHUNK - 1 for t in range(4 * CHUNK)]


def count_work(model):
    """Counts decoder rows, compressed chunks and compressor calls."""
    counts = {"rows": 0, "chunks": 0, "calls": 0}

    def rows(module, arguments, output):
        counts["rows"] += arguments[0].shape[0] * arguments[0].shape[1]

    def chunks(module, arguments, output):
        counts["chunks"] += arguments[0].shape[:-1].numel()
        counts["calls"] += 1

    for name, module in model.named_modules():
        if name == "model.layers.0.mixer":
            module.register_forward_hook(rows)
        if name == "model.compressor":
            module.register_forward_hook(chunks)
    return counts


@torch.no_grad()
def test_one_row_a_token_and_one_compression_a_chunk():
    model = build_model(mixer="cat")
    counts = count_work(model)
    prompt, new = 2 * CHUNK + 3, 3 * CHUNK + 2
    cache = model.new_cache()
    model(tokens(2, prompt), past_key_values=cache)
    assert counts == {"rows": 2 * 3 * CHUNK, "chunks": 2 * 2, "calls": 1}  # only the finished chunks
    for t in range(prompt, prompt + new):
        counts.update(rows=0, chunks=0, calls=0)
        model(tokens(2, 1), past_key_values=cache)
        ends = (t + 1) % CHUNK == 0
        assert counts == {"rows": 2, "chunks": 2 * ends, "calls": int(ends)}


@torch.no_grad()
def test_padded_sequences_compress_their_chunks_when_they_end():
    """Chunks end at different tokens in different sequences. A call compresses only the chunks that end."""
    model, lengths = build_model(mixer="cat"), [7, 5, 2, 7]
    mask = torch.stack([torch.arange(7) >= 7 - n for n in lengths])
    counts, cache = count_work(model), model.new_cache()
    model(tokens(4, 7), attention_mask=mask, past_key_values=cache)
    for t in range(1, 2 * CHUNK + 1):
        counts.update(rows=0, chunks=0, calls=0)
        model(tokens(4, 1), past_key_values=cache)
        ends = sum((n + t) % CHUNK == 0 for n in lengths)
        assert counts == {"rows": 4, "chunks": ends, "calls": int(ends > 0)}


@pytest.mark.parametrize("mixer", ["cat", ["cat", "cat"]], ids=str)
@pytest.mark.parametrize("chunk", [8, 32])
@torch.no_grad()
def test_cache_grows_by_one_slot_a_chunk(mixer, chunk):
    """The cache grows by 1/chunk of a transformer's K and V a token. Each layer also holds one chunk of
    slots, and at most ROOM spare slots."""
    sizes = {"chunk": chunk, "hidden_size": 8, "num_heads": 1, "dtype": torch.float32}
    cat, transformer = build_model(mixer=mixer, **sizes), build_model(mixer="attention", **sizes)
    lengths = (32 * ROOM, 96 * ROOM)
    cache_bytes = {
        m: [bytes_of(m(tokens(1, T), use_cache=True).past_key_values) for T in lengths]
        for m in (cat, transformer)
    }
    growth = {m: b - a for m, (a, b) in cache_bytes.items()}
    assert growth[cat] * chunk == growth[transformer]
    slot_bytes = 2 * 2 * 8 * 4  # K and V of two layers
    other_bytes = 2 * (chunk + 2) * 8 * 8 + 100  # tokens or inputs of the chunk, header, positions
    assert (
        cache_bytes[cat][1]
        <= cache_bytes[transformer][1] / chunk + (chunk + 1 + ROOM) * slot_bytes + other_bytes
    )
    cache = cat(tokens(1, lengths[0]), use_cache=True).past_key_values
    states = [layer.state for layer in cache.layers]
    map_state(
        lambda part: part.untyped_storage().nbytes() == part.nbytes or pytest.fail("a view"), tuple(states)
    )
    before = bytes_of(cache)
    for token in tokens(1, 2 * chunk).split(1, 1):
        cat(token, past_key_values=cache)
    assert bytes_of(cache) <= before + ROOM * slot_bytes


@torch.no_grad()
def greedy(model, ids, new, **options):
    """Greedy text. Each token comes from a forward of the whole text."""
    for _ in range(new):
        ids = torch.cat((ids, model(ids, use_cache=False, **options).logits[:, -1:].argmax(-1)), 1)
    return ids


def test_greedy_text_matches_full_forwards(model):
    """The text has more headers than a new cache has room for."""
    ids = tokens(2, 3)
    new = (ROOM + 3) * CHUNK
    assert model.generate(ids, max_new_tokens=new, do_sample=False).equal(greedy(model, ids, new))


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}, {"prefill_chunk_size": 3}], ids=str)
def test_padded_prompts_generate_the_text_of_each_alone(model, way):
    """Chunks end at different tokens in different sequences. Beams and prompts in several calls keep the rows
    apart."""
    lengths, T, new = [9, 6, 1, 4], 9, 2 * CHUNK + 3
    ids = tokens(4, T)
    mask = torch.stack([torch.arange(T) >= T - n for n in lengths]).long()
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, **way}
    together = model.generate(ids, attention_mask=mask, **options)
    for i, n in enumerate(lengths):
        alone = model.generate(ids[i : i + 1, T - n :], **options)[0]
        assert together[i, T - n :].equal(alone)
        if not way.get("num_beams"):
            assert alone.equal(greedy(model, ids[i : i + 1, T - n :], new)[0])


@torch.no_grad()
def test_cache_rows_are_repeated_and_reordered(model):
    ids, lengths = tokens(3, 7), [7, 4, 2]
    mask = torch.stack([torch.arange(7) >= 7 - n for n in lengths])
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([5, 0, 3]))
    more = tokens(3, 2 * CHUNK + 1, seed=2)
    parts = [model(token, past_key_values=cache).logits for token in more.split(1, 1)]
    for i, row in enumerate((2, 0, 1)):
        n = lengths[row]
        text = torch.cat((ids[row : row + 1, 7 - n :], more[i : i + 1]), 1)
        close(torch.cat(parts, 1)[i], model(text).logits[0, n:])


@torch.no_grad()
def test_calls_of_any_length_match_one_call(model):
    """Calls of any lengths, inside chunks and across them, equal one call of the whole text."""
    ids = tokens(2, 5 * CHUNK)
    whole = model(ids).logits
    for pieces in ([1, 1, 1, 1, 5, 1, 10], [CHUNK, 2 * CHUNK, 1, 2 * CHUNK - 1], [3, 9, 4, 1, 1, 1, 1]):
        cache = model.new_cache()
        parts = [model(part, past_key_values=cache).logits for part in ids.split(pieces, 1)]
        close(torch.cat(parts, 1), whole)
        assert cache.get_seq_length() == ids.shape[1]


@torch.no_grad()
def test_steps_reuse_the_tensors_of_the_cache():
    """With enough room, no step allocates cache tensors and no step depends on the length of the text. A CUDA
    graph reads and writes the same tensors at every replay."""
    model, total = build_model(mixer="cat"), 2 * ROOM * CHUNK - 1
    cache = model(tokens(2, 3), use_cache=True).past_key_values
    layer = cache.layers[0]
    layer.state = layer.state.with_room(total)
    first = map_state(torch.Tensor.data_ptr, layer.state._replace(seq_lengths=None))
    for token in tokens(2, total - 3).split(1, 1):
        model(token, past_key_values=cache)
        assert map_state(torch.Tensor.data_ptr, layer.state._replace(seq_lengths=None)) == first
    snapshot = deepcopy(cache)
    model(tokens(2, 1), past_key_values=cache)  # one token more than the room
    assert layer.state.kv[0].k.shape[1] == snapshot.layers[0].state.kv[0].k.shape[1] + ROOM


def test_gradients_pass_from_call_to_call():
    model, ids = build_model(mixer="cat"), tokens(2, 2 * CHUNK + 2)
    target = torch.randn(2, 2 * CHUNK + 2, 31, dtype=torch.double)

    def gradients(logits):
        model.zero_grad()
        (logits * target).sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    whole = gradients(model(ids).logits)
    for pieces in ([3, 5, 2], [CHUNK - 1, 1, 1, CHUNK, 1]):
        cache = model.new_cache()
        parts = [model(part, past_key_values=cache).logits for part in ids.split(pieces, 1)]
        apart = gradients(torch.cat(parts, 1))
        for name in whole:
            close(apart[name], whole[name])


def test_unsupported_cache_calls_are_refused():
    model = build_model(mixer="cat", max_position_embeddings=8)
    cache = model(tokens(1, 8), use_cache=True).past_key_values
    with pytest.raises(
        ValueError, match="input_ids has 9 tokens; expected at most max_position_embeddings, 8"
    ):
        model(tokens(1, 1), past_key_values=cache)
    layer, x = ChunkAttention(16, 2, chunk=4), torch.randn(1, 8, 16)
    with pytest.raises(ValueError, match="attention_mask: rows of chunks"):
        layer(x, attention_mask=torch.ones(1, 8))
    with pytest.raises(ValueError, match="use_cache: expected True exactly with a state"):
        layer(x, use_cache=True)
    with pytest.raises(ValueError, match="CAT has no cache for packed sequences"):
        CompressAttend(16, 2)(x, cu_seqlens=torch.tensor([0, 8]), use_cache=True)


# ---- adaptive -----------------------------------------------------------------------------------------

CHUNKS = [4, 8, 16, 32]


@pytest.fixture(scope="module")
def adaptive():
    return build_model(mixer="cat", chunks=CHUNKS, chunk=8, max_position_embeddings=128)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_adaptive_model_generates_with_each_chunk(adaptive, chunk):
    ids = tokens(3, 9)
    mask = torch.stack([torch.arange(9) >= 9 - n for n in (9, 4, 7)]).long()
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "chunk": chunk}
    generated = adaptive.generate(ids, attention_mask=mask, **options)
    for i, n in enumerate((9, 4, 7)):
        assert generated[i, 9 - n :].equal(greedy(adaptive, ids[i : i + 1, 9 - n :], 30, chunk=chunk)[0])


@torch.no_grad()
def test_adaptive_model_matches_the_model_of_each_chunk(adaptive):
    """An adaptive model at chunk C equals the model of chunk C with its header, columns and positions."""
    ids, width = tokens(2, 70), adaptive.config.compressor_hidden_size
    logits = {chunk: adaptive(ids, chunk=chunk).logits for chunk in CHUNKS}
    for a, b in itertools.combinations(CHUNKS, 2):
        assert (logits[a] - logits[b]).abs().max() > 1e-3
    assert adaptive(ids).logits.equal(logits[8])
    weights = adaptive.state_dict()
    for i, chunk in enumerate(CHUNKS):
        alone = build_model(mixer="cat", chunk=chunk, max_position_embeddings=128)
        before = sum(CHUNKS[:i]) * width
        chunk_weights = dict(weights)
        chunk_weights["model.header"] = weights["model.header"][i]
        columns = slice(before, before + chunk * width)
        chunk_weights["model.compressor.proj.weight"] = weights["model.compressor.proj.weight"][:, columns]
        chunk_weights["model.compressor.position.weight"] = weights["model.compressor.position.weight"][
            :: chunk // 4
        ]
        alone.load_state_dict(chunk_weights)
        close(alone(ids).logits, logits[chunk])


def test_training_draws_a_chunk_a_step_and_learns_all(tmp_path):
    model = build_model(
        torch.float32, mixer="cat", chunks=CHUNKS, max_position_embeddings=64, initializer_range=None
    )
    ids, drawn = tokens(4, 40), set()
    model.model.compressor.register_forward_hook(lambda module, args, out: drawn.add(args[0].shape[-1]))
    before = {chunk: model(ids, labels=ids, chunk=chunk).loss.item() for chunk in CHUNKS}
    optimizer, drawn_chunks = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    model.train()
    for _ in range(40):
        drawn.clear()
        model(ids, labels=ids).loss.backward()
        # data parallel training needs every gradient
        assert all(p.grad is not None for p in model.parameters())
        drawn_chunks += drawn
        optimizer.step()
        optimizer.zero_grad()
    assert len(drawn_chunks) == 40 and set(drawn_chunks) == set(CHUNKS)
    assert min(drawn_chunks.count(chunk) for chunk in CHUNKS) >= 3
    model.eval()
    assert all(model(ids, labels=ids, chunk=chunk).loss.item() < before[chunk] - 0.5 for chunk in CHUNKS)
    model.save_pretrained(tmp_path)
    for options, chunk in (({}, CHUNK), ({"chunk": 32}, 32)):
        loaded = GirihForCausalLM.from_pretrained(tmp_path, **options).eval()
        assert loaded.config.chunks == CHUNKS and loaded.config.chunk == chunk
        with torch.no_grad():
            assert loaded(ids).logits.equal(model(ids, chunk=chunk).logits)


@torch.no_grad()
def test_packed_sequences_take_any_chunk(adaptive):
    ids, cuts = tokens(1, 50), [0, 1, 20, 50]
    for chunk in CHUNKS:
        packed = adaptive(ids, cu_seqlens=torch.tensor(cuts), use_cache=False, chunk=chunk).logits
        for a, b in itertools.pairwise(cuts):
            close(packed[:, a:b], adaptive(ids[:, a:b], chunk=chunk).logits)


def test_unknown_chunk_is_refused(adaptive):
    ids = tokens(1, 5)
    with pytest.raises(
        ValueError, match="chunk is 5; expected one of 4, 8, 16, 32, which the model was made"
    ):
        adaptive(ids, chunk=5)
    with pytest.raises(ValueError, match="chunk is 8; expected one of 4, which"):
        build_model(mixer="cat")(ids, chunk=8)
    with pytest.raises(ValueError, match="chunk is 4; expected none"):
        build_model(mixer=["cat", "cat"])(ids, chunk=4)
    cache = adaptive(ids, chunk=16, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="chunk is 8; expected 16, with which the cache was begun"):
        adaptive(ids, past_key_values=cache, chunk=8)
    adaptive(ids, past_key_values=cache)
    assert isinstance(adaptive.model, CatModel)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([8, 4], "chunks is \\[8, 4\\]; expected ascending multiples of the first"),
        ([4, 6], "chunks is \\[4, 6\\]; expected ascending multiples"),
        ([1, 4], "chunks is \\[1, 4\\]; .* from 2 on"),
        ([8, 16], "chunks is \\[8, 16\\]; .* with chunk, 4, among them"),
        ([4, 512], "chunks is 512; expected 1 to 256"),
        ([], "chunks is a list; expected a list of integers"),
        (4, "chunks is 4; expected a list of integers"),
        ([4, "8"], 'chunks is "8"; expected an integer'),
    ],
)
def test_invalid_chunks_are_refused(chunks, message):
    with pytest.raises(ValueError, match=message):
        build_model(mixer="cat", chunks=chunks)


def test_chunks_are_for_the_whole_model():
    with pytest.raises(ValueError, match="chunks is \\[4, 8\\]; expected none: only the CAT model"):
        build_model(mixer=["cat", "cat"], chunks=[4, 8])


# ---- C++ ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_cpp_writes_the_same_text(name, tmp_path):
    """Chunks end at different tokens in each sequence. The text has more headers than a new cache has room
    for."""
    model = build_model(torch.float32, **MODELS[name])
    model.save_pretrained(tmp_path)
    ids, new = tokens(3, 9), (ROOM + 3) * CHUNK
    mask = torch.stack([torch.arange(9) >= 9 - n for n in (9, 4, 7)]).long()
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
    assert (
        _C.LanguageModel.from_pretrained(str(tmp_path))
        .generate(ids, new, attention_mask=mask)
        .equal(expected)
    )


def test_cpp_adaptive_model_matches_python(adaptive, tmp_path):
    model = deepcopy(adaptive).float()
    model.save_pretrained(tmp_path)
    cpp, ids = _C.LanguageModel.from_pretrained(str(tmp_path)), tokens(2, 20)
    for chunk in (None, *CHUNKS):
        if chunk is not None:
            cpp.set_chunk(chunk)
        with torch.no_grad():
            want = model(ids, chunk=chunk).logits
            torch.testing.assert_close(cpp.forward(ids)[0], want, atol=1e-4, rtol=1e-4)
        generated = model.generate(ids, max_new_tokens=40, do_sample=False, chunk=chunk)
        assert cpp.generate(ids, 40).equal(generated)
    with pytest.raises(ValueError) as python:
        adaptive(ids, chunk=5)
    with pytest.raises(ValueError) as error:
        cpp.set_chunk(5)
    assert str(error.value) == str(python.value)
    with pytest.raises(ValueError, match="chunk is 4; expected none: only the CAT model"):
        _C.LanguageModel(json.dumps({"mixer": "gsa", "hidden_size": 16})).set_chunk(4)


WRONG_PARTS = {
    "dtype": lambda part: part.long() if part.is_floating_point() else part.float(),
    "shape": lambda part: torch.cat((part, part[..., :1]), -1),
    "sequences": lambda part: part[:1],
}


@torch.no_grad()
@pytest.mark.parametrize("wrong", WRONG_PARTS)
def test_a_wrong_part_of_the_state_is_refused_before_a_step_writes(wrong):
    model = build_model(mixer="cat")
    cache = model.new_cache()
    model(tokens(2, CHUNK + 1), cache=cache)
    (layer,), parts = cache.layers, []
    state = layer.state
    map_state(parts.append, state)
    for index in range(len(parts)):
        count = itertools.count()
        given = map_state(
            lambda part, count=count, index=index: (
                WRONG_PARTS[wrong](part) if next(count) == index else part.clone()
            ),
            state,
        )
        before, after = [], []
        map_state(lambda part, before=before: before.append(part.clone()), given)
        layer.state = given
        with pytest.raises(ValueError, match="state"):
            model(tokens(2, 1), cache=cache)
        map_state(after.append, given)
        assert all(a.equal(b) for a, b in zip(after, before, strict=True)), index


@torch.no_grad()
def test_a_missing_part_of_a_cat_state_is_named():
    config = GirihConfig(
        vocab_size=17, hidden_size=32, num_hidden_layers=2, num_heads=2, mixer="cat", chunk=CHUNK
    )
    model, ids = GirihForCausalLM(config).eval(), torch.randint(17, (2, CHUNK + 1))
    cache = model.new_cache()
    model(ids, cache=cache)
    (layer,) = cache.layers
    state = layer.state
    kv = state.kv
    for wrong, message in (
        (tuple(state), "state is a tuple; expected a CatState"),
        (5, "state is a int; expected a CatState"),
        (state._replace(ids=None), "state.ids is a NoneType; expected a Tensor"),
        (state._replace(ids=state.ids[:, 0]), r"state.ids has shape \[2\]; expected 2 dimensions"),
        (state._replace(header=None), "state.header is a NoneType; expected a Tensor"),
        (state._replace(kv=None), "state.kv is a NoneType; expected a tuple of 2 KeyValues"),
        (state._replace(kv=kv[:1]), "state.kv is a tuple of 1 parts; expected a tuple of 2 KeyValues"),
        (state._replace(kv=(kv[0], None)), "state.kv.1 is a NoneType; expected a KeyValues"),
        (
            state._replace(kv=(kv[0], kv[1]._replace(k=None))),
            "state.kv.1.k is a NoneType; expected a Tensor",
        ),
        (state._replace(seq_lengths=None), "state.seq_lengths is a NoneType; expected a SequenceLengths"),
        (
            state._replace(seq_lengths=state.seq_lengths._replace(tokens=None)),
            "state.seq_lengths.tokens is a NoneType; expected a Tensor",
        ),
    ):
        for tokens in (1, 2):
            layer.state = wrong
            with pytest.raises(ValueError, match=message):
                model(ids[:, :tokens], cache=cache)
