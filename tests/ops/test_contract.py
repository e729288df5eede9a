"""Guarantees of every operator: determinism, unchanged inputs, gradients, checkpointing."""

import pytest
import torch
from cases import CASES, ONE_EACH, RECURRENT, cotangents, float_of, gradients, operator, precision
from comparison import assert_within

in_half_precision = True


@pytest.mark.parametrize("case", CASES, ids=str)
def test_repeated_calls_have_the_same_bits(case, device):
    inputs = case.draw(33, resumed=case.has_state, dtype=float_of(device), device=device).requiring_grad()
    first, second = operator(inputs), operator(inputs)
    assert_within(first, second, 0.0)
    assert_within(gradients(first, inputs), gradients(second, inputs), 0.0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_inputs_are_not_modified(case, device):
    dtype, _, _ = precision(case, device)
    inputs = case.draw(7, resumed=case.has_state, dtype=dtype, device=device).requiring_grad()
    copies = {name: x.detach().clone() for name, x in inputs.floats.items()}
    outs = operator(inputs)
    grads = cotangents(outs)
    grad_copies = {name: x.clone() for name, x in grads.items()}
    gradients(outs, inputs, grads)
    assert_within(inputs.floats, copies, 0.0)
    assert_within(grads, grad_copies, 0.0)


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_gradients_of_zero_tokens_are_new_tensors(case, device):
    """A gradient that passes unchanged from the final state to the first state is a copy."""
    dtype, _, _ = precision(case, device)
    inputs = case.draw(0, resumed=True, dtype=dtype, device=device).requiring_grad()
    outs = operator(inputs)
    grads = cotangents(outs)
    pointers = {x.data_ptr() for x in grads.values() if x.numel()}
    assert not any(x.data_ptr() in pointers for x in gradients(outs, inputs, grads).values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_gradients_the_result_is_the_same(case, device):
    dtype, tolerance, _ = precision(case, device)
    inputs = case.draw(7, resumed=case.has_state, dtype=dtype, device=device).requiring_grad()
    want = operator(inputs)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outs = operator(inputs)
        assert not any(x.requires_grad for x in outs.values())
        assert_within(outs, want, tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_single_outputs_by_single_inputs(case, device):
    dtype, _, tolerance = precision(case, device)
    inputs = case.draw(7, resumed=case.has_state, dtype=dtype, device=device).requiring_grad()
    for output, grad in cotangents(operator(inputs)).items():
        together = gradients(operator(inputs), inputs, {output: grad})
        for name, x in inputs.floats.items():
            alone = inputs.map(torch.Tensor.detach)
            alone = alone.with_floats(alone.floats | {name: x})
            found = operator(alone)[output]
            if not found.requires_grad:
                assert not together[name].any(), f"{output} by {name}"
                continue
            (dx,) = torch.autograd.grad(found, x, grad, allow_unused=True, materialize_grads=True)
            assert_within({f"{output} by {name}": dx}, {f"{output} by {name}": together[name]}, tolerance)


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_a_second_derivative_is_refused(case, device):
    inputs = case.draw(5, dtype=float_of(device), device=device).requiring_grad()
    o, leaf = operator(inputs)["o"], next(iter(inputs.data.values()))
    (first,) = torch.autograd.grad(o.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=f"derivative for girih::{case.op}_backward is not implemented"):
        torch.autograd.grad(first.sum(), leaf)


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_checkpointing_gives_the_same_bits(case, device):
    inputs = case.draw(9, resumed=case.has_state, dtype=float_of(device), device=device).requiring_grad()
    names = list(inputs.floats)

    def call(*tensors):
        return operator(inputs.with_floats(dict(zip(names, tensors, strict=True))))

    outs = torch.utils.checkpoint.checkpoint(call, *inputs.floats.values(), use_reentrant=False)
    want = operator(inputs)
    assert_within(outs, want, 0.0)
    assert_within(gradients(outs, inputs), gradients(want, inputs), 0.0)
