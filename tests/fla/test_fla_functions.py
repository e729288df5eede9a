"""The functions of girih.fla compute fla's recurrences: outputs, states and gradients, for all options."""

import subprocess
import sys

import fla_references
import pytest
import torch
from comparison import assert_within
from fla_references import REFERENCES, B, D, H, K, M, T, V, W, draw
from girih import fla

STATELESS = ("parallel_simple_gla", "rms_norm_gated")


def vector(size, seed=9):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Function, sizes of the inputs, changed arguments; None removes a tensor.
OPTIONS = [
    ("chunk_gsa", {}, {}),
    ("chunk_gsa", {"HQ": 4}, {}),
    ("chunk_gsa", {}, {"scale": 0.3, "checkpoint_level": 0, "chunk_size": 32}),
    ("chunk_gsa", {}, {"g": None}),
    ("fused_recurrent_gsa", {}, {}),
    ("fused_recurrent_gsa", {"HQ": 4}, {"g": None, "scale": 0.3}),
    ("chunk_gla", {}, {}),
    ("chunk_gla", {}, {"scale": 0.3, "state_v_first": True}),
    ("fused_recurrent_gla", {}, {}),
    ("fused_recurrent_gla", {}, {"gk": None, "state_v_first": True}),
    ("chunk_simple_gla", {}, {}),
    ("chunk_simple_gla", {}, {"g": None, "scale": 1.0}),
    ("chunk_simple_gla", {}, {"g": None, "g_gamma": -vector(H).exp()}),
    ("chunk_simple_gla", {}, {"state_v_first": True, "chunk_size": 32}),
    ("fused_recurrent_simple_gla", {}, {}),
    ("fused_recurrent_simple_gla", {}, {"g": None, "g_gamma": -vector(H).exp(), "state_v_first": True}),
    ("fused_chunk_simple_gla", {}, {"scale": 0.3}),
    ("fused_chunk_simple_gla", {}, {"g": None, "g_gamma": -vector(H).exp()}),
    ("parallel_simple_gla", {}, {}),
    ("chunk_delta_rule", {}, {}),
    ("chunk_delta_rule", {}, {"use_qk_l2norm_in_kernel": True, "scale": 0.3, "chunk_size": 16}),
    ("fused_recurrent_delta_rule", {}, {}),
    ("fused_recurrent_delta_rule", {}, {"beta": None, "use_qk_l2norm_in_kernel": True}),
    ("chunk_gated_delta_rule", {}, {}),
    ("chunk_gated_delta_rule", {"HV": 4}, {"scale": 0.3, "state_v_first": True}),
    ("chunk_gated_delta_rule", {}, {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}),
    ("chunk_gated_delta_rule", {}, {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}),
    ("chunk_gated_delta_rule", {}, {"use_gate_in_kernel": True, "A_log": vector(H), "dt_bias": vector(H, 8)}),
    ("chunk_gated_delta_rule", {"HV": 4}, {"use_gate_in_kernel": True, "A_log": vector(4), "chunk_size": 32}),
    ("chunk_gdn", {}, {}),
    ("fused_recurrent_gated_delta_rule", {}, {}),
    ("fused_recurrent_gated_delta_rule", {"HV": 4}, {"beta": None, "g": None}),
    (
        "fused_recurrent_gated_delta_rule",
        {"HV": 4},
        {
            "use_gate_in_kernel": True,
            "A_log": vector(4),
            "dt_bias": vector(4, 8),
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": True,
            "use_qk_l2norm_in_kernel": True,
            "state_v_first": True,
        },
    ),
    ("fused_recurrent_gdn", {}, {"scale": 0.3}),
    ("chunk_gated_delta_product", {"n": 1}, {}),
    ("chunk_gated_delta_product", {"n": 3}, {"use_qk_l2norm_in_kernel": True, "scale": 0.3}),
    ("chunk_gated_delta_product", {"n": 2}, {"g": None}),
    ("causal_conv1d", {}, {}),
    ("causal_conv1d", {}, {"activation": "silu", "bias": vector(D), "backend": "cuda"}),
    ("causal_conv1d", {"heads": 2}, {"activation": "swish"}),
    ("causal_conv1d", {}, {"weight": vector(D)[:, None], "activation": "silu", "backend": "mix"}),
    ("rms_norm_gated", {}, {}),
    ("rms_norm_gated", {}, {"activation": "silu", "eps": 0.1}),
    ("rms_norm_gated", {}, {"activation": "sigmoid", "weight": None}),
]


