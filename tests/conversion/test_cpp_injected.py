"""Models with a linear path injected by girih.inject: C++ loads the files of Python, computes the same and
saves them."""

import json

import girih
import pytest
import torch
from converted import base_model
from girih import _C
from girih.models import GirihConfig, GirihForCausalLM
from safetensors.torch import load_file, save_file
from test_programs import BIN, run

SIZES = {
    "vocab_size": 23,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_slots": 6,
    "initializer_range": 0.3,
}
HYBRID = ["attention", "gsa", "attention"]
VARIANTS = {
    "defaults": {},
    "n = 1": {"n": 1},
    "rotary, n = 3": {"n": 3, "virtual_tokens": "rotary"},
    "both, n = 3": {"n": 3, "virtual_tokens": "both"},
    "derivative, n = 4": {"n": 4},
    "v": {"gate": "v"},
    "kv": {"gate": "kv"},
    "window": {"pool": "window", "n": 1},
    "window, kv": {"pool": "window", "gate": "kv", "n": 3},
    "head": {"gate_per": "head", "gate": "v"},
    "head, window, kv": {"gate_per": "head", "gate": "kv", "pool": "window", "virtual_tokens": "both"},
    "gelu": {"between_chunks": "gelu", "chunk": 4, "gate": "kv"},
    "tanh": {"between_chunks": "tanh", "chunk": 5, "n": 1},
    "cross": {"cross": True, "weight": 0.3},
    "learned": {"learned": True, "weight": 0.7},
    "learned cross": {"learned": True, "cross": True, "pool": "window", "n": 3},
    "linear": {"weight": 1.0, "norm_eps": 0.1},
    "one layer": {"layers": [2], "weight": 0.9},
}
SOME = ["defaults", "window, kv", "gelu", "learned cross"]


def injected_model(options, seed=0, **fields):
    """A model with random norms and mixture weights."""
    torch.manual_seed(seed)
    mixer = fields.pop("mixer", HYBRID)
    extra = {} if "gsa" in mixer else {"num_slots": 64}
    model = GirihForCausalLM(GirihConfig(**SIZES | {"mixer": mixer} | extra | fields)).eval()
    for each in options if isinstance(options, list) else [options]:
        girih.inject(model, **each)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".girih." in name:
                p.add_(torch.rand_like(p))
    return model


def load_cpp(python, folder):
    python.save_pretrained(folder)
    return _C.LanguageModel.from_pretrained(str(folder))


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """The model in both languages, in float64."""
    python = injected_model(VARIANTS[request.param]).double()
    return python, load_cpp(python, tmp_path_factory.mktemp("model"))


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def ids_of(rows, tokens):
    return torch.randint(SIZES["vocab_size"], (rows, tokens))


def test_parameters_have_the_same_names_shapes_and_values(pair):
    python, cpp = (tensors(model) for model in pair)
    assert any(".girih.path.norm.weight" in name for name in python)
    assert {name: p.shape for name, p in python.items()} == {name: p.shape for name, p in cpp.items()}
    assert all(cpp[name].equal(p) for name, p in python.items())


@torch.no_grad()
def test_logits_are_equal(pair):
    python, cpp = pair
    ids = ids_of(3, 15)
    mask = torch.arange(15) >= torch.tensor([[0], [6], [3]])
    close(cpp.forward(ids)[0], python(ids).logits)
    real = mask[..., None]
    close(cpp.forward(ids, mask)[0] * real, python(ids, attention_mask=mask).logits * real)
    packed = {"cu_seqlens": torch.tensor([0, 6, 7, 15]), "use_cache": False}
    close(cpp.forward(ids[:1], **packed)[0], python(ids[:1], **packed).logits)


