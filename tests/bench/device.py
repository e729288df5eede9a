"""What needs a GPU says so in one line and with exit code 2 where there is none.

python tests/bench/device.py [what]
"""

import sys

import torch


def require_gpu(what="bench"):
    if not torch.cuda.is_available():
        print(f"{what}: no CUDA device here; it runs on a GPU alone", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    require_gpu(*sys.argv[1:2])
