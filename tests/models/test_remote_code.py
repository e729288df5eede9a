"""Folders load with trust_remote_code=True in processes that do not import girih, such as evaluation
harnesses and the command line of trl. Converted models load converted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import girih
import pytest
import torch
from converted import base_model, converted
from girih.models import CatModel, GirihForCausalLM, GirihForSequenceClassification
from small_models import config_of
from test_trl import tokenizer
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": 260, "hidden_size": 32, "num_heads": 2, "num_slots": 8, "chunk": 4, "pad_token_id": 0}
LOAD = """
import json, sys
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
trust = {"trust_remote_code": True}
folder, name, wanted = sys.argv[1:]
ids = torch.load(f"{folder}/ids.pt")
assert "girih" not in sys.modules
"""
CHECK = """
assert type(model).__name__ == wanted, type(model)
with torch.no_grad():
    y = model.eval()(ids)[0]
assert y.equal(torch.load(f"{folder}/result.pt")), "other numbers"
"""
AUTO = LOAD + "model = getattr(transformers, name).from_pretrained(folder, **trust)\n" + CHECK


def run(program, *arguments, path=("python",), **environment):
    """Runs a program in a process with girih on its path, offline and without input for a prompt."""
    root = Path(girih.__file__).parents[2]
    variables = os.environ | {"PYTHONPATH": ":".join(str(root / p) for p in path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(
        command,
        env=variables | environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )


@pytest.fixture
def environment(tmp_path):
    return {"HF_HOME": str(tmp_path / "home")}


def save_model(model, folder):
    model.eval().save_pretrained(folder)
    with torch.no_grad():
        torch.save(IDS, folder / "ids.pt")
        torch.save(model(IDS)[0], folder / "result.pt")
    return folder


def girih_model(kind=GirihForCausalLM, mixer="gsa", **options):
    torch.manual_seed(0)
    return kind(config_of(**SIZES, mixer=mixer, num_hidden_layers=2, **options))


MODELS = {
    "AutoModelForCausalLM": girih_model,
    "AutoModel, cat": lambda: girih_model(CatModel, "cat"),
    "AutoModelForSequenceClassification": lambda: girih_model(GirihForSequenceClassification, num_labels=3),
    "AutoModelForCausalLM, injected": lambda: converted("llama", "injected"),
    "AutoModelForCausalLM, girih's attention": lambda: converted("girih", "gsa"),
    "AutoModel, replaced": lambda: converted("llama", "gsa").model,
}


@pytest.mark.parametrize("case", MODELS)
def test_a_process_without_girih_loads_a_folder(case, tmp_path, environment):
    model = MODELS[case]()
    if case == "AutoModel, replaced":  # base model of a folder with a head
        converted("llama", "gsa").save_pretrained(tmp_path / "whole")
        model = AutoModel.from_pretrained(tmp_path / "whole")
    folder = save_model(model, tmp_path / "model")
    done = run(AUTO, folder, case.split(",")[0], type(model).__name__, **environment)
    assert done.returncode == 0, done.stderr[-3000:]


TRAINER = (
    LOAD
    + """
config = AutoConfig.from_pretrained(folder, **trust)  # as trl does it, and then by the class that it names
model = getattr(transformers, config.architectures[0], AutoModelForCausalLM).from_pretrained(folder, **trust)
"""
    + CHECK
    + """
