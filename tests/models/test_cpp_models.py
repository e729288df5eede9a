"""The C++ language model alone: generation, files and refusals."""

import json
import re
import struct
import subprocess
import sys

import pytest
import torch
from accelerate import init_empty_weights
from girih import _C
from girih.models import MIXERS, GirihConfig, GirihForCausalLM
from safetensors.torch import load_file, save_file
from small_models import config_of
from torch._subclasses.fake_tensor import FakeTensorMode

SIZES = {
    "vocab_size": 13,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "num_slots": 4,
    "initializer_range": 0.5,
}


def new_model(**fields):
    torch.manual_seed(0)
    return _C.LanguageModel(json.dumps(SIZES | fields))


@pytest.fixture
def folder(tmp_path):
    new_model().save_pretrained(str(tmp_path))
    return tmp_path


def refusal(folder, kind=(ValueError, RuntimeError)):
    with pytest.raises(kind) as error:
        _C.LanguageModel.from_pretrained(str(folder))
    assert "\n" not in str(error.value)
    return str(error.value)


@torch.no_grad()
def test_parameters_of_any_layout_are_saved_as_they_are(tmp_path):
    """The parameters are transposed, not contiguous."""
    model = new_model()
    for p in model.named_parameters().values():
        if p.dim() == 2:
            p.data = p.data.mT.contiguous().mT
    want = {name: p.detach().clone() for name, p in model.named_parameters().items()}
    assert not all(p.is_contiguous() for p in want.values())
    model.save_pretrained(str(tmp_path))
    for loaded in (
        _C.LanguageModel.from_pretrained(str(tmp_path)),
        GirihForCausalLM.from_pretrained(tmp_path),
    ):
        parameters = loaded.named_parameters()
        for name, p in (parameters if isinstance(parameters, dict) else dict(parameters)).items():
            assert p.equal(want[name]), name


# ---- writing -----------------------------------------------------------------------------------------------


def expected_text(ids, count=8, *, eos=None, pad=None):
    """Expected greedy text with rows that end, made from the text of `new_model()` without an end."""
    text = new_model().generate(ids, count)
    ends = [] if eos is None else [eos] if isinstance(eos, int) else eos
    longest = ids.shape[1]
    for row in text:
        end = next((i for i in range(ids.shape[1], len(row)) if row[i] in ends), len(row) - 1)
        row[end + 1 :] = pad if pad is not None else ends[0] if ends else 0
        longest = max(longest, end + 1)
    return text[:, :longest]


def prompt():
    return torch.arange(6).view(3, 2)


def test_eos_of_the_call_replaces_eos_of_the_configuration():
    ids = prompt()
    text = new_model().generate(ids, 8)
    first, second = text[0, 3].item(), text[1, 4].item()
    for eos in (first, [first, second], [first]):
        assert new_model(eos_token_id=eos).generate(ids, 8).equal(expected_text(ids, eos=eos))
        assert new_model().generate(ids, 8, eos_token_id=eos).equal(expected_text(ids, eos=eos))
    assert not expected_text(ids, eos=first).equal(expected_text(ids, eos=second))
    assert (
        new_model(eos_token_id=first)
        .generate(ids, 8, eos_token_id=second)
        .equal(expected_text(ids, eos=second))
    )
    assert new_model(eos_token_id=first).generate(ids, 8, eos_token_id=[]).equal(text)
    padded = new_model(eos_token_id=first, pad_token_id=12)
    assert padded.generate(ids, 8).equal(expected_text(ids, eos=first, pad=12))


def test_generation_config_sets_eos(folder):
    ids = prompt()
    ends = [int(row[3]) for row in new_model().generate(ids, 8)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends[:2], "max_length": 20}))
    model = _C.LanguageModel.from_pretrained(str(folder))
    assert model.generate(ids, 8).equal(expected_text(ids, eos=ends[:2]))


def test_generation_config_sets_each_special_token(folder, tmp_path):
    """Tokens that generation_config does not name keep the value of the configuration."""
    config = json.loads((folder / "config.json").read_text())
    tokens = {"bos_token_id": 3, "eos_token_id": 4, "pad_token_id": 5}
    (folder / "config.json").write_text(json.dumps(config | tokens))
    for name in (None, *tokens):
        (folder / "generation_config.json").write_text(json.dumps({name: 12} if name else {}))
        model = _C.LanguageModel.from_pretrained(str(folder))
        model.save_pretrained(str(tmp_path / "again"))
        found = json.loads((tmp_path / "again" / "config.json").read_text())
        assert {key: found[key] for key in tokens} == tokens | ({name: 12} if name else {})


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((-1,), "max_new_tokens is -1; expected at least 0"),
        ((2, -0.5), "temperature is -0.5; expected a number, at least 0"),
        ((2, float("inf")), "temperature is inf; expected a number"),
        ((2, float("nan")), "temperature is nan; expected a number"),
        ((2, 1.0, 0), "top_k is 0; expected at least 1"),
    ],
    ids=str,
)
def test_invalid_generate_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        new_model().generate(prompt(), *arguments)


