"""Encoders: a mixer that replaces attention without a causal mask reads the tokens in both directions."""

import copy
import pickle

import girih
import pytest
import torch
from converted import IDS, attention, close
from girih.conversion.both_ways import read_both_ways
from girih.conversion.config import BOTH_WAYS, Replacement, replacing
from girih.conversion.projections import Projections, find
from girih.models.adapters.cache_argument import CACHE
from girih.nn import GatedLinearAttention
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    DynamicCache,
)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
ENCODERS = {
    "bert": DROPOUT,
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 8, "attention_bias": True},
    "roberta": DROPOUT,
    "ultrabert": {"num_key_value_heads": 2},  # grouped queries
}
# transformers 5.17 has no UltraBERT.
ENCODERS = {kind: options for kind, options in ENCODERS.items() if kind in CONFIG_MAPPING}
KINDS = [kind for kind in ENCODERS if kind != "roberta"]  # the attention of RoBERTa is the attention of BERT
MIXERS = {
    "linear_attention": {},
    "gla": {},
    "gsa": {"num_slots": 5},
    "delta_product": {"gated": True},
    "abc": {"num_slots": 5},
    "retnet": {},
    "mamba2": {},
    "deltanet": {"allow_neg_eigval": True},
}
ONES = torch.ones_like(IDS)


def encoder(kind="bert", auto=AutoModelForMaskedLM, **options):
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(kind, **SIZES | ENCODERS.get(kind, {}) | options))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(std=0.5 if "embed" in name else 32**-0.5)
            elif name.endswith("bias"):
                p.normal_(std=0.3)
    return model.eval()


def replaced_encoder(
    kind="bert", mixer="linear_attention", auto=AutoModelForMaskedLM, layers=None, **options
):
    model = encoder(kind, auto, **options)
    torch.manual_seed(1)
    girih.replace_attention(model, mixer, layers=layers, **MIXERS[mixer])
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".girih." in name:
                p.normal_(std=0.5)
    return model


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module", params=["linear_attention", "gla", "gsa", "delta_product"])
def model(kind, request):
    return replaced_encoder(kind, request.param).double()


