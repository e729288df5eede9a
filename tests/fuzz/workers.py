"""Worker processes that make numbered tries, and a supervisor that reports crashed tries and restarts
workers.

A try depends only on the seed and its number, so `--only NUMBER` repeats one.
"""

import argparse
import faulthandler
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

WRONG = 3  # a worker's exit code
PATIENCE = 60  # maximum seconds per try; the first try includes the start of the process
GIB = 2**30

# (seed, number, where) -> a description of the try, and what is wrong with its outcome, or None.
Attempt = Callable[[int, int, str], tuple[str, str | None]]


def main(script: str, doc: str, tries: str, where: tuple[str, list[str]], attempt: Attempt) -> int:
    """tries: the word for a try in messages. where: an option that selects where tries run, and its
    choices."""
    name, choices = where
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(f"--{name}", dest="where", default=choices[0], choices=choices)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--memory", type=int, help="maximum GiB that a worker may allocate")
    parser.add_argument("--only", type=int, help="run only this number, in this process")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--progress", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory and (options.only, options.worker) != (None, None):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + options.memory * GIB
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    if options.only is not None:
        description, problem = attempt(options.seed, options.only, options.where)
        print(description)
        print(problem or "well")
        return bool(problem)
    if options.worker is not None:
        return WRONG if work(options, tries, attempt) else 0
    with tempfile.TemporaryDirectory() as folder:
        own = [f"--{n}={getattr(options, n)}" for n in ("count", "seed", "jobs")]
        own += [f"--{name}={options.where}"] + [f"--memory={options.memory}"] * bool(options.memory)
        failed = oversee([sys.executable, script, *own], options.jobs, tries, Path(folder))
    print(f"{options.count} {tries}s on {options.where}: {'some are wrong' if failed else 'all well'}")
    return failed


def work(options: argparse.Namespace, tries: str, attempt: Attempt) -> int:
    """Runs every `jobs`-th try from the worker's first; writes the number of a try before the try starts."""
    bad = 0
    for number in range(options.worker, options.count, options.jobs):
        options.progress.write_text(str(number))
        faulthandler.dump_traceback_later(PATIENCE, exit=True)  # also works for hangs in C++
        description, problem = attempt(options.seed, number, options.where)
        faulthandler.cancel_dump_traceback_later()
        if problem:
            bad += 1
            print(f"{tries} {number}: {description}: {problem}", flush=True)
    return bad


def oversee(command: list[str], jobs: int, tries: str, folder: Path) -> bool:
    """Runs the workers and returns whether anything was wrong."""
    failed, workers = False, {}

    def start(index: int, first: int) -> None:
        own = [f"--worker={first}", f"--progress={folder / str(index)}"]
        workers[index] = subprocess.Popen([*command, *own], env=os.environ | {"OMP_NUM_THREADS": "1"})

    for index in range(jobs):
        start(index, index)
    while workers:
        for index, worker in list(workers.items()):
            try:
                code = worker.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
            del workers[index]
            if code not in (0, WRONG):
                number = int((folder / str(index)).read_text())
                print(f"{tries} {number}: the process died with {code}", flush=True)
                start(index, number + jobs)
            failed |= code != 0
    return failed
