"""Linear models of transformers compute the same results with girih's functions."""

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
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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
CONVOLUTIONS = {
    "layer_types": ["hybrid_sliding", "hybrid"],
    "head_dim": 16,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "d_rel": 4,
    "rel_extent": 64,
    "sliding_window_size": 64,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "unpadded_vocab_size": 64,
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
    "lara_mini": DELTA_RULE | EXPERTS,
    "minimax": EXPERTS
    | {
        # transformers counts the tokens of the cache wrongly if the first layer is linear. In the last layer
        # there is almost no decay.
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "num_hidden_layers": 3,
        "num_local_experts": 2,
        "block_size": 16,
    },
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
# Families with convolutions only. Parts of Inkling's models are always fp32.
CONVOLUTION_FAMILIES = {
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "inkling2_text": CONVOLUTIONS | {"n_layers_per_attn_res_block": 1},
    "inkling2_loop_text": CONVOLUTIONS
    | {
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
        "loop_gate_rank": 4,
    },
}
# Families that cannot separate packed sequences.
SINGLE_SEQUENCE_FAMILIES = {
    "mamba": {"state_size": 4, "expand": 1},
    "falcon_mamba": {"state_size": 4, "expand": 1},
    "jamba": {
        "mamba_d_state": 4,
        "mamba_expand": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "zamba": {
        "mamba_d_state": 4,
        "n_mamba_heads": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
    },
    "inkling_text": CONVOLUTIONS | {"n_shared_experts": 1},
}
# transformers 5.17 has fewer families.
FAMILIES, CONVOLUTION_FAMILIES, SINGLE_SEQUENCE_FAMILIES = (
    {family: options for family, options in families.items() if family in CONFIG_MAPPING}
    for families in (FAMILIES, CONVOLUTION_FAMILIES, SINGLE_SEQUENCE_FAMILIES)
)
MAMBA2_FAMILIES = ("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2")
TOKENS = 150  # several chunks, both of girih and of transformers


def model_of(family, seed=0, **options):
    """A small model with random weights. With the initial weights of transformers, a scan has
    little effect."""
    torch.manual_seed(seed)
    families = FAMILIES | CONVOLUTION_FAMILIES | SINGLE_SEQUENCE_FAMILIES
    options = COMMON | families[family] | options
    config = AutoConfig.for_model(family, **options)
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


def relative_error(found, want):
    """|found - want| / |want|"""
    return float((found.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


def compute_gradients(model, **inputs):
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
    """Logits, loss and all gradients together match transformers to 1e-5. A single gradient may be a few
    small numbers. Each is compared with float64: its error is at most 2e-5, or twice the error of
    transformers."""
    exact = compute_gradients(copy.deepcopy(model).double(), input_ids=tokens())[2]
    logits, loss, grads = compute_gradients(model, input_ids=tokens())
    with accelerate(model):
        our_logits, our_loss, our_grads = compute_gradients(model, input_ids=tokens())
    assert our_grads.keys() == grads.keys()
    our_flat, their_flat = (torch.cat([g.flatten() for g in all.values()]) for all in (our_grads, grads))
    assert (
        relative_error(our_logits, logits) < 1e-5
        and relative_error(our_loss, loss) < 1e-5
        and relative_error(our_flat, their_flat) < 1e-5
    )
    least = 1e-3 * max(g.norm() for g in exact.values())  # a smaller gradient is dominated by rounding
    for name, g in exact.items():
        limit = max(2e-5, 2 * relative_error(grads[name], g)) * g.norm().clamp_min(least)
        assert (our_grads[name] - g).norm() < limit, name


def test_changed_functions_change_the_logits(model, monkeypatch):
    """With changed functions the logits differ, so the linear layers matter in these models."""
    from girih import ops

    for name in ("delta_product", "gla", "short_conv"):
        original = getattr(ops, name)

        def other(*inputs, original=original, **options):
            o, state = original(*inputs, **options)
            return o + 0.01 * o.roll(1, -1), state  # a norm follows, which removes a factor

        monkeypatch.setattr(ops, name, other)
    with torch.no_grad():
        logits = model(tokens()).logits
        with accelerate(model):
            assert relative_error(model(tokens()).logits, logits) > 1e-4


@torch.no_grad()
def test_bf16_errors_are_not_larger(model):
    double, half = copy.deepcopy(model).double(), copy.deepcopy(model).bfloat16()
    ratios = []
    for seed in range(6):
        ids = tokens(seed=seed)
        exact, theirs = double(ids).logits, half(ids).logits
        with accelerate(half):
            ratios.append(relative_error(half(ids).logits, exact) / relative_error(theirs, exact))
    assert sum(ratios) / len(ratios) < 1.1, ratios


@torch.no_grad()
@pytest.mark.parametrize(
    "family", sorted(name for name in FAMILIES if "linear_key_head_dim" in FAMILIES[name])
)
def test_norms_have_the_models_epsilon(family):
    model = model_of(family, rms_norm_eps=0.3)
    want = model(tokens()).logits
    assert relative_error(model_of(family)(tokens()).logits, want) > 1e-2
    with accelerate(model):
        assert relative_error(model(tokens()).logits, want) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(model, side):
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, slice(0, 40) if side == "left" else slice(TOKENS - 40, TOKENS)] = 0
    inputs = {"input_ids": tokens() * mask, "attention_mask": mask}
    want = model(**inputs).logits
    with accelerate(model):
        found = model(**inputs).logits
    assert relative_error(found * mask[..., None], want * mask[..., None]) < 1e-5


def cache_of(model):
    """An empty cache under the argument name of the model's `forward`."""
    if model.config.model_type == "minimax":  # a class of its own
        return {"past_key_values": sys.modules[type(model).__module__].MiniMaxCache()}
    name = "cache_params" if model.config.model_type == "mamba2" else "past_key_values"
    return {name: DynamicCache(config=model.config)}


@torch.no_grad()
def test_a_prompt_in_pieces_and_token_by_token(model):
    def pieces():
        cache, parts = cache_of(model), tokens(length=100).split([60, 35, 1, 1, 3], 1)
        return torch.cat([model(part, use_cache=True, **cache).logits for part in parts], 1)

    want = pieces()
    with accelerate(model):
        assert relative_error(pieces(), want) < 1e-5


@pytest.mark.parametrize("lengths", [[60, 40], [60, 37, 3], [40, 1, 1], [2, 1, 5]], ids=str)
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"kimi_linear"}))
def test_gradients_flow_through_pieces_on_a_cache(family, lengths):
    """The gradients equal those of the whole text, although the cache is written in place.

    Kimi is excluded: its scan stays in transformers, and no gradient flows through the cache of transformers.
    """
    model = model_of(family).double()
    parts = tokens(length=sum(lengths)).split(lengths, 1)

    def gradients(parts):
        model.zero_grad()
        cache, start, loss = cache_of(model), 0, 0
        for part in parts:
            positions = torch.arange(start, start := start + part.shape[1]).expand(2, -1)
            loss += model(part, position_ids=positions, use_cache=True, **cache).logits.square().sum()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    with accelerate(model):
        assert relative_error(gradients(parts), gradients([torch.cat(parts, 1)])) < 1e-5