@torch.no_grad()
def test_path_changes_the_logits(pair):
    """The path changes the logits; otherwise these tests could not distinguish the options."""
    python, cpp = pair
    ids = ids_of(2, 9)
    base = GirihForCausalLM(GirihConfig(**SIZES, mixer=HYBRID)).double().eval()
    base.load_state_dict({n: x for n, x in python.state_dict().items() if ".girih." not in n})
    assert (cpp.forward(ids)[0] - base(ids).logits).abs().max() > 0.05


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[6, 1, 2, 6], [1] * 15, [1, 3, 11]], ids=str)
def test_states_continue_equally(pair, cuts):
    python, cpp = pair
    ids = ids_of(2, 15)
    whole = python(ids).logits
    cache, state, found = None, _C.State(), []
    for piece in ids.split(cuts, 1):
        output = python(piece, past_key_values=cache, use_cache=True)
        logits, state = cpp.forward(piece, state=state, use_cache=True)
        cache = output.past_key_values
        close(logits, output.logits)
        found.append(logits)
    close(torch.cat(found, 1), whole)


@torch.no_grad()
def test_masked_calls_are_equal(pair):
    python, cpp = pair
    cache, state = None, _C.State()
    for T in (6, 7, 1, 5):
        ids, mask = ids_of(3, T), torch.rand(3, T) < 0.6
        output = python(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        logits, state = cpp.forward(ids, mask, state, use_cache=True)
        cache = output.past_key_values
        close(logits * mask[..., None], output.logits * mask[..., None])


def test_gradients_are_equal(pair):
    python, cpp = pair
    ids = ids_of(2, 11)
    for p in [*python.parameters(), *cpp.named_parameters().values()]:
        p.grad = None
    python(ids, labels=ids).loss.backward()
    cpp.loss(ids).backward()
    grads = {name: p.grad for name, p in cpp.named_parameters().items()}
    for name, p in python.named_parameters():
        assert p.grad.any(), name
        # The loss is fp32 in Python and in C++.
        torch.testing.assert_close(grads[name], p.grad, atol=1e-6, rtol=1e-5)


def greedy(model, ids, count, mask=None):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)


def test_greedy_text_is_equal(pair):
    python, cpp = pair
    ids, mask = ids_of(2, 5), torch.ones(2, 5, dtype=torch.int64)
    mask[1, :2] = 0
    assert cpp.generate(ids, 24, attention_mask=mask).equal(greedy(python, ids, 24, mask))


def test_python_reads_what_cpp_saves(pair, tmp_path):
    """The configuration is also the same."""
    python, cpp = pair
    cpp.save_pretrained(str(tmp_path))
    again = GirihForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert json.dumps(again.config.girih) == json.dumps(python.config.girih)
    assert {name: p.shape for name, p in tensors(again).items()} == {
        name: p.shape for name, p in tensors(python).items()
    }
    assert all(tensors(again)[name].equal(p) for name, p in tensors(python).items())
    assert type(again.model.layers[2].mixer).__name__ == "InjectedAttention"


# ---- each dtype, each kind of model ------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("way", SOME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logits_of_a_dtype_are_equal(way, dtype, tmp_path):
    python = injected_model(VARIANTS[way]).to(dtype)
    cpp = load_cpp(python, tmp_path)
    fp32_names = [name for name in tensors(python) if name.endswith((".girih.weight", ".girih.logit"))]
    assert fp32_names and all(tensors(cpp)[name].dtype == torch.float32 for name in fp32_names)
    ids = ids_of(2, 40)
    found, want = cpp.forward(ids)[0], python(ids).logits
    assert found.dtype == want.dtype == dtype
    bound = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, want, atol=bound * want.abs().max().item(), rtol=0)


@torch.no_grad()
@pytest.mark.parametrize(
    "fields",
    [{"mixer": "attention"}, {"mixer": "attention", "window": 4}, {"mixer": ["attention", "cat", "lattice"]}],
    ids=str,
)
def test_injected_models_of_other_attention_are_equal(fields, tmp_path):
    """The window of the configuration belongs to attention. The linear path reads all tokens."""
    extra = {"num_kv_heads": 4, "chunk": 4} if "lattice" in fields["mixer"] else {}
    extra |= {"num_slots": 8} if "lattice" in fields["mixer"] else {}
    python = injected_model({}, **fields | extra).double()
    cpp = load_cpp(python, tmp_path)
    ids = ids_of(2, 13)
    close(cpp.forward(ids)[0], python(ids).logits)
    assert cpp.generate(ids, 12).equal(greedy(python, ids, 12))