def project_qkv(attn, x):
    """q, k and v of an encoder's attention, `[T, heads, 8]`. Keys and values are repeated for each query
    head."""
    if hasattr(attn, "Wqkv"):
        q, k, v = (x @ attn.Wqkv.weight.T + attn.Wqkv.bias).chunk(3, -1)
    elif hasattr(attn, "query"):
        q, k, v = (x @ p.weight.T + p.bias for p in (attn.query, attn.key, attn.value))
    else:
        q, k, v = (x @ p.weight.T for p in (attn.q_proj, attn.k_proj, attn.v_proj))
    q, k, v = (y.unflatten(-1, (-1, 8)) for y in (q, k, v))
    return q, k.repeat_interleave(4 // k.shape[1], 1), v.repeat_interleave(4 // v.shape[1], 1)


def per_head(x):
    """`[T, memories, ...]` -> `[T, 4, ...]`."""
    return x.repeat_interleave(4 // x.shape[1], 1)


def silu(x):
    return x / (1 + (-x).exp())


def linear_weights(q, k, g):
    """`[t, s]`: q_t k_s with the decay from s to t. For s after t, with the decay between t and s."""
    T = len(q)
    weights = torch.zeros(T, T, dtype=q.dtype)
    for t in range(T):
        for s in range(T):
            between = g[s + 1 : t + 1] if s <= t else g[t + 1 : s]
            weights[t, s] = (q[t] * between.sum(0).exp() * k[s]).sum()
    return weights


def read_slots(q, k, v, s, g):
    """Output of GSA for q, from slots that have read the tokens of k, v, s and g in order."""
    keys, values = torch.zeros(s.shape[1], 8, dtype=q.dtype), torch.zeros(s.shape[1], 8, dtype=q.dtype)
    for i in range(len(k)):
        keys = g[i].exp()[:, None] * keys + s[i][:, None] * k[i]
        values = g[i].exp()[:, None] * values + s[i][:, None] * v[i]
    return (keys @ q).softmax(0) @ values


def read_running_softmax(q, k, v, s):
    """Output of ABC: a slot holds the mean of keys and of values, weighted by the softmax of its logits."""
    if not len(k):
        return torch.zeros(8, dtype=q.dtype)
    weights = s.softmax(0).T
    return (weights @ k @ q).softmax(0) @ (weights @ v)


def read_delta(q, k, v, beta, g):
    S = torch.zeros(8, 8, dtype=q.dtype)
    for i in range(len(k)):
        S = g[i].exp() * S
        S = S + beta[i] * torch.outer(k[i], v[i] - S.T @ k[i])
    return S.T @ q / 8**0.5


def read_both_directions(read, q, *rest):
    """Sum of two reads: one of the tokens up to t, one of the tokens after t in reversed order."""
    return torch.stack(
        [
            read(q[t], *(y[: t + 1] for y in rest)) + read(q[t], *(y[t + 1 :].flip(0) for y in rest))
            for t in range(len(q))
        ]
    )


def reference_output(mixer, attn, x):
    """The layer on one sequence x `[T, 32]`, head by head, before the output projection."""
    part, (q, k, v) = attn.girih, project_qkv(attn, x)
    T, outputs = len(x), []
    if mixer in ("linear_attention", "gla", "retnet", "mamba2"):
        g, skip = torch.zeros(T, 4, 8, dtype=x.dtype), 0
        if mixer == "linear_attention":
            q, k = (y.clamp(min=0) + y.clamp(max=0).exp() for y in (q, k))
        elif mixer == "gla":
            logits = x @ part.decay[0].weight.T @ part.decay[1].weight.T + part.decay[1].bias
            g = per_head(torch.nn.functional.logsigmoid(logits).unflatten(-1, (-1, 8)) / 16)
        elif mixer == "retnet":
            head = torch.arange(part.heads[1]).repeat_interleave(4 // part.heads[1])
            g = (1 - 2.0 ** (-5.0 - head.double())).log()[:, None].expand(T, 4, 8)
        else:
            log_decay, dt = part.decay(x[None])
            g, dt = per_head(log_decay[0])[..., None].expand(T, 4, 8), per_head(dt[0])
            skip, v = v * part.skip[:, None], v * dt[..., None]
        o = torch.stack([linear_weights(q[:, h], k[:, h], g[:, h]) @ v[:, h] / 8**0.5 for h in range(4)], 1)
        o = o + skip
    else:
        q, k, v = silu(q), silu(k), silu(v)
        for h in range(4):
            heads = q[:, h], k[:, h], v[:, h]
            if mixer == "gsa":
                f = per_head((x @ part.f_proj.weight.T).unflatten(-1, (-1, 5)))[:, h]
                g = torch.nn.functional.logsigmoid(f) / 8
                outputs.append(read_both_directions(read_slots, *heads, 1 - g.exp(), g))
            elif mixer == "abc":
                s = per_head((x @ part.f_proj.weight.T).unflatten(-1, (-1, 5)))[:, h]
                outputs.append(read_both_directions(read_running_softmax, *heads, s))
            else:
                q_h, k_h = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in heads[:2])
                beta = per_head(torch.sigmoid(x @ part.beta_proj.weight.T))[:, h] * (
                    1 + part.allow_neg_eigval
                )
                g = torch.zeros(T, dtype=x.dtype)
                if part.decay is not None:
                    g = per_head(part.decay(x[None])[0][0])[:, h]
                outputs.append(read_both_directions(read_delta, q_h, k_h, heads[2], beta, g))
        o = torch.stack(outputs, 1)
    if mixer in ("gsa", "abc"):
        o = silu(o.flatten(1))
        return o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * part.norm.weight
    o = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * part.norm.weight
    return o.flatten(1) * silu(x @ part.g_proj.weight.T)


@torch.no_grad()
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("kind", KINDS)
def test_mixer_matches_its_equations(kind, mixer):
    """Each token reads all other tokens, and itself once."""
    attn = attention(replaced_encoder(kind, mixer).double())
    x = torch.randn(2, 7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = attn(x)[0]
    for row in range(2):
        want = reference_output(mixer, attn, x[row])
        if kind != "bert":
            out = attn.Wo if kind == "modernbert" else attn.o_proj
            want = out(want)
        close(y[row], want, 1e-9)
    assert (attn(x[:, :6])[0] - y[:, :6]).abs().amax(-1).min() > 1e-9


@torch.no_grad()
@pytest.mark.parametrize("kind", ENCODERS)
def test_linear_attention_is_permutation_equivariant(kind):
    """Linear attention is a sum over all tokens, the same sum for every query."""
    attn = attention(replaced_encoder(kind, "linear_attention").double())
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    order = torch.randperm(9)
    close(attn(x[:, order])[0], attn(x)[0][:, order], 1e-9)


def positions_of(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right", "both", "between"])
def test_masked_tokens_have_no_effect(model, side):
    mask = ONES.clone()
    for place in {
        "left": [slice(0, 6)],
        "right": [slice(14, 20)],
        "between": [slice(4, 7), slice(9, 10)],
    }.get(side, [slice(0, 3), slice(16, 20)]):
        mask[0, place] = 0
    valid = mask[0].bool()
    logits = model(IDS, attention_mask=mask, position_ids=positions_of(mask)).logits
    assert logits.isfinite().all()
    close(logits[0, valid], model(IDS[:1, valid]).logits[0], 1e-9)
    close(logits[1], model(IDS[1:]).logits[0], 1e-9)
    other = IDS.where(mask.bool(), 5)
    again = model(other, attention_mask=mask, position_ids=positions_of(mask)).logits
    assert again[0, valid].equal(logits[0, valid]) and again[1].equal(logits[1])
    close(model(IDS, attention_mask=ONES).logits, model(IDS).logits, 1e-9)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_reads_the_masks_that_transformers_makes(model, implementation):
    """These masks reach a layer if only some layers are replaced, or if the layer is called directly."""
    attn, x = attention(model), torch.randn(2, 6, 32, dtype=torch.float64)
    valid = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]]).bool()
    see = valid[:, None, None].expand(2, 1, 6, 6)
    if implementation == "eager":
        see = torch.zeros(see.shape, dtype=x.dtype).masked_fill(~see, torch.finfo(x.dtype).min)
    y = attn(x, attention_mask=see)[0]
    for row, row_valid in enumerate(valid):
        close(y[row, row_valid], attn(x[row : row + 1, row_valid])[0][0], 1e-9)


SEQUENCES = [[5, 9, 12, 7, 7, 11], [3], [8, 8, 4, 6, 12, 22, 9, 11, 5], [4, 31]]


@torch.no_grad()
@pytest.mark.parametrize("form", ["position_ids", "cu_seqlens", "seq_idx"])
def test_packed_sequences_are_independent(model, form):
    ids = torch.tensor([[token for each in SEQUENCES for token in each]])
    lengths = [len(each) for each in SEQUENCES]
    call = {
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "seq_idx": torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None].int(),
    }
    want = torch.cat([model(torch.tensor([each])).logits for each in SEQUENCES], 1)
    close(model(ids, **{form: call[form]}).logits, want, 1e-9)


