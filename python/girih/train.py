"""Train a byte-level language model: `python -m girih.train --mixer gsa`.

A run lives in one folder and can be stopped at any time (Ctrl-C) and continued by the same command:

    arguments.json   what was asked for; other arguments are another run
    checkpoints/     until the run is finished
    logs/            for TensorBoard
    model/           what `AutoModelForCausalLM.from_pretrained` loads
    loss.png  sample.txt
    result.json      written last: where it stands, the run is finished
"""

import argparse
import errno
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.utils import logging as transformers_logging

from girih.data import CorpusError, Windows, read_corpus
from girih.models import MIXERS, GirihConfig, GirihForCausalLM

WHOLE = "whole"  # a file in every checkpoint that was written to its end
BITS = 1 / math.log(2)  # in a nat
STEP = 8  # what the width of an MLP is a multiple of


class Refusal(Exception):
    """What was asked for cannot be done; the message is one line for a person."""


def refuse_unknown(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise Refusal(f"{kind} {name}: unknown, there are {', '.join(known)}")


class Interrupted(Exception):
    """Signal `number` stopped the run."""

    def __init__(self, number: int):
        super().__init__("stopped; the same command continues")
        self.number = number


@dataclass(frozen=True)
class Recipe:
    """A size of model and how to train it. Lengths in tokens, batch in sequences over all devices."""

    parameters: int
    layers: int
    heads: int
    head_dim: int
    slots: int
    context: int
    batch: int
    steps: int
    learning_rate: float
    held_out: int = 256  # windows


SIZES = {
    "tiny": Recipe(100_000, 2, 2, 16, 16, 64, 8, 50, 3e-3, held_out=32),
    "small": Recipe(1_800_000, 4, 3, 64, 32, 256, 8, 600, 3e-3),
    "10m": Recipe(10_000_000, 8, 5, 64, 64, 512, 32, 2_000, 1e-3),
    "100m": Recipe(100_000_000, 12, 12, 64, 64, 1024, 128, 10_000, 6e-4),
    "340m": Recipe(340_000_000, 24, 16, 64, 64, 2048, 128, 20_000, 3e-4),
}


def model_of_size(mixer: str, size: Recipe, vocab_size: int = 256) -> GirihForCausalLM:
    """A model of `size.parameters` parameters, within 2 percent: the width of its MLPs is fitted.

    mixer: a name, or several with commas that take turns over the layers.
    """
    names = mixer.split(",")

    def config(intermediate: int) -> GirihConfig:
        return GirihConfig(
            vocab_size=vocab_size,
            hidden_size=size.heads * size.head_dim,
            num_hidden_layers=size.layers,
            num_heads=size.heads,
            head_dim=size.head_dim,
            num_slots=size.slots,
            intermediate_size=intermediate,
            mixer=[names[i % len(names)] for i in range(size.layers)] if len(names) > 1 else mixer,
        )

    def count(intermediate: int) -> int:
        with torch.device("meta"):
            return GirihForCausalLM(config(intermediate)).num_parameters()

    try:
        least = count(STEP)
    except ValueError as error:  # a mixer that this size or this hybrid cannot hold
        raise Refusal(f"mixer {mixer}: {error}") from error
    a_step = count(2 * STEP) - least
    intermediate = STEP * max(1, 1 + round((size.parameters - least) / a_step))
    if abs(count(intermediate) / size.parameters - 1) > 0.02:
        raise Refusal(f"mixer {mixer}: it has {least:,} parameters or more, asked for {size.parameters:,}")
    return GirihForCausalLM(config(intermediate))


class ByteTrainer(Trainer):
    """`Trainer` that lets parameters say whether they decay and logs bits and speed."""

    tokens_per_step = 0
    logged = (0, 0.0)  # step, time

    def get_decay_parameter_names(self, model) -> list[str]:
        return [n for n, p in model.named_parameters() if not getattr(p, "_no_weight_decay", False)]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            step, then = self.logged
            self.logged = (self.state.global_step, time.perf_counter())
            logs["bits"] = logs["loss"] * BITS
            logs["tokens_per_second"] = (
                (self.state.global_step - step) * self.tokens_per_step / (self.logged[1] - then)
            )
        super().log(logs, start_time)


class Clock(TrainerCallback):
    """Starts the trainer's stopwatch where training starts, in a run that is resumed too."""

    def __init__(self, trainer: ByteTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.logged = (state.global_step, time.perf_counter())


class Progress(ProgressCallback):
    """A bar on a terminal, and a line a log on stdout. unit: what the loss, in bits, is per."""

    def __init__(self, unit: str):
        super().__init__()
        self.unit = unit

    def on_train_begin(self, args, state, control, **kwargs):
        self.current_step = state.global_step
        quiet = None if state.is_world_process_zero else True  # None: a bar where stderr is a terminal
        self.training_bar = tqdm(
            total=state.max_steps, initial=state.global_step, disable=quiet, dynamic_ncols=True
        )

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "bits" in logs:
            line = "step {}/{}  {bits:.3f} {unit}  {tokens_per_second:,.0f} tokens/s"
            tqdm.write(
                line.format(state.global_step, state.max_steps, unit=self.unit, **logs), file=sys.stdout
            )
            sys.stdout.flush()


class Whole(TrainerCallback):
    """Marks a checkpoint as whole once everything in it is written."""

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / WHOLE).touch()


class Interrupt(TrainerCallback):
    """On SIGINT or SIGTERM the step in hand is finished and saved, then training stops.

    A second SIGINT stops at once. Processes that train together stop after the same step.
    """

    def __init__(self):
        self.number = 0
        self.training = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._arrived)

    def _arrived(self, number, frame):
        if not self.training or (self.number and number == signal.SIGINT):
            raise Interrupted(number)
        self.number = number

    def on_train_begin(self, args, state, control, **kwargs):
        self.training = True

    def on_step_end(self, args, state, control, **kwargs):
        if dist.is_initialized():
            number = torch.tensor(self.number, device=args.device)
            dist.all_reduce(number, dist.ReduceOp.MAX)
            self.number = int(number)
        if self.number:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        self.training = False