@torch.no_grad()
def test_layers_may_be_injected_apart(tmp_path):
    """Each injection has its own options and its own layers, in any order."""
    python = injected_model(
        [{"layers": [2], "n": 1, "cross": True}, {"layers": [0], "learned": True}]
    ).double()
    cpp = load_cpp(python, tmp_path)
    ids = ids_of(2, 9)
    close(cpp.forward(ids)[0], python(ids).logits)
    cpp.save_pretrained(str(tmp_path / "again"))
    saved, again = (json.loads((f / "config.json").read_text()) for f in (tmp_path, tmp_path / "again"))
    assert saved["girih"] == again["girih"] and len(saved["girih"]) == 2


@torch.no_grad()
def test_at_weight_0_it_is_the_base_model_bit_for_bit(tmp_path):
    python = injected_model({"weight": 0.0})
    load_cpp(python, tmp_path / "injected")
    config = json.loads((tmp_path / "injected" / "config.json").read_text())
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({n: x for n, x in config.items() if n != "girih"}))
    weights = load_file(tmp_path / "injected" / "model.safetensors")
    save_file({n: x for n, x in weights.items() if ".girih." not in n}, base / "model.safetensors")
    with_path, without = (_C.LanguageModel.from_pretrained(str(tmp_path / f)) for f in ("injected", "base"))
    ids = ids_of(2, 9)
    assert with_path.forward(ids)[0].equal(without.forward(ids)[0])


# ---- trained, written, trained on --------------------------------------------------------------------------


