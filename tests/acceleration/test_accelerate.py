"""transformers' own linear models compute the same with girih's functions in place of theirs."""

import copy
import functools
import sys

import girih
import pytest
import torch
import transformers
from girih.acceleration import accelerate
from girih.acceleration import packed as packed_rows
from girih.acceleration.accelerate import SERVED
from packaging import version
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    DynamicCache,
)

pytestmark = pytest.mark.filterwarnings("ignore:girih.accelerate")

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA_RULE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 1,
    "mamba_chunk_size": 16,
}
INDEXER = {
    "indexer_n_heads": 1,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 512,
    "indexer_compress_ratio": 4,
}
FAMILIES = {
    "qwen3_next": DELTA_RULE | EXPERTS,
    "qwen3_5_text": DELTA_RULE,
    "qwen3_5_moe_text": DELTA_RULE | EXPERTS,
    "qwen4_exp_text": DELTA_RULE | EXPERTS | INDEXER | {"hc_count": 2, "hc_lowrank": 8},
    "olmo_hybrid": DELTA_RULE | {"linear_num_key_heads": 4},
    "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 2, "state_size": 8, "expand": 1, "chunk_size": 16},
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 32},
    "granitemoehybrid": MAMBA2
    | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32, "num_local_experts": 2}
    | {"num_experts_per_tok": 1},
    "nemotron_h": {
        "hybrid_override_pattern": "M*",
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "chunk_size": 16,
        "head_dim": 16,
    },
    "zamba2": {
        "mamba_ngroups": 2,
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_expand": 2,
        "chunk_size": 16,
        "layers_block_type": ["mamba", "hybrid"],
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": False,
    },
    "lfm2": {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"]},
    "kimi_linear": {
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 8,
        "mlp_layer_types": ["dense", "dense"],
    },
}
MAMBA2_FAMILIES = ("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2")
TOKENS = 150  # several chunks of either side


def model_of(family, seed=0, **own):
    """A small random model whose linear layers matter: what they start from leaves a scan little to do."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **(COMMON | FAMILIES[family] | own))
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(std=p[0].numel() ** -0.5)
            elif name.endswith("bias"):
                p.normal_(std=0.3)
    return model.eval()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return model_of(request.param)


def tokens(batch=2, length=TOKENS, seed=0):
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def off(found, want):
    """|found - want| / |want|"""
    return float((found.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


def trained(model, **inputs):
    """Logits, loss and every gradient."""
    model.zero_grad()
    output = model(**inputs, labels=inputs["input_ids"], use_cache=False)
    output.loss.backward()
    return (
        output.logits.detach(),
        output.loss.detach(),
        {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
    )


def test_logits_loss_and_gradients(model):
    """All as theirs to 1e-5; a single gradient, at times four numbers that are sums of sums, is held to
    float64's: 2e-5, or twice as far off as theirs."""
    exact = trained(copy.deepcopy(model).double(), input_ids=tokens())[2]
    logits, loss, grads = trained(model, input_ids=tokens())
    with accelerate(model):
        ours, our_loss, our_grads = trained(model, input_ids=tokens())
    assert our_grads.keys() == grads.keys()
    together, of_theirs = (torch.cat([g.flatten() for g in all.values()]) for all in (our_grads, grads))
    assert off(ours, logits) < 1e-5 and off(our_loss, loss) < 1e-5 and off(together, of_theirs) < 1e-5
    least = 1e-3 * max(g.norm() for g in exact.values())  # below it a gradient is rounding of others
    for name, g in exact.items():
        limit = max(2e-5, 2 * off(grads[name], g)) * g.norm().clamp_min(least)
        assert (our_grads[name] - g).norm() < limit, name


def test_a_broken_function_is_seen(model, monkeypatch):
    """The linear layers of these models matter: with other decays or another filter the logits differ."""
    from girih import ops

    for name in ("delta_product", "gla", "short_conv"):
        original = getattr(ops, name)

        def other(*inputs, original=original, **options):
            o, state = original(*inputs, **options)
            return o * 1.01, state

        monkeypatch.setattr(ops, name, other)
    with torch.no_grad():
        logits = model(tokens()).logits
        with accelerate(model):
            assert off(model(tokens()).logits, logits) > 1e-4


