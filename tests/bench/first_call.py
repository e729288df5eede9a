"""Seconds of the first call of an operator in this process. CUDA, autograd and the inputs are ready before.

python tests/bench/first_call.py gsa 4x4096x16x64-m64
"""

import sys

from inputs import call, draw
from measure import Runs, first_call
from shapes import SHAPES


def main(op, name):
    shape = next(shape for shape in SHAPES[op] if shape.name == name)
    runs = Runs(call(shape), draw(shape))
    print(first_call(runs.forward if shape.is_step else runs.forward_backward))


if __name__ == "__main__":
    main(*sys.argv[1:])