model.save_pretrained(f"{folder}/again")
again = AutoModelForCausalLM.from_pretrained(f"{folder}/again", **trust)
assert again.eval()(ids)[0].equal(model(ids)[0])
text = transformers.pipeline("text-generation", folder, **trust)("a b", max_new_tokens=3, do_sample=False)
assert text[0]["generated_text"].startswith("a b")
"""
)


@pytest.mark.parametrize("kind", ["gsa", "replaced"])
def test_a_process_without_girih_trains_saves_and_writes(kind, tmp_path, environment):
    pytest.importorskip("tokenizers")
    model = girih_model() if kind == "gsa" else converted("llama", "gsa", vocab_size=260)
    tokenizer().save_pretrained(tmp_path)
    save_model(model, tmp_path)
    done = run(TRAINER, tmp_path, "", type(model).__name__, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    files = {file.name for file in (tmp_path / "again").iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors", "modeling_girih.py"}
    entries = [json.loads((tmp_path / part / "config.json").read_text()) for part in (".", "again")]
    assert entries[0] == entries[1] and entries[0]["auto_map"]["AutoConfig"].startswith("modeling_girih.")


MISSING = """
import sys
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
"""


def test_without_girih_the_error_says_what_to_install(tmp_path, environment):
    save_model(girih_model(), tmp_path)
    done = run(MISSING, tmp_path, path=("tests",), **environment)
    assert done.returncode != 0 and "pip install girih" in done.stderr.splitlines()[-1], done.stderr[-500:]


WITHOUT = """
import sys
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
except ValueError as error:
    assert "trust_remote_code=True" in str(error), error
else:
    raise AssertionError("loaded")
AutoModelForCausalLM.from_pretrained(sys.argv[2])
"""


def test_without_remote_code_loading_fails_or_warns(tmp_path, environment):
    """A girih folder is refused. For a converted folder, transformers reports the weights that it does not
    load."""
    save_model(girih_model(), tmp_path / "girih")
    save_model(converted("llama", "gsa"), tmp_path / "converted")
    done = run(WITHOUT, tmp_path / "girih", tmp_path / "converted", **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "UNEXPECTED" in done.stderr and "self_attn.girih" in done.stderr


@pytest.mark.parametrize("trust", [None, False, True])
@pytest.mark.parametrize("make", [girih_model, converted], ids=["girih", "converted"])
def test_where_girih_is_imported_remote_code_makes_no_difference(make, trust, tmp_path):
    model = make()
    folder = save_model(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust).eval()
    assert type(loaded) is type(model)
    assert loaded(IDS)[0].equal(torch.load(folder / "result.pt"))
    assert type(loaded)._auto_class is None and type(loaded.config)._auto_class is None
    loaded.save_pretrained(tmp_path / "again")
    configs = [json.loads((tmp_path / part / "config.json").read_text()) for part in (".", "again")]
    assert configs[0] == configs[1]


def test_remote_module_exports_the_classes_of_auto_map(tmp_path):
    for model in (girih_model(), converted()):
        model.save_pretrained(tmp_path)
        auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
        module = {}
        exec((tmp_path / "modeling_girih.py").read_text(), module)
        classes = [name.removeprefix("modeling_girih.") for name in auto_map.values()]
        assert sorted(classes) == module["__all__"] and set(classes) <= module.keys()
        assert {"AutoConfig", "AutoModel", "AutoModelForCausalLM"} <= auto_map.keys()


def test_a_configuration_alone_is_saved_with_the_module(tmp_path):
    config_of(**SIZES).save_pretrained(tmp_path)
    assert (tmp_path / "modeling_girih.py").exists()
    assert AutoConfig.from_pretrained(tmp_path, trust_remote_code=True).hidden_size == 32


def test_an_undone_conversion_is_saved_without_the_module(tmp_path):
    model = converted()
    model.save_pretrained(tmp_path / "converted")
    assert "auto_map" not in vars(model.config)
    plain = base_model()
    with girih.inject(plain):
        plain.save_pretrained(tmp_path / "other")
    plain.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "modeling_girih.py").exists()
    assert "auto_map" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_auto_map_of_other_code_is_kept(tmp_path):
    model = converted()
    model.config.auto_map = {"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"}
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == model.config.auto_map
    assert not (tmp_path / "modeling_girih.py").exists()


def test_a_file_in_the_place_of_a_folder_is_left_to_transformers(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises((AssertionError, OSError)):
        config_of(**SIZES).save_pretrained(tmp_path / "file")
    assert not (tmp_path / "file").read_text()
