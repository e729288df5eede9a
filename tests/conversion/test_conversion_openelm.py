"""Attention whose cache argument is `past_key_value`, in a model whose code is not part of transformers."""

import ast
import copy
import functools
import shutil
import subprocess
import sys
from pathlib import Path

import girih
import openelm
import pytest
import torch
from converted import IDS, WAYS, close, convert
from girih.conversion.attention import cache_names, iterate_statements, returned_names
from girih.conversion.projections import find
from girih.models.adapters.attention_call import valid_tokens
from openelm import CACHE, ElmCausalAttention, elm
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache

SUPPORTED = [way for way in WAYS if "max_self_attn_length" not in WAYS[way]]
ONES = torch.ones_like(IDS)


def layers(model):
    return [layer.attn for layer in model.transformer.layers]


@pytest.fixture(scope="module", params=SUPPORTED)
def model(request):
    model = elm()
    convert(model, request.param)
    return model


@torch.no_grad()
@pytest.mark.parametrize("has_norms", [True, False])
def test_injection_at_weight_0_keeps_the_logits_bitwise(has_norms):
    base = elm(has_norms=has_norms)
    model = copy.deepcopy(base)
    mask = ONES.clone()
    mask[0, :5] = 0
    with girih.inject(model, weight=0.0, cross=True):
        for options in ({}, {"attention_mask": mask}):
            assert model(IDS, **options).logits.equal(base(IDS, **options).logits)
        cache, base_cache = (m(IDS[:, :9])[CACHE] for m in (model, base))
        assert model(IDS[:, 9:], **{CACHE: cache}).logits.equal(
            base(IDS[:, 9:], **{CACHE: base_cache}).logits
        )
        layers(model)[0].girih.set_weight(0.5)
        assert (model(IDS).logits - base(IDS).logits).abs().max() > 0.1
    assert type(layers(model)[0]) is ElmCausalAttention and model(IDS).logits.equal(base(IDS).logits)


@torch.no_grad()
@pytest.mark.parametrize("has_norms", [True, False])
def test_a_mixer_reads_slices_of_the_fused_projection(has_norms):
    """Each layer has its own numbers of heads, and norms of q and k in one of the variants."""
    model, x = elm(has_norms=has_norms), torch.randn(2, 9, 32)
    found = [find(attn) for attn in layers(model)]
    assert [(each.heads, each.kv_heads) for each in found] == [(4, 2), (6, 3)]
    girih.replace_attention(model, "gsa", num_slots=8)
    for attn, heads, kv in zip(layers(model), (4, 6), (2, 3), strict=True):
        q, k, v = (x @ part.T for part in attn.qkv_proj.weight.split([heads * 8, kv * 8, kv * 8]))
        if has_norms:
            q, k = (
                (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight).flatten(2)
                for y, norm in (
                    (q.unflatten(-1, (-1, 8)), attn.q_norm),
                    (k.unflatten(-1, (-1, 8)), attn.k_norm),
                )
            )
        close(attn.girih.qkv_proj(x), torch.cat((q, k, v), -1))
        o = torch.randn(2, 9, heads * 8)
        close(attn.girih.o_proj(o), o @ attn.out_proj.weight.T)


@torch.no_grad()
def test_attention_still_returns_three_values():
    x = torch.randn(2, 9, 32)
    for way in ("injected", "gsa"):
        model = elm()
        convert(model, way)
        cache = DynamicCache(config=model.config)
        y, weights, present = layers(model)[0](x, None, cache, False, True)
        assert y.shape == x.shape and weights is None and present is cache and cache.get_seq_length() == 9
        assert layers(model)[0](hidden_states=x)[1:] == (None, None)


@torch.no_grad()
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("cuts", [(1,), (9,), (3, 4, 5, 19)], ids=str)
def test_logits_of_several_calls_match_one_call(model, cuts, side):
    model, mask = copy.deepcopy(model).double(), ONES.clone()
    if side != "none":
        mask[0, slice(0, 6) if side == "left" else slice(14, 20)] = 0
    whole = model(IDS, attention_mask=mask, use_cache=False)
    assert whole.get(CACHE) is None
    cache, parts = None, []
    for a, b in zip((0, *cuts), (*cuts, 20), strict=True):
        out = model(IDS[:, a:b], attention_mask=mask[:, :b], **{CACHE: cache}, use_cache=True)
        cache = out.get(CACHE)
        parts.append(out.logits)
    parts = torch.cat(parts, 1)
    for row, valid in enumerate(mask.bool()):
        close(parts[row, valid], whole.logits[row, valid], 1e-8)
        close(parts[row, valid], model(IDS[row : row + 1, valid], use_cache=False).logits[0], 1e-8)


