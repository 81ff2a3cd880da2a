"""The files of a run directory, whichever of them are missing or cut off."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import yaml

from ddp_train.plain_yaml import load_plain_yaml
from ddp_train.resilience import run_lock
from ddp_train.resilience.failure_report import EARLIER as EARLIER_FAILURES
from ddp_train.resilience.failure_report import FILE as FAILURE
from ddp_train.resilience.failure_report import SUMMARY
from ddp_train.scored_sets import in_order, kind_of, main_set, of_kind, sets_of
from ddp_train.telemetry.json_files import read_object, read_objects
from ddp_train.telemetry.metrics_log import METRICS, Line, read_metrics
from ddp_train.telemetry.own_numbers import HOOK, own_names
from ddp_train.telemetry.pages.timeline import FILE as TIMELINE
from ddp_train.telemetry.score_lines import built_in_direction
from ddp_train.text import OF_AVERAGE, dotted

AUTO = "auto"
CONFIG = "config.yaml"
COMMANDS = "commands.jsonl"
TRAIN = "train"
"""The kind of a line of metrics.jsonl for a logging interval; of an evaluation it is the set's."""
TAIL_BYTES = 2**16
NOT_METRICS = ("kind", "step", "epoch", "time", "correct", "samples")
"""Other fields of the line of an evaluation."""
FIRST_METRICS = ("accuracy", "mean_iou", "perplexity", "bits_per_byte", "rmse")
"""The metric of most interest in an evaluation, beside the loss: the first that is known."""
RUNNING = "running"
COMPLETED = "completed"
FAILED = "failed"
STOPPED = "stopped"
ENDED = "ended"
"""States of a run. Stopped: and saved. Ended: killed, and nothing more is known."""


class OwnNumber(NamedTuple):
    """A number that code of the user's logged."""

    kind: str
    """The kind of the lines of metrics.jsonl that have it: train, or hook."""
    name: str

    def __str__(self) -> str:
        return f"{self.kind}.{self.name}"


@dataclass(frozen=True)
class RunFiles:
    """The files of one run; empty are those that do not exist."""

    run_dir: Path
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[Line] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    failure: dict[str, Any] = field(default_factory=dict)
    earlier_failures: list[dict[str, Any]] = field(default_factory=list)
    commands: list[dict[str, Any]] = field(default_factory=list)
    timeline: dict[str, Any] = field(default_factory=dict)
    is_running: bool = False

    @property
    def state(self) -> str:
        """running, completed, failed, stopped or ended."""
        status = self.summary.get("status")
        if status == "completed":
            return COMPLETED
        if self.is_running:
            return RUNNING
        if status == "failed" or self.failure:
            return FAILED
        if status == "preempted":
            return STOPPED
        return ENDED

    @property
    def is_session(self) -> bool:
        """A loop of the user's own: without a config, and without commands of ours."""
        return not self.config

    def lines(self, kind: str) -> list[Line]:
        """The lines of metrics.jsonl of one kind."""
        return self._lines_by_kind.get(kind, [])

    @functools.cached_property
    def _lines_by_kind(self) -> dict[str, list[Line]]:
        kinds: dict[str, list[Line]] = {}
        for line in self.metrics:
            kinds.setdefault(line["kind"], []).append(line)
        return kinds

    @property
    def intervals(self) -> list[Line]:
        """The logging intervals of training."""
        return self.lines(TRAIN)

    @functools.cached_property
    def own_numbers(self) -> list[OwnNumber]:
        """The numbers that code of the user's logged."""
        return [
            OwnNumber(kind, name) for kind in (TRAIN, HOOK) for name in own_names(self.lines(kind))
        ]

    def last_own(self, number: OwnNumber) -> float | None:
        """The last value of such a number; None without one."""
        for line in reversed(self.lines(number.kind)):
            value = line.get(number.name)
            if is_finite(value):
                return value
        return None

    def last(self, kind: str, name: str) -> float | None:
        """A number at the end of a run; None if it has none.

        kind: a set that is scored, or `train` or `hook` for a number that was logged.
        """
        if kind in (TRAIN, HOOK):
            return self.last_own(OwnNumber(kind, name))
        for line in (self.summary.get(kind) or {}, *reversed(self.lines(kind))):
            if isinstance(line.get(name), int | float):
                return float(line[name])
        return None

    @functools.cached_property
    def numbers(self) -> dict[str, tuple[str, str]]:
        """Kind and name of each number at the end of the run, by the words that a user has for it:
        `test.f1`, `hook.kl`, and `kl` alone for one that was logged."""
        found: dict[str, tuple[str, str]] = {}
        for split in self.sets:
            for line in (self.summary.get(split) or {}, *self.lines(split)[-1:]):
                names = [name for name in line if name not in NOT_METRICS]
                found |= {f"{split}.{name}": (split, name) for name in names}
        for number in self.own_numbers:
            found |= dict.fromkeys((str(number), number.name), number)
        return {words: number for words, number in found.items() if self.last(*number) is not None}

    @property
    def split(self) -> str:
        """The first set that was scored during training: validation, or test without one."""
        return main_set(self._lines_by_kind)

    @property
    def sets(self) -> list[str]:
        """All sets that were scored, those of validation first."""
        return in_order(dict.fromkeys([*self._lines_by_kind, *sets_of(self.summary)]))

    @property
    def scored_sets(self) -> list[str]:
        """The sets that were scored during training: `split`, and further ones of its kind."""
        return of_kind(kind_of(self.split), self._lines_by_kind) or [self.split]

    @property
    def evaluations(self) -> list[Line]:
        """The evaluations of `split`."""
        return self.lines(self.split)

    @property
    def scores(self) -> list[str]:
        """Names of the metrics of the evaluations."""
        names: dict[str, None] = {}
        for line in self.evaluations:
            for name, value in line.items():
                if name not in NOT_METRICS and isinstance(value, int | float):
                    names[name] = None
        return list(names)

    def better(self, metric: str) -> str | None:
        """The better direction, max or min.

        None if it is not known: only the task, or torchmetrics, knows that of a metric of the
        user's before the run has written its summary.
        """
        direction = (self.summary.get("better") or {}).get(metric)
        if direction:
            return direction
        name = metric.removeprefix(OF_AVERAGE)
        for item in self.config.get("metrics") or []:
            if item.get("name") == name:
                return item.get("better")
        return built_in_direction(name)

    @property
    def selected_by(self) -> str:
        """The metric by which the run chooses its best evaluation, checkpoint.best_metric."""
        metric = self._selecting.rpartition(".")[2]
        if metric != AUTO:
            return metric
        return "accuracy" if "accuracy" in self.scores else "loss"

    @property
    def selecting_set(self) -> str:
        """The set whose metric that is."""
        return self._selecting.rpartition(".")[0] or self.split

    @property
    def _selecting(self) -> str:
        """validation.accuracy, or auto."""
        best = self.summary.get("best") or {}
        return str(best.get("metric") or self._best_metric)

    @property
    def _best_metric(self) -> str:
        """checkpoint.best_metric as it was asked for."""
        return str((self.config.get("checkpoint") or {}).get("best_metric", AUTO))

    @property
    def best(self) -> Line | None:
        """The evaluation that the run itself takes for its best."""
        best = self.summary.get("best") or {}
        for line in self.lines(self.selecting_set):
            if line["step"] == best.get("step"):
                return line
        return self.best_by(self.selected_by, self.selecting_set)

    def best_by(self, metric: str, split: str) -> Line | None:
        """The evaluation of a set with the best value of a metric, the first of equal ones.

        Of equal accuracies that with the lower loss, unless the run was asked for a metric: as in
        `engine.selection`. None too if nobody knows which direction is better.
        """
        direction = self.better(metric)
        sign = -1 if direction == "max" else 1
        loss_decides = metric == "accuracy" and self._best_metric == AUTO
        known = []
        for line in self.lines(split):
            if direction and is_finite(line.get(metric)):
                known.append(line)

        def rank(line: Line) -> tuple[float, float]:
            loss = line.get("loss") if loss_decides else None
            return sign * line[metric], loss if is_finite(loss) else math.inf

        return min(known, key=rank, default=None)

    @property
    def last_start(self) -> dict[str, Any]:
        """The last line of commands.jsonl; a session has its facts in the summary."""
        if self.commands:
            return self.commands[-1]
        return self.summary

    @property
    def command(self) -> str:
        """The command line of the last start."""
        return str(self.last_start.get("command") or "")


