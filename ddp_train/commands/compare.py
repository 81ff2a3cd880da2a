"""`ddp-train compare RUN RUN ...`: what differs between runs, and whether that is more than noise.
Torch-free."""

from __future__ import annotations

import shlex
from pathlib import Path

from ddp_train.config.program import typed
from ddp_train.errors import ConfigError
from ddp_train.resilience.whole_files import write_text
from ddp_train.telemetry.pages.compare_page import compare_page
from ddp_train.telemetry.pages.page import as_page
from ddp_train.telemetry.pages.run_files import CONFIG, read_run, runs_in
from ddp_train.telemetry.pages.tables import show, tell
from ddp_train.text import did_you_mean

COMPARE = "compare"
OUTPUT = "--output"


def compare(words: list[str]) -> int:
    """Prints the comparison, and writes its page. words: those behind `compare`. Returns the exit
    code. Raises ConfigError."""
    paths, page = _read(words)
    found = {path: found_runs(COMPARE, path) for path in paths}
    problems = [problem for runs in found.values() if isinstance(problem := runs, str)]
    if problems:
        raise ConfigError(problems)
    run_dirs = list(dict.fromkeys(run for runs in found.values() for run in runs))
    if len(run_dirs) < 2:
        raise ConfigError([f"{COMPARE}: {len(run_dirs)} run named; {_example()}"])
    try:
        runs = [read_run(Path(run)) for run in run_dirs]
    except OSError as error:
        raise ConfigError(
            [f"{COMPARE}: {error.filename} cannot be read ({error.strerror})"]
        ) from None
    report = compare_page(runs, shlex.join([*typed().split(), COMPARE, *words]))
    for table in report.tables:
        show(table, in_blocks=True)
        print()
    tell(report.findings)
    if page:
        try:
            write_text(page, as_page(report))
        except OSError as error:
            raise ConfigError(
                [f"{OUTPUT} {page}: cannot be written ({error.strerror}); name another file"]
            ) from None
        print(f"page {page}")
    else:
        tell([f"The page with the curves: add {OUTPUT} compare.html"], style="dim")
    return 0


def _read(words: list[str]) -> tuple[list[Path], Path | None]:
    """The runs, and the file of the page if one is asked for."""
    words = [*words]
    page = None
    for at, word in enumerate(words):
        if word == OUTPUT and at + 1 < len(words):
            page = Path(words[at + 1])
            del words[at : at + 2]
            break
        if word.startswith(f"{OUTPUT}="):
            page = Path(word.partition("=")[2])
            del words[at]
            break
    if flags := [word for word in words if word.startswith("-")]:
        raise ConfigError([f"{COMPARE}: {flags[0]} is no flag of it; {_example()}"])
    if not words:
        raise ConfigError([f"{COMPARE}: no run named; {_example()}"])
    return [Path(word) for word in words], page


def _example() -> str:
    return (
        f"use {typed()} {COMPARE} RUN RUN [{OUTPUT} PAGE.html]; a folder stands for all runs in it"
    )


def found_runs(command: str, path: Path) -> list[str] | str:
    """The runs at a path, itself one or those in it; or what is wrong with it."""
    try:
        if found := [str(run) for run in runs_in(path)]:
            return found
    except OSError as error:
        beside = [str(run) for run in runs_in(path.parent, 1)] if path.parent.is_dir() else []
        return (
            f"{command} {path}:"
            f" {error.strerror}{did_you_mean(str(path), beside) or '; name the directory of a run'}"
        )
    return (
        f"{command} {path}: no run is there: neither it nor a folder in it has a {CONFIG}; name the"
        " directory of a run"
    )