def generate_text(model, ids, mask, **options):
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=8, **({"do_sample": False, "eos_token_id": None} | options)
    )


@torch.no_grad()
def test_text_matches_full_forwards(model):
    mask = ONES.clone()
    mask[0, :7] = 0
    text = generate_text(model, IDS, mask)
    for row, first in enumerate((7, 0)):
        ids = IDS[row : row + 1, first:]
        assert text[row : row + 1, first:].equal(generate_text(model, ids, torch.ones_like(ids)))
        for _ in range(8):
            ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), 1)
        assert text[row : row + 1, first:].equal(ids)
    beams = [generate_text(model, IDS, ONES, num_beams=3, use_cache=use_cache) for use_cache in (True, False)]
    assert beams[0].equal(beams[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_reach_every_parameter_with_checkpointing(model, reentrant):
    model = copy.deepcopy(model).train()

    def gradients():
        model.zero_grad()
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    want = gradients()
    assert [name for name, grad in want.items() if not grad.abs().max() > 0] == []
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.transformer.token_embeddings.register_forward_hook(lambda *args: args[2].requires_grad_())
    for name, grad in gradients().items():
        close(grad, want[name])


@torch.no_grad()
def test_logits_under_autocast_are_close(model):
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(IDS).logits
    assert (logits - model(IDS).logits).abs().max() < 0.3 * model(IDS).logits.abs().max()


def test_every_class_loads_it_converted(model, tmp_path):
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        want = model(IDS).logits
        for loaded in (
            AutoModelForCausalLM.from_pretrained(tmp_path),
            girih.from_pretrained(tmp_path),
            openelm.ElmForCausalLM.from_pretrained(tmp_path),
        ):
            assert type(loaded) is openelm.ElmForCausalLM and loaded(IDS).logits.equal(want)
        assert type(AutoModel.from_pretrained(tmp_path)) is openelm.ElmModel


BY_CODE = """
import sys, torch, girih
from transformers import AutoModelForCausalLM
folder = sys.argv[1]
for load in (AutoModelForCausalLM.from_pretrained, girih.from_pretrained):
    model = load(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules"), type(model)
    assert "Converted" in str(type(model.transformer.layers[0].attn).__mro__)
    found = model(torch.load(f"{folder}/ids.pt")).logits
    assert found.equal(torch.load(f"{folder}/logits.pt"))
"""


@pytest.mark.parametrize("way", ["injected", "gsa"])
def test_a_model_with_its_own_code_is_loaded_converted(way, tmp_path, monkeypatch):
    model = elm()
    convert(model, way)
    model.save_pretrained(tmp_path)
    config = openelm.ElmConfig.from_pretrained(tmp_path)
    config.auto_map = {"AutoConfig": "openelm.ElmConfig", "AutoModelForCausalLM": "openelm.ElmForCausalLM"}
    config.save_pretrained(tmp_path)
    code = Path(openelm.__file__).read_text()
    (tmp_path / "openelm.py").write_text(code[: code.index("AutoConfig.register")])
    torch.save(IDS, tmp_path / "ids.pt")
    torch.save(model(IDS).logits.detach(), tmp_path / "logits.pt")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    done = subprocess.run([sys.executable, "-c", BY_CODE, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    shutil.rmtree(tmp_path)


def test_window_needs_a_config_and_a_mask_row_for_each_token():
    with pytest.raises(ValueError, match="max_self_attn_length: a ElmCausalAttention has no config"):
        girih.inject(elm(), max_self_attn_length=4)
    model = elm()
    for attn in layers(model):
        attn.config = model.config
    girih.inject(model, max_self_attn_length=4)
    with pytest.raises(
        ValueError, match=r"max_self_attn_length: attention_mask .* expected a row for each of 20"
    ):
        model(IDS)


class Pair(ElmCausalAttention):
    """Returns two values, as the attention of transformers 4.48 to 4.56."""

    def forward(self, hidden_states, attention_mask=None, past_key_value=None, cache_position=None):
        attention = functools.partial(ElmCausalAttention.forward, self)
        y, weights, _ = attention(hidden_states, attention_mask, past_key_value, False, False, cache_position)
        return y, weights


class Present(ElmCausalAttention):
    """Returns the weights last, as older attention."""

    def forward(self, hidden_states, attention_mask=None, past_key_value=None):
        def unused():
            return 1, 2, 3, 4

        y, weights, past_key_value = ElmCausalAttention.forward(
            self, hidden_states, attention_mask, past_key_value
        )
        return y, past_key_value, weights


class Renamed(ElmCausalAttention):
    """Returns the cache under another name."""

    def forward(self, hidden_states, attention_mask=None, past_key_value=None, use_cache=True):
        y, weights, _ = ElmCausalAttention.forward(self, hidden_states, attention_mask, past_key_value)
        kept = past_key_value if use_cache else None
        present = kept
        return y, weights, present


class Varying(ElmCausalAttention):
    def forward(self, hidden_states, attention_mask=None, past_key_value=None, output_attentions=False):
        outputs = ElmCausalAttention.forward(self, hidden_states, attention_mask, past_key_value)
        return outputs if output_attentions else outputs[:2]


@pytest.mark.parametrize(
    "lines, expected",
    [
        ("present = past_key_value", "past_key_value"),
        ("present: object = past_key_value if y else None", "past_key_value"),
        ("present, weights = past_key_value, None", "past_key_value"),
        ("first = present = past_key_value", "past_key_value"),
        ("present = None\n    if y:\n        present = past_key_value", "past_key_value"),
        ("if (present := past_key_value):\n        pass", "past_key_value"),
        ("other = past_key_value\n    present = other", "past_key_value"),
        ("present = past_key_value\n    present = y", "present"),
        ("present = past_key_value\n    present += y", "present"),
        ("present = past_key_value\n    for present in y:\n        pass", "present"),
        ("present, *rest = f(past_key_value)", "present"),
        ("present, weights = f(past_key_value)", "present"),
        ("present = past_key_value or y", "present"),
    ],
)
def test_which_variable_holds_the_cache(lines, expected):
    tree = ast.parse(f"def forward(self, y, past_key_value=None):\n    {lines}\n    return y, present\n")
    names = cache_names(list(iterate_statements(tree.body[0])), {"self", "y", "past_key_value"})
    assert names.get("present", "present") == expected


def test_returned_names_are_read_from_the_code():
    kinds = (ElmCausalAttention, Pair, Present, Renamed, Varying)
    expected = [("attn_weights", "past_key_value"), ("weights",), ("past_key_value", "weights")]
    expected += [("weights", "past_key_value"), None]
    assert [returned_names(kind.forward) for kind in kinds] == expected
    code = {}
    exec("def forward(self, x, past_key_value=None):\n    return x, None", code)
    assert returned_names(code["forward"]) is None


@torch.no_grad()
@pytest.mark.parametrize("kind", [Pair, Present, Renamed])
def test_number_of_returned_values_is_unchanged(kind):
    config, x = elm().config, torch.randn(2, 5, 32)
    for way in ("injected", "gsa"):
        model = elm()
        for layer in model.transformer.layers:
            layer.attn.__class__ = kind
        convert(model, way)
        cache = DynamicCache(config=config)
        _, *rest = layers(model)[0](x, past_key_value=cache)
        assert rest == {Pair: [None], Present: [cache, None], Renamed: [None, cache]}[kind]


@torch.no_grad()
def test_forward_with_varying_results_is_not_replaced():
    model = elm()
    for layer in model.transformer.layers:
        layer.attn.__class__ = Varying
    with pytest.raises(
        ValueError, match="model: the forward of a Varying takes past_key_value.*girih.inject"
    ):
        girih.replace_attention(model)
    x = torch.randn(2, 5, 32)
    girih.inject(model)
    assert len(layers(model)[0](x)) == 2 and len(layers(model)[0](x, output_attentions=True)) == 3


def test_opened_rows_of_padding_are_padding():
    """The masks have a row for each token, as transformers 4.38 to 4.52 built them for sdpa."""
    x, least = torch.zeros(2, 6, 1), torch.finfo(torch.float32).min
    valid = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    see = torch.ones(6, 6).tril().bool() & valid[:, None, None]
    see |= ~see.any(-1, keepdim=True)
    for mask in (see, torch.zeros(see.shape).masked_fill(~see, least)):
        assert valid_tokens(x, mask, 0).equal(valid)
        assert valid_tokens(x[:, :3], mask[:, :, 3:], 3).all()
    both_ways = valid[:, None, None].expand(2, 1, 6, 6)
    assert valid_tokens(x, both_ways, 0).equal(valid)


@pytest.mark.parametrize("window", [2, 3, 9])
@pytest.mark.parametrize("past", [0, 2])
def test_masks_over_all_positions_may_have_a_window(window, past):
    """Rows and keys are positions, also later ones. A row sees only the last few tokens."""
    x, least = torch.zeros(2, 6, 1), torch.finfo(torch.float32).min
    valid = torch.ones(2, 9).bool()
    valid[0, :3] = False
    see = torch.ones(9, 9).tril().triu(1 - window).bool() & valid[:, None, None]
    opened = see | ~see.any(-1, keepdim=True)
    for seen in (see, opened):
        for mask in (seen, torch.zeros(seen.shape).masked_fill(~seen, least)):
            assert valid_tokens(x, mask, past).equal(valid[:, past : past + 6])