def tensors_of(cache):
    """All tensors of a cache of transformers, by layer and name."""
    found = {(i, "linear_cache", 0): x for i, x in enumerate(getattr(cache, "linear_cache", ())) if len(x)}
    for i, layer in enumerate(cache.layers):
        for name, x in vars(layer).items():
            parts = x.items() if isinstance(x, dict) else enumerate(x if isinstance(x, list) else [x])
            found |= {(i, name, j): part for j, part in parts if isinstance(part, torch.Tensor)}
    return found


def caches_step_by_step(model):
    """Tensors of the cache without girih and with girih, after a prompt, after single tokens and after
    several."""
    name, parts = next(iter(cache_of(model))), tokens(length=14).split([9, 1, 1, 1, 2], 1)
    (theirs,), (our_logits,) = cache_of(model).values(), cache_of(model).values()
    for part in parts:
        model(part, use_cache=True, **{name: theirs})
        with accelerate(model):
            model(part, use_cache=True, **{name: our_logits})
        yield tensors_of(theirs), tensors_of(our_logits)


@torch.no_grad()
def test_caches_are_transformers_caches(model):
    """A text that starts with girih can continue without girih: every tensor of the cache is the same."""
    for want, found in caches_step_by_step(model):
        assert want.keys() == found.keys() and len(want) >= 2
        for key, x in want.items():
            assert found[key].shape == x.shape and found[key].dtype == x.dtype, key
            if x.is_floating_point() and x.numel():
                assert (found[key] - x).abs().max() < 1e-4, key
            else:
                assert found[key].equal(x), key


@torch.no_grad()
def test_a_token_leaves_the_state_of_lightning_attention_before_it():
    """transformers replaces the tensor in the cache. An output with attentions holds the earlier ones."""
    model = model_of("minimax")
    (cache,) = cache_of(model).values()
    with accelerate(model):
        model(tokens(length=9), use_cache=True, past_key_values=cache)
        state = cache.linear_cache[1]
        before = state.clone()
        model(tokens(length=1), use_cache=True, past_key_values=cache)
    assert state.equal(before) and not cache.linear_cache[1].equal(before)


@torch.no_grad()
def test_bf16_caches_have_the_dtypes_of_transformers(model):
    for want, found in caches_step_by_step(copy.deepcopy(model).bfloat16()):
        assert {key: (x.shape, x.dtype) for key, x in found.items()} == {
            key: (x.shape, x.dtype) for key, x in want.items()
        }


@torch.no_grad()
@pytest.mark.parametrize("first", [True, False], ids=["in autocast", "outside"])
@pytest.mark.parametrize("later", [True, False], ids=["in autocast", "outside"])
def test_cache_inside_and_outside_autocast(model, first, later):
    def pieces():
        cache, parts = cache_of(model), tokens(length=100).split([60, 35, 1, 1, 3], 1)
        logits = []
        for i, part in enumerate(parts):
            with torch.autocast("cpu", torch.bfloat16, enabled=later if i else first):
                logits.append(model(part, use_cache=True, **cache).logits.float())
        return torch.cat(logits, 1)

    want = model(tokens(length=100)).logits
    with accelerate(model):
        assert relative_error(pieces(), want) < 0.1