def test_generate_needs_a_prompt_token_and_may_add_none():
    with pytest.raises(ValueError, match=r"ids has shape \[3, 0\]; expected .* at least one token"):
        new_model().generate(prompt()[:, :0], 2)
    assert new_model().generate(prompt(), 0).equal(prompt())
    assert new_model().generate(prompt()).shape == (3, 2 + 64)


def test_generation_stops_when_all_rows_have_ended():
    ids = prompt()
    ends = sorted({int(row[3]) for row in new_model().generate(ids, 8)})
    assert new_model().generate(ids, 8, eos_token_id=ends).shape[1] <= 4


@pytest.mark.parametrize("eos", [3, [3], [3, 5], None])
def test_eos_type_is_kept_between_languages(eos, tmp_path):
    config = config_of(**SIZES, eos_token_id=eos)
    assert config.eos_token_id == eos
    GirihForCausalLM(config).save_pretrained(tmp_path / "python")
    _C.LanguageModel.from_pretrained(str(tmp_path / "python")).save_pretrained(str(tmp_path / "cpp"))
    assert GirihConfig.from_pretrained(tmp_path / "cpp").eos_token_id == eos


def test_temperature_flattens_the_sampled_distribution():
    model, ids = new_model(), torch.zeros(2000, 1, dtype=torch.int64)
    p = model.forward(ids[:1])[0][0, -1]
    for temperature in (0.5, 1.0, 3.0):
        torch.manual_seed(0)
        drawn = model.generate(ids, 1, temperature)[:, 1].bincount(minlength=13) / 2000
        want = (p / temperature).softmax(-1)
        assert (drawn - want).abs().max() < 5 * (0.25 / 2000) ** 0.5, temperature
    likely = p.topk(3).indices.tolist()
    assert set(model.generate(ids, 1, 3.0, 3)[:, 1].tolist()) == set(likely)


def test_loss_ignores_labels_of_minus_100():
    model, ids = new_model(), torch.randint(13, (2, 9))
    labels = ids.masked_fill(torch.rand(2, 9) < 0.5, -100)
    log_p = model.forward(ids)[0][:, :-1].log_softmax(-1)
    counted = labels[:, 1:] != -100
    want = -log_p.gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(model.loss(ids, labels), want[counted].mean())
    torch.testing.assert_close(model.loss(ids), want.mean())
    with pytest.raises(ValueError, match="labels has shape"):
        model.loss(ids, labels[:, 1:])


@pytest.mark.parametrize("case", ["no label", "one token"])
def test_loss_without_labels_is_nan_with_zero_gradients(case):
    model, ids = new_model(), torch.randint(13, (2, 9 if case == "no label" else 1))
    loss = model.loss(ids, torch.full_like(ids, -100) if case == "no label" else None)
    assert loss.isnan()
    loss.backward()
    grads = [p.grad for p in model.named_parameters().values() if p.grad is not None]
    assert all(grad.eq(0).all() for grad in grads)


@pytest.mark.parametrize("wrong", [13, -1])
def test_label_out_of_range_is_refused(wrong):
    ids = torch.randint(13, (2, 9))
    labels = ids.clone()
    labels[1, 5] = wrong
    with pytest.raises((IndexError, RuntimeError), match="out of (bounds|range)"):
        new_model().loss(ids, labels)


@pytest.mark.parametrize("mixer", [*MIXERS, ["cat", "gsa"]], ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)], ids=str)
@torch.no_grad()
def test_empty_batches_and_sequences_have_empty_logits(mixer, shape):
    config = config_of(**SIZES | {"mixer": mixer, "chunk": 4})
    model = _C.LanguageModel(config.to_json_string(use_diff=False))
    for use_cache in (False, True):
        logits, _ = model.forward(torch.zeros(shape, dtype=torch.int64), use_cache=use_cache)
        assert logits.shape == (*shape, 13)


