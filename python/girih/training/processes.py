"""Processes that train together on one machine, and the signals that stop them."""

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from accelerate import PartialState
from transformers import TrainerCallback

STOPPING = (signal.SIGINT, signal.SIGTERM)
SAME_PRESS = 1.0  # seconds; launchers and terminals may both deliver one Ctrl-C
PATIENCE = 15.0  # seconds that processes get to end after the first has failed


def together() -> PartialState:
    """The processes that train together. On a CPU accelerate joins them only with `cpu=True`."""
    return PartialState(cpu=not torch.cuda.is_available())


def use_one_device() -> None:
    """Shows one GPU to a run without a launcher, or its batch would grow. Call it before CUDA starts."""
    if "RANK" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def is_speaker() -> bool:
    """Whether this process prints messages; known before the processes are connected."""
    return os.environ.get("RANK", "0") == "0"


def exit_at_once(code: int):
    """Exits without the interpreter's finalization, in which gloo's threads may still hold Python tensors and
    abort the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_together(code: int) -> int:
    """End with `code` once all processes that train together are here: a launcher ends the others as soon as
    one has failed, perhaps before the main one has spoken. Alone, only returns the code."""
    if dist.is_initialized():
        together().wait_for_everyone()
        dist.destroy_process_group()
        exit_at_once(code)
    return code


def exit_alone(code: int) -> int:
    """End with `code` where the others may be anywhere: waiting for them might last for ever. Alone, only
    returns the code."""
    if dist.is_initialized():
        exit_at_once(code)
    return code


class Interrupted(Exception):
    """Signal `number` stopped the run."""

    def __init__(self, number: int):
        super().__init__("stopped; the same command continues")
        self.number = number


class Interrupt(TrainerCallback):
    """On SIGINT or SIGTERM the step in hand is finished and saved, then training stops.

    A second SIGINT, or one outside of training, stops at once. Processes that train together stop after
    the same step.
    """

    def __init__(self):
        self.number = 0
        self.stop_time = 0.0
        self.training = False
        for number in STOPPING:
            signal.signal(number, self._handle_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # see run_on

    def _handle_signal(self, number, frame):
        is_second = self.number and number == signal.SIGINT and time.monotonic() - self.stop_time > SAME_PRESS
        if not self.training or is_second:
            raise Interrupted(number)
        self._stop(number)

    def _stop(self, number: int) -> None:
        if number and not self.number:
            self.number, self.stop_time = number, time.monotonic()

    def on_train_begin(self, args, state, control, **kwargs):
        self.training = True

    def on_step_end(self, args, state, control, **kwargs):
        if dist.is_initialized():
            number = torch.tensor(self.number, device=args.device)
            dist.all_reduce(number, dist.ReduceOp.MAX)
            self._stop(int(number))
        if self.number:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        self.training = False


def gpus_for(batch: int) -> int:
    """The most GPUs of this machine that share a batch evenly: a recipe's batch is what is trained."""
    return max((n for n in range(1, torch.cuda.device_count() + 1) if batch % n == 0), default=0)


def run_on(processes: int, module: str, arguments: list[str]) -> int:
    """`python -m module` in `processes` that train together; the exit code of the first that fails, or 0.

    torchrun would do, but answers every exit code with its own traceback and kills what is not saved
    within 30 seconds of a Ctrl-C.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # they meet in the store of this process
    }
    workers: list[subprocess.Popen] = []

    def forward_signal(number, frame):
        for worker in workers:
            worker.send_signal(number)

    # The workers inherit the blocked signals and take them when they can answer, not amid their imports.
    # A session of their own keeps the terminal's Ctrl-C from reaching them twice.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    before = {number: signal.signal(number, forward_signal) for number in (*STOPPING, signal.SIGHUP)}
    try:
        for rank in range(processes):
            worker_environment = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", module, *arguments]
            workers.append(subprocess.Popen(command, env=worker_environment, start_new_session=True))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        return _wait(workers)
    finally:
        for worker in workers:
            worker.kill()
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def _wait(workers: list[subprocess.Popen]) -> int:
    code, failed = 0, None
    while True:
        codes = [worker.poll() for worker in workers]
        code = code or next(filter(None, codes), 0)
        if None not in codes:
            return code if code >= 0 else 128 - code
        if code:
            failed = failed or time.monotonic()
            if time.monotonic() - failed > PATIENCE:  # they wait for one that is gone
                for worker in workers:
                    worker.kill()
        time.sleep(0.1)