@torch.no_grad()
@pytest.mark.parametrize("limit", [(0.5, 0.9), (0.0, 0.3), (1.5, float("inf"))], ids=str)
@pytest.mark.parametrize("family", MAMBA2_FAMILIES)
def test_time_step_limits(family, limit):
    """transformers limits the steps in a call of several tokens, and not in a call of one token."""
    model, ids = model_of(family), tokens(length=40)
    unlimited = model(ids).logits
    limited = [layer for layer in model.modules() if hasattr(layer, "time_step_limit")]
    for layer in limited:
        layer.time_step_limit = limit

    def pieces():
        cache = cache_of(model)
        return torch.cat(
            [model(part, use_cache=True, **cache).logits for part in ids.split([37, 1, 2], 1)], 1
        )

    want, in_pieces = model(ids).logits, pieces()
    assert limited and relative_error(unlimited, want) > 1e-3
    with accelerate(model):
        assert relative_error(model(ids).logits, want) < 1e-5 and relative_error(pieces(), in_pieces) < 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.filterwarnings("default:girih.accelerate")
def test_without_a_gpu_there_is_a_warning():
    with pytest.warns(
        UserWarning, match="without a GPU the layers compute the same, but hardly faster"
    ) as warned:
        accelerate(model_of("lfm2")).undo()
    assert warned[0].filename == __file__


@pytest.mark.parametrize("generation", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generated_text_is_the_same(model, generation):
    ids = tokens(length=70)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, **generation}
    want = model.generate(ids, **options)
    with accelerate(model):
        assert model.generate(ids, **options).equal(want)


def test_text_with_a_static_cache_is_the_same(model):
    ids = tokens(length=40)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    want = model.generate(ids, **options)
    with accelerate(model):
        assert model.generate(ids, **options, cache_implementation="static").equal(want)


def test_hidden_states_of_generated_text(model):
    def hidden_states():
        options = {"output_hidden_states": True, "return_dict_in_generate": True, "do_sample": False}
        steps = model.generate(tokens(length=40), max_new_tokens=4, **options).hidden_states
        return torch.cat([states.flatten() for step in steps for states in step])

    want = hidden_states()
    with accelerate(model):
        assert relative_error(hidden_states(), want) < 1e-5


@torch.no_grad()
def test_fp16_errors_are_not_larger(model):
    double, half = copy.deepcopy(model).double(), copy.deepcopy(model).half()
    exact, theirs = double(tokens()).logits, half(tokens()).logits
    with accelerate(half):
        assert relative_error(half(tokens()).logits, exact) < 2 * relative_error(theirs, exact)


ASSISTED = {"lookup": {"prompt_lookup_num_tokens": 3}, "draft model": {}}


@pytest.mark.filterwarnings("ignore:.*past_key_values")
@pytest.mark.parametrize("way", ASSISTED)
def test_assisted_text_is_the_plain_text_or_refused(model, way):
    """transformers refuses models whose states cannot drop the rejected tokens of a draft."""
    ids, options = tokens(batch=1, length=30), {"max_new_tokens": 20, "do_sample": False}
    assistant = ASSISTED[way] or {"assistant_model": model_of("lfm2", seed=1)}
    with accelerate(model):
        want = model.generate(ids, **options)
        if model.config.model_type == "lfm2":  # convolutions drop tokens
            assert model.generate(ids, **assistant, **options).equal(want)
        else:
            with pytest.raises((ValueError, RuntimeError), match="(?i)assisted (generation|decoding)"):
                model.generate(ids, **assistant, **options)


@pytest.mark.parametrize("family", ["qwen3_next", "olmo_hybrid", "bamba", "nemotron_h", "zamba2", "lfm2"])
def test_text_drafted_by_an_accelerated_model(family):
    """A draft changes the speed, never the text. Drafts of recurrent layers still hold rejected tokens."""
    model, draft = model_of("lfm2"), model_of(family, seed=1)
    ids, options = tokens(batch=1, length=30), {"max_new_tokens": 20, "do_sample": False}
    want = model.generate(ids, **options)
    with accelerate(draft):
        assert model.generate(ids, assistant_model=draft, **options).equal(want)


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
# The scan of Kimi stays in transformers, which refuses packed sequences without another package.
PACKED_FAMILIES = sorted(FAMILIES.keys() - {"kimi_linear"})


def pack_sequences(lengths=LENGTHS, **options):
    """Sequences `[1, length]`, and one row of these sequences from the collator of transformers."""
    parts = [tokens(batch=1, length=n, seed=n) for n in lengths]
    batch = DataCollatorWithFlattening(**options)([{"input_ids": part[0]} for part in parts])
    batch.pop("labels")
    return parts, batch


