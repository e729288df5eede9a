"""Edge cases of tokens, gates and integer arguments."""

import math
from dataclasses import replace

import pytest
import torch
from cases import (
    CASES,
    ONE_EACH,
    PACKED,
    RECURRENT,
    cotangents,
    gradients,
    operator,
    precision,
    recurrence,
    step,
    with_any_first_memories,
)
from comparison import assert_within
from draws import STRUCTURES
from girih import ops

# ---- gates that close ----------------------------------------------------------------------------------

GATED = [case for case in RECURRENT if "g" in case.data]


@pytest.mark.parametrize("shut", [-1e8, -math.inf], ids=str)
@pytest.mark.parametrize("case", GATED, ids=str)
def test_a_closed_gate_in_mid_chunk_loses_no_precision(case, shut, device):
    """Later tokens decay by their own gates. A difference of two gate sums across the closed gate loses
    precision."""
    # Wide enough that no key is nearly parallel to a column, which loses precision in lattice.
    inputs = case.draw(13, calm=True, dtype=torch.float32, device=device, D=8, V=8, M=8)
    inputs.data["g"][:, 6] = shut
    inputs = inputs.requiring_grad()
    exact = inputs.map(lambda x: x.detach().double()).requiring_grad()
    outs, want = operator(inputs), recurrence(exact)
    assert_within(outs, want, 1e-4)
    grads = cotangents(outs)
    found = gradients(outs, inputs, grads)
    assert all(x.isfinite().all() for x in found.values())
    # The recurrence has no gradient for an infinite gate: 0 times infinity.
    want_grads = gradients(want, exact, {name: x.double() for name, x in grads.items()})
    finite = {name: x for name, x in want_grads.items() if x.isfinite().all()}
    assert_within({name: found[name] for name in finite}, finite, 1e-3)


# ---- delta_product: reflections ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("l2norm_qk", [False, True])
def test_repeated_keys_at_beta_2_keep_three_digits(l2norm_qk, n):
    """Every step reflects the memory along the same key, and no later step corrects an error."""
    case = next(c for c in CASES if str(c) == f"delta_product-{'l2' if l2norm_qk else 'plain'}")
    case = replace(case, options=case.options | {"n": n}, sizes={"n": n})
    inputs = case.draw(2000, B=1, H=1, Q=1, D=16, V=16, resumed=True, dtype=torch.float32)
    inputs.data["k"][:] = inputs.data["k"][:, :1]
    inputs.data["beta"].fill_(2)
    outs, want = operator(inputs), recurrence(inputs.map(torch.Tensor.double))
    assert_within(outs, want, 5e-4)


# ---- trellis and ttt: chunks of one token -------------------------------------------------------------