@torch.no_grad()
def test_bf16_is_no_further_from_float64(model):
    double, half = copy.deepcopy(model).double(), copy.deepcopy(model).bfloat16()
    ratios = []
    for seed in range(6):
        ids = tokens(seed=seed)
        exact, theirs = double(ids).logits, half(ids).logits
        with accelerate(half):
            ratios.append(off(half(ids).logits, exact) / off(theirs, exact))
    assert sum(ratios) / len(ratios) < 1.1, ratios


@torch.no_grad()
@pytest.mark.parametrize(
    "family", sorted(name for name in FAMILIES if "linear_key_head_dim" in FAMILIES[name])
)
def test_norms_have_the_models_epsilon(family):
    model = model_of(family, rms_norm_eps=0.3)
    want = model(tokens()).logits
    assert off(model_of(family)(tokens()).logits, want) > 1e-2
    with accelerate(model):
        assert off(model(tokens()).logits, want) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(model, side):
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, slice(0, 40) if side == "left" else slice(TOKENS - 40, TOKENS)] = 0
    inputs = {"input_ids": tokens() * mask, "attention_mask": mask}
    want = model(**inputs).logits
    with accelerate(model):
        found = model(**inputs).logits
    assert off(found * mask[..., None], want * mask[..., None]) < 1e-5


def cache_of(model):
    """An empty cache, by the name that the model's `forward` gives it."""
    name = "cache_params" if model.config.model_type == "mamba2" else "past_key_values"
    return {name: DynamicCache(config=model.config)}


@torch.no_grad()
def test_a_prompt_in_pieces_and_token_by_token(model):
    def pieces():
        cache, parts = cache_of(model), tokens(length=100).split([60, 35, 1, 1, 3], 1)
        return torch.cat([model(part, use_cache=True, **cache).logits for part in parts], 1)

    want = pieces()
    with accelerate(model):
        assert off(pieces(), want) < 1e-5


@pytest.mark.parametrize("lengths", [[60, 40], [60, 37, 3], [40, 1, 1], [2, 1, 5]], ids=str)
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"kimi_linear"}))
def test_gradients_flow_through_pieces_on_a_cache(family, lengths):
    """They are those of the whole text, though the cache is written in place.

    Kimi's scan stays transformers', through whose cache no gradient flows.
    """
    model = model_of(family).double()
    parts = tokens(length=sum(lengths)).split(lengths, 1)

    def gradients(parts):
        model.zero_grad()
        cache, at, loss = cache_of(model), 0, 0
        for part in parts:
            positions = torch.arange(at, at := at + part.shape[1]).expand(2, -1)
            loss += model(part, position_ids=positions, use_cache=True, **cache).logits.square().sum()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    with accelerate(model):
        assert off(gradients(parts), gradients([torch.cat(parts, 1)])) < 1e-5


def tensors_of(cache):
    """All that a cache of transformers keeps, by layer and name."""
    found = {}
    for i, layer in enumerate(cache.layers):
        for name, x in vars(layer).items():
            parts = x.items() if isinstance(x, dict) else enumerate(x if isinstance(x, list) else [x])
            found |= {(i, name, j): part for j, part in parts if isinstance(part, torch.Tensor)}
    return found


def caches_step_by_step(model):
    """Tensors of transformers' cache and of girih's, after a prompt, single tokens and several."""
    name, parts = next(iter(cache_of(model))), tokens(length=14).split([9, 1, 1, 1, 2], 1)
    (theirs,), (ours,) = cache_of(model).values(), cache_of(model).values()
    for part in parts:
        model(part, use_cache=True, **{name: theirs})
        with accelerate(model):
            model(part, use_cache=True, **{name: ours})
        yield tensors_of(theirs), tensors_of(ours)


@torch.no_grad()
def test_caches_are_transformers_caches(model):
    """A text that was begun with girih can be continued without it: every tensor of the cache is the same,
    after a prompt, after single tokens and after several."""
    for want, found in caches_step_by_step(model):
        assert want.keys() == found.keys() and len(want) >= 2
        for key, x in want.items():
            assert found[key].shape == x.shape and found[key].dtype == x.dtype, key
            if x.is_floating_point() and x.numel():
                assert (found[key] - x).abs().max() < 1e-4, key
            else:
                assert found[key].equal(x), key


