"""Errors of the commands: one line for a person, and an exit code."""

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
    """The command cannot run as given; the message is one line for a person."""


class OutOfMemory(Exception):
    """A process is out of memory and reports it itself; the message is one line for a person."""


def refuse_unknown(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise Refusal(f"{kind} {name}: unknown; expected one of {', '.join(known)}")


def refuse_beyond_memory(name: str, number: int, bytes_each: int) -> None:
    """Refuses a number of objects, of bytes_each bytes, that do not fit into the memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if number > (most := memory // bytes_each):
        raise Refusal(f"{name} {number}: at most {most:,}, the data of more is larger than the memory here")


def refuse_steps(steps: int, bytes_a_step: int) -> None:
    """The data of all steps is drawn before the first: more than the machine can hold is refused."""
    if steps < 1:
        raise Refusal(f"steps {steps}: at least 1")
    refuse_beyond_memory("steps", steps, bytes_a_step)


def seed(text: str) -> int:
    """The argument of `--seed`: a number that every generator takes, NumPy's too."""
    if not 0 <= int(text) < 2**32:
        raise argparse.ArgumentTypeError(f"{text} should be from 0 to {2**32 - 1}")
    return int(text)


def numbers(text: str) -> list[int]:
    """The argument of an option that takes whole numbers, with commas."""
    return [int(word) for word in text.split(",")]


def path(text: str) -> Path:
    """The argument of an option that names a file or a folder; `Path("")` would be the current one."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return Path(text)


def disk_full(error: BaseException | None) -> bool:
    """Whether `error` comes of a full disk, quota or file. safetensors and torch.save give only words."""
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
    """The result of `decide`, which the main process runs for all. Every process raises its Refusal."""
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
    """Raises Refusal for arguments that it does not know."""

    def error(self, message: str):
        raise Refusal(message)


def answer(program: str, work: Callable[[], int]) -> int:
    """The exit code of `work`. An error that a person can correct is one line on stderr and code 2, without a
    traceback.

    Processes that train together are refused and stopped together, and the first one prints the line. Any of
    them may find a full disk, so each prints that.
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
