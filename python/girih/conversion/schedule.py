"""Schedules of MaG's weight for transformers' Trainer."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from girih.conversion.config import check_whole_number
from girih.nn import MemoryAsGate, mix_weight
from girih.nn.layers.mix_attention import SCHEDULES, is_weight

LEARNED = "learned"


def mixtures(model: nn.Module) -> Iterator[MemoryAsGate]:
    """Every mixture of a model: of injected layers, and of girih's own."""
    return (module for module in model.modules() if isinstance(module, MemoryAsGate))


def move_to_front(callback: TrainerCallback) -> None:
    """Moves a callback that is being called before all others of its Trainer, so that reporters, which come
    first by default, see what it writes into the logs. A callback has no reference to its Trainer, so the
    handler is looked up in the frames of its callers."""
    frame = sys._getframe(1)
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
            handler.callbacks.remove(callback)  # the callbacks after it are still called
            handler.callbacks.insert(0, callback)
            return
        frame = frame.f_back


class MixSchedule(TrainerCallback):
    """Moves the weight m of every injected layer during training, and logs it at every step (TPTT, 4.2).

    schedule: "constant", "gradual", "cyclic", as `girih.nn.mix_weight` has them, with its options final,
        first, steps and levels; or "learned", which moves nothing and logs the mean of the layers' weights.

    The weight follows from the step's number, so that training goes on from a checkpoint as it would have.
    It is `mag_weight` in the Trainer's logs and, for every step, in `state.log_history`.

    Raises ValueError for an unknown schedule or option, and, when training starts, for a model whose mixtures
    the schedule does not fit.

    >>> MixSchedule("gradual", first=0.0, final=0.5, steps=100).weight(50)
    0.25
    """

    def __init__(self, schedule: str = "gradual", **options: Any):
        schedules = (*SCHEDULES, LEARNED)
        if schedule not in schedules:
            raise ValueError(f"schedule is {schedule!r}; expected one of {', '.join(schedules)}")
        expected = {
            "constant": ("final",),
            "gradual": ("first", "final", "steps"),
            "cyclic": ("levels", "steps"),
            LEARNED: (),
        }[schedule]
        for name in options:
            if name not in expected:
                raise ValueError(
                    f"{name}: the schedule {schedule!r} has no such option; expected one of "
                    f"{', '.join(expected) or 'none'}"
                )
        check_whole_number("steps", options.get("steps", 1), 1)
        for name, value in options.items():
            if name == "steps":
                continue
            values = tuple(value) if name == "levels" and isinstance(value, Iterable) else (value,)
            if not values or not all(map(is_weight, values)):
                raise ValueError(f"{name} is {value!r}; expected weights from 0 to 1")
        self.schedule, self.options = schedule, options

    def weight(self, step: int) -> float:
        """m at a step, of a schedule that moves it."""
        return mix_weight(self.schedule, step, **self.options)

    def mean_weight(self, model: nn.Module) -> float:
        weights = [float(mixture.current_weight().detach()) for mixture in mixtures(model)]
        return sum(weights) / len(weights)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs: Any
    ) -> None:
        gates = list(mixtures(model))
        if not gates:
            raise ValueError(
                "model has no mixture whose weight a schedule could move; call girih.inject first"
            )
        move_to_front(self)
        learned = self.schedule == LEARNED
        if any(mixture.learned != learned for mixture in gates):
            raise ValueError(
                f"schedule is {self.schedule!r}, but the model was made with learned={not learned}; "
                "the two have to agree"
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs: Any
    ) -> None:
        if self.schedule != LEARNED:
            weight = self.weight(state.global_step)
            for mixture in mixtures(model):
                mixture.set_weight(weight)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model=None, **kwargs: Any
    ) -> None:
        learned = self.schedule == LEARNED
        weight = self.mean_weight(model) if learned else self.weight(state.global_step - 1)
        state.log_history.append({"mag_weight": weight, "step": state.global_step})

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs=None,
        model=None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and model is not None:
            logs["mag_weight"] = self.mean_weight(model)