def label(option, packed, resumed):
    function, sizes, changes = option
    how = ["packed"] * packed + ["resumed"] * resumed
    return "-".join([function, *(f"{name}{size}" for name, size in sizes.items()), *changes, *how])


def arguments(function, sizes, changes, **how):
    """The arguments of a call, drawn and changed; an initial state has the layout of the options."""
    found = draw(function, **how, **sizes) | changes
    device, dtype = how.get("device", "cpu"), how.get("dtype", torch.float64)
    for name, x in changes.items():
        if isinstance(x, torch.Tensor):
            found[name] = x.to(device, dtype).requires_grad_(name != "g_gamma")
    state = found.get("initial_state")
    if isinstance(state, torch.Tensor) and found.get("state_v_first"):
        found["initial_state"] = state.detach().mT.contiguous().requires_grad_()
    if function == "causal_conv1d" and state is not None:
        taps = found["weight"].shape[1]
        found["initial_state"] = state.detach()[..., :taps].clone().requires_grad_()
    return found


def flat(x):
    return [part for y in x for part in flat(y)] if isinstance(x, tuple | list) else [x]


def is_leaf(x):
    return isinstance(x, torch.Tensor) and x.requires_grad


def leaves(found):
    return {f"{name}{i}": x for name, y in found.items() for i, x in enumerate(flat(y)) if is_leaf(x)}


def outputs(result):
    tensors = [x for x in flat(result) if isinstance(x, torch.Tensor)]
    return {str(i): x for i, x in enumerate(tensors)}


def precision(device):
    if device == "cuda":
        return torch.float32, 1e-4, 1e-3
    return torch.float64, 1e-9, 1e-7


def gradients(outs, inputs, seed=1):
    generator = torch.Generator().manual_seed(seed)
    cotangents = {
        name: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for name, x in outs.items()
    }
    found = torch.autograd.grad(
        list(outs.values()),
        list(inputs.values()),
        list(cotangents.values()),
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(inputs, found, strict=True))


CALLS = [
    pytest.param(*option, packed, resumed, id=label(option, packed, resumed))
    for option in OPTIONS
    for packed in (False, True)
    for resumed in (False, True)
    if not (resumed and option[0] in STATELESS) and not (packed and option[0] == "rms_norm_gated")
]


@pytest.mark.parametrize("function, sizes, changes, packed, resumed", CALLS)
def test_outputs_states_and_gradients(function, sizes, changes, packed, resumed, device):
    dtype, tolerance, grad_tolerance = precision(device)
    how = {"packed": packed, "resumed": resumed}
    found = arguments(function, sizes, changes, **how, dtype=dtype, device=str(device))
    exact = arguments(function, sizes, changes, **how)
    asked = {} if function in STATELESS else {"output_final_state": True}
    got, want = outputs(getattr(fla, function)(**found, **asked)), REFERENCES[function](**exact)
    want = outputs(want[0] if function in STATELESS else want)
    assert_within(got, want, tolerance)
    assert_within(gradients(got, leaves(found)), gradients(want, leaves(exact)), grad_tolerance)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_residual_is_added_after_the_activation(packed):
    found = draw("causal_conv1d", packed=packed) | {"activation": "silu"}
    residual = torch.randn_like(found["x"])
    y, state = fla.causal_conv1d(**found, residual=residual)
    assert state is None
    assert_within(y, fla_references.causal_conv1d(**found, residual=residual)[0], 1e-9)


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("shape", [(3, D), (3, 1, D), (1, 3, D)], ids=str)
def test_conv_update_is_one_token_of_the_convolution(shape, taps):
    cache, weight, bias = torch.randn(3, D, taps), torch.randn(D, taps), torch.randn(D)
    x, residual = torch.randn(2, *shape), torch.randn(2, *shape)
    options = {"weight": weight, "bias": bias, "activation": "silu"}
    row = {name: y.reshape(2, 3, D).transpose(0, 1) for name, y in (("x", x), ("residual", residual))}
    want, state = fla.causal_conv1d(**row, **options, initial_state=cache.clone(), output_final_state=True)
    for t in range(2):
        y, same = fla.causal_conv1d_update(x[t], cache, residual[t], **options)
        assert same is cache and y.shape == shape
        assert_within(y.reshape(3, D), want[:, t], 1e-5)
    assert torch.equal(cache, state)


