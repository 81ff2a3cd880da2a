"""Hands the step that an attempt has kept to a process that makes a checkpoint of it. Torch-free.

Where a run goes on, rank 0 of the next attempt makes it; where it ends, a process of its own does
(recovery/kept_checkpoint.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_train.checkpoints.layout import newest_step
from ddp_train.distributed.child_environments import saving_environment
from ddp_train.distributed.environment import KEPT_FD, SAVING_TASK
from ddp_train.launcher.fork_server import MODULE, SAVE_KEPT, ForkedWorker, ForkServer, WorkerSpec
from ddp_train.linux import wait_until
from ddp_train.resilience.held_devices import Held, HeldDevices, held_name
from ddp_train.resilience.kept_memory import KeptMemory

POLL_SECONDS = 0.002


@dataclass(frozen=True)
class KeptAttempt:
    """The last step that all processes of an attempt have kept, and in which memory."""

    step: int
    ranks: int
    is_saving: bool
    """Whether a checkpoint was being written as they ended."""
    memory: KeptMemory
    held: dict[tuple[int, int], Held]
    """Memory on GPUs, by rank and place; empty on CPUs."""
    gpus: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        memory: KeptMemory,
        devices: HeldDevices | None,
        run_dir: Path,
        is_saving: bool,
        gpus: Sequence[str],
    ) -> KeptAttempt | None:
        """The step that the last attempt has kept; None if a checkpoint has it already.

        gpus: CUDA_VISIBLE_DEVICES of that attempt; empty: as it is here.
        """
        ranks = memory.ranks
        step = memory.newest_step(ranks)
        if step is None or step <= newest_step(run_dir):
            return None
        held: dict[tuple[int, int], Held] = {}
        if devices:
            devices.take()
            held = dict(devices.held)
        return cls(step, ranks, is_saving, memory, held, tuple(gpus))

    def variables(self) -> dict[str, str]:
        """Environment variables that describe the kept state to a process that saves it."""
        held = [[rank, place, one.device, one.size] for (rank, place), one in self.held.items()]
        task = {"ranks": self.ranks, "is_saving": self.is_saving, "held": held}
        return {SAVING_TASK: json.dumps(task)}

    def descriptors(self) -> dict[str, int]:
        """The descriptors that the process which makes the checkpoint inherits, by variable."""
        descriptors = {held_name(*key): one.descriptor for key, one in self.held.items()}
        return {KEPT_FD: self.memory.descriptor, **descriptors}


def save_in_own_process(
    kept: KeptAttempt,
    run_dir: Path,
    import_path: Path | None,
    server: ForkServer | None,
    seconds: float,
    given_up: Callable[[], bool],
) -> bool:
    """Have a process make a checkpoint. Returns whether it did.

    server: forks the process, if it can.
    seconds: the longest wait.
    given_up: ends the wait.
    """
    spec = WorkerSpec(
        [str(run_dir.absolute())],
        saving_environment(import_path, kept.gpus) | kept.variables(),
        kept.descriptors(),
        [*MODULE, SAVE_KEPT],
    )
    process = _started(spec, server, given_up)
    if process is None:
        return False

    def has_ended() -> bool:
        return process.poll() is not None or given_up()

    wait_until(has_ended, seconds, POLL_SECONDS)
    if process.poll() is None:
        process.kill()
        process.wait()
        print(
            f"the last step could not be saved within {seconds:g} s; the run resumes from its last"
            " checkpoint",
            file=sys.stderr,
        )
    return process.poll() == 0


def _started(
    spec: WorkerSpec, server: ForkServer | None, given_up: Callable[[], bool]
) -> ForkedWorker | subprocess.Popen[bytes] | None:
    """The process; None if it was given up before it was started."""
    forked = server.fork([spec], given_up) if server else []
    if forked:
        return forked[0]
    if given_up():
        return None
    return spec.start_interpreter()
