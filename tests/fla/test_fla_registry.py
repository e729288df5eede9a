"""girih as a backend of an installed fla: signatures, dispatch, verification, fallback, and fla's own layers.

On the CPU fla has no kernels: a result comes from girih.
"""

import inspect
import os
import subprocess
import sys

import pytest
import torch
from comparison import assert_within
from fla_references import REFERENCES, draw
from girih import fla as girih_fla

pytestmark = pytest.mark.filterwarnings("ignore")  # fla warns that there is no GPU
fla_backends = pytest.importorskip("fla.backends", reason="needs fla-core 0.6: pip install fla-core==0.6.0")
fla_layers = pytest.importorskip("fla.layers", reason="needs flash-linear-attention==0.6.0")

import fla.modules
import fla.modules.causal_conv1d.ops as fla_conv
import fla.modules.norm.fused_norm_gate as fla_norm
import fla.ops
import fla.ops.gated_delta_product
import fla.ops.gated_delta_rule
import fla.ops.simple_gla
from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.gsa.naive import naive_recurrent_gsa
from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

MODULES = (fla.ops, fla.ops.gated_delta_rule, fla.ops.gated_delta_product, fla_conv, fla_norm)
FUNCTIONS = [name for name in girih_fla.__all__ if name not in ("register", "unregister")]


def fla_function(name):
    return next(getattr(module, name) for module in MODULES if hasattr(module, name))


@pytest.fixture
def registered():
    girih_fla.register()
    yield
    girih_fla.unregister()


class Recorder(fla_backends.BaseBackend):
    """A backend after girih that serves every call that reaches it, and records the name."""

    backend_type, priority = "recorder", 9
    names: list | None = None

    def is_enabled(self):
        return Recorder.names is not None


def record(name):
    def implementation(*args, **kwargs):
        Recorder.names.append(name)
        return name, None

    return implementation


@fla_backends.register("gated_delta_rule")
class DeltaRecorder(Recorder):
    chunk_gated_delta_rule = staticmethod(record("chunk_gated_delta_rule"))


ENTRY_POINTS = {
    "fused_recurrent_simple_gla": fla.ops.simple_gla,
    "fused_chunk_simple_gla": fla.ops.simple_gla,
    "parallel_simple_gla": fla.ops.simple_gla,
    "causal_conv1d_fwd": fla_conv,
    "causal_conv1d_bwd": fla_conv,
    "causal_conv1d_update": fla_conv,
    "layer_norm_gated_fwd": fla_norm,
    "layer_norm_gated_bwd": fla_norm,
}
for entry, module in ENTRY_POINTS.items():
    fla_backends.register(getattr(module, entry), backend=Recorder)(record(entry))


@pytest.fixture
def recorded(registered):
    Recorder.names = []
    yield Recorder.names
    Recorder.names = None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_those_of_fla(name):
    """Names, order, kinds and defaults. Annotations differ: girih imports no type of fla."""
    got, want = (inspect.signature(f).parameters for f in (getattr(girih_fla, name), fla_function(name)))
    assert [(p.name, p.kind, p.default) for p in got.values()] == [
        (p.name, p.kind, p.default) for p in want.values()
    ]


def single(found):
    """The inputs in fp32: fla's naive functions compute in it."""
    return {n: x.detach().float() if isinstance(x, torch.Tensor) else x for n, x in found.items()}


def naive(name, found):
    """fla's naive function on arguments of a call."""
    state = {"initial_state": found.get("initial_state"), "output_final_state": True}
    q, k, v = (found[n] for n in "qkv")
    if "gsa" in name:
        return naive_recurrent_gsa(q, k, v, found["s"], found["g"], **state)
    if "simple_gla" in name:
        return naive_recurrent_simple_gla(q, k, v, found["g"], **state)
    if "gla" in name:
        return naive_recurrent_gla(q, k, v, found.get("g", found.get("gk")), **state)
    g = found.get("g", torch.zeros_like(found["beta"]))
    if name == "chunk_gated_delta_product":
        scale, n = q.shape[-1] ** -0.5, found["num_householder"]
        return naive_recurrent_gated_delta_product(
            q, k, v, g, found["beta"], scale, num_householder=n, **state
        )
    return naive_recurrent_gated_delta_rule(q, k, v, found["beta"], g, **state)


@pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])
@pytest.mark.parametrize("name", [name for name in REFERENCES if "conv" not in name and "norm" not in name])
def test_functions_equal_the_naive_functions_of_fla(name, resumed):
    resumed = resumed and name != "parallel_simple_gla"
    found = draw(name, resumed=resumed, n=2 if "product" in name else 1)
    found = {n: tuple(x.float() for x in y) if isinstance(y, tuple) else y for n, y in found.items()}
    found = single(found)
    asked = {} if name == "parallel_simple_gla" else {"output_final_state": True}
    o, state = getattr(girih_fla, name)(**found, **asked)
    want, want_state = naive(name, found)
    assert_within(o, want, 1e-5)
    if state is not None:
        state, want_state = (x if isinstance(x, list | tuple) else [x] for x in (state, want_state))
        for x, y in zip(state, want_state, strict=True):
            assert_within(x, y, 1e-5)


def test_girih_serves_the_gated_delta_rule_of_fla(registered):
    found = single(draw("chunk_gated_delta_rule", resumed=True))
    o, state = fla.ops.chunk_gated_delta_rule(**found, output_final_state=True)
    want, want_state = naive("chunk_gated_delta_rule", found)
    assert_within(o, want, 1e-5)
    assert_within(state, want_state, 1e-5)


def test_all_options_of_the_gated_delta_rule_are_served(recorded):
    found = draw("chunk_gated_delta_rule", packed=True, resumed=True, HV=4)
    found |= {"use_gate_in_kernel": True, "A_log": torch.randn(4), "dt_bias": torch.randn(4)}
    found |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "use_qk_l2norm_in_kernel": True}
    found["initial_state"], found["state_v_first"] = found["initial_state"].mT.contiguous(), True
    o, state = fla.ops.chunk_gated_delta_rule(**found, output_final_state=True)
    want, want_state = REFERENCES["chunk_gated_delta_rule"](**found)
    assert not recorded
    assert_within(o, want, 1e-6)
    assert_within(state, want_state, 1e-6)


@pytest.mark.parametrize(
    "name", ["fused_recurrent_simple_gla", "fused_chunk_simple_gla", "parallel_simple_gla"]
)
def test_girih_serves_simple_gla_of_fla(name, recorded):
    found = single(draw(name, packed=True)) | {"cu_seqlens": draw(name, packed=True)["cu_seqlens"]}
    o, _ = getattr(fla.ops.simple_gla, name)(**found)
    assert not recorded
    assert_within(o, REFERENCES[name](**found)[0], 1e-5)


def leaves(found):
    return [x for x in found.values() if isinstance(x, torch.Tensor) and x.requires_grad]


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("packed, resumed", [(False, False), (True, False), (True, True)])
def test_girih_serves_the_convolution_of_fla(packed, resumed, activation, recorded):
    """fla's autograd.Function with girih in its two halves."""
    found = draw("causal_conv1d", packed=packed, resumed=resumed)
    found |= {"activation": activation, "bias": torch.randn(6, dtype=torch.float64, requires_grad=True)}
    hints = {}
    if packed:  # fla counts chunks on the host
        hints = {"chunk_indices": torch.zeros(3, 2, dtype=torch.int64)}
    y, state = fla.modules.causal_conv1d.causal_conv1d(**found, **hints, output_final_state=True)
    want, want_state = REFERENCES["causal_conv1d"](**found)
    assert_within(y, want, 1e-9)
    assert_within(state, want_state, 1e-9)
    grads = [torch.randn_like(y), torch.randn_like(state)]
    pairs = (y, state), (want, want_state)
    got, expected = (torch.autograd.grad(outs, leaves(found), grads) for outs in pairs)
    for x, z in zip(got, expected, strict=True):
        assert_within(x, z, 1e-7)
    assert not recorded


def test_girih_serves_the_step_of_the_convolution(recorded):
    x, cache, weight = torch.randn(3, 1, 6), torch.randn(3, 6, 4), torch.randn(6, 4)
    want, state = REFERENCES["causal_conv1d"](x, weight, initial_state=cache.clone(), activation="silu")
    y, same = fla_conv.causal_conv1d_update(x, cache, weight=weight, activation="silu")
    assert same is cache and not recorded
    assert_within(y, want, 1e-5)
    assert_within(cache, state, 1e-5)


