"""The report of a worker that fails: on the terminal, in failure.json, to torchrun; once, by the
rank at fault."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_train.checkpoints.layout import places, step_of
from ddp_train.distributed.environment import (
    restarts_left,
    write_reported,
    write_torchrun_error_file,
)
from ddp_train.distributed.process_group import Store
from ddp_train.distributed.world import World
from ddp_train.errors import LaunchError
from ddp_train.performance.memory_snapshot import VIEWER, snapshot_file
from ddp_train.resilience import failure_report, lost_hosts, peer_check
from ddp_train.resilience.failure import failure_from, is_peer_error
from ddp_train.resilience.heartbeat import SAVED, RankStatus, StatusBoard
from ddp_train.resilience.stdio import TolerantStream

PEER_ERROR_GRACE_SECONDS = 3.0
"""Grace period in which a worker with a peer error lets the failing rank report first."""
HOST_GRACE_SECONDS = 1.0
"""The same where others go on once this one has ended."""


class FailureReporter:
    """Reports why this worker failed, where the user reads. To be made before standard error is
    redirected."""

    def __init__(
        self,
        run_dir: Path,
        run_facts: dict[str, Any],
        world: World,
        status: RankStatus,
        board: StatusBoard | None,
        words: Callable[[str], str] = str,
    ) -> None:
        """run_facts: for summary.json. board: of our own launcher; None under torchrun. words: a
        message, with the keys of the config as the user knows them."""
        self.world = world
        self.status = status
        self.board = board
        self.run_dir = run_dir
        self.words = words
        self.log_file = self.run_dir / "logs" / f"rank_{world.rank}.log"
        self.run_facts = run_facts
        self.hosts_may_leave = False
        """Whether torchrun's agents go on without a lost host, which the processes that fail with
        it delay."""
        self.terminal = TolerantStream(
            os.fdopen(os.dup(2), "w")
        )  # standard error may become this rank's log file

    def report(self, error: BaseException, store: Store | None) -> int:
        """Reports an error, unless it only follows from another rank's, which then reports first.
        Returns the exit code."""
        rank = self.world.rank
        board = self.board
        status = self.status
        peer_error = is_peer_error(error)
        patience = HOST_GRACE_SECONDS if self.hosts_may_leave else PEER_ERROR_GRACE_SECONDS
        if peer_error and store and not board and not peer_check.respond(store, self.world, status):
            # with the store, rank 0's host is gone: torchrun's agent here will end all this soon
            patience = 0.0
        secondary = peer_error or getattr(error, "rank", None) not in (None, rank)
        told = board.reported_code if board else int
        if secondary and patience and failure_report.wait_for_report(self.run_dir, patience, told):
            return LaunchError.exit_code
        if board:
            sizes = board.sizes()
        else:
            sizes = f"rank {rank} {status.resident_bytes / 2**30:.2f} GiB"
        failure = failure_from(error, rank, status, self.log_file, sizes)
        snapshot = snapshot_file(self.run_dir, rank)
        if failure.kind == "oom" and snapshot.exists():
            failure = replace(
                failure,
                detail=f"{failure.detail}; the GPU's memory then: {snapshot} (see {VIEWER})",
            )
        if peer_error and store and not board:
            failure = peer_check.attribute_failure(failure, error, store, self.world)
        failure = replace(
            failure, detail=self.words(failure.detail), remedy=self.words(failure.remedy)
        )
        trace = "" if peer_error else failure_report.traceback_of(error)
        with board.locked() if board else contextlib.nullcontext():
            if told():  # by a rank that could write no file, or this one would not tell either
                return failure.exit_code
            goes_on = self.hosts_may_leave and status.recovery.state == SAVED and restarts_left()
            if failure_report.record(self.run_dir, failure, self.run_facts):
                report = failure_report.Report(failure, trace)
                report.print(is_fatal=not goes_on, stream=self.terminal)
                status.reported_code = failure.exit_code
                write_reported(failure.exit_code)
                write_torchrun_error_file(failure_report.headline(failure).removeprefix("FATAL "))
                if self.hosts_may_leave and peer_error:
                    self._note_rank(failure.rank)
        return failure.exit_code

    def _note_rank(self, rank: int | None) -> None:
        with lost_hosts.one_at_a_time(self.run_dir):
            lost_hosts.note(self.run_dir, rank=rank)
        if self.status.recovery.state == SAVED:
            step = max((step_of(place) for place in places(self.run_dir)), default=0)
            self.terminal.write(f"step {step} is saved: a surviving rank had it\n")
            self.terminal.flush()
