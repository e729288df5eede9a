"""The folder of a run: what is written into it is there whole or not at all."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from transformers import TrainerCallback

from girih.training.command import Refusal, disk_full
from girih.training.processes import together

WHOLE = "whole"  # a file in every checkpoint that was written to its end


def draft_of(path: Path) -> Path:
    """Where `path` is written before it is whole. What an earlier try left there is overwritten."""
    return path.with_name(path.name + ".part")


def publish(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    draft_of(path).write_text(text)
    os.replace(draft_of(path), path)


def read_json(file: Path) -> dict:
    """What `publish` wrote into a file. Refuses one that someone or a failing disk has damaged."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise Refusal(f"file {file}: it is damaged; remove it or its whole folder")
    return content


@contextlib.contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Refuses a folder that cannot be made, read or written. A full disk is another matter and passes."""
    try:
        yield
    except OSError as error:
        if disk_full(error):
            raise
        raise Refusal(f"folder {folder}: {error.strerror or error}") from error


def make(folder: Path) -> None:
    """Make a folder that can be written into."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def prepare(folder: Path, arguments: dict) -> None:
    """Make `folder` the run of these arguments: its own half-done run stays, another's is moved aside."""
    file = folder / "arguments.json"
    with usable(folder):
        if file.exists():
            if read_json(file) == arguments:
                if not (folder / "result.json").exists():
                    make(folder)
                return
            number = 1
            while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
                number += 1
            folder.rename(aside)
            print(f"the run with other arguments is now {aside}", flush=True)
        elif folder.exists() and {p.name for p in folder.iterdir()} - {draft_of(file).name}:
            raise Refusal(f"folder {folder}: there is something else in it")
        make(folder)
        publish(file, json.dumps(arguments, indent=2) + "\n")


def check_space(folder: Path, parameters: int) -> None:
    """Three checkpoints (two kept, one being written) of weights and AdamW's two moments, and the model."""
    needed = parameters * 4 * (3 * 3 + 1)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Refusal(f"folder {folder}: {needed / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free")


class Whole(TrainerCallback):
    """Marks a checkpoint as whole once every process has written its part of it.

    They leave a save together, so none has ended while another still writes.
    """

    def on_save(self, args, state, control, **kwargs):
        together().wait_for_everyone()
        if state.is_world_process_zero:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / WHOLE).touch()


def newest_whole(checkpoints: Path) -> Path | None:
    """The checkpoint to continue from. Those that were cut off while being written are removed."""
    whole = []
    for folder in checkpoints.glob("checkpoint-*"):
        if (folder / WHOLE).exists():
            whole.append(folder)
        else:
            shutil.rmtree(folder)
    return max(whole, key=lambda folder: int(folder.name.split("-")[1]), default=None)
