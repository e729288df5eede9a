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
SAME_PRESS = 1.0  # seconds; the launcher and the terminal may both deliver one Ctrl-C
PATIENCE = 15.0  # seconds until the other processes are killed after one has failed


def together() -> PartialState:
    """accelerate's state of the processes that train together. On a CPU it connects them only with
    `cpu=True`."""
    return PartialState(cpu=not torch.cuda.is_available())


def use_one_device() -> None:
    """Hides all GPUs but one from a run without a launcher: Trainer would multiply the batch by their number.
    Call it before CUDA is initialized."""
    if "RANK" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def is_speaker() -> bool:
    """Whether this process prints messages; known before the processes are connected."""
    return os.environ.get("RANK", "0") == "0"


def exit_at_once(code: int):
    """Exits without finalizing the interpreter: gloo's threads may still hold Python tensors, and
    finalization would abort the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_together(code: int) -> int:
    """Waits for all processes that train together, then exits with `code`. Without waiting, a launcher would
    kill the main process, possibly before it has printed its message. A single process only returns the
    code."""
    if dist.is_initialized():
        together().wait_for_everyone()
        dist.destroy_process_group()
        exit_at_once(code)
    return code


def exit_alone(code: int) -> int:
    """Exits with `code` without waiting for other processes, which may never arrive. A single process only
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
    """On SIGINT or SIGTERM: finishes the current training step, saves a checkpoint and stops the training.

    A second SIGINT, or a signal outside of training, stops at once. Processes that train together stop after
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
    """The largest number of GPUs of this machine that divides the batch."""
    return max((n for n in range(1, torch.cuda.device_count() + 1) if batch % n == 0), default=0)


def run_on(processes: int, module: str, arguments: list[str]) -> int:
    """Runs `python -m module` in several processes that train together. Returns the exit code of the first
    process that fails, or 0.

    torchrun is not used: it prints a traceback for every exit code, and kills the processes 30 seconds after
    a Ctrl-C, possibly before they have saved.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the processes connect through this process's store
    }
    workers: list[subprocess.Popen] = []

    def forward_signal(number, frame):
        for worker in workers:
            worker.send_signal(number)

    # The workers inherit the blocked signals and unblock them when their handlers exist (`Interrupt`).
    # start_new_session: the terminal's Ctrl-C would otherwise reach the workers twice.
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
            if time.monotonic() - failed > PATIENCE:  # the others wait for a process that has exited
                for worker in workers:
                    worker.kill()
        time.sleep(0.1)