CHUNKS_OF_ONE = [case for case in CASES if case.op in ("trellis", "ttt") and case.chunk == 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [[0], [1], [40], [131], [70, 0, 61]], ids=str)
@pytest.mark.parametrize("case", CHUNKS_OF_ONE, ids=str)
def test_first_memories_have_no_effect_at_chunk_1(case, lengths, dtype, device):
    packed = lengths if len(lengths) > 1 else None
    tied = case.draw(sum(lengths), lengths=packed, resumed=True, dtype=dtype, device=device).requiring_grad()
    free = with_any_first_memories(tied)
    outs, want = operator(free), operator(tied)
    assert all(torch.equal(outs[name], x) for name, x in want.items())
    grads = cotangents(want)
    found, want_grads = gradients(outs, free, grads), gradients(want, tied, grads)
    assert all(torch.equal(found[name], x) for name, x in want_grads.items())
    assert not any(x.any() for name, x in found.items() if name.startswith("state_first_"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CHUNKS_OF_ONE, ids=str)
@torch.no_grad()
def test_a_step_at_chunk_1_ignores_first_memories(case, dtype, device):
    free = with_any_first_memories(case.draw(1, resumed=True, dtype=dtype, device=device))
    firsts = {f"first_{x}": free.state_fields[x] for x in "kv" if x in free.state_fields}
    tied = replace(free, state_fields={name: x.clone() for name, x in (free.state_fields | firsts).items()})
    assert torch.equal(step(free), step(tied))
    assert all(torch.equal(free.state_fields[name], x) for name, x in tied.state_fields.items())


# ---- lattice: repeated tokens --------------------------------------------------------------------------


def draw_structured(structure, objective, gate, chunk, dtype, D=32, M=32, size=1.0):
    generator = torch.Generator().manual_seed(0)
    T = 2 * chunk + chunk // 2

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def unit(x, dim=-1):
        return x / x.norm(dim=dim, keepdim=True)

    k, v = (STRUCTURES[structure](draw(2, T, 1, width)) for width in (M, D))
    k, v = unit(k), unit(v) if objective == "encode" else size * v
    leaves = {
        "q": draw(2, T, 1, M),
        "k": k,
        "v": v,
        "gamma": torch.rand(2, T, 1, generator=generator, dtype=torch.float64) / chunk,
        "g": gate * torch.rand(2, T, 1, generator=generator, dtype=torch.float64) * 2,
    }
    full_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {name: x.to(full_dtype if name in ("gamma", "g") else dtype) for name, x in leaves.items()}
    leaves["state"] = unit(draw(1, D, M), -2).to(full_dtype)
    return {name: x.contiguous().requires_grad_() for name, x in leaves.items()}


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("objective", ["decode", "encode", "similarity"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_lattice_reads_are_bounded(structure, objective, chunk):
    """A read of unit columns cannot exceed sum |q| even after cancellation; rounding may reach a small
    multiple."""
    for gate in (0.0, -0.5, -1.0, -2.5, -5.0, -20.0, -60.0):
        for dtype, widths in ((torch.float32, (32, 32)), (torch.bfloat16, (32, 16)), (torch.float32, (2, 4))):
            D, M = widths
            leaves = draw_structured(structure, objective, gate, chunk, dtype, D=D, M=M)
            o, after = ops.lattice(**leaves, chunk=chunk, objective=objective)
            label = f"gates of mean {gate}, {dtype}, D = {D}"
            ratio = (o.abs().amax(-1) / leaves["q"].abs().sum(-1)).max().item()
            assert ratio <= 10, f"{label}: {ratio:.2g} sum |q|"
            torch.testing.assert_close(after.first.norm(dim=-2), torch.ones(2, 1, M))
            for name, x in zip(leaves, torch.autograd.grad(o.sum(), list(leaves.values())), strict=True):
                assert x.isfinite().all(), f"{label}: the gradient of {name}"


def test_lattice_columns_of_one_entry_do_not_move():
    """In one dimension the tangent space is empty: a step is 0 up to rounding, and closed gates clear the
    column."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 64, 1, 1, generator=generator).requires_grad_() for _ in range(3))
    gamma, first = torch.rand(1, 64, 1, generator=generator) / 4, torch.ones(1, 1, 1)
    for objective in ops.words("lattice", "objective"):
        for chunk in (1, 4):
            g = torch.full((1, 64, 1), -math.inf)
            o, after = ops.lattice(q, k, v, gamma, g, chunk=chunk, objective=objective, state=first)
            assert after.first.abs().equal(torch.ones(1, 1, 1, 1)), objective
            assert all(x.isfinite().all() for x in torch.autograd.grad(o.sum(), (q, k, v), allow_unused=True))


def test_a_lattice_column_that_becomes_zero_keeps_its_value():
    """A column that becomes 0, here by shrinkage at C = 1, keeps its previous value."""
    first = torch.eye(2)[None, :, :1].contiguous()  # s = (1, 0)
    v = torch.tensor([-1.0, 0.0]).view(1, 1, 1, 2)
    k, gamma = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), 0.5)
    call = {"chunk": 1, "objective": "similarity", "shrinkage": 1e9}
    o, after = ops.lattice(k, k, v, gamma, state=first.requires_grad_(), **call)
    assert after.first[0].equal(first)
    assert torch.autograd.grad(o.sum(), first)[0].isfinite().all()


@pytest.mark.parametrize("objective", ["decode", "encode", "similarity"])
@pytest.mark.parametrize("chunk", [1, 4])
def test_gradients_of_lattice_first_memories_are_tangent(objective, chunk, device):
    """The gradient of the recurrence without its component along the columns."""
    case = next(c for c in CASES if str(c) == "lattice-decode_c4_g")
    case = replace(case, options={"chunk": chunk, "objective": objective})
    dtype, _, tolerance = precision(case, device)
    inputs = case.draw(9, dtype=dtype, device=device)
    S = inputs.state
    weights = torch.randn(2, 9, 2, case.sizes.get("D", 3), dtype=dtype).to(device)

    def gradient(function, S, data):
        S = S.detach().requires_grad_()
        o, _ = function(**data, **case.options, state=S)
        return torch.autograd.grad(o, S, weights.to(o))[0]

    import recurrences

    found = gradient(ops.lattice, S, inputs.data)
    raw = gradient(recurrences.lattice, S, inputs.data)
    assert (S * raw).sum(-2).abs().max() > 1e-3
    assert_within(found, raw - S * (S * raw).sum(-2, keepdim=True), tolerance)


# ---- cat_attention: more than one block of rows ----------------------------------------------------------


@pytest.mark.parametrize("lengths", [None, [24, 0, 480, 16]], ids=["whole", "packed"])
def test_cat_attention_over_many_rows(lengths, device):
    """Rows are processed 512 at a time, so a header's gradient sums over several blocks. Rows after the last
    packed sequence are 0."""
    case = next(c for c in CASES if str(c) == "cat_attention-c4")
    case = replace(case, options={"chunk": 8})
    T, device_of = 560, device
    dtype, tolerance, grad_tolerance = precision(case, device_of)
    inputs = case.draw(T, B=1, D=2, V=2, dtype=dtype, device=device_of).requiring_grad()
    exact = inputs.map(lambda x: x.detach().double()).requiring_grad()
    if lengths is None:
        outs, want = operator(inputs), recurrence(exact)
    else:
        cu = torch.tensor([0, *lengths], device=device_of).cumsum(0) // 8
        outs = operator(inputs, cu_chunks=cu)
        used = sum(lengths)
        want = recurrence(replace(exact.part(0, used), lengths=lengths))
        want = {"o": torch.cat([want["o"], want["o"].new_zeros(1, T - used, *want["o"].shape[2:])], 1)}
    assert_within(outs, want, tolerance)
    grads = cotangents(outs)
    want_grads = gradients(want, exact, {name: x.double() for name, x in grads.items()})
    assert_within(gradients(outs, inputs, grads), want_grads, grad_tolerance)


@pytest.mark.parametrize("case", [c for c in CASES if c.op == "cat_attention"], ids=str)
def test_chunks_outside_all_sequences_give_zeros(case, device):
    """Rows outside all sequences are 0, and so are their gradients."""
    dtype, tolerance, grad_tolerance = precision(case, device)
    C = case.chunk
    inputs = case.draw(6 * C - 1, B=1, dtype=dtype, device=device).requiring_grad()
    outs = operator(inputs, cu_chunks=torch.tensor([1, 3, 4], device=device))
    inner = inputs.part(C, 4 * C)
    want = operator(inner, cu_chunks=torch.tensor([0, 2, 3], device=device))
    outside = torch.ones(6 * C - 1, dtype=torch.bool, device=device)
    outside[C : 4 * C] = False
    assert not outs["o"][:, outside].any()
    assert_within(outs["o"][:, ~outside], want["o"], tolerance)
    grads = cotangents(outs)
    found = gradients(outs, inputs, grads)
    assert not any(x[:, outside].any() for x in found.values())
    want_grads = gradients(want, inputs, {"o": grads["o"][:, ~outside]})
    assert_within(found, want_grads, grad_tolerance)


# ---- Meta --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resumed", [False, True], ids=["start", "resumed"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_meta_results_have_the_dtypes_and_shapes_of_the_cpu(case, resumed):
    """Includes bf16, where states are fp32."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        inputs = case.draw(5, resumed=resumed and case.has_state, dtype=dtype)
        on_meta = inputs.map(lambda x: x.to("meta"))
        if inputs.position is not None:
            on_meta = replace(on_meta, position=inputs.position.to("meta"))
        found, want = operator(on_meta), operator(inputs)
        assert {n: (x.dtype, x.shape) for n, x in found.items()} == {
            n: (x.dtype, x.shape) for n, x in want.items()
        }


# ---- values of integer arguments ---------------------------------------------------------------------------

BAD_BOUNDS = [[0, 99, 5, 6], [-1, 3, 4, 6], [0, 3, 2, 6], [0, 1, 2, 99]]


@pytest.mark.parametrize("case", PACKED, ids=str)
@pytest.mark.parametrize("bad", BAD_BOUNDS, ids=str)
def test_the_cpu_refuses_invalid_bounds(case, bad):
    inputs = case.draw(0, lengths=[2 * case.chunk] * 3, resumed=case.has_state, dtype=torch.float32)
    for dtype in (torch.int32, torch.int64):
        with pytest.raises(ValueError, match=f"^girih.{case.op}: {case.packing} holds"):
            operator(inputs, **{case.packing: torch.tensor(bad, dtype=dtype)})


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_the_cpu_refuses_a_bound_beyond_the_end(case):
    """The last chunk of cat_attention may be partial."""
    C = case.chunk if case.op == "cat_attention" else 1
    inputs = case.draw(3 * C - (C > 1), B=1, resumed=case.has_state, N=2, dtype=torch.float32)
    operator(inputs, **{case.packing: torch.tensor([0, 2, 3])})
    with pytest.raises(ValueError, match=f"^girih.{case.op}: {case.packing} holds 4 .* should be 0 to 3"):
        operator(inputs, **{case.packing: torch.tensor([0, 2, 4])})


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_the_cpu_refuses_invalid_bounds_of_rows(case):
    inputs = case.draw(6, resumed=True, dtype=torch.float32)
    for bad in ([[0, 6], [4, 3]], [[0, 7], [0, 6]], [[-1, 6], [0, 6]]):
        with pytest.raises(ValueError, match="cu_seqlens holds"):
            operator(inputs, cu_seqlens=torch.tensor(bad))
    operator(inputs, cu_seqlens=torch.tensor([[5, 6], [0, 0]]))


@pytest.mark.parametrize("case", [case for case in RECURRENT if "position" in case.state], ids=str)
def test_the_cpu_refuses_a_position_outside_the_chunk(case):
    for T in (9, 1):
        inputs = case.draw(T, resumed=True, dtype=torch.float32)
        for bad in ([0, case.chunk], [-1, 0]):
            with pytest.raises(
                ValueError, match=f"^girih.{case.op}: state_position holds {bad[bad[0] == 0]}"
            ):
                operator(replace(inputs, state_fields=inputs.state | {"position": torch.tensor(bad)}))


@pytest.mark.parametrize("case", [c for c in ONE_EACH if c in PACKED and c.has_state], ids=str)
def test_tokens_outside_all_sequences_give_zeros(case, device):
    """The first bound may be greater than 0 and the last bound less than T."""
    dtype, tolerance, _ = precision(case, device)
    inputs = case.draw(9, B=1, N=2, resumed=True, dtype=dtype, device=device)
    state = {name: x.expand(2, *x.shape[1:]) if x.shape[0] == 1 else x for name, x in inputs.state.items()}
    outs = operator(replace(inputs, state_fields=state), cu_seqlens=torch.tensor([2, 5, 7], device=device))
    inner = replace(inputs.part(2, 7), state_fields=state)
    want = operator(inner, cu_seqlens=torch.tensor([0, 3, 5], device=device))
    want["o"] = torch.cat([outs["o"].new_zeros(1, 2, *want["o"].shape[2:]), want["o"]], 1)
    want["o"] = torch.cat([want["o"], outs["o"].new_zeros(1, 2, *want["o"].shape[2:])], 1)
    assert_within(outs, want, tolerance)
