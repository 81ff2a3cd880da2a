"""`ddp-train watch RUNS`: all runs of a folder in the terminal, as they go. It only reads. Torch-free."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ddp_train.config.program import typed
from ddp_train.errors import ConfigError
from ddp_train.launcher.compare import found_runs
from ddp_train.telemetry.pages.run_files import FAILED, RUNNING, TRAIN, RunFiles, glance
from ddp_train.telemetry.pages.run_page import FIRST_SCORES, duration
from ddp_train.telemetry.pages.tables import Table, fitted, show
from ddp_train.telemetry.score_lines import PERCENT
from ddp_train.text import counted

WATCH = "watch"
EVERY_SECONDS = 2.0
MOST_LETTERS = 70
"""Of the reason of a failure."""
OTHER_LINES = 7
"""On the screen, beside a line per run."""


def watch(words: list[str]) -> int:
    """Shows them until Ctrl-C; into a pipe once. Returns the exit code. Raises ConfigError."""
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError([f"{WATCH}: needs the folder of runs, or one run; use {typed()} {WATCH} runs"])
    folder, console = Path(words[0]), Console(highlight=False)
    if not console.is_terminal:
        show(_table(folder, _runs(folder)), console)
        return 0
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                runs = _runs(folder)
                room = max(1, console.height - OTHER_LINES)
                drawn, left_out = fitted(_table(folder, runs[-room:]), console)
                older = [f"{counted(len(runs) - room, 'older run')} not shown"] if len(runs) > room else []
                hidden = [f"columns not shown: {', '.join(left_out)}"] if left_out else []
                notes = [Text(note, "dim") for note in [*older, *hidden, "Ctrl-C ends"]]
                live.update(Group(drawn, *notes), refresh=True)
                time.sleep(EVERY_SECONDS)
        except KeyboardInterrupt:
            return 0


def _runs(folder: Path) -> list[RunFiles]:
    found = found_runs(WATCH, folder)
    if isinstance(found, str):
        raise ConfigError([found])
    return [glance(Path(run)) for run in found]


def _table(folder: Path, runs: list[RunFiles]) -> Table:
    """The newest last, beside the prompt."""
    metric = next((name for name in FIRST_SCORES if any(name in run.scores for run in runs)), "loss")
    columns = ["run", "state", "step", "epoch", "training loss", metric + (" %" if metric in PERCENT else "")]
    columns += ["samples/s", "last line", "what"]
    return Table(str(folder), columns, [_row(folder, run, metric) for run in runs])


def _row(folder: Path, run: RunFiles, metric: str) -> list[object]:
    trained, scored = (run.of(kind)[-1:] for kind in (TRAIN, run.split))
    last = run.metrics[-1] if run.metrics else {}
    score = scored[0].get(metric) if scored else None
    name = run.run_dir.relative_to(folder) if run.run_dir != folder else run.run_dir.name
    age = f"{duration(max(0.0, time.time() - last['time']))} ago" if run.state == RUNNING and "time" in last else None
    what = f"{run.failure.get('kind')}: {run.failure.get('detail')}" if run.state == FAILED and run.failure else ""
    what = " ".join(what.split())
    return [
        str(name), run.state, last.get("step"), last.get("epoch"),
        trained[0].get("loss") if trained else None,
        score and (100 * score if metric in PERCENT else score),
        trained[0].get("samples_per_second") if trained else None, age,
        what if len(what) <= MOST_LETTERS else what[: MOST_LETTERS - 3] + "...",
    ]  # fmt: skip
