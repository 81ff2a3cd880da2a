"""`ddp-train watch RUNS`: show all runs of a folder in the terminal, as they go. It only reads.

Torch-free.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from ddp_train.commands.compare import find_runs
from ddp_train.config.program import command_name
from ddp_train.errors import ConfigError
from ddp_train.telemetry.pages.run_files import (
    FAILED,
    RUNNING,
    OwnNumber,
    RunFiles,
    glance,
    main_metric,
)
from ddp_train.telemetry.pages.run_page import duration
from ddp_train.telemetry.pages.tables import Table, fitted, show, width_of, without
from ddp_train.telemetry.score_lines import (
    USER_METRICS,
    column_of,
    in_column,
    users_metrics,
)
from ddp_train.text import counted

WATCH = "watch"
INTERVAL_SECONDS = 2.0
LONGEST_REASON = 70
"""Letters of the reason of a failure."""
SHORTEST_REASON = 36
"""Letters of a reason for which other columns are left out."""
LEAST_NAME_WIDTH = 20
MOST_OWN = 8
"""Most columns of numbers that the user's code logged."""


def watch(arguments: list[str]) -> int:
    """Show the runs until Ctrl-C, or once into a pipe. Return the exit code.

    Raises ConfigError if there are none.
    """
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError(
            [
                f"{WATCH}: needs the folder of a run, or a folder with several runs; use"
                f" {command_name()} {WATCH} runs"
            ]
        )
    folder = Path(arguments[0])
    console = Console(highlight=False)
    if not console.is_terminal:
        show(table_of(folder, read_runs(folder)), console)
        return 0
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(screen(folder, read_runs(folder), console), refresh=True)
                time.sleep(INTERVAL_SECONDS)
        except KeyboardInterrupt:
            return 0


def read_runs(folder: Path) -> list[RunFiles]:
    """The runs of a folder, the newest last. Raises ConfigError if there are none."""
    return [glance(Path(run_dir)) for run_dir in find_runs(WATCH, folder)]


def screen(folder: Path, runs: list[RunFiles], console: Console) -> Group:
    """The newest runs that fit, a line each, and notes on what is not shown."""
    count = len(runs)
    while True:
        newest = runs[len(runs) - count :]
        drawn, left_out = fitted_table(table_of(folder, newest), console)
        notes = []
        if count < len(runs):
            notes.append(f"{counted(len(runs) - count, 'older run')} not shown")
        if left_out:
            notes.append(f"columns not shown: {', '.join(left_out)}")
        notes.append("Ctrl-C ends")
        lines = [Text(note, "dim", no_wrap=True, overflow="ellipsis") for note in notes]
        group = Group(drawn, *lines)
        free_lines = console.height - 1 - len(console.render_lines(group, pad=False))
        if free_lines >= 0 or count <= 1:
            return group
        count = max(1, count + free_lines)


def fitted_table(table: Table, console: Console) -> tuple[RichTable, list[str]]:
    """The table with the columns that fit, and the names of the others.

    Reasons are cut to the width that the other columns leave them. Names of runs keep their ends.
    """
    width = max(LEAST_NAME_WIDTH, console.width // 3)
    rows = [[_end_of(str(row[0]), width), *row[1:]] for row in table.rows]
    table = replace(table, rows=rows)
    if not any(row[-1] for row in rows):
        return fitted(without(table, table.columns[-1:]), console, one_line=True)
    narrow, _ = fitted(with_short_reasons(table, SHORTEST_REASON), console, one_line=True)
    letters = SHORTEST_REASON + console.width - width_of(narrow, console)
    return fitted(with_short_reasons(table, letters), console, one_line=True)


def with_short_reasons(table: Table, letters: int) -> Table:
    rows = [[*row[:-1], _beginning_of(row[-1], letters)] for row in table.rows]
    return replace(table, rows=rows)


def _end_of(text: str, letters: int) -> str:
    if len(text) <= letters:
        return text
    return f"...{text[3 - letters :]}"


def _beginning_of(text: str, letters: int) -> str:
    if len(text) <= letters:
        return text
    return f"{text[: letters - 3]}..."


def table_of(folder: Path, runs: list[RunFiles]) -> Table:
    """A row for each run, the newest last, beside the prompt."""
    scores = _scores_of(runs)
    names = [column_of(f"{split}.{metric}") for split, metric in scores]
    own = [*dict.fromkeys(number for run in runs for number in run.own_numbers)][:MOST_OWN]
    columns = ["run", "state", "step", "epoch", "training loss", *names]
    columns += ["samples/s", "last line", *map(str, own), "what"]
    rows = [_row(folder, run, scores, own) for run in runs]
    return Table(str(folder), columns, rows, kept=("state", "what", *names))


def _scores_of(runs: list[RunFiles]) -> list[tuple[str, str]]:
    """Set and name of each metric that is shown: that of most interest, and the user's."""
    known = dict.fromkeys(name for run in runs for name in run.scores)
    metrics = dict.fromkeys([main_metric(known), *users_metrics(known)[-USER_METRICS:]])
    scores = {}
    for metric in metrics:
        for run in runs:
            if metric in run.scores:
                scores |= dict.fromkeys((split, metric) for split in run.scored_sets)
    return list(scores)


def _row(
    folder: Path, run: RunFiles, scores: list[tuple[str, str]], own: list[OwnNumber]
) -> list[object]:
    """The row of a run; the score of a set that it is not scored on is None.

    own: numbers that the user's code logged.
    """
    name = run.run_dir.name
    if run.run_dir != folder:
        name = str(run.run_dir.relative_to(folder))
    interval = _last(run.intervals)
    last = _last(run.metrics)
    age = None
    if run.state == RUNNING and last:
        age = f"{duration(max(0.0, time.time() - last['time']))} ago"
    reason = ""
    if run.state == FAILED and run.failure:
        reason = f"{run.failure.get('kind')}: {run.failure.get('detail')}"
    return [
        name,
        run.state,
        last.get("step"),
        last.get("epoch"),
        interval.get("loss"),
        *(in_column(metric, _last(run.lines(split)).get(metric)) for split, metric in scores),
        interval.get("samples_per_second"),
        age,
        *map(run.last_own, own),
        _beginning_of(" ".join(reason.split()), LONGEST_REASON),
    ]


def _last(lines: list[dict[str, object]]) -> dict:
    """The last line; empty if there is none."""
    return lines[-1] if lines else {}