@torch.no_grad()
def test_caches_of_16_bits_keep_what_transformers_keeps_in_fp32(model):
    for want, found in caches_step_by_step(copy.deepcopy(model).bfloat16()):
        assert {key: (x.shape, x.dtype) for key, x in found.items()} == {
            key: (x.shape, x.dtype) for key, x in want.items()
        }


@torch.no_grad()
@pytest.mark.parametrize("first", [True, False], ids=["in autocast", "outside"])
@pytest.mark.parametrize("then", [True, False], ids=["in autocast", "outside"])
def test_a_cache_may_be_begun_and_continued_under_autocast(model, first, then):
    def pieces():
        cache, parts = cache_of(model), tokens(length=100).split([60, 35, 1, 1, 3], 1)
        logits = []
        for i, part in enumerate(parts):
            with torch.autocast("cpu", torch.bfloat16, enabled=then if i else first):
                logits.append(model(part, use_cache=True, **cache).logits.float())
        return torch.cat(logits, 1)

    want = model(tokens(length=100)).logits
    with accelerate(model):
        assert off(pieces(), want) < 0.1


@torch.no_grad()
@pytest.mark.parametrize("limit", [(0.5, 0.9), (0.0, 0.3), (1.5, float("inf"))], ids=str)
@pytest.mark.parametrize("family", MAMBA2_FAMILIES)
def test_steps_keep_within_their_limits(family, limit):
    """transformers limits the steps of several tokens, and not that of a single one."""
    model, ids = model_of(family), tokens(length=40)
    free = model(ids).logits
    limited = [layer for layer in model.modules() if hasattr(layer, "time_step_limit")]
    for layer in limited:
        layer.time_step_limit = limit

    def pieces():
        cache = cache_of(model)
        return torch.cat(
            [model(part, use_cache=True, **cache).logits for part in ids.split([37, 1, 2], 1)], 1
        )

    want, in_pieces = model(ids).logits, pieces()
    assert limited and off(free, want) > 1e-3
    with accelerate(model):
        assert off(model(ids).logits, want) < 1e-5 and off(pieces(), in_pieces) < 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.filterwarnings("default:girih.accelerate")
def test_without_a_gpu_there_is_a_warning():
    with pytest.warns(
        UserWarning, match="without a GPU the layers compute the same, but hardly faster"
    ) as warned:
        accelerate(model_of("lfm2")).undo()
    assert warned[0].filename == __file__


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_the_same_text(model, how):
    ids = tokens(length=70)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, **how}
    want = model.generate(ids, **options)
    with accelerate(model):
        assert model.generate(ids, **options).equal(want)


def test_two_turns_of_a_chat(model):
    def chat():
        cache, text = cache_of(model), tokens(batch=1, length=30)
        for turn in range(2):
            text = torch.cat((text, tokens(batch=1, length=7, seed=turn)), 1)
            text = model.generate(text, **cache, max_new_tokens=6, do_sample=False, eos_token_id=-1)
        return text

    want = chat()
    with accelerate(model):
        assert chat().equal(want)


LENGTHS = [70, 1, 33]
COLLATORS = {
    "position_ids": {},
    "position_ids from 2": {"position_ids_start": 2},
    "cu_seq_lens_q": {"return_flash_attn_kwargs": True},
    "cu_seq_lens_q alone": {"return_flash_attn_kwargs": True, "return_position_ids": False},
    "seq_idx": {"return_seq_idx": True},
    "seq_idx alone": {"return_seq_idx": True, "return_position_ids": False},
}
# Kimi's scan stays transformers', which refuses packed sequences without a package.
PACKS = sorted(FAMILIES.keys() - {"kimi_linear"})


def packed(lengths=LENGTHS, **options):
    """Sequences `[1, length]`, and one row of them as transformers' collator makes it."""
    parts = [tokens(batch=1, length=n, seed=n) for n in lengths]
    batch = DataCollatorWithFlattening(**options)([{"input_ids": part[0]} for part in parts])
    batch.pop("labels")
    return parts, batch


@torch.no_grad()
@pytest.mark.parametrize("how", COLLATORS)
@pytest.mark.parametrize("family", PACKS)
def test_packed_sequences_keep_apart(family, how):
    """Without girih transformers mixes them, or refuses them."""
    model = model_of(family)
    parts, batch = packed(**COLLATORS[how])
    want = torch.cat([model(part, use_cache=False).logits for part in parts], 1)
    try:
        alone = model(**batch, use_cache=False).logits
        assert off(alone, want) > 1e-3
    except ValueError as error:
        assert "packed sequences" in str(error)
    with accelerate(model):
        found = model(**batch)
    assert off(found.logits, want) < 1e-5
    assert found.get("cache") is None and found.get("past_key_values") is None