def read_run(run_dir: Path) -> RunFiles:
    """All files of a run. Raises OSError if one that is there cannot be read."""
    return RunFiles(
        run_dir,
        config=_read_yaml(run_dir / CONFIG),
        metrics=read_metrics(run_dir / METRICS),
        summary=read_object(run_dir / SUMMARY),
        failure=read_object(run_dir / FAILURE),
        earlier_failures=read_objects(run_dir / EARLIER_FAILURES),
        commands=read_objects(run_dir / COMMANDS),
        timeline=read_object(run_dir / TIMELINE),
        is_running=is_locked(run_dir / run_lock.FILE),
    )


def glance(run_dir: Path) -> RunFiles:
    """The end of a run: its last lines of metrics.jsonl, and how it ended. Raises OSError."""
    return RunFiles(
        run_dir,
        metrics=read_metrics(run_dir / METRICS, -TAIL_BYTES),
        summary=read_object(run_dir / SUMMARY),
        failure=read_object(run_dir / FAILURE),
        is_running=is_locked(run_dir / run_lock.FILE),
    )


def is_locked(path: Path) -> bool:
    """Tell whether a process of this host holds the lock of a run, by the kernel's list.

    Taking the lock to find out, as `run_lock.is_held` does, may refuse a run that starts just then.
    """
    try:
        facts = path.stat()
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    device = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}"
    place = f"{device}:{facts.st_ino}"
    return any("FLOCK" in line and place in line.split() for line in locks.splitlines())


def is_run(path: Path) -> bool:
    """Tell whether a folder has the config of a run, or the files that a session leaves."""
    if (path / CONFIG).is_file():
        return True
    is_begun = (path / SUMMARY).is_file() or (path / METRICS).is_file()
    return is_begun and (path / "logs").is_dir()


def runs_in(folder: Path, depth: int = 4) -> list[Path]:
    """The runs in a folder, which may be one itself, and in its folders; the newest last."""
    if is_run(folder):
        return [folder]
    if not depth:
        return []
    runs = []
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            runs += runs_in(Path(entry.path), depth - 1)
    return sorted(runs, key=lambda path: path.stat().st_mtime)


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = load_plain_yaml(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError):
        return {}
    return values if isinstance(values, dict) else {}


def as_typed(config: dict[str, Any]) -> dict[str, Any]:
    """The values of a config by their keys, as they are typed.

    A class of the user is `target` and `arguments` in the config, and on the command line
    `model._target_=my_net.Net model.width=8`.
    """
    typed = {}
    for key, value in dotted(config).items():
        if key.rpartition(".")[2] == "arguments" and value == {}:
            continue
        key = key.replace(".arguments.", ".")
        if key.endswith(".target"):
            key = key.removesuffix("target") + "_target_"
        typed[key] = value
    return typed


def is_finite(value: Any) -> TypeGuard[float]:
    """Tell whether a value of a file is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def main_metric(names: Collection[str]) -> str:
    """The metric of most interest among some."""
    return next((name for name in FIRST_METRICS if name in names), "loss")
