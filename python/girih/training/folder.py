"""The folder of a run: each file in it is written completely or not at all."""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from transformers import TrainerCallback

from girih.training.command import Refusal, disk_full
from girih.training.processes import together

WHOLE = "whole"  # a file in every complete checkpoint, with the sizes of the other files
LOCK = ".lock"


def draft_of(path: Path) -> Path:
    """The file that is written first and renamed to `path` when it is complete."""
    return path.with_name(path.name + ".part")


def publish(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    draft_of(path).write_text(text)
    os.replace(draft_of(path), path)


def damaged(file: Path) -> Refusal:
    return Refusal(f"file {file}: it is damaged; remove it or its whole folder")


def read_json(file: Path) -> dict:
    """The content of a file that `publish` wrote. Refuses a damaged file."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise damaged(file)
    return content


@contextlib.contextmanager
def refuse_unusable(folder: Path) -> Iterator[None]:
    """Raises Refusal if a folder cannot be created, read or written. The error of a full disk is raised
    unchanged."""
    try:
        yield
    except OSError as error:
        if disk_full(error):
            raise
        raise Refusal(f"folder {folder}: {error.strerror or error}") from error


def make_folder(folder: Path) -> None:
    """Create a folder if it does not exist, and check that it is writable."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock `folder` against other commands. The folder may be renamed while locked. The lock ends with the
    process."""

    def is_held() -> bool:
        # False if the folder was moved, or if the last owner of the lock has just removed the file.
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(file.stat(), os.fstat(lock.fileno()))
        return False

    file = folder / LOCK
    with file.open("w") as lock:
        try:
            # The lock belongs to this process: a fork does not inherit it.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise Refusal(f"folder {folder}: another run is at work in it") from None
        if not is_held():
            raise Refusal(f"folder {folder}: another run was at work in it just now")
        try:
            yield
        finally:
            if is_held():
                file.unlink()


def read_result(folder: Path, arguments: dict) -> dict | None:
    """The result of the finished run with these arguments, else None."""
    file, result = folder / "arguments.json", folder / "result.json"
    with refuse_unusable(folder):
        if file.exists() and read_json(file) == arguments and result.exists():
            return read_json(result)
    return None


@contextlib.contextmanager
def lock_run(folder: Path, arguments: dict) -> Iterator[None]:
    """Lock `folder` for the run with these arguments. An unfinished run with the same arguments is kept; a
    run with other arguments is moved to another folder."""
    file = folder / "arguments.json"
    with contextlib.ExitStack() as lock:
        with refuse_unusable(folder):
            own_files = {file.name, draft_of(file).name, LOCK}
            if folder.exists() and not file.exists() and {p.name for p in folder.iterdir()} - own_files:
                raise Refusal(f"folder {folder}: there is something else in it")
            make_folder(folder)
            lock.enter_context(lock_folder(folder))
            if file.exists() and read_json(file) != arguments:
                number = 1
                while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
                    number += 1
                folder.rename(aside)
                (aside / LOCK).unlink()
                print(f"the run with other arguments is now {aside}", flush=True)
                make_folder(folder)
                lock.enter_context(lock_folder(folder))
            if not file.exists():
                publish(file, json.dumps(arguments, indent=2) + "\n")
        yield


def check_space(folder: Path, parameters: int) -> None:
    """Raises unless the disk has space for three checkpoints (two saved, one being written) of the weights
    and AdamW's two moments, and for the model."""
    needed = parameters * 4 * (3 * 3 + 1)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Refusal(f"folder {folder}: {needed / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free")


def sizes_in(checkpoint: Path) -> dict[str, int]:
    mark = checkpoint / WHOLE
    files = (p for p in checkpoint.rglob("*") if p.is_file() and p not in (mark, draft_of(mark)))
    return {str(file.relative_to(checkpoint)): file.stat().st_size for file in files}


class MarkWhole(TrainerCallback):
    """Marks a checkpoint as complete when every process has written its files.

    All processes wait for each other at the end of a save, so none exits while another one writes.
    """

    def on_save(self, args, state, control, **kwargs):
        together().wait_for_everyone()
        if state.is_world_process_zero:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            publish(checkpoint / WHOLE, json.dumps(sizes_in(checkpoint)))


def is_whole(checkpoint: Path) -> bool:
    try:
        return json.loads((checkpoint / WHOLE).read_text()) == sizes_in(checkpoint)
    except (OSError, ValueError):
        return False


def newest_whole(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint. Later ones are removed: incomplete ones silently, damaged ones with a
    message."""
    candidates = (p for p in checkpoints.glob("checkpoint-*") if re.fullmatch("checkpoint-[0-9]+", p.name))
    newest_first = sorted(
        filter(Path.is_dir, candidates), key=lambda p: int(p.name.split("-")[1]), reverse=True
    )
    for checkpoint in newest_first:
        if is_whole(checkpoint):
            return checkpoint
        if (checkpoint / WHOLE).exists():
            print(f"{checkpoint} is damaged and left out", flush=True)
        shutil.rmtree(checkpoint)
    return None
