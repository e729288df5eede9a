"""Linear models of transformers compute the same results with `kernel_config=girih.kernel_config()`.

Tests of whole models need a version of the package kernels that transformers accepts. No test has a network.
"""

import inspect
import re
import socket
import sys
from pathlib import Path

import girih
import pytest
import torch
import transformers
from girih import ops
from girih.acceleration import accelerate, functions
from girih.acceleration import kernel_config as function_of_package
from girih.acceleration.accelerate import GATED_NORM, MODELS, SERVED
from girih.acceleration.kernel_config import FUNCTIONS, LAYERS, GirihKernelConfig, Repository
from test_accelerate import FAMILIES, compute_gradients, model_of, relative_error, tokens
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.utils.import_utils import is_kernels_available

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:girih.accelerate")
needs_kernels = pytest.mark.skipif(
    not is_kernels_available(), reason="needs a version of the package kernels that transformers accepts"
)
OPERATORS = (
    "delta_product",
    "delta_product_step",
    "gla",
    "gla_step",
    "short_conv",
    "short_conv_step",
    "gated_rms_norm",
)
# transformers registers no function of MiniMax.
REGISTERED_FAMILIES = sorted(FAMILIES.keys() - {"minimax"})
# Experts that read their tokens on the host break the graph of torch.compile, with and without kernels.
MIXTURES = ("qwen3_next", "qwen3_5_moe_text", "qwen4_exp_text", "granitemoehybrid")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def refuse(*arguments, **keywords):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def registered(function, name):
    """A function as the package kernels registers it: a layer without parameters."""

    class Registered(nn.Module):
        kernel_layer_name = name

        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    Registered.forward.__signature__ = inspect.signature(Registered.forward).replace(
        parameters=[
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *inspect.signature(function).parameters.values(),
        ]
    )
    return Registered()


class LayerWithFunctions(nn.Module):
    """A model with registered functions."""

    def __init__(self, device="cpu", **named):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, device=device))
        self.__dict__["_kernel_funcs"] = {name: registered(f, name) for name, f in named.items()}
        self.kernel_config = None

    @property
    def device(self):
        return self.weight.device


def modelling_sources():
    folder = Path(transformers.__file__).parent / "models"
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*/modeling_*.py"))}


def test_every_registered_function_that_accelerate_serves_has_a_kernel():
    pattern = r'@use_kernel_func_from_hub_with_fallback\(\s*"(\w+)"[^)]*\)\s*def (\w+)\('
    served = {
        kernel: SERVED[name]
        for text in modelling_sources().values()
        for kernel, name in re.findall(pattern, text)
        if name in SERVED
    }
    assert served == FUNCTIONS


def test_every_layer_registered_as_a_gated_norm_applies_its_gate_after_the_norm():
    pattern = r'@use_kernel_forward_from_hub\("RMSNormGated"\)\s*class (\w+)\('
    norms = {name for text in modelling_sources().values() for name in re.findall(pattern, text)}
    assert norms and all(GATED_NORM.fullmatch(name) for name in norms), norms
    assert {"RMSNormGated": functions.rms_norm_gated} == LAYERS


def draw(*sizes):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(len(sizes)))


CALLS = {
    "chunk_gated_delta_rule": (
        modeling_qwen3_next.torch_chunk_gated_delta_rule,
        lambda: (
            (*(draw(2, 9, 2, 8) for _ in range(3)), -draw(2, 9, 2).abs(), draw(2, 9, 2).sigmoid()),
            {"use_qk_l2norm_in_kernel": True, "output_final_state": True},
        ),
    ),
    "causal_conv1d_fn": (
        modeling_qwen3_next.causal_conv1d_fn,
        lambda: ((draw(2, 6, 9), draw(6, 4)), {"activation": "silu"}),
    ),
    "causal_conv1d_fn, a filter longer than girih's": (
        modeling_qwen3_next.causal_conv1d_fn,
        lambda: ((draw(2, 6, 9), draw(6, 5)), {"activation": "silu"}),
    ),
    "mamba_chunk_scan_combined": (
        modeling_mamba2.mamba2_chunk_scan,
        lambda: (
            (draw(2, 9, 2, 8), draw(2, 9, 2), -draw(2).exp(), draw(2, 9, 1, 8), draw(2, 9, 1, 8), 16),
            {"dt_softplus": True},
        ),
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_kernel_computes_what_the_registered_function_computes(case):
    name = case.split(",")[0]
    function, arguments = CALLS[case]
    layer = registered(function, name)
    kind = type(layer)
    kernel = Repository(name, kind).load()
    assert inspect.signature(kernel.forward) == inspect.signature(kind.forward)
    assert kernel.__init__ is nn.Module.__init__
    added = {n for n, _ in inspect.getmembers(kernel)} - {n for n, _ in inspect.getmembers(nn.Module)}
    assert added == {"can_torch_compile", "has_backward"}
    args, kwargs = arguments()
    want, found = function(*args, **kwargs), kernel.forward(layer, *args, **kwargs)
    for x, y in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, want)), strict=True):
        assert relative_error(x, y) < 1e-5


