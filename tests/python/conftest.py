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


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def device(request):
    return request.param