@pytest.mark.parametrize("how", ["position_ids", "seq_idx alone"])
@pytest.mark.parametrize("family", PACKS)
def test_packed_sequences_train_apart(family, how):
    """The gradients of sequences in one row are the sum of each one's."""
    model = model_of(family).train()
    parts, batch = packed([40, 1, 23], **COLLATORS[how])

    def gradients(*calls):
        model.zero_grad()
        sum(model(**call, use_cache=False).logits.square().sum() for call in calls).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    with accelerate(model):
        want = gradients(*({"input_ids": part} for part in parts))
        assert off(gradients(batch), want) < 1e-4


# transformers 5.17 mixes packed sequences in its own linear layers.
REFUSES_PACKED = version.parse(transformers.__version__) >= version.parse("5.23")


@pytest.mark.skipif(not REFUSES_PACKED, reason="this transformers mixes packed sequences")
@torch.no_grad()
def test_a_scan_that_stays_refuses_packed_sequences():
    model, (_, batch) = model_of("kimi_linear"), packed()
    with accelerate(model), pytest.raises(ValueError, match="chunk_kda.* packed sequences"):
        model(**batch)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_bounds_are_found_once_and_where_they_can_matter(family, monkeypatch):
    """Reading positions waits for the device: once a model call, never with a cache or a mask."""
    model, (parts, batch), read = model_of(family), packed(), []
    find = packed_rows.find_bounds
    monkeypatch.setattr(packed_rows, "find_bounds", lambda *args: read.append(args[0]) or find(*args))
    ids, positions = batch["input_ids"], torch.arange(104)[None]
    with accelerate(model):
        model(**batch)
        assert read == ["position_ids"]
        model(ids, seq_idx=torch.zeros(1, 104, dtype=torch.int32))
        assert read == ["position_ids", "seq_idx"]
        read.clear()
        model.generate(parts[0], max_new_tokens=3, do_sample=False)
        model(ids, attention_mask=torch.ones_like(ids), position_ids=batch["position_ids"])
        model(parts[1], position_ids=torch.tensor([[7]]))
        model(ids, position_ids=positions, **cache_of(model))
        assert read == []
        assert model(ids, position_ids=positions).logits.equal(model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_packed_sequences_in_two_rows_or_with_a_cache_are_refused(family):
    model, (_, batch) = model_of(family), packed()
    rows = {name: x.expand(2, -1) for name, x in batch.items()}
    with accelerate(model):
        with pytest.raises(ValueError, match="position_ids starts new sequences within a row"):
            model(**rows)
        with pytest.raises(ValueError, match="use_cache is True, but no cache is kept of packed sequences"):
            model(**batch, use_cache=True)


@torch.no_grad()
@pytest.mark.parametrize("way", ["injected", "replaced"])
@pytest.mark.parametrize("family", ["bamba", "granitemoehybrid", "olmo_hybrid", "lfm2"])
def test_packed_sequences_of_a_model_that_is_converted_too(family, way):
    """girih's mixer in the attention layer, the linear layer accelerated; transformers' own refuses."""
    model, (parts, batch) = model_of(family), packed()
    girih.inject(model, weight=0.5) if way == "injected" else girih.replace_attention(model, "gla")
    if REFUSES_PACKED:
        with pytest.raises(ValueError, match="packed sequences"):
            model(**batch)
    with accelerate(model):
        want = torch.cat([model(part, use_cache=False).logits for part in parts], 1)
        assert off(model(**batch).logits, want) < 2e-5


@torch.no_grad()
def test_attention_without_a_mask_gets_the_bounds():
    """Flash attention reads them; Granite gives it no position_ids."""
    seen = {}

    def attend(module, q, k, v, attention_mask, **kwargs):
        seen.update(kwargs, attention_mask=attention_mask)
        return v.transpose(1, 2), None

    AttentionInterface.register("girih_seen", attend)
    model, (_, batch) = model_of("granitemoehybrid"), packed()
    model.config._attn_implementation = "girih_seen"
    with accelerate(model):
        model(**batch)
    assert seen["cu_seq_lens_q"].tolist() == seen["cu_seq_lens_k"].tolist() == [0, 70, 71, 104]
    assert seen["max_length_q"] == seen["max_length_k"] == 70 and seen["attention_mask"] is None
    with accelerate(model):
        model(**batch, max_length_q=90)
    assert seen["max_length_q"] == seen["max_length_k"] == 90  # which is not waited for


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba"])
def test_packed_sequences_compiled(family):
    """Positions are read on the host: a break of the graph, and an error where none may be."""
    model, (_, batch) = model_of(family), packed()
    bounds = torch.tensor([0, 70, 71, 104], dtype=torch.int32)
    with accelerate(model):
        want = model(**batch).logits
        assert off(torch.compile(model, backend="aot_eager")(**batch).logits, want) < 1e-5
        torch.compiler.reset()
        whole = torch.compile(model, fullgraph=True, backend="aot_eager")
        with pytest.raises(torch._dynamo.exc.Unsupported, match="are read on the host; give cu_seq_lens_q"):
            whole(**batch)
        torch.compiler.reset()
        assert off(whole(**batch, cu_seq_lens_q=bounds).logits, want) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_bounds_of_a_prompt_that_goes_on(family):
    """With a cache the convolution sees more columns than the bounds count."""
    model, ids = model_of(family), tokens(batch=1, length=30)
    want = model(ids).logits[:, 20:]
    with accelerate(model):
        cache = DynamicCache(config=model.config)
        model(ids[:, :20], past_key_values=cache, use_cache=True)
        bounds = {"cu_seq_lens_q": torch.tensor([0, 10], dtype=torch.int32)}
        found = model(ids[:, 20:], past_key_values=cache, use_cache=True, **bounds).logits
    assert off(found, want) < 1e-5


def test_undo(model):
    with torch.no_grad():
        before = model(tokens()).logits
        acceleration = accelerate(model)
        again = accelerate(model)
        assert "girih." in acceleration.report()
        acceleration.undo()
        assert "girih." in again.report()  # somebody else still uses it
        again.undo()
        again.undo()
        assert "girih." not in again.report()
        assert model(tokens()).logits.equal(before)


def test_layers_of_ones_own_class_are_served_and_reported_as_those_they_are_made_from(model):
    with accelerate(model) as acceleration, torch.no_grad():
        want, rows = model(tokens()).logits, acceleration.rows()
    own = copy.deepcopy(model)
    for layer in own.modules():
        if type(layer).__module__.startswith("transformers.models."):
            layer.__class__ = type(f"Own{type(layer).__name__}", (type(layer),), {})
    with accelerate(own) as acceleration, torch.no_grad():
        found = [row._replace(layer=row.layer.removeprefix("Own")) for row in acceleration.rows()]
        assert sorted(found) == sorted(rows)
        assert own(tokens()).logits.equal(want)


def test_models_made_later():
    with accelerate() as acceleration:
        model = model_of("qwen3_5_text")
        rows = {row.function: row.path for row in acceleration.rows(model)}
        assert rows["torch_chunk_gated_delta_rule"] == "girih.delta_product, aten"
        with pytest.raises(ValueError, match="model"):
            acceleration.report()
    assert not any(row.path.startswith("girih") for row in acceleration.rows(model))


def test_what_is_not_served_is_said():
    torch.manual_seed(0)
    config = AutoConfig.for_model("falcon_mamba", **COMMON, state_size=4, expand=1)
    model = AutoModelForCausalLM.from_config(config)
    with accelerate(model) as acceleration:
        rows = {row.function: row for row in acceleration.rows()}
    assert rows["causal_conv1d_fn"].path.startswith("girih.short_conv")
    assert (
        rows["mamba_selective_scan"].path == "transformers" and "Mamba-1" in rows["mamba_selective_scan"].why
    )
    llama = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **COMMON))
    with pytest.raises(ValueError, match="LlamaForCausalLM without a layer that girih serves"):
        accelerate(llama)


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2"])
def test_compiled(family):
    model = model_of(family)
    with torch.no_grad(), accelerate(model):
        want = model(tokens()).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert off(compiled(tokens(), use_cache=False).logits, want) < 1e-5


