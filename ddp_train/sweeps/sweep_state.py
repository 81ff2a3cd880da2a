"""The state of a sweep: the rows of its ended trials, and what is known of the objective."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ddp_train.errors import ConfigError
from ddp_train.scored_sets import sets_of
from ddp_train.sweeps import pruning
from ddp_train.sweeps.baseline import Baseline
from ddp_train.sweeps.outcomes import value_of
from ddp_train.sweeps.overrides import key_of, trial_overrides
from ddp_train.sweeps.plan import SweepPlan, test_set_note
from ddp_train.sweeps.results import (
    ALONE,
    ResultsWriter,
    by_trial,
    ended_row,
    read_rows,
    results_size,
    rows_of_sweep,
)
from ddp_train.sweeps.sweeper import direction_problems, is_drawn, pruner_problems


class SweepState:
    """The rows of the trials that have ended, and what is known of the objective so far.

    Which columns are shown of a row is decided in `telemetry.pages.trials`.
    A Hydra launcher may run a trial in a pickled copy of this object, on another host. Only the
    rows in the results file come back from there.
    """

    def __init__(self, plan: SweepPlan) -> None:
        self.plan = plan
        self.rows: list[dict[str, Any]] = []
        self.results = ResultsWriter(plan.sweep_dir)
        self.results_begin = 0
        """The size of the results file at this start, in bytes: its rows begin there."""
        self.baseline = Baseline(plan.has_baseline)
        self.objective = plan.objective
        """As typed; its name once a trial has told what `auto` stands for."""
        self.better = plan.better
        self.test_set_rule = plan.test_set_rule
        self.begun: set[int] = set()
        """The trials of this start, as far as this process knows."""

    def open(self) -> None:
        """Note where the rows of this start begin. The directory must be locked."""
        self.results_begin = results_size(self.plan.sweep_dir)
        if self.plan.optuna_trials:  # Optuna does not ask for a trial again that has ended
            rows = read_rows(self.plan.sweep_dir)
            self.rows = rows_of_sweep(rows, self.plan.swept, self.plan.fixed)

    def add(self, row: dict[str, Any]) -> None:
        """Take in the row of a trial, in place of an earlier one."""
        self.rows = by_trial([*self.rows, row])

    def new_row(self, number: int, overrides: list[str], run_dir: Path) -> dict[str, Any]:
        """The row of a trial that has not succeeded yet. It is found again by its overrides."""
        row = {
            "trial": number,
            "overrides": self._swept_of(overrides),
            "words": sorted(overrides),
            "status": "failed",
            "run_dir": str(run_dir),
            "exit_code": ConfigError.exit_code,
        }
        if self.plan.tied_to_seed:
            row["tied_to_seed"] = sorted(self.plan.tied_to_seed)
        if number == self.baseline.number:
            row |= {"at_once": 1, ALONE: self.baseline.row[ALONE]}
        elif self.plan.pool:
            row["at_once"] = self.plan.pool.at_once
        return row

    def title(self, number: int, overrides: list[str]) -> str:
        """A trial that begins, in a line: its number, which of how many, its swept overrides."""
        swept = " ".join(self._swept_of(overrides))
        if number == self.baseline.number:  # which is not one of them
            return f"{number}: {swept}"
        self.begun.add(number)
        count = ""
        if self.plan.total and not is_drawn():
            count = f" ({len(self.begun)} of {self.plan.total})"
        return f"{number}{count}: {swept}".removesuffix(": ")

    def _swept_of(self, overrides: list[str]) -> list[str]:
        return [text.lstrip("+") for text in overrides if key_of(text) in self.plan.swept]

    def known_value(self, number: int, overrides: list[str]) -> float | None:
        """The objective of a trial that an earlier start has completed, or pruned.

        None: the trial must run. So must a pruned one in a sweep without a pruner.
        """
        own = trial_overrides(overrides)
        run_dir = self.plan.sweep_dir / str(number)
        if not self.plan.pruner:
            pruning.remove_mark(run_dir)
        row = ended_row(self.plan.sweep_dir, own, pruned_counts=bool(self.plan.pruner))
        if row is None:
            pruned = pruning.pruned_outcome(run_dir)
            if pruned is None:
                return None
            # The sweep was killed before the row was written.
            row = self.new_row(number, own, run_dir.absolute()) | pruned
            self.results.add(row)
        self.begun.add(number)
        self.add(row | {"trial": number})
        as_another = "" if row["trial"] == number else f", as trial {row['trial']}"
        path = self.results.path
        print(f"trial {number} was {row['status']} before{as_another}: {path}", flush=True)
        return value_of(row)

    def learn(self, row: dict[str, Any]) -> ConfigError | None:
        """Take over what only a trial can tell about the objective.

        That is its name, its better direction, and whether there is a validation set.

        Returns an error if the sweeper was given something else.
        """
        if "objective_name" not in row:
            return None
        assumed = self.better
        self.objective = row["objective_name"]
        self.better = row["better"]
        sets = sets_of(row)
        note = test_set_note(self.objective, sets, self.test_set_rule)
        if note:
            print(f"note: {note}", file=sys.stderr)
            self.test_set_rule = ""
        problems = pruner_problems(self.plan.pruner, self.objective, sets)
        problems += direction_problems(self.plan.sweeper, self.objective, assumed, row["better"])
        return ConfigError(problems) if problems else None

    def close(self) -> None:
        """Write the rows that wait, and read those of jobs in other processes."""
        if self.plan.job_launcher:
            rows = read_rows(self.plan.sweep_dir, self.results_begin)
            self.rows = by_trial([row for row in rows if ALONE not in row])
        for row in self.rows:  # of jobs, and of earlier starts
            self.learn(row)
        self.results.add()

    def exit_code(self) -> int:
        """0 if all trials were completed, else the exit code of the first failed one."""
        for row in self.rows:
            if row["exit_code"]:
                return row["exit_code"]
        return 0
