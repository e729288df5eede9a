"""A benchmark needs a GPU: says so in one line and with exit code 2 where there is none.

python tests/bench/device.py
"""

import sys

import torch


def require_gpu():
    if not torch.cuda.is_available():
        print("bench: no CUDA device here; benchmarks run on a GPU alone", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    require_gpu()
