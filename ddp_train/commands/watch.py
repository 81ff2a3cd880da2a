"""`ddp-train watch RUNS`: all runs of a folder in the terminal, as they go. It only reads.
Torch-free."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from ddp_train.commands.compare import found_runs
from ddp_train.config.program import typed
from ddp_train.errors import ConfigError
from ddp_train.telemetry.pages.run_files import FAILED, RUNNING, TRAIN, RunFiles, glance
from ddp_train.telemetry.pages.run_page import FIRST_SCORES, duration
from ddp_train.telemetry.pages.tables import Table, fitted, show, width_of
from ddp_train.telemetry.score_lines import PERCENT
from ddp_train.text import counted

WATCH = "watch"
EVERY_SECONDS = 2.0
MOST_LETTERS = 70
"""Of the reason of a failure."""
LEAST_LETTERS = 36
"""Of it, for which other columns are left out."""


def watch(words: list[str]) -> int:
    """Shows them until Ctrl-C; into a pipe once. Returns the exit code. Raises ConfigError."""
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError(
            [f"{WATCH}: needs the folder of runs, or one run; use {typed()} {WATCH} runs"]
        )
    folder = Path(words[0])
    console = Console(highlight=False)
    if not console.is_terminal:
        show(_table(folder, _runs(folder)), console)
        return 0
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(screen(folder, _runs(folder), console), refresh=True)
                time.sleep(EVERY_SECONDS)
        except KeyboardInterrupt:
            return 0


def screen(folder: Path, runs: list[RunFiles], console: Console) -> Group:
    """The newest runs that fit, a line each, the reasons of those that failed, and what is not
    shown."""
    kept = len(runs)
    room = 1
    while True:
        drawn, left_out = _in_lines(_table(folder, runs[len(runs) - kept :]), console)
        if kept < len(runs):
            older = [f"{counted(len(runs) - kept, 'older run')} not shown"]
        else:
            older = []
        hidden = [f"columns not shown: {', '.join(left_out)}"] if left_out else []
        notes = [
            Text(note, "dim", no_wrap=True, overflow="ellipsis")
            for note in [*older, *hidden, "Ctrl-C ends"]
        ]
        shown = Group(drawn, *notes)
        room = console.height - 1 - len(console.render_lines(shown, pad=False))
        if room >= 0 or kept <= 1:
            return shown
        kept = max(1, kept + room)


def _in_lines(table: Table, console: Console) -> tuple[RichTable, list[str]]:
    """The reasons are cut to the width that the other columns leave them; names of runs keep their
    ends."""
    most = max(20, console.width // 3)
    rows = [
        [f"...{row[0][3 - most :]}" if len(row[0]) > most else row[0], *row[1:]]
        for row in table.rows
    ]
    if not any(row[-1] for row in rows):
        return fitted(
            Table(table.title, table.columns[:-1], [row[:-1] for row in rows], kept=table.kept),
            console,
            True,
        )

    def cut(letters: int) -> Table:
        reasons = [
            row[-1] if len(row[-1]) <= letters else row[-1][: letters - 3] + "..." for row in rows
        ]
        told = [[*row[:-1], reason] for row, reason in zip(rows, reasons, strict=True)]
        return Table(table.title, table.columns, told, kept=table.kept)

    drawn, _ = fitted(cut(LEAST_LETTERS), console, True)
    return fitted(cut(LEAST_LETTERS + console.width - width_of(drawn, console)), console, True)


def _runs(folder: Path) -> list[RunFiles]:
    found = found_runs(WATCH, folder)
    if isinstance(found, str):
        raise ConfigError([found])
    return [glance(Path(run)) for run in found]


def _table(folder: Path, runs: list[RunFiles]) -> Table:
    """The newest last, beside the prompt."""
    metric = next(
        (name for name in FIRST_SCORES if any(name in run.scores for run in runs)), "loss"
    )
    split = "/".join(dict.fromkeys(run.split for run in runs if metric in run.scores))
    score = f"{split}.{metric}".lstrip(".") + (" %" if metric in PERCENT else "")
    columns = [
        "run",
        "state",
        "step",
        "epoch",
        "training loss",
        score,
        "samples/s",
        "last line",
        "what",
    ]
    return Table(
        str(folder),
        columns,
        [_row(folder, run, metric) for run in runs],
        kept=("state", "what", score),
    )


def _row(folder: Path, run: RunFiles, metric: str) -> list[object]:
    trained, scored = (run.of(kind)[-1:] for kind in (TRAIN, run.split))
    last = run.metrics[-1] if run.metrics else {}
    score = scored[0].get(metric) if scored else None
    name = run.run_dir.relative_to(folder) if run.run_dir != folder else run.run_dir.name
    if run.state == RUNNING and "time" in last:
        age = f"{duration(max(0.0, time.time() - last['time']))} ago"
    else:
        age = None
    if run.state == FAILED and run.failure:
        what = f"{run.failure.get('kind')}: {run.failure.get('detail')}"
    else:
        what = ""
    what = " ".join(what.split())
    return [
        str(name),
        run.state,
        last.get("step"),
        last.get("epoch"),
        trained[0].get("loss") if trained else None,
        score and (100 * score if metric in PERCENT else score),
        trained[0].get("samples_per_second") if trained else None,
        age,
        what if len(what) <= MOST_LETTERS else what[: MOST_LETTERS - 3] + "...",
    ]
