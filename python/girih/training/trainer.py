"""transformers' Trainer with the options and the log of girih's training."""

import math
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging as transformers_logging

from girih.models import GirihForCausalLM
from girih.nn import decay_parameter_names
from girih.training.command import Refusal
from girih.training.processes import together
from girih.training.recipe import Recipe

BITS = 1 / math.log(2)  # bits per nat
AT_ONCE = 2**15  # tokens that a device processes at once; also the default of girih-train


class ByteTrainer(Trainer):
    """`Trainer` that applies weight decay to `decay_parameter_names`, and logs bits and speed."""

    tokens_per_step = 0
    last_log = (0, 0.0)  # step, time

    get_decay_parameter_names = staticmethod(decay_parameter_names)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            last_step, last_time = self.last_log
            self.last_log = (self.state.global_step, time.perf_counter())
            logs["bits"] = logs["loss"] * BITS
            logs["tokens_per_second"] = (
                (self.state.global_step - last_step) * self.tokens_per_step / (self.last_log[1] - last_time)
            )
        super().log(logs, start_time)


class Clock(TrainerCallback):
    """Sets `last_log` when training starts, also in a resumed run."""

    def __init__(self, trainer: ByteTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.last_log = (state.global_step, time.perf_counter())


class Progress(ProgressCallback):
    """A progress bar on a terminal, and a line on stdout for each log. unit: the unit of the loss, such as
    "bits per byte"."""

    def __init__(self, unit: str):
        super().__init__()
        self.unit = unit

    def on_train_begin(self, args, state, control, **kwargs):
        self.current_step = state.global_step
        quiet = None if state.is_world_process_zero else True  # None: a bar where stderr is a terminal
        self.training_bar = tqdm(
            total=state.max_steps, initial=state.global_step, disable=quiet, dynamic_ncols=True
        )

    def on_prediction_step(self, args, state, control, **kwargs):
        """No bar: measuring is short."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "bits" in logs:
            line = "step {}/{}  {bits:.3f} {unit}  {tokens_per_second:,.0f} tokens/s"
            tqdm.write(
                line.format(state.global_step, state.max_steps, unit=self.unit, **logs), file=sys.stdout
            )
            sys.stdout.flush()


def process_batch(batch: int) -> int:
    """The number of a batch's sequences in each process. Raises if the processes cannot share the batch
    evenly."""
    processes = together().num_processes
    if batch % processes:
        raise Refusal(f"batch {batch}: {processes} processes cannot share its sequences evenly")
    return batch // processes


def count_passes(batch: int, context: int, at_once: int) -> int:
    """The number of equal parts of a device's batch, each of at most `at_once` tokens or of one sequence.
    Gradients are accumulated over the parts of a step."""
    return next(
        n for n in range(1, batch + 1) if batch % n == 0 and (batch // n * context <= at_once or n == batch)
    )


def fit(
    model: GirihForCausalLM,
    size: Recipe,
    train: Dataset,
    held_out: Dataset | None,
    folder: Path,
    seed: int,
    unit: str = "bits per byte",
    at_once: int = AT_ONCE,
    trainer: type[ByteTrainer] = ByteTrainer,
    **options,
) -> ByteTrainer:
    """A trainer of `model` with the recipe `size`: AdamW, warm-up over a twentieth of the steps, cosine to
    zero.

    On a GPU matrix products run in bf16 (autocast). A batch of more than `at_once` tokens on a device is read
    in parts. options: further `TrainingArguments`.

    Raises Refusal if the processes that train together cannot share the batch evenly.
    """
    batch = process_batch(size.batch)
    passes = count_passes(batch, size.context, at_once)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=size.steps,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=batch // passes,
        per_device_eval_batch_size=batch // passes,
        gradient_accumulation_steps=passes,
        learning_rate=size.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, size.steps // 20),
        adam_beta2=0.95,
        weight_decay=0.1,
        bf16=torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        dataloader_num_workers=2 if torch.cuda.is_available() else 0,  # on a CPU, steps are short
        logging_nan_inf_filter=False,
        report_to="none",
        ddp_find_unused_parameters=False,
        logging_steps=-(-size.steps // 40),
        prediction_loss_only=True,
        log_level_replica="error",
        disable_tqdm=False,  # with True the trainer prints every log again
        seed=seed,
        **options,
    )
    byte_trainer = trainer(model=model, args=arguments, train_dataset=train, eval_dataset=held_out)
    byte_trainer.tokens_per_step = size.batch * size.context
    byte_trainer.remove_callback(ProgressCallback)
    for callback in (Clock(byte_trainer), Progress(unit)):
        byte_trainer.add_callback(callback)
    return byte_trainer