@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_gradient_checkpointing(family):
    model = model_of(family).train()
    with accelerate(model):
        _, loss, grads = trained(model, input_ids=tokens())
        model.gradient_checkpointing_enable()
        _, again, found = trained(model, input_ids=tokens())
    assert off(again, loss) < 1e-6
    assert all(torch.allclose(found[name], g, atol=1e-6) for name, g in grads.items())


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba"])
def test_adapters_train_alike(family):
    """LoRA on the projections of the linear layers: losses of some steps, and the adapter that is saved."""
    from peft import LoraConfig, get_peft_model

    def fitted():
        torch.manual_seed(0)
        targets = ["out_proj", "in_proj_qkv", "in_proj"]
        model = get_peft_model(model_of(family), LoraConfig(r=4, target_modules=targets)).train()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        losses = []
        for step in range(3):
            ids = tokens(seed=step)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses), model

    want, model = fitted()
    with accelerate(model) as acceleration:
        assert "girih." in acceleration.report()
        found, _ = fitted()
    assert off(found, want) < 1e-5


def test_the_trainer_trains_alike(tmp_path):
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in tokens(batch=8, length=80)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )

    def fitted():
        model = model_of("qwen3_5_text").train()
        Trainer(model=model, args=arguments, train_dataset=rows).train()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    want = fitted()
    with accelerate():
        assert off(fitted(), want) < 1e-5


