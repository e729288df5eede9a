"""The steps of lattice, trellis and ttt, emulated on the CPU (tests/emulated), token by token against the
recurrence.
"""

import ctypes

import pytest
import recurrences
import torch
import torch.nn.functional as F
from emulated import (
    NUMBER,
    POINTER,
    SHARED,
    Array,
    assert_near,
    assert_padding_unwritten,
    guarded_copy,
    guarded_nan,
    load_kernels,
    nan_padded_copy,
    needs_headers,
    structure,
)
from test_emulated_lattice_fp32 import OBJECTIVES
from test_emulated_trellis import MAPS

pytestmark = needs_headers

LatticeCall = structure(
    (NUMBER, "shared sequences heads query_heads D M chunk objective"),
    (Array, "q k v gamma g memory step decay o"),
    (POINTER, "position next_position"),
)
TrellisCall = structure(
    (NUMBER, "memory_count sequences heads query_heads D V M chunk silu norm f_silu f_norm"),
    (Array, "q k v a weight gamma g"),
    (Array * 2, "first memory"),
    (Array, "o"),
    (POINTER, "position"),
)


@pytest.fixture(scope="module")
def lattice(tmp_path_factory):
    return load_kernels(tmp_path_factory, "lattice")


@pytest.fixture(scope="module")
def trellis(tmp_path_factory):
    return load_kernels(tmp_path_factory, "trellis")


def to_double(tensors):
    return {name: None if x is None else x.double() for name, x in tensors.items()}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    "place, shared, D, M",
    [
        (guarded_copy, SHARED, 20, 24),
        (guarded_copy, 4000, 20, 24),
        (nan_padded_copy, SHARED, 20, 24),
        (guarded_copy, SHARED, 9, 37),
    ],
    ids=["held", "not_held", "strided", "odd"],
)
@pytest.mark.parametrize("chunk, gated, group", [(1, True, 1), (3, True, 2), (3, False, 1)])
def test_lattice(lattice, objective, place, shared, D, M, chunk, gated, group):
    generator = torch.Generator().manual_seed(D + M + chunk)
    N, T, H = 2, 5, 2
    HQ = H * group

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    tokens = {"q": normal(N, T, HQ, M), "k": F.normalize(normal(N, T, H, M), dim=-1)}
    tokens |= {"v": F.normalize(normal(N, T, H, D), dim=-1), "gamma": 0.5 * normal(N, T, H).abs()}
    tokens |= {"g": -0.3 * normal(N, T, H).abs()} if gated else {}
    S = F.normalize(normal(N, H, D, M), dim=2)
    state = {"memory": place(S), "step": None, "decay": None}
    position, start = torch.zeros(N, dtype=torch.int64), S.double()
    if chunk > 1:
        step = 0.1 * normal(N, H, D, M)
        step -= S * (S * step).sum(2, keepdim=True)
        decay = -normal(N, H).abs() if gated else None
        position = torch.tensor([1, 2])
        start = (S.double(), step.double(), None if decay is None else decay.double(), position)
        state |= {"step": place(step), "decay": None if decay is None else place(decay)}
    how = {"chunk": chunk, "objective": objective}
    want, final = recurrences.lattice(**to_double(tokens), **how, state=start)

    for t in range(T):
        token = {name: place(x[:, t]) for name, x in tokens.items()}
        o = place(torch.full((N, HQ, D), torch.nan))
        positions, following = guarded_copy(position), guarded_nan(N, dtype=torch.int64)
        call = LatticeCall(shared=shared, sequences=N, heads=H, query_heads=HQ, D=D, M=M, chunk=chunk)
        call.objective = OBJECTIVES.index(objective)
        for name, x in (token | state | {"o": o}).items():
            setattr(call, name, Array.of(x))
        if chunk > 1:
            call.position, call.next_position = positions.data_ptr(), following.data_ptr()
        lattice.run_step(ctypes.byref(call))
        assert_near(f"o of token {t}", o, want[:, t], 1e-5)
        if chunk > 1:
            position = (position + 1) % chunk
            assert following.tolist() == position.tolist()
    for (name, x), expected in zip(state.items(), final[:3], strict=True):
        if x is not None:
            assert_near(name, x, expected, 1e-5)
            if place is nan_padded_copy:
                assert_padding_unwritten(name, x)