@torch.no_grad()
@pytest.mark.parametrize("form", COLLATORS)
@pytest.mark.parametrize("family", PACKED_FAMILIES)
def test_packed_sequences_are_independent(family, form):
    """Without girih, transformers mixes packed sequences or refuses them."""
    model = model_of(family)
    parts, batch = pack_sequences(**COLLATORS[form])
    want = torch.cat([model(part, use_cache=False).logits for part in parts], 1)
    try:
        without_girih = model(**batch, use_cache=False).logits
        assert relative_error(without_girih, want) > 1e-3
    except ValueError as error:
        assert "packed sequences" in str(error)
    with accelerate(model):
        found = model(**batch)
    assert relative_error(found.logits, want) < 1e-5
    assert found.get("cache") is None and found.get("past_key_values") is None


@pytest.mark.parametrize("form", ["position_ids", "seq_idx alone"])
@pytest.mark.parametrize("family", PACKED_FAMILIES)
def test_gradients_of_packed_sequences(family, form):
    """The gradients of packed sequences are the sum over the sequences."""
    model = model_of(family).train()
    parts, batch = pack_sequences([40, 1, 23], **COLLATORS[form])

    def gradients(*calls):
        model.zero_grad()
        sum(model(**call, use_cache=False).logits.square().sum() for call in calls).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    with accelerate(model):
        want = gradients(*({"input_ids": part} for part in parts))
        assert relative_error(gradients(batch), want) < 1e-4


# transformers 5.17 mixes packed sequences in its own linear layers.
REFUSES_PACKED = version.parse(transformers.__version__) >= version.parse("5.23")


