"""Starts one worker per GPU on this host, watches them, and leaves nothing running. Does not import torch."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ddp_train.config.auto import described
from ddp_train.config.schema import Config
from ddp_train.distributed.environment import worker_descriptors, worker_environment
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, DataError, HangError, LaunchError, WriteError
from ddp_train.launcher.fork_server import ForkedWorker, ForkServer, WorkerSpec
from ddp_train.linux import adopting_orphans, oom_kills
from ddp_train.resilience import failure_report
from ddp_train.resilience.hang_detector import HangDetector, working_stack
from ddp_train.resilience.heartbeat import END, StatusBoard
from ddp_train.resilience.preemption import INTERRUPTED, SAME_REQUEST_SECONDS, SAVED, SIGNALS, UNSAVED, exit_code, heard
from ddp_train.resilience.restart_policy import RestartPolicy

POLL_SECONDS = 0.02
Workers = list[ForkedWorker | subprocess.Popen[bytes]]
FINAL = (ConfigError.exit_code, DataError.exit_code, WriteError.exit_code)
"""Exit codes of failures that a restart would only repeat."""
STOPPED = (UNSAVED, INTERRUPTED, *(-number for number in SIGNALS))
"""Exit codes of workers that were stopped: they gave up to wait for the others, or did not listen yet."""


class StopRequests:
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

    def hand_on(self) -> None:
        """Passes the first signal on to whoever listened before this, if anybody did. After `listening` only."""
        handler = signal.getsignal(self.received[0]) if self.received else None
        if callable(handler) and handler is not signal.default_int_handler:
            signal.raise_signal(self.received[0])

    def _note(self, number: int, _: object) -> None:
        self._first_time = self._first_time or time.monotonic()
        self.insists = time.monotonic() - self._first_time > SAME_REQUEST_SECONDS
        self.received.append(number)

    def exit_code(self, code: int) -> int:
        """SAVED or UNSAVED, unless somebody sat at the terminal."""
        return exit_code(self.received[0]) if self.received and exit_code(self.received[0]) == INTERRUPTED else code


def launch(
    config: Config, import_path: Path, stop: StopRequests | None = None, server: ForkServer | None = None
) -> int:
    """Runs a frozen config in fresh processes, again if it fails and restarts are left. Returns the exit code.

    import_path: the folder from which workers import this package, and the user's own modules. stop: for those who
    want to know whether the run was asked to stop, even if it was completed all the same. server: forks the workers,
    if it can and `launch.fork_server` wants it; without one each starts by itself.
    """
    stop, restarts = stop or StopRequests(), RestartPolicy(config.launch.max_restarts, Path(str(config.run_dir)))
    with stop.listening(), adopting_orphans():
        for attempt in itertools.count():
            code = _attempt(config, import_path, attempt, stop, server)
            if code == UNSAVED:
                if sys.stdout.isatty():
                    sys.stdout.write("\x1b[?25h")  # rank 0 hid the cursor behind its progress bar
                by = f" by {signal.Signals(stop.received[0]).name}" if stop.received else ""
                saved = any(Path(str(config.run_dir)).glob("checkpoints/step_*"))
                rest = f"stopped{by}; run_dir={config.run_dir} goes on from its last checkpoint"
                print(rest if saved else f"stopped{by}; nothing was saved", file=sys.stderr)
            if code in (SAVED, UNSAVED):
                return stop.exit_code(code)
            if code in (0, *FINAL) or stop.received:
                return code
            if refusal := restarts.refusal():
                if restarts.allowed:
                    print(f"not started again: {refusal}", file=sys.stderr)
                return code
            print(f"starting again ({restarts.used} of {restarts.allowed} restarts)", file=sys.stderr)
    raise AssertionError("unreachable: it counts for ever")


def _attempt(config: Config, import_path: Path, attempt: int, stop: StopRequests, server: ForkServer | None) -> int:
    """One start of all workers. Returns 0, SAVED, UNSAVED, or the exit code of a failure."""
    run_dir = Path(str(config.run_dir))
    (run_dir / failure_report.FILE).unlink(missing_ok=True)
    workers: Workers = []
    board, oom_kills_before = StatusBoard.create(int(config.launch.nproc_per_node)), oom_kills()
    try:
        _start(config, import_path, attempt, board, workers, stop, server)
        if not workers:  # asked to stop before
            return UNSAVED
        detector = HangDetector(board, [worker.pid for worker in workers], config.launch.timeout_seconds)
        deadline = math.inf
        while True:
            codes = [worker.poll() for worker in workers]
            over = stop.insists or time.monotonic() > deadline
            if any(code in STOPPED for code in codes) or (over and None in codes):
                return UNSAVED  # with one that left unsaved the others can agree on nothing
            early = [rank for rank, code in enumerate(codes) if code == 0 and board.ranks[rank].phase != END]
            failed = early + [rank for rank, code in enumerate(codes) if code not in (None, 0, SAVED)]
            if failed:
                code = _blame(config, run_dir, workers, failed, board, oom_kills() > oom_kills_before)
                patience = min(config.launch.grace_seconds, deadline - time.monotonic())
                board.ranks[0].wait_until_saved(patience, lambda: workers[0].poll() is not None or stop.insists)
                return code
            if None not in codes:
                return SAVED if SAVED in codes else 0
            if deadline == math.inf and (stop.received or SAVED in codes):
                deadline = time.monotonic() + config.launch.grace_seconds
                if stop.received:
                    _ask_to_stop(workers)
            if deadline == math.inf and detector.is_hung():
                return _report_hang(config, run_dir, detector)
            time.sleep(POLL_SECONDS)
    finally:
        _end(workers)
        board.close()


def _start(
    config: Config,
    import_path: Path,
    attempt: int,
    board: StatusBoard,
    workers: Workers,
    stop: StopRequests,
    server: ForkServer | None,
) -> None:
    """One process per rank, each in a session of its own so that it can be ended with all its children.

    None at all if the launcher is asked to stop before the server can fork.
    """
    size, run_dir = int(config.launch.nproc_per_node), str(Path(str(config.run_dir)).absolute())
    threads = int(config.launch.threads_per_process)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        specs = []
        for rank in range(size):
            world = World(rank, size, rank, size, attempt)
            env = worker_environment(world, port, threads, import_path.absolute())
            descriptors = worker_descriptors(world, listener.fileno(), board.descriptor)
            arguments = [run_dir, f"rank={rank}"]  # the rank is for readers of `ps`
            specs.append(WorkerSpec(arguments, env, descriptors))
        if server and config.launch.fork_server:
            workers += server.fork(specs, given_up=lambda: bool(stop.received))
        if not workers and not stop.received:
            for spec in specs:
                env = spec.environment | {name: str(number) for name, number in spec.descriptors.items()}
                fds = spec.descriptors.values()
                workers.append(subprocess.Popen(spec.command(), env=env, pass_fds=fds, start_new_session=True))


def _report_hang(config: Config, run_dir: Path, detector: HangDetector) -> int:
    """Names the rank that keeps the run from going on, here and in its own log. Returns the exit code."""
    hang = detector.diagnose(run_dir)
    log_file = run_dir / "logs" / f"rank_{hang.rank}.log"
    detail = f"no progress for {hang.seconds:.1f} s (launch.timeout_seconds={config.launch.timeout_seconds:g})"
    detail += "".join(f"; {known}" for known in (hang.reason, hang.others) if known)
    failure = failure_report.Failure(
        kind=HangError.kind,
        rank=hang.rank,
        host=socket.gethostname(),
        step=hang.row.step,
        phase=hang.row.phase,
        detail=detail,
        remedy="see the stack of that rank; if it is only slow, raise launch.timeout_seconds",
        log=str(log_file),
        exit_code=HangError.exit_code,
    )
    failure_report.append(log_file, [failure_report.headline(failure), "stack (most recent call last):", *hang.stack])
    failure_report.report(run_dir, failure, described(config), stack=hang.stack)
    return failure.exit_code


def _blame(
    config: Config, run_dir: Path, workers: Workers, failed: list[int], board: StatusBoard, oom_killed: bool
) -> int:
    """The exit code of a failed attempt. A worker that could not speak for itself is reported here."""
    silent = [rank for rank in failed if workers[rank].returncode not in SELF_REPORTED]
    if silent:
        rank = silent[0]
        code, log_file = workers[rank].returncode, run_dir / "logs" / f"rank_{rank}.log"
        status = board.ranks[rank]
        failure = failure_report.failure_from_exit(code, rank, status, log_file, oom_killed, board.sizes())
        # A fault (SIGSEGV, SIGABRT ...) writes the stack where it happened.
        failure_report.report(run_dir, failure, described(config), stack=working_stack(run_dir, rank))
    else:
        failure_report.wait_for_report(run_dir, 5.0)
    codes = [worker.returncode for worker in workers if worker.returncode and worker.returncode > 0]
    return next(
        (code for code in codes if code in SELF_REPORTED and code != LaunchError.exit_code), LaunchError.exit_code
    )


SELF_REPORTED = tuple(cls.exit_code for cls in (LaunchError, *LaunchError.__subclasses__()))
"""Exit codes by which a worker says that it reported its failure itself."""


def _ask_to_stop(workers: Workers) -> None:
    """SIGTERM, whatever came here: a worker that still imports would die of SIGINT with a traceback."""
    for worker in workers:
        worker.send_signal(signal.SIGTERM)


def _end(workers: Workers) -> None:
    """SIGKILL, to whole process groups."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):  # the whole group is gone
            os.killpg(worker.pid, signal.SIGKILL)
    for worker in workers:
        worker.wait()
