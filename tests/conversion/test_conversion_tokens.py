"""Tokens that a converted layer reads: padding on either side, and packed sequences in every form of the
arguments."""

import copy

import girih
import pytest
import torch
from converted import FAMILIES, IDS, WAYS, attention, base_model, close, converted
from girih.models.adapters.attention_call import valid_tokens
from transformers import DataCollatorWithFlattening

SEQUENCES = [[5, 9, 12, 7, 7, 11], [3], [8, 8, 4, 6, 12, 22, 9, 11, 5], [4, 31]]
COLLATORS = {
    "position_ids": {},
    "cu_seq_lens_q": {"return_flash_attn_kwargs": True},
    "cu_seq_lens_q alone": {"return_flash_attn_kwargs": True, "return_position_ids": False},
    "seq_idx": {"return_seq_idx": True, "return_position_ids": False},
}
CASES = [("llama", way) for way in WAYS] + [
    (family, "both, gelu") for family in FAMILIES if family != "llama"
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def model(request):
    return converted(*request.param)


def make_packed_batch(**options):
    batch = DataCollatorWithFlattening(**options)([{"input_ids": ids} for ids in SEQUENCES])
    batch.pop("labels")
    return batch


def logits_of_each(model):
    return torch.cat([model(torch.tensor([ids])).logits for ids in SEQUENCES], 1)


@torch.no_grad()
@pytest.mark.parametrize("form", COLLATORS)
def test_packed_sequences_are_independent(model, form):
    output = model(**make_packed_batch(**COLLATORS[form]))
    close(output.logits, logits_of_each(model))
    assert output.past_key_values is None


@torch.no_grad()
def test_cu_seqlens_alone_packs_too(model):
    batch = make_packed_batch(return_flash_attn_kwargs=True, return_position_ids=False)
    close(model(batch["input_ids"], cu_seqlens=batch["cu_seq_lens_q"]).logits, logits_of_each(model))


def test_gradients_of_packed_sequences_match_separate_sequences(model):
    """In float64, except for the norms of Gemma in fp32. In fp32 some gradients have only three correct
    digits."""
    model = copy.deepcopy(model).double()

    def gradients(logits):
        model.zero_grad()
        logits.square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    packed_gradients, separate_gradients = (
        gradients(model(**make_packed_batch()).logits),
        gradients(logits_of_each(model)),
    )
    for name, grad in separate_gradients.items():
        close(packed_gradients[name], grad, 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("form", ["position_ids", "cu_seqlens", "cu_seq_lens_q", "seq_idx"])
@pytest.mark.parametrize("positions", [False, True], ids=["", "positions do not restart"])
def test_packed_sequences_with_masks_and_positions_are_independent(model, form, positions):
    if model.config.model_type == "girih":
        pytest.skip("girih's own models take packed sequences without a mask only")
    batch = make_packed_batch(return_flash_attn_kwargs=True, return_seq_idx=True)
    value = batch["cu_seq_lens_q" if form == "cu_seqlens" else form]
    call = {"attention_mask": torch.ones_like(batch["input_ids"])}
    if positions:
        call["position_ids"] = torch.arange(18)[None]
    if positions and form == "position_ids":
        pytest.skip("nothing else says where they start")
    close(model(batch["input_ids"], **call | {form: value}).logits, logits_of_each(model))


def test_a_padding_mask_of_packed_sequences_is_refused():
    batch = make_packed_batch(return_flash_attn_kwargs=True)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -1] = 0
    with pytest.raises(ValueError, match="attention_mask: packed sequences have no padding"):
        converted()(batch["input_ids"], attention_mask=mask, cu_seq_lens_q=batch["cu_seq_lens_q"])


@torch.no_grad()
@pytest.mark.parametrize("way", ["injected", "gsa"])
def test_a_mask_of_blocks_alone_is_refused(way):
    model = converted("llama", way)
    blocks = [torch.ones(len(ids), len(ids)).tril() for ids in SEQUENCES]
    mask = torch.block_diag(*blocks).bool()[None, None]
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    batch = make_packed_batch()
    for each in (mask, added):
        with pytest.raises(ValueError, match="attention_mask: a token does not see the one before it"):
            model(batch["input_ids"], attention_mask=each, use_cache=False)
        close(model(**batch, attention_mask=each, use_cache=False).logits, logits_of_each(model))
    causal = torch.ones(18, 18, dtype=torch.bool).tril()[None, None]
    close(model(batch["input_ids"], attention_mask=causal).logits, model(batch["input_ids"]).logits)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_masked_tokens_have_no_effect(model, side):
    mask = torch.ones_like(IDS)
    if side == "between":
        if model.config.model_type in ("mistral", "gemma3_text", "girih") or getattr(
            attention(model), "max_self_attn_length", None
        ):
            pytest.skip("attention counts the tokens that are masked, in its window or in its positions")
        mask[0, 4:7] = 0
    else:
        mask[0, slice(0, 6) if side == "left" else slice(14, 20)] = 0
    valid = mask[0].bool()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(IDS, attention_mask=mask, position_ids=positions).logits
    close(logits[0, valid], model(IDS[:1, valid]).logits[0])
    close(logits[1], model(IDS[1:]).logits[0])
    ones = torch.ones_like(mask)
    close(model(IDS, attention_mask=ones).logits, model(IDS).logits)


@torch.no_grad()
def test_eager_masks_match_sdpa_masks(model):
    implementation = model.config._attn_implementation
    mask = torch.ones_like(IDS)
    mask[0, :6] = 0
    expected = model(IDS, attention_mask=mask).logits
    model.set_attn_implementation("eager")
    try:
        close(model(IDS, attention_mask=mask).logits[1], expected[1])
        close(model(IDS, attention_mask=mask).logits[0, 6:], expected[0, 6:])
    finally:
        model.set_attn_implementation(implementation)


@torch.no_grad()
def test_model_without_attention_builds_no_mask_of_pairs():
    mask = torch.ones_like(IDS)
    mask[0, :6] = 0
    seen = []

    def record_mask(module, args, kwargs):
        seen.append(kwargs["attention_mask"])

    model = base_model("llama")
    girih.replace_attention(model, layers=[0], num_slots=8)
    for module in (attention(model, 0), attention(model, 1)):
        module.register_forward_pre_hook(record_mask, with_kwargs=True)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model(IDS, attention_mask=mask, position_ids=positions)
    assert [m.shape for m in seen] == [(2, 1, 20, 20)] * 2
    conversion = girih.replace_attention(model, layers=[1], num_slots=8)
    logits = model(IDS, attention_mask=mask, position_ids=positions).logits
    assert seen[2:] == [None, None]
    close(logits[0, 6:], model(IDS[:1, 6:]).logits[0])
    conversion.undo()
    model(IDS, attention_mask=mask, position_ids=positions)
    assert seen[-1] is not None


@torch.no_grad()
def test_a_cache_of_packed_sequences_is_refused(model):
    with pytest.raises(ValueError, match="no cache (is kept of|for) packed sequences"):
        model(**make_packed_batch(), use_cache=True)


@torch.no_grad()
@pytest.mark.parametrize("way", ["both, gelu", "gsa"])
def test_a_layer_called_by_itself_reads_its_own_arguments(way):
    """A model may pass no arguments of girih to its layers. The layer then reads attention masks, positions
    and bounds."""
    layer = attention(converted("llama", way))
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    rotary = (torch.ones(1, 9, 8), torch.zeros(1, 9, 8))
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]

    def call(x, **options):
        cut = tuple(part[:, : x.shape[1]] for part in rotary)
        return layer(hidden_states=x, position_embeddings=cut, **{"attention_mask": None} | options)[0]

    whole = call(x)
    close(call(x, attention_mask=causal), whole)
    see = causal & (torch.arange(9) >= 3)
    close(call(x, attention_mask=see)[:, 3:], call(x[:, 3:]))
    added = torch.zeros(see.shape).masked_fill(~see, torch.finfo(torch.float32).min)
    close(call(x, attention_mask=added)[:, 3:], call(x[:, 3:]))
    block = torch.block_diag(torch.ones(4, 4), torch.ones(5, 5)).bool() & causal
    expected = torch.cat((call(x[:, :4]), call(x[:, 4:])), 1)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    for keywords in (
        {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])},
        {"cu_seqlens": bounds},
        {"cu_seq_lens_q": bounds},
        {"seq_idx": torch.tensor([[0] * 4 + [1] * 5])},
    ):
        close(call(x, attention_mask=block, **keywords), expected)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 3), "attention_mask covers 3 tokens; expected at least 4"),
        (torch.ones(2, 4, 4), r"attention_mask has shape \[2, 4, 4\]; expected \[B, heads, 4, keys\]"),
        (torch.ones(2, 1, 3, 4), r"attention_mask has shape \[2, 1, 3, 4\]"),
        ("causal", "attention_mask is a str; expected a tensor"),
    ],
    ids=str,
)
def test_masks_of_another_shape_are_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        valid_tokens(torch.zeros(2, 4, 8), mask, 0)


