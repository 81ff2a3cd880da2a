"""One attempt of a run: all workers, from their start to their end. Torch-free."""

from __future__ import annotations

import enum
import math
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_train.distributed.child_environments import (
    continuation_environment,
    worker_descriptors,
    worker_environment,
)
from ddp_train.distributed.world import World
from ddp_train.errors import HangError
from ddp_train.launcher.elastic import Elastic
from ddp_train.launcher.failure_recorder import FailureRecorder
from ddp_train.launcher.fork_server import ForkServer, WorkerSpec
from ddp_train.launcher.kept_attempt import KeptAttempt
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.launcher.workers import Workers
from ddp_train.launcher.workload import Workload
from ddp_train.resilience import failure_report
from ddp_train.resilience.failure_report import Report
from ddp_train.resilience.hang_detector import HangDetector
from ddp_train.resilience.held_devices import HeldDevices
from ddp_train.resilience.kept_memory import KeptMemory
from ddp_train.resilience.lost_ranks import Loss
from ddp_train.resilience.preemption import INTERRUPTED, SAVED, SIGNALS, UNSAVED

POLL_SECONDS = 0.02
STOPPED = (UNSAVED, INTERRUPTED, *(-number for number in SIGNALS))
"""Exit codes of stopped workers that gave up waiting for peers, or had not installed signal
handlers yet."""


@dataclass(frozen=True)
class Launch:
    """State that all attempts of a run share."""

    import_path: Path | None
    stop: StopRequests
    server: ForkServer | None
    elastic: Elastic
    workload: Workload
    memory: KeptMemory | None = None
    """The memory in which the processes keep their state; None where there can be none."""
    devices: HeldDevices | None = None
    """The memory on GPUs that it takes; None on CPUs."""


class Stage(enum.Enum):
    """The party that has asked the workers to stop. A change may become a stop."""

    TRAINING = "nobody has"
    CHANGING = "the launcher has, to start another number of them"
    CHANGE_STOPPED = "the launcher has, to start another number; then the user, for good"
    STOPPING = "the user has"


IN_CHANGE = (Stage.CHANGING, Stage.CHANGE_STOPPED)
IN_STOP = (Stage.CHANGE_STOPPED, Stage.STOPPING)


@dataclass(frozen=True)
class AttemptEnd:
    """The end of an attempt."""

    code: int
    """0, SAVED, UNSAVED, or the exit code of a failure."""
    is_for_change: bool = False
    """Whether the workers were asked to stop for a change of their number."""
    loss: Loss | None = None
    """The rank that was lost, and where."""
    is_saving: bool = False
    """Whether a checkpoint was being written when the workers ended."""
    kept: KeptAttempt | None = None
    """The last step that the workers have kept, if no checkpoint has it."""
    killed_ranks: frozenset[int] = frozenset()
    """The failed ranks that were killed by a signal."""
    report: Report | None = None
    """A failure that is recorded and not printed: whether it is fatal is not decided yet."""