@pytest.mark.parametrize("mixer", ["attention", "mag", "cat", ["gsa", "cat"]], ids=str)
@torch.no_grad()
def test_packed_sequences_have_no_attention_cache(mixer):
    model = _C.LanguageModel(config_of(**SIZES | {"mixer": mixer}).to_json_string(use_diff=False))
    ids, bounds = torch.randint(13, (1, 5)), torch.tensor([0, 2, 5])
    calls = [{"use_cache": True}]
    if mixer != ["gsa", "cat"]:
        calls.append({"state": model.forward(ids, use_cache=True)[1]})
    for call in calls:
        with pytest.raises(ValueError, match="has no cache for packed sequences"):
            model.forward(ids, cu_seqlens=bounds, **call)


def test_a_state_of_another_model_is_refused():
    """Runs in another process, so that a crash does not end the tests."""
    pairs = [("gsa", "gla"), ("gsa", "attention"), ("attention", "gsa"), ("attention", "mag")]
    pairs += [("cat", "gsa"), ("gsa", "cat")]
    code = (
        "import json, torch; from girih import _C\n"
        f"sizes, ids = {SIZES}, torch.ones(2, 5, dtype=torch.int64)\n"
        "sizes.pop('num_slots')\n"
        "def model(mixer): return _C.LanguageModel(json.dumps(sizes | {'mixer': mixer}))\n"
        f"for one, other in {pairs}:\n"
        "  state = model(one).forward(ids, use_cache=True)[1]\n"
        "  for T in (1, 5):\n"
        "    try: model(other).forward(ids[:, :T], state=state, use_cache=True)\n"
        "    except (ValueError, RuntimeError): print('refused')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.split() == ["refused"] * 12, run.stderr


# ---- files -------------------------------------------------------------------------------------------------


def test_a_write_that_fails_leaves_no_file(tmp_path):
    (tmp_path / "model.safetensors" / "taken").mkdir(parents=True)
    with pytest.raises(RuntimeError, match=r"model\.safetensors: cannot be written"):
        new_model().save_pretrained(str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_write_without_disk_space_leaves_the_old_file(folder):
    before = (folder / "model.safetensors").read_bytes()
    code = (
        "import json, resource, signal, sys; from girih import _C\n"
        f"model = _C.LanguageModel(json.dumps({SIZES}))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: model.save_pretrained(sys.argv[1])\n"
        "except RuntimeError as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == f"{folder}/model.safetensors: cannot be written"
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == before


def test_save_creates_parent_folders(tmp_path):
    new_model().save_pretrained(str(tmp_path / "some" / "where"))
    assert {p.name for p in (tmp_path / "some" / "where").iterdir()} == {"config.json", "model.safetensors"}


def test_tensors_begin_at_a_multiple_of_8_bytes(tmp_path):
    """The headers have different lengths: every vocab_size has more digits than the one before."""
    ends = set()
    for vocab_size in (1, 13, 130, 1300, 13000):
        new_model(vocab_size=vocab_size).save_pretrained(str(tmp_path))
        data = (tmp_path / "model.safetensors").read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        assert size % 8 == 0
        ends.add(len(data[8 : 8 + size].rstrip()) % 8)
    assert len(ends) > 1


def test_lm_head_beside_tied_embeddings_is_ignored(folder):
    """Other programs write the head although it is tied."""
    tensors = load_file(folder / "model.safetensors")
    head = {"lm_head.weight": torch.zeros(13, 16)}
    save_file(tensors | head, folder / "model.safetensors")
    model = _C.LanguageModel.from_pretrained(str(folder))
    assert model.forward(prompt())[0].equal(new_model().forward(prompt())[0])
    new_model(tie_word_embeddings=False).save_pretrained(str(folder))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | head, folder / "model.safetensors")
    assert _C.LanguageModel.from_pretrained(str(folder)).forward(prompt())[0].eq(0).all()


def test_buffers_are_saved_and_read(tmp_path):
    """The weight of a mixture, changed as a schedule changes it."""
    fields = SIZES | {"mixer": "mag", "mag_mixer": "gsa"}
    model = _C.LanguageModel(json.dumps(fields))
    before = model.forward(prompt())[0]
    for name, weight in model.named_buffers().items():
        assert name.endswith(".mixer.weight")
        weight.fill_(0.9)
    want = model.forward(prompt())[0]
    assert not want.equal(before)
    model.save_pretrained(str(tmp_path))
    assert _C.LanguageModel.from_pretrained(str(tmp_path)).forward(prompt())[0].equal(want)
    python = GirihForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(python(prompt()).logits, want, atol=1e-4, rtol=0)


def test_a_tensor_of_another_shape_or_dtype_is_refused_by_name(folder):
    tensors = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    for wrong, words in (
        (torch.ones(17), f"{name} has shape [17]; expected [16]"),
        (torch.ones(4, 4), f"{name} has shape [4, 4]; expected [16]"),
        (torch.ones(16, dtype=torch.int64), f"{name} is Long; expected a floating dtype"),
        (torch.ones(16, dtype=torch.int32), f'"{name}" should have dtype F64, F32, F16, BF16 or I64'),
    ):
        save_file(tensors | {name: wrong}, folder / "model.safetensors")
        assert words in refusal(folder)
    save_file(tensors | {"more": torch.ones(1)}, folder / "model.safetensors")
    assert '"more" is unknown to this model' in refusal(folder)
    save_file({n: x for n, x in tensors.items() if n != name}, folder / "model.safetensors")
    assert f"1 parameters are missing, {name} among them" in refusal(folder)


def change_header(folder, change):
    """Changes the header of the file, as an object or as bytes. The tensors stay."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + size])
    text = change(entries)
    text = text if isinstance(text, bytes) else json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda e: e[NORM].update(data_offsets=[0.0, 64.0]), "should have data_offsets"),
        (lambda e: e[NORM].update(data_offsets=[0, 64, 128]), "should have data_offsets"),
        (lambda e: e[NORM].update(data_offsets=[-64, 0]), "should have data_offsets"),
        (lambda e: e[NORM].update(data_offsets=[2**70, 2**70 + 64]), "should have data_offsets"),
        (lambda e: e[NORM].update(data_offsets=[64, 0]), "lies outside of the file"),
        (lambda e: e[NORM].update(data_offsets=[0, 2**60]), "lies outside of the file"),
        (lambda e: e[NORM].update(data_offsets=[0, 64]), "overlap or leave a gap"),
        (lambda e: e[NORM].update(shape=[-16]), "should have a shape"),
        (lambda e: e[NORM].update(shape=16), "should have a shape"),
        (lambda e: e[NORM].update(shape=[2**63]), "should have a shape"),
        (lambda e: e[NORM].update(shape=[15]), "does not have the bytes of its shape"),
        (lambda e: e[NORM].update(dtype="F16"), "does not have the bytes of its shape"),
        (lambda e: e.update({"more": e[NORM]}), "overlap or leave a gap"),
        (lambda e: e[NORM].update(shape=[2**62, 2**62]), "does not have the bytes of its shape"),
        (lambda e: e[NORM].update(shape=[2**63 - 1]), "does not have the bytes of its shape"),
        (lambda e: e[NORM].update(dtype=[]), "should have dtype"),
        (lambda e: e[NORM].pop("dtype"), "should have dtype"),
        (lambda e: e.update({NORM: []}), "is not an object"),
        (lambda e: e.update({"a" * 500: []}), "aaa... is not an object"),
        (lambda e: json.dumps(e).encode()[:-1], "its header is not a JSON object"),
        (lambda e: json.dumps(e).encode().replace(b"norm", b"n\xffrm"), "its header is not a JSON object"),
        (lambda e: b'{"a": 1, "a": 1}', "tensors with a name each"),
        (lambda e: b"[" * 10**6, "its header is not a JSON object"),
        (lambda e: b"[]", "its header is not a JSON object"),
    ],
)
def test_a_damaged_header_is_refused(change, words, folder):
    change_header(folder, change)
    error = refusal(folder)
    assert error.startswith(f"{folder}/model.safetensors: ") and words in error and len(error) < 400


@pytest.mark.parametrize("shape", [[0, 3], [2**62, 2**62, 0]], ids=str)
def test_empty_tensor_is_read(shape, folder):
    """The tensor has no bytes, whatever its other sizes. Only its name is unknown to the model."""

    def with_one_more(entries):
        end = max(entry["data_offsets"][1] for entry in entries.values() if "data_offsets" in entry)
        entries["more"] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end]}

    change_header(folder, with_one_more)
    error = refusal(folder)
    assert error.startswith(f"{folder}/model.safetensors: ") and "more" in error and "unknown" in error


def test_truncated_and_extended_files_are_refused(folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    for wrong, words in (
        (b"", "header is cut off"),
        (data[:7], "header is cut off"),
        (struct.pack("<Q", 2**63) + data[8:], "header is cut off"),
        (data[:-1], "lies outside of the file"),
        (data + b"\0", "has bytes behind its last tensor"),
    ):
        file.write_bytes(wrong)
        assert words in refusal(folder)
    with file.open("wb") as large:  # the file could hold this header, but no header may be so long
        large.write(struct.pack("<Q", 100_000_001))
        large.truncate(100_000_009)
    assert "header is cut off" in refusal(folder)
    file.unlink()
    file.mkdir()
    assert "is not a file" in refusal(folder)


def test_an_index_names_files_of_its_folder(folder):
    index = folder / "model.safetensors.index.json"
    for wrong in ("[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "{"):
        index.write_text(wrong)
        assert refusal(folder).startswith(f"{index}: ")
    index.write_text(json.dumps({"weight_map": {"a": f"../{folder.name}/model.safetensors"}}))
    assert "of its own folder" in refusal(folder)
    index.write_text(json.dumps({"weight_map": {"a": "x" * 256}}))
    assert "of its own folder" in refusal(folder)
    index.write_text(json.dumps({"weight_map": {}}))
    assert "at most the 0 that its files hold" in refusal(folder)
    (folder / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}))
    assert "is in another file too" in refusal(folder)


def test_unreadable_configuration_is_refused(folder):
    file = folder / "config.json"
    for wrong in (b"", b"\xff\xfe", b"[" * 10**6, b'{"vocab_size": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"):
        file.write_bytes(wrong)
        assert refusal(folder, ValueError).startswith(f"{file}: ")
    file.write_text(json.dumps(SIZES | {"feature": "x" * 10**6}))
    assert len(refusal(folder, ValueError)) < 400
    file.unlink()
    assert refusal(folder) == f"{file}: is not a file"
    file.mkdir()
    assert refusal(folder) == f"{file}: is not a file"


# ---- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 2**20},
        {"hidden_size": 2**16, "num_hidden_layers": 4096},
        {"vocab_size": 2**31 - 1, "hidden_size": 2**20},
        {"mixer": "trellis", "num_slots": 2**20, "head_dim": 2**20},
        {"mixer": "delta_product", "n": 4096, "num_heads": 2**20, "head_dim": 2**20, "hidden_size": 2**20},
        {"mixer": "cat", "chunk": 256, "hidden_size": 2**20, "compressor_layers": 1},
    ],
    ids=str,
)
def test_model_larger_than_memory_is_refused_before_allocation(sizes):
    error = pytest.raises(ValueError, match=r"hidden_size.* give at least .* parameters; expected at most")
    config = config_of(**SIZES | sizes)
    with error:
        _C.LanguageModel(config.to_json_string(use_diff=False))
    with error:
        GirihForCausalLM(config)


def test_models_on_meta_and_fake_tensors_allocate_no_memory():
    config = config_of(**SIZES | {"hidden_size": 2**20})
    with torch.device("meta"):
        assert GirihForCausalLM(config).num_parameters() > 2**40
    with FakeTensorMode():
        assert GirihForCausalLM(config).num_parameters() > 2**40
    with init_empty_weights():  # moves each parameter to the meta device by itself
        config = config_of(**SIZES | {"hidden_size": 2**14, "num_hidden_layers": 64})
        assert GirihForCausalLM(config).num_parameters() > 2**37


@pytest.mark.parametrize("mixer", [*MIXERS, ["mag", "cat", "lattice"]], ids=str)
@pytest.mark.parametrize("more", [{}, {"num_slots": 512, "head_dim": 64}, {"chunk": 63, "n": 5}], ids=str)
def test_memory_check_uses_a_lower_bound_of_the_parameters(mixer, more, tmp_path):
    """The bound is at most the number of parameters and more than half of it."""
    sizes = {"hidden_size": 128, "num_heads": 4, "num_hidden_layers": 3, "vocab_size": 500, "mixer": mixer}
    text = config_of(**sizes | more).to_json_string(use_diff=False)
    has = sum(p.numel() for p in _C.LanguageModel(text).named_parameters().values())
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    least = float(re.search(r"at least (\S+) parameters; expected at most the 0 ", refusal(tmp_path))[1])
    assert 0.5 * has < least <= has


def test_file_sizes_and_shapes_are_checked_before_allocation(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 2**31 - 1}))
    assert re.match(r".*vocab_size, .* give at least .* that its files hold", refusal(folder))
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 14}))
    assert "model.embed_tokens.weight has shape [13, 16]; expected [14, 16]" in refusal(folder)