# ---- functions by themselves, with options that no model of these uses -------------------------------------


@functools.cache
def served(family):
    """The functions of a family's module, transformers' and girih's in their place, by name."""
    module = sys.modules[type(model_of(family)).__module__]
    theirs = {name: vars(module)[name] for name in SERVED if name in vars(module)}
    with accelerate(model_of(family)):
        return theirs, {name: vars(module)[name] for name in theirs}


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def both(family, name, call, *places):
    """What both functions return of the same arguments, and what they left in those that they write."""
    found = []
    for functions in served(family):
        given = {
            key: x.clone() if isinstance(x, torch.Tensor) and key in places else x for key, x in call.items()
        }
        output = functions[name](**given)
        found.append((*(output if isinstance(output, tuple) else (output,)), *(given[key] for key in places)))
    return zip(*found, strict=True)


def same(theirs, ours):
    assert (theirs is None) == (ours is None)
    if ours is not None:
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and off(ours, theirs) < 1e-5


# transformers 5.17 repeats key heads before it calls the delta rule.
SHARES_KEY_HEADS = version.parse(transformers.__version__) >= version.parse("5.24")


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_the_delta_rule_alone(name, length, grad):
    heads = 2 if SHARES_KEY_HEADS else 4
    call = {
        "query": drawn(2, length, heads, 8),
        "key": 0.3 * drawn(2, length, heads, 8, seed=1),
        "value": drawn(2, length, 4, 12),
        "g": -drawn(2, length, 4).abs(),
        "beta": drawn(2, length, 4, seed=1).sigmoid(),
    }
    for unit in (True, False):
        for state in (None, drawn(2, 4, 8, 12)):
            for last in (True, False):
                options = {"output_final_state": last, "use_qk_l2norm_in_kernel": unit}
                given = None if state is None else state.clone()
                with torch.set_grad_enabled(grad):
                    for pair in both("qwen3_next", name, call | options | {"initial_state": given}):
                        same(*pair)
                if state is not None and not (length == 1 and last and not grad):
                    assert given.equal(state)


OF_STEPS = [
    {},
    {"dt_bias": True},
    {"dt_softplus": True},
    {"D": True},
    {"D": True, "dt_bias": True, "dt_softplus": True},
]


@torch.no_grad()
@pytest.mark.parametrize("given", OF_STEPS, ids=lambda given: " ".join(given) or "nothing")
def test_a_scan_of_mamba2_alone(given):
    call = {
        "hidden_states": drawn(2, 40, 4, 8),
        "dt": drawn(2, 40, 4).abs(),
        "A": -drawn(4).exp(),
        "B": drawn(2, 40, 2, 6),
        "C": drawn(2, 40, 2, 6, seed=1),
        "chunk_size": 16,
        "dt_softplus": given.get("dt_softplus", False),
        "D": drawn(4) if "D" in given else None,
        "dt_bias": drawn(4, seed=1).abs() if "dt_bias" in given else None,
    }
    for state in (None, drawn(2, 4, 8, 6)):
        for last in (True, False):
            for limit in ({}, {"dt_limit": (0.4, 0.9)}):
                options = {"initial_states": state, "return_final_states": last, **limit}
                for pair in both("mamba2", "mamba2_chunk_scan", call | options):
                    same(*pair)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("own", [(), ("dt",), ("A",), ("A of a channel",), ("dt_bias",)], ids=str)
