"""`ddp-train compare RUN RUN ...`: what differs between runs, and whether that is more than noise.

Torch-free.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from ddp_train.config.program import command_name
from ddp_train.errors import ConfigError
from ddp_train.resilience.whole_files import write_text
from ddp_train.telemetry.pages.compare_page import compare_page
from ddp_train.telemetry.pages.page import as_page
from ddp_train.telemetry.pages.run_files import CONFIG, RunFiles, read_run, runs_in
from ddp_train.telemetry.pages.tables import folding_console, show, tell
from ddp_train.text import did_you_mean

COMPARE = "compare"
OUTPUT = "--output"
METRIC = "--metric"


def compare(arguments: list[str]) -> int:
    """Print the comparison, and write its page if one is asked for. Return the exit code.

    Raises ConfigError.
    """
    paths, flags = parse_arguments(arguments)
    page = flags.get(OUTPUT)
    command = shlex.join([*command_name().split(), COMPARE, *arguments])
    try:
        report = compare_page(read_runs(paths), command, flags.get(METRIC, ""))
    except LookupError as error:
        raise ConfigError([f"{COMPARE} {METRIC} {error.args[0]}"]) from None
    console = folding_console()
    for table in report.tables:
        show(table, console, in_blocks=True)
        console.print()
    tell(report.findings, console)
    if page is None:
        tell([f"The page with the curves: add {OUTPUT} compare.html"], console, "dim")
        return 0
    try:
        write_text(Path(page), as_page(report))
    except OSError as error:
        raise ConfigError(
            [f"{OUTPUT} {page}: cannot be written ({error.strerror}); name another file"]
        ) from None
    print(f"page {page}")
    return 0


def parse_arguments(arguments: list[str]) -> tuple[list[Path], dict[str, str]]:
    """The paths of runs, and the values of the flags that are given: OUTPUT, METRIC.

    Raises ConfigError.
    """
    paths = []
    flags: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        is_flag = flag in (OUTPUT, METRIC)
        if is_flag and not equals:
            value = next(rest, "")
        if is_flag and flag not in flags and value:
            flags[flag] = value
        elif argument.startswith("-"):
            raise ConfigError([f"{COMPARE}: {argument} is not a flag of {COMPARE}; {_example()}"])
        else:
            paths.append(Path(argument))
    if not paths:
        raise ConfigError([f"{COMPARE}: needs two runs or more; {_example()}"])
    return paths, flags


def read_runs(paths: list[Path]) -> list[RunFiles]:
    """The runs at paths, at least two. Raises ConfigError."""
    run_dirs: list[str] = []
    problems = []
    for path in paths:
        try:
            run_dirs += find_runs(COMPARE, path)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    run_dirs = list(dict.fromkeys(run_dirs))
    if len(run_dirs) < 2:
        raise ConfigError(
            [f"{COMPARE}: needs two runs or more, and got {len(run_dirs)}; {_example()}"]
        )
    try:
        return [read_run(Path(run_dir)) for run_dir in run_dirs]
    except OSError as error:
        raise ConfigError(
            [
                f"{COMPARE}: {error.filename} cannot be read ({error.strerror}); make the file"
                " readable, or leave that run out"
            ]
        ) from None


def find_runs(command: str, path: Path) -> list[str]:
    """The run at a path, or those in the folder.

    Raises ConfigError if there are none.

    command: for messages.
    """
    try:
        run_dirs = [str(run_dir) for run_dir in runs_in(path)]
    except OSError as error:
        siblings = []
        if path.parent.is_dir():
            siblings = [str(run_dir) for run_dir in runs_in(path.parent, 1)]
        remedy = did_you_mean(str(path), siblings) or "; give the folder of a run"
        raise ConfigError([f"{command} {path}: {error.strerror}{remedy}"]) from None
    if not run_dirs:
        raise ConfigError(
            [
                f"{command} {path}: no run was found, since neither this folder nor a folder in"
                f" it has a {CONFIG}; give the folder of a run"
            ]
        )
    return run_dirs


def _example() -> str:
    command = f"{command_name()} {COMPARE} RUN RUN [{METRIC} SET.NAME] [{OUTPUT} PAGE.html]"
    return f"use {command}, where RUN is the folder of a run, or a folder with several runs"
