"""Check for a GPU. Without a GPU the script prints one line and exits with code 2.

python tests/bench/device.py [what]
"""

import gc
import sys

import torch


def require_gpu(what="bench"):
    if not torch.cuda.is_available():
        print(f"{what}: no CUDA device here; it runs on a GPU alone", file=sys.stderr)
        sys.exit(2)


def free_memory():
    """Frees the memory of models that are no longer used. The parts of a model refer to each
    other in cycles."""
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    require_gpu(*sys.argv[1:2])
