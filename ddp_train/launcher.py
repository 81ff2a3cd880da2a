"""Starts one worker per GPU on this host, watches them, and leaves nothing running. Does not import torch."""

from __future__ import annotations

import contextlib
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

POLL_SECONDS = 0.02
FINAL = (ConfigError.exit_code, DataError.exit_code, WriteError.exit_code)
"""Exit codes of failures that a restart would only repeat."""


class Stop:
    """The signals that ask the launcher to stop; handlers only take note."""

    def __init__(self) -> None:
        self.received: list[int] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes note of SIGINT, SIGTERM and SIGHUP inside; restores the handlers that were there."""
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, lambda number, _: self.received.append(number)) for number in signals]
        try:
            yield
        finally:
            for number, handler in zip(signals, before, strict=True):
                signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        return 130 if self.received[0] == signal.SIGINT else 143


def launch(config: Config, import_path: Path) -> int:
    """Runs a frozen config in fresh processes, again if it fails and restarts are left. Returns the exit code.

    import_path: the folder from which workers import this package, and the user's own modules.
    """
    stop = Stop()
    with stop.listening():
        for attempt in range(config.launch.max_restarts + 1):
            code = _attempt(config, import_path, attempt, stop)
            if stop.received:
                if sys.stdout.isatty():
                    sys.stdout.write("\x1b[?25h")  # rank 0 hid the cursor behind its progress bar
                name = signal.Signals(stop.received[0]).name
                print(f"stopped by {name}; run_dir={config.run_dir} goes on from its last checkpoint", file=sys.stderr)
                return stop.exit_code
            if code in (0, *FINAL) or attempt == config.launch.max_restarts:
                return code
            print(f"starting again ({attempt + 1} of {config.launch.max_restarts} restarts)", file=sys.stderr)
    raise AssertionError("unreachable: the last attempt returns")


def _attempt(config: Config, import_path: Path, attempt: int, stop: Stop) -> int:
    run_dir = Path(str(config.run_dir))
    (run_dir / health.FILE).unlink(missing_ok=True)
    workers: list[subprocess.Popen[bytes]] = []
    try:
        _start(config, import_path, attempt, workers)
        while not stop.received:
            codes = [worker.poll() for worker in workers]
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                return _blame(config, run_dir, workers, failed)
            if not any(code is None for code in codes):
                return 0
            time.sleep(POLL_SECONDS)
        return stop.exit_code
    finally:
        _end(workers, config.launch.grace_seconds if stop.received else 0.0, stop)


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


def _end(workers: list[subprocess.Popen[bytes]], grace_seconds: float, stop: Stop) -> None:
    """SIGTERM, then after the grace time, or at a second signal, SIGKILL; to whole process groups."""
    if grace_seconds and any(worker.poll() is None for worker in workers):
        _signal(workers, signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while (
            any(worker.poll() is None for worker in workers) and time.monotonic() < deadline and len(stop.received) < 2
        ):
            time.sleep(POLL_SECONDS)
    _signal(workers, signal.SIGKILL)
    for worker in workers:
        worker.wait()


def _signal(workers: list[subprocess.Popen[bytes]], number: int) -> None:
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):  # the whole group is gone
            os.killpg(worker.pid, number)