@pytest.mark.parametrize("function", [name for name in REFERENCES if name not in STATELESS])
def test_no_state_is_returned_unless_asked(function):
    result = getattr(fla, function)(**draw(function, n=1))
    assert result[1] == [None, None] if "gsa" in function else result[1] is None
    assert isinstance(result, tuple) and len(result) == 2


@pytest.mark.parametrize("function", [name for name in REFERENCES if name not in STATELESS])
def test_dtypes_are_fla_s_under_autocast_too(function):
    """o has q's dtype, states are fp32 (those of a convolution x's); autocast changes neither."""
    for dtype in (torch.bfloat16, torch.float32):
        found = draw(function, resumed=True, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16):
            o, state = getattr(fla, function)(**found, output_final_state=True)
        assert o.dtype == dtype
        assert {x.dtype for x in flat(state)} == {dtype if "conv" in function else torch.float32}


def test_the_deprecated_name_of_state_v_first():
    for function in ("fused_recurrent_gla", "fused_recurrent_simple_gla", "chunk_gated_delta_rule"):
        found = draw(function) | {"output_final_state": True}
        with pytest.warns(DeprecationWarning, match="state_v_first"):
            _, state = getattr(fla, function)(**found, transpose_state_layout=True)
        assert torch.equal(state, getattr(fla, function)(**found, state_v_first=True)[1])
        with pytest.raises(ValueError, match="transpose_state_layout"):
            getattr(fla, function)(**found, transpose_state_layout=True, state_v_first=True)


REFUSED = [
    ("chunk_gsa", {"checkpoint_level": 3}),
    ("chunk_gsa", {"initial_state": (torch.zeros(1), torch.zeros(1))}),
    ("chunk_gsa", {"initial_state": (torch.zeros(B, H, K, M),)}),
    (
        "chunk_gsa",
        {"initial_state": (torch.zeros(B, H, K, M), torch.zeros(B, H, M, V)), "k": torch.zeros(T, H, K)},
    ),
    ("fused_recurrent_gsa", {"reverse": True}),
    ("chunk_gla", {"g": torch.zeros(B, T, H)}),
    ("chunk_gla", {"initial_state": torch.zeros(B, H, V, K)}),
    ("fused_recurrent_gla", {"gv": torch.zeros(B, T, H, V)}),
    ("fused_recurrent_gla", {"reverse": True}),
    ("chunk_simple_gla", {"g": torch.zeros(B, T, H, K)}),
    ("chunk_simple_gla", {"g_gamma": torch.zeros(H)}),
    ("chunk_simple_gla", {"g": None, "g_gamma": torch.zeros(H, requires_grad=True)}),
    ("fused_recurrent_simple_gla", {"reverse": True}),
    ("parallel_simple_gla", {"output_attentions": True}),
    ("chunk_delta_rule", {"beta": torch.rand(B, T, H, V)}),
    ("chunk_delta_rule", {"chunk_size": 128}),
    ("fused_recurrent_delta_rule", {"beta": torch.rand(B, T, H, V)}),
    ("chunk_gated_delta_rule", {"g": torch.zeros(B, T, H, K)}),
    ("chunk_gated_delta_rule", {"cp_context": object()}),
    ("chunk_gated_delta_rule", {"chunk_size": 8}),
    ("chunk_gated_delta_rule", {"allow_neg_eigval": True}),
    ("chunk_gated_delta_rule", {"initial_state": torch.zeros(B, H, V, K)}),
    ("chunk_gated_delta_rule", {"cu_seqlens": torch.tensor([[0, 9]] * B)}),
    ("chunk_gated_delta_rule", {"cu_seqlens": [0, T]}),
    ("chunk_gated_delta_rule", {"g": 0.5}),
    ("chunk_gated_delta_rule", {"use_gate_in_kernel": True, "A_log": torch.zeros(1)}),
    ("chunk_gated_delta_rule", {"use_gate_in_kernel": True, "A_log": 0.5}),
    (
        "fused_recurrent_gated_delta_rule",
        {"use_gate_in_kernel": True, "A_log": torch.zeros(H), "dt_bias": torch.zeros(1)},
    ),
    ("chunk_gated_delta_rule", {"use_gate_in_kernel": True, "A_log": torch.zeros(H), "g": None}),
    ("fused_recurrent_gated_delta_rule", {"gk": torch.zeros(B, T, H, K)}),
    ("fused_recurrent_gated_delta_rule", {"gv": torch.zeros(B, T, H, V)}),
    ("chunk_gated_delta_product", {"cp_context": object()}),
    ("causal_conv1d", {"activation": "gelu"}),
    ("causal_conv1d", {"weight": None}),
    ("causal_conv1d", {"weight": torch.zeros(D, 5)}),
    ("causal_conv1d", {"backend": "gluon"}),
    ("causal_conv1d", {"seq_idx": torch.zeros(B, T)}),
    ("causal_conv1d", {"initial_state": torch.zeros(B, D, W - 1)}),
    ("causal_conv1d", {"residual": torch.zeros(T, B, D)}),
    ("rms_norm_gated", {"g": None}),
    ("rms_norm_gated", {"bias": torch.zeros(D)}),
    ("rms_norm_gated", {"residual": torch.zeros(B, T, D)}),
    ("rms_norm_gated", {"prenorm": True}),
    ("rms_norm_gated", {"residual_in_fp32": True}),
    ("rms_norm_gated", {"activation": "relu"}),
    ("rms_norm_gated", {"g": torch.zeros(B, T, D, dtype=torch.bfloat16)}),
]


