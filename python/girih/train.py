"""Train a byte-level language model: `python -m girih.train --mixer gsa`.

A run lives in one folder and can be stopped at any time (Ctrl-C) and continued by the same command:

    arguments.json   the arguments; other arguments are another run
    checkpoints/     until the run is finished
    logs/            for TensorBoard
    model/           for `AutoModelForCausalLM.from_pretrained`
    loss.png  sample.txt
    result.json      written last: if it exists, the run is finished
"""

import argparse
import contextlib
import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers.integrations import TensorBoardCallback

from girih.data import Corpus, Windows, read_corpus
from girih.models import MIXERS, GirihConfig, GirihForCausalLM
from girih.training.command import (
    OutOfMemory,
    Parser,
    Refusal,
    answer,
    decide_together,
    numbers,
    path,
    refuse_steps,
    refuse_unknown,
    seed,
)
from girih.training.folder import MarkWhole, check_space, lock_run, newest_whole, read_result
from girih.training.processes import Interrupt, Interrupted, gpus_for, run_on, together
from girih.training.recipe import SIZES, Recipe, config_of_size, with_context
from girih.training.report import finish
from girih.training.trainer import AT_ONCE, fit, process_batch


@dataclass(frozen=True)
class Run:
    """The arguments of a run."""

    mixer: str
    size: Recipe
    config: GirihConfig
    seed: int
    corpus: Corpus
    folder: Path
    at_once: int
    arguments: dict  # the arguments as JSON; equal arguments are the same run


def run_of(options: argparse.Namespace) -> Run:
    refuse_unknown("size", [options.size], SIZES)
    size = SIZES[options.size]
    if options.steps is not None:
        size = replace(size, steps=options.steps)
    size = with_context(size, options.context)
    # Check all arguments before anything is written.
    refuse_steps(size.steps, size.bytes_a_step)
    process_batch(size.batch)
    if options.at_once < 1:
        raise Refusal(f"at-once {options.at_once}: at least 1")
    refuse_unknown("mixer", options.mixer.split(","), MIXERS)
    mixer_options = " ".join(sorted(options.options.split()))
    config = config_of_size(options.mixer, size, chunks=options.chunks, options=mixer_options)
    corpus = read_corpus(options.corpus, size.context)
    parts = [*options.mixer.split(","), *(["adaptive"] if options.chunks else []), *mixer_options.split()]
    parts += [options.size, *([str(options.context)] if options.context else [])]
    folder = options.folder or Path("runs") / "-".join(parts).replace("/", "_")
    arguments = {
        "mixer": options.mixer,
        "size": options.size,
        **asdict(size),
        "seed": options.seed,
        "corpus": corpus.name,
        "corpus_sha256": corpus.digest,
    } | ({"chunks": options.chunks} if options.chunks else {})
    if mixer_options:
        arguments["options"] = mixer_options
    return Run(options.mixer, size, config, options.seed, corpus, folder, options.at_once, arguments)


def train(run: Run, interrupt: Interrupt) -> dict:
    """Train to the end, from the newest checkpoint if there is one."""
    size, folder = run.size, run.folder
    torch.manual_seed(run.seed)
    model = GirihForCausalLM(run.config)
    decide_together(lambda: check_space(folder, model.num_parameters()))
    windows = Windows.drawn(run.corpus.train, size.steps * size.batch, size.context, run.seed)
    held_out = Windows.spread(run.corpus.held_out, size.held_out, size.context)
    trainer = fit(
        model,
        size,
        windows,
        held_out,
        folder / "checkpoints",
        run.seed,
        at_once=run.at_once,
        save_steps=max(1, size.steps // 10),
        save_total_limit=2,  # the older one is removed before the newer one is marked complete
    )
    board = TensorBoardCallback()
    board.logging_dir = str(folder / "logs")
    for callback in (board, MarkWhole(), interrupt):
        trainer.add_callback(callback)
    newest = decide_together(lambda: newest_whole(folder / "checkpoints"))
    start = f", from step {newest.name.split('-')[1]} on" if newest else ""
    if trainer.is_world_process_zero():
        print(f"{run.mixer}, {model.num_parameters():,} parameters, on {trainer.args.device}")
        parts = trainer.args.gradient_accumulation_steps
        data = f" bytes{f', in {parts} parts each,' if parts > 1 else ''} of {run.corpus.name}{start}"
        print(f"{size.steps} steps of {size.batch} x {size.context}{data}")
        sys.stdout.flush()
    try:
        trainer.train(resume_from_checkpoint=str(newest) if newest else None)
    except torch.OutOfMemoryError as error:
        tokens = trainer.args.per_device_train_batch_size * size.context
        raise OutOfMemory(
            f"the GPU's memory is full with {tokens} tokens at once; the same command with"
            f" --at-once {tokens // 2} continues"
        ) from error
    if interrupt.number:
        raise Interrupted(interrupt.number)
    return finish(trainer, size, run.arguments, folder, bytes(run.corpus.held_out[:64].tolist()))


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="girih.train", description="Train a byte-level language model.")
    parser.add_argument("--mixer", default="gsa", help="a mixer, or several with commas that take turns")
    parser.add_argument("--size", default="small", help=", ".join(SIZES))
    parser.add_argument(
        "--chunks",
        type=numbers,
        help="of cat: chunk lengths with commas, one drawn for what is read at once (adaptive)",
    )
    parser.add_argument(
        "--options", default="", help="other fields of the configuration, as 'chunk=1 phi=identity'"
    )
    parser.add_argument(
        "--context", type=int, help="tokens of a sequence; a step has as many as the size's own"
    )
    parser.add_argument("--corpus", type=path, help="a file or folder (default: Python's standard library)")
    parser.add_argument("--steps", type=int, help="instead of the size's own")
    parser.add_argument(
        "--folder",
        type=path,
        help="where the run lives (default: runs/MIXER[-adaptive][-OPTIONS]-SIZE[-CONTEXT])",
    )
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument(
        "--at-once",
        type=int,
        default=AT_ONCE,
        help=f"tokens that a device reads at once; a batch of more goes in parts (default: {AT_ONCE})",
    )
    argv = sys.argv[1:] if argv is None else argv

    def run_command() -> int:
        interrupt = Interrupt()
        main_process = together().is_main_process
        run = run_of(parser.parse_args(argv))
        if result := decide_together(lambda: read_result(run.folder, run.arguments)):
            if main_process:
                print(f"this run is finished; remove {run.folder} to train it again")
                print(json.dumps(result))
            return 0
        gpus = torch.cuda.device_count()
        if gpus > 1 and "RANK" not in os.environ:
            if (shared := gpus_for(run.size.batch)) < gpus:
                print(f"{shared} of {gpus} GPUs: a batch of {run.size.batch} cannot be shared evenly by all")
            return run_on(shared, "girih.train", argv)
        with contextlib.ExitStack() as lock:  # the main process holds the lock for all
            decide_together(lambda: lock.enter_context(lock_run(run.folder, run.arguments)))
            result = train(run, interrupt)
        if main_process:
            print(json.dumps(result))
        return 0

    return answer("girih.train", run_command)


if __name__ == "__main__":
    sys.exit(main())
