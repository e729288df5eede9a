"""What needs a GPU says so in one line and with exit code 2 where there is none, and leaves it empty.

python tests/bench/device.py [what]
"""

import gc
import sys

import torch


def require_gpu(what="bench"):
    if not torch.cuda.is_available():
        print(f"{what}: no CUDA device here; it runs on a GPU alone", file=sys.stderr)
        sys.exit(2)


def emptied():
    """Of what is measured and no longer held: models refer to their parts in circles."""
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    require_gpu(*sys.argv[1:2])