@pytest.mark.parametrize("phi", MAPS)
@pytest.mark.parametrize("f", ["ln_silu", "softmax", "identity"])
@pytest.mark.parametrize("place, V", [(guarded_copy, 36), (nan_padded_copy, 37)], ids=["packs", "strided"])
@pytest.mark.parametrize("chunk, gated, group", [(1, True, 1), (3, True, 2), (3, False, 1)])
def test_trellis(trellis, phi, f, place, V, chunk, gated, group):
    """An odd number of slots must not misalign vectors of 4."""
    generator = torch.Generator().manual_seed(chunk)
    N, T, H, D, M = 2, 5, 2, 20, 17
    HQ, widths = H * group, (D, V)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def unit(*shape):
        return F.normalize(normal(*shape), dim=-1)

    tokens = {"q": normal(N, T, HQ, D), "k": unit(N, T, H, D), "v": unit(N, T, H, V)}
    tokens |= {"a": normal(N, T, H, M), "gamma": 0.3 * torch.rand(N, T, H, generator=generator)}
    tokens |= {"g": -0.3 * normal(N, T, H).abs()} if gated else {}
    memories = [place(normal(N, H, M, width) * width**-0.5) for width in widths]
    firsts = [place(x + 0.1 * normal(*x.shape)) for x in memories]
    position = torch.tensor([chunk // 2, 0])
    if chunk > 1:
        for x, first in zip(memories, firsts, strict=True):
            first[1] = x[1]  # equal at the start of a chunk
    start = [x.double() for m in (0, 1) for x in (firsts[m], memories[m])]
    how = {"chunk": chunk, "phi": phi, "f": f}
    want, final = recurrences.trellis(**to_double(tokens), **how, state=(*start, position))

    positions = guarded_copy(position)
    for t in range(T):
        token = {name: nan_padded_copy(x[:, t]) for name, x in tokens.items()}
        o = nan_padded_copy(torch.full((N, HQ, V), torch.nan))
        call = TrellisCall(memory_count=2, sequences=N, heads=H, query_heads=HQ, D=D, V=V, M=M, chunk=chunk)
        (call.silu, call.norm), (call.f_silu, call.f_norm) = MAPS[phi], MAPS[f]
        for name, x in (token | {"o": o}).items():
            setattr(call, name, Array.of(x))
        for m in (0, 1):
            call.first[m], call.memory[m] = Array.of(firsts[m]), Array.of(memories[m])
        call.position = positions.data_ptr()
        trellis.run_step(ctypes.byref(call))
        assert_near(f"o of token {t}", o, want[:, t], 1e-5)
        assert positions.tolist() == ((position + t + 1) % chunk).tolist()
    for m in (0, 1):
        for name, x, expected in (("first", firsts, final[2 * m]), ("memory", memories, final[2 * m + 1])):
            assert_near(f"{name} {m}", x[m], expected, 1e-5)
            if place is nan_padded_copy:
                assert_padding_unwritten(f"{name} {m}", x[m])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("phi", MAPS)
@pytest.mark.parametrize("f", ["layer_norm", "softmax", "identity"])
@pytest.mark.parametrize("place, D", [(guarded_copy, 36), (nan_padded_copy, 37)], ids=["packs", "strided"])
@pytest.mark.parametrize("chunk, gated, group", [(1, False, 1), (3, True, 2)])
def test_ttt(trellis, phi, f, weighted, place, D, chunk, gated, group):
    generator = torch.Generator().manual_seed(chunk)
    N, T, H, M = 2, 5, 2, 17
    HQ = H * group

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    tokens = {"q": normal(N, T, HQ, D), "k": F.normalize(normal(N, T, H, D), dim=-1)}
    tokens |= {"a": normal(N, T, H, M), "gamma": 0.3 * torch.rand(N, T, H, generator=generator)}
    tokens |= {"g": -0.3 * normal(N, T, H).abs()} if gated else {}
    weight = {"phi_weight": 1 + 0.25 * normal(H, M)} if weighted else {}
    memory = place(normal(N, H, M, D) * D**-0.5)
    first = place(memory + 0.1 * normal(*memory.shape))
    position = torch.tensor([chunk // 2, 0])
    if chunk > 1:
        first[1] = memory[1]  # equal at the start of a chunk
    start = (first.double(), memory.double(), position)
    how = {"chunk": chunk, "phi": phi, "f": f}
    want, final = recurrences.ttt(**to_double(tokens), **to_double(weight), **how, state=start)

    positions = guarded_copy(position)
    for t in range(T):
        token = {name: nan_padded_copy(x[:, t]) for name, x in tokens.items()}
        token |= {"weight": nan_padded_copy(weight["phi_weight"])} if weighted else {}
        o = nan_padded_copy(torch.full((N, HQ, M), torch.nan))
        call = TrellisCall(memory_count=1, sequences=N, heads=H, query_heads=HQ, D=D, M=M, chunk=chunk)
        (call.silu, call.norm), (call.f_silu, call.f_norm) = MAPS[phi], MAPS[f]
        for name, x in (token | {"o": o}).items():
            setattr(call, name, Array.of(x))
        call.first[0], call.memory[0] = Array.of(first), Array.of(memory)
        call.position = positions.data_ptr()
        trellis.run_step(ctypes.byref(call))
        assert_near(f"o of token {t}", o, want[:, t], 1e-5)
        assert_padding_unwritten(f"o of token {t}", o)
        assert positions.tolist() == ((position + t + 1) % chunk).tolist()
    for name, x, expected in (("first", first, final[0]), ("memory", memory, final[1])):
        assert_near(name, x, expected, 1e-5)
        if place is nan_padded_copy:
            assert_padding_unwritten(name, x)
