"""The page of a run: how it learns, how fast it is, what happened to it, what it was."""

from __future__ import annotations

import datetime
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_train.telemetry.pages.findings import findings
from ddp_train.telemetry.pages.report import Lines, Plot, Report
from ddp_train.telemetry.pages.run_events import Event, clock, events_of
from ddp_train.telemetry.pages.run_files import (
    COMPLETED,
    RUNNING,
    TRAIN,
    RunFiles,
    as_typed,
    best,
)
from ddp_train.telemetry.pages.run_plots import run_plots
from ddp_train.telemetry.pages.tables import Table
from ddp_train.telemetry.score_lines import PERCENT, shown_metric
from ddp_train.text import shown, word

FIRST_SCORES = ("accuracy", "mean_iou", "perplexity", "bits_per_byte", "rmse")
"""The metric of most interest in an evaluation, beside the loss: the first that is known."""


def run_page(run: RunFiles, typed: dict[str, Any], refresh_seconds: int = 0) -> Report:
    """The page of a run.

    typed: the keys that differ from the defaults.
    refresh_seconds: time between two pages, while the run is not over.
    """
    events = events_of(run)
    sections: list[Table | Plot | Lines] = [*run_plots(run, events)]
    if run.of(run.split):
        sections.append(_evaluations(run))
    if len(events) > 1:
        sections.append(_event_table(events))
    sections += _config_sections(run, typed)
    if run.commands:
        commands = [str(line.get("command")) for line in run.commands]
        sections.append(Lines("Commands", commands))
    if run.state == COMPLETED:
        sections.append(Lines("What to do with it", uses(run)))
    return Report(
        f"{run.config.get('name', 'run')}: {run.run_dir.name}",
        "",
        sections,
        _facts(run),
        state=_state(run),
        numbers=numbers(run),
        findings=findings(run),
        refresh_seconds=refresh_seconds if run.state == RUNNING else 0,
    )


def _config_sections(run: RunFiles, typed: dict[str, Any]) -> list[Lines]:
    sections = []
    chosen = _chosen(run, typed)
    if chosen:
        lines = [f"{key}={value}" for key, value in chosen.items()]
        sections.append(Lines("Settings that are not the default", lines))
    if run.config:
        lines = [f"{key}={shown(value)}" for key, value in as_typed(run.config).items()]
        sections.append(Lines("Config, all of it", lines, folded=True))
    return sections


def _chosen(run: RunFiles, typed: dict[str, Any]) -> dict[str, str]:
    """Settings by their keys, as they are typed."""
    chosen = {}
    for key, value in as_typed(typed).items():
        if value != "custom":
            chosen[key] = shown(value)
    for argument in shlex.split(run.command):
        key, equals, value = argument.lstrip("+").partition("=")
        # `auto` might have chosen the same.
        if equals and "." in key and key not in chosen and key != "checkpoint.resume":
            chosen[key] = value
    return chosen


def uses(run: RunFiles) -> list[str]:
    """Commands that evaluate a completed run, predict with its model, or train it for longer."""
    program = program_of(run.command)
    if not program:
        return []
    run_dir = near(run.run_dir)
    resume = word("checkpoint.resume", run_dir)
    uses = [["mode=evaluate", resume], ["mode=predict", resume]]
    train = run.config.get("train") or {}
    for length in ("max_steps", "epochs"):
        if isinstance(train.get(length), int):
            uses.append([word("run_dir", run_dir), f"train.{length}={2 * train[length]}"])
            break
    return [shlex.join([*program, *overrides]) for overrides in uses]


def program_of(command: str) -> list[str]:
    """The words of a command line before its first flag or setting."""
    program = []
    for argument in shlex.split(command):
        if "=" in argument or argument.startswith("-"):
            break
        program.append(argument)
    return program


def near(path: Path) -> Path:
    """A path as one types it."""
    here = Path.cwd()
    if path.is_relative_to(here):
        return path.relative_to(here)
    return path


