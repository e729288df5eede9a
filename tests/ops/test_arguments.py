"""A wrong argument raises one ValueError that names the argument, on every device and on meta."""

import re

import pytest
import torch
from cases import CASES, PACKED, RECURRENT, SIZES, arguments, operator, start, state_of
from comparison import assert_within
from girih import ops

CASES_BY_NAME = {str(case): case for case in CASES}


def message(case, keywords):
    """The message of the ValueError."""
    with pytest.raises(ValueError) as error:
        getattr(ops, case.op)(**keywords)
    return str(error.value)


def move_to(x, device):
    """Moves an argument to another device; a state is moved tensor by tensor."""
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, tuple):
        parts = [move_to(part, device) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def refuse(case, keywords, *words, device="cpu"):
    text = message(case, {name: move_to(x, device) for name, x in keywords.items()})
    assert text.startswith(f"girih.{case.op}: ")
    for word in words:
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text), f"{word!r} is not in: {text}"
    on_meta = message(case, {name: move_to(x, "meta") for name, x in keywords.items()})
    assert on_meta == text.replace(f"{device}:0", "meta").replace(device, "meta")


def draw(case, T=4, **how):
    return arguments(case.draw(T, dtype=torch.float32, **how))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tensors_of_a_wrong_shape_or_dtype(case, device):
    names = list(case.data)
    for name in names:
        keywords = draw(case)
        x = keywords[name]
        refuse(case, keywords | {name: x[..., None]}, name, str(list(x[..., None].shape)), device=device)
        refuse(case, keywords | {name: x.int()}, name, "Int", device=device)
        if name != names[0] and case.token_rows(name):
            short = x[:, 1:]
            refuse(case, keywords | {name: short}, name, str(short.shape[1]), device=device)


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_states_of_a_wrong_shape_or_dtype(case, device):
    keywords = draw(case, resumed=True)
    state = keywords["state"]
    for name in state._fields:
        x = getattr(state, name)
        if x is None:
            continue
        for wrong in (torch.cat([x, x]), x.to(torch.float16)):
            refuse(
                case, keywords | {"state": state._replace(**{name: wrong})}, f"state_{name}", device=device
            )


INVALID_OPTIONS = [
    ("gsa-s_g", {"s": None, "g": None}, ["s", "g", "None"]),
    ("gsa-g", {"feature": "tanh"}, ["feature", "tanh", "softmax", "none", "silu", "relu", "relu2"]),
    ("delta_product-n2", {"n": 0}, ["n", "0"]),
    ("delta_product-n2", {"n": 3}, ["k", "n"]),
    ("delta_product-plain", {"chunk": 16}, ["chunk", "between_chunks"]),
    ("delta_product-gelu", {"chunk": None}, ["chunk", "between_chunks"]),
    ("delta_product-gelu", {"between_chunks": "relu"}, ["between_chunks", "relu", "gelu", "tanh"]),
    ("delta_product-gelu", {"chunk": 0}, ["chunk", "0", "1", "64"]),
    ("delta_product-gelu", {"chunk": 65}, ["chunk", "65", "1", "64"]),
    ("delta_product-plain", {"beta": torch.rand(2, 4, 2, 3)}, ["beta", "D", "V"]),  # V is 4
    ("trellis-default", {"chunk": 0}, ["chunk", "0", "1", "64"]),
    ("trellis-default", {"chunk": 65}, ["chunk", "65", "1", "64"]),
    ("trellis-default", {"phi": "gelu"}, ["phi", "gelu", "identity", "ln_silu", "softmax"]),
    ("trellis-default", {"f": "gelu"}, ["f", "gelu", "identity", "ln_silu", "softmax"]),
    ("trellis-default", {"state": None}, ["state", "None"]),
    ("lattice-decode_c4_g", {"chunk": 0}, ["chunk", "0", "1", "64"]),
    ("lattice-decode_c4_g", {"chunk": 65}, ["chunk", "65", "1", "64"]),
    ("lattice-decode_c4_g", {"objective": "both"}, ["objective", "both", "decode", "encode", "similarity"]),
    ("lattice-decode_c4_g", {"normalize": False}, ["normalize", "chunk", "1"]),
    ("lattice-decode_c4_g", {"shrinkage": 0.1}, ["shrinkage", "chunk", "1"]),
    ("lattice-decode_c1", {"shrinkage": -0.1}, ["shrinkage", "-0.1"]),
    ("lattice-decode_c1", {"state": None}, ["state", "None"]),
    ("short_conv-w4", {"activation": "relu"}, ["activation", "relu", "silu"]),
    ("gated_rms_norm-silu", {"activation": "tanh"}, ["activation", "tanh", "silu", "gelu", "sigmoid"]),
    ("gated_rms_norm-silu", {"gate": torch.rand(2, 4, 1)}, ["gate", "[2, 4, 1]", "[2, 4, 6]"]),
    ("gated_rms_norm-no_gate", {"x": torch.rand(2, 0), "weight": torch.rand(0)}, ["dim", "0", "1"]),
    ("cat_attention-c4", {"chunk": 1}, ["chunk", "1", "2", "256"]),
    ("cat_attention-c4", {"chunk": 257}, ["chunk", "257", "2", "256"]),
]