class Attempt:
    """Starts all workers and watches them. Close it to kill what is left of them."""

    def __init__(
        self,
        launch: Launch,
        number: int,
        loss_before: Loss | None = None,
        kept_before: KeptAttempt | None = None,
    ) -> None:
        """
        number: attempts before this one.
        loss_before: the rank that the last one has lost.
        kept_before: what it has kept.
        """
        self.launch = launch
        self.config = launch.elastic.config
        self.run_dir = Path(str(self.config.run_dir))
        self.number = number
        self.loss_before = loss_before
        self.kept_before = kept_before
        self.workers = Workers(self.run_dir, int(self.config.launch.nproc_per_node))
        self.recorder = FailureRecorder(self.config, self.workers, launch.workload)
        self.stage = Stage.TRAINING
        self.deadline = math.inf
        """When the workers are killed; set by a stop."""

    def close(self) -> None:
        self.workers.close()

    def run(self) -> AttemptEnd:
        """Start the workers and wait for their end, for a failure, a hang or a stop."""
        failure_report.set_aside(self.run_dir)
        if self.launch.devices and not self.kept_before:
            self.launch.devices.forget()  # what attempts before have kept is in a checkpoint
        self.start()
        if not self.workers.processes:  # a stop was requested before their start
            return self._end(UNSAVED)
        return self._watch()

    def start(self) -> None:
        """Start one process per rank.

        Starts none if a stop is requested before the fork server can fork.
        """
        count = int(self.config.launch.nproc_per_node)
        with socket.socket() as listener:  # of the store: rank 0 inherits it
            listener.bind(("127.0.0.1", 0))
            listener.listen(socket.SOMAXCONN)
            specs = [self._worker_spec(rank, count, listener) for rank in range(count)]
            server = self.launch.server if self.config.launch.fork_server else None
            self.workers.start(specs, server, given_up=lambda: bool(self.launch.stop.received))

    def _worker_spec(self, rank: int, count: int, listener: socket.socket) -> WorkerSpec:
        elastic = self.launch.elastic
        workload = self.launch.workload
        world = World(rank, count, rank, count, self.number)
        port = listener.getsockname()[1]
        threads = int(self.config.launch.threads_per_process)
        env = worker_environment(world, port, threads, self.launch.import_path)
        env |= continuation_environment(
            lost=self.loss_before.as_dict() if self.loss_before else None,
            changes=elastic.last_changes(),
            devices=elastic.size.gpus_in_use(),
        )
        memory = self.launch.memory
        devices = self.launch.devices
        descriptors = worker_descriptors(
            world,
            listener.fileno(),
            self.workers.board.descriptor,
            memory.descriptor if memory else None,
            devices.workers_end.fileno() if devices else None,
        )
        if self.kept_before:
            env |= self.kept_before.variables()
            if world.is_leader:
                descriptors |= self.kept_before.descriptors()
        arguments = workload.arguments(self.run_dir, rank)
        return WorkerSpec(arguments, env, descriptors, [*workload.program])

    def _watch(self) -> AttemptEnd:
        stop = self.launch.stop
        timeout_seconds = self.config.launch.timeout_seconds
        detector = HangDetector(self.workers.board, self.workers.pids(), timeout_seconds)
        while True:
            codes = self.workers.exit_codes()
            if any(code in STOPPED for code in codes):
                return self._end(UNSAVED)  # with one rank gone the others cannot agree on a step
            if None in codes and (stop.repeated or time.monotonic() > self.deadline):
                return self._end(UNSAVED)
            failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, SAVED)]
            if failed:
                return self._end_of_failure(failed, codes)
            if None not in codes:
                return self._end(SAVED if SAVED in codes else 0)
            if self.stage not in IN_STOP:
                self._begin_stop(codes)
            if self.stage not in IN_STOP and detector.finds_hang():
                return self._end_of_hang(detector)
            self._wait()

    def _end(self, code: int) -> AttemptEnd:
        return AttemptEnd(code, is_for_change=self.stage in IN_CHANGE)

    def _begin_stop(self, codes: Sequence[int | None]) -> None:
        """Ask the workers to stop if the user has asked the launcher, or one of them, to stop.

        A worker that was asked has saved.
        """
        is_stopped_by_worker = SAVED in codes and self.stage is Stage.TRAINING
        if not self.launch.stop.received and not is_stopped_by_worker:
            return
        self.deadline = time.monotonic() + self.config.launch.grace_seconds
        if self.stage is Stage.CHANGING:  # a second signal would hurry them
            self.workers.announce_successors(False)
            self.stage = Stage.CHANGE_STOPPED
            return
        if self.launch.stop.received:
            self.workers.ask_to_stop()
        self.stage = Stage.STOPPING

    def _wait(self) -> None:
        """Sleep for a moment, and do what comes up meanwhile.

        That is a page, or a request for another number of processes.
        """
        elastic = self.launch.elastic
        board = self.workers.board
        elastic.wait(POLL_SECONDS)
        devices = self.launch.devices
        if devices:
            devices.take()
            if self.kept_before and all(status.batches for status in board.ranks):
                devices.let_go(self.kept_before.held)  # it is in a checkpoint
        elastic.answer_when_done(board)
        self.launch.workload.page.look([status.phase for status in board.ranks])
        if self.stage is Stage.TRAINING and elastic.is_requested and self.workers.all_heed_stop():
            self.workers.announce_successors(True)
            self.workers.ask_to_stop()
            self.stage = Stage.CHANGING

    def _end_of_failure(self, failed: Sequence[int], codes: Sequence[int | None]) -> AttemptEnd:
        """Record the failure, and let a checkpoint that is being written be completed."""
        killed = frozenset(rank for rank in failed if self.workers.was_killed(rank))
        loss = self._loss(failed[0], time.monotonic())
        report = self.recorder.record_exit(failed, codes)
        self._wait_for_checkpoint()
        return AttemptEnd(
            code=self.recorder.exit_code(codes),
            is_for_change=self.stage in IN_CHANGE,
            loss=loss,
            is_saving=bool(self.workers.board.ranks[0].saving),
            killed_ranks=killed,
            report=report,
        )

    def _loss(self, rank: int, at: float) -> Loss:
        """The loss of a rank, for the next attempt. The step is the last one that all completed."""
        statuses = self.workers.board.ranks
        has_begun = all(status.step for status in statuses)
        if not has_begun and self.loss_before:  # the attempt had no state of its own yet
            return replace(self.loss_before, rank=rank)
        return Loss(rank, min(status.step for status in statuses), at)

    def _wait_for_checkpoint(self) -> None:
        """Let rank 0 complete a checkpoint that it is writing.

        Waits for launch.grace_seconds at most.
        """
        seconds = min(self.config.launch.grace_seconds, self.deadline - time.monotonic())
        self.workers.wait_for_checkpoint(seconds, given_up=lambda: self.launch.stop.repeated)

    def _end_of_hang(self, detector: HangDetector) -> AttemptEnd:
        hang = detector.diagnose(self.run_dir)
        report = self.recorder.record_hang(hang)
        lost_at = time.monotonic() - hang.seconds
        return AttemptEnd(
            code=HangError.exit_code,
            is_for_change=self.stage in IN_CHANGE,
            loss=self._loss(hang.rank, lost_at),
            is_saving=bool(self.workers.board.ranks[0].saving),
            report=report,
        )