def test_the_kernel_of_a_norm_reads_the_norms_own_weight_and_epsilon():
    norm = modeling_qwen3_next.Qwen3NextRMSNormGated(8, eps=0.3)
    torch.nn.init.normal_(norm.weight)
    kernel = Repository("RMSNormGated", type(norm)).load()
    x, gate = draw(5, 8), draw(5, 8).flip(0)
    assert relative_error(kernel.forward(norm, x, gate), norm(x, gate)) < 1e-5


def scan():
    return modeling_qwen3_next.torch_chunk_gated_delta_rule


def test_each_model_gets_the_kernels_that_it_registers():
    config = GirihKernelConfig(inherit_mapping=False)
    first = LayerWithFunctions(chunk_gated_delta_rule=scan(), rotary_pos_emb=lambda q, k: (q, k))
    second = LayerWithFunctions(causal_conv1d_fn=modeling_qwen3_next.causal_conv1d_fn)
    for model in (first, second):
        config.sanitize_kernel_mapping(model)
        config.create_compatible_mapping(model)
    mapping = first.kernel_config.kernel_mapping
    assert mapping.keys() == {"chunk_gated_delta_rule", "rotary_pos_emb"}
    assert mapping["rotary_pos_emb"] == {}  # transformers' code
    assert mapping["chunk_gated_delta_rule"].keys() == {"cpu", "cuda"}
    assert second.kernel_config.kernel_mapping.keys() == {"causal_conv1d_fn"}
    assert config.kernel_mapping == {}


@pytest.mark.parametrize(
    ("model", "variables", "message"),
    [
        (lambda: LayerWithFunctions("meta", chunk_gated_delta_rule=scan()), {}, "on 'meta'; girih serves"),
        (lambda: LayerWithFunctions(chunk_kda=scan()), {}, "registers no function that girih serves"),
        (
            lambda: LayerWithFunctions(chunk_gated_delta_rule=scan()),
            {"DISABLE_KERNEL_MAPPING": "1"},
            "DISABLE_KERNEL_MAPPING",
        ),
    ],
    ids=["device", "no function", "disabled"],
)
def test_models_that_would_keep_transformers_code_are_refused(model, variables, message, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        GirihKernelConfig().sanitize_kernel_mapping(model())


def test_kernel_config_without_the_package_names_it(monkeypatch):
    module = inspect.getmodule(GirihKernelConfig)
    monkeypatch.setattr(module, "is_kernels_available", lambda: False)
    with pytest.raises(
        ImportError, match=r"needs the package kernels, version 0\.\d+\.\d+ or newer and before"
    ):
        girih.kernel_config()
    monkeypatch.setattr(module, "is_kernels_available", lambda: True)
    assert isinstance(girih.kernel_config(), transformers.KernelConfig)
    assert girih.kernel_config().inherit_mapping is False
    with pytest.raises(TypeError, match="inherit_mapping is 'yes'; expected True or False"):
        girih.kernel_config(inherit_mapping="yes")
    assert girih.kernel_config is function_of_package


# Whole models.


@pytest.fixture
def restored():
    """Restores the `forward` of registered functions, which every model of a family uses."""
    yield
    for name, module in list(sys.modules.items()):
        if MODELS.fullmatch(name):
            for value in vars(module).values():
                if isinstance(value, nn.Module):
                    vars(value).pop("forward", None)


@pytest.fixture
def calls(monkeypatch):
    """The names of girih's operators that are called."""
    names = []

    def counted(name, operator):
        def call(*args, **kwargs):
            names.append(name)
            return operator(*args, **kwargs)

        return call

    for name in OPERATORS:
        monkeypatch.setattr(ops, name, counted(name, getattr(ops, name)))
    return names


def with_kernels(model, folder, **options):
    """The model, saved and loaded with girih's kernels."""
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder,
        use_kernels=True,
        kernel_config=girih.kernel_config(),
        experts_implementation="eager",
        **options,
    )


