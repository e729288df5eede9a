"""What a CUDA device adds: no operator waits for the device, and every call can be captured in a graph."""

from dataclasses import replace

import pytest
import torch
from cases import CASES, RECURRENT, cotangents, gradients, operator, step
from comparison import assert_within
from conftest import needs_cuda

pytestmark = needs_cuda


def clone(tensors):
    return {name: x.detach().clone() for name, x in tensors.items()}


def capture(call):
    """A graph of one call, after a first one outside of it, and what the call returned."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call()
    return graph, result


@pytest.fixture
def waits_are_errors():
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_waits_for_the_device(case, packed, waits_are_errors):
    lengths = [4 * case.chunk, 0, 2 * case.chunk] if packed else None
    inputs = case.draw(9, lengths=lengths, resumed=case.has_state, dtype=torch.float32, device="cuda")
    # The bounds and cotangents are made beforehand: to bring them to the device is a copy that waits.
    bounds = inputs.cu()
    inputs = replace(inputs.requiring_grad(), lengths=None)
    grads = cotangents(operator(inputs, **bounds))
    waits_are_errors()
    gradients(operator(inputs, **bounds), inputs, grads)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward_in_a_graph(case):
    inputs = case.draw(9, resumed=case.has_state, dtype=torch.float32, device="cuda").requiring_grad()
    other = case.draw(9, resumed=case.has_state, dtype=torch.float32, device="cuda", seed=1).requiring_grad()
    grads = cotangents(operator(inputs))

    def call():
        outs = operator(inputs)
        return outs, gradients(outs, inputs, grads)

    graph, (outs, found) = capture(call)
    with torch.no_grad():
        for name, x in inputs.floats.items():
            x.copy_(other.floats[name])
    graph.replay()
    want = operator(inputs)
    assert_within(outs, want, 1e-6)
    assert_within(found, gradients(want, inputs, grads), 1e-5)


@pytest.mark.parametrize("case", RECURRENT, ids=str)
@torch.no_grad()
def test_a_step_in_a_graph(case):
    tokens = case.draw(6, resumed=True, dtype=torch.float32, device="cuda")
    eager, captured = (clone(operator(tokens.part(0, 0))) for _ in range(2))
    eager.pop("o"), captured.pop("o")
    token = tokens.part(0, 1, captured).on_tokens(lambda x, rows: x.clone())
    kept = clone(captured)
    graph, o = capture(lambda: step(token))
    for name, x in kept.items():
        captured[name].copy_(x)
    for t in range(6):
        now = tokens.part(t, t + 1, eager)
        for name, x in token.data.items():
            x.copy_(now.data[name])
        graph.replay()
        assert_within(o, step(now), 1e-6)
        assert_within(captured, eager, 1e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_hundred_runs_give_the_same_bits(case):
    inputs = case.draw(70, resumed=case.has_state, dtype=torch.float32, device="cuda").requiring_grad()
    outs = operator(inputs)
    want = clone(outs), gradients(outs, inputs)
    for _ in range(100):
        outs = operator(inputs)
        assert_within(outs, want[0], 0.0)
        assert_within(gradients(outs, inputs), want[1], 0.0)