@pytest.mark.parametrize("given", OF_STEPS, ids=lambda given: " ".join(given) or "nothing")
def test_a_step_of_mamba2_alone(given, own, grad):
    """own: what differs from channel to channel, which transformers computes."""

    def over_channels(x, name, *sizes):
        wide = x[(..., *[None] * len(sizes))].expand(*x.shape, *sizes)
        return wide * (1 + drawn(*wide.shape).abs()) if name in own else wide

    call = {
        "hidden_states": drawn(2, 4, 8),
        "dt": over_channels(drawn(2, 4).abs(), "dt", 8),
        "A": over_channels(over_channels(-drawn(4).exp(), "A of a channel", 8), "A", 6),
        "B": drawn(2, 2, 6),
        "C": drawn(2, 2, 6, seed=1),
        "dt_softplus": given.get("dt_softplus", False),
        "D": drawn(4, 8) if "D" in given else None,
        "dt_bias": over_channels(drawn(4, seed=1).abs(), "dt_bias", 8) if "dt_bias" in given else None,
    }
    with torch.set_grad_enabled(grad):
        for z in (None, drawn(2, 4, 8, seed=2)):
            call |= {"z": z, "state": drawn(2, 4, 8, 6)}
            for pair in both("mamba2", "mamba2_selective_state_update", call, "state"):
                same(*pair)
        call["state"] = call["state"].bfloat16()
        output, state = both("mamba2", "mamba2_selective_state_update", call, "state")
        assert state[0].dtype == state[1].dtype == torch.bfloat16
        assert off(output[1], output[0]) < 1e-5 and state[1].equal(state[0])


@torch.no_grad()
@pytest.mark.parametrize("width", [1, 2, 4, 5, 7])
@pytest.mark.parametrize("activation", [None, "silu", "swish", "gelu"])
def test_a_filter_alone(activation, width):
    """Of up to four taps and without an activation or with SiLU; any other is transformers'."""
    for bias in (None, drawn(6)):
        call = {"weight": drawn(6, width), "bias": bias, "activation": activation}
        for pair in both("qwen3_next", "causal_conv1d_fn", call | {"hidden_states": drawn(2, 6, 30)}):
            same(*pair)
        for room in (width - 1, width, width + 3) if width > 1 else (1, 4):
            for length in (1, 2, 9):
                moved = {"hidden_states": drawn(2, 6, length), "conv_state": drawn(2, 6, room)}
                for pair in both("qwen3_next", "causal_conv1d_update", call | moved, "conv_state"):
                    same(*pair)


@torch.no_grad()
@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid", "gelu", "relu", "tanh"])
def test_a_norm_with_any_activation(activation):
    model = model_of("qwen3_next")
    norm = next(m for m in model.modules() if type(m).__name__ == "Qwen3NextRMSNormGated")
    norm.activation, norm.variance_epsilon = activation, 0.2
    norm.weight.normal_()
    x, gate = drawn(3, 5, 12), drawn(3, 5, 12, seed=1)
    want = norm(x, gate)
    with accelerate(model) as acceleration:
        assert off(norm(x, gate), want) < 1e-5
        rows = [row for row in acceleration.rows() if row.function == "Qwen3NextRMSNormGated"]
    ours = activation not in ("relu", "tanh")
    assert [row.path for row in rows] == ["girih.gated_rms_norm, aten" if ours else "transformers"]
    assert ours or rows[0].why == f"the activation {activation!r}"


# ---- warnings, the report, and the end of a patch --------------------------------------------------------

PATHS = {
    "qwen3_next": {
        ("Qwen3NextRMSNormGated", "girih.gated_rms_norm, aten"),
        ("torch_chunk_gated_delta_rule", "girih.delta_product, aten"),
        ("torch_recurrent_gated_delta_rule", "girih.delta_product_step, aten"),
        ("causal_conv1d_fn", "girih.short_conv, aten"),
        ("causal_conv1d_update", "girih.short_conv, aten"),
    },
    "mamba2": {
        ("mamba2_chunk_scan", "girih.gla, aten"),
        ("mamba2_selective_state_update", "girih.gla_step, aten"),
        ("mamba2_split_conv1d_scan_combined", "girih, in parts"),
        ("causal_conv1d_fn", "girih.short_conv, aten"),
        ("causal_conv1d_update", "girih.short_conv, aten"),
    },
}


