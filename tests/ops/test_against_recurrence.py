"""Every operator computes its recurrence: outputs, states and gradients, for any length and option."""

import pytest
import torch
from cases import CASES, LONG, RECURRENT, SIZES, cotangents, gradients, operator, precision, recurrence
from comparison import assert_within

STARTS = [(case, False) for case in CASES] + [(case, True) for case in RECURRENT]
START_IDS = [f"{case}-{'resumed' if resumed else 'start'}" for case, resumed in STARTS]


def lengths(case):
    """Lengths around one and two chunks of the model, else around the tiles of 16 and the chunks of 64
    tokens."""
    edges = [case.chunk, 2 * case.chunk] if "chunk" in case.options else [16, 32, 64]
    return sorted({0, 1, *(T for C in edges for T in (C - 1, C, C + 1))})


@pytest.mark.parametrize("case, resumed", STARTS, ids=START_IDS)
def test_outputs_states_and_gradients(case, resumed, device):
    dtype, tolerance, grad_tolerance = precision(case, device)
    inputs = case.draw(13, resumed=resumed, dtype=dtype, device=device).requiring_grad()
    exact = inputs.map(lambda x: x.detach().double()).requiring_grad()
    outs, want = operator(inputs), recurrence(exact)
    assert_within(outs, want, tolerance)
    grads = cotangents(outs)
    want_grads = gradients(want, exact, {name: x.double() for name, x in grads.items()})
    assert_within(gradients(outs, inputs, grads), want_grads, grad_tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_length(case, device):
    dtype, tolerance, grad_tolerance = precision(case, device)
    for T in lengths(case):
        inputs = case.draw(T, B=1, dtype=dtype, device=device).requiring_grad()
        exact = inputs.map(lambda x: x.detach().double()).requiring_grad()
        outs, want = operator(inputs), recurrence(exact)
        assert_within(outs, want, tolerance)
        assert_within(gradients(outs, inputs), gradients(want, exact), grad_tolerance)


@pytest.mark.parametrize("case", LONG, ids=str)
def test_fp32_after_4096_tokens(case, device):
    # `calm` where the recurrence is nonlinear in its memory. Otherwise Trellis with random targets is
    # chaotic: rounding the inputs alone changes the outputs by 100% within 1000 tokens.
    resumed, calm = case.has_state, bool(case.memory)
    sizes = {"B": 1, "H": 1, "Q": 1, "D": 8, "V": 8, "M": 8}
    inputs = case.draw(4096, resumed=resumed, calm=calm, dtype=torch.float32, device=device, **sizes)
    want = recurrence(inputs.map(torch.Tensor.double))
    assert_within(operator(inputs), want, 1e-4)


@pytest.mark.parametrize("case", [c for c in RECURRENT if c.memory], ids=str)
def test_first_memories_per_sequence(case, device):
    dtype, tolerance, _ = precision(case, device)
    inputs = case.draw(5, dtype=dtype, device=device)
    inputs = type(inputs)(
        **vars(inputs) | {"leaves": {n: torch.stack([x, x.flip(-1)]) for n, x in inputs.leaves.items()}}
    )
    assert_within(operator(inputs), recurrence(inputs.map(torch.Tensor.double)), tolerance)


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 17, 1), (33, 5, 18), (16, 64, 32)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_width(case, widths, device):
    dtype, tolerance, grad_tolerance = precision(case, device)
    D, V, M = widths
    sizes = {"B": 1, "D": D, "V": D if case.sizes.get("V") == SIZES["D"] else V, "M": M, "X": D}
    inputs = case.draw(
        6, resumed=case.has_state, calm=True, dtype=dtype, device=device, **sizes
    ).requiring_grad()
    exact = inputs.map(lambda x: x.detach().double()).requiring_grad()
    outs, want = operator(inputs), recurrence(exact)
    assert_within(outs, want, tolerance)
    assert_within(gradients(outs, inputs), gradients(want, exact), grad_tolerance)