@pytest.mark.parametrize(
    "name, change, words", INVALID_OPTIONS, ids=[f"{r[0]}-{'-'.join(r[1])}" for r in INVALID_OPTIONS]
)
def test_options_out_of_range(name, change, words, device):
    case = CASES_BY_NAME[name]
    refuse(case, draw(case) | change, *words, device=device)


@pytest.mark.parametrize("case", [c for c in CASES if "q" in c.data], ids=str)
def test_query_heads_must_be_a_multiple_of_heads(case, device):
    refuse(case, draw(case, H=2, Q=3), "q", "3", "multiple", "2", device=device)
    refuse(case, draw(case, H=2, Q=0), "q", "0", "at least 1", device=device)


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_invalid_bounds_of_packed_sequences(case, device):
    name = case.packing
    bounds = torch.tensor([0, 4])
    refuse(case, draw(case, B=2) | {name: bounds}, name, "B", device=device)
    one = draw(case, B=1)
    refuse(case, one | {name: bounds.float()}, name, "Float", "int32", "int64", device=device)
    refuse(case, one | {name: bounds[None, None]}, name, "[1, 1, 2]", "[N + 1]", device=device)
    refuse(case, one | {name: bounds[:0]}, name, "[0]", "[N + 1]", device=device)
    row = "[B, 2]" if case.has_state else "[N + 1]"
    refuse(case, draw(case, B=2) | {name: bounds[None]}, name, "[1, 2]", row, device=device)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_tensor_on_another_device(case):
    name = list(case.data)[1]
    keywords = draw(case)
    text = message(case, keywords | {name: keywords[name].to("meta")})
    assert f"{name} is on meta" in text


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_a_step_requires_one_token(case, device):
    keywords = {name: move_to(x, device) for name, x in draw(case, T=2, resumed=True).items()}
    with pytest.raises(ValueError, match="T = 1"):
        getattr(ops, f"{case.op}_step")(**keywords)


def test_z_is_required_for_abc_and_refused_for_gated_states(device):
    abc, gated = (draw(CASES_BY_NAME[name], resumed=True) for name in ("gsa-abc", "gsa-g"))
    refuse(
        CASES_BY_NAME["gsa-abc"],
        abc | {"state": abc["state"]._replace(z=None)},
        "state_z",
        "None",
        device=device,
    )
    z = torch.zeros(2, SIZES["H"], SIZES["M"])
    refuse(
        CASES_BY_NAME["gsa-g"], gated | {"state": gated["state"]._replace(z=z)}, "state_z", "g", device=device
    )


@pytest.mark.parametrize("name", ["delta_product-n2", "delta_product-n3_vector", "delta_product-plain"])
def test_n_defaults_to_the_ratio_of_rows_to_tokens(name, device):
    for T in (0, 1, 5):
        inputs = CASES_BY_NAME[name].draw(T, device=device)
        assert_within(operator(inputs, n=None), operator(inputs), 0.0)


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_start_equals_the_state_after_zero_tokens(case, device):
    """`XState.start(...)` equals the state after zero tokens."""
    inputs = case.draw(6, dtype=torch.float32, device=device)
    state = {name: x for name, x in operator(inputs.part(0, 0)).items() if name != "o"}
    started = start(inputs)
    for name, x in state.items():
        assert_within({name: getattr(started, name)}, {name: x}, 0.0)
        assert getattr(started, name).dtype == x.dtype
    assert type(started) is type(state_of(case, state))