def fit(
    model: GirihForCausalLM,
    size: Recipe,
    train: Dataset,
    held_out: Dataset,
    folder: Path,
    seed: int,
    unit: str = "bits per byte",
    **options,
) -> ByteTrainer:
    """A trainer of `model` by `size`'s recipe: AdamW, warm-up over a twentieth of the steps, cosine to zero.

    On a GPU matrix products run in bf16 (autocast). options: more of `TrainingArguments`.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    devices = PartialState().num_processes
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=size.steps,
        per_device_train_batch_size=max(1, size.batch // devices),
        per_device_eval_batch_size=max(1, size.batch // devices),
        learning_rate=size.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, size.steps // 20),
        adam_beta2=0.95,
        weight_decay=0.1,
        bf16=torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        dataloader_num_workers=2 if torch.cuda.is_available() else 0,  # there steps are short
        logging_nan_inf_filter=False,
        report_to="none",
        ddp_find_unused_parameters=False,
        logging_steps=-(-size.steps // 40),
        prediction_loss_only=True,
        disable_tqdm=False,  # or the trainer prints every log once more
        seed=seed,
        **options,
    )
    trainer = ByteTrainer(model=model, args=arguments, train_dataset=train, eval_dataset=held_out)
    trainer.tokens_per_step = size.batch * size.context
    trainer.remove_callback(ProgressCallback)
    for callback in (Clock(trainer), Progress(unit)):
        trainer.add_callback(callback)
    return trainer


def newest_whole(checkpoints: Path) -> Path | None:
    """The checkpoint to continue from. Those that were cut off while being written are removed."""
    whole = []
    for folder in checkpoints.glob("checkpoint-*"):
        if (folder / WHOLE).exists():
            whole.append(folder)
        else:
            shutil.rmtree(folder)
    return max(whole, key=lambda folder: int(folder.name.split("-")[1]), default=None)


def publish(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(text)
    os.replace(draft, path)


def prepare(folder: Path, arguments: dict) -> None:
    """Make `folder` the run of these arguments: its own half-done run stays, another's is moved aside."""
    file = folder / "arguments.json"
    if folder.exists() and any(folder.iterdir()):
        if not file.exists():
            raise Refusal(f"folder {folder}: there is something else in it")
        if json.loads(file.read_text()) != arguments:
            number = 1
            while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
                number += 1
            folder.rename(aside)
            print(f"the run with other arguments is now {aside}")
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        publish(file, json.dumps(arguments, indent=2) + "\n")


