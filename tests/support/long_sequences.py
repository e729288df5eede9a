"""Sequences whose tensors have more than 2^31 elements."""

from dataclasses import replace

import pytest
import torch
from kernel_accuracy import DEVICE, run


def assert_same_at_the_end(inputs, T, gibibytes):
    """The last tokens give the same results when zeros precede them, for T tokens in total, and the zeros get
    zero outputs and gradients. Skips without `gibibytes` GiB of free memory."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes} GiB of free device memory")
    tail = inputs.grads["o"].shape[1]

    def long(x):
        whole = torch.zeros(x.shape[0], T, *x.shape[2:], dtype=x.dtype, device=DEVICE)
        whole[:, -tail:] = x
        return whole

    data = {name: long(x) for name, x in inputs.data.items()}
    want = run(inputs)
    found = run(replace(inputs, data=data, grads=inputs.grads | {"o": long(inputs.grads["o"])}))
    token_results = {"o"} | {f"d{name}" for name in inputs.data}
    for name, x in want.items():
        got = found[name][:, -tail:] if name in token_results else found[name]
        torch.testing.assert_close(got, x, rtol=2e-2, atol=2e-2 * x.abs().max().item())
        if name in token_results:
            assert not found[name][:, :-tail].any()