def test_a_token_is_masked_where_it_does_not_see_itself():
    x, valid = torch.zeros(2, 3, 8), torch.tensor([[0, 1, 1], [1, 1, 0]]).bool()
    past, room = 2, 4  # two tokens before, and four empty slots of a static cache after
    see = torch.zeros(2, 1, 3, past + 3 + room, dtype=torch.bool)
    see[:, 0, range(3), range(past, past + 3)] = valid
    assert valid_tokens(x, see, past).equal(valid)
    assert valid_tokens(x, see[..., : past + 3], past).equal(valid)
    assert valid_tokens(x, see[..., 1 : past + 3], past).equal(valid)  # a window has dropped one key
    assert valid_tokens(x, see[:1], past).equal(valid[:1].expand(2, -1))


@torch.no_grad()
def test_inputs_embeds_match_input_ids(model):
    embed = model.get_input_embeddings()
    batch = make_packed_batch(return_flash_attn_kwargs=True, return_position_ids=False)
    embedded = embed(batch.pop("input_ids"))
    close(model(inputs_embeds=embedded, **batch).logits, logits_of_each(model))
    mask = torch.ones_like(IDS)
    mask[0, 14:] = 0
    expected = model(IDS, attention_mask=mask).logits
    close(model(inputs_embeds=embed(IDS), attention_mask=mask).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("way", ["window", "gsa"])
def test_positional_arguments_match_keyword_arguments(way):
    """For the model and for a layer."""
    model = converted("llama", way)
    mask = torch.ones_like(IDS)
    mask[0, :6] = 0
    close(model.model(IDS, mask)[0], model.model(IDS, attention_mask=mask)[0])
    layer, x = attention(model), torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    rotary = model.model.rotary_emb(x, torch.arange(9)[None])
    see = torch.ones(9, 9, dtype=torch.bool).tril() & (torch.arange(9) >= 3)
    see = see.expand(2, 1, 9, 9)
    named = layer(hidden_states=x, position_embeddings=rotary, attention_mask=see)[0]
    close(layer(x, rotary, see)[0], named)
    assert (named - layer(x, rotary, None)[0]).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_window_applies_to_every_kind_of_mask(implementation):
    model = converted("llama", "window")
    model.set_attn_implementation(implementation)
    layer, x = attention(model), torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    rotary = model.model.rotary_emb(x, torch.arange(9)[None])
    see = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    added = torch.zeros(see.shape).masked_fill(~see, torch.finfo(torch.float32).min)
    masks = [None, added] + [see] * (implementation == "sdpa")
    model.set_attn_implementation("sdpa")
    want = layer(x, rotary, see)[0]
    model.set_attn_implementation(implementation)
    for mask in masks:
        close(layer(x, rotary, mask)[0], want)
