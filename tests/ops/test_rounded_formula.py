"""In float64 the rounded formula equals the operator."""

import pytest
import rounded_chunks
import rounded_formula
from cases import CASES, arguments, cotangents, gradients, operator, outputs, with_any_first_memories
from comparison import assert_within
from recurrences import unit_columns

SCANS = [case for case in CASES if case.op in ("gsa", "gla", "delta_product")]
CHUNKS = [
    case for case in CASES if case.op in ("trellis", "ttt") or (case.op == "lattice" and case.chunk > 1)
]


@pytest.mark.parametrize("lengths", [None, [70, 0, 63, 1]], ids=["batch", "packed"])
@pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])
@pytest.mark.parametrize("case", SCANS + CHUNKS, ids=str)
def test_formula_equals_operator_in_float64(case, resumed, lengths):
    inputs = case.draw(131, lengths=lengths, resumed=resumed).requiring_grad()
    keywords = {"g": None, **arguments(inputs)} if case.op != "gsa" else arguments(inputs)
    keywords = {"state": None, "cu_seqlens": None} | keywords
    if case.memory and not resumed:
        N = inputs.data["q"].shape[0] if lengths is None else len(lengths)
        first = [A.expand(N, *A.shape[-3:]) for A in inputs.leaves.values()]
        first_memories = {"trellis": lambda: tuple(first), "ttt": lambda: first[0]}
        keywords["state"] = first_memories.get(case.op, lambda: unit_columns(first[0]))()
    formula = getattr(rounded_formula if case in SCANS else rounded_chunks, case.op)
    found = outputs(case, formula(**keywords))
    want = operator(inputs)
    assert_within(found, want, 1e-9)
    grads = cotangents(want)
    assert_within(gradients(found, inputs, grads), gradients(want, inputs, grads), 1e-7)


@pytest.mark.parametrize("T", [1, 40, 131])
@pytest.mark.parametrize(
    "case", [case for case in CHUNKS if case.op != "lattice" and case.chunk == 1], ids=str
)
def test_formula_ignores_first_memories_at_chunk_1(case, T):
    inputs = with_any_first_memories(case.draw(T, resumed=True).requiring_grad())
    found = outputs(case, getattr(rounded_chunks, case.op)(**arguments(inputs)))
    want = operator(inputs)
    assert_within(found, want, 1e-9)
    grads = cotangents(want)
    assert_within(gradients(found, inputs, grads), gradients(want, inputs, grads), 1e-7)
