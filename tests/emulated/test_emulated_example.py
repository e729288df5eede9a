"""The kernel of docs/writing-a-kernel.md on the emulator against the recurrence in float64."""

import ctypes
import itertools
import re
from pathlib import Path

import pytest
import torch
from emulated import NUMBER, POINTER, Array, guarded_copy, guarded_nan, load_kernels, needs_headers, structure
from recurrences import gla

pytestmark = needs_headers
PAGE = Path(__file__).parents[2] / "docs" / "writing-a-kernel.md"

Call = structure(
    *((NUMBER, "batch tokens sequences"), (POINTER, "cu_seqlens"), (NUMBER, "heads D V")),
    *((ctypes.c_double, "scale"), (Array, "q k v initial final o")),
)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    code = "\n".join(re.findall(r"```cpp\n(.*?)```", PAGE.read_text(), re.DOTALL))
    return load_kernels(tmp_path_factory, "example", sizes=(), headers={"example_kernel.h": code})


def run(kernel, q, k, v, scale, state=None, cu_seqlens=None):
    (B, T, H, D), V = q.shape, v.shape[-1]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    q, k, v, state = map(guarded_copy, (q, k, v, state))
    o, final = guarded_nan(B, T, H, V, dtype=torch.bfloat16), guarded_nan(N, H, D, V)
    starts = None if cu_seqlens is None else cu_seqlens.data_ptr()
    arrays = map(Array.of, (q, k, v, state, final, o))
    kernel.run(ctypes.byref(Call(B, T, N, starts, H, D, V, scale, *arrays)))
    return o, final


def assert_close(actual, expected):
    assert (actual.double() - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.parametrize("T", [1, 64, 65, 400])
@pytest.mark.parametrize("D, V", [(64, 64), (40, 24)])
def test_the_example_of_the_page(kernel, T, D, V):
    generator = torch.Generator().manual_seed(T)
    B, H = 2, 2
    q, k, v = (
        torch.randn(B, T, H, width, generator=generator).bfloat16() * width**-0.5 for width in (D, D, V)
    )
    state = torch.randn(B, H, D, V, generator=generator)
    o, final = run(kernel, q, k, v, 0.5, state)
    expected = gla(*(x.double() for x in (q, k, v)), scale=0.5, state=(state.double(),))
    assert_close(o, expected[0]), assert_close(final, expected[1][0])


def test_packed_sequences(kernel):
    q, k, v = (
        torch.randn(1, 200, 1, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3)
    )
    starts = [0, 70, 70, 200]
    o, final = run(kernel, q, k, v, 1.0, cu_seqlens=torch.tensor(starts))
    for n, (start, end) in enumerate(itertools.pairwise(starts)):
        part = [x[:, start:end].double() for x in (q, k, v)]
        expected = gla(*part, scale=1.0)
        assert_close(final[n : n + 1], expected[1][0])
        if end > start:
            assert_close(o[:, start:end], expected[0])
