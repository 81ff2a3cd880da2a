"""Runs the trials of a sweep, each in new processes: the function that Hydra calls."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ddp_train.config.prepare import Prepared, prepare
from ddp_train.config.program import Program
from ddp_train.errors import ConfigError
from ddp_train.launcher import local
from ddp_train.launcher.fork_server import ForkServer, preload
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.launcher.workload import Workload
from ddp_train.resilience.preemption import SAVED, UNSAVED
from ddp_train.sweeps.outcomes import TrialValue, completed_outcome, failed_outcome, value_of
from ddp_train.sweeps.overrides import trial_overrides
from ddp_train.sweeps.page import SweepPage, SweepPageOfTrial
from ddp_train.sweeps.pruning import pruned_outcome
from ddp_train.sweeps.sweep_state import SweepState
from ddp_train.sweeps.trial_numbers import TrialNumbers


@dataclass(frozen=True)
class Trial:
    """A trial that Hydra asks for."""

    number: int
    overrides: list[str]
    run_dir: Path


class TrialRunner:
    """Runs the trials that Hydra asks for, each in new processes.

    With a pool, `run` is called in a process that was forked for the trial. Without one it is
    called in the process of the sweep, or, by a launcher as that of SLURM, in a job of its own with
    a pickled copy of this object.
    """

    def __init__(self, program: Program, state: SweepState, server: ForkServer | None) -> None:
        """server: forks the workers of trials that run one after the other."""
        self.program = program
        self.state = state
        self.plan = state.plan
        self.page = SweepPage(state)
        self.numbers = TrialNumbers(self.plan.sweep_dir, self.plan.total, self.plan.start)
        self.server = server
        self.preloaded: dict[str, str] | None = None
        """The result of `fork_server.preload`: each trial forks a server from this process."""

    def preload(self) -> None:
        """Import what all workers need, once: a server of each trial would take seconds."""
        if self.server:
            self.server.close()
            self.server = None
        if self.preloaded is None and self.plan.forks_workers:
            self.preloaded = preload(self.program.import_path)

    def run(self, _: DictConfig) -> float:
        """Run one trial. Returns its objective.

        NaN if it has none or has failed, so that the sweep continues. With a pool the process of
        the sweep gets the row with it. Raises SystemExit to end the sweep.
        """
        trial = self._asked_trial()
        in_this_process = not self.plan.pool and not self.plan.job_launcher
        if not self.plan.pool:
            print(f"trial {self.state.title(trial.number, trial.overrides)}", flush=True)
        if in_this_process:
            known = self.state.known_value(trial.number, trial.overrides)
            if known is not None:
                return known
        stop = StopRequests(program_ends=bool(self.plan.pool))
        if not in_this_process:
            return self._value_of(trial, stop, in_this_process)
        with stop.listening():  # from its config to its row: a signal between two loses no result
            return self._value_of(trial, stop, in_this_process)

    def _value_of(self, trial: Trial, stop: StopRequests, in_this_process: bool) -> TrialValue:
        """Run a trial. Returns its objective, with its row. Raises SystemExit to end the sweep."""
        row = self.state.new_row(trial.number, trial.overrides, trial.run_dir)
        self.page.begin(row)
        workload = Workload()
        if in_this_process:
            workload = Workload(page=SweepPageOfTrial(self.page.look))
        row |= self._outcome(trial, row.get("at_once", 1), stop, workload)
        value = TrialValue(value_of(row))
        value.row = row
        if not self.plan.pool:
            self._add(row, stop)
        return value

    def _asked_trial(self) -> Trial:
        """The trial that Hydra asks for, with the number that its overrides have."""
        job = HydraConfig.get()
        number = int(job.job.num)
        run_dir = Path(str(job.runtime.output_dir))
        overrides = trial_overrides(job.overrides.task)
        if not self.plan.pool:  # there, the process that started this one has numbered it
            asked = number
            number = self.numbers.number_of(asked, overrides)
            if run_dir.name == str(asked):
                run_dir = run_dir.with_name(str(number))
        return Trial(number, overrides, run_dir)

    def _outcome(
        self, trial: Trial, at_once: int, stop: StopRequests, workload: Workload
    ) -> dict[str, Any]:
        """Run a trial to its end. Returns the fields of its row that say how it ended."""
        try:
            with hydra_set_aside():
                prepared = prepare(self.program, trial.overrides, None, str(trial.run_dir), at_once)
            for notice in prepared.notices:
                print(f"note: {notice}", file=sys.stderr)
            code = self._launch(prepared, stop, workload)
            if code == 0:
                return {"exit_code": 0, **completed_outcome(prepared.config)}
        except ConfigError as error:
            print(error, file=sys.stderr)
            return {"kind": error.kind, "reason": str(error), "exit_code": error.exit_code}
        outcome = None
        if code in (SAVED, UNSAVED):
            if self.plan.job_launcher:
                self._leave_job(stop, code)
            outcome = pruned_outcome(trial.run_dir)
        return {"exit_code": code, **(outcome or failed_outcome(trial.run_dir))}

    def _launch(self, prepared: Prepared, stop: StopRequests, workload: Workload) -> int:
        """Run the processes of a trial. Returns the exit code."""
        server = self.server
        if self.plan.pool and self.preloaded is not None:
            server = ForkServer(self.program.import_path, self.preloaded)
        try:
            return local.launch(
                prepared.config,
                self.program.import_path,
                stop,
                server,
                prepared.at_another_number,
                workload,
            )
        finally:
            if prepared.lock:
                prepared.lock.release()

    def _leave_job(self, stop: StopRequests, code: int) -> NoReturn:
        """End a job that was cancelled, or that SLURM restarts."""
        # submitit's handler requeues the job and does not return. SLURM's SIGTERM for the new
        # start may kill its `scontrol requeue`, which has done its work by then.
        with contextlib.suppress(subprocess.CalledProcessError):
            stop.forward()
        raise SystemExit(code)

    def _add(self, row: dict[str, Any], stop: StopRequests) -> None:
        """Take in the row of a trial. Raises SystemExit if the sweep ends with it."""
        self.state.rows.append(row)
        self.state.results.add(row)
        contradiction = self.state.learn(row)
        if contradiction:
            print(contradiction, file=sys.stderr)
            raise SystemExit(ConfigError.exit_code)
        if row["exit_code"] in (SAVED, UNSAVED):
            raise SystemExit(row["exit_code"])
        if stop.received and not self.plan.job_launcher:
            raise SystemExit(row["exit_code"] or stop.exit_code(UNSAVED))


@contextlib.contextmanager
def hydra_set_aside() -> Iterator[None]:
    """Allow a config to be composed while Hydra runs a trial: Hydra has one global instance."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = outer
