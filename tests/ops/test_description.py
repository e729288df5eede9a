"""`describe()` agrees with the functions, their checks and the tests."""

import doctest
import importlib
import inspect
import math
import pkgutil
import re

import pytest
import torch
from cases import CASES, ONE_EACH, RECURRENT, STATES, arguments, operator, path_of
from girih import ops
from test_arguments import CASES_BY_NAME, draw, message
from test_dispatch import registered_call

DESCRIPTION = ops.describe()
OPTIONS = [(name, option) for name, op in DESCRIPTION.items() for option in op["options"]]
RANGED = [(name, option) for name, option in OPTIONS if option["type"].rstrip("?") in ("int", "float")]


def find_case(op, option):
    """A case of the operator that sets the option, else the operator's first case."""
    cases = [case for case in CASES if case.op == op]
    return next((case for case in cases if option in case.options), cases[0])


def ids(pairs):
    return [f"{name}-{option['name']}" for name, option in pairs]


@pytest.mark.parametrize("module", [module.name for module in pkgutil.iter_modules(ops.__path__)])
def test_examples_in_docstrings_run(module):
    module = importlib.import_module(f"girih.ops.{module}")
    assert doctest.testmod(module).failed == 0
    assert all(">>>" in getattr(module, name).__doc__ for name in set(DESCRIPTION) & set(vars(module)))


