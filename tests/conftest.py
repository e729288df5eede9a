import os
import random
import signal
from pathlib import Path

import pytest
import torch
from girih import _library
from hypothesis import HealthCheck, settings

SUPPORT = Path(__file__).parent / "support"  # shared modules, and programs that tests start

#: The CMake build tree for the running torch: programs, C++ tests.
TREE = Path(__file__).parents[1] / "build" / _library.loaded.name

# Examples are derandomized, so that a failure is reproducible. `make test FULL=1` runs 100 examples a test.
settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=6,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("full", settings.get_profile("ci"), max_examples=100)
settings.load_profile("full" if os.environ.get("GIRIH_FULL") else "ci")

# The tensors are tiny, and pytest-xdist runs one worker per core.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for programs that tests start: more threads would contend for cores

if os.environ.get("GIRIH_SANITIZED"):  # a sanitizer also checks the attention kernels of other libraries
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(False)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def handlers():
    """Restores the signal handlers that a command replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Device(str):
    """A device string with the dtype of the tensors drawn for it, None for the default. Devices that differ
    only in dtype are unequal, so that pytest creates fixtures for each."""

    dtype: torch.dtype | None = None

    def __new__(cls, device: str, dtype: torch.dtype | None = None):
        instance = super().__new__(cls, device)
        instance.dtype = dtype
        return instance

    def __eq__(self, other):
        return str.__eq__(self, other) and getattr(other, "dtype", self.dtype) == self.dtype

    __hash__ = str.__hash__


DEVICES = {
    "cpu": pytest.param(Device("cpu"), id="cpu"),
    "cuda": pytest.param(Device("cuda"), id="cuda", marks=needs_cuda),
}
HALVES = [
    pytest.param(Device("cuda", dtype), id=f"cuda-{name}", marks=needs_cuda)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
]


def pytest_addoption(parser):
    parser.addoption("--each", type=int, help="maximum number of parametrisations of every test")


def pytest_collection_modifyitems(config, items):
    if not (each := config.getoption("each")):
        return
    items_by_test = {}
    for item in items:
        items_by_test.setdefault(item.nodeid.split("[")[0], []).append(item)
    # A random sample: an even spacing would always select the same value of some parameter.
    selected = {
        item
        for name, test_items in items_by_test.items()
        for item in random.Random(name).sample(test_items, min(each, len(test_items)))
    }
    config.hook.pytest_deselected(items=[item for item in items if item not in selected])
    items[:] = [item for item in items if item in selected]


def pytest_generate_tests(metafunc):
    """Parametrises `device` with the CPU and CUDA. Modules with `in_half_precision = True` also run on CUDA
    in bf16 and fp16, where the kernels use the tensor cores."""
    if "device" in metafunc.fixturenames:
        halves = HALVES if getattr(metafunc.module, "in_half_precision", False) else []
        metafunc.parametrize("device", [*DEVICES.values(), *halves], scope="session")