def check_space(folder: Path, parameters: int) -> None:
    """Three checkpoints (two kept, one being written) of weights and AdamW's two moments, and the model."""
    needed = parameters * 4 * (3 * 3 + 1)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Refusal(f"folder {folder}: {needed / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free")


def disk_full(error: BaseException | None) -> bool:
    """Whether a full disk is what raised `error`. safetensors and torch.save give no errno, only words."""
    words = ("No space left on device", "iostream error", "PytorchStreamWriter failed writing")
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(word in str(error) for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def draw_curve(history: list[dict], tokens_per_step: int, held_out: float, title: str, file: Path) -> None:
    """Bits per byte over training tokens, and the held-out figure."""
    from matplotlib.figure import Figure

    logs = [log for log in history if "bits" in log]
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    tokens = [log["step"] * tokens_per_step / 1e6 for log in logs]
    axes.plot(tokens, [log["bits"] for log in logs], label="training")
    axes.axhline(held_out, color="C1", linestyle="--", label=f"held out, at the end: {held_out:.3f}")
    axes.set(title=title, xlabel="training tokens (bytes), millions", ylabel="bits per byte", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    draft = file.with_name("part-" + file.name)
    figure.savefig(draft, dpi=150)
    os.replace(draft, file)


@torch.no_grad()
def write_sample(model: GirihForCausalLM, prompt: bytes, length: int, seed: int) -> str:
    """Let the model go on from `prompt` for `length` bytes."""
    torch.manual_seed(seed)
    ids = torch.tensor([list(prompt)], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length,
        do_sample=True,
        temperature=0.7,
        top_k=0,
    )
    return bytes(out[0].tolist()).decode(errors="replace")


def finish(trainer: ByteTrainer, size: Recipe, arguments: dict, folder: Path, prompt: bytes) -> dict:
    """Measure, save the model, write a sample, draw the curve; last the result: it says that all is there."""
    trainer.remove_callback(Progress)
    bits = trainer.evaluate()["eval_loss"] * BITS
    logs = [log for log in trainer.state.log_history if "tokens_per_second" in log]
    result = {
        "mixer": arguments["mixer"],
        "size": arguments["size"],
        "parameters": trainer.model.num_parameters(),
        "steps": size.steps,
        "tokens": size.steps * trainer.tokens_per_step,
        "bits_per_byte": round(bits, 4),
        "tokens_per_second": round(len(logs) / sum(1 / log["tokens_per_second"] for log in logs)),
        "corpus": arguments["corpus"],
        "folder": str(folder / "model"),
    }
    if trainer.is_world_process_zero():
        draft = folder / "model.part"
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(folder / "model", ignore_errors=True)
        trainer.model.save_pretrained(draft)
        os.replace(draft, folder / "model")
        sample = write_sample(trainer.model.eval(), prompt, 256, arguments["seed"])
        publish(folder / "sample.txt", sample)
        print(f"\nA sample, after {len(prompt)} bytes of held-out text:\n\n{sample}\n")
        title = f"{result['mixer']}, {result['parameters'] / 1e6:.2f}M parameters"
        draw_curve(trainer.state.log_history, trainer.tokens_per_step, bits, title, folder / "loss.png")
        publish(folder / "result.json", json.dumps(result, indent=2) + "\n")
        shutil.rmtree(folder / "checkpoints")
    return result


def train(options: argparse.Namespace) -> dict:
    refuse_unknown("size", [options.size], SIZES)
    size = SIZES[options.size]
    if options.steps is not None:
        size = replace(size, steps=options.steps)
    if size.steps < 1:
        raise Refusal(f"steps {size.steps}: at least 1")
    refuse_unknown("mixer", options.mixer.split(","), MIXERS)
    corpus = read_corpus(options.corpus, size.context)
    folder = options.folder or Path("runs") / f"{options.mixer.replace(',', '-')}-{options.size}"
    arguments = {
        "mixer": options.mixer,
        "size": options.size,
        **asdict(size),
        "seed": options.seed,
        "corpus": corpus.name,
        "corpus_sha256": corpus.digest,
    }
    with PartialState().main_process_first():
        prepare(folder, arguments)
    if (folder / "result.json").exists():
        print(f"this run is finished; remove {folder} to train it again")
        return json.loads((folder / "result.json").read_text())

    if torch.cuda.device_count() > 1 and "RANK" not in os.environ:
        launch_on_every_gpu()

    interrupt = Interrupt()
    torch.manual_seed(options.seed)
    model = model_of_size(options.mixer, size)
    check_space(folder, model.num_parameters())
    windows = Windows.drawn(corpus.train, size.steps * size.batch, size.context, options.seed)
    held_out = Windows.spread(corpus.held_out, size.held_out, size.context)
    trainer = fit(
        model,
        size,
        windows,
        held_out,
        folder / "checkpoints",
        options.seed,
        save_steps=max(1, size.steps // 10),
        save_total_limit=2,  # the older one goes before the newer one is marked whole
    )
    board = TensorBoardCallback()
    board.logging_dir = str(folder / "logs")
    for callback in (board, Whole(), interrupt):
        trainer.add_callback(callback)
    with PartialState().main_process_first():
        newest = newest_whole(folder / "checkpoints")
    start = f", from step {newest.name.split('-')[1]} on" if newest else ""
    if trainer.is_world_process_zero():
        print(f"{options.mixer}, {model.num_parameters():,} parameters, on {trainer.args.device}")
        print(f"{size.steps} steps of {size.batch} x {size.context} bytes of {corpus.name}{start}")
        sys.stdout.flush()
    trainer.train(resume_from_checkpoint=str(newest) if newest else None)
    if interrupt.number:
        raise Interrupted(interrupt.number)
    return finish(trainer, size, arguments, folder, bytes(corpus.held_out[:64].tolist()))


def launch_on_every_gpu() -> None:
    """Turn this process into torchrun with the same command, one process a GPU."""
    processes = f"--nproc-per-node={torch.cuda.device_count()}"
    launcher = ["-m", "torch.distributed.run", "--standalone", processes, "-m", "girih.train"]
    os.execv(sys.executable, [sys.executable, *launcher, *sys.argv[1:]])


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n")


def answer(program: str, work) -> int:
    """Run `work`; what a person can put right is one line on stderr and exit code 2, not a traceback."""
    try:
        work()
    except Interrupted as stop:
        print(f"{program}: {stop}", file=sys.stderr)
        return 128 + stop.number
    except (Refusal, CorpusError) as refusal:
        print(f"{program}: {refusal}", file=sys.stderr)
        return 2
    except Exception as error:
        if not disk_full(error):
            raise
        print(
            f"{program}: the disk is full; nothing half-written counts, the same command continues",
            file=sys.stderr,
        )
        return 2
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="girih.train", description="Train a byte-level language model.")
    parser.add_argument("--mixer", default="gsa", help="a mixer, or several with commas that take turns")
    parser.add_argument("--size", default="small", help=", ".join(SIZES))
    parser.add_argument("--corpus", type=Path, help="a file or folder (default: Python's standard library)")
    parser.add_argument("--steps", type=int, help="instead of the size's own")
    parser.add_argument("--folder", type=Path, help="where the run lives (default: runs/MIXER-SIZE)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)

    def work():
        result = train(options)
        if PartialState().is_main_process:
            print(json.dumps(result))

    return answer("girih.train", work)


if __name__ == "__main__":
    sys.exit(main())
