"""Defaults and initial values as numbers. Both languages share the code that completes a configuration, so a
comparison of the languages cannot show a mistake in that code."""

import inspect
import json
import math
import re

import girih.nn
import pytest
import torch
from girih import _C, ops
from girih.acceleration import accelerate
from girih.conversion import Injection
from girih.conversion.config import Replacement
from girih.models import GirihConfig, GirihForCausalLM

CONFIGURATION = {
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "mixer": "gsa",
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 64,
    "intermediate_size": 704,
    "num_slots": 64,
    "chunk": 16,
    "chunks": None,
    "n": 2,
    "gated": True,
    "conv_size": None,
    "expand_k": None,
    "expand_v": None,
    "state_size": 128,
    "num_groups": 1,
    "topk": None,
    "slot_decay": False,
    "router_score": "sigmoid",
    "router_mlp": False,
    "router_bias": False,
    "router_noise": False,
    "output_gate": False,
    "phi": "ln_silu",
    "f": "ln_silu",
    "objective": "decode",
    "feature": "softmax",
    "between_chunks": None,
    "allow_neg_eigval": False,
    "normalize": True,
    "shrinkage": 0.0,
    "post_norm": None,
    "shared_qk": False,
    "normalize_kv": True,
    "value_read": "linear",
    "data_dependent_decay": True,
    "window": None,
    "rotary": True,
    "mag_base": "attention",
    "mag_mixer": "delta_product",
    "mag_weight": 0.5,
    "mag_learned": False,
    "mag_cross": False,
    "compressor_hidden_size": None,
    "compressor_layers": None,
    "running_positions": False,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "norm_eps": 1e-6,
    "initializer_range": 0.0625,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.mark.parametrize("language", ["Python", "C++"])
def test_an_empty_configuration(language):
    if language == "Python":
        found = {name: getattr(GirihConfig(), name) for name in GirihConfig().own_fields()}
    else:
        found = json.loads(torch.ops.girih.complete_configuration("{}"))
        found = {name: value for name, value in found.items() if name not in ("architectures", "model_type")}
    assert found == CONFIGURATION
    assert (GirihConfig().use_cache, GirihConfig().loss_in_chunks) == (True, False)


HUGE = 2**31 - 1
BOUNDS = dict.fromkeys(["vocab_size", "window", "max_position_embeddings"], (1, HUGE))
BOUNDS |= dict.fromkeys(
    ["hidden_size", "num_heads", "num_kv_heads", "head_dim", "num_slots", "state_size"], (1, 2**20)
)
BOUNDS |= dict.fromkeys(["num_groups", "topk"], (1, 2**20))
BOUNDS |= {"compressor_hidden_size": (1, 2**20), "intermediate_size": (1, 2**24)}
BOUNDS |= dict.fromkeys(["num_hidden_layers", "compressor_layers", "n"], (1, 4096))
BOUNDS |= {"chunk": (1, 256), "chunks": (1, 256), "conv_size": (0, 4), "mag_weight": (0, 1)}
BOUNDS |= dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"], (-1, HUGE))
BOUNDS |= dict.fromkeys(["expand_k", "expand_v"], (1e-3, 1e3))
BOUNDS |= dict.fromkeys(["shrinkage", "norm_eps", "initializer_range"], (0, 1e30)) | {
    "rope_theta": (1e-6, 1e30)
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_of_every_number(name):
    """The bounds refuse every value outside them. At a bound, only another check may refuse the value."""
    least, most = BOUNDS[name]

    def is_refused_by_bounds(value):
        text = json.dumps({name: [value] if name == "chunks" else value})
        try:
            torch.ops.girih.complete_configuration(text)
        except ValueError as error:
            return bool(re.fullmatch(rf"{name} is \S+; expected \S+ to [-+.\de]+", str(error)))
        return False

    real = isinstance(CONFIGURATION[name], float)
    below = math.nextafter(least, -math.inf) if real else least - 1
    above = math.nextafter(most, math.inf) if real else most + 1
    assert is_refused_by_bounds(below) and is_refused_by_bounds(above)
    assert not is_refused_by_bounds(least) and not is_refused_by_bounds(most)


def test_every_number_is_in_the_table_of_bounds():
    for name in CONFIGURATION.keys() - {"mixer"}:
        with pytest.raises(ValueError, match=f"{name} is .*; expected ") as error:
            torch.ops.girih.complete_configuration(json.dumps({name: "word"}))
        if str(error.value).endswith(("an integer", "a number", "a list of integers")):
            assert name in BOUNDS, name


# Fields that are derived from the given fields.
DERIVED = [
    ({"hidden_size": 64, "num_heads": 2}, {"head_dim": 32, "num_kv_heads": 2, "initializer_range": 0.125}),
    ({"hidden_size": 96}, {"intermediate_size": 256}),  # 8/3 of hidden_size
    ({"hidden_size": 100}, {"intermediate_size": 288}),  # 266.7, rounded up to a multiple of 32
    ({"hidden_size": 384}, {"intermediate_size": 1024}),
    ({"mixer": "cat", "num_hidden_layers": 1}, {"compressor_layers": 1}),
    ({"mixer": "cat", "num_hidden_layers": 7}, {"compressor_layers": 3}),
    # Half of 256, rounded down to a multiple of head_dim.
    ({"mixer": "cat", "head_dim": 48}, {"compressor_hidden_size": 96}),
    ({"mixer": "cat", "head_dim": 200}, {"compressor_hidden_size": 200}),
]


@pytest.mark.parametrize("fields, derived", DERIVED, ids=str)
def test_derived_fields(fields, derived):
    config = GirihConfig(**fields)
    assert {name: getattr(config, name) for name in derived} == derived


NORM = {"norm_eps": 1e-6}
HEADS = {"num_kv_heads": None, "head_dim": None}
CHUNKED = {"num_slots": 64, "head_dim": None, "chunk": 16, "gated": True, "conv_size": 4} | NORM
WIDTHS = HEADS | {"expand_k": 1.0, "expand_v": 1.0}
POSITIONS = HEADS | {"rope_theta": 10000.0}
LAYERS = {
    "Attention": POSITIONS | {"causal": True, "window": None},
    "Block": NORM,
    "ChunkAttention": POSITIONS | {"running_positions": False},
    "CompressAttend": POSITIONS | {"chunk": 16, "running_positions": False},
    "DecayGate": {"largest_step": 0.1},
    "DeltaProduct": WIDTHS
    | NORM
    | {"n": 1, "gated": False, "allow_neg_eigval": False}
    | {"between_chunks": None, "chunk": None, "conv_size": 4},
    "GatedDeltaProduct": {"n": 2, "num_groups": 1, "head_dim": None, "state_size": 128, "conv_size": 4}
    | NORM,
    "GatedInputRMSNorm": {"groups": 1, "eps": 1e-6},
    "GatedLinearAttention": WIDTHS
    | NORM
    | {"gate": "vector", "gate_low_rank": 16, "gate_logit_normalizer": 16.0, "conv_size": 0}
    | {"rotary": False, "rope_theta": 10000.0},
    "GatedRMSNorm": {"eps": 1e-6, "activation": "silu"},
    "GatedSlotAttention": HEADS
    | NORM
    | {"num_slots": 64, "gated": True, "gate_logit_normalizer": 8.0, "feature": "softmax", "conv_size": 0}
    | {"data_dependent_decay": True},
    "HGRN2": {"head_dim": None, "expand_k": 1.0, "expand_v": 1.0, "lower_bound": 0.0} | NORM,
    "Lattice": CHUNKED | {"objective": "decode", "normalize": True, "shrinkage": 0.0, "post_norm": False},
    "Mamba2": {"head_dim": None, "expand_v": 2.0, "state_size": 128, "conv_size": 4} | NORM,
    "MemoryAsGate": {"weight": 0.5, "learned": False, "cross": False},
    "MixAttention": {"weight": 0.5, "learned": False, "cross": False},
    "RMSNorm": {"eps": 1e-6},
    "Raven": WIDTHS
    | NORM
    | {"num_slots": 64, "topk": None, "slot_decay": False, "gate_logit_normalizer": 8.0}
    | {"router_score": "sigmoid", "router_mlp": False, "router_bias": False, "router_noise": False}
    | {"output_gate": False},
    "ShortConv": {"kernel_size": 4, "activation": "silu", "bias": False},
    "TTTLinear": {"head_dim": None, "chunk": 16, "conv_size": 4} | NORM,
    "Trellis": CHUNKED
    | {"phi": "ln_silu", "f": "ln_silu", "shared_qk": False, "normalize_kv": True}
    | {"value_read": "linear", "post_norm": True},
}
NO_TENSORS = {"state": None, "cu_seqlens": None}
FUNCTIONS = {
    girih.nn.mix_weight: {"final": 0.5, "first": 0.01, "steps": 100, "levels": (0.0, 0.5, 1.0)},
    ops.gsa: NO_TENSORS | {"s": None, "g": None, "scale": None, "feature": "softmax"},
    ops.gla: NO_TENSORS | {"g": None, "scale": None},
    ops.delta_product: NO_TENSORS
    | {"g": None, "n": None, "scale": None, "l2norm_qk": False, "chunk": None, "between_chunks": None},
    ops.trellis: {"g": None, "phi": "ln_silu", "f": "ln_silu", "cu_seqlens": None},
    ops.ttt: {"g": None, "phi_weight": None, "phi": "layer_norm", "f": "identity", "cu_seqlens": None},
    ops.lattice: {"g": None, "objective": "decode", "normalize": True, "shrinkage": 0.0, "cu_seqlens": None},
    ops.short_conv: NO_TENSORS | {"bias": None, "activation": None},
    ops.gated_rms_norm: {"gate": None, "activation": "silu", "eps": 1e-6},
    ops.cat_attention: {"scale": None, "cu_chunks": None},
    accelerate: {"model": None},
    Injection: {
        "mixer": "delta_product",
        "layers": None,
        "n": 2,
        "virtual_tokens": "derivative",
        "gate": "k",
        "gate_per": "channel",
        "pool": "past",
        "between_chunks": None,
        "chunk": 64,
        "weight": 0.5,
        "learned": False,
        "cross": False,
        "max_self_attn_length": None,
        "norm_eps": 1e-6,
    },
}
CALLS = {getattr(girih.nn, name): defaults for name, defaults in LAYERS.items()} | FUNCTIONS


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_default_arguments(call):
    parameters = inspect.signature(call).parameters.values()
    assert {p.name: p.default for p in parameters if p.default is not p.empty} == CALLS[call]


def test_every_layer_is_in_the_table():
    with_defaults = {
        name
        for name, kind in vars(girih.nn).items()
        if inspect.isclass(kind)
        and issubclass(kind, torch.nn.Module)
        and any(p.default is not p.empty for p in inspect.signature(kind).parameters.values())
    }
    assert with_defaults == set(LAYERS)
    replacement = Replacement()
    assert (replacement.mixer, replacement.layers, replacement.options) == ("gsa", None, {})


def test_a_bare_call_to_an_operator_takes_the_described_defaults():
    described = {
        (name, option["name"]): option["default"]
        for name, op in ops.describe().items()
        for option in op["options"]
        if option.get("default") is not None
    }
    assert described == {
        ("gsa", "feature"): "softmax",
        ("delta_product", "l2norm_qk"): False,
        ("trellis", "phi"): "ln_silu",
        ("trellis", "f"): "ln_silu",
        ("ttt", "phi"): "layer_norm",
        ("ttt", "f"): "identity",
        ("lattice", "objective"): "decode",
        ("lattice", "normalize"): True,
        ("lattice", "shrinkage"): 0.0,
        ("gated_rms_norm", "activation"): "silu",
        ("gated_rms_norm", "eps"): 1e-6,
    }


# ---- first values ------------------------------------------------------------------------------------------

MANY_HEADS = 512  # enough samples to reach both ends of a range


def parameters_of(language, **fields):
    """Parameters and buffers of a new model by name, without the prefix of the layer."""
    fields = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_heads": 2} | fields
    torch.manual_seed(0)
    config = GirihConfig(**fields)
    if language == "Python":
        model = GirihForCausalLM(config)
        found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    else:
        model = _C.LanguageModel(config.to_json_string(use_diff=False))
        found = {**model.named_parameters(), **model.named_buffers()}
    return {name.removeprefix("model.layers.0.mixer."): x.detach().double() for name, x in found.items()}


def check_uniform(x, least, most):
    """Checks a uniform distribution: the ends are reached within 1 %, the mean is in the middle."""
    width = most - least
    assert least - 1e-6 * width <= x.min() <= least + 0.01 * width
    assert most - 0.01 * width <= x.max() <= most + 1e-6 * width
    assert abs(x.mean() - (least + most) / 2) < 4 * width / math.sqrt(12 * x.numel())


def check_normal(x, deviation):
    """Checks a mean of 0 and this deviation, each within four standard errors."""
    assert abs(x.mean()) < 4 * deviation / math.sqrt(x.numel())
    assert abs(x.std() / deviation - 1) < 4 / math.sqrt(2 * x.numel())


@pytest.fixture(params=["Python", "C++"])
def language(request):
    return request.param


@pytest.mark.parametrize("mixer, largest", [("gated_deltanet", 0.01), ("trellis", 1e-4), ("lattice", 0.01)])
def test_decays_start_with_rates_of_1_to_16_and_steps_of_two_decades(language, mixer, largest):
    sizes = {"num_heads": MANY_HEADS, "head_dim": 2, "conv_size": 0}
    sizes |= {"num_slots": 1, "chunk": 1} if mixer in ("trellis", "lattice") else {}
    found = parameters_of(language, mixer=mixer, **sizes)
    check_uniform(found["decay.A_log"], 0.0, math.log(16))
    check_uniform(found["decay.dt_bias"], math.log(largest / 100), math.log(largest))


@pytest.mark.parametrize(
    "mixer, sizes", [("gated_delta_product", {"state_size": 2}), ("raven", {"num_slots": 1})]
)
def test_layers_of_public_code_start_with_its_rates_and_steps(language, mixer, sizes):
    """Those of Megatron-LM and of flash-linear-attention."""
    options = {"router_mlp": True, "router_bias": True} if mixer == "raven" else {}
    found = parameters_of(language, mixer=mixer, num_heads=2 * MANY_HEADS, head_dim=2, **sizes, **options)
    check_uniform(found["A_log"].exp(), 1e-4, 16.0)
    steps = torch.nn.functional.softplus(found["dt_bias"])
    check_uniform(steps.log(), math.log(1e-3), math.log(1e-1))
    assert not any(found[name].any() for name in ("r_bias", "r_proj.0.bias") if name in found)


def test_mamba2_starts_with_the_rates_and_steps_of_its_paper(language):
    found = parameters_of(language, mixer="mamba2", num_heads=MANY_HEADS, head_dim=2, state_size=2)
    check_uniform(found["A_log"].exp(), 1.0, 16.0)
    steps = torch.nn.functional.softplus(found["dt_bias"])
    check_uniform(steps.log(), math.log(1e-3), math.log(1e-1))
    assert found["skip"].eq(1).all() and found["conv.bias"].eq(0).all()


def test_a_decay_gate_starts_as_its_docstring_says():
    for largest in (0.1, 1e-3):
        torch.manual_seed(0)
        gate = girih.nn.DecayGate(8, MANY_HEADS, largest)
        check_uniform(gate.A_log.double(), 0.0, math.log(16))
        step = torch.nn.functional.softplus(gate.dt_bias.double())
        assert largest / 100 * 0.99 < step.min() < largest / 100 * 1.1
        assert largest / 1.1 < step.max() < largest * 1.01


@pytest.mark.parametrize("mixer", ["trellis", "ttt", "lattice"])
@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
def test_steps_start_with_a_sum_of_a_quarter_over_16_tokens_or_a_chunk(language, mixer, chunk):
    sizes = {} if mixer == "ttt" else {"num_slots": 4}
    bias = parameters_of(language, mixer=mixer, chunk=chunk, **sizes)["gamma_proj.bias"]
    torch.testing.assert_close(bias.sigmoid(), torch.full_like(bias, 1 / (4 * max(chunk, 16))))


@pytest.mark.parametrize("slots", [1, 9])
def test_slots_without_a_gate_start_with_time_constants_of_4_to_4096_tokens(language, slots):
    found = parameters_of(language, mixer="gsa", data_dependent_decay=False, num_slots=slots)["decay_logits"]
    tokens = -8 / torch.nn.functional.logsigmoid(found)
    want = torch.tensor([4.0 * 1024 ** (m / 8) for m in range(slots)]).double()
    torch.testing.assert_close(tokens, want.expand(2, -1), rtol=1e-3, atol=0)


def test_filters_start_uniform_within_the_root_of_their_width(language):
    for width in (2, 4):
        found = parameters_of(language, mixer="deltanet", hidden_size=256, conv_size=width)
        check_uniform(found["conv.weight"], -(width**-0.5), width**-0.5)


def test_memories_start_with_size_1_and_lattices_orthonormal(language):
    trellis = parameters_of(language, mixer="trellis", hidden_size=64, num_slots=32)
    check_normal(trellis["key_memory"], 1.0)
    check_normal(trellis["value_memory"], 1.0)
    ttt = parameters_of(language, mixer="ttt", hidden_size=64)
    check_normal(ttt["memory"], 1.0)
    assert ttt["inner_weight"].eq(1).all() and not ttt["inner_bias"].any()
    memory = parameters_of(language, mixer="lattice", hidden_size=32, num_slots=8)["memory"]
    torch.testing.assert_close(memory.mT @ memory, torch.eye(8).double().expand(2, 8, 8), atol=1e-5, rtol=0)


def test_mixtures_start_at_their_weight(language):
    for weight in (0.5, 0.2):
        found = parameters_of(language, mixer="mag", mag_weight=weight)
        assert found["weight"].item() == pytest.approx(weight)
        found = parameters_of(language, mixer="mag", mag_weight=weight, mag_learned=True)
        assert found["logit"].sigmoid().item() == pytest.approx(weight)


def test_headers_start_as_large_as_the_rows_beside_them(language):
    """The header of a layer has size 1, like its normed inputs. The header of a model has the size of the
    embeddings."""
    layer = parameters_of(language, mixer=["cat"], hidden_size=512)
    check_normal(layer["header"], 1.0)
    model = parameters_of(language, mixer="cat", hidden_size=512, initializer_range=0.3)
    check_normal(model["model.header"], 0.3)
    check_normal(model["model.compressor.position.weight"], 0.3)


def test_all_else_starts_with_the_configurations_deviation_or_with_0_or_1(language):
    for mixer in ("mamba2", "gla"):
        found = parameters_of(language, mixer=mixer, hidden_size=64, initializer_range=0.3)
        for name, x in found.items():
            if "norm" in name or name == "skip":
                assert x.eq(1).all(), name
            elif name in ("decay.1.bias", "conv.bias"):
                assert x.eq(0).all()
            elif x.dim() > 1 and "conv" not in name:
                check_normal(x, 0.3)


def test_keys_and_values_have_the_widths_of_their_papers(language):
    widths = {"gla": (32, 64), "gated_deltanet": (64, 128), "retnet": (64, 128)}
    widths |= dict.fromkeys(["linear_attention", "deltanet", "delta_product"], (64, 64))
    for mixer, (keys, values) in widths.items():
        options = {"n": 1} if mixer == "delta_product" else {}
        found = parameters_of(language, mixer=mixer, head_dim=64, **options)
        assert found["norm.weight"].shape == (values,), mixer
        assert found["qkv_proj.weight"].shape[0] == 2 * (2 * keys + values), mixer


def test_gla_has_a_gate_of_rank_16_and_mixers_the_convolutions_of_their_papers(language):
    assert parameters_of(language, mixer="gla", hidden_size=64)["decay.0.weight"].shape == (16, 64)
    widths = dict.fromkeys(["mamba2", "deltanet", "gated_deltanet", "delta_product"], 4)
    widths |= dict.fromkeys(["gsa", "abc", "gla", "retnet", "linear_attention"], 0)
    for mixer, width in widths.items():
        conv = parameters_of(language, mixer=mixer).get("conv.weight")
        assert (0 if conv is None else conv.shape[1]) == width, mixer