@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
def test_girih_serves_the_gated_norm_of_fla(activation, prenorm, recorded):
    found = draw("rms_norm_gated") | {"activation": activation}
    got = fla_norm.rms_norm_gated(**found, prenorm=prenorm)
    want = REFERENCES["rms_norm_gated"](**found, eps=1e-6)[0]
    got, want = ([*got] if prenorm else [got]), [want, found["x"]][: 1 + prenorm]
    dys = [torch.randn_like(y) for y in want]
    for y, z in zip(got, want, strict=True):
        assert_within(y, z, 1e-9)
    grads, expected = (torch.autograd.grad(out, leaves(found), dys) for out in (got, want))
    for x, z in zip(grads, expected, strict=True):
        assert_within(x, z, 1e-7)
    assert not recorded


def test_the_norm_with_a_linear_layer_recomputes_its_output(recorded):
    found = single(draw("rms_norm_gated"))
    x, g, norm_weight = (found[n].requires_grad_() for n in ("x", "g", "weight"))
    weight = torch.randn(5, 6, requires_grad=True)
    got = fla_norm.rms_norm_swish_gate_linear(x, g, norm_weight, None, weight, None)
    want = REFERENCES["rms_norm_gated"](x, g, norm_weight, None)[0] @ weight.T
    assert_within(got, want, 1e-5)
    inputs, dy = (x, g, norm_weight, weight), torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(y, inputs, dy) for y in (got, want)), strict=True):
        assert_within(a, b, 1e-4)
    assert not recorded


GATED = "chunk_gated_delta_rule"
FALLBACKS = [
    (GATED, {"cp_context": object()}),
    (GATED, {"beta": torch.rand(2, 70, 2, 3)}),
    (GATED, {"g": torch.zeros(2, 70, 2, 4)}),
    (GATED, {"q": torch.zeros(2, 70, 2, 4, dtype=torch.bfloat16)}),
    (GATED, {"an_option_of_a_later_fla": 1}),
    ("fused_recurrent_simple_gla", {"reverse": True}),
    ("fused_recurrent_simple_gla", {"g": None, "g_gamma": torch.zeros(2, requires_grad=True)}),
    ("fused_chunk_simple_gla", {"g_gamma": torch.zeros(2)}),
    ("parallel_simple_gla", {"output_attentions": True}),
]


@pytest.mark.parametrize("name, changes", FALLBACKS, ids=[f"{n}-{'-'.join(c)}" for n, c in FALLBACKS])
def test_calls_that_girih_does_not_serve_go_to_the_next_backend(name, changes, recorded):
    found = single(draw(name)) | changes
    result = getattr(fla.ops.simple_gla if "simple" in name else fla.ops, name)(**found)
    assert result[0] == name and recorded == [name]


@pytest.mark.parametrize(
    "changes",
    [
        {"residual": torch.zeros(2, 70, 6)},
        {"weight": torch.zeros(6, 5)},
        {"activation": "relu"},
        {"initial_state": torch.zeros(2, 6, 4), "x": torch.zeros(2, 70, 6, dtype=torch.int32)},
    ],
    ids="-".join,
)
def test_convolutions_that_girih_does_not_serve_go_to_the_next_backend(changes, recorded):
    found = single(draw("causal_conv1d")) | {"bias": None, "residual": None} | changes
    fla_conv.causal_conv1d_fwd(**found)
    assert recorded == ["causal_conv1d_fwd"]


@pytest.mark.parametrize(
    "changes",
    [
        {"is_rms_norm": False},
        {"bias": torch.zeros(6)},
        {"weight": None},
        {"residual": torch.zeros(70, 6)},
        {"residual_dtype": torch.float64},
        {"g": torch.zeros(70, 6, dtype=torch.bfloat16)},
    ],
    ids="-".join,
)
def test_norms_that_girih_does_not_serve_go_to_the_next_backend(changes, recorded):
    x = torch.randn(70, 6)
    found = {"x": x, "g": x, "weight": torch.ones(6), "bias": None, "is_rms_norm": True} | changes
    fla_norm.layer_norm_gated_fwd(**found)
    assert recorded == ["layer_norm_gated_fwd"]