def _state(run: RunFiles) -> str:
    state = run.state
    step = run.metrics[-1]["step"] if run.metrics else run.summary.get("steps")
    if isinstance(step, int) and run.state != COMPLETED:
        state += f", step {step:,}"
    if run.state == RUNNING:
        state += f", as of {clock(time.time())}"
    return state


def numbers(run: RunFiles) -> dict[str, str]:
    """Numbers that a reader looks for first, by their names."""
    tiles = _score_numbers(run)
    test = run.summary.get("test") or {}
    if run.split != "test" and "accuracy" in test:
        tiles["test accuracy"] = shown_metric("accuracy", test["accuracy"])
    lines = run.of(TRAIN)
    last = lines[-1] if lines else {}
    if last.get("loss") is not None:
        tiles["training loss"] = f"{last['loss']:.4f}"
    speed = run.summary.get("samples_per_second") or last.get("samples_per_second")
    if speed:
        tiles["samples/s"] = f"{speed:,.0f}"
    if run.summary.get("seconds"):
        tiles["training time"] = duration(run.summary["seconds"])
    launch = run.config.get("launch")
    if launch:
        tiles["processes"] = f"{launch.get('nproc_per_node')} x {run.config.get('device')}"
    return tiles


def _score_numbers(run: RunFiles) -> dict[str, str]:
    """The metric of most interest, at the end and at its best."""
    scores = run.of(run.split)
    known = [name for name in FIRST_SCORES if name in run.scores][:1]
    if "loss" in run.scores:
        known.append("loss")
    for name in known:
        top = best(scores, name, run.better(name))
        if top:
            last = scores[-1].get(name, top[name])
            return {
                f"{run.split} {name}, last": shown_metric(name, last),
                f"best, step {top['step']:,}": shown_metric(name, top[name]),
            }
    return {}


def duration(seconds: float) -> str:
    """`12.3 s` or `1:02:03`."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return str(datetime.timedelta(seconds=round(seconds)))


def _evaluations(run: RunFiles) -> Table:
    lines = run.of(run.split)
    names = [name for name in run.scores if name != "loss"]
    headings = [f"{name} %" if name in PERCENT else name for name in names]
    rows = []
    for line in lines:
        values = [as_percent(name, line.get(name)) for name in names]
        rows.append([line.get("epoch"), line["step"], *values, line.get("loss")])
    metric = next((name for name in FIRST_SCORES if name in names), "loss")
    top = best(lines, metric, run.better(metric))
    return Table(
        f"Evaluations of the {run.split} set",
        ["epoch", "step", *headings, "loss"],
        rows,
        f"The best by {metric} stands out; by another metric it may be another line.",
        best=lines.index(top) if top else None,
    )


def as_percent(metric: str, value: Any) -> Any:
    """The value of a metric as it stands in a table."""
    if metric in PERCENT and isinstance(value, int | float):
        return 100 * value
    return value


def _event_table(events: Sequence[Event]) -> Table:
    rows = [[clock(event.time), event.step, event.text] for event in events]
    return Table("What happened", ["time", "step", "event"], rows)


def _facts(run: RunFiles) -> dict[str, str]:
    """Hardware, versions and other provenance, as far as they are known."""
    last = run.last_start
    summary = run.summary
    hardware = str(last.get("hardware") or summary.get("device_name") or "")
    versions = last.get("versions") or {}
    facts = {
        "Run directory": run.run_dir,
        "Hardware": re.sub(r"\b1 cores\b", "1 core", hardware),
        "Host": last.get("host"),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "Parameters": _parameters(summary),
        "Checkpoint": summary.get("checkpoint"),
        "Code": last.get("git_revision"),
        "Started": last.get("started"),
    }
    return {name: str(value) for name, value in facts.items() if value}


def _parameters(summary: dict[str, Any]) -> str:
    parameters = summary.get("parameters")
    if not parameters:
        return ""
    return f"{parameters['all']:,}, of which {parameters.get('trained', 0):,} trained"
