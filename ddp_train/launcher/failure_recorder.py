"""Records the failures of workers that cannot report themselves: killed, or hanging. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddp_train.errors import LaunchError
from ddp_train.launcher.workers import Workers
from ddp_train.launcher.workload import Workload
from ddp_train.linux import oom_kills
from ddp_train.options.schema import Config
from ddp_train.resilience import failure_report
from ddp_train.resilience.failure import Failure, failure_from_exit, failure_from_hang
from ddp_train.resilience.failure_report import Report
from ddp_train.resilience.hang_detector import Hang
from ddp_train.resilience.stacks import stack_file, working_stack

REPORT_SECONDS = 5.0
"""How long to wait for the report of a worker whose exit code says that it reports its failure."""
SELF_REPORTED = tuple(cls.exit_code for cls in (LaunchError, *LaunchError.__subclasses__()))
"""Exit codes of workers that report their failure themselves."""


class FailureRecorder:
    """Records failures of one attempt."""

    def __init__(self, config: Config, workers: Workers, workload: Workload) -> None:
        """To be made before the workers are started."""
        self.config = config
        self.run_dir = Path(str(config.run_dir))
        self.workers = workers
        self.workload = workload
        self.oom_kills_before = oom_kills()

    def record_exit(self, failed: Sequence[int], codes: Sequence[int | None]) -> Report | None:
        """Record the exit of the first failed worker that did not report by itself.

        failed: ranks.
        codes: the exit code of each rank.

        Returns what is to be printed; None if a worker reported its failure, for which this waits.
        """
        board = self.workers.board
        unreported = [rank for rank in failed if codes[rank] not in SELF_REPORTED]
        if not unreported:
            board.wait_for_report(REPORT_SECONDS)
            return None
        rank = unreported[0]
        failure = failure_from_exit(
            self.workers.processes[rank].returncode,
            rank,
            board.ranks[rank],
            self.workers.log_file(rank),
            oom_killed=oom_kills() > self.oom_kills_before,
            sizes=board.sizes(),
        )
        # A fault (SIGSEGV, SIGABRT ...) writes the stack where it happened.
        frames = working_stack(self.run_dir, rank)
        stack = failure_report.stack_of(rank, frames, stack_file(self.run_dir, rank))
        with board.locked():
            if board.reported_code():  # by a worker that could write no file: that is all to say
                return None
            failure = self.workload.translated(failure)
            report = self._record(failure, stack)
        if report:
            log_file = self.workers.log_file(rank)
            headline = failure_report.headline(failure, "LOST")
            failure_report.append_to_log(log_file, [headline])
        return report

    def record_hang(self, hang: Hang) -> Report | None:
        """Record the rank that blocks the run, in that rank's log too.

        Returns what is to be printed; None if another failure was recorded before.
        """
        log_file = self.workers.log_file(hang.rank)
        timeout_seconds = self.config.launch.timeout_seconds
        failure = self.workload.translated(failure_from_hang(hang, log_file, timeout_seconds))
        headline = failure_report.headline(failure)
        stack = ["stack (most recent call last):", *hang.stack] if hang.stack else []
        failure_report.append_to_log(log_file, [headline, *stack])
        return self._record(failure, failure_report.stack_of(hang.rank, hang.stack, log_file))

    def _record(self, failure: Failure, stack: str) -> Report | None:
        facts = self.workload.facts(self.config)
        if not failure_report.record(self.run_dir, failure, facts):
            return None
        return Report(failure, stack)

    def exit_code(self, codes: Sequence[int | None]) -> int:
        """The exit code of an attempt whose workers have ended with these codes."""
        for code in codes:
            # A worker that lost its peers ends with LaunchError's, perhaps before the one that
            # reports.
            if code in SELF_REPORTED and code != LaunchError.exit_code:
                assert code is not None
                return code
        return self.workers.board.reported_code() or LaunchError.exit_code
