"""Edge cases of the kernel of skinny_gemm, the products of a decoding step. All cases but the large one suit
compute-sanitizer."""

import pytest
import torch
import torch.nn.functional as F
from girih.nn.functional.step import PLAIN, Product, RowInput, apply_gate, has_skinny_gemm, products
from padding import Padded

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = [torch.bfloat16, torch.float16]
GATES = ["linear", "sigmoid", "logsigmoid", "decay"]
KINDS = ["plain", "rms_norm", "silu_rms_norm", "silu_product"]


def draw(rows, width, features, dtype, kind="plain", seed=0):
    """x, the products and the row input, on the CPU; every matrix but the first has a gate."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, to_dtype=dtype):
        return torch.randn(shape, generator=generator).to(to_dtype)

    x = normal(*rows, width)
    matrices = []
    for i, n in enumerate(features):
        gate = GATES[(i - 1) % 4] if i else "none"
        weight = normal(n, width) / width**0.5
        bias = normal(n, to_dtype=torch.float32) if i % 2 else None
        rate = torch.rand(n, generator=generator) if gate == "decay" else None
        matrices.append(Product(weight.to(dtype), gate, bias, rate, (1.0, 2.0, 0.125)[i % 3]))
    other = None if kind == "plain" else normal(*(x.shape if kind == "silu_product" else (width,)))
    return x, matrices, RowInput(kind, other, 1e-3)


def map_tensors(value, f):
    if isinstance(value, torch.Tensor):
        return f(value)
    if isinstance(value, (tuple, list)):
        parts = [map_tensors(part, f) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def formula(x, matrices, row_input, residual, dtype):
    """The products with the roundings of the kernel: of the row input u, and of the result."""

    def rounded(t):
        return t.to(dtype).to(t.dtype)

    if row_input.kind.startswith("silu"):
        x = rounded(F.silu(x))
    if row_input.kind.endswith("rms_norm"):
        x = F.rms_norm(x, x.shape[-1:], row_input.other, row_input.eps)
    elif row_input.kind == "silu_product":
        x = x * row_input.other
    x = rounded(x)
    results = [apply_gate(F.linear(x, p.weight), *p[1:]) for p in matrices]
    return results if residual is None else [results[0] + residual]


@torch.no_grad()
def check(x, matrices, row_input=PLAIN, residual=None):
    """Compared with float64 for the same u: fp32 sums and one rounding of the result."""
    device_arguments = map_tensors((x, matrices, row_input, residual), lambda t: t.to(DEVICE))
    assert has_skinny_gemm(*device_arguments[:3])
    found = products(*device_arguments)
    exact = formula(*map_tensors((x, matrices, row_input, residual), torch.Tensor.double), x.dtype)
    for got, want, product in zip(found, exact, matrices, strict=True):
        assert got.shape == want.shape
        assert got.dtype == (x.dtype if product.gate == "none" else torch.float32)
        # fp32 may round an element of u to the other neighbour: an error of half a unit of the element, of
        # which sums over the width accumulate the square root.
        flips = 0.0 if row_input.kind == "plain" else torch.finfo(x.dtype).eps
        bound = torch.finfo(got.dtype).eps * want.abs() + (flips + 1e-5) * (1 + want.abs().max())
        assert ((got.cpu().double() - want).abs() <= bound).all(), (got.cpu().double() - want).abs().max()
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [8, 24, 32, 40, 256, 264, 1000, 1024, 1032, 2816, 3080, 6144])
def test_every_width(width, kind, dtype):
    check(*draw((2,), width, (24, 8, 1, 9, 17), dtype, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [*range(1, 17)])
def test_every_number_of_rows(rows, kind):
    check(*draw((rows, 1), 520, (40, 16), torch.bfloat16, kind))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "features", [(1,), (7,), (8,), (9,), (64,), (1, 2, 3, 4, 5, 6, 7, 8), (3072, 16, 16, 1024)]
)
def test_every_number_of_features(features, dtype):
    check(*draw((3,), 128, features, dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [64, 2816])
def test_a_residual(width, kind):
    x, matrices, row_input = draw((4, 1), width, (1032,), torch.bfloat16, kind)
    check(x, matrices, row_input, torch.randn(4, 1, 1032, dtype=torch.bfloat16))


def test_the_widest_rows():
    check(*draw((12,), 8192, (16,), torch.bfloat16, "rms_norm"))


@torch.no_grad()
def test_no_access_outside_the_tensors():
    call = draw((3,), 264, (9, 17, 8, 8, 5), torch.bfloat16, "rms_norm")
    padded = Padded(8, (0, 1), 1)
    plain = products(*map_tensors(call, lambda t: t.to(DEVICE)))
    for a, b in zip(plain, products(*map_tensors(call, padded)), strict=True):
        assert torch.equal(a, b)
    padded.assert_untouched()


@torch.no_grad()
def test_the_same_bits_in_every_run_and_in_a_graph():
    call = map_tensors(draw((2,), 1024, (3072, 16, 16), torch.bfloat16, "rms_norm"), lambda t: t.to(DEVICE))
    first = products(*call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = products(*call)
    graph.replay()
    for _ in range(20):
        for a, b, c in zip(first, products(*call), recorded, strict=True):
            assert torch.equal(a, b) and torch.equal(a, c)


def test_invalid_arguments_are_refused():
    x, matrices, _ = map_tensors(draw((2,), 64, (8, 8), torch.bfloat16), lambda t: t.to(DEVICE))

    def call(
        x=x,
        weights=None,
        gates=("none", "linear"),
        biases=(None, None),
        kind="plain",
        other=None,
        residual=None,
        rates=(None, None),
    ):
        weights = [p.weight for p in matrices] if weights is None else weights
        return torch.ops.girih.few_rows(
            x,
            weights,
            list(gates),
            list(biases),
            list(rates),
            [1.0] * len(weights),
            kind,
            other,
            0.0,
            residual,
        )

    call()
    for message, arguments in {
        "x is Float": {"x": x.float()},
        "x has shape": {"x": x.new_zeros(17, 64)},
        "weights, 2 gates": {"weights": [matrices[0].weight]},
        "a weight has shape": {"weights": [matrices[0].weight, matrices[1].weight[:, :32]]},
        "a gate is 'tanh'": {"gates": ("none", "tanh")},
        "a bias is": {"biases": (None, x.new_zeros(8))},
        "expected a rate for": {"gates": ("none", "decay")},
        "input is 'relu'": {"kind": "relu"},
        "other should be": {"kind": "rms_norm"},
        "residual is a tensor": {"residual": x.new_zeros(2, 8)},
    }.items():
        with pytest.raises(RuntimeError, match=message):
            call(**arguments)
    with pytest.raises(RuntimeError, match="aligned"):
        call(weights=[x.new_zeros(8 * 64 + 1)[1:].view(8, 64)] * 2)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2, 64),
        torch.zeros(17, 64, dtype=torch.bfloat16),
        torch.zeros(2, 60, dtype=torch.bfloat16),
        torch.zeros(0, 64, dtype=torch.bfloat16),
        torch.zeros(13, 8192, dtype=torch.bfloat16),
    ],
    ids=lambda x: str(list(x.shape)),
)
@torch.no_grad()
def test_other_calls_use_pytorch(x):
    x = x.to(DEVICE)
    weight = torch.randn(8, x.shape[-1], device=DEVICE).to(x.dtype)
    assert not has_skinny_gemm(x, [Product(weight)])
    assert products(x, [Product(weight)])[0].shape == (len(x), 8)


@pytest.mark.large
@torch.no_grad()
def test_a_matrix_of_more_than_2_31_elements():
    torch.cuda.empty_cache()
    features = 2**31 // 8192 + 9
    x = torch.randn(2, 8192, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(features, 8192, device=DEVICE, dtype=torch.bfloat16)
    (y,) = products(x, [Product(weight)])
    want = torch.cat([F.linear(x.float(), part.float()) for part in weight.split(2**15)], 1)
    torch.testing.assert_close(y.float(), want, rtol=1e-2, atol=1e-1)
