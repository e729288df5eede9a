"""Growth of the cost of every operator with the number of tokens.

    python tests/bench/linear_cost.py [--device cuda] [--out tests/bench/results/linear_cost.json]

The script times forward + backward from T = 512 to 8192 (B = 1, H = 2, widths 32, chunk 16, fp32) and fits
time = a * work^exponent to the three longest lengths. Work is T; for cat_attention it is T (K + C) / 2 with K
= T / C. An exponent of 1 means linear cost.
"""

import argparse
import json
import math
import pathlib
import statistics
import sys
import time
from dataclasses import replace

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from cases import ONE_EACH, gradients, operator

LENGTHS = [512, 1024, 2048, 4096, 8192]
SIZES = {"B": 1, "H": 2, "Q": 2, "D": 32, "V": 32, "M": 32, "X": 128}


def work(case, T):
    chunk = case.chunk
    return T * (T / chunk + chunk) / 2 if case.op == "cat_attention" else T


def seconds(case, T, device, repeats):
    inputs = case.draw(T, calm=True, dtype=torch.float32, device=device, **SIZES).requiring_grad()

    # On the CPU the clock counts the time of this process, which other processes do not change.
    clock = time.perf_counter if device == "cuda" else time.process_time

    def once():
        started = clock()
        gradients(operator(inputs), inputs)
        if device == "cuda":
            torch.cuda.synchronize()
        return clock() - started

    once()
    return statistics.median(once() for _ in range(repeats))


def exponent(case, times):
    """The slope of log time over log work for the last three lengths, by least squares."""
    points = [(math.log(work(case, T)), math.log(times[T])) for T in LENGTHS[-3:]]
    x, y = (statistics.fmean(axis) for axis in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("operator".ljust(24), *(f"T={T}".rjust(9) for T in LENGTHS), "exponent  (ms)")
    for case in ONE_EACH:
        if "chunk" in case.options:
            case = replace(case, options=case.options | {"chunk": 16})
        times = {T: seconds(case, T, options.device, options.repeats) for T in LENGTHS}
        slope = exponent(case, times)
        rows.append({"case": str(case), "seconds": times, "exponent": slope})
        print(str(case).ljust(24), *(f"{1e3 * x:9.1f}" for x in times.values()), f"{slope:8.2f}", flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(
            json.dumps({"device": options.device, "torch": torch.__version__, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
