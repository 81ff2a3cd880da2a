"""Sweeps (`-m`): runs each trial in new processes and collects the results."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from ddp_train.config.hardware import detect_hardware
from ddp_train.config.metrics import BY_TEST, direction_of, has_validation, objective_name
from ddp_train.config.overrides import read_overrides
from ddp_train.config.prepare import prepare, read_run, resolve_and_check
from ddp_train.config.program import Program
from ddp_train.config.schema import Config
from ddp_train.config.validate import check_rules
from ddp_train.distributed.environment import new_run_id, visible_devices
from ddp_train.errors import ConfigError
from ddp_train.launcher import local, sweep_rows, trial_pool
from ddp_train.launcher.fork_server import ForkServer, preload
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.launcher.sweep_report import SweepPage, print_results
from ddp_train.launcher.sweep_rows import RESULTS
from ddp_train.launcher.trial_pool import TrialPool
from ddp_train.resilience.preemption import SAVED, UNSAVED

LAUNCHER, SLURM = "hydra/launcher", ("slurm", "submitit_slurm")
SWEEPER = "hydra/sweeper"
PLUGINS = {"optuna": "hydra-optuna-sweeper"}
DIRECTION_KEYS = {
    "optuna": ("hydra.sweeper.direction", {"max": "maximize", "min": "minimize"}),
    "nevergrad": ("hydra.sweeper.optim.maximize", {"max": "true", "min": "false"}),
    "ax": ("hydra.sweeper.ax_config.experiment.minimize", {"max": "false", "min": "true"}),
}
"""Sweepers that optimize: the key that tells each of them the better direction, and its values."""
HIGHER = {"max": "the higher it is", "min": "the lower it is"}


class Trials:
    """Runs the trials that Hydra asks for, each in new processes, and keeps a row of results for each, failed or not.

    A Hydra launcher (submitit's) may run trials as jobs of their own. Each job runs one trial in a pickled copy of this
    object, and only the rows in the results file come back.
    """

    def __init__(self, program: Program, server: ForkServer | None) -> None:
        self.program = program
        self.server = server
        self.sweep_dir = Path()
        self.swept: set[str] = set()
        """The keys that the sweep varies."""
        self.objective = ""
        """As asked for; its name once a trial has told what `auto` is."""
        self.better: str | None = None
        """max or min; None until a trial tells, where only the task knows."""
        self.sweeper = ""
        """The one that must know the better direction; empty if none must."""
        self.told_by_test = False
        """Whether the user knows that the test set selects."""
        self.total = 0
        """The number of trials in the grid; 0 if a sweeper other than the grid decides it."""
        self.rows: list[dict[str, Any]] = []
        self.job_launcher = ""
        """The Hydra launcher that runs the trials as jobs; empty if they run in this process."""
        self.rows_begin = 0
        """Where the rows of this sweep begin in the results file, in bytes."""
        self.pool: TrialPool | None = None
        """What the trials share if several run at a time, each in a process of its own that this one forks."""
        self.forks_workers = True
        self.preloaded: dict[str, str] | None = None
        """Of `fork_server.preload`: then each trial forks a fork server of its own from what is imported already."""
        self.page = SweepPage("")
        self.rows_before: dict[int, int] = {}
        """The size of the results file when a trial of the pool began."""

    def check(self, argv: list[str], sweep: bool) -> list[str]:
        """Checks the overrides on the command line before Hydra reads it. Returns the command line for Hydra.

        In a sweep, each swept value is checked together with the first values of the other swept keys. Raises
        ConfigError with all problems.
        """
        self.page = SweepPage(self.program.command(argv))
        overrides = [word for word in argv if not word.startswith("-") and ("=" in word or sweep)]
        read = read_overrides(self.program, overrides, sweep)
        problems, config = list(read.problems), Config()
        launchers = [word.partition("=")[2] for word in read.arguments if _key(word) == LAUNCHER]
        asked = launchers[-1] if launchers else ""
        self.job_launcher = asked if asked not in ("basic", trial_pool.NAME) else ""
        if self.job_launcher in SLURM:
            problems += _missing_for_slurm(self.job_launcher)
        fixed = [
            word
            for word in read.arguments
            if _key(word) not in read.swept and not _key(word).startswith(("hydra/", "hydra."))
        ]
        first = {key: values[0] for key, values in read.swept.items() if values}
        trials = [first, *(first | {key: value} for key, values in read.swept.items() for value in values[1:])]
        hardware, resolved = detect_hardware(visible_devices()), []
        problems += [
            f"{key}: is what all trials share, and cannot be swept; give it one value"
            for key in read.swept
            if key.startswith("sweep.")
        ]
        for trial in trials:
            config, found = read_run(
                self.program, read_overrides(self.program, fixed + [f"{key}={value}" for key, value in trial.items()])
            )
            problems += found
            if sweep and not found:
                found = trial_pool.refused(config)
                if not found and self.job_launcher:  # it may run on another host
                    found = check_rules(config)
                elif not (found := found or trial_pool.problems(config, hardware)):
                    seen = trial_pool.hardware_of_trial(config, hardware)
                    run, found = resolve_and_check(config, None, seen)
                    resolved += [] if found else [run]
                problems += found
        self.objective, self.better = config.objective, direction_of(config.objective, config)
        direction, found = self._direction(read.arguments)
        problems += found if sweep else []
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))
        hydra_argv = [word for word in argv if word not in overrides] + read.arguments
        if not sweep:
            return hydra_argv
        hydra_argv += direction
        if (validation := has_validation(config)) is not None:
            self.objective = objective_name(config.objective, validation)
            self._tell_if_by_test(self.objective)
        self.swept = set(read.swept)
        self.total = math.prod(map(len, read.swept.values()))
        if not self.job_launcher:
            for note in trial_pool.notes(config, resolved[-1]):
                print(f"note: {note}", file=sys.stderr)
            pool = trial_pool.pool_of(config, resolved, self.total, hardware)
            if asked == trial_pool.NAME or (not asked and pool.at_once > 1):
                self.pool, self.forks_workers = pool, config.launch.fork_server
                hydra_argv += pool.words(hydra_argv)
        self.sweep_dir = Path(config.run_dir or f"runs/{config.name}/sweep_{new_run_id(None)}")
        if self.job_launcher:
            self.rows_begin = sweep_rows.size(self.sweep_dir)
            results = self.sweep_dir / RESULTS
            print(f"trials are run by hydra/launcher={self.job_launcher}; results: {results}", flush=True)
        return [*hydra_argv, f"hydra.sweep.dir='{self.sweep_dir}'"]

    def _direction(self, arguments: list[str]) -> tuple[list[str], list[str]]:
        """What a sweeper must be told about the better direction, and what is wrong with what it was told."""
        sweeper = _last(arguments, SWEEPER)
        if sweeper not in DIRECTION_KEYS:
            return [], []
        self.sweeper = sweeper
        if sweeper in PLUGINS and not _has_plugin(PLUGINS[sweeper]):
            remedy = f"pip install -e '.[{sweeper}]'"
            return [], [f"{SWEEPER}={sweeper}: needs the package {PLUGINS[sweeper]}; {remedy}"]
        key, words = DIRECTION_KEYS[sweeper]
        given = _last(arguments, key)
        if self.better is None and not given:
            rule = f"only the task knows which direction of objective={self.objective} is better"
            return [], [f"{SWEEPER}={sweeper}: {rule}; add {key}={words['max']} or {key}={words['min']}"]
        if self.better is None:
            self.better = next((better for better, word in words.items() if word == given.lower()), None)
            return [], [] if self.better else [f"{key}={given}: must be one of {', '.join(words.values())}"]
        if given and given.lower() != words[self.better]:
            rule = f"objective={self.objective} is better {HIGHER[self.better]}"
            return [], [f"{key}={given}: {rule}; leave it out, or use {key}={words[self.better]}"]
        return [] if given else [f"{key}={words[self.better]}"], []

    def _tell_if_by_test(self, name: str) -> None:
        """Says once that the test set selects."""
        if name.startswith("test.") and not self.told_by_test:
            self.told_by_test = True
            print(f"note: objective={name}: {BY_TEST}", file=sys.stderr)

    def run(self, _: DictConfig) -> float:
        """Runs one trial. Returns its objective; NaN if it has none or failed, so that the sweep continues."""
        job = HydraConfig.get()
        number, run_dir = int(job.job.num), str(job.runtime.output_dir)
        overrides = _words_of_trial(job.overrides.task)
        if not self.pool:
            print(f"trial {self._named(number, overrides)}", flush=True)
        row = None if self.job_launcher else sweep_rows.completed_before(self.sweep_dir, overrides)
        if row:  # by the same sweep, which was ended before its end
            print(
                f"trial {number} was completed before, as trial {row['trial']}: {self.sweep_dir / RESULTS}", flush=True
            )
            self.rows.append(row | {"trial": number})
            return self._objective(row)
        stop = StopRequests()
        row = self._new_row(number, overrides, run_dir)
        server, at_once = self.server, self.pool.at_once if self.pool else 1
        if self.pool and self.preloaded is not None:
            server = ForkServer(self.program.import_path, self.preloaded)
        try:
            with _hydra_set_aside():
                prepared = prepare(self.program, overrides, None, run_dir, at_once)
            for notice in prepared.notices:
                print(f"note: {notice}", file=sys.stderr)
            try:
                row["exit_code"] = local.launch(
                    prepared.config, self.program.import_path, stop, server, prepared.at_another_number
                )
            finally:
                if prepared.lock:
                    prepared.lock.release()
            if self.job_launcher and row["exit_code"] in (SAVED, UNSAVED):
                # submitit's handler requeues the job and does not return. SLURM's SIGTERM for the new start may kill
                # its `scontrol requeue`, which has done its work by then.
                with contextlib.suppress(subprocess.CalledProcessError):
                    stop.forward()
                raise SystemExit(row["exit_code"])  # cancelled, or restarted by SLURM itself
            row |= sweep_rows.outcome(prepared.config) if row["exit_code"] == 0 else sweep_rows.failure(run_dir)
        except ConfigError as error:
            print(error, file=sys.stderr)
            row |= {"kind": error.kind, "reason": str(error)}
        self.rows.append(row)
        sweep_rows.append(self.sweep_dir, row)
        if not self.pool and not self.job_launcher:  # there, this process knows of its own trial only
            self._write_page()
        if contradiction := self._learn(row):
            print(contradiction, file=sys.stderr)
            raise SystemExit(ConfigError.exit_code)
        if (stop.received and not self.job_launcher) or row["exit_code"] in (SAVED, UNSAVED):
            raise SystemExit(row["exit_code"] or stop.exit_code(UNSAVED))
        return self._objective(row)

    def _new_row(self, number: int, words: list[str], run_dir: str) -> dict[str, Any]:
        """Of a trial that has failed so far. words: all that it was given, by which it is found again."""
        row = {"trial": number, "overrides": self._swept_among(words), "words": sorted(words), "status": "failed"}
        row |= {"run_dir": run_dir}
        return row | {"exit_code": ConfigError.exit_code} | ({"at_once": self.pool.at_once} if self.pool else {})

    def _named(self, number: int, overrides: list[str]) -> str:
        """A trial in a line: its number, of how many if that is known, and what is its own."""
        count = f" ({number + 1} of {self.total})" if self.total and not self._draws() else ""
        return f"{number}{count}: {' '.join(self._swept_among(overrides))}"

    def _draws(self) -> bool:
        """Whether a sweeper other than the grid chooses the trials."""
        sweeper = HydraConfig.get().sweeper
        return not sweeper._target_.endswith(".BasicSweeper") or bool(sweeper.get("params"))

    def _swept_among(self, overrides: list[str]) -> list[str]:
        return [word.lstrip("+") for word in overrides if _key(word) in self.swept]

    @staticmethod
    def _objective(row: dict[str, Any]) -> float:
        return math.nan if row.get("objective") is None else row["objective"]

    # --- what the pool calls, in the process that starts the trials ---

    def before_jobs(self) -> None:
        """What all workers need is imported once, here: a server of its own would cost each trial seconds."""
        if self.server:
            self.server.close()
            self.server = None
        if self.preloaded is None and self.forks_workers:
            self.preloaded = preload(self.program.import_path)

    def job_started(self, number: int, overrides: list[str], devices: list[str]) -> None:
        self.rows_before[number] = sweep_rows.size(self.sweep_dir)
        on = f"  on {', '.join(devices)}" if devices else ""
        print(f"trial {self._named(number, overrides)}{on}", flush=True)

    def job_ended(self, number: int, overrides: list[str], returned: JobReturn, exit_code: int, seconds: float) -> None:
        """Finds the trial's row, and writes that of one that was killed, so that the sweep continues."""
        words = _words_of_trial(overrides)
        written = sweep_rows.read(self.sweep_dir, self.rows_before[number])
        row = next((row for row in reversed(written) if row["trial"] == number), None)
        before = None if row else sweep_rows.completed_before(self.sweep_dir, words)
        if before:
            row = before | {"trial": number}
        if row is None:
            row = self._new_row(number, words, str((self.sweep_dir / str(number)).absolute())) | sweep_rows.death(
                exit_code
            )
            sweep_rows.append(self.sweep_dir, row)
        if isinstance(returned._return_value, Exception):
            returned.status, returned.return_value = JobStatus.COMPLETED, math.nan
        self.rows = sorted([*self.rows, row], key=lambda row: row["trial"])
        if contradiction := self._learn(row):
            returned.status, returned.return_value = JobStatus.FAILED, SystemExit(ConfigError.exit_code)
            print(contradiction, file=sys.stderr)
        self._write_page()
        log = self.sweep_dir / str(number) / trial_pool.LOG
        print(f"trial {number}: {sweep_rows.ended(row, log)}  {'before' if before else f'{seconds:.1f} s'}", flush=True)

    def end_by_signal(self, number: int, _: object) -> None:
        """The handler of a stop signal, while no trial runs and after those of the pool have been stopped by it."""
        stop = StopRequests()
        stop.received.append(number)
        codes = {row["exit_code"] for row in self.rows} & {SAVED, UNSAVED}
        raise SystemExit(stop.exit_code(SAVED if codes == {SAVED} else UNSAVED))

    def _learn(self, row: dict[str, Any]) -> ConfigError | None:
        """What only a trial could tell: what `auto` stands for, and the better direction. Returns an error if the
        sweeper was told the other one."""
        if "objective_name" not in row:
            return None
        told, self.objective, self.better = self.better, row["objective_name"], row["better"]
        self._tell_if_by_test(self.objective)
        better = row["better"]
        if told in (None, better) or not self.sweeper:
            return None
        key, words = DIRECTION_KEYS[self.sweeper]
        rule = f"objective={self.objective} is better {HIGHER[better]} with this task"
        return ConfigError([f"{key}={words[str(told)]}: {rule}; use {key}={words[better]}"])

    def write_page(self) -> None:
        """At the end; the terminal is told where it is."""
        if page := self.page.write(self.sweep_dir, self.rows, self.objective, self.better):
            print(f"report {page}")

    def _write_page(self) -> None:
        self.page.trial_ended(self.sweep_dir, self.rows, self.objective, self.better, self.total)

    def finish(self) -> int:
        """Prints the results. Returns 0 if all trials were completed, else the exit code of the first failed one."""
        if self.job_launcher:
            self.rows = sorted(sweep_rows.read(self.sweep_dir, self.rows_begin), key=lambda row: row["trial"])
        if self.rows:
            for row in self.rows:  # those of jobs are read here first
                self._learn(row)
            print_results(self.rows, self.objective, self.better, self.pool.at_once if self.pool else 1)
            print(f"results {self.sweep_dir / RESULTS}")
        return next((row["exit_code"] for row in self.rows if row["exit_code"]), 0)


@contextlib.contextmanager
def _hydra_set_aside() -> Iterator[None]:
    """Allows a config to be composed while Hydra runs a trial: Hydra has one global instance."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = outer


def _key(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


def _missing_for_slurm(name: str) -> list[str]:
    """What this host lacks to submit jobs to SLURM."""
    if not _has_plugin("hydra-submitit-launcher"):
        return [f"{LAUNCHER}={name}: needs the package hydra-submitit-launcher; pip install -e '.[slurm]'"]
    if not shutil.which("srun"):
        return [f"{LAUNCHER}={name}: there is no srun on this host; start the sweep where `sbatch` works"]
    return []


def _has_plugin(package: str) -> bool:
    """Whether a plugin of Hydra is installed."""
    parent = importlib.util.find_spec("hydra_plugins")  # find_spec of a submodule raises if the parent is missing
    return bool(parent and importlib.util.find_spec(f"hydra_plugins.{package.replace('-', '_')}"))


def _last(arguments: list[str], key: str) -> str:
    """The value that a key was given last; "" if it was not."""
    return next((word.partition("=")[2] for word in reversed(arguments) if _key(word) == key), "")


def _words_of_trial(overrides: Any) -> list[str]:
    """Those that a run of its own would have: the keys of `sweep` are about several."""
    return [
        str(word) for word in overrides if not _key(str(word)).startswith(("sweep.", "hydra.", "hydra/", "run_dir"))
    ]
