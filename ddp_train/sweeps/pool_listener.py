"""Work of the process of a sweep while its trials run in others: rows, lines and page."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn, JobStatus

from ddp_train.errors import ConfigError
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.resilience.preemption import SAVED, UNSAVED, stop_signals
from ddp_train.sweeps import pruning
from ddp_train.sweeps.outcomes import dead_outcome, end_line, value_of
from ddp_train.sweeps.overrides import identifying, trial_overrides
from ddp_train.sweeps.pool import LOG
from ddp_train.sweeps.results import ALONE, read_rows
from ddp_train.sweeps.runner import TrialRunner
from hydra_plugins.ddp_train_pool import SweepEnd, SweepListener


class PoolListener(SweepListener):
    """Follows the trials that hydra/launcher=pool runs."""

    def __init__(self, runner: TrialRunner) -> None:
        self.runner = runner
        self.state = runner.state
        self.page = runner.page
        self.sweep_dir = runner.plan.sweep_dir
        self.values: dict[int, pruning.ObjectiveValues] = {}

    def before_jobs(self) -> None:
        self.runner.preload()

    def job_number(self, number: int, overrides: list[str]) -> int:
        return self.runner.numbers.number_of(number, trial_overrides(overrides))

    def known_value(self, number: int, overrides: list[str]) -> float | None:
        return self.state.known_value(number, overrides)

    def job_started(self, number: int, overrides: list[str], devices: list[str]) -> None:
        line = f"trial {self.state.title(number, overrides)}"
        if devices:
            line += f"  on {', '.join(devices)}"
        if number == self.state.baseline.number:
            line += f"  (trial {self.state.baseline.row[ALONE]} alone)"
        print(line, flush=True)
        self.page.begin(self._new_row(number, overrides))

    def while_waiting(self) -> None:
        self.page.look()

    def job_ended(
        self, number: int, overrides: list[str], returned: JobReturn, exit_code: int, seconds: float
    ) -> None:
        value: Any = returned._return_value
        self.page.running.pop(number, None)
        row = getattr(value, "row", None)
        if row is None:  # its launcher was killed, or has failed
            row = self._new_row(number, overrides)
            pruned = pruning.pruned_outcome(self.sweep_dir / str(number))
            row |= pruned or dead_outcome(exit_code, value)
        self.state.results.add(row)
        if isinstance(value, BaseException) or row["status"] == "pruned":
            returned.status = JobStatus.COMPLETED
            returned.return_value = value_of(row)
        if number == self.state.baseline.number:
            self.state.baseline.row = row
        else:
            self.state.add(row)
        contradiction = self.state.learn(row)
        if contradiction:
            returned.status = JobStatus.FAILED
            returned.return_value = SweepEnd(ConfigError.exit_code)
            print(contradiction, file=sys.stderr)
        log = self.sweep_dir / str(number) / LOG
        print(f"trial {number}: {end_line(row, log)}  {seconds:.1f} s", flush=True)

    def job_alone(self) -> tuple[int, list[str]] | None:
        earlier = read_rows(self.sweep_dir)
        return self.state.baseline.choose(self.state.rows, earlier, self.runner.numbers)

    def report_problem(self, problem: str) -> int:
        print(ConfigError([problem]), file=sys.stderr)
        return ConfigError.exit_code

    def values_so_far(self, number: int) -> Sequence[float]:
        if number not in self.values:
            self.values[number] = pruning.ObjectiveValues(self.sweep_dir / str(number))
        return self.values[number].read(self.state.objective)

    def job_pruned(self, number: int, count: int, value: float) -> None:
        pruning.mark_pruned(self.sweep_dir / str(number), count, value)

    def study_overrides(self, fixed: list[str]) -> list[str]:
        return sorted(identifying(fixed, self.runner.plan.swept))

    def end_by_signal(self, number: int, _: object) -> None:
        """Handle a stop signal while no trial runs, or after it has stopped those that did.

        Another one must not cut off the table.
        """
        from ddp_train.telemetry.pages.sweep_page import goes_on

        for further in stop_signals():
            signal.signal(further, signal.SIG_IGN)
        stop = StopRequests()
        stop.received.append(number)
        print(f"stopped by {signal.Signals(number).name}", file=sys.stderr)
        if not self.state.rows:
            plan = self.runner.plan
            command = goes_on(plan.command, plan.sweep_dir)
            print(f"no trial has ended; to go on:\n  {command}", file=sys.stderr)
        codes = {row["exit_code"] for row in self.state.rows} & {SAVED, UNSAVED}
        raise SystemExit(stop.exit_code(SAVED if codes == {SAVED} else UNSAVED))

    def _new_row(self, number: int, overrides: list[str]) -> dict[str, Any]:
        run_dir = (self.sweep_dir / str(number)).absolute()
        return self.state.new_row(number, trial_overrides(overrides), run_dir)