@pytest.mark.parametrize("family", PATHS)
def test_a_report_has_every_function_and_how_it_is_computed(family):
    layers = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]} if family == "qwen3_next" else {}
    model = model_of(family, num_hidden_layers=4, **layers)
    with accelerate(model) as acceleration:
        rows, report = acceleration.rows(), acceleration.report().splitlines()
        assert {(row.function, row.path) for row in rows} == PATHS[family]
        assert {row.count for row in rows} == {3 if family == "qwen3_next" else 4}
        assert report[0].split() == ["layer", "function", "path", "why"]
        lines = [line.split()[:3] for line in report[1:]]
        assert lines == [[row.layer, f"x{row.count}", row.function] for row in rows]
        other = acceleration.rows(model_of(family))
        assert {row.count for row in other} == {1 if family == "qwen3_next" else 2}
    undone = acceleration.rows()
    assert {(row.path, row.why) for row in undone} == {("transformers", "undone")}


def test_a_filter_that_is_too_long_is_reported_and_stays():
    model = model_of("qwen3_next", linear_conv_kernel_dim=6)
    want = model(tokens()).logits
    with accelerate(model) as acceleration:
        rows = {row.function: row for row in acceleration.rows()}
        assert off(model(tokens()).logits, want) < 1e-5
    assert rows["causal_conv1d_fn"][-2:] == ("transformers", "a filter of 6 taps; girih.short_conv has 4")


def test_models_made_later_are_served_until_the_last_is_undone():
    post_init = transformers.PreTrainedModel.post_init
    first, second = accelerate(), accelerate()
    assert transformers.PreTrainedModel.post_init is not post_init
    first.undo()
    first.undo()
    model = model_of("lfm2")
    assert "girih." in second.report(model) and "girih." not in first.report(model)
    second.undo()
    assert transformers.PreTrainedModel.post_init is post_init
    assert "girih." not in second.report(model_of("lfm2"))
    with accelerate() as again:
        assert "girih." in again.report(model_of("lfm2"))
    assert transformers.PreTrainedModel.post_init is post_init


# ---- packed sequences --------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "bamba", "granitemoehybrid"])
def test_packed_embeddings_keep_apart_as_words_do(family):
    model, (_, batch) = model_of(family), packed()
    embedded = model.get_input_embeddings()(batch["input_ids"])
    with accelerate(model):
        want = model(**batch).logits
        found = model(inputs_embeds=embedded, position_ids=batch["position_ids"]).logits
    assert off(found, want) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("form", ["seq_idx", "cu_seq_lens_q", "cu_seqlens"])
@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "falcon_h1", "granitemoehybrid", "lfm2"])
def test_bounds_that_are_said_count_more_than_positions_that_go_on(family, form):
    model = model_of(family)
    parts, batch = packed(return_flash_attn_kwargs=True, return_seq_idx=True)
    bounds = batch["seq_idx" if form == "seq_idx" else "cu_seq_lens_q"]
    with accelerate(model):
        want = torch.cat([model(part, use_cache=False).logits for part in parts], 1)
        positions = torch.arange(sum(LENGTHS))[None]
        found = model(batch["input_ids"], position_ids=positions, **{form: bounds})
    assert off(found.logits, want) < 1e-5


def test_positions_of_text_are_told_from_those_of_an_image():
    text = torch.tensor([[0, 1, 0, 1]])
    assert packed_rows.text_positions(text).equal(text)
    assert packed_rows.text_positions(text[None]).equal(text)
    image = torch.full((1, 1, 4), 7).expand(3, 1, 4)
    assert packed_rows.text_positions(torch.cat((text[None], image))).equal(text)
    assert packed_rows.text_positions(image) is None
    assert packed_rows.text_positions(None) is None and packed_rows.text_positions(text.to("meta")) is None


def test_a_filter_refuses_packed_sequences_in_several_rows():
    _, ours = served("lfm2")
    with pytest.raises(ValueError, match="seq_idx has 2 rows; packed sequences lie in one"):
        ours["causal_conv1d_fn"](drawn(2, 6, 9), drawn(6, 3), seq_idx=torch.zeros(2, 9, dtype=torch.int32))