def test_packed_sequences_beside_unconverted_attention_are_refused():
    positions = torch.cat((torch.arange(8), torch.arange(12)))[None]
    model = replaced_encoder("bert", layers=[0])
    with pytest.raises(ValueError, match="layers: attention that stays reads packed sequences as one"):
        model(IDS[:1], position_ids=positions)
    assert model(IDS).logits.isfinite().all()


def gradients(model, ids, mask, valid=None):
    model.zero_grad()
    logits = model(ids, attention_mask=mask, position_ids=positions_of(mask)).logits
    (logits if valid is None else logits[valid]).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_reach_every_parameter_and_no_masked_token(model):
    model = copy.deepcopy(model)
    mask = ONES.clone()
    mask[0, :4], mask[0, 17:] = 0, 0
    valid = mask.bool()
    padded = gradients(model, IDS, mask, valid)
    unread = [name for name, p in model.named_parameters() if name not in padded]
    assert [name for name in unread if "pooler" not in name] == []
    assert [name for name, grad in padded.items() if not grad.abs().max() > 0] == []
    one = gradients(model, IDS[:1, 4:17], ONES[:1, 4:17])
    other = gradients(model, IDS[1:], ONES[1:])
    for name, grad in padded.items():
        close(grad, one[name] + other[name], 1e-7)


