"""Comparison of results by name."""

import torch


def assert_within(got, want, tolerance):
    """Every tensor of `got` is within `tolerance` of the tensor of the same name in `want`.

    The tolerance is relative to the largest entry of the expected tensor, and absolute below 1. Accepts two
    tensors or two dicts of tensors with the same names. Integers and infinities must be equal.
    """
    if isinstance(want, torch.Tensor):
        got, want = {"result": got}, {"result": want}
    assert got.keys() == want.keys()
    for name, expected in want.items():
        result = got[name].detach()
        expected = expected.detach().to(result.device)
        assert result.shape == expected.shape, (
            f"{name}: shape {list(result.shape)}, not {list(expected.shape)}"
        )
        if not expected.is_floating_point():
            assert torch.equal(result, expected), f"{name}: {result.tolist()}, not {expected.tolist()}"
            continue
        result, expected = result.double(), expected.double()
        finite = expected.isfinite()
        assert torch.equal(result[~finite], expected[~finite]), f"{name}: infinities differ"
        error, scale = (result - expected)[finite].abs(), expected[finite].abs()
        if error.numel():
            worst, bound = error.max().item(), tolerance * max(1.0, scale.max().item())
            assert worst <= bound, f"{name}: off by {worst:.3g}, allowed {bound:.3g}"
