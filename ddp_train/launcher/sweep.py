"""Sweeps (`-m`): runs each trial in new processes and collects the results."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.table import Table

from ddp_train.config.metrics import BY_TEST, SPLITS, direction_of, has_validation, objective_name, read_objective
from ddp_train.config.overrides import read_overrides
from ddp_train.config.prepare import prepare, read_run, resolve_and_check
from ddp_train.config.program import Program
from ddp_train.config.schema import Config
from ddp_train.config.validate import check_rules
from ddp_train.distributed.environment import new_run_id
from ddp_train.errors import ConfigError
from ddp_train.launcher import local
from ddp_train.launcher.fork_server import ForkServer
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.resilience.failure_report import FILE as FAILURE
from ddp_train.resilience.failure_report import SUMMARY
from ddp_train.resilience.preemption import SAVED, UNSAVED
from ddp_train.text import did_you_mean

RESULTS = "results.jsonl"
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

    def check(self, argv: list[str], sweep: bool) -> list[str]:
        """Checks the overrides on the command line before Hydra reads it. Returns the command line for Hydra.

        In a sweep, each swept value is checked together with the first values of the other swept keys. Raises
        ConfigError with all problems.
        """
        overrides = [word for word in argv if not word.startswith("-") and ("=" in word or sweep)]
        read = read_overrides(self.program, overrides, sweep)
        problems, config = list(read.problems), Config()
        launchers = [word.partition("=")[2] for word in read.arguments if _key(word) == LAUNCHER]
        self.job_launcher = launchers[-1] if launchers and launchers[-1] != "basic" else ""
        if self.job_launcher in SLURM:
            problems += _missing_for_slurm(self.job_launcher)
        fixed = [
            word
            for word in read.arguments
            if _key(word) not in read.swept and not _key(word).startswith(("hydra/", "hydra."))
        ]
        first = {key: values[0] for key, values in read.swept.items() if values}
        trials = [first, *(first | {key: value} for key, values in read.swept.items() for value in values[1:])]
        for trial in trials:
            config, found = read_run(
                self.program, read_overrides(self.program, fixed + [f"{key}={value}" for key, value in trial.items()])
            )
            problems += found
            if sweep and not found:
                problems += _problems_of_trial(config, bool(self.job_launcher))
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
        self.sweep_dir = Path(config.run_dir or f"runs/{config.name}/sweep_{new_run_id(None)}")
        if self.job_launcher:
            results = self.sweep_dir / RESULTS
            self.rows_begin = results.stat().st_size if results.exists() else 0
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
        overrides, run_dir = list(job.overrides.task), str(job.runtime.output_dir)
        swept = [word.lstrip("+") for word in overrides if _key(word) in self.swept]
        row: dict[str, Any] = {"trial": job.job.num, "overrides": swept, "status": "failed", "exit_code": 2}
        is_grid = job.sweeper._target_.endswith(".BasicSweeper") and not job.sweeper.get("params")
        count = f" ({job.job.num + 1} of {self.total})" if self.total and is_grid else ""
        print(f"trial {job.job.num}{count}: {' '.join(swept)}", flush=True)
        stop = StopRequests()
        try:
            with _hydra_set_aside():
                prepared = prepare(self.program, overrides, None, run_dir)
            for notice in prepared.notices:
                print(f"note: {notice}", file=sys.stderr)
            try:
                row["exit_code"] = local.launch(
                    prepared.config, self.program.import_path, stop, self.server, prepared.at_another_number
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
            row |= _outcome(prepared.config) if row["exit_code"] == 0 else _failure(run_dir)
        except ConfigError as error:
            print(error, file=sys.stderr)
            row |= {"kind": error.kind, "reason": str(error)}
        self.rows.append(row)
        with (self.sweep_dir / RESULTS).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # trials on other hosts append to the file too
            file.write(json.dumps(row, allow_nan=False) + "\n")
        if contradiction := self._learn(row):
            print(contradiction, file=sys.stderr)
            raise SystemExit(ConfigError.exit_code)
        if (stop.received and not self.job_launcher) or row["exit_code"] in (SAVED, UNSAVED):
            raise SystemExit(row["exit_code"] or stop.exit_code(UNSAVED))
        return math.nan if row.get("objective") is None else row["objective"]

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

    def finish(self) -> int:
        """Prints the results. Returns 0 if all trials were completed, else the exit code of the first failed one."""
        if self.job_launcher and (self.sweep_dir / RESULTS).exists():
            with (self.sweep_dir / RESULTS).open() as file:
                file.seek(self.rows_begin)
                self.rows = sorted(map(json.loads, file), key=lambda row: row["trial"])
        if self.rows:
            for row in self.rows:  # those of jobs are read here first
                self._learn(row)
            Console(soft_wrap=False).print(_table(self.rows, self.objective))
            scored = [row for row in self.rows if row.get("objective") is not None]
            if scored:
                pick = max if self.better == "max" else min
                best = pick(scored, key=lambda row: row["objective"])
                print(
                    f"best trial {best['trial']}: {' '.join(best['overrides'])}  {self.objective} {best['objective']:g}"
                )
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


def _problems_of_trial(config: Config, runs_as_job: bool) -> list[str]:
    """Why a trial cannot run. If it runs as a job, possibly on another host, only what does not depend on the host."""
    if config.launch.nnodes > 1:
        return [
            f"launch.nnodes={config.launch.nnodes}: a sweep runs on one host; leave it out, or start each run alone"
        ]
    if config.mode == "doctor":
        return ["mode=doctor: cannot be swept; leave out -m"]
    return check_rules(config) if runs_as_job else resolve_and_check(config, None)[1]


def _outcome(config: Config) -> dict[str, Any]:
    summary = json.loads((Path(str(config.run_dir)) / SUMMARY).read_text())
    try:
        name, value, better = read_objective(config.objective, summary)
    except KeyError:
        known = [f"{split}.{metric}" for split in SPLITS for metric in summary.get(split) or {}]
        problem = f"objective={config.objective}: the run has no such number; it has {', '.join(known)}"
        raise ConfigError([problem + did_you_mean(config.objective, known)]) from None
    validation = summary.get("validation")
    return {
        "status": "completed",
        "objective": value,
        "objective_name": name,
        "better": better,
        **({"validation": validation} if validation else {}),
        **summary["test"],
        "seconds": summary["seconds"],
        "samples_per_second": summary.get("samples_per_second"),
    }


def _failure(run_dir: str) -> dict[str, Any]:
    path = Path(run_dir) / FAILURE
    failure = json.loads(path.read_text()) if path.exists() else {"kind": "stopped", "detail": "stopped"}
    return {"kind": failure["kind"], "reason": failure["detail"]}


TABLED = {"test.accuracy": "accuracy", "test.loss": "loss", "seconds": "seconds", "samples_per_second": "samples/s"}
"""Objectives that have a column in any case."""


def _table(rows: list[dict[str, Any]], objective: str) -> Table:
    table = Table(title="trials", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    own = [] if objective in TABLED else [objective]
    for heading in ("trial", "overrides", "status", *own, "accuracy", "loss", "seconds", "samples/s"):
        is_text = heading in ("overrides", "status")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row in rows:
        formats = (
            *[("objective", ".4f") for _ in own],
            ("accuracy", ".2%"),
            ("loss", ".4f"),
            ("seconds", ".1f"),
            ("samples_per_second", ",.0f"),
        )
        numbers = [format(row[name], spec) if row.get(name) is not None else "-" for name, spec in formats]
        status = row["status"] if row["status"] == "completed" else f"failed ({row['exit_code']}): {row['kind']}"
        table.add_row(str(row["trial"]), " ".join(row["overrides"]), status, *numbers)
    return table