@pytest.mark.skipif(not REFUSES_PACKED, reason="this transformers mixes packed sequences")
@torch.no_grad()
def test_scan_of_transformers_refuses_packed_sequences():
    model, (_, batch) = model_of("kimi_linear"), pack_sequences()
    with accelerate(model), pytest.raises(ValueError, match="chunk_kda.* packed sequences"):
        model(**batch)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_bounds_are_read_once_a_call_and_only_if_needed(family, monkeypatch):
    """Reading positions waits for the device: once a model call, never with a cache or a mask."""
    model, (parts, batch), sources = model_of(family), pack_sequences(), []
    find = packed_rows.find_bounds
    monkeypatch.setattr(packed_rows, "find_bounds", lambda *args: sources.append(args[0]) or find(*args))
    ids, positions = batch["input_ids"], torch.arange(104)[None]
    with accelerate(model):
        model(**batch)
        assert sources == ["position_ids"]
        model(ids, seq_idx=torch.zeros(1, 104, dtype=torch.int32))
        assert sources == ["position_ids", "seq_idx"]
        sources.clear()
        model.generate(parts[0], max_new_tokens=3, do_sample=False)
        model(ids, attention_mask=torch.ones_like(ids), position_ids=batch["position_ids"])
        model(parts[1], position_ids=torch.tensor([[7]]))
        model(ids, position_ids=positions, **cache_of(model))
        assert sources == []
        assert model(ids, position_ids=positions).logits.equal(model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_packed_sequences_in_two_rows_or_with_a_cache_are_refused(family):
    model, (_, batch) = model_of(family), pack_sequences()
    rows = {name: x.expand(2, -1) for name, x in batch.items()}
    with accelerate(model):
        with pytest.raises(ValueError, match="position_ids starts new sequences within a row"):
            model(**rows)
        with pytest.raises(ValueError, match="use_cache is True, but no cache is kept of packed sequences"):
            model(**batch, use_cache=True)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_next", "olmo_hybrid"])
def test_packed_sequences_with_a_given_cache_are_refused(family):
    model, bounds = model_of(family), torch.tensor([0, 10, 11, 30], dtype=torch.int32)
    cache = DynamicCache(config=model.config)
    with (
        accelerate(model),
        pytest.raises(
            ValueError, match="(cache|past_key_values) is given with 3 packed sequences; expected none"
        ),
    ):
        model(tokens(batch=1, length=30), past_key_values=cache, cu_seq_lens_q=bounds)


@torch.no_grad()
@pytest.mark.parametrize("form", ["position_ids", "cu_seq_lens_q alone", "seq_idx alone"])
@pytest.mark.parametrize("family", CONVOLUTION_FAMILIES)
def test_packed_sequences_in_front_of_convolutions(family, form):
    model = model_of(family)
    parts, batch = pack_sequences(**COLLATORS[form])
    want = torch.cat([model(part, use_cache=False).logits for part in parts], 1)
    with accelerate(model) as acceleration:
        assert {row.path for row in acceleration.rows()} == {"girih.short_conv, aten"}
        assert relative_error(model(**batch).logits, want) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("form", COLLATORS)
@pytest.mark.parametrize("family", SINGLE_SEQUENCE_FAMILIES)
def test_families_that_would_mix_packed_sequences_refuse_them(family, form):
    model = model_of(family)
    subclassed = copy.deepcopy(model)
    subclassed.base_model.__class__ = type("Own", (type(model.base_model),), {})
    _, batch = pack_sequences(**COLLATORS[form])
    _, single = pack_sequences([20], **COLLATORS[form])
    want = model(single["input_ids"]).logits
    with accelerate(model):
        for called in (model, model.base_model, subclassed):
            with pytest.raises(
                ValueError, match="is called with 3 packed sequences; expected one sequence a"
            ):
                called(**batch)
        assert relative_error(model(**single).logits, want) < 1e-5
        mask = torch.ones_like(single["input_ids"])
        assert relative_error(model(single["input_ids"], attention_mask=mask).logits, want) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("way", ["injected", "replaced"])
@pytest.mark.parametrize("family", ["bamba", "granitemoehybrid", "olmo_hybrid", "lfm2"])
def test_packed_sequences_of_a_converted_model(family, way):
    """girih's mixer is in the attention layer, and the linear layer is accelerated. transformers alone
    refuses."""
    model, (parts, batch) = model_of(family), pack_sequences()
    girih.inject(model, weight=0.5) if way == "injected" else girih.replace_attention(model, "gla")
    if REFUSES_PACKED:
        with pytest.raises(ValueError, match="packed sequences"):
            model(**batch)
    with accelerate(model):
        want = torch.cat([model(part, use_cache=False).logits for part in parts], 1)
        assert relative_error(model(**batch).logits, want) < 2e-5


@torch.no_grad()
def test_packed_sequences_of_a_subclass():
    """Granite's attention gets a mask from girih, which looks for the model by the name of its class."""
    model, (parts, batch) = model_of("granitemoehybrid"), pack_sequences()
    model.model.__class__ = type("Own", (type(model.model),), {})
    want = torch.cat([model(part, use_cache=False).logits for part in parts], 1)
    with accelerate(model):
        assert relative_error(model(**batch).logits, want) < 1e-5


@torch.no_grad()
def test_attention_without_a_mask_gets_the_bounds():
    """Flash attention reads the bounds. Granite passes no position_ids to attention."""
    seen = {}

    def attend(module, q, k, v, attention_mask, **kwargs):
        seen.update(kwargs, attention_mask=attention_mask)
        return v.transpose(1, 2), None

    AttentionInterface.register("girih_seen", attend)
    model, (_, batch) = model_of("granitemoehybrid"), pack_sequences()
    model.config._attn_implementation = "girih_seen"
    with accelerate(model):
        model(**batch)
    assert seen["cu_seq_lens_q"].tolist() == seen["cu_seq_lens_k"].tolist() == [0, 70, 71, 104]
    assert seen["max_length_q"] == seen["max_length_k"] == 70 and seen["attention_mask"] is None
    with accelerate(model):
        model(**batch, max_length_q=90)
    # a given length is not computed from the bounds
    assert seen["max_length_q"] == seen["max_length_k"] == 90


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba"])
def test_packed_sequences_compiled(family):
    """Positions are read on the host. This breaks the graph, and is an error with fullgraph=True."""
    model, (_, batch) = model_of(family), pack_sequences()
    bounds = torch.tensor([0, 70, 71, 104], dtype=torch.int32)
    with accelerate(model):
        want = model(**batch).logits
        assert relative_error(torch.compile(model, backend="aot_eager")(**batch).logits, want) < 1e-5
        torch.compiler.reset()
        whole = torch.compile(model, fullgraph=True, backend="aot_eager")
        with pytest.raises(torch._dynamo.exc.Unsupported, match="are read on the host; give cu_seq_lens_q"):
            whole(**batch)
        torch.compiler.reset()
        assert relative_error(whole(**batch, cu_seq_lens_q=bounds).logits, want) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_bounds_of_a_prompt_that_goes_on(family):
    """With a cache, the input of the convolution has more columns than the bounds count."""
    model, ids = model_of(family), tokens(batch=1, length=30)
    want = model(ids).logits[:, 20:]
    with accelerate(model):
        cache = DynamicCache(config=model.config)
        model(ids[:, :20], past_key_values=cache, use_cache=True)
        bounds = {"cu_seq_lens_q": torch.tensor([0, 10], dtype=torch.int32)}
        found = model(ids[:, 20:], past_key_values=cache, use_cache=True, **bounds).logits
    assert relative_error(found, want) < 1e-5


def test_undo(model):
    with torch.no_grad():
        before = model(tokens()).logits
        acceleration = accelerate(model)
        again = accelerate(model)
        assert "girih." in acceleration.report()
        acceleration.undo()
        assert "girih." in again.report()  # another acceleration is still active
        again.undo()
        again.undo()
        assert "girih." not in again.report()
        assert model(tokens()).logits.equal(before)


def hook_every_layer(model):
    """As `device_map` over several devices does: the hooks keep `forward` as a bound method."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for layer in model.modules():
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu"))
    return model


HOOKED_FAMILIES = ["qwen3_next", "mamba2", "granitemoehybrid", "minimax", "lfm2"]


@torch.no_grad()
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("family", HOOKED_FAMILIES)
def test_models_with_hooks(family, when):
    model, (parts, batch) = model_of(family), pack_sequences()
    ids = tokens()
    want = model(ids).logits
    want_of_parts = torch.cat([model(part, use_cache=False).logits for part in parts], 1)
    if when == "before":
        hook_every_layer(model)
    with accelerate(model) as acceleration:
        if when == "after":
            hook_every_layer(model)
        assert all(row.path.startswith("girih") for row in acceleration.rows())
        assert relative_error(model(ids).logits, want) < 1e-5
        assert relative_error(model(**batch).logits, want_of_parts) < 1e-5
    assert model(ids).logits.equal(want)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_next", "minimax"])
def test_hooks_of_another_model_are_reported(family):
    """Classes do not reach the methods that hooks of another model hold."""
    hooked = hook_every_layer(model_of(family))
    with accelerate(model_of(family)) as first:
        rows = [row for row in first.rows(hooked) if row.function[0].isupper()]
        assert rows and all("call accelerate with this model" in row.why for row in rows)
        with accelerate(hooked) as second:
            assert all(row.path.startswith("girih") for row in second.rows())


@torch.no_grad()
@pytest.mark.parametrize("first", [0, 1])
def test_hooks_of_two_models_are_undone_in_any_order(first):
    models = [hook_every_layer(model_of("minimax")) for _ in range(2)]
    want = models[0](tokens()).logits
    accelerations = [accelerate(model) for model in models]
    for i in (first, 1 - first):
        assert not models[i](tokens()).logits.equal(want)
        accelerations[i].undo()
    assert all(model(tokens()).logits.equal(want) for model in models)


@torch.no_grad()
def test_hooks_of_a_later_model_are_undone():
    with accelerate():
        model = hook_every_layer(model_of("qwen3_next"))
        found = model(tokens()).logits
    assert model(tokens()).logits.equal(model_of("qwen3_next")(tokens()).logits) and not found.isnan().any()


@torch.no_grad()
@pytest.mark.parametrize("family", HOOKED_FAMILIES)
def test_models_with_offloaded_weights(family):
    from accelerate.hooks import attach_align_device_hook

    model = model_of(family)
    want = model(tokens()).logits
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=weights)
    assert any(p.device.type == "meta" for p in model.parameters())
    with accelerate(model):
        assert relative_error(model(tokens()).logits, want) < 1e-5


def test_subclassed_layers_are_served_and_reported(model):
    with accelerate(model) as acceleration, torch.no_grad():
        want, rows = model(tokens()).logits, acceleration.rows()
    subclassed = copy.deepcopy(model)
    for layer in subclassed.modules():
        if type(layer).__module__.startswith("transformers.models."):
            layer.__class__ = type(f"Own{type(layer).__name__}", (type(layer),), {})
    with accelerate(subclassed) as acceleration, torch.no_grad():
        found = [row._replace(layer=row.layer.removeprefix("Own")) for row in acceleration.rows()]
        assert sorted(found) == sorted(rows)
        assert subclassed(tokens()).logits.equal(want)


def test_models_made_later():
    with accelerate() as acceleration:
        model = model_of("qwen3_5_text")
        rows = {row.function: row.path for row in acceleration.rows(model)}
        assert rows["torch_chunk_gated_delta_rule"] == "girih.delta_product, aten"
        with pytest.raises(ValueError, match="model"):
            acceleration.report()
    assert not any(row.path.startswith("girih") for row in acceleration.rows(model))


def test_unserved_functions_are_reported():
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
        assert relative_error(compiled(tokens(), use_cache=False).logits, want) < 1e-5


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_gradient_checkpointing(family):
    model = model_of(family).train()
    with accelerate(model):
        _, loss, grads = compute_gradients(model, input_ids=tokens())
        model.gradient_checkpointing_enable()
        _, again, found = compute_gradients(model, input_ids=tokens())
    assert relative_error(again, loss) < 1e-6
    assert all(torch.allclose(found[name], g, atol=1e-6) for name, g in grads.items())


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba"])
def test_adapters_train_alike(family):
    """LoRA on the projections of the linear layers: the losses of three steps are the same."""
    from peft import LoraConfig, get_peft_model

    def train_model():
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

    want, model = train_model()
    with accelerate(model) as acceleration:
        assert "girih." in acceleration.report()
        found, _ = train_model()
    assert relative_error(found, want) < 1e-5


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

    def train_model():
        model = model_of("qwen3_5_text").train()
        Trainer(model=model, args=arguments, train_dataset=rows).train()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    want = train_model()
    with accelerate():
        assert relative_error(train_model(), want) < 1e-5


# ---- functions by themselves, with options that no model of these uses -------------------------------------


@functools.cache
def functions_of(family):
    """Functions of a family's module by name: from transformers, and from girih."""
    module = sys.modules[type(model_of(family)).__module__]
    theirs = {name: vars(module)[name] for name in SERVED if name in vars(module)}
    with accelerate(model_of(family)):
        return theirs, {name: vars(module)[name] for name in theirs}


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def call_both(family, name, call, *places):
    """Results of both functions for the same arguments, and the arguments in `places`, which the functions
    write."""
    found = []
    for functions in functions_of(family):
        arguments = {
            key: x.clone() if isinstance(x, torch.Tensor) and key in places else x for key, x in call.items()
        }
        output = functions[name](**arguments)
        found.append(
            (*(output if isinstance(output, tuple) else (output,)), *(arguments[key] for key in places))
        )
    return zip(*found, strict=True)


def assert_same(theirs, our_logits):
    assert (theirs is None) == (our_logits is None)
    if our_logits is not None:
        assert (
            our_logits.shape == theirs.shape
            and our_logits.dtype == theirs.dtype
            and relative_error(our_logits, theirs) < 1e-5
        )


# transformers 5.17 repeats key heads before it calls the delta rule.
SHARES_KEY_HEADS = version.parse(transformers.__version__) >= version.parse("5.24")


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_the_delta_rule_alone(name, length, grad):
    heads = 2 if SHARES_KEY_HEADS else 4
    call = {
        "query": draw(2, length, heads, 8),
        "key": 0.3 * draw(2, length, heads, 8, seed=1),
        "value": draw(2, length, 4, 12),
        "g": -draw(2, length, 4).abs(),
        "beta": draw(2, length, 4, seed=1).sigmoid(),
    }
    for unit in (True, False):
        for state in (None, draw(2, 4, 8, 12)):
            for last in (True, False):
                options = {"output_final_state": last, "use_qk_l2norm_in_kernel": unit}
                initial = None if state is None else state.clone()
                with torch.set_grad_enabled(grad):
                    for pair in call_both("qwen3_next", name, call | options | {"initial_state": initial}):
                        assert_same(*pair)
                if state is not None and not (length == 1 and last and not grad):
                    assert initial.equal(state)


STEP_OPTIONS = [
    {},
    {"dt_bias": True},
    {"dt_softplus": True},
    {"D": True},
    {"D": True, "dt_bias": True, "dt_softplus": True},
]


@torch.no_grad()
@pytest.mark.parametrize(
    "parts_given", STEP_OPTIONS, ids=lambda parts_given: " ".join(parts_given) or "nothing"
)
def test_a_scan_of_mamba2_alone(parts_given):
    call = {
        "hidden_states": draw(2, 40, 4, 8),
        "dt": draw(2, 40, 4).abs(),
        "A": -draw(4).exp(),
        "B": draw(2, 40, 2, 6),
        "C": draw(2, 40, 2, 6, seed=1),
        "chunk_size": 16,
        "dt_softplus": parts_given.get("dt_softplus", False),
        "D": draw(4) if "D" in parts_given else None,
        "dt_bias": draw(4, seed=1).abs() if "dt_bias" in parts_given else None,
    }
    for state in (None, draw(2, 4, 8, 6)):
        for last in (True, False):
            for limit in ({}, {"dt_limit": (0.4, 0.9)}):
                options = {"initial_states": state, "return_final_states": last, **limit}
                for pair in call_both("mamba2", "mamba2_chunk_scan", call | options):
                    assert_same(*pair)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("per_channel", [(), ("dt",), ("A",), ("A of a channel",), ("dt_bias",)], ids=str)
@pytest.mark.parametrize(
    "parts_given", STEP_OPTIONS, ids=lambda parts_given: " ".join(parts_given) or "nothing"
)
def test_a_step_of_mamba2_alone(parts_given, per_channel, grad):
    """per_channel: arguments that differ from channel to channel. transformers computes these steps."""

    def over_channels(x, name, *sizes):
        wide = x[(..., *[None] * len(sizes))].expand(*x.shape, *sizes)
        return wide * (1 + draw(*wide.shape).abs()) if name in per_channel else wide

    call = {
        "hidden_states": draw(2, 4, 8),
        "dt": over_channels(draw(2, 4).abs(), "dt", 8),
        "A": over_channels(over_channels(-draw(4).exp(), "A of a channel", 8), "A", 6),
        "B": draw(2, 2, 6),
        "C": draw(2, 2, 6, seed=1),
        "dt_softplus": parts_given.get("dt_softplus", False),
        "D": draw(4, 8) if "D" in parts_given else None,
        "dt_bias": over_channels(draw(4, seed=1).abs(), "dt_bias", 8) if "dt_bias" in parts_given else None,
    }
    with torch.set_grad_enabled(grad):
        for z in (None, draw(2, 4, 8, seed=2)):
            call |= {"z": z, "state": draw(2, 4, 8, 6)}
            for pair in call_both("mamba2", "mamba2_selective_state_update", call, "state"):
                assert_same(*pair)
        call["state"] = call["state"].bfloat16()
        output, state = call_both("mamba2", "mamba2_selective_state_update", call, "state")
        assert state[0].dtype == state[1].dtype == torch.bfloat16
        assert relative_error(output[1], output[0]) < 1e-5 and state[1].equal(state[0])


@torch.no_grad()
@pytest.mark.parametrize("width", [1, 2, 4, 5, 7])
@pytest.mark.parametrize("activation", [None, "silu", "swish", "gelu"])
def test_a_filter_alone(activation, width):
    """girih computes filters of up to four taps with SiLU or no activation. transformers
    computes all others."""
    for bias in (None, draw(6)):
        call = {"weight": draw(6, width), "bias": bias, "activation": activation}
        for pair in call_both("qwen3_next", "causal_conv1d_fn", call | {"hidden_states": draw(2, 6, 30)}):
            assert_same(*pair)
        for room in (width - 1, width, width + 3) if width > 1 else (1, 4):
            for length in (1, 2, 9):
                tensors = {"hidden_states": draw(2, 6, length), "conv_state": draw(2, 6, room)}
                for pair in call_both("qwen3_next", "causal_conv1d_update", call | tensors, "conv_state"):
                    assert_same(*pair)


@torch.no_grad()
@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid", "gelu", "relu", "tanh"])
def test_a_norm_with_any_activation(activation):
    model = model_of("qwen3_next")
    norm = next(m for m in model.modules() if type(m).__name__ == "Qwen3NextRMSNormGated")
    norm.activation, norm.variance_epsilon = activation, 0.2
    norm.weight.normal_()
    x, gate = draw(3, 5, 12), draw(3, 5, 12, seed=1)
    want = norm(x, gate)
    with accelerate(model) as acceleration:
        assert relative_error(norm(x, gate), want) < 1e-5
        rows = [row for row in acceleration.rows() if row.function == "Qwen3NextRMSNormGated"]
    our_logits = activation not in ("relu", "tanh")
    assert [row.path for row in rows] == ["girih.gated_rms_norm, aten" if our_logits else "transformers"]
    assert our_logits or rows[0].why == f"the activation {activation!r}"


# ---- warnings, the report, and the end of a patch --------------------------------------------------------

PATHS = {
    "minimax": {("MiniMaxLightningAttention", "girih.gla, aten")},
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


@pytest.mark.parametrize("family", [family for family in PATHS if family in FAMILIES])
def test_report_lists_every_function_with_its_path(family):
    layers = {} if family == "mamba2" else {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    model = model_of(family, num_hidden_layers=4, **layers)
    with accelerate(model) as acceleration:
        rows, report = acceleration.rows(), acceleration.report().splitlines()
        assert {(row.function, row.path) for row in rows} == PATHS[family]
        assert {row.count for row in rows} == {4 if family == "mamba2" else 3}
        assert report[0].split() == ["layer", "function", "path", "why"]
        lines = [line.split()[:3] for line in report[1:]]
        assert lines == [[row.layer, f"x{row.count}", row.function] for row in rows]
        other = acceleration.rows(model_of(family))
        assert {row.count for row in other} == {2 if family == "mamba2" else 1}
    undone = acceleration.rows()
    assert {(row.path, row.why) for row in undone} == {("transformers", "undone")}


def test_filter_that_is_too_long_is_reported_and_not_replaced():
    model = model_of("qwen3_next", linear_conv_kernel_dim=6)
    want = model(tokens()).logits
    with accelerate(model) as acceleration:
        rows = {row.function: row for row in acceleration.rows()}
        assert relative_error(model(tokens()).logits, want) < 1e-5
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
def test_packed_embeddings_are_independent(family):
    model, (_, batch) = model_of(family), pack_sequences()
    embedded = model.get_input_embeddings()(batch["input_ids"])
    with accelerate(model):
        want = model(**batch).logits
        found = model(inputs_embeds=embedded, position_ids=batch["position_ids"]).logits
    assert relative_error(found, want) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("form", ["seq_idx", "cu_seq_lens_q", "cu_seqlens"])
@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "falcon_h1", "granitemoehybrid", "lfm2"])
def test_explicit_bounds_override_positions(family, form):
    model = model_of(family)
    parts, batch = pack_sequences(return_flash_attn_kwargs=True, return_seq_idx=True)
    bounds = batch["seq_idx" if form == "seq_idx" else "cu_seq_lens_q"]
    with accelerate(model):
        want = torch.cat([model(part, use_cache=False).logits for part in parts], 1)
        positions = torch.arange(sum(LENGTHS))[None]
        found = model(batch["input_ids"], position_ids=positions, **{form: bounds})
    assert relative_error(found.logits, want) < 1e-5


def test_text_positions_differ_from_image_positions():
    text = torch.tensor([[0, 1, 0, 1]])
    assert packed_rows.text_positions(text).equal(text)
    assert packed_rows.text_positions(text[None]).equal(text)
    image = torch.full((1, 1, 4), 7).expand(3, 1, 4)
    assert packed_rows.text_positions(torch.cat((text[None], image))).equal(text)
    assert packed_rows.text_positions(image) is None
    assert packed_rows.text_positions(None) is None and packed_rows.text_positions(text.to("meta")) is None


def test_a_filter_refuses_packed_sequences_in_several_rows():
    _, our_logits = functions_of("lfm2")
    with pytest.raises(ValueError, match="seq_idx has 2 rows; packed sequences lie in one"):
        our_logits["causal_conv1d_fn"](
            draw(2, 6, 9), draw(6, 3), seq_idx=torch.zeros(2, 9, dtype=torch.int32)
        )
