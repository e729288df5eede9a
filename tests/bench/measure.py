"""Times, memory and rates on the GPU.

A time is the median of CUDA event times. Before every run a buffer several times larger than the L2 cache is
overwritten, so no operand is in the L2 cache. The card is busy with the buffer while the host queues the
call. The time is therefore that of the card, unless the host needs longer to queue the call than the card to
run it.
"""

import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from girih.nn import map_state

WARM_UPS = 3
TARGET_SECONDS = 0.4  # seconds of card time for one median
LEAST, MOST = 10, 100  # runs


class Card:
    """The current device: its name, its measured rates, and a buffer that overwrites its L2 cache."""

    def __init__(self):
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.name = properties.name
        self.buffer = torch.empty(
            max(256 << 20, 4 * properties.L2_cache_size), dtype=torch.uint8, device="cuda"
        )
        self.flush_ms = 1.0
        self.flush_ms = self.milliseconds(self.buffer.zero_)
        self.rates = {"bytes": self._copy_rate(), "flops": self._product_rate()}

    def _copy_rate(self):
        """Bytes read and written a second by a large copy."""
        source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return 2 * source.numel() / self.milliseconds(lambda: target.copy_(source)) * 1e3

    def _product_rate(self, n=8192):
        """FLOPs a second of a large bf16 matrix product."""
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return 2 * n**3 / self.milliseconds(lambda: a @ b) * 1e3

    def empty_cache(self, host_ms):
        """Overwrites L2 for as long as the host needs to queue the next call."""
        for _ in range(min(200, math.ceil(1.5 * host_ms / self.flush_ms) + 1)):
            self.buffer.zero_()

    def milliseconds(self, call):
        for _ in range(WARM_UPS):
            call()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started = time.perf_counter()
        call()
        host = 1e3 * (time.perf_counter() - started)
        torch.cuda.synchronize()
        times = []
        while len(times) < LEAST or (len(times) < MOST and sum(times) < 1e3 * TARGET_SECONDS):
            self.empty_cache(host)
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times)


def leaves(keywords):
    """The same keywords with a leaf that requires a gradient for every floating tensor, and these leaves."""
    found = []

    def leaf(x):
        if not x.is_floating_point():
            return x
        found.append(x.detach().requires_grad_())
        return found[-1]

    def convert(value):
        return map_state(leaf, value) if isinstance(value, (torch.Tensor, tuple)) else value

    return {name: convert(value) for name, value in keywords.items()}, found


class Runs:
    """The timed functions of one side: `forward` without autograd, `forward_backward` with every gradient."""

    def __init__(self, call, keywords):
        self.call, self.keywords = call, keywords
        self.with_grad, self.leaves = leaves(keywords)
        self.do = None

    @torch.no_grad()
    def forward(self):
        return self.call(**self.keywords)

    def forward_backward(self):
        o = self.call(**self.with_grad)
        if self.do is None:
            self.do = torch.randn_like(o)
        return torch.autograd.grad(o, self.leaves, self.do, allow_unused=True)

    def timed_function(self, name):
        """`forward` and `forward_backward` themselves. A step is replayed from a CUDA graph, as
        in decoding."""
        return capture_graph(self.forward) if name == "step" else getattr(self, name)


def capture_graph(call):
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def peak_bytes(call):
    """Peak memory of one call above the memory in use before it."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def first_call(run):
    """Seconds of a call until its end on the device. PyTorch's first backward with a given gradient imports
    sympy, which takes seconds. One such backward runs before."""
    x = torch.ones(1, device="cuda", requires_grad=True)
    torch.autograd.grad(x * 2, x, x.detach())
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def first_call_in_new_process(op, name):
    """Seconds of girih's first call (forward and backward, or a step) in a new process after the start of
    CUDA."""
    script = Path(__file__).parent / "first_call.py"
    return float(subprocess.check_output([sys.executable, str(script), op, name], text=True).split()[-1])
