import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples on every run: a red run is red again when someone looks.
settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=6,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("ci")

# The tensors are tiny and pytest-xdist runs one worker a core.
torch.set_num_threads(1)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def handlers():
    """A command takes the signals over; a test gives them back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Place(str):
    """A device, and in half precision the dtype of what is drawn there."""

    dtype: torch.dtype | None = None

    def __new__(cls, device: str, dtype: torch.dtype | None = None):
        place = super().__new__(cls, device)
        place.dtype = dtype
        return place


PLACES = {
    "cpu": pytest.param(Place("cpu"), id="cpu"),
    "cuda": pytest.param(Place("cuda"), id="cuda", marks=needs_cuda),
}
HALVES = [
    pytest.param(Place("cuda", dtype), id=f"cuda-{name}", marks=needs_cuda)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
]


def pytest_generate_tests(metafunc):
    """`device`: the CPU and CUDA; where a module says `in_half_precision = True`, CUDA in bf16 and fp16 too,
    where the kernels use the tensor cores."""
    if "device" in metafunc.fixturenames:
        halves = HALVES if getattr(metafunc.module, "in_half_precision", False) else []
        metafunc.parametrize("device", [*PLACES.values(), *halves], scope="session")
