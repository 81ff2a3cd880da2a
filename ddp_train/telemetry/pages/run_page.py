"""The page of a run: how it learns, how fast it is, what happened to it, what it was."""

from __future__ import annotations

import datetime
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_train.telemetry.pages.findings import findings
from ddp_train.telemetry.pages.report import Lines, Report, Section
from ddp_train.telemetry.pages.run_events import Event, clock, events_of
from ddp_train.telemetry.pages.run_files import (
    COMPLETED,
    RUNNING,
    TRAIN,
    RunFiles,
    as_typed,
    is_finite,
    main_metric,
)
from ddp_train.telemetry.pages.run_plots import run_plots
from ddp_train.telemetry.pages.tables import Table
from ddp_train.telemetry.score_lines import (
    USER_METRICS,
    column_of,
    in_column,
    shown_metric,
    users_metrics,
)
from ddp_train.text import shown, word, words_of_trust


def run_page(run: RunFiles, typed: dict[str, Any], refresh_seconds: int = 0) -> Report:
    """The page of a run.

    typed: the keys that differ from the defaults.
    refresh_seconds: time between two pages, while the run is not over.
    """
    events = events_of(run)
    sections: list[Section] = [*run_plots(run, events)]
    if run.evaluations:
        sections += [_evaluations(run, name) for name in run.scored_sets]
    if len(events) > 1:
        sections.append(_event_table(events))
    if run.earlier_failures:
        sections.append(_failure_table(run.earlier_failures))
    sections += _texts(run, typed)
    return Report(
        f"{run.config.get('name', 'session' if run.is_session else 'run')}: {run.run_dir.name}",
        "",
        sections,
        _facts(run),
        state=_state(run),
        numbers=numbers(run),
        findings=findings(run),
        refresh_seconds=refresh_seconds if run.state == RUNNING else 0,
    )


def _texts(run: RunFiles, typed: dict[str, Any]) -> list[Lines]:
    """The settings and the commands of the run, and commands that go on from it."""
    config = [f"{key}={shown(value)}" for key, value in as_typed(run.config).items()]
    commands = [str(line.get("command")) for line in run.commands]
    sections = [
        Lines("Settings that are not the default", _chosen(run, typed)),
        Lines("Config, all of it", config, folded=True),
        Lines("Commands", commands),
    ]
    if run.state == COMPLETED and not run.is_session:
        sections.append(Lines("How to use the run", uses(run)))
    return [section for section in sections if section.lines]


def _chosen(run: RunFiles, typed: dict[str, Any]) -> list[str]:
    """Settings that were typed, or differ from the default, as they are typed."""
    chosen = {}
    for key, value in as_typed(typed).items():
        if value != "custom":
            chosen[key] = shown(value)
    for argument in shlex.split(run.command):
        key, equals, value = argument.lstrip("+").partition("=")
        # `auto` might have chosen the same.
        if equals and "." in key and key not in chosen and key != "checkpoint.resume":
            chosen[key] = value
    return [f"{key}={value}" for key, value in chosen.items()]


def uses(run: RunFiles) -> list[str]:
    """Commands that evaluate a completed run, predict with its model, or train it for longer.

    Of a run that trained nothing, the command that repeats it.
    """
    program = program_of(run.command)
    if not program:
        return []
    if run.config.get("mode", TRAIN) != TRAIN:
        return [run.command]
    run_dir = near(run.run_dir)
    resume = word("checkpoint.resume", run_dir)
    uses = [["mode=evaluate", resume], ["mode=predict", resume]]
    train = run.config.get("train") or {}
    lengths = {"max_steps": train.get("max_steps"), "epochs": run.summary.get("epochs")}
    for name, length in lengths.items():
        if isinstance(length, int):
            uses.append([word("run_dir", run_dir), f"train.{name}={2 * length}"])
            break
    trust = words_of_trust(run.config.get("trusted_modules") or [])
    return [shlex.join([*program, *overrides, *trust]) for overrides in uses]


def program_of(command: str) -> list[str]:
    """The words of a command line before its first flag or setting; `python -m` is part of them."""
    arguments = shlex.split(command)
    program = []
    if arguments[:2] == ["python", "-m"]:
        program = arguments[:3]
    for argument in arguments[len(program) :]:
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
    if step is not None and state != COMPLETED:
        state += f", step {step:,}"
    if run.state == RUNNING:
        state += f", as of {clock(time.time())}"
    return state