@pytest.mark.parametrize("function, changes", REFUSED, ids=[f"{f}-{'-'.join(c)}" for f, c in REFUSED])
def test_an_unsupported_value_raises_and_names_the_argument(function, changes):
    *_, name = changes
    found = {n: x.float() if is_leaf(x) else x for n, x in draw(function).items()} | changes
    with pytest.raises(ValueError, match=rf"girih\.\S+: {name}\b"):
        getattr(fla, function)(**found)


def test_missing_arguments_of_the_gates():
    found = draw("chunk_gated_delta_rule") | {"use_gate_in_kernel": True}
    for function in (fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule):
        with pytest.raises(ValueError, match="A_log is None"):
            function(**found)
    with pytest.raises(ValueError, match="g is None"):
        fla.fused_recurrent_gated_delta_rule(**found | {"g": None, "A_log": vector(H)})


@pytest.mark.parametrize(
    "function", ["chunk_gsa", "chunk_simple_gla", "chunk_delta_rule", "chunk_gated_delta_rule"]
)
def test_keywords_that_fla_ignores_are_errors(function):
    with pytest.raises(TypeError, match="unexpected keyword argument 'gamma'"):
        getattr(fla, function)(**draw(function), gamma=1)
    with pytest.raises(ValueError, match="head_first"):
        getattr(fla, function)(**draw(function), head_first=False)


def test_conv_update_refuses_a_cache_that_it_cannot_write():
    x, weight = torch.zeros(B, D), torch.zeros(D, W)
    with pytest.raises(ValueError, match=r"cache is None but should be \[N, D, W\]"):
        fla.causal_conv1d_update(x, None, weight=weight)
    with pytest.raises(ValueError, match=r"x is a tensor \[2, 5\]"):
        fla.causal_conv1d_update(torch.zeros(B, 5), torch.zeros(B, D, W), weight=weight)
    with pytest.raises(ValueError, match=r"residual is a tensor \[6, 2\]"):
        fla.causal_conv1d_update(x, torch.zeros(B, D, W), torch.zeros(D, B), weight=weight)
    with pytest.raises(ValueError, match="cache is torch.bfloat16"):
        fla.causal_conv1d_update(x, torch.zeros(B, D, W, dtype=torch.bfloat16), weight=weight)


@pytest.mark.parametrize("function", ["chunk_gla", "chunk_gsa", "chunk_gated_delta_rule", "causal_conv1d"])
def test_compiles_in_one_graph(function):
    found = draw(function, dtype=torch.float32)
    call = torch.compile(getattr(fla, function), fullgraph=True, backend="aot_eager")
    assert_within(call(**found)[0], getattr(fla, function)(**found)[0], 1e-6)


def test_importing_girih_fla_imports_neither_fla_nor_triton():
    program = (
        "import sys, girih.fla\nassert not {'fla', 'triton', 'einops', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_register_without_fla_says_what_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.backends", None)
    monkeypatch.delitem(sys.modules, "girih.fla.registry", raising=False)
    with pytest.raises(ImportError, match="fla-core 0.6 or newer"):
        fla.register()