@pytest.mark.skipif(not BIN.exists(), reason="the programs were not built here")
@pytest.mark.parametrize("way", SOME)
def test_a_model_that_python_trained_writes_the_same_text_by_girih_generate(way, tmp_path):
    model = injected_model(VARIANTS[way], vocab_size=256, num_slots=6).train()
    text = b"a girih is the pattern that is drawn with five tiles; the tiles are drawn with girihs. "
    ids = torch.tensor([[*text * 2]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for step in range(12):
        if "learned" not in way:
            weight = girih.MixSchedule("gradual", steps=8).weight(step)
            for module in model.modules():
                if isinstance(module, girih.nn.MemoryAsGate):
                    module.set_weight(weight)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    model.eval().save_pretrained(tmp_path)
    prompts = ["girih", "a", "the tiles are drawn with fi"]
    loaded = girih.from_pretrained(tmp_path).eval()
    texts = []
    for prompt in prompts:
        ids = torch.tensor([[*prompt.encode()]])
        texts.append(bytes(greedy(loaded, ids, 60)[0].tolist()))
    assert len(set(texts)) == 3
    for prompt, want in zip(prompts, texts, strict=True):
        output, _ = run("girih-generate", tmp_path, prompt, "--max-new-tokens", 60, "--quiet")
        assert output == want + b"\n"
    together, _ = run("girih-generate", tmp_path, *prompts, "--max-new-tokens", 60, "--quiet")
    assert together == b"".join(want + b"\n" for want in texts)


@pytest.mark.parametrize("way", SOME)
def test_training_is_equal_in_both_languages(way, tmp_path):
    """Schedule, loss, gradients and steps of AdamW."""
    python = injected_model(VARIANTS[way]).double().train()
    cpp = load_cpp(python, tmp_path)
    ids = ids_of(2, 20)
    options = {"first": 0.2, "final": 0.9, "steps": 3}
    python_schedule, cpp_schedule = (
        girih.MixSchedule("gradual", **options),
        _C.MixSchedule("gradual", **options),
    )
    runs = []
    for model in (python, cpp):
        parameters = tensors(model)
        trained = [p for p in parameters.values() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        losses = []
        for step in range(4):
            if "learned" not in way:
                if model is cpp:
                    cpp_schedule.set_weights(cpp, step)
                else:
                    for module in python.modules():
                        if isinstance(module, girih.nn.MemoryAsGate):
                            module.set_weight(python_schedule.weight(step))
            loss = model.loss(ids) if model is cpp else model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        runs.append(losses)
    torch.testing.assert_close(*runs, atol=1e-5, rtol=0)
    assert runs[0][-1] < runs[0][0]


# ---- schedules ---------------------------------------------------------------------------------------------

SCHEDULES = [
    ("constant", {}),
    ("constant", {"final": 0.3}),
    ("gradual", {}),
    ("gradual", {"first": 0.9, "final": 0.1, "steps": 7}),
    ("cyclic", {}),
    ("cyclic", {"levels": [0.1, 0.7], "steps": 3}),
]


@pytest.mark.parametrize("schedule, options", SCHEDULES, ids=str)
def test_schedules_have_the_weights_of_python(schedule, options):
    python, cpp = girih.MixSchedule(schedule, **options), _C.MixSchedule(schedule, **options)
    for step in [*range(25), 99, 100, 101, 250, 1000]:
        assert cpp.weight(step) == python.weight(step)


@pytest.mark.parametrize(
    "schedule, options",
    [
        ("constant", {"steps": 3}),
        ("constant", {"levels": [0.5]}),
        ("cyclic", {"first": 0.5}),
        ("gradual", {"levels": [0.5]}),
        ("gradual", {"steps": 0}),
        ("gradual", {"first": -0.1}),
        ("constant", {"final": 1.5}),
        ("cyclic", {"levels": [0.5, 1.5]}),
        ("cyclic", {"levels": []}),
    ],
    ids=str,
)
def test_schedule_errors_match_python(schedule, options):
    messages = []
    for kind in (girih.MixSchedule, _C.MixSchedule):
        with pytest.raises(ValueError) as error:
            kind(schedule, **options)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_unknown_schedule_error_lists_the_schedules():
    with pytest.raises(ValueError, match="schedule is 'linear'; expected one of constant, gradual, cyclic"):
        _C.MixSchedule("linear")


def test_a_schedule_moves_every_mixture_and_refuses_what_it_cannot_move(tmp_path):
    cpp = load_cpp(injected_model({}), tmp_path / "buffer")
    _C.MixSchedule("cyclic", levels=[0.25, 0.75], steps=1).set_weights(cpp, 1)
    weights = [x.item() for name, x in cpp.named_buffers().items() if name.endswith("girih.weight")]
    assert weights == [0.75, 0.75]
    cpp.save_pretrained(str(tmp_path / "moved"))
    reloaded = GirihForCausalLM.from_pretrained(tmp_path / "moved")
    assert [m.current_weight().item() for m in girih.conversion.schedule.mixtures(reloaded)] == weights
    schedule = _C.MixSchedule("constant")
    with pytest.raises(ValueError, match="weight is learned by this mixture"):
        schedule.set_weights(load_cpp(injected_model({"learned": True}), tmp_path / "learned"), 0)
    plain = _C.LanguageModel(json.dumps(SIZES | {"mixer": HYBRID}))
    with pytest.raises(ValueError, match="model has no mixture whose weight a schedule could move"):
        schedule.set_weights(plain, 0)
    with pytest.raises(ValueError, match="step is -1"):
        schedule.weight(-1)


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    injected_model({}).save_pretrained(tmp_path)
    return tmp_path


def refusal(folder, entry=None, weights=False, **fields):
    """The error of loading, with these fields in the entry of config.json or in the file. Without weights the
    files are deleted, so the error comes before any weight is read."""
    config = json.loads((folder / "config.json").read_text())
    config |= fields
    if entry is not None:
        config["girih"][0] |= entry
    (folder / "config.json").write_text(json.dumps(config))
    if not weights:
        (folder / "model.safetensors").unlink(missing_ok=True)
    with pytest.raises(ValueError) as error:
        _C.LanguageModel.from_pretrained(str(folder))
    return str(error.value)


@pytest.mark.parametrize(
    "entry, words",
    [
        ({"how": "replace"}, 'girih.how is "replace"; expected inject'),
        ({"mixer": "gsa"}, 'girih.mixer is "gsa"; expected delta_product'),
        ({"max_self_attn_length": 5}, "girih.max_self_attn_length is 5; expected null"),
        ({"rank": 3}, "girih has 'rank', which this version of girih does not know"),
        ({"n": 5}, "girih.n is 5; expected 1 to 4"),
        ({"n": 1.5}, "girih.n is 1.5; expected an integer"),
        ({"gate": "q"}, "girih.gate is 'q'; expected one of k, v, kv"),
        ({"gate_per": "token"}, "girih.gate_per is 'token'; expected one of channel, head"),
        ({"pool": "all"}, "girih.pool is 'all'; expected one of past, window"),
        ({"virtual_tokens": "more"}, "girih.virtual_tokens is 'more'"),
        ({"between_chunks": "relu"}, "girih.between_chunks is 'relu'"),
        ({"between_chunks": "gelu", "chunk": 65}, "girih.chunk is 65; expected 1 to 64"),
        ({"chunk": 8}, "chunk is 8; expected none: it is for between_chunks"),
        ({"n": 1, "virtual_tokens": "both"}, "virtual_tokens is both; expected none: it is for n above 1"),
        ({"weight": 1.5}, "girih.weight is 1.5; expected 0 to 1"),
        ({"weight": 1.0, "learned": True}, "weight is 1; expected a number from 0 to 1, and between them"),
        ({"layers": [1]}, "girih.layers has 1; attention that can be converted is at 0, 2"),
        ({"layers": []}, "girih.layers is a list; expected a list of integers"),
        ({"layers": "all"}, 'girih.layers is "all"; expected a list of integers'),
    ],
    ids=str,
)
def test_unsupported_entries_are_refused_before_loading(folder, entry, words):
    assert words in refusal(folder, entry)


def test_invalid_entries_are_refused(folder):
    entry = json.loads((folder / "config.json").read_text())["girih"][0]
    assert "girih is an object; expected a list" in refusal(folder, girih=entry)
    assert "girih holds 3; expected what girih.inject saved" in refusal(folder, girih=[3])
    assert "girih.layers has 0, which has a linear path already" in refusal(folder, girih=[entry, entry])
    assert "the model has no attention" in refusal(folder, girih=[entry], mixer="gsa")


def test_path_weights_without_an_entry_are_refused(folder):
    """The model was saved after loading without girih, so no layer has the weights of the path."""
    assert 'girih.path.norm.weight" is unknown to this model' in refusal(folder, weights=True, girih=None)


def test_a_path_without_its_weights_is_refused(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({n: x for n, x in weights.items() if ".girih." not in n}, folder / "model.safetensors")
    words = refusal(folder, weights=True)
    assert "4 parameters are missing, model.layers.0.mixer.girih." in words


@pytest.mark.parametrize("way", ["inject", "replace"])
def test_a_converted_model_of_transformers_is_refused_by_its_type(way, tmp_path):
    model = base_model("llama")
    girih.inject(model) if way == "inject" else girih.replace_attention(model, mixer="gsa", num_slots=8)
    model.save_pretrained(tmp_path)
    words = 'model_type is "llama"; expected girih: only Python reads other models, converted models included'
    assert words in refusal(tmp_path)


def test_a_replaced_model_of_girihs_own_is_refused_by_name(tmp_path):
    model = GirihForCausalLM(GirihConfig(**SIZES, mixer=HYBRID))
    girih.replace_attention(model, mixer="gsa", num_slots=8)
    model.save_pretrained(tmp_path)
    assert 'girih.how is "replace"; expected inject' in refusal(tmp_path)
