"""Sweeps (`-m`): runs each trial in new processes and collects the results."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from ddp_train.config.metrics import BY_TEST, by_test, direction_of, has_validation, objective_name
from ddp_train.config.overrides import read_overrides
from ddp_train.config.prepare import prepare
from ddp_train.config.program import Program
from ddp_train.distributed.environment import new_run_id, visible_devices
from ddp_train.errors import ConfigError
from ddp_train.hardware import detect_hardware
from ddp_train.launcher import local
from ddp_train.launcher.fork_server import ForkServer, preload
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.options.schema import Config
from ddp_train.resilience.preemption import SAVED, UNSAVED
from ddp_train.sweeps import check as sweep_check
from ddp_train.sweeps import lock as sweep_lock
from ddp_train.sweeps import pool as trial_pool
from ddp_train.sweeps import pruning as sweep_pruning
from ddp_train.sweeps import rows as sweep_rows
from ddp_train.sweeps import sweep_overrides as sweep_words
from ddp_train.sweeps.baseline import MARK, Baseline
from ddp_train.sweeps.page import SweepPage
from ddp_train.sweeps.pool import TrialPool
from ddp_train.sweeps.pruning import Reports
from ddp_train.sweeps.trial_numbers import Numbers
from hydra_plugins.ddp_train_pool._jobs import SweepEnd


class Trials:
    """Runs the trials that Hydra asks for, each in new processes, and keeps a row of results for
    each, failed or not.

    A Hydra launcher (submitit's) may run trials as jobs of their own. Each job runs one trial in a
    pickled copy of this object, and only the rows in the results file come back.
    """

    def __init__(self, program: Program, server: ForkServer | None) -> None:
        self.program = program
        self.server = server
        self.sweep_dir = Path()
        self.swept: set[str] = set()
        """The keys that the sweep varies."""
        self.fixed: set[str] = set()
        """What else tells it from another."""
        self.objective = ""
        """As asked for; its name once a trial has told what `auto` is."""
        self.better: str | None = None
        """max or min; None until a trial tells, where only the task knows."""
        self.sweeper = ""
        """The one that must know the better direction; empty if none must."""
        self.pruner = ""
        """That of our own sweeper, if it has one."""
        self.by_test = ""
        """What the user must know if the test set selects; empty once it was said."""
        self.total = 0
        """The number of trials in the grid; 0 if a sweeper other than the grid decides it."""
        self.drawn = 0
        """How many trials our own sweeper draws by Optuna."""
        self.rows: list[dict[str, Any]] = []
        self.job_launcher = ""
        """The Hydra launcher that runs the trials as jobs; empty if they run in this process."""
        self.rows_begin = 0
        """Where the rows of this start begin in the results file, in bytes."""
        self.pool: TrialPool | None = None
        """What the trials share if several run at a time, each in a process of its own that this
        one forks."""
        self.forks_workers = True
        self.preloaded: dict[str, str] | None = None
        """Of `fork_server.preload`: then each trial forks a fork server of its own from what is
        imported already."""
        self.page = SweepPage("")
        self.numbers = Numbers(Path(), 0, "")
        self.writer = sweep_rows.Writer(Path())
        self.baseline = Baseline()
        self.reported: dict[int, Reports] = {}
        self.begun: set[int] = set()
        """The trials of this start, as far as this process knows."""

    def check(self, argv: list[str], sweep: bool) -> list[str]:
        """Checks the overrides on the command line before Hydra reads it. Returns the command line
        for Hydra. Raises ConfigError with all problems."""
        self.page = SweepPage(self.program.command(argv))
        overrides = [word for word in argv if not word.startswith("-") and ("=" in word or sweep)]
        words = sweep_check.each_once(overrides) if sweep else overrides
        read = read_overrides(self.program, words, sweep)
        asked = sweep_words.last(read.arguments, sweep_words.LAUNCHER)
        self.job_launcher = asked if asked not in ("basic", trial_pool.NAME) else ""
        hardware = detect_hardware(visible_devices())
        tried = sweep_check.try_values(self.program, read, sweep, self.job_launcher, hardware)
        problems = tried.problems
        config = tried.config
        if self.job_launcher in sweep_words.SLURM:
            problems += sweep_words.missing_for_slurm(self.job_launcher)
        self.objective = config.objective
        self.better = direction_of(config.objective, config)
        direction, found = self._direction(read.arguments, config)
        problems += (
            [*found, *sweep_words.unusable_with_optuna(read.arguments, config)] if sweep else []
        )
        if sweep and not problems:
            problems = sweep_check.problems(self.program, [*read.arguments, *direction])
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))
        hydra_argv = [word for word in argv if word not in overrides] + read.arguments
        if not sweep:
            return hydra_argv
        hydra_argv += direction
        self.by_test = by_test(config)
        if (validation := has_validation(config)) is not None:
            self.objective = objective_name(config.objective, validation)
            self._tell_if_by_test(self.objective, validation)
        self.swept = {*read.swept, *sweep_words.params(read.arguments)}
        self.fixed = sweep_words.compared(tried.fixed, self.swept)
        self.drawn = sweep_words.drawn_by_optuna(read.arguments)
        self.pruner = sweep_words.pruner_of(read.arguments)
        self.total = sweep_words.total_of(read.arguments, read.swept)
        if not self.job_launcher:
            for note in trial_pool.notes(config, tried.resolved[-1], tried.told):
                print(f"note: {note}", file=sys.stderr)
            pool = trial_pool.pool_of(config, tried.resolved, self.total, hardware, tried.told)
            if asked == trial_pool.NAME or (
                not asked and (pool.at_once > 1 or tried.told or self.drawn)
            ):
                self.pool = pool
                self.forks_workers = config.launch.fork_server
                hydra_argv += pool.words(hydra_argv)
        self.baseline.asked = config.sweep.baseline and bool(self.pool and self.pool.at_once > 1)
        if config.sweep.baseline and not self.baseline.asked:
            print(f"note: {sweep_words.NO_BASELINE}", file=sys.stderr)
        self.sweep_dir = Path(config.run_dir or f"runs/{config.name}/sweep_{new_run_id(None)}")
        self.numbers = Numbers(self.sweep_dir, self.total, new_run_id(None))
        self.writer = sweep_rows.Writer(self.sweep_dir)
        if self.job_launcher:
            print(
                f"trials are run by hydra/launcher={self.job_launcher}; results:"
                f" {self.writer.path}",
                flush=True,
            )
        return [*hydra_argv, sweep_words.in_folder(self.sweep_dir)]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Holds the directory of the sweep."""
        with sweep_lock.alone(self.sweep_dir):
            self.rows_begin = sweep_rows.size(self.sweep_dir)
            if self.drawn:  # Optuna asks for no trial again that has ended
                self.rows = sweep_rows.of_sweep(
                    self.swept, self.fixed, sweep_rows.read(self.sweep_dir)
                )
            yield

    def _direction(self, arguments: list[str], config: Config) -> tuple[list[str], list[str]]:
        """What a sweeper must be told about the better direction, and what is wrong with what it
        was told."""
        sweeper = sweep_words.last(arguments, sweep_words.SWEEPER)
        if sweeper not in sweep_words.DIRECTION_KEYS:
            return [], []
        self.sweeper = sweeper
        if problems := sweep_words.unusable_sweeper(sweeper):
            return [], problems
        words, problems, self.better = sweep_words.told_direction(
            sweeper, arguments, config, self.better
        )
        return words, problems

    def _tell_if_by_test(self, name: str, validates: bool) -> None:
        """Says once that the test set selects."""
        if name.startswith("test.") and self.by_test:
            instead = f"{BY_TEST}use objective={sweep_words.by_validation(name)}"
            print(
                f"note: objective={name}: {instead if validates else self.by_test}", file=sys.stderr
            )
            self.by_test = ""

    def run(self, _: DictConfig) -> float:
        """Runs one trial. Returns its objective; NaN if it has none or failed, so that the sweep
        continues."""
        job = HydraConfig.get()
        number = int(job.job.num)
        run_dir = str(job.runtime.output_dir)
        overrides = sweep_words.words_of_trial(job.overrides.task)
        if not self.pool:  # there, the process that started this one has done it
            number, asked = self.numbers.of(number, overrides), number
            if Path(run_dir).name == str(asked):
                run_dir = str(Path(run_dir).with_name(str(number)))
            print(f"trial {self._named(number, overrides)}", flush=True)
            if not self.job_launcher and (value := self.known_value(number, overrides)) is not None:
                return value
        stop = StopRequests(program_ends=bool(self.pool))
        row = self._new_row(number, overrides, run_dir)
        started = self.page.begins(
            row, None if self.pool or self.job_launcher else self.while_waiting
        )
        server = self.server
        at_once = row.get("at_once", 1)
        if self.pool and self.preloaded is not None:
            server = ForkServer(self.program.import_path, self.preloaded)
        try:
            with sweep_words.hydra_set_aside():
                prepared = prepare(self.program, overrides, None, run_dir, at_once)
            for notice in prepared.notices:
                print(f"note: {notice}", file=sys.stderr)
            try:
                row["exit_code"] = local.launch(
                    prepared.config,
                    self.program.import_path,
                    stop,
                    server,
                    prepared.at_another_number,
                    started,
                )
            finally:
                if prepared.lock:
                    prepared.lock.release()
            if self.job_launcher and row["exit_code"] in (SAVED, UNSAVED):
                # submitit's handler requeues the job and does not return. SLURM's SIGTERM for the
                # new start may kill its `scontrol requeue`, which has done its work by then.
                with contextlib.suppress(subprocess.CalledProcessError):
                    stop.forward()
                raise SystemExit(row["exit_code"])  # cancelled, or restarted by SLURM itself
            if row["exit_code"] == 0:
                row |= sweep_rows.outcome(prepared.config)
            else:
                if row["exit_code"] in (SAVED, UNSAVED):
                    pruned = sweep_pruning.marked(Path(run_dir))
                else:
                    pruned = None
                row |= pruned or sweep_rows.failure(run_dir)
        except ConfigError as error:
            print(error, file=sys.stderr)
            row |= {"kind": error.kind, "reason": str(error), "exit_code": error.exit_code}
        self.rows.append(row)
        value = sweep_rows.Scored(sweep_rows.value_of(row))
        value.row = row
        value.is_written = self.writer.add(row)
        code = 0
        if contradiction := self._learn(row):
            print(contradiction, file=sys.stderr)
            code = ConfigError.exit_code
        elif (stop.received and not self.job_launcher) or row["exit_code"] in (SAVED, UNSAVED):
            code = row["exit_code"] or stop.exit_code(UNSAVED)
        if code:
            end = SystemExit(code)
            vars(end).update(vars(value))
            raise end
        return value

    def _new_row(self, number: int, words: list[str], run_dir: str) -> dict[str, Any]:
        """Of a trial that has failed so far. words: all that it was given, by which it is found
        again."""
        row = {
            "trial": number,
            "overrides": self._swept_among(words),
            "words": sorted(words),
            "status": "failed",
        }
        row |= {"run_dir": run_dir, "exit_code": ConfigError.exit_code}
        if number == self.baseline.number:
            return row | {"at_once": 1, MARK: self.baseline.row[MARK]}
        return row | ({"at_once": self.pool.at_once} if self.pool else {})

    def _named(self, number: int, overrides: list[str]) -> str:
        """A trial that begins in a line: its number, which of how many it is if that is known, and
        what is its own."""
        if number == self.baseline.number:  # none of them
            return f"{number}: {' '.join(self._swept_among(overrides))}"
        self.begun.add(number)
        if self.total and not self._draws():
            count = f" ({len(self.begun)} of {self.total})"
        else:
            count = ""
        return f"{number}{count}: {' '.join(self._swept_among(overrides))}".removesuffix(": ")

    def _draws(self) -> bool:
        """Whether a sweeper other than the grid chooses the trials."""
        sweeper = HydraConfig.get().sweeper
        return not sweeper._target_.endswith(".BasicSweeper") or bool(sweeper.get("params"))

    def _swept_among(self, overrides: list[str]) -> list[str]:
        return [word.lstrip("+") for word in overrides if sweep_words.key(word) in self.swept]

    # --- what the pool calls, in the process that starts the trials ---

    def refused(self, problem: str) -> int:
        """Says why the sweep cannot go on. Returns its exit code."""
        print(ConfigError([problem]), file=sys.stderr)
        return ConfigError.exit_code

    def before_jobs(self) -> None:
        """What all workers need is imported once, here: a server of its own would cost each trial
        seconds."""
        if self.server:
            self.server.close()
            self.server = None
        if self.preloaded is None and self.forks_workers:
            self.preloaded = preload(self.program.import_path)

    def job_number(self, number: int, overrides: list[str]) -> int:
        """The number of the trial with these words, whatever Hydra calls it in this start."""
        return self.numbers.of(number, sweep_words.words_of_trial(overrides))

    def known_value(self, number: int, overrides: list[str]) -> float | None:
        """The objective of a trial that the same sweep has completed, or pruned, before it was
        ended; None: it must run, and so must a pruned one in a sweep that prunes nothing."""
        words = sweep_words.words_of_trial(overrides)
        folder = self.sweep_dir / str(number)
        if not self.pruner:
            sweep_pruning.unmark(folder)
        row = sweep_rows.ended_before(self.sweep_dir, words, bool(self.pruner))
        if row is None and (
            pruned := sweep_pruning.marked(folder)
        ):  # the sweep was killed before the row was there
            row = self._new_row(number, words, str(folder.absolute())) | pruned
            self.writer.add(row)
        if row is None:
            return None
        self.begun.add(number)
        self.rows = sweep_rows.by_trial([*self.rows, row | {"trial": number}])
        as_another = "" if row["trial"] == number else f", as trial {row['trial']}"
        print(
            f"trial {number} was {row['status']} before{as_another}: {self.writer.path}", flush=True
        )
        return sweep_rows.value_of(row)

    def compared(self, words: list[str]) -> set[str]:
        """The words that tell the study of this sweep from another."""
        return sweep_words.compared(words, self.swept)

    def reports(self, number: int) -> list[float]:
        """The objective of a trial at each evaluation so far."""
        return self.reported.setdefault(number, Reports(self.sweep_dir / str(number))).read(
            self.objective
        )

    def prune(self, number: int, evaluations: int, value: float) -> None:
        """Before a trial is stopped because others are better."""
        sweep_pruning.mark(self.sweep_dir / str(number), evaluations, value)

    def job_alone(self) -> tuple[int, list[str]] | None:
        """The run of `sweep.baseline`, after all trials."""
        return self.baseline.choose(self.rows, sweep_rows.read(self.sweep_dir), self.numbers)

    def job_started(self, number: int, overrides: list[str], devices: list[str]) -> None:
        on = f"  on {', '.join(devices)}" if devices else ""
        on += f"  (trial {self.baseline.row[MARK]} alone)" if number == self.baseline.number else ""
        print(f"trial {self._named(number, overrides)}{on}", flush=True)
        words = sweep_words.words_of_trial(overrides)
        run_dir = self.sweep_dir / str(number)
        self.page.begins(self._new_row(number, words, str(run_dir)))

    def while_waiting(self) -> None:
        """Ten times a second while trials run: their page, if it is time for one."""
        self.page.look(self)

    def job_ended(
        self, number: int, overrides: list[str], returned: JobReturn, exit_code: int, seconds: float
    ) -> None:
        """Finds the trial's row, and writes that of one that was killed, so that the sweep
        continues."""
        value: Any = returned._return_value
        self.page.running.pop(number, None)
        row = getattr(value, "row", None)
        is_written = getattr(value, "is_written", True)
        if row is None:  # it was killed after it had written it, or before
            written = sweep_rows.read(self.sweep_dir, self.rows_begin)
            row = next((row for row in reversed(written) if row["trial"] == number), None)
        if row is None:
            words = sweep_words.words_of_trial(overrides)
            run_dir = (self.sweep_dir / str(number)).absolute()
            how = sweep_pruning.marked(run_dir) or sweep_rows.death(exit_code, value)
            row = self._new_row(number, words, str(run_dir)) | how
            is_written = False
        self.writer.add(*([] if is_written else [row]))
        if isinstance(value, BaseException) or row["status"] == "pruned":
            returned.status = JobStatus.COMPLETED
            returned.return_value = sweep_rows.value_of(row)
        if number == self.baseline.number:
            self.baseline.row = row
        else:
            self.rows = sweep_rows.by_trial([*self.rows, row])
        if contradiction := self._learn(row):
            returned.status = JobStatus.FAILED
            returned.return_value = SweepEnd(ConfigError.exit_code)
            print(contradiction, file=sys.stderr)
        log = self.sweep_dir / str(number) / trial_pool.LOG
        print(f"trial {number}: {sweep_rows.ended(row, log)}  {seconds:.1f} s", flush=True)

    def end_by_signal(self, number: int, _: object) -> None:
        """The handler of a stop signal, while no trial runs and after those of the pool have been
        stopped by it."""
        stop = StopRequests()
        stop.received.append(number)
        codes = {row["exit_code"] for row in self.rows} & {SAVED, UNSAVED}
        raise SystemExit(stop.exit_code(SAVED if codes == {SAVED} else UNSAVED))

    def _learn(self, row: dict[str, Any]) -> ConfigError | None:
        """What only a trial could tell: what `auto` stands for, the better direction, and whether
        there is a validation set. Returns an error if the sweeper was told otherwise."""
        if "objective_name" not in row:
            return None
        told = self.better
        self.objective = row["objective_name"]
        self.better = row["better"]
        validates = bool(row.get("validation"))
        self._tell_if_by_test(self.objective, validates)
        problems = sweep_words.unpruned(self.pruner, self.objective, validates)
        problems += sweep_words.contradiction(self.sweeper, self.objective, told, row["better"])
        return ConfigError(problems) if problems else None

    def write_page(self) -> None:
        """At the end; the terminal is told where it is."""
        self.page.write_last(self)

    def finish(self) -> int:
        """Prints the results. Returns 0 if all trials were completed, else the exit code of the
        first failed one."""
        if self.job_launcher:
            rows = sweep_rows.read(self.sweep_dir, self.rows_begin)
            self.rows = sweep_rows.by_trial([row for row in rows if MARK not in row])
        self.writer.add()
        if self.rows:
            for row in self.rows:  # those of jobs are read here first
                self._learn(row)
            self.page.note = self.baseline.text(self.rows)
            self.page.print_results(self, self.pool.at_once if self.pool else 1)
            print(f"results {self.writer.path}")
        return next((row["exit_code"] for row in self.rows if row["exit_code"]), 0)
