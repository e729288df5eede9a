"""Errors of the commands: a one-line message and an exit code."""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from accelerate.utils import broadcast_object_list

from girih.data import CorpusError
from girih.training.processes import Interrupted, exit_alone, exit_together, is_speaker, together

T = TypeVar("T")


class Refusal(Exception):
    """The command cannot run with these arguments. The message is one line."""


class OutOfMemory(Exception):
    """A process is out of memory. Each such process prints the message, which is one line."""


def refuse_unknown(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise Refusal(f"{kind} {name}: unknown; expected one of {', '.join(known)}")


def refuse_beyond_memory(name: str, number: int, bytes_each: int) -> None:
    """Raises if a number of objects of bytes_each bytes exceeds the memory of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if number > (most := memory // bytes_each):
        raise Refusal(f"{name} {number}: at most {most:,}, the data of more is larger than the memory here")


def refuse_steps(steps: int, bytes_a_step: int) -> None:
    """Raises for a number of steps below 1, or whose data, which is drawn before the first step, exceeds the
    memory."""
    if steps < 1:
        raise Refusal(f"steps {steps}: at least 1")
    refuse_beyond_memory("steps", steps, bytes_a_step)


def seed(text: str) -> int:
    """The argument of `--seed`: a number that every generator accepts, including NumPy's."""
    if not 0 <= int(text) < 2**32:
        raise argparse.ArgumentTypeError(f"{text} should be from 0 to {2**32 - 1}")
    return int(text)


def numbers(text: str) -> list[int]:
    """The argument of an option with whole numbers, separated by commas."""
    return [int(word) for word in text.split(",")]


def path(text: str) -> Path:
    """The argument of an option that names a file or a folder. Rejects "", because `Path("")` is the current
    folder."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return Path(text)


def disk_full(error: BaseException | None) -> bool:
    """Whether a full disk, quota or file caused `error`. Errors of safetensors and torch.save have only a
    text."""
    words = (
        "No space left on device",
        "File too large",
        "iostream error",
        "PytorchStreamWriter failed writing",
    )
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        if any(word in str(error) for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def decide_together(decide: Callable[[], T]) -> T:
    """Runs `decide` in the main process and returns its result in every process. Every process raises its
    Refusal."""
    outcome = [None, None]
    if together().is_main_process:
        try:
            outcome[0] = decide()
        except Refusal as refusal:
            outcome[1] = refusal
    decision, refusal = broadcast_object_list(outcome)
    if refusal is not None:
        raise refusal
    return decision


class Parser(argparse.ArgumentParser):
    """An argument parser that raises Refusal for wrong arguments."""

    def error(self, message: str):
        raise Refusal(message)


def answer(program: str, work: Callable[[], int]) -> int:
    """Runs `work` and returns its exit code. For an error that the user can correct it prints one line on
    stderr, without a traceback, and returns 2.

    Refusals and interrupts reach all processes that train together, and the first process prints the line. A
    full disk may be found by any process, so each prints that line.
    """

    def print_line(line: str) -> None:
        print(f"{program}: {line}", file=sys.stderr, flush=True)

    try:
        return exit_together(work())
    except Interrupted as stop:
        if is_speaker():
            print_line(str(stop))
        return exit_alone(128 + stop.number)
    except (Refusal, CorpusError) as refusal:
        if is_speaker():
            print_line(str(refusal))
        return exit_together(2)
    except OutOfMemory as full:
        print_line(str(full))
        return exit_alone(2)
    except Exception as error:
        if not disk_full(error):
            raise
        print_line("the disk or a file is full; nothing half-written counts, the same command continues")
        return exit_alone(2)
