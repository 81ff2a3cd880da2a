"""The report of a worker that fails, made once, by the rank at fault."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ddp_train.checkpoints.layout import places, step_of
from ddp_train.distributed.agent import restarts_left, write_reported, write_torchrun_error_file
from ddp_train.distributed.process_group import Store
from ddp_train.errors import LaunchError, NonFiniteLossError
from ddp_train.performance.memory_snapshot import VIEWER, snapshot_file
from ddp_train.resilience import failure_report, lost_hosts, peer_check
from ddp_train.resilience.failure import Failure, failure_from, is_peer_error
from ddp_train.resilience.stdio import TolerantStream
from ddp_train.runs.worker_process import WorkerProcess

PEER_ERROR_GRACE_SECONDS = 3.0
"""Time that a worker with a peer error gives the failing rank to report first."""
HOST_GRACE_SECONDS = 1.0
"""The same time where other hosts continue once this one has ended."""
log = logging.getLogger(__name__)


class FailureReporter:
    """Reports why this worker failed: on the terminal, in failure.json, and to torchrun."""

    def __init__(
        self,
        worker: WorkerProcess,
        run_facts: dict[str, Any],
        translate: Callable[[str], str] = str,
        hosts_may_leave: bool = False,
    ) -> None:
        """Keep the terminal, before standard error may become this rank's log file.

        run_facts: entries of summary.json.
        translate: replaces the keys of the config in a message by what the user knows.
        hosts_may_leave: torchrun's agents continue without a lost host. The processes that fail
            with it delay them.
        """
        self.worker = worker
        self.run_dir = worker.run_dir
        self.world = worker.world
        self.board = worker.board
        self.status = worker.status
        self.run_facts = run_facts
        self.translate = translate
        self.hosts_may_leave = hosts_may_leave
        self.terminal = TolerantStream(os.fdopen(os.dup(2), "w"))

    def log_and_report(self, error: BaseException, grace_seconds: float) -> int:
        """Log and report an error, and wait until no checkpoint is being written.

        grace_seconds: the longest wait.

        Returns the exit code, which the launcher knows by then.
        """
        step = self.status.step
        if isinstance(error, NonFiniteLossError):
            step = error.step
        log.error("failed in step %d, %s", step, self.status.phase, exc_info=error)
        code = self.report(error)
        self.status.wait_until_saved(grace_seconds)
        return self.status.leaving(code)

    def report(self, error: BaseException) -> int:
        """Report an error, unless it only follows from another rank's, which then reports first.

        Returns the exit code.
        """
        of_peer = is_peer_error(error)
        # Through the store the ranks find out which of them is missing, if no launcher knows.
        store = None
        if of_peer and not self.board:
            store = self.worker.store
        if self._is_reported_by_another(error, of_peer, store):
            return LaunchError.exit_code
        failure = self._failure_of(error)
        if store:
            failure = peer_check.attribute_failure(failure, error, store, self.world)
        detail = self.translate(failure.detail)
        remedy = self.translate(failure.remedy)
        failure = replace(failure, detail=detail, remedy=remedy)
        lock = self.board.locked() if self.board else contextlib.nullcontext()
        with lock:
            # A rank may have reported without a file, where none can be written.
            is_reported = self._reported_code() != 0
            if not is_reported and failure_report.record(self.run_dir, failure, self.run_facts):
                trace = "" if of_peer else failure_report.traceback_of(error)
                self._publish(failure, trace, of_peer)
        return failure.exit_code

    def _is_reported_by_another(
        self, error: BaseException, of_peer: bool, store: Store | None
    ) -> bool:
        """Wait for the report of the rank at fault, if this error only follows from that."""
        if store and not peer_check.respond(store, self.world, self.status):
            # With the store rank 0's host is gone: torchrun's agent here will end all this soon.
            return False
        rank_at_fault = getattr(error, "rank", None)
        if not of_peer and rank_at_fault in (None, self.world.rank):
            return False
        patience_seconds = PEER_ERROR_GRACE_SECONDS
        if self.hosts_may_leave:
            patience_seconds = HOST_GRACE_SECONDS
        return failure_report.wait_for_report(self.run_dir, patience_seconds, self._reported_code)

    def _reported_code(self) -> int:
        """The exit code of a failure that a rank of this host has reported; 0 if none is known."""
        return self.board.reported_code() if self.board else 0

    def _failure_of(self, error: BaseException) -> Failure:
        rank = self.world.rank
        if self.board:
            sizes = self.board.sizes()
        else:
            sizes = f"rank {rank} {self.status.resident_bytes / 2**30:.2f} GiB"
        failure = failure_from(error, rank, self.status, self.worker.log_file, sizes)
        if not self.worker.log_file.exists():
            failure = replace(failure, log="")
        snapshot = snapshot_file(self.run_dir, rank)
        if failure.kind == "oom" and snapshot.exists():
            detail = (
                f"{failure.detail}; a snapshot of the GPU's memory is in {snapshot} (open it at"
                f" {VIEWER})"
            )
            return replace(failure, detail=detail)
        return failure

    def _publish(self, failure: Failure, trace: str, of_peer: bool) -> None:
        """Tell the user, the launcher and torchrun's agent."""
        is_saved = bool(self.status.has_saved)
        run_continues = self.hosts_may_leave and is_saved and restarts_left()
        report = failure_report.Report(failure, trace)
        report.print(is_fatal=not run_continues, stream=self.terminal)
        self.status.reported_code = failure.exit_code
        write_reported(failure.exit_code)
        write_torchrun_error_file(failure_report.headline(failure).removeprefix("FATAL "))
        if self.hosts_may_leave and of_peer:
            with lost_hosts.one_at_a_time(self.run_dir):
                lost_hosts.note_loss(self.run_dir, rank=failure.rank)
            if is_saved:
                step = max((step_of(place) for place in places(self.run_dir)), default=0)
                self.terminal.write(
                    f"step {step} is not lost: it was in memory outside the processes\n"
                )
                self.terminal.flush()
