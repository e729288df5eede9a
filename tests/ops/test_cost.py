"""Cost is linear in the number of tokens, measured in allocated bytes (independent of the machine's load)."""

import itertools
from dataclasses import replace

import pytest
import torch
from cases import LONG, ONE_EACH, gradients, operator
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile


def allocated_bytes(inputs):
    """Bytes allocated by one forward and backward: the total and the peak."""
    inputs = inputs.requiring_grad()
    gradients(operator(inputs), inputs)  # excludes allocations that are cached after the first call
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as measured:
        gradients(operator(inputs), inputs)
    events = [e for e in measured.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    assert sizes
    return sum(size for size in sizes if size > 0), max(itertools.accumulate(sizes))


def work(case, T):
    """The quantity that the cost is proportional to: tokens, or the visible pairs of cat_attention."""
    return T * (T / case.chunk + case.chunk) if case.op == "cat_attention" else T


@pytest.mark.parametrize("case", LONG, ids=str)
def test_cost_is_linear_in_tokens(case):
    # A chunk-defining form with short chunks runs many small operators, and the profiler is slow for each.
    if case.chunk > 1:
        case = replace(case, options=case.options | {"chunk": 8})
    T = 16 * case.chunk if case.memory else 256
    short, long = (
        allocated_bytes(case.draw(tokens, B=1, calm=True, dtype=torch.float32)) for tokens in (T, 2 * T)
    )
    growth = work(case, 2 * T) / work(case, T)
    assert long[0] <= 1.1 * growth * short[0]
    assert long[1] <= 1.1 * growth * short[1]


def count_peak_states(case, T):
    """Number of states held at the peak: the part of the peak that is quadratic in the width."""
    peaks = []
    for width in (32, 64, 96):
        sizes = {"B": 1, "H": 1, "Q": 1, "D": width, "V": width, "M": width}
        peaks.append(allocated_bytes(case.draw(T, calm=True, dtype=torch.float32, **sizes))[1])
    return (peaks[0] - 2 * peaks[1] + peaks[2]) / (2 * 32 * 32) / 4


@pytest.mark.parametrize("case", [c for c in ONE_EACH if c.has_state and c.op != "short_conv"], ids=str)
def test_states_are_held_per_chunk_not_per_token(case):
    """Per chunk the first state, its gradient and temporary copies of both are held: 6 with two memories. One
    state per four tokens would add 8 in the shortest chunk tested, 32 tokens."""
    if case.chunk > 1:
        case = replace(case, options=case.options | {"chunk": 32})
    tokens = case.chunk if case.chunk > 1 else 64 // case.rows_per_token
    T = 4 * tokens
    more = count_peak_states(case, 2 * T) - count_peak_states(case, T)
    assert 0 < more <= 7 * T / tokens


class Saved:
    """A tensor that autograd saved; `most` is the maximum number of elements saved at once."""

    held = most = 0

    def __init__(self, tensor):
        self.tensor = tensor.detach()
        Saved.held += tensor.numel()
        Saved.most = max(Saved.most, Saved.held)

    def __del__(self):
        Saved.held -= self.tensor.numel()


def count_saved_states(case, T):
    """Number of states that a backward pass holds at its peak: the part that is quadratic in the width."""
    peaks = []
    for width in (16, 32, 48):
        sizes = {"B": 1, "H": 1, "Q": 1, "D": width, "V": width, "M": width}
        inputs = case.draw(T, calm=True, dtype=torch.float32, **sizes).requiring_grad()
        outs = operator(inputs)
        Saved.most = Saved.held
        with saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            gradients(outs, inputs)
        peaks.append(Saved.most)
    return (peaks[0] - 2 * peaks[1] + peaks[2]) / (2 * 16 * 16)


@pytest.mark.parametrize("case", [c for c in ONE_EACH if c.memory], ids=str)
def test_short_chunks_are_recomputed_in_segments_of_64_tokens(case):
    """Between segments of 64 tokens the backward pass holds one state per memory, not one per chunk."""
    case = replace(case, options=case.options | {"chunk": 8})
    segments = 2
    more = count_saved_states(case, 128 + 64 * segments) - count_saved_states(case, 128)
    assert more == len(case.memory) * segments
