"""The worker processes of one attempt: started, asked to stop, killed. Torch-free."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from ddp_train.launcher.fork_server import ForkedWorker, ForkServer, WorkerSpec
from ddp_train.resilience import collectives
from ddp_train.resilience.heartbeat import StatusBoard
from ddp_train.resilience.whole_files import part_of


class Workers:
    """One process per rank, each in a session of its own.

    It can be killed with its children.
    """

    def __init__(self, run_dir: Path, count: int) -> None:
        """Start no worker yet. count: the number of ranks."""
        self.run_dir = run_dir
        self.board = StatusBoard.create(count)
        self.processes: list[ForkedWorker | subprocess.Popen[bytes]] = []
        """By rank; empty before the start."""

    def start(
        self, specs: Sequence[WorkerSpec], server: ForkServer | None, given_up: Callable[[], bool]
    ) -> None:
        """Start all workers: forked by the server, else as new interpreters.

        specs: by rank. given_up: if it becomes true before the server can fork, none is started.
        """
        if server:
            self.processes += server.fork([*specs], given_up)
        if not self.processes and not given_up():
            self.processes += [spec.start_interpreter() for spec in specs]

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def exit_codes(self) -> list[int | None]:
        """How each worker has ended, see `RankStatus.believed`; None while it runs."""
        return [
            self.board.ranks[rank].believed(process.poll())
            for rank, process in enumerate(self.processes)
        ]

    def returncode(self, rank: int) -> int | None:
        """As subprocess gives it; None while the worker runs."""
        return self.processes[rank].poll()

    def is_alive(self, rank: int) -> bool:
        return self.returncode(rank) is None

    def was_killed(self, rank: int) -> bool:
        """Whether a signal has ended this worker."""
        returncode = self.returncode(rank)
        return returncode is not None and returncode < 0

    def ask_to_stop(self) -> None:
        """Send SIGTERM, whatever signal came.

        A worker that still imports would die of SIGINT with a traceback.
        """
        for process in self.processes:
            process.send_signal(signal.SIGTERM)

    def announce_successors(self, follow: bool) -> None:
        """Tell all workers whether another number of them is started once they have stopped."""
        for status in self.board.ranks:
            status.goes_on = int(follow)

    def all_heed_stop(self) -> bool:
        """Whether a signal makes all ranks stop after the same step."""
        return all(status.heeds_stop for status in self.board.ranks)

    def wait_for_checkpoint(self, seconds: float, given_up: Callable[[], bool]) -> None:
        """Let rank 0 complete a checkpoint that it is writing, for `seconds` at most."""
        self.board.ranks[0].wait_until_saved(seconds, lambda: not self.is_alive(0) or given_up())

    def log_file(self, rank: int) -> Path:
        return self.run_dir / "logs" / f"rank_{rank}.log"

    def close(self) -> None:
        """Kill all workers with their process groups, and close the status board."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):  # the whole group has ended
                os.killpg(process.pid, signal.SIGKILL)
        for rank, process in enumerate(self.processes):
            process.wait()
            unfinished_record = part_of(collectives.record_file(self.run_dir, rank))
            with contextlib.suppress(OSError):
                unfinished_record.unlink(missing_ok=True)
        self.board.close()
