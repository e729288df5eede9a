"""Edge cases of the kernels of short_conv. All cases but the large one are small enough for
compute-sanitizer."""

import pytest
import torch
from girih import ops
from padding import Padded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Around iterations of 2 and 4 tokens, runs of 8 tokens and blocks of 8 runs; none, one, fewer than W - 1
# tokens.
LENGTHS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 63, 64, 65, 255, 257, 511, 513]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# (elements of padding, order of the dimensions in memory from outer to inner), with and without vector loads
LAYOUTS = {
    "packs": (4, (0, 1, 2)),
    "odd": (1, (0, 1, 2)),
    "tokens inside": (4, (0, 2, 1)),
    "batch inside": (3, (2, 1, 0)),
}


def draw(B, T, channels, W, *, dtype, weight_dtype=torch.float32, bias=True, sequences=None, seed=0):
    """x, weight, bias, state and the gradients of y and of the final state, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    N = B if sequences is None else sequences

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    return (
        normal(B, T, channels),
        normal(channels, W, dtype=weight_dtype),
        normal(channels, dtype=weight_dtype) if bias else None,
        normal(N, W - 1, channels),
        normal(B, T, channels),
        normal(N, W - 1, channels),
    )


def run(x, weight, bias, state, dy, dfinal, *, cu_seqlens=None, activation="silu"):
    """y, the final state and the gradients of all inputs."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias, state)]
    present = [t for t in leaves if t is not None]
    state = None if leaves[3] is None else ops.ShortConvState(leaves[3])
    y, (final,) = ops.short_conv(*leaves[:3], activation=activation, state=state, cu_seqlens=cu_seqlens)
    outputs = [(out, grad) for out, grad in ((y, dy), (final, dfinal)) if grad is not None]
    grads = torch.autograd.grad([o for o, _ in outputs], present, [g for _, g in outputs])
    return [y.detach(), final.detach(), *grads]


def assert_accurate_as_aten(found, inputs, **options):
    """The error against float64 is at most twice the ATen form's error at the same dtypes, plus one rounding
    of the result. A gradient that is an fp32 sum over n tokens also errs by about sqrt(n) roundings of a
    term, which depend on its order."""
    exact = run(*(None if t is None else t.double() for t in inputs), **options)
    aten = run(*inputs, **options)
    assert len(found) == len(exact)
    x, _, _, _, dy, _ = inputs
    term = 0 if dy is None or not x.numel() else dy.abs().max() * x.abs().max().clamp(min=1)
    sums = [0, 0, 0] + [torch.finfo(torch.float32).eps * (x.shape[0] * x.shape[1]) ** 0.5 * term] * 2 + [0]
    if inputs[2] is None:
        del sums[4]
    for got, rounded, want, order in zip(found, aten, exact, sums[: len(found)], strict=True):
        assert got.dtype == rounded.dtype and got.shape == want.shape
        if want.numel():
            error = (got.cpu().double() - want).abs().max()
            rounding = torch.finfo(got.dtype).eps * want.abs().max()
            assert error <= 2 * (rounded.double() - want).abs().max() + rounding + order


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("W", [1, 2, 3, 4])
def test_every_length_and_width(T, W):
    dtype = DTYPES[(T + W) % 3]
    inputs = draw(2, T, 36, W, dtype=dtype, bias=W % 2 == 0, seed=T)
    pad = Padded(*LAYOUTS["packs"])
    found = run(*map(pad, inputs), activation="silu" if T % 2 else None)
    assert_accurate_as_aten(found, inputs, activation="silu" if T % 2 else None)
    pad.assert_untouched()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [1, 3, 4, 127, 128, 132])
