"""One process of a run or of a session: how it joins the others, and how it leaves."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch

from ddp_train.distributed import flight_record, process_group
from ddp_train.distributed.agent import write_exit_code
from ddp_train.distributed.environment import launcher_pid
from ddp_train.distributed.process_group import Store
from ddp_train.distributed.world import World
from ddp_train.errors import LaunchError, PeerError, WriteError
from ddp_train.linux import end_with_parent
from ddp_train.performance.memory_snapshot import snapshot_file, take_when_out_of_memory
from ddp_train.resilience import collectives, heartbeat, peer_check, stacks
from ddp_train.resilience.kept_memory import KeptMemory
from ddp_train.resilience.whole_files import write_bytes

WATCHED_SECONDS = 20 * 24 * 3600.0
"""Limit of a collective where our own launcher watches: it ends a run that hangs, and knows the
culprit. The clock goes on while a job is suspended (`scontrol suspend`), so that a shorter limit
would end the job when it is resumed. As milliseconds it fits into 32 bits, in which a library may
count."""
JOIN_SECONDS = 600.0
"""The longest wait for rank 0 where our own launcher does not set a limit."""


class WorkerProcess:
    """This process among those of a run."""

    def __init__(self, run_dir: Path, world: World) -> None:
        """Find the status of this process on the launcher's board, if there is one."""
        self.run_dir = run_dir
        self.world = world
        self.board, self.status = heartbeat.status_on_board(world)
        self.kept_memory = KeptMemory.inherited()
        """In which the state of this host's ranks is kept, if our launcher has such."""
        self.log_file = run_dir / "logs" / f"rank_{world.rank}.log"
        self.store: Store | None = None
        """The key-value store that all processes share, once this one has joined them."""

    @contextlib.contextmanager
    def group(
        self, store: Store | None, device: str, backend: str, timeout_seconds: float
    ) -> Iterator[None]:
        """Inside, this process is a member of the process group.

        store: None: there is no process group.
        timeout_seconds: of a collective, where no launcher of ours watches.
        """
        self.store = store
        group = contextlib.nullcontext()
        if store:
            peer_check.register(store, self.world)
            limit = WATCHED_SECONDS if self.board else timeout_seconds
            group = process_group.session(self.world, device, backend, store, limit)
        with group:
            record = collectives.record_file(self.run_dir, self.world.rank)
            self.status.on_hang = lambda: write_bytes(record, flight_record.dump())
            yield
        stacks.remove_empty_stacks(self.run_dir, self.world.rank)

    def leave(self, code: int) -> NoReturn:
        """Announce the exit code to the launcher, and end with it at once."""
        leave(self.status.leaving(code))


@contextlib.contextmanager
def opening_logs(log_file: Path) -> Iterator[None]:
    """A context in which the caller opens the files of `logs/`: an OSError becomes a WriteError.

    Where they cannot be written there would be no checkpoints either.

    log_file: one of them.
    """
    try:
        yield
    except OSError as error:
        # The report says it all: without a handler logging would print a traceback too.
        logging.getLogger("ddp_train").addHandler(logging.NullHandler())
        remedy = "free space, or give permission to write there, and start the same command again"
        raise WriteError(
            f"the logs in {log_file.parent} cannot be written: {error.strerror}", remedy
        ) from error


def prepare_gpu(memory_history: bool, run_dir: Path, rank: int, device: str) -> None:
    torch.cuda.set_device(device)
    take_when_out_of_memory(snapshot_file(run_dir, rank), memory_history)


def die_with_parent() -> None:
    """Have Linux end this process when its parent dies, even by SIGKILL: no worker stays behind."""
    expected = launcher_pid()
    end_with_parent()
    if expected is not None and os.getppid() != expected:  # it died before we could ask
        os._exit(LaunchError.exit_code)
    # No traceback per rank when torchrun hands Ctrl-C on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def leave_without_peers(world: World, error: PeerError) -> NoReturn:
    """Say that the processes did not meet, and end this one.

    Nothing is written: the run directory may be that of a run that lives.
    """
    print(f"FATAL peer (rank {world.rank}): {error}\n  remedy: {error.remedy}", file=sys.stderr)
    leave(error.exit_code)


def leave(code: int) -> NoReturn:
    """End this process at once.

    After a failure a process group is still open, and tearing torch down takes 0.7 s.
    """
    for child in multiprocessing.active_children():
        child.kill()
    write_exit_code(code)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
