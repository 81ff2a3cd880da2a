"""A sweep (`-m`): its trials, each in fresh processes, and what became of them."""

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

from ddp_train.config.overrides import read_overrides
from ddp_train.config.prepare import prepare, read_run, resolve_and_check
from ddp_train.config.schema import Config
from ddp_train.config.validate import check_rules
from ddp_train.distributed.environment import new_run_id
from ddp_train.errors import ConfigError
from ddp_train.launcher import local
from ddp_train.launcher.fork_server import ForkServer
from ddp_train.resilience.failure_report import FILE as FAILURE
from ddp_train.resilience.failure_report import SUMMARY
from ddp_train.resilience.preemption import SAVED, UNSAVED

RESULTS = "results.jsonl"
LAUNCHER, SLURM = "hydra/launcher", ("slurm", "submitit_slurm")


class Trials:
    """The trials that Hydra asks for, each in fresh processes; a row of results for each, also for those that fail.

    One of Hydra's launchers may run them `elsewhere`: there a pickled copy of this runs one trial, and only the rows in
    the file come back.
    """

    def __init__(self, script: Path, conf: Path, server: ForkServer | None) -> None:
        self.script = script
        self.conf = conf
        self.server = server
        self.sweep_dir = Path()
        self.swept: set[str] = set()
        self.objective = ""
        self.total = 0
        """How many trials the words make; 0 if they do not say."""
        self.rows: list[dict[str, Any]] = []
        self.elsewhere = ""
        """The launcher of Hydra that takes the trials to other processes or hosts; empty where they run here."""
        self.rows_begin = 0

    def check(self, words: list[str], sweep: bool) -> list[str]:
        """Checks the overrides among the words before Hydra sees them, and returns the words for Hydra.

        In a sweep, every swept value is tried with the first values of the other swept keys: a trial of the grid.
        """
        overrides = [word for word in words if not word.startswith("-") and ("=" in word or sweep)]
        read = read_overrides(self.conf, overrides, sweep)
        problems, config = list(read.problems), Config()
        launchers = [word.partition("=")[2] for word in read.arguments if _key(word) == LAUNCHER]
        self.elsewhere = launchers[-1] if launchers and launchers[-1] != "basic" else ""
        if self.elsewhere in SLURM:
            problems += _without_slurm(self.elsewhere)
        fixed = [
            word
            for word in read.arguments
            if _key(word) not in read.swept and not _key(word).startswith(("hydra/", "hydra."))
        ]
        first = {key: values[0] for key, values in read.swept.items() if values}
        tries = [first, *(first | {key: value} for key, values in read.swept.items() for value in values[1:])]
        for one in tries:
            config, found = read_run(
                self.conf, read_overrides(self.conf, fixed + [f"{key}={value}" for key, value in one.items()])
            )
            problems += found
            if sweep and not found:
                problems += _unfit(config, bool(self.elsewhere))
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))
        ready = [word for word in words if word not in overrides] + read.arguments
        if not sweep:
            return ready
        self.swept, self.objective = set(read.swept), config.objective
        self.total = math.prod(map(len, read.swept.values()))
        self.sweep_dir = Path(config.run_dir or f"runs/{config.name}/sweep_{new_run_id(None)}")
        if self.elsewhere:
            results = self.sweep_dir / RESULTS
            self.rows_begin = results.stat().st_size if results.exists() else 0
            print(f"trials run by hydra/launcher={self.elsewhere}; results {results}", flush=True)
        return [*ready, f"hydra.sweep.dir='{self.sweep_dir}'"]

    def run(self, _: DictConfig) -> float:
        """One trial. Returns its objective, or NaN if it has none, so that the sweep goes on."""
        job = HydraConfig.get()
        words, run_dir = list(job.overrides.task), str(job.runtime.output_dir)
        asked = [word.lstrip("+") for word in words if _key(word) in self.swept]
        row: dict[str, Any] = {"trial": job.job.num, "overrides": asked, "status": "failed", "exit_code": 2}
        grid = job.sweeper._target_.endswith(".BasicSweeper") and not job.sweeper.get("params")
        of_all = f" ({job.job.num + 1} of {self.total})" if self.total and grid else ""
        print(f"trial {job.job.num}{of_all}: {' '.join(asked)}", flush=True)
        stop = local.StopRequests()
        try:
            with _another_hydra():
                prepared = prepare(self.conf, words, None, run_dir)
            for notice in prepared.notices:
                print(f"note: {notice}", file=sys.stderr)
            try:
                row["exit_code"] = local.launch(prepared.config, self.script.parent, stop, self.server)
            finally:
                if prepared.lock:
                    prepared.lock.release()
            if self.elsewhere and row["exit_code"] in (SAVED, UNSAVED):
                # submitit's handler puts the job back into the queue, and does not return. SLURM's SIGTERM for the new
                # start may reach its `scontrol requeue` first, which has done its work then.
                with contextlib.suppress(subprocess.CalledProcessError):
                    stop.hand_on()
                raise SystemExit(row["exit_code"])  # it was cancelled; or SLURM itself starts it again
            row |= _outcome(prepared.config) if row["exit_code"] == 0 else _failure(run_dir)
        except ConfigError as error:
            print(error, file=sys.stderr)
            row |= {"kind": error.kind, "reason": str(error)}
        self.rows.append(row)
        with (self.sweep_dir / RESULTS).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # trials on other hosts append to it too
            file.write(json.dumps(row, allow_nan=False) + "\n")
        if (stop.received and not self.elsewhere) or row["exit_code"] in (SAVED, UNSAVED):
            raise SystemExit(row["exit_code"] or stop.exit_code(UNSAVED))
        return math.nan if row.get("objective") is None else row["objective"]

    def finish(self) -> int:
        """Shows the table. Returns 0 if every trial was completed, else the exit code of the first that was not."""
        if self.elsewhere and (self.sweep_dir / RESULTS).exists():
            with (self.sweep_dir / RESULTS).open() as file:
                file.seek(self.rows_begin)
                self.rows = sorted(map(json.loads, file), key=lambda row: row["trial"])
        if self.rows:
            Console(soft_wrap=False).print(_table(self.rows))
            scored = [row for row in self.rows if row.get("objective") is not None]
            if scored:
                pick = max if self.objective in ("test.accuracy", "samples_per_second") else min
                best = pick(scored, key=lambda row: row["objective"])
                print(
                    f"best trial {best['trial']}: {' '.join(best['overrides'])}  {self.objective} {best['objective']:g}"
                )
            print(f"results {self.sweep_dir / RESULTS}")
        return next((row["exit_code"] for row in self.rows if row["exit_code"]), 0)