def test_gradients_match_finite_differences(model):
    attn = attention(model)
    x = torch.randn(2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 4
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]])

    def valid_outputs(x):
        return attn.girih(x, mask)[0][mask.bool()]

    assert torch.autograd.gradcheck(valid_outputs, (x.requires_grad_(),), atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(model, reentrant):
    model = copy.deepcopy(model).train()
    mask = ONES.clone()
    mask[0, :4] = 0
    want = gradients(model, IDS, mask)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for name, grad in gradients(model, IDS, mask).items():
        close(grad, want[name], 1e-9)


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["linear_attention", "gsa", "delta_product"])
def test_layer_compiles_as_one_graph(mixer):
    torch.compiler.reset()
    attn, x = attention(replaced_encoder("modernbert", mixer)), torch.randn(2, 9, 32)
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    see = (torch.arange(9) < 7).expand(2, 1, 9, 9)
    for mask in (None, see):
        close(compiled(x, attention_mask=mask)[0], attn(x, attention_mask=mask)[0])


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["linear_attention", "gsa", "delta_product"])
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_autocast_and_bf16_stay_near(kind, mixer):
    model = replaced_encoder(kind, mixer)
    want = model(IDS, attention_mask=ONES).logits
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(IDS, attention_mask=ONES).logits
    assert (logits - want).norm() < 0.05 * want.norm()
    assert model.bfloat16()(IDS).logits.isfinite().all()


@pytest.mark.parametrize("mixer", ["linear_attention", "gsa", "delta_product"])
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_every_class_loads_it_converted(kind, mixer, tmp_path):
    model = replaced_encoder(kind, mixer)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        want = model(IDS, output_hidden_states=True)
        for loaded in (
            girih.from_pretrained(tmp_path),
            AutoModelForMaskedLM.from_pretrained(tmp_path),
            type(model).from_pretrained(tmp_path),
        ):
            assert type(loaded) is type(model) and loaded(IDS).logits.equal(want.logits)
        body = AutoModel.from_pretrained(tmp_path)
        assert type(attention(body)).__name__.startswith("Replaced")
        close(body(IDS).last_hidden_state, model.base_model(IDS).last_hidden_state)
        head = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
        assert head(IDS).logits.shape == (2, 3) and head.config.girih == model.config.girih


@torch.no_grad()
def test_copy_pickle_and_undo(kind):
    base, model = encoder(kind), encoder(kind)
    conversion = girih.replace_attention(model, "gla")
    want = model(IDS).logits
    assert copy.deepcopy(model)(IDS).logits.equal(want)
    assert pickle.loads(pickle.dumps(model))(IDS).logits.equal(want)
    assert not torch.allclose(base(IDS).logits, want, atol=1e-2)
    conversion.undo()
    assert model(IDS).logits.equal(base(IDS).logits)
    assert [type(m) for m in model.modules()] == [type(m) for m in base.modules()]


@torch.no_grad()
def test_some_layers_make_a_hybrid(kind, tmp_path):
    model = replaced_encoder(kind, "gla", layers=[1])
    assert [type(attention(model, i)).__name__.startswith("Replaced") for i in (0, 1)] == [False, True]
    mask = ONES.clone()
    mask[0, 15:] = 0
    logits = model(IDS, attention_mask=mask).logits
    close(logits[0, :15], model(IDS[:1, :15]).logits[0])
    model.save_pretrained(tmp_path)
    assert girih.from_pretrained(tmp_path)(IDS, attention_mask=mask).logits.equal(logits)


@pytest.mark.parametrize("kind", KINDS)
def test_projections_of_encoders_are_found(kind):
    expected = {
        "bert": Projections(("query", "key", "value"), None, None, 32, 4, 4, 8, causal=False),
        "modernbert": Projections(("Wqkv",), "Wo", None, 32, 4, 4, 8, causal=False),
        "ultrabert": Projections(("q_proj", "k_proj", "v_proj"), "o_proj", None, 32, 4, 2, 8, causal=False),
    }
    assert find(attention(encoder(kind))) == expected[kind]


@pytest.mark.parametrize("mixer", replacing())
def test_a_mixer_reads_both_ways_or_is_refused(mixer):
    model = encoder()
    if mixer in BOTH_WAYS:
        assert girih.replace_attention(model, mixer) and model(IDS).logits.isfinite().all()
        return
    with pytest.raises(
        ValueError, match=f"mixer is '{mixer}', of which no reversed pass is defined; .*'gla'"
    ):
        girih.replace_attention(model, mixer)
    assert type(attention(model)).__name__ == "BertSelfAttention" and not hasattr(model.config, "girih")


