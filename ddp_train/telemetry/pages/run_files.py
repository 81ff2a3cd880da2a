"""What a run directory holds, read whole, whatever of it is missing or cut off."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ddp_train.resilience import run_lock
from ddp_train.resilience.failure_report import FILE as FAILURE
from ddp_train.resilience.failure_report import SUMMARY
from ddp_train.telemetry.metrics_log import METRICS
from ddp_train.telemetry.pages.timeline import FILE as TIMELINE

CONFIG = "config.yaml"
COMMANDS = "commands.jsonl"
TRAIN = "train"
SPLITS = ("validation", "test")
"""The kinds of the lines of metrics.jsonl: an interval of training, and evaluations."""
TAIL_BYTES = 2**16
NO_SCORE = ("kind", "step", "epoch", "time", "correct", "samples")
"""Fields of the line of an evaluation that are no metric."""
RUNNING = "running"
COMPLETED = "completed"
FAILED = "failed"
STOPPED = "stopped"
ENDED = "ended"


@dataclass(frozen=True)
class RunFiles:
    """The files of one run. A file that is not there is empty here."""

    run_dir: Path
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    failure: dict[str, Any] = field(default_factory=dict)
    commands: list[dict[str, Any]] = field(default_factory=list)
    timeline: dict[str, Any] = field(default_factory=dict)
    is_running: bool = False

    @property
    def state(self) -> str:
        """running, completed, failed, stopped (and saved), or ended: killed, without a word."""
        status = self.summary.get("status")
        if status == "completed":
            return COMPLETED
        if self.is_running:
            return RUNNING
        if status == "failed" or self.failure:
            return FAILED
        return STOPPED if status == "preempted" else ENDED

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.metrics if line["kind"] == kind]

    @property
    def split(self) -> str:
        """The split that was scored while training: validation, or test if there is none."""
        return next((split for split in SPLITS if self.of(split)), SPLITS[-1])

    @property
    def scores(self) -> list[str]:
        """The metrics of the evaluations."""
        return list(
            dict.fromkeys(
                name
                for line in self.of(self.split)
                for name, value in line.items()
                if name not in NO_SCORE and isinstance(value, int | float)
            )
        )

    def better(self, metric: str) -> str:
        """max or min. An accuracy is better the higher it is, whatever else is known."""
        told = (self.summary.get("better") or {}).get(metric)
        return told or ("max" if metric.startswith(("accuracy", "top5")) else "min")

    @property
    def command(self) -> str:
        return str((self.commands or [self.summary])[-1].get("command") or "")


def read_run(run_dir: Path) -> RunFiles:
    """Raises OSError if a file that is there cannot be read."""
    return RunFiles(
        run_dir,
        _yaml(run_dir / CONFIG),
        read_lines(run_dir / METRICS),
        _json(run_dir / SUMMARY),
        _json(run_dir / FAILURE),
        read_lines(run_dir / COMMANDS, of_steps=False),
        _json(run_dir / TIMELINE),
        is_locked(run_dir / run_lock.FILE),
    )


def glance(run_dir: Path) -> RunFiles:
    """The run without its config and its past: the last lines of metrics.jsonl, and how it ended.
    Raises OSError."""
    return RunFiles(
        run_dir,
        metrics=read_lines(run_dir / METRICS, last_bytes=TAIL_BYTES),
        summary=_json(run_dir / SUMMARY),
        failure=_json(run_dir / FAILURE),
        is_running=is_locked(run_dir / run_lock.FILE),
    )


def is_locked(path: Path) -> bool:
    """Whether a process of this host holds the lock of a run. By the kernel's list: who asks by
    taking the lock, as `run_lock.is_held` does, may refuse a run that starts at that moment."""
    try:
        found = path.stat()
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    return any("FLOCK" in line and place in line.split() for line in locks.splitlines())


def is_run(path: Path) -> bool:
    """Whether a folder is the directory of a run: it has its config, or what a loop of one's own
    has left."""
    return (path / CONFIG).is_file() or ((path / SUMMARY).is_file() and (path / "logs").is_dir())


def runs_in(folder: Path, depth: int = 4) -> list[Path]:
    """The runs in a folder, itself one of them or those of its folders; the newest last."""
    if is_run(folder):
        return [folder]
    if not depth:
        return []
    inner = [
        Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)
    ]
    found = [
        run for path in inner if not path.name.startswith(".") for run in runs_in(path, depth - 1)
    ]
    return sorted(found, key=lambda path: path.stat().st_mtime)


def read_lines(
    path: Path, of_steps: bool = True, last_bytes: int | None = None, kind: str = "", most: int = 0
) -> list[dict[str, Any]]:
    """Lines of JSON. One that is cut off or damaged is none. of_steps: each has its kind and its
    step. last_bytes: only those in them. kind, most: only lines of that kind, spread evenly, with
    the last one: they are chosen before they are parsed, which takes 10 us each."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        if last_bytes is not None and path.stat().st_size > last_bytes:
            file.seek(-last_bytes, os.SEEK_END)
        lines = file.read().splitlines()
    if kind:
        lines = [line for line in lines if f'"kind": "{kind}"'.encode() in line]
        lines = [*lines[: -1 : max(1, -(-len(lines) // most))], *lines[-1:]]
    found = []
    for line in lines:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict) and (not of_steps or {"kind", "step"} <= values.keys()):
            found.append(values)
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError:  # cut off: the disk was full
        return {}
    return found if isinstance(found, dict) else {}


def _yaml(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text()) if path.is_file() else {}
    except (yaml.YAMLError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by their dotted keys, as they are typed: `optimizer.lr`. A class of one's own
    has `target` and `arguments` in the config, typed as `model._target_=my_net.Net
    model.width=8`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{name}.".replace(".arguments.", "."))
        elif (name, value) != ("arguments", {}):
            found[re.sub(r"\.target$", "._target_", prefix + str(name))] = value
    return found


def best(lines: Sequence[dict[str, Any]], metric: str, better: str) -> dict[str, Any] | None:
    """The line with the best value of a metric."""
    known = [
        line
        for line in lines
        if isinstance(line.get(metric), int | float) and math.isfinite(line[metric])
    ]
    pick = max if better == "max" else min
    if known:
        return pick(known, key=lambda line: line[metric])
    return None
