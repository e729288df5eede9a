"""Schedules of the mixture weight m of MaG, as a callback of transformers' Trainer."""

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
    """All mixtures of a model: those of injected layers and of girih's own models."""
    return (module for module in model.modules() if isinstance(module, MemoryAsGate))


def move_to_front(callback: TrainerCallback) -> None:
    """Moves `callback` to the front of its Trainer's callbacks. Call it from a method of the callback.

    Reporters precede other callbacks by default and would not get what this callback writes to the logs. A
    callback has no reference to its Trainer, so its CallbackHandler is looked up in the frames of the
    callers.
    """
    frame = sys._getframe(1)
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
            handler.callbacks.remove(callback)  # the callbacks after it are still called
            handler.callbacks.insert(0, callback)
            return
        frame = frame.f_back


class MixSchedule(TrainerCallback):
    """Sets the weight m of all mixtures during training, and logs it at every step (TPTT, section 4.2).

    schedule: "constant", "gradual" or "cyclic" of `girih.nn.mix_weight`, with its options final, first, steps
        and levels; or "learned", which sets nothing and logs the mean weight.

    The weight depends only on the number of the step, so that training resumed from a checkpoint has the same
    weights. The logs of the Trainer and, for every step, `state.log_history` have it as `mag_weight`.

    Raises ValueError for an unknown schedule or option. When training starts, raises ValueError if the model
    has no mixture, or if `learned` of its mixtures does not match the schedule.

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
        """m at a training step, for schedules other than "learned"."""
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