def test_on_a_gpu_calls_without_a_kernel_of_girih_are_refused(monkeypatch):
    from girih.fla import registry

    class OnGPU:
        """Stands for a tensor on a GPU, which a machine without one cannot make."""

        device = torch.device("cuda")

    def verdict(dtype):
        q = torch.empty(1, 70, 2, 64, dtype=dtype, device="meta")
        monkeypatch.setattr(torch.ops.girih, "gla_explain", lambda _, *rest, **how: explain(q, *rest, **how))
        return registry.verify_path("gla", OnGPU, q, q, None, None, None, scale=None)

    explain = torch.ops.girih.gla_explain
    monkeypatch.setattr(registry, "WITH_CUDA", True)
    assert verdict(torch.bfloat16) == (True, "girih: 16-bit products, sums and states in fp32")
    assert verdict(torch.float64) == (False, "girih: float64 has no kernels")
    monkeypatch.setattr(registry, "WITH_CUDA", False)
    assert verdict(torch.bfloat16) == (False, "this build of girih has no CUDA kernels")


def served_by():
    """Who serves a call that girih can serve: girih, or the recorder, which is next."""
    result = fla.ops.chunk_gated_delta_rule(**single(draw(GATED)))
    return "next" if result[0] == GATED else "girih"


def test_the_switches_of_fla_apply(recorded, monkeypatch):
    assert served_by() == "girih"
    monkeypatch.setenv("FLA_GIRIH", "0")
    assert served_by() == "next"
    monkeypatch.setenv("FLA_GIRIH", "1")
    assert served_by() == "girih"
    girih_fla.unregister()
    assert served_by() == "next"
    girih_fla.register()
    assert served_by() == "girih"


def run_program(program, **environment):
    command = [sys.executable, "-W", "ignore", "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert run.returncode == 0, run.stderr
    return run.stderr


def test_fla_logs_who_serves_and_why_a_call_is_refused():
    program = """
import logging, torch, girih.fla
from fla.ops.simple_gla import fused_recurrent_simple_gla
logging.basicConfig(level=logging.INFO)
girih.fla.register()
q = torch.randn(1, 4, 2, 8)
fused_recurrent_simple_gla(q, q, q)
try:
    fused_recurrent_simple_gla(q, q, q, reverse=True)
except Exception:
    pass  # without a GPU fla has no kernels
"""
    log = run_program(program)
    assert "fused_recurrent_simple_gla -> girih" in log
    assert "girih rejected: girih.fla.fused_recurrent_simple_gla: reverse is True but should be False" in log


def test_register_warns_where_fla_s_dispatch_is_off():
    program = (
        "import warnings, girih.fla\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    girih.fla.register()\n"
        "assert any('FLA_DISABLE_BACKEND_DISPATCH' in str(w.message) for w in seen)\n"
    )
    run_program(program, FLA_DISABLE_BACKEND_DISPATCH="1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_no_dtype(dtype, recorded):
    """Forward and backward of the convolution and of the norm, which fla dispatches apart."""
    x = torch.randn(2, 70, 6, dtype=dtype, requires_grad=True)
    filters, weight = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((6, 4), (6,)))

    def compute():
        y, state = fla_conv.causal_conv1d(x, filters, output_final_state=True, activation="silu")
        z = fla_norm.rms_norm_gated(y, x, weight, None)
        return y, state, z, *torch.autograd.grad(z.float().sum(), (x, filters, weight))

    want = compute()
    with torch.autocast("cpu", torch.bfloat16 if dtype == torch.float32 else torch.float16):
        found = compute()
    assert not recorded
    for a, b in zip(found, want, strict=True):
        assert a.dtype == dtype and torch.equal(a, b)


def test_mixed_dtypes_are_refused_under_autocast_too(recorded):
    q, k = torch.randn(1, 9, 2, 4), torch.randn(1, 9, 2, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        fla.ops.simple_gla.fused_chunk_simple_gla(q, k, k)
        fla.ops.chunk_gated_delta_rule(q, k, k, torch.zeros(1, 9, 2), torch.ones(1, 9, 2))
    assert recorded == ["fused_chunk_simple_gla", "chunk_gated_delta_rule"]


def test_a_step_of_the_convolution_with_a_gradient_goes_to_the_next_backend(recorded):
    x, cache, weight = torch.randn(3, 6), torch.randn(3, 6, 4), torch.randn(6, 4, requires_grad=True)
    fla_conv.causal_conv1d_update(x, cache, weight=weight)
    assert recorded == ["causal_conv1d_update"]
    with torch.no_grad():
        fla_conv.causal_conv1d_update(x, cache, weight=weight)
    assert recorded == ["causal_conv1d_update"]
