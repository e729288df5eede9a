"""CUDA only: no operator synchronises with the device, and every call can be captured in a graph."""

from dataclasses import replace

import pytest
import torch
from cases import CASES, ONE_EACH, PACKED, RECURRENT, cotangents, gradients, operator, step
from comparison import assert_within
from conftest import needs_cuda
from girih.models.graph import record
from graphs import capture
from test_dispatch import registered_call

pytestmark = needs_cuda


def clone(tensors):
    return {name: x.detach().clone() for name, x in tensors.items()}


@pytest.fixture
def waits_are_errors():
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "case, packed",
    [(case, False) for case in CASES] + [(case, True) for case in PACKED],
    ids=[f"{case}-batch" for case in CASES] + [f"{case}-packed" for case in PACKED],
)
def test_calls_do_not_synchronise(case, packed, waits_are_errors):
    lengths = [4 * case.chunk, 0, 2 * case.chunk] if packed else None
    inputs = case.draw(9, lengths=lengths, resumed=case.has_state, dtype=torch.float32, device="cuda")
    # Bounds and cotangents are created beforehand, because their copy to the device synchronises.
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
    token = tokens.part(0, 1, captured).map_tokens(lambda x, rows: x.clone())
    initial = clone(captured)
    graph, o = capture(lambda: step(token))
    for name, x in initial.items():
        captured[name].copy_(x)
    for t in range(6):
        eager_token = tokens.part(t, t + 1, eager)
        for name, x in token.data.items():
            x.copy_(eager_token.data[name])
        graph.replay()
        assert_within(o, step(eager_token), 1e-6)
        assert_within(captured, eager, 1e-6)


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
@torch.no_grad()
def test_a_failed_launch_is_reported_once(case):
    """Every launch into an invalidated capture fails."""
    inputs = case.draw(64, resumed=case.has_state, calm=True, dtype=torch.float32, device="cuda")
    want = operator(inputs)

    def launch_into_failed_capture():
        with pytest.raises(RuntimeError):  # a capturing stream cannot be synchronised
            torch.cuda.current_stream().synchronize()
        with pytest.raises(RuntimeError):
            operator(inputs)

    with pytest.raises(RuntimeError):
        record(launch_into_failed_capture, torch.cuda.current_stream())
    assert_within(operator(inputs), want, 1e-6)


@pytest.fixture
def set_allow_tf32():
    before = torch.backends.cuda.matmul.allow_tf32

    def allow(choice):
        torch.backends.cuda.matmul.allow_tf32 = choice

    yield allow
    allow(before)


@pytest.mark.parametrize("case", [case for case in ONE_EACH if case.has_state], ids=str)
def test_direct_backward_calls_ignore_allow_tf32(case, set_allow_tf32):
    """Called from a thread outside any backward pass, under either setting of allow_tf32."""
    sizes = {"D": 32, "V": 32, "M": 32}
    inputs = case.draw(64, resumed=True, calm=True, dtype=torch.float32, device="cuda", **sizes)
    op, args, options = registered_call(operator, inputs)
    outs = op(*args, **options)
    saved = getattr(torch.ops.girih, f"{case.op}_forward")(*args, **options, save=True)[len(outs) :]
    grads = [torch.ones_like(x) if x is not None and x.is_floating_point() else None for x in outs]
    backward = getattr(torch.ops.girih, f"{case.op}_backward")
    found = []
    for choice in (False, True):
        set_allow_tf32(choice)
        found.append(backward(*grads, *args, *saved, **options))
    for exact, other in zip(*found, strict=True):
        assert exact is other is None or exact.equal(other)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_hundred_runs_give_the_same_bits(case):
    inputs = case.draw(70, resumed=case.has_state, dtype=torch.float32, device="cuda").requiring_grad()
    outs = operator(inputs)
    want = clone(outs), gradients(outs, inputs)
    for _ in range(100):
        outs = operator(inputs)
        assert_within(outs, want[0], 0.0)
        assert_within(gradients(outs, inputs), want[1], 0.0)
