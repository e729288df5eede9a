"""Parameters excluded from weight decay (memories, time scales, biases, norms) and parameters kept in fp32
(memories, time scales). Both are chosen by name, so replacing a parameter keeps the choice."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from girih import distributed
from girih.models import GirihForCausalLM
from girih.nn import MixAttention, Trellis, decay_parameter_names
from small_models import config_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

MIXERS = ["mamba2", "gla", "gated_deltanet", "trellis", "ttt", "lattice", "mag", "cat", "gsa"]
UNDECAYED = {  # by the last part of the name
    *("A_log", "dt_bias", "skip", "logit", "header", "key_memory", "value_memory", "memory", "bias"),
    *("decay_logits", "inner_weight", "inner_bias"),
    *("norm.weight", "mixer_norm.weight", "mlp_norm.weight"),
}
FP32 = {"A_log", "dt_bias", "logit", "key_memory", "value_memory", "memory", "bias", "decay_logits"}
LOW = [torch.bfloat16, torch.float16]


def small(mixer=MIXERS, **options):
    layers = {"num_hidden_layers": len(mixer)} if isinstance(mixer, list) else {"num_hidden_layers": 2}
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_heads": 2, "num_slots": 8, "chunk": 4}
    more = {"mag_learned": True, "max_position_embeddings": 64}
    return config_of(mixer=mixer, **(sizes | layers | more | options))


def ends_in(name, words):
    return any(name == word or name.endswith("." + word) for word in words)


def is_fp32(name):
    """True if the parameter stays in fp32. The bias of a convolution does not."""
    return ends_in(name, FP32) and not name.endswith("conv.bias")


def undecayed_names(model):
    return {name for name, _ in model.named_parameters()} - set(decay_parameter_names(model))


@pytest.fixture(scope="module", params=["hybrid", "cat", "no gate"])
def model(request):
    torch.manual_seed(0)
    configs = {
        "hybrid": small,
        "cat": lambda: small("cat"),
        "no gate": lambda: small("gsa", data_dependent_decay=False),
    }
    return GirihForCausalLM(configs[request.param]())


@pytest.fixture(scope="module")
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_memories_time_scales_biases_and_norms_do_not_decay(model):
    expected = {name for name, _ in model.named_parameters() if ends_in(name, UNDECAYED)}
    assert undecayed_names(model) == expected
    assert {name.rsplit(".", 1)[-1] for name in expected} >= (
        {"header"}
        if model.config.mixer == "cat"
        else {"decay_logits"}
        if model.config.mixer == "gsa"
        else FP32 - {"decay_logits"}
    )


def replace_parameters(model, way, folder, mesh):
    """The model after an operation that replaces its parameters."""
    if way == "from_pretrained":
        model.save_pretrained(folder)
        return GirihForCausalLM.from_pretrained(folder)
    model = deepcopy(model)
    if way == "assign":
        model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)
    elif way == "fully_shard":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif way == "bf16":
        model.to(torch.bfloat16)
    return model


@pytest.mark.parametrize("way", ["deepcopy", "assign", "from_pretrained", "fully_shard", "bf16"])
def test_replaced_parameters_stay_undecayed(model, way, tmp_path, one_process):
    assert undecayed_names(replace_parameters(model, way, tmp_path, one_process)) == undecayed_names(model)


def low_hybrid():
    torch.manual_seed(0)
    return GirihForCausalLM(small()).bfloat16()


def test_fully_shard_error_names_girih_shard(one_process):
    model = fully_shard(low_hybrid(), mesh=one_process)
    with pytest.raises(AssertionError, match="uniform original parameter dtype") as error:
        model(torch.randint(32, (2, 9)))
    assert any("girih.distributed.shard(model" in note for note in error.value.__notes__)


def test_shard_gives_fp32_parameters_groups_of_their_own(one_process):
    """Every block of a bf16 model is sharded. Names, loss and gradients equal those of the model alone."""
    alone, ids = low_hybrid(), torch.randint(32, (2, 9))
    model = distributed.shard(deepcopy(alone), mesh=one_process)
    assert all(isinstance(block, FSDPModule) for block in model.model.layers)
    assert model.state_dict().keys() == alone.state_dict().keys()
    losses = [m(ids, labels=ids).loss for m in (model, alone)]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=2e-3)
    for loss in losses:
        loss.backward()
    for name, p in model.named_parameters():
        want = alone.get_parameter(name)
        assert isinstance(p, DTensor) and p.dtype == want.dtype and p.grad.dtype == want.dtype, name
        difference = p.grad.full_tensor().float() - want.grad.float()
        assert difference.norm() <= 0.02 * want.grad.float().norm(), name


def test_a_layer_with_fp32_parameters_of_its_own_is_refused_by_shard(one_process):
    layer = Trellis(16, 2, num_slots=4).bfloat16()
    with pytest.raises(
        ValueError, match=r"model is a Trellis with the fp32 parameters key_memory, value_mem"
    ):
        distributed.shard(layer, mesh=one_process)
    assert distributed.shard(nn.Sequential(layer), mesh=one_process)[0] is layer


def test_fp32_parameters_alone_are_one_group(one_process):
    model = distributed.shard(GirihForCausalLM(small()), mesh=one_process)
    assert not isinstance(model.model.layers[0].mixer, FSDPModule)


def test_compiled_model_names_have_a_prefix():
    model = GirihForCausalLM(small(["trellis"]))
    assert {
        name.removeprefix("_orig_mod.") for name in undecayed_names(torch.compile(model))
    } == undecayed_names(model)


def test_trainer_decays_only_decay_parameters(model, tmp_path):
    class DecayTrainer(Trainer):
        get_decay_parameter_names = staticmethod(decay_parameter_names)

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, weight_decay=0.1, report_to="none")
    groups = DecayTrainer(model=model, args=arguments).create_optimizer().param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    found = {group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in groups}
    assert found == {0.1: set(decay_parameter_names(model)), 0.0: undecayed_names(model)}


CONVERT = {
    "to": lambda model, dtype: model.to(dtype),
    "half or bfloat16": lambda model, dtype: model.half() if dtype == torch.float16 else model.bfloat16(),
    "device and dtype": lambda model, dtype: model.to("cpu", dtype),
}


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("way", [*CONVERT, "from_pretrained", "from_config"])
def test_time_scales_and_memories_stay_in_fp32(model, way, dtype, tmp_path):
    if way == "from_pretrained":
        model.save_pretrained(tmp_path)
        low = GirihForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    elif way == "from_config":
        low = GirihForCausalLM._from_config(model.config, dtype=dtype)
    else:
        low = CONVERT[way](deepcopy(model), dtype)
    for name, p in low.named_parameters():
        stays_fp32 = is_fp32(name)
        assert p.dtype == (torch.float32 if stays_fp32 else dtype), name
        if stays_fp32 and way != "from_config":
            assert p.equal(model.get_parameter(name)), name


def test_gradients_and_buffers_stay_in_fp32():
    layer = MixAttention(Trellis(16, 2, num_slots=4), Trellis(16, 2, num_slots=4), weight=0.3)
    layer(torch.randn(1, 5, 16))[0].sum().backward()
    memory = layer.base.key_memory.grad.clone()
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == torch.float32 and layer.weight.item() == pytest.approx(0.3, abs=1e-7)
    assert layer.base.key_memory.grad.equal(memory)
    assert layer.base.q_proj.weight.grad.dtype == torch.bfloat16


def test_conversion_to_double_and_to_meta(model):
    moved = deepcopy(model).double()
    assert {p.dtype for p in moved.parameters()} == {torch.float64}
    low = deepcopy(model).to("meta", torch.bfloat16)
    assert {p.device.type for p in low.parameters()} == {"meta"}
    assert {p.dtype for name, p in low.named_parameters() if is_fp32(name)} <= {torch.float32}


@pytest.mark.parametrize("mixer", ["trellis", "ttt", "lattice", "gla", "mamba2", "gated_deltanet", "mag"])
def test_a_model_in_bf16_trains_and_generates(mixer, tmp_path):
    torch.manual_seed(0)
    model = GirihForCausalLM(small(mixer)).bfloat16()
    ids = torch.randint(32, (2, 9))
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == p.dtype for p in model.parameters())
    model.save_pretrained(tmp_path)
    again = GirihForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    assert [p.dtype for p in again.parameters()] == [p.dtype for p in model.parameters()]
    model.eval().zero_grad()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert again.generate(ids, **options).equal(model.generate(ids, **options))


def test_the_time_scales_of_a_gate_are_not_rounded():
    """bf16 cannot represent this bias; rounding to bf16 would give a relative error of 2^-9."""
    layer = Trellis(16, 2, num_slots=4).bfloat16()
    with torch.no_grad():
        layer.gamma_proj.bias.fill_(-6.1234567)
        layer.gamma_proj.weight.zero_()
    out = layer.gamma_proj(torch.randn(1, 3, 16, dtype=torch.bfloat16))
    assert out.dtype == torch.float32 and out.eq(torch.tensor(-6.1234567)).all()