@pytest.mark.parametrize(
    ("mixer", "options", "message"),
    [
        ("gsa", {"conv_size": 4}, "conv_size is 4; expected 0 where attention is not causal: a short convol"),
        ("delta_product", {"n": 2}, "n is 2; expected 1 where attention is not causal: further steps"),
        (
            "delta_product",
            {"between_chunks": "gelu", "chunk": 4},
            "between_chunks is 'gelu'; expected None where attention is not causal: chunks are counted",
        ),
    ],
)
def test_options_of_causal_layers_are_refused(mixer, options, message):
    with pytest.raises(ValueError, match=message):
        girih.replace_attention(encoder(), mixer, **options)
    causal = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    assert girih.replace_attention(causal, mixer, **options)


def test_defaults_of_an_encoder_may_be_named():
    girih.replace_attention(encoder(), "delta_product", n=1, conv_size=0)
    assert Replacement("mamba2").both_ways_options() == {"conv_size": 0}


def test_layer_without_tokens():
    layer = read_both_ways(GatedLinearAttention(16, 2, gate="none"))
    assert layer(torch.zeros(2, 0, 16))[0].shape == (2, 0, 16)


def test_encoder_refuses_a_cache():
    model = replaced_encoder("bert", auto=AutoModel)
    with pytest.raises(ValueError, match="cache: BothWays.* cannot go on from earlier ones"):
        model(IDS, **{CACHE: DynamicCache(config=model.config)})
    with pytest.raises(ValueError, match="cache: BothWays"):
        attention(model).girih(torch.randn(1, 3, 32), use_cache=True)


@pytest.mark.parametrize("kind", ENCODERS)
def test_inject_refuses_encoders(kind):
    with pytest.raises(
        ValueError,
        match=r"Attention: it is not causal .*inject reads the past alone; girih\.replace_attention\(model",
    ):
        girih.inject(encoder(kind))


@torch.no_grad()
def test_bert_as_a_decoder_is_converted_as_a_decoder():
    """The cross-attention and the output projection outside attention are unchanged."""
    options = {"is_decoder": True, "add_cross_attention": True}
    model = encoder("bert", AutoModelForCausalLM, **options).double()
    with pytest.raises(ValueError, match="its output projection is in another module; replace_attention"):
        girih.inject(model)
    girih.replace_attention(model, "gsa", num_slots=8)
    names = {type(m).__name__ for m in model.modules()}
    assert {"ReplacedBertSelfAttention", "BertCrossAttention"} < names and "BertSelfAttention" not in names
    whole = model(IDS, use_cache=False).logits
    cache = model(IDS[:, :9], use_cache=True)[CACHE]
    close(model(IDS[:, 9:], **{CACHE: cache}, use_cache=True).logits, whole[:, 9:], 1e-8)
    close(model(IDS[:, :9], use_cache=False).logits, whole[:, :9], 1e-8)
    states = torch.randn(2, 5, 32, dtype=torch.float64)
    assert not torch.allclose(model(IDS, encoder_hidden_states=states, use_cache=False).logits, whole)


@torch.no_grad()
def test_decoder_of_modernbert_is_causal():
    base = encoder("modernbert-decoder", AutoModelForCausalLM)
    model = copy.deepcopy(base)
    with girih.inject(model, weight=0.0):
        assert model(IDS).logits.equal(base(IDS).logits)
    girih.replace_attention(model, "gla")
    whole = model(IDS).logits
    close(model(IDS[:, :9]).logits, whole[:, :9])


def test_bert_attention_with_other_parameters_is_refused():
    model = encoder()
    for layer in model.bert.encoder.layer:
        layer.attention.self.distance_embedding = torch.nn.Embedding(9, 8)
    with pytest.raises(
        ValueError, match="BertSelfAttention: it has distance_embedding.weight beside query, key"
    ):
        girih.replace_attention(model)


def test_encoder_beside_a_decoder_is_not_converted():
    """For example, an encoder of images."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    model.vision = encoder(KINDS[-1], AutoModel)
    conversion = girih.replace_attention(model, "gla")
    assert all("vision" not in name for name in conversion.layers) and len(conversion.layers) == 2
    conversion.undo()
    conversion = girih.inject(model)
    assert all("vision" not in name for name in conversion.layers) and len(conversion.layers) == 2