@pytest.mark.parametrize("name", DESCRIPTION)
def test_signatures_match_the_description(name):
    """Tensors in the described order, then options by keyword with their defaults, `state` and the
    packing."""
    op = DESCRIPTION[name]
    data = [t for t in op["tensors"] if not t["state"]]
    stateful = len(data) < len(op["tensors"])
    for form in (name, f"{name}_step") if stateful else (name,):
        parameters = inspect.signature(getattr(ops, form)).parameters
        positional = {n: p for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
        assert list(positional) == [t["name"] for t in data]
        for tensor in data:
            assert positional[tensor["name"]].default is (None if tensor["optional"] else inspect._empty)
        keywords = {n: p.default for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        packing = {op["packing"]} if "packing" in op and form == name else set()
        options = {option["name"]: option for option in op["options"]}
        assert set(keywords) == set(options) | packing | ({"state"} if stateful else set())
        for option in options.values():
            default = keywords[option["name"]]
            if "default" in option:
                assert default == option["default"] and type(default) is type(option["default"])
            else:  # required, except n, which follows from the number of rows
                assert default is (None if option["name"] == "n" else inspect._empty)


@pytest.mark.parametrize("name", STATES)
def test_state_fields_match_the_description(name):
    fields = [t["name"].removeprefix("state_") for t in DESCRIPTION[name]["tensors"] if t["state"]]
    assert list(getattr(ops, STATES[name][0])._fields) == fields == STATES[name][1]


def test_cases_cover_every_operator_and_option_value():
    assert {case.op for case in CASES} == {case.op for case in ONE_EACH} == set(DESCRIPTION)
    for name, option in OPTIONS:
        used = {case.options.get(option["name"], option.get("default")) for case in CASES if case.op == name}
        assert set(option.get("words", ())) <= used, f"{name}: {option['name']}"


def test_one_each_covers_the_tensor_cores():
    def on_tensor_cores(cases):
        halves = [case.draw(20, dtype=torch.bfloat16, gate_dtype=torch.float32) for case in cases]
        return {inputs.case.op for inputs in halves if path_of(inputs) == "tensor cores"}

    assert on_tensor_cores(ONE_EACH) == on_tensor_cores(CASES) >= {"gsa", "trellis", "cat_attention"}


@pytest.mark.parametrize("name, option", [o for o in OPTIONS if "words" in o[1]], ids=str)
def test_unknown_option_values_are_refused_with_the_allowed_values(name, option):
    text = message(case := find_case(name, option["name"]), draw(case) | {option["name"]: "sine"})
    assert f"{option['name']} is 'sine' but should be one of {', '.join(option['words'])}" in text


@pytest.mark.parametrize("name, option", RANGED, ids=ids(RANGED))
def test_numbers_out_of_range_are_refused_with_their_bounds(name, option):
    """Values below the least, above the most, nan and infinities."""
    case, number = find_case(name, option["name"]), option["name"]
    wrong = [option[end] + step for end, step in (("least", -1), ("most", 1)) if end in option]
    if option["type"].startswith("int"):
        wrong = [int(x) for x in wrong]
    else:
        wrong += [math.nan, math.inf, -math.inf]
    for value in wrong:
        text = message(case, draw(case) | {number: value})
        assert f"{number} is " in text and re.search(
            "but should be (a finite number|at least|[0-9]+ to)", text
        )
        for end in ("least", "most"):
            assert end not in option or option["type"].startswith("float") or f"{option[end]:g}" in text


@pytest.mark.parametrize("name", [name for name in DESCRIPTION])
def test_a_required_tensor_that_is_none_is_named(name):
    case = next(case for case in CASES if case.op == name)
    for tensor in DESCRIPTION[name]["tensors"]:
        if not tensor["state"] and not tensor["optional"]:
            text = message(case, draw(case) | {tensor["name"]: None})
            assert text.startswith(f"girih.{name}: {tensor['name']} is None but should be a tensor ")


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_a_state_of_another_type_is_refused(case):
    for wrong in (torch.zeros(2, 2), (None, None), object()):
        text = message(case, draw(case) | {"state": wrong})
        assert text.startswith(f"girih.{case.op}: state is a ") and STATES[case.op][0] in text


# Expected path on a GPU: case, sizes, dtype, path.
PATHS = [
    ("gsa-g", {}, torch.bfloat16, "tensor cores"),
    ("gsa-g", {"M": 128, "D": 512}, torch.float16, "tensor cores"),
    ("gsa-g", {"M": 129}, torch.bfloat16, "fp32"),
    ("gsa-g", {"D": 513}, torch.bfloat16, "fp32"),
    ("gsa-g", {}, torch.float32, "fp32"),
    ("gsa-abc", {}, torch.bfloat16, "fp32"),
    ("gsa-g", {}, torch.float64, "aten"),
    ("gla-plain", {"D": 256}, torch.bfloat16, "tensor cores"),
    ("gla-g_head", {"D": 257}, torch.bfloat16, "fp32"),
    ("gla-g_channel", {"D": 128}, torch.bfloat16, "tensor cores"),
    ("gla-g_channel", {"D": 129}, torch.bfloat16, "fp32"),
    ("delta_product-n2", {"D": 256, "V": 256}, torch.bfloat16, "tensor cores"),
    ("delta_product-n2", {"V": 257}, torch.bfloat16, "aten"),
    ("delta_product-n3_vector", {"D": 128, "V": 128}, torch.bfloat16, "tensor cores"),
    ("delta_product-n3_vector", {"D": 129, "V": 129}, torch.bfloat16, "fp32"),
    ("delta_product-n2_vector_l2", {}, torch.bfloat16, "fp32"),
    ("delta_product-gelu", {}, torch.bfloat16, "fp32"),
    ("short_conv-w4", {}, torch.bfloat16, "fp32"),
    ("gated_rms_norm-silu", {"X": 8193}, torch.bfloat16, "aten"),
    ("trellis-default", {}, torch.bfloat16, "tensor cores"),
    ("trellis-default", {"M": 129}, torch.bfloat16, "fp32"),
    ("trellis-default", {"V": 256}, torch.float32, "fp32"),
    ("trellis-default", {"D": 257}, torch.float32, "aten"),
    ("trellis-default", {}, torch.float64, "aten"),
    ("ttt-default", {}, torch.bfloat16, "tensor cores"),
    ("ttt-weight", {}, torch.float16, "tensor cores"),
    ("ttt-weight", {"M": 129}, torch.bfloat16, "fp32"),
    ("ttt-softmax", {}, torch.bfloat16, "fp32"),
    ("ttt-weight", {"D": 256}, torch.float32, "fp32"),
    ("ttt-default", {"M": 257}, torch.float32, "aten"),
    ("ttt-default", {}, torch.float64, "aten"),
    ("lattice-decode_c4", {}, torch.bfloat16, "fp32"),
    ("lattice-unnormalised", {}, torch.float16, "fp32"),
    ("lattice-decode_c4", {"D": 128, "M": 128}, torch.float32, "fp32"),
    ("lattice-decode_c4", {"M": 129}, torch.float32, "aten"),
    ("cat_attention-c4", {}, torch.bfloat16, "tensor cores"),
    ("cat_attention-c4", {"D": 257}, torch.bfloat16, "aten"),
    ("cat_attention-c4", {"D": 128}, torch.float32, "tensor cores"),
    ("cat_attention-c4", {"V": 129}, torch.float32, "aten"),
]


@pytest.mark.parametrize("name, sizes, dtype, path", PATHS, ids=str)
def test_explain_returns_the_path(name, sizes, dtype, path):
    case = CASES_BY_NAME[name]
    inputs = case.draw(5, dtype=dtype, gate_dtype=torch.float32, **sizes)
    explanation = ops.explain(case.op, **arguments(inputs), device="cuda")
    assert explanation.path == path and explanation.why and str(explanation) == f"{path}: {explanation.why}"
    assert ops.explain(case.op, **arguments(inputs)).path == "aten"
    on_meta = ops.explain(case.op, **arguments(inputs.map(lambda x: x.to("meta"))))
    assert on_meta == explanation


@pytest.mark.parametrize("case", CASES, ids=str)
def test_saved_tensors_depend_on_the_path(case):
    """On the meta device, forward returns saved tensors exactly where the kernels need them."""
    inputs = case.draw(70, dtype=torch.bfloat16, gate_dtype=torch.float32).map(lambda x: x.to("meta"))
    _, args, kwargs = registered_call(operator, inputs)
    results = getattr(torch.ops.girih, f"{case.op}_forward")(*args, **kwargs, save=True)
    results = results if isinstance(results, tuple) else (results,)
    outputs = 1 + sum(t["state"] for t in DESCRIPTION[case.op]["tensors"])
    saved = sum(x.numel() for x in results[outputs:])
    path = ops.explain(case.op, **arguments(inputs)).path
    assert (saved > 0) == (
        path == "tensor cores"
        or case.op in ("cat_attention",)
        or (case.op in ("delta_product", "lattice", "trellis", "ttt") and path == "fp32")
    )


@pytest.mark.parametrize("name", ["gsa", "gla", "delta_product", "trellis", "ttt", "short_conv"])
def test_explain_returns_the_path_of_a_step(name):
    case = next(case for case in CASES if case.op == name and "between_chunks" not in case.options)
    inputs = case.draw(1, resumed=True, dtype=torch.bfloat16, gate_dtype=torch.float32)
    explanation = ops.explain(f"{name}_step", **arguments(inputs), device="cuda")
    assert explanation.path == "fp32"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_explain_under_autocast_returns_the_path_of_the_cast_inputs(case, dtype):
    wide = case.draw(70, dtype=torch.float32)
    cast = case.draw(70, dtype=dtype, gate_dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        explanation = ops.explain(case.op, **arguments(wide), device="cuda")
    assert explanation == ops.explain(case.op, **arguments(cast), device="cuda")


def test_autocast_enables_the_tensor_cores():
    wide = CASES_BY_NAME["gsa-g"].draw(70, dtype=torch.float32)
    paths = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            paths.append(ops.explain("gsa", **arguments(wide), device="cuda").path)
    assert paths == ["fp32", "tensor cores"]


def test_explain_raises_the_errors_of_the_call():
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"girih.gla: k has shape \[1, 3, 2, 8\]"):
        ops.explain("gla", q, q[:, 1:], q)
    with pytest.raises(ValueError, match="device is 'tpu' but should be cuda or cpu"):
        ops.explain("gla", q, q, q, device="tpu")
    with pytest.raises(ValueError, match="name is 'gals'; expected one of gsa, gla"):
        ops.explain("gals", q)
    with pytest.raises(TypeError, match="unexpected keyword argument 'gate'"):
        ops.explain("gla", q, q, q, gate=q)


OPERATORS = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("girih::")]


@pytest.mark.parametrize(
    "name", [name for name in OPERATORS if name.endswith(("_forward", "_backward", "_step"))]
)
def test_every_build_serves_cuda_tensors(name):
    """With kernels or, in a build without kernels, with PyTorch's own operators."""
    assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CUDA")