def numbers(run: RunFiles) -> dict[str, str]:
    """Numbers that a reader looks for first, by their names."""
    tiles = _score_numbers(run)
    for split in run.sets:
        for name in _shown_metrics(run):
            value = (run.summary.get(split) or {}).get(name)
            if split not in run.scored_sets and name != "loss" and is_finite(value):
                tiles[f"{split} {name}"] = shown_metric(name, value)
    last = run.intervals[-1] if run.intervals else {}
    if last.get("loss") is not None:
        tiles["training loss"] = f"{last['loss']:.4f}"
    speed = run.summary.get("samples_per_second") or last.get("samples_per_second")
    if speed:
        tiles["samples/s"] = f"{speed:,.0f}"
    if run.summary.get("seconds"):
        tiles["training time"] = duration(run.summary["seconds"])
    launch = run.config.get("launch")
    if launch:
        processes = f"{launch.get('nproc_per_node')} x {run.config.get('device')}"
        hosts = launch.get("nnodes", 1)
        if hosts != 1:
            processes += f" on each of {hosts} hosts"
        tiles["processes"] = processes
    return tiles


def _score_numbers(run: RunFiles) -> dict[str, str]:
    """The metrics of most interest of each set at the end, and the one that selects at its best."""
    if not run.evaluations:
        return {}
    tiles = {}
    selected_by = run.selected_by
    for split in run.scored_sets:
        last = run.lines(split)[-1]
        for name in _shown_metrics(run):
            if is_finite(last.get(name)):
                tiles[f"{split} {name}, last"] = shown_metric(name, last[name])
    best = run.best
    if best and is_finite(best.get(selected_by)):
        what = selected_by
        if run.selecting_set != run.split:
            what = f"{run.selecting_set} {selected_by}"
        heading = f"best {what}, step {best['step']:,}"
        tiles[heading] = shown_metric(selected_by, best[selected_by])
    return tiles


def _shown_metrics(run: RunFiles) -> list[str]:
    """The metric of most interest, that which selects, and the last ones of the user."""
    users = users_metrics(run.scores)[-USER_METRICS:]
    return [*dict.fromkeys((main_metric(run.scores), run.selected_by, *users))]


def duration(seconds: float) -> str:
    """`12.3 s` or `1:02:03`."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return str(datetime.timedelta(seconds=round(seconds)))


def _evaluations(run: RunFiles, split: str) -> Table:
    lines = run.lines(split)
    names = [name for name in run.scores if name != "loss"]
    if any("loss" in line for line in lines):  # a session need not give one
        names.append("loss")
    rows = []
    for line in lines:
        values = [in_column(name, line.get(name)) for name in names]
        rows.append([line.get("epoch"), line["step"], *values])
    best = None
    note = ""
    if split == run.selecting_set:
        best = run.best
    if best:
        note = (
            f"The marked line is the best by {run.selected_by} (checkpoint.best_metric); by"
            " another metric another line may be best."
        )
    return Table(
        f"Evaluations of the {split} set",
        ["epoch", "step", *map(column_of, names)],
        rows,
        note,
        best=lines.index(best) if best else None,
    )


def _event_table(events: Sequence[Event]) -> Table:
    rows = [[clock(event.time), event.step, event.text] for event in events]
    return Table("What happened", ["time", "step", "event"], rows)


def _failure_table(failures: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for failure in failures:
        moment = failure.get("time")
        row = [moment and clock(moment)]
        row += [failure.get(name) for name in ("kind", "rank", "step", "phase", "detail")]
        rows.append(row)
    columns = ["time", "kind", "rank", "step", "phase", "what"]
    return Table("Failures that the run recovered from", columns, rows)


def _facts(run: RunFiles) -> dict[str, str]:
    """Hardware, versions and other provenance, as far as they are known."""
    last = run.last_start
    versions = last.get("versions") or {}
    parameters = run.summary.get("parameters")
    facts = {
        "Run directory": run.run_dir,
        "Hardware": last.get("hardware") or run.summary.get("device_name"),
        "Host": last.get("host"),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "Parameters": parameters and "{all:,}, of which {trained:,} trained".format(**parameters),
        "Checkpoint": run.summary.get("checkpoint"),
        "Code": last.get("git_revision"),
        "Started": last.get("started"),
    }
    return {name: str(value) for name, value in facts.items() if value}
