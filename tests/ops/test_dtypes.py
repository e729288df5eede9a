"""Half-precision inputs with fp32 gates: one rounding of the inputs and one of the outputs."""

import pytest
import torch
from cases import CASES, FP32_KINDS, cotangents, gradients, operator, path_of, recurrence
from comparison import assert_within

HALVES = [torch.bfloat16, torch.float16]


def uses_half_products(inputs, device):
    """Whether the kernel multiplies in half precision; test_*_kernels.py measure its error."""
    return path_of(inputs, device) == "tensor cores"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_half_precision_errs_by_one_rounding(case, dtype, device):
    inputs = case.draw(
        9, calm=True, resumed=case.has_state, dtype=dtype, gate_dtype=torch.float32, device=device
    )
    if uses_half_products(inputs, device):
        pytest.skip("products are in half precision")
    inputs = inputs.requiring_grad()
    exact = inputs.map(lambda x: x.detach().double()).requiring_grad()
    outs, want = operator(inputs), recurrence(exact)
    eps = torch.finfo(dtype).eps
    states = {name: x for name, x in outs.items() if name != "o"}
    assert outs["o"].dtype == dtype
    assert_within(outs["o"], want["o"], eps)
    if case.op == "short_conv":
        assert states["x"].dtype == dtype
    else:
        assert all(x.dtype == torch.float32 for x in states.values() if x.is_floating_point())
    assert_within(states, {name: want[name] for name in states}, 1e-5)

    grads = cotangents(outs)
    found = gradients(outs, inputs, grads)
    assert {n: x.dtype for n, x in found.items()} == {n: x.dtype for n, x in inputs.floats.items()}
    assert_within(found, gradients(want, exact, {n: x.double() for n, x in grads.items()}), eps)


@pytest.mark.parametrize(
    "case", [c for c in CASES if FP32_KINDS & {kind for _, kind in c.data.values()}], ids=str
)
@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gates_of_any_float_dtype(case, gate_dtype, device):
    inputs = case.draw(9, calm=True, dtype=torch.bfloat16, gate_dtype=gate_dtype, device=device)
    if uses_half_products(inputs, device):
        pytest.skip("products are in half precision")
    want = recurrence(inputs.map(torch.Tensor.double))
    assert_within(operator(inputs)["o"], want["o"], torch.finfo(torch.bfloat16).eps)


def autocast_inputs(inputs, dtype):
    """Casts fp32 inputs as autocast does."""
    unchanged = {name for name, (_, kind) in inputs.case.data.items() if kind in FP32_KINDS}
    if inputs.case.op != "short_conv":  # its state is rows of x
        unchanged |= inputs.leaves.keys()
    return inputs.with_floats({n: x if n in unchanged else x.to(dtype) for n, x in inputs.floats.items()})


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backward", ["inside", "outside"])
def test_autocast_casts_data_but_not_gates_and_states(case, backward, device):
    inputs = case.draw(
        9, calm=True, resumed=case.has_state, dtype=torch.float32, device=device
    ).requiring_grad()
    want = operator(autocast_inputs(inputs, torch.bfloat16))
    want_grads = gradients(want, inputs)
    with torch.autocast(device, dtype=torch.bfloat16):
        outs = operator(inputs)
        grads = gradients(outs, inputs) if backward == "inside" else None
    grads = gradients(outs, inputs) if grads is None else grads
    assert {name: x.dtype for name, x in outs.items()} == {name: x.dtype for name, x in want.items()}
    assert_within(outs, want, 0.0)
    assert_within(grads, want_grads, 0.0)