def test_every_layout_and_dtype(layout, dtype, channels):
    inputs = draw(3, 37, channels, 4, dtype=dtype)
    pad = Padded(*LAYOUTS[layout])
    assert_accurate_as_aten(run(*map(pad, inputs)), inputs)
    pad.assert_untouched()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_runs_of_many_turns(packed, dtype):
    # A run is as long as one wave of blocks requires: 8 tokens, except for many tokens.
    if packed:
        inputs = draw(1, 140_000, 4, 4, dtype=dtype, sequences=1001)
        cu_seqlens = (torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 140_000).sort()[0].long()
        cu_seqlens = torch.cat([torch.zeros(1).long(), cu_seqlens, torch.full((1,), 140_000)])
    else:
        inputs, cu_seqlens = draw(2200, 61, 4, 4, dtype=dtype), None
    cuda = None if cu_seqlens is None else cu_seqlens.cuda()
    assert_accurate_as_aten(run(*(t.cuda() for t in inputs), cu_seqlens=cuda), inputs, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("weight_dtype", [torch.float64, *DTYPES], ids=str)
def test_weights_of_any_dtype(weight_dtype):
    inputs = draw(2, 33, 8, 3, dtype=torch.bfloat16, weight_dtype=weight_dtype)
    assert_accurate_as_aten(run(*(t.cuda() for t in inputs)), inputs)


@pytest.mark.parametrize("absent", ["state", "dy", "dfinal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_absent_parts_are_zero(absent, dtype):
    inputs = list(draw(2, 33, 8, 4, dtype=dtype))
    inputs[{"state": 3, "dy": 4, "dfinal": 5}[absent]] = None
    assert_accurate_as_aten(run(*(None if t is None else t.cuda() for t in inputs)), inputs)


def test_expanded_gradients():
    *inputs, _, _ = draw(2, 33, 8, 4, dtype=torch.float32)
    ones, none = torch.ones(()), torch.zeros(())
    grads = [ones.expand(2, 33, 8), none.expand(2, 3, 8)]
    found = run(*(t.cuda() for t in inputs), *(ones.cuda().expand(2, 33, 8), none.cuda().expand(2, 3, 8)))
    assert_accurate_as_aten(found, [*inputs, *grads])


@pytest.mark.parametrize(
    "bounds", [[0, 70], [0, 1, 1, 3, 16, 17, 49, 70, 70], [0, 0, 32, 64, 70], [5, 9, 41, 60]], ids=str
)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", ["packs", "tokens inside"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_sequences(bounds, index, layout, dtype):
    inputs = draw(1, 70, 8, 4, dtype=dtype, sequences=len(bounds) - 1)
    cu_seqlens = torch.tensor(bounds, dtype=index)
    pad = Padded(*LAYOUTS[layout])
    found = run(*map(pad, inputs), cu_seqlens=cu_seqlens.cuda())
    assert_accurate_as_aten(found, inputs, cu_seqlens=cu_seqlens)
    pad.assert_untouched()


@pytest.mark.parametrize(
    "bounds", [[0, 99, -5, 20], [40, 30, 20, 10], [-7, -2, 1, 2**31 - 1], [7, 7, 7, 7]], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_invalid_bounds_access_no_memory_outside(bounds, dtype):
    inputs = draw(1, 40, 8, 4, dtype=dtype, sequences=3)
    pad = Padded(*LAYOUTS["packs"])
    found = run(*map(pad, inputs), cu_seqlens=torch.tensor(bounds, device="cuda"))
    assert all(t.isfinite().all() for t in found)
    pad.assert_untouched()


@pytest.mark.parametrize("packed", [False, True])
def test_a_hundred_runs_have_the_same_bits(packed):
    inputs = [
        t.cuda()
        for t in draw(1 if packed else 3, 700, 132, 4, dtype=torch.bfloat16, sequences=4 if packed else None)
    ]
    cu_seqlens = torch.tensor([0, 3, 300, 301, 700], device="cuda") if packed else None
    first = run(*inputs, cu_seqlens=cu_seqlens)
    for _ in range(100):
        assert all(map(torch.equal, run(*inputs, cu_seqlens=cu_seqlens), first))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("W", [1, 2, 3, 4])
@pytest.mark.parametrize("bias, activation", [(True, "silu"), (False, "silu"), (True, None), (False, None)])
def test_a_step_equals_a_forward_of_one_token(layout, dtype, W, bias, activation):
    pad = Padded(*LAYOUTS[layout])
    assert_step_is_the_forward(pad, draw(3, 1, 36, W, dtype=dtype, bias=bias), activation)


@pytest.mark.parametrize("weight_dtype", [torch.float64, *DTYPES], ids=str)
@pytest.mark.parametrize("channels", [1, 3, 4, 508, 1028])
def test_a_step_of_any_weights_and_channels(channels, weight_dtype):
    inputs = draw(5, 1, channels, 4, dtype=torch.bfloat16, weight_dtype=weight_dtype)
    assert_step_is_the_forward(Padded(*LAYOUTS["packs"]), inputs, "silu")


def assert_step_is_the_forward(pad, inputs, activation):
    x, weight, bias, state = map(pad, inputs[:4])
    y, (final,) = ops.short_conv(x, weight, bias, activation=activation, state=ops.ShortConvState(state))
    found = ops.short_conv_step(x, weight, bias, activation=activation, state=ops.ShortConvState(state))
    assert torch.equal(found, y) and torch.equal(state, final)
    pad.assert_untouched(written=[state])


def test_steps_replayed_from_a_cuda_graph():
    x, weight, bias, start, *_ = (t.cuda() for t in draw(2, 9, 8, 4, dtype=torch.bfloat16))
    want, (final,) = ops.short_conv(x, weight, bias, state=ops.ShortConvState(start))
    state, token = ops.ShortConvState(start.clone()), x[:, :1].clone()
    ops.short_conv_step(token, weight, bias, state=ops.ShortConvState(start.clone()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.short_conv_step(token, weight, bias, state=state)
    for t in range(9):
        token.copy_(x[:, t : t + 1])
        graph.replay()
        assert torch.equal(y, want[:, t : t + 1])
    assert torch.equal(state.x, final)


def test_float64_takes_the_aten_form():
    inputs = [t.double() for t in draw(2, 17, 8, 4, dtype=torch.float32)]
    for got, want in zip(run(*(t.cuda() for t in inputs)), run(*inputs), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-12, atol=1e-12)


@pytest.mark.large
def test_more_than_2_31_elements():
    T, channels = 2**21 + 40, 1024
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free device memory")
    x = torch.zeros(1, T, channels, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(channels, 4, device="cuda")
    x[:, -60:] = torch.randn(60, channels, dtype=torch.bfloat16, device="cuda")
    dy = torch.zeros_like(x)
    dy[:, -60:] = torch.randn(60, channels, dtype=torch.bfloat16, device="cuda")
    y, last, dx, dweight = run(x, weight, None, None, dy, None)
    tail_y, tail_last, tail_dx, tail_dweight = run(x[:, -70:], weight, None, None, dy[:, -70:], None)
    assert torch.equal(y[:, -60:], tail_y[:, -60:]) and not y[:, :-70].any()
    assert torch.equal(last, tail_last)
    assert torch.equal(dx[:, -60:], tail_dx[:, -60:]) and not dx[:, :-70].any()
    torch.testing.assert_close(dweight, tail_dweight, rtol=1e-5, atol=1e-4)
