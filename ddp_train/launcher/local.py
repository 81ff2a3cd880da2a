"""Starts one worker per GPU on this host, watches them, and leaves no process behind. Does not
import torch."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ddp_train.distributed.environment import worker_descriptors, worker_environment
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, DataError, LaunchError, WriteError
from ddp_train.launcher import loopback
from ddp_train.launcher.elastic import Elastic
from ddp_train.launcher.fork_server import ForkedWorker, ForkServer, WorkerSpec
from ddp_train.launcher.size import is_of_device
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.launcher.workload import Workload
from ddp_train.linux import adopting_orphans, oom_kills
from ddp_train.options.schema import Config
from ddp_train.resilience import collectives, failure_report
from ddp_train.resilience.hang_detector import HangDetector, note_late, working_stack
from ddp_train.resilience.heartbeat import STARTING, StatusBoard
from ddp_train.resilience.just_in_time import Loss, save_by_survivor, saved_step
from ddp_train.resilience.preemption import INTERRUPTED, SAVED, SIGNALS, UNSAVED
from ddp_train.resilience.restart_policy import RestartPolicy
from ddp_train.text import counted

POLL_SECONDS = 0.02
REPORT_SECONDS = 5.0
"""How long to wait for the report of a worker whose exit code says that it reports its failure."""
LEAST_SAVE_SECONDS = 5.0
"""For a survivor to stop, and to save, whatever is left of launch.grace_seconds."""
FINAL = (ConfigError.exit_code, DataError.exit_code, WriteError.exit_code)
"""Exit codes of failures that a restart would only repeat."""
STOPPED = (UNSAVED, INTERRUPTED, *(-number for number in SIGNALS))
"""Exit codes of stopped workers: gave up waiting for peers, or had not installed signal handlers
yet."""
SELF_REPORTED = tuple(cls.exit_code for cls in (LaunchError, *LaunchError.__subclasses__()))
"""Exit codes of workers that report their failure themselves."""


def launch(
    config: Config,
    import_path: Path | None,
    stop: StopRequests | None = None,
    server: ForkServer | None = None,
    at_another_number: Callable[[int], Config] | None = None,
    workload: Workload = Workload(),  # noqa: B008  it is frozen
) -> int:
    """Runs a frozen config in new processes, and again after a failure if restarts are left.
    Returns the exit code.

    import_path: the folder of a checkout, from which workers import first. stop: records the stop
    requests for the caller, even if the run was completed all the same. server: forks the workers,
    if it can and `launch.fork_server` is true; otherwise each worker is started as a new
    interpreter. at_another_number: the config for another number of processes, where it has a
    range. workload: what runs in the processes.
    """
    stop = stop or StopRequests()
    elastic = Elastic(config, at_another_number)
    code = UNSAVED
    try:
        with stop.listening(), adopting_orphans():
            code = loopback.reported(config, workload) or _attempts(
                config, import_path, stop, server, elastic, workload
            )
    finally:
        elastic.close(completed=code == 0)
        workload.page.write()
    return code


def _attempts(
    config: Config,
    import_path: Path | None,
    stop: StopRequests,
    server: ForkServer | None,
    elastic: Elastic,
    workload: Workload,
) -> int:
    restarts = RestartPolicy(config.launch.max_restarts, Path(str(config.run_dir)))
    lost = None
    for number in itertools.count():
        attempt = Attempt(
            elastic.config, import_path, number, stop, server, lost, restarts, elastic, workload
        )
        with contextlib.closing(attempt):
            code = attempt.run()
        workload.page.attempt_ended(saved=code == SAVED)
        lost = attempt.lost
        if code == SAVED and attempt.is_for_change and not stop.received:
            _go_on(elastic, restarts)
            continue
        if code == UNSAVED or (code == SAVED and attempt.is_for_change):
            stop.print_stopped(config, saved=code == SAVED, translate=workload.translate)
        if code in (SAVED, UNSAVED):
            return stop.exit_code(code)
        if code in (0, *FINAL) or (stop.received and not attempt.is_made_good):
            return code
        if attempt.refusal:
            if restarts.allowed:
                print(f"not restarted: {workload.translate(attempt.refusal)}", file=sys.stderr)
            return code
        if attempt.saved_step is not None:
            whence = f", from step {attempt.saved_step}: no step is lost"
        else:
            whence = ""
        if attempt.gives_up:
            on = (
                f"continuing with {counted(elastic.size.count, 'process')}{whence};"
                f" {attempt.gives_up}"
            )
        else:
            on = f"restarting ({restarts.used} of {restarts.allowed} restarts){whence}"
        print(on, file=sys.stderr)
        if elastic.is_asked:
            _go_on(elastic, restarts)
    raise AssertionError("unreachable: the loop has no end")


def _go_on(elastic: Elastic, restarts: RestartPolicy) -> None:
    """With the number of processes that was asked for."""
    step = max(0, restarts.step_of_newest())
    if elastic.become_what_is_asked(step):
        what = f"{counted(elastic.size.count, 'process')}, from step {step}"
        print(f"continuing with {what}: as requested", file=sys.stderr)


class Attempt:
    """One start of all workers of a run, from their start to their end. Close it to kill what is
    left of them."""

    def __init__(
        self,
        config: Config,
        import_path: Path | None,
        number: int,
        stop: StopRequests,
        server: ForkServer | None,
        lost: Loss | None = None,
        restarts: RestartPolicy | None = None,
        elastic: Elastic | None = None,
        workload: Workload | None = None,
    ) -> None:
        """number: attempts before this one. lost: by the one before. restarts: None allows none.
        elastic: None: the number of processes stays. The other parameters are those of `launch`."""
        self.workload = workload or Workload()
        self.elastic = elastic or Elastic(config, None)
        self.is_asked_to_stop = False
        self.is_for_change = False
        """Whether that was only to continue with another number of processes."""
        self.gives_up = ""
        """Why the next attempt has fewer processes, or other GPUs."""
        self.restarts = restarts
        self.is_made_good = False
        """Whether the user was told that the run continues without loss: a stop from then on is the
        next attempt's."""
        self.lost_before = lost
        self.lost: Loss | None = None
        """The rank that this attempt has lost."""
        self.saved_step: int | None = None
        """The step that a survivor has saved then."""
        self.config = config
        self.import_path = import_path
        self.number = number
        self.stop = stop
        self.server = server
        self.run_dir = Path(str(config.run_dir))
        self.board = StatusBoard.create(int(config.launch.nproc_per_node))
        self.oom_kills_before = oom_kills()
        self.workers: list[ForkedWorker | subprocess.Popen[bytes]] = []

    @functools.cached_property
    def refusal(self) -> str:
        """Why there is no restart after the failure that was reported; empty if there is one."""
        if not self.restarts:
            return "no restarts"
        refusal = self.restarts.refusal()
        if self.restarts.allowed:
            at = self.lost.at if self.lost else time.monotonic()
            self.gives_up = self.elastic.shrink(
                self._rank_that_may_lack_its_gpu(), self.restarts.has_progressed, at
            )
        if self.gives_up:
            self.restarts.begin_anew()
            return ""
        return refusal

    def _rank_that_may_lack_its_gpu(self) -> int | None:
        """The one whose failure was reported, if that may be its device's."""
        try:
            failure = json.loads((self.run_dir / failure_report.FILE).read_text())
            rank = int(failure["rank"])
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ):  # it could not be written, or was damaged since
            return None
        if is_of_device(failure, (self.workers[rank].poll() or 0) < 0):
            return rank
        return None

    def run(self) -> int:
        """Starts the workers and watches them. Returns 0, SAVED, UNSAVED, or the exit code of a
        failure."""
        (self.run_dir / failure_report.FILE).unlink(missing_ok=True)
        self.start()
        return (
            self.watch() if self.workers else UNSAVED
        )  # no workers: a stop was requested before their start

    def start(self) -> None:
        """Starts one process per rank, each in a session of its own, so that it can be killed with
        its children.

        Starts none if a stop is requested before the fork server can fork.
        """
        launch = self.config.launch
        size = int(launch.nproc_per_node)
        with socket.socket() as listener:  # of the store: rank 0 inherits it
            listener.bind(("127.0.0.1", 0))
            listener.listen(socket.SOMAXCONN)
            port = listener.getsockname()[1]
            specs = []
            for rank in range(size):
                world = World(rank, size, rank, size, self.number)
                env = worker_environment(
                    world,
                    port,
                    int(launch.threads_per_process),
                    self.import_path,
                    lost=self.lost_before and self.lost_before.as_dict(),
                    resized=self.elastic.last_changes(),
                    devices=self.elastic.size.devices(),
                )
                descriptors = worker_descriptors(world, listener.fileno(), self.board.descriptor)
                arguments = self.workload.arguments(self.run_dir, rank)
                specs.append(WorkerSpec(arguments, env, descriptors, [*self.workload.program]))
            if self.server and launch.fork_server:
                self.workers += self.server.fork(specs, given_up=lambda: bool(self.stop.received))
            if not self.workers and not self.stop.received:
                self.workers += [spec.start_interpreter() for spec in specs]

    def watch(self) -> int:
        """Waits for the end of all workers, for a failure, a hang or a stop. Returns the exit code,
        as `run` does."""
        detector = HangDetector(
            self.board, [worker.pid for worker in self.workers], self.config.launch.timeout_seconds
        )
        deadline = math.inf  # set by a stop
        while True:
            codes = [
                self.board.ranks[rank].believed(worker.poll())
                for rank, worker in enumerate(self.workers)
            ]
            if any(code in STOPPED for code in codes):
                return UNSAVED  # with one rank gone the others cannot agree on a step
            if None in codes and (self.stop.repeated or time.monotonic() > deadline):
                return UNSAVED
            if failed := self._failed_ranks(codes):
                self._save_by_survivor(failed, deadline)
                code = self._report_exit(failed, codes)
                self._wait_for_checkpoint(deadline)
                if self.saved_step is not None:
                    print(saved_step(self.saved_step, self._goes_on()), file=sys.stderr)
                return code
            if None not in codes:
                return SAVED if SAVED in codes else 0
            if deadline == math.inf and (
                self.stop.received or (SAVED in codes and not self.is_for_change)
            ):
                deadline = time.monotonic() + self.config.launch.grace_seconds
                if self.stop.received:
                    self._ask_to_stop()
            if deadline == math.inf and detector.is_hung():
                return self._report_hang(detector)
            self.elastic.wait(POLL_SECONDS)
            self.elastic.see(self.board)
            self.workload.page.look([status.phase for status in self.board.ranks])
            if self.elastic.is_asked and all(status.heeds_stop for status in self.board.ranks):
                self._stop_for_change()

    def _failed_ranks(self, codes: list[int | None]) -> list[int]:
        """Ranks that exited with the code of a failure, or with one that they did not announce."""
        return [rank for rank, code in enumerate(codes) if code not in (None, 0, SAVED)]

    def _save_by_survivor(self, failed: list[int], deadline: float) -> None:
        """Only if a rank was killed: an exception, or an exit by the rank itself, would come again
        at the same step."""
        if all((self.workers[rank].poll() or 0) >= 0 for rank in failed):
            return
        at = time.monotonic()
        statuses = self.board.ranks
        self.saved_step = save_by_survivor(
            self.board,
            lambda rank: self.workers[rank].poll() is None,
            seconds=max(LEAST_SAVE_SECONDS, min(self.config.launch.grace_seconds, deadline - at)),
            given_up=lambda: self.stop.repeated,
            before_saving=lambda: self._wait_for_checkpoint(deadline),
            on_late=lambda late: note_late(
                self.run_dir, {rank: self.workers[rank].pid for rank in late}, statuses
            ),
        )
        reached = [status.step for rank, status in enumerate(statuses) if rank not in failed]
        step = max(reached, default=statuses[failed[0]].step)
        before = self.lost_before
        trained = any(status.state != STARTING for status in statuses)
        if before and not trained:  # it had no state of its own yet
            step = before.step
            at = before.at
        if trained and self.saved_step is None:
            print("no other rank could save its state: see their logs", file=sys.stderr)
        self.lost = Loss(failed[0], step, at)

    def _report_exit(self, failed: list[int], codes: list[int | None]) -> int:
        """Reports the first failed worker that did not report by itself. Returns the exit code of
        the attempt."""
        unreported = [rank for rank in failed if codes[rank] not in SELF_REPORTED]
        if unreported:
            rank = unreported[0]
            failure = failure_report.failure_from_exit(
                self.workers[rank].returncode,
                rank,
                self.board.ranks[rank],
                self._log_file(rank),
                oom_killed=oom_kills() > self.oom_kills_before,
                sizes=self.board.sizes(),
            )
            # A fault (SIGSEGV, SIGABRT ...) writes the stack where it happened.
            stack = failure_report.stack_of(rank, working_stack(self.run_dir, rank))
            failure = self.workload.translated(failure)
            facts = self.workload.facts(self.config)
            with self.board.locked():
                if (
                    not self.board.reported_code()
                ):  # a worker has, and could write no file: that is all there is to say
                    failure_report.report(
                        self.run_dir, failure, facts, stack, goes_on=self._goes_on
                    )
        else:
            self.board.wait_for_report(REPORT_SECONDS)
        # The others end with 70, perhaps before the one that reports.
        of_workers = (
            code for code in codes if code in SELF_REPORTED and code != LaunchError.exit_code
        )
        return next(of_workers, self.board.reported_code() or LaunchError.exit_code)

    def _goes_on(self) -> bool:
        """Whether a restart costs no step. Where no survivor has saved, rank 0's own writing may
        still allow one."""
        self.is_made_good = (
            self.saved_step is not None and not self.stop.received and not self.refusal
        )
        return self.is_made_good

    def _wait_for_checkpoint(self, deadline: float) -> None:
        """Lets rank 0 complete a checkpoint that it is writing, for launch.grace_seconds at
        most."""
        seconds = min(self.config.launch.grace_seconds, deadline - time.monotonic())
        self.board.ranks[0].wait_until_saved(
            seconds, lambda: self.workers[0].poll() is not None or self.stop.repeated
        )

    def _report_hang(self, detector: HangDetector) -> int:
        """Reports the rank that blocks the run, to the user and in that rank's log. Returns the
        exit code."""
        hang = detector.diagnose(self.run_dir)
        log_file = self._log_file(hang.rank)
        timeout_seconds = self.config.launch.timeout_seconds
        failure = self.workload.translated(
            failure_report.failure_from_hang(hang, log_file, timeout_seconds)
        )
        lines = [failure_report.headline(failure), "stack (most recent call last):", *hang.stack]
        failure_report.append_to_log(log_file, lines)
        stack = failure_report.stack_of(hang.rank, hang.stack)
        failure_report.report(self.run_dir, failure, self.workload.facts(self.config), stack)
        return failure.exit_code

    def _log_file(self, rank: int) -> Path:
        return self.run_dir / "logs" / f"rank_{rank}.log"

    def _ask_to_stop(self) -> None:
        """Sends SIGTERM, whatever signal came: a worker that still imports would die of SIGINT with
        a traceback."""
        if (
            self.is_asked_to_stop
        ):  # for a change of their number, and now for good: a second signal would hurry them
            for status in self.board.ranks:
                status.goes_on = 0
            return
        self.is_asked_to_stop = True
        for worker in self.workers:
            worker.send_signal(signal.SIGTERM)

    def _stop_for_change(self) -> None:
        """All ranks stop after the same step and save; another number of processes resumes
        there."""
        if not self.is_asked_to_stop:
            self.is_for_change = True
            for status in self.board.ranks:
                status.goes_on = 1
            self._ask_to_stop()

    def close(self) -> None:
        """Kills the process group of each worker, waits for the workers, and closes the status
        board."""
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):  # the whole group has ended
                os.killpg(worker.pid, signal.SIGKILL)
        for rank, worker in enumerate(self.workers):
            worker.wait()
            with contextlib.suppress(OSError):
                collectives.unfinished(collectives.record_file(self.run_dir, rank)).unlink(
                    missing_ok=True
                )
        self.board.close()