@needs_kernels
@pytest.mark.parametrize("family", REGISTERED_FAMILIES)
def test_logits_loss_gradients_and_text(family, tmp_path, restored, calls):
    model, ids = model_of(family), tokens()
    logits, loss, grads = compute_gradients(model.train(), input_ids=ids)
    text = model.eval().generate(ids[:, :20], max_new_tokens=6, do_sample=False)
    assert not calls
    kernelized = with_kernels(model, tmp_path)
    found = compute_gradients(kernelized.train(), input_ids=ids)
    assert relative_error(found[0], logits) < 1e-5 and relative_error(found[1], loss) < 1e-5
    flat = [torch.cat([g.flatten() for g in all.values()]) for all in (found[2], grads)]
    assert found[2].keys() == grads.keys() and relative_error(*flat) < 1e-5
    trained = set(calls)
    assert "short_conv" in trained
    assert ("gated_rms_norm" in trained) == (
        "linear_key_head_dim" in FAMILIES[family] or family == "kimi_linear"
    )
    assert kernelized.eval().generate(ids[:, :20], max_new_tokens=6, do_sample=False).equal(text)
    assert "short_conv_step" in calls
    if family not in ("lfm2", "kimi_linear"):
        scan = "delta_product" if "linear_key_head_dim" in FAMILIES[family] else "gla"
        assert scan in trained and f"{scan}_step" in calls


@needs_kernels
@pytest.mark.parametrize("family", sorted(set(REGISTERED_FAMILIES) - set(MIXTURES)))
def test_compiled(family, tmp_path, restored):
    model, ids = model_of(family), tokens()
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
    kernelized = with_kernels(model, tmp_path)
    try:
        compiled = torch.compile(kernelized, fullgraph=True, backend="aot_eager")
        found = compiled(ids, labels=ids, use_cache=False)
        assert relative_error(found.logits, want) < 1e-5
        found.loss.backward()
        grads = {n: p.grad for n, p in kernelized.named_parameters() if p.grad is not None}
        _, _, eager = compute_gradients(model, input_ids=ids)
        flat = [torch.cat([all[name].flatten() for name in eager]) for all in (grads, eager)]
        assert relative_error(*flat) < 1e-5
    finally:
        torch._dynamo.reset()


@needs_kernels
def test_one_configuration_serves_existing_models_of_several_families(restored, calls):
    config, ids = girih.kernel_config(), tokens()
    for family in ("qwen3_5_text", "mamba2"):
        model = model_of(family)
        with torch.no_grad():
            want = model(ids).logits
            calls.clear()
            model.set_use_kernels(True, config)
            assert relative_error(model(ids).logits, want) < 1e-5
            assert calls
            model.train().eval()  # transformers replaces the functions again
            calls.clear()
            assert relative_error(model(ids).logits, want) < 1e-5
            assert calls


@needs_kernels
def test_accelerate_before_and_after(restored):
    model, ids = model_of("qwen3_5_text"), tokens()
    with torch.no_grad():
        want = model(ids).logits
        with accelerate(model):
            model.set_use_kernels(True, girih.kernel_config())
            assert relative_error(model(ids).logits, want) < 1e-5
        assert relative_error(model(ids).logits, want) < 1e-5
        with accelerate(model):
            assert relative_error(model(ids).logits, want) < 1e-5


@needs_kernels
def test_the_example_of_the_page(tmp_path, restored, calls):
    (example,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "ways-in.md").read_text(), re.DOTALL)
    model_of("qwen3_5_text").save_pretrained(tmp_path)
    names = {"folder": tmp_path}
    exec(example, names)
    names["model"](tokens())
    assert "delta_product" in calls


@needs_kernels
@pytest.mark.parametrize("bounds", ["cu_seq_lens_q", "seq_idx"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba"])
def test_packed_sequences_by_their_bounds(family, bounds, restored):
    model = model_of(family)
    ids = tokens(batch=1, length=50)
    packing = {
        "cu_seq_lens_q": torch.tensor([0, 20, 50], dtype=torch.int32),
        "seq_idx": (torch.arange(50)[None] >= 20).int(),
    }
    positions = torch.cat([torch.arange(20), torch.arange(30)])[None]
    call = {"position_ids": positions, "use_cache": False, bounds: packing[bounds]}
    with torch.no_grad():
        want = torch.cat([model(part).logits for part in ids.split([20, 30], 1)], 1)
        model.set_use_kernels(True, girih.kernel_config())
        assert relative_error(model(ids, **call).logits, want) < 1e-5


@needs_kernels
def test_a_model_without_linear_layers_is_refused(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    with pytest.raises(ValueError, match="LlamaForCausalLM registers no function that girih serves"):
        with_kernels(model, tmp_path)
    with pytest.raises(ValueError, match="MiniMaxForCausalLM registers no function that girih serves"):
        with_kernels(model_of("minimax"), tmp_path / "minimax")
