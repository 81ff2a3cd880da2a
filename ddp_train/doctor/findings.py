"""What the doctor says: a finding for each check and host, one table of them, doctor.json, an exit code. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddp_train.doctor.aside import Aside, StuckError
from ddp_train.errors import DataError, LaunchError, WriteError
from ddp_train.resilience.failure_report import write_json
from ddp_train.text import counted, first_line

FILE = "doctor.json"
OK, WARNING, FAILURE, SKIPPED = "ok", "warning", "failure", "skipped"
WIDTH_OF_A_FILE = 160
"""Characters in a line, where rich would take 80."""
REPORT_SECONDS = 10.0
"""To write doctor.json, at most."""
CODES = {"run_dir": WriteError.exit_code, "data set": DataError.exit_code}
"""Of a check that gives no answer, where it is not the usual one."""
STYLES = {OK: "green", WARNING: "yellow", FAILURE: "bold red", SKIPPED: "dim"}


@dataclass(frozen=True)
class Finding:
    """What one check found on one host, or on all of them together."""

    check: str
    status: str
    detail: str
    """What was found; of a check that was skipped, why."""
    remedy: str = ""
    host: str = ""
    """Empty: all hosts together."""
    exit_code: int = 0
    """Of a failure: the code with which a run would end for it."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """What was measured, for programs: plain values."""


def ok(check: str, detail: str, **numbers: Any) -> Finding:
    """A run would not notice."""
    return Finding(check, OK, detail, numbers=numbers)


def warning(check: str, detail: str, remedy: str, **numbers: Any) -> Finding:
    """A run would be slower than it could be, or fail later."""
    return Finding(check, WARNING, detail, remedy, numbers=numbers)


def failure(check: str, detail: str, remedy: str, code: int = LaunchError.exit_code, **numbers: Any) -> Finding:
    """A run would fail. code: with which exit code."""
    return Finding(check, FAILURE, detail, remedy, exit_code=code, numbers=numbers)


def skipped(check: str, why: str) -> Finding:
    """Nothing was looked at."""
    return Finding(check, SKIPPED, why)


def examined(check: str, look: Callable[..., Finding], *arguments: Any) -> Finding:
    """look(*arguments); a check that breaks on an odd host is a finding too, and hides none of the others."""
    try:
        return look(*arguments)
    except Exception as error:  # noqa: BLE001  whatever it is, it is shown
        return broken(check, error)


def found_aside(aside: Aside, deadline: float) -> Finding:
    """What a check finds that goes on aside. Raises as `Aside.answer`."""
    return Finding(**aside.answer(deadline))


def broken(check: str, error: Exception) -> Finding:
    """A check without a result."""
    if isinstance(error, StuckError):
        remedy = "find out what it waits for: `dmesg`; a disk, a file server, a driver that does not answer?"
        return failure(check, str(error), remedy, CODES.get(check, LaunchError.exit_code))
    said = f"{type(error).__name__}: {first_line(error)}"
    return failure(check, f"this check itself failed: {said}", "report it, with what is special about this host")


def on_host(host: str, findings: Iterable[Finding]) -> list[Finding]:
    """The same findings, as those of a host."""
    return [replace(finding, host=host) for finding in findings]


def exit_code(findings: Iterable[Finding]) -> int:
    """That of the first failure, 0 if there is none."""
    return next((finding.exit_code for finding in findings if finding.status == FAILURE), 0)


def report(findings: list[Finding], hosts: list[str], run_dir: Path, began: float) -> int:
    """Shows the table, writes doctor.json. Returns the exit code.

    began: by time.monotonic. Where doctor.json cannot be written a line says so; that is no failure of its own.
    """
    code = exit_code(findings)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_A_FILE
    console.print(table(findings, hosts))
    counts = {status: sum(finding.status == status for finding in findings) for status in STYLES}
    seconds = round(time.monotonic() - began, 1)
    said = ", ".join(
        [f"{counts[OK]} ok", counted(counts[WARNING], "warning"), counted(counts[FAILURE], "failure")]
        + ([f"{counts[SKIPPED]} skipped"] if counts[SKIPPED] else [])
    )
    console.print(f"{said}, {seconds} s", soft_wrap=True)
    worst = next((status for status in (FAILURE, WARNING) if counts[status]), OK)
    values = {"status": worst, "exit_code": code, "hosts": hosts, "seconds": seconds, "counts": counts}
    path = run_dir / FILE
    writing = Aside(_write, path, values | {"findings": [asdict(finding) for finding in findings]})
    try:
        flaw = writing.answer(time.monotonic() + REPORT_SECONDS)
    except StuckError as error:
        flaw = str(error)
    console.print(f"{path} could not be written: {flaw}" if flaw else f"report {path}", soft_wrap=True)
    return code


def _write(path: Path, values: dict[str, Any]) -> str:
    """Empty, or why it could not be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, values)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def table(findings: list[Finding], hosts: list[str]) -> Table:
    """One row for each finding; hosts that found the same share a row, and so do those where all is well."""
    several = len(hosts) > 1
    made = Table(title=f"doctor: {', '.join(hosts)}" if len(hosts) <= 4 else f"doctor: {counted(len(hosts), 'host')}")
    for heading in ("check", *(["host"] if several else []), "status", "found", "remedy"):
        made.add_column(heading, overflow="fold", no_wrap=heading in ("check", "status"))
    rows: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        same = () if finding.status == OK else (finding.detail, finding.remedy)
        rows.setdefault((finding.check, finding.status, *same), []).append(finding)
    for (check, status, *_), alike in rows.items():
        names = [finding.host for finding in alike if finding.host]
        where = "" if not names else "all" if len(names) == len(hosts) else ", ".join(names)
        details = list(dict.fromkeys(finding.detail for finding in alike))
        found = details[0] + (f" (on {names[0]}; others alike)" if len(details) > 1 else "")
        cells = [check, *([where] if several else []), Text(status, STYLES[status]), Text(found), Text(alike[0].remedy)]
        made.add_row(*cells)
    return made
