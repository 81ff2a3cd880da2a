"""Starts one worker per GPU on this host, watches them, and leaves nothing running. Does not import torch."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ddp_train import health
from ddp_train.config.resolve import described
from ddp_train.config.schema import Config
from ddp_train.distributed.world import World, worker_environment
from ddp_train.errors import ConfigError, DataError, LaunchError, WriteError
from ddp_train.stopping import INTERRUPTED, SAME_REQUEST_SECONDS, SAVED, SIGNALS, UNSAVED, exit_code, heard

POLL_SECONDS = 0.02
FINAL = (ConfigError.exit_code, DataError.exit_code, WriteError.exit_code)
"""Exit codes of failures that a restart would only repeat."""
STOPPED = (UNSAVED, INTERRUPTED, *(-number for number in SIGNALS))
"""Exit codes of workers that were stopped: they gave up to wait for the others, or did not listen yet."""


class Stop:
    """The signals that ask the launcher to stop; handlers only take note."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.insists = False
        """Asked twice: an end is wanted at once."""
        self._first_time = 0.0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes note of all signals that ask for a stop; restores the handlers that were there."""
        before = {number: signal.signal(number, self._note) for number in heard()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self._first_time = self._first_time or time.monotonic()
        self.insists = time.monotonic() - self._first_time > SAME_REQUEST_SECONDS
        self.received.append(number)

    def exit_code(self, code: int) -> int:
        """SAVED or UNSAVED, unless somebody sat at the terminal."""
        return exit_code(self.received[0]) if self.received and exit_code(self.received[0]) == INTERRUPTED else code


def launch(config: Config, import_path: Path, stop: Stop | None = None) -> int:
    """Runs a frozen config in fresh processes, again if it fails and restarts are left. Returns the exit code.

    import_path: the folder from which workers import this package, and the user's own modules. stop: for those who
    want to know whether the run was asked to stop, even if it was completed all the same.
    """
    stop = stop or Stop()
    with stop.listening():
        for attempt in range(config.launch.max_restarts + 1):
            code = _attempt(config, import_path, attempt, stop)
            if code == UNSAVED:
                if sys.stdout.isatty():
                    sys.stdout.write("\x1b[?25h")  # rank 0 hid the cursor behind its progress bar
                by = f" by {signal.Signals(stop.received[0]).name}" if stop.received else ""
                print(f"stopped{by}; run_dir={config.run_dir} goes on from its last checkpoint", file=sys.stderr)
            if code in (SAVED, UNSAVED):
                return stop.exit_code(code)
            if code in (0, *FINAL) or stop.received or attempt == config.launch.max_restarts:
                return code
            print(f"starting again ({attempt + 1} of {config.launch.max_restarts} restarts)", file=sys.stderr)
    raise AssertionError("unreachable: the last attempt returns")


def _attempt(config: Config, import_path: Path, attempt: int, stop: Stop) -> int:
    """One start of all workers. Returns 0, SAVED, UNSAVED, or the exit code of a failure."""
    run_dir = Path(str(config.run_dir))
    (run_dir / health.FILE).unlink(missing_ok=True)
    workers: list[subprocess.Popen[bytes]] = []
    try:
        _start(config, import_path, attempt, workers)
        deadline = math.inf
        while True:
            codes = [worker.poll() for worker in workers]
            over = stop.insists or time.monotonic() > deadline
            if any(code in STOPPED for code in codes) or (over and None in codes):
                return UNSAVED  # with one that left unsaved the others can agree on nothing
            failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, SAVED)]
            if failed:
                return _blame(config, run_dir, workers, failed)
            if None not in codes:
                return SAVED if SAVED in codes else 0
            if deadline == math.inf and (stop.received or SAVED in codes):
                deadline = time.monotonic() + config.launch.grace_seconds
                if stop.received:
                    _ask_to_stop(workers)
            time.sleep(POLL_SECONDS)
    finally:
        _end(workers)


def _start(config: Config, import_path: Path, attempt: int, workers: list[subprocess.Popen[bytes]]) -> None:
    """One process per rank, each in a session of its own so that it can be ended with all its children."""
    size = int(config.launch.nproc_per_node)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        for rank in range(size):
            world = World(rank, size, rank, size, attempt)
            env = worker_environment(
                world, port, listener.fileno(), int(config.launch.threads_per_process), import_path.absolute()
            )
            command = [sys.executable, "-m", "ddp_train.worker", str(Path(str(config.run_dir)).absolute())]
            fds = (listener.fileno(),) if world.is_leader else ()
            workers.append(subprocess.Popen(command, env=env, pass_fds=fds, start_new_session=True))


def _blame(config: Config, run_dir: Path, workers: list[subprocess.Popen[bytes]], failed: list[int]) -> int:
    """The exit code of a failed attempt. A worker that could not speak for itself is reported here."""
    silent = [rank for rank in failed if workers[rank].returncode < 0 or workers[rank].returncode not in _SPOKEN]
    if silent:
        rank = silent[0]
        log_file = run_dir / "logs" / f"rank_{rank}.log"
        failure = health.failure_from_exit(workers[rank].returncode, rank, log_file)
        health.report(run_dir, failure, described(config))
    else:
        health.wait_for_report(run_dir, 5.0)
    codes = [worker.returncode for worker in workers if worker.returncode and worker.returncode > 0]
    return next((code for code in codes if code in _SPOKEN and code != LaunchError.exit_code), LaunchError.exit_code)


_SPOKEN = tuple(cls.exit_code for cls in (LaunchError, *LaunchError.__subclasses__()))
"""Exit codes by which a worker says that it reported its failure itself."""


def _ask_to_stop(workers: list[subprocess.Popen[bytes]]) -> None:
    """SIGTERM, whatever came here: a worker that still imports would die of SIGINT with a traceback."""
    for worker in workers:
        worker.send_signal(signal.SIGTERM)


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    """SIGKILL, to whole process groups."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):  # the whole group is gone
            os.killpg(worker.pid, signal.SIGKILL)
    for worker in workers:
        worker.wait()
