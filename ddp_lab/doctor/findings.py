"""Findings of checks, and the report made of them: the table, doctor.json, the exit code.
Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddp_lab.doctor.isolated_check import IsolatedCheck, NoAnswerError
from ddp_train.errors import DataError, LaunchError, WriteError
from ddp_train.resilience.whole_files import write_json
from ddp_train.text import counted, first_line

FILE = "doctor.json"
OK = "ok"
WARNING = "warning"
FAILURE = "failure"
SKIPPED = "skipped"
FILE_WIDTH = 160
"""Characters in a line of the table if it is not printed to a terminal; rich's default is 80."""
REPORT_SECONDS = 10.0
"""Time limit for writing doctor.json."""
EXIT_CODES = {"run_dir": WriteError.exit_code, "data set": DataError.exit_code}
"""Exit codes of checks that did not answer in time, where it is not LaunchError's."""
STYLES = {OK: "green", WARNING: "yellow", FAILURE: "bold red", SKIPPED: "dim"}


@dataclass(frozen=True)
class Finding:
    """The result of one check on one host, or on all hosts together."""

    check: str
    """Name of the check; `run_check` sets it."""
    status: str
    detail: str
    """The result in words; the reason if the check was skipped."""
    remedy: str = ""
    host: str = ""
    """Empty: all hosts together."""
    exit_code: int = 0
    """The exit code of a run that meets this failure."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """Measured values for programs, as plain JSON types."""

    def named(self, check: str) -> Finding:
        """The same finding with the name of its check."""
        return replace(self, check=check)


def ok(detail: str, **numbers: Any) -> Finding:
    """No problem found."""
    return Finding("", OK, detail, numbers=numbers)


def warning(detail: str, remedy: str, **numbers: Any) -> Finding:
    """A run would be slower than it could be, or fail later."""
    return Finding("", WARNING, detail, remedy, numbers=numbers)


def failure(detail: str, remedy: str, code: int = LaunchError.exit_code, **numbers: Any) -> Finding:
    """A run would fail. code: its exit code."""
    return Finding("", FAILURE, detail, remedy, exit_code=code, numbers=numbers)


def skipped(reason: str) -> Finding:
    """The check was not made."""
    return Finding("", SKIPPED, reason)


def run_check(check: str, function: Callable[..., Finding], *arguments: Any) -> Finding:
    """Call a check, and name its finding. An exception becomes a failure of this check, so that all
    other checks still run."""
    try:
        return function(*arguments).named(check)
    except Exception as error:  # noqa: BLE001  whatever it is, it is shown
        return failed_check(check, error)


def start_checks(checks: dict[str, Callable[[], Finding]]) -> dict[str, IsolatedCheck]:
    """Start all checks at once, each in a process of its own."""
    return {name: IsolatedCheck(run_check, name, check) for name, check in checks.items()}


def isolated_findings(running: dict[str, IsolatedCheck], deadline: float) -> list[Finding]:
    """The findings of checks that run in other processes; a failure for each without an answer in
    time."""
    return [
        run_check(name, lambda check: Finding(**check.answer(deadline)), check)
        for name, check in running.items()
    ]


def failed_check(check: str, error: Exception) -> Finding:
    """The failure of a check that did not answer in time, or raised an exception."""
    if isinstance(error, NoAnswerError):
        remedy = (
            "run `dmesg` to see what the check waits for: a disk, a file server or a driver that"
            " does not respond"
        )
        code = EXIT_CODES.get(check, LaunchError.exit_code)
        return failure(str(error), remedy, code).named(check)
    detail = f"this check itself failed: {type(error).__name__}: {first_line(error)}"
    remedy = "this is a bug: report this message and what is unusual about this host"
    return failure(detail, remedy).named(check)


def on_host(host: str, findings: Iterable[Finding]) -> list[Finding]:
    """The same findings with their host set."""
    return [replace(finding, host=host) for finding in findings]


def exit_code(findings: Iterable[Finding]) -> int:
    """The exit code of the first failure, 0 if there is none."""
    return next((finding.exit_code for finding in findings if finding.status == FAILURE), 0)


def status_counts(findings: Iterable[Finding]) -> dict[str, int]:
    """The number of findings with each status."""
    statuses = [finding.status for finding in findings]
    return {status: statuses.count(status) for status in STYLES}


def report_console() -> Console:
    """A console that is wide enough for tables, also in a file."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


def report(findings: list[Finding], hosts: list[str], run_dir: Path, began: float) -> int:
    """Print the table, write doctor.json. Returns the exit code.

    began: in time.monotonic() seconds.

    If doctor.json cannot be written, a line says so; the exit code does not change.
    """
    code = exit_code(findings)
    counts = status_counts(findings)
    seconds = round(time.monotonic() - began, 1)
    console = report_console()
    console.print(table(findings, hosts))
    summary = [
        f"{counts[OK]} ok",
        counted(counts[WARNING], "warning"),
        counted(counts[FAILURE], "failure"),
    ]
    if counts[SKIPPED]:
        summary.append(f"{counts[SKIPPED]} skipped")
    console.print(f"{', '.join(summary)}, {seconds} s", soft_wrap=True)
    values = {
        "status": next((status for status in (FAILURE, WARNING) if counts[status]), OK),
        "exit_code": code,
        "hosts": hosts,
        "seconds": seconds,
        "counts": counts,
        "findings": [asdict(finding) for finding in findings],
    }
    path = run_dir / FILE
    writing = IsolatedCheck(_write, path, values)
    try:
        problem = writing.answer(time.monotonic() + REPORT_SECONDS)
    except NoAnswerError as error:
        problem = str(error)
    line = f"{path} could not be written: {problem}" if problem else f"report {path}"
    console.print(line, soft_wrap=True)
    return code


def _write(path: Path, values: dict[str, Any]) -> str:
    """Write doctor.json. Returns why it could not be written, or an empty string."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, values)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def table(findings: list[Finding], hosts: list[str]) -> Table:
    """One row for each distinct finding. Hosts share a row if their findings are equal, or if all
    are ok."""
    several = len(hosts) > 1
    title = ", ".join(hosts) if len(hosts) <= 4 else counted(len(hosts), "host")
    drawn = Table(title=f"doctor: {title}")
    for heading in ("check", "host", "status", "found", "remedy"):
        if several or heading != "host":
            drawn.add_column(heading, overflow="fold", no_wrap=heading in ("check", "status"))
    rows: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        text = () if finding.status == OK else (finding.detail, finding.remedy)
        rows.setdefault((finding.check, finding.status, *text), []).append(finding)
    for (check, status, *_), group in rows.items():
        names = [finding.host for finding in group if finding.host]
        where = "all" if len(names) == len(hosts) else ", ".join(names)
        details = {finding.detail for finding in group}
        detail = group[0].detail
        if len(details) > 1:
            detail += f" (on {names[0]}; similar on the others)"
        cells = [check, Text(status, STYLES[status]), Text(detail), Text(group[0].remedy)]
        if several:
            cells.insert(1, where)
        drawn.add_row(*cells)
    return drawn