@contextlib.contextmanager
def _another_hydra() -> Iterator[None]:
    """Inside, something else can be composed than the trial that Hydra runs: it knows only one at a time."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = outer


def _key(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


def _without_slurm(name: str) -> list[str]:
    """What this host lacks to hand jobs to SLURM."""
    parents = importlib.util.find_spec("hydra_plugins")  # of all plugins: a module is not looked for without its parent
    if not parents or importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        return [f"{LAUNCHER}={name}: needs the package hydra-submitit-launcher; pip install -e '.[slurm]'"]
    if not shutil.which("srun"):
        return [f"{LAUNCHER}={name}: there is no srun on this host; start the sweep where `sbatch` works"]
    return []


def _unfit(config: Config, elsewhere: bool) -> list[str]:
    """Why a trial of a sweep cannot run: on this host, or, as far as it can be known here, elsewhere."""
    if config.launch.nnodes > 1:
        return [
            f"launch.nnodes={config.launch.nnodes}: a sweep runs on one host; leave it out, or start each run by itself"
        ]
    if config.mode == "doctor":
        return ["mode=doctor: a sweep trains; leave out -m"]
    return check_rules(config) if elsewhere else resolve_and_check(config, None)[1]


def _outcome(config: Config) -> dict[str, Any]:
    summary = json.loads((Path(str(config.run_dir)) / SUMMARY).read_text())
    objective: Any = summary
    for part in config.objective.split("."):
        objective = objective.get(part)
    return {
        "status": "completed",
        "objective": objective,
        **summary["test"],
        "seconds": summary["seconds"],
        "samples_per_second": summary.get("samples_per_second"),
    }


def _failure(run_dir: str) -> dict[str, Any]:
    path = Path(run_dir) / FAILURE
    failure = json.loads(path.read_text()) if path.exists() else {"kind": "stopped", "detail": "stopped"}
    return {"kind": failure["kind"], "reason": failure["detail"]}


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="trials", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("trial", "overrides", "status", "accuracy", "loss", "seconds", "samples/s"):
        words = heading in ("overrides", "status")
        table.add_column(heading, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for row in rows:
        formats = (("accuracy", ".2%"), ("loss", ".4f"), ("seconds", ".1f"), ("samples_per_second", ",.0f"))
        numbers = [format(row[name], spec) if row.get(name) is not None else "-" for name, spec in formats]
        status = row["status"] if row["status"] == "completed" else f"failed ({row['exit_code']}): {row['kind']}"
        table.add_row(str(row["trial"]), " ".join(row["overrides"]), status, *numbers)
    return table
