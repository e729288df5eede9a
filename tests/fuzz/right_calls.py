"""Valid calls of some operators in one process, for a sanitizer to watch.

    compute-sanitizer --tool racecheck python tests/fuzz/right_calls.py --operators gsa,gla [--count 200]
                      [--seconds 600] [--seed 0] [--device cuda]

Calls are drawn as in calls.py with these differences: no argument is spoilt, dtypes are those that kernels
support, and one width in four is the width of the widest tiles. Incompatible options are drawn too; refused
calls do not count. The next call is of the operator with the fewest calls so far. The last line reports the
number of calls; the exit code is also 1 if an operator had no call.
"""

import argparse
import sys
import time
from collections import Counter

import torch
from calls import DESCRIPTION, Draw, problem_of


class RightDraw(Draw):
    dtypes = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
    widths = (8, 17, 64, 128)
    spoils = (0,)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--operators", default=",".join(DESCRIPTION), help="names separated by commas")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600, help="no call starts later")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    operators = options.operators.split(",")
    if unknown := [name for name in operators if name not in DESCRIPTION]:
        parser.error(f"operator {unknown[0]}: unknown; expected one of {', '.join(DESCRIPTION)}")
    start_time, number, problems, calls = time.monotonic(), 0, 0, Counter()
    while calls.total() < options.count and time.monotonic() - start_time < options.seconds:
        draw = RightDraw(options.seed, number, options.device, min(operators, key=calls.__getitem__))
        if problem := problem_of(draw):
            problems += 1
            print(f"call {number}: {draw.name}{'_step' * draw.step}: {problem}", flush=True)
        calls[draw.name] += not draw.refused
        number += 1
    if missing := [name for name in operators if not calls[name]]:
        print(f"no call was made of {', '.join(missing)}")
    how = f"{problems} are wrong" if problems else "all well"
    print(f"{calls.total()} calls of {options.operators} on {options.device}: {how}")
    return int(problems > 0 or bool(missing))


if __name__ == "__main__":
    sys.exit(main())
