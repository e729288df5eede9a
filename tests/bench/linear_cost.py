"""How the cost of every operator grows with the number of tokens.

    python tests/bench/linear_cost.py [--device cuda] [--out tests/bench/results/linear_cost.json]

Times forward + backward from T = 512 to 8192 (B = 1, H = 2, widths 32, fp32) and fits time = a * T^exponent to the
longer half: 1 is linear. cat_attention is timed at K + C constant in T (chunk = T / 64), where it is linear too.
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

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python"))
from cases import ONE_EACH, gradients, operator

LENGTHS = [512, 1024, 2048, 4096, 8192]
SIZES = {"B": 1, "H": 2, "Q": 2, "D": 32, "V": 32, "M": 32, "X": 128}


def seconds(case, T, device, repeats):
    inputs = case.draw(T, calm=True, dtype=torch.float32, device=device, **SIZES).requiring_grad()

    def once():
        started = time.perf_counter()
        gradients(operator(inputs), inputs)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    once()
    return statistics.median(once() for _ in range(repeats))


def exponent(times):
    """The slope of log time by log T over the last three lengths, by least squares."""
    points = [(math.log(T), math.log(times[T])) for T in LENGTHS[-3:]]
    x, y = (statistics.fmean(axis) for axis in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    rows = []
    print("operator".ljust(24), *(f"T={T}".rjust(9) for T in LENGTHS), "exponent  (ms)")
    for case in ONE_EACH:
        times = {}
        for T in LENGTHS:
            at = replace(case, options=case.options | {"chunk": T // 64}) if case.op == "cat_attention" else case
            times[T] = seconds(at, T, options.device, options.repeats)
        rows.append({"case": str(case), "seconds": times, "exponent": exponent(times)})
        print(str(case).ljust(24), *(f"{1e3 * x:9.1f}" for x in times.values()), f"{exponent(times):8.2f}", flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"device": options.device, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
