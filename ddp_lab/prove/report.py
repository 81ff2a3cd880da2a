"""The report of a proof: the table in the terminal, prove.json and the page. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table as RichTable
from rich.text import Text

from ddp_lab.doctor.findings import (
    FAILURE,
    OK,
    SKIPPED,
    STYLES,
    WARNING,
    Finding,
    report_console,
    status_counts,
)
from ddp_lab.study.provenance import provenance
from ddp_train.resilience.whole_files import write_json
from ddp_train.telemetry.pages.page import write
from ddp_train.telemetry.pages.report import Report
from ddp_train.telemetry.pages.tables import Table

FILE = "prove.json"
HOLDS = "holds"
BROKEN = "does not hold"
INCOMPLETE = "incomplete"
ORDER = (
    "job",
    "gradients",
    "weights of units",
    "order of samples",
    "augmentation",
    "evaluation",
    "unused parameters",
    "random numbers",
    "state",
)
"""Order of the checks; those of real runs come after them."""


def verdict(findings: Sequence[Finding]) -> tuple[str, int]:
    """The result in a word, and as an exit code."""
    for finding in findings:
        if finding.status == FAILURE:
            return BROKEN, finding.exit_code
    for finding in findings:
        if finding.status == SKIPPED and finding.exit_code:
            return INCOMPLETE, finding.exit_code
    return HOLDS, 0


def report(findings: Sequence[Finding], run_dir: Path, seconds: float, command: str) -> int:
    """Print the table, write prove.json and the page.

    seconds: duration of the proof.
    command: the one that repeats it.

    Returns the exit code. Raises OSError.
    """
    findings = sorted(findings, key=_place)
    seconds = round(seconds, 1)
    result, code = verdict(findings)
    counts = status_counts(findings)
    console = report_console()
    console.print(table(findings))
    console.print(f"{result}: {_summary(counts)}, {seconds} s", soft_wrap=True)
    if result != BROKEN and counts[SKIPPED]:
        console.print("skipped checks are not proved", soft_wrap=True)
    values = {
        "status": result,
        "exit_code": code,
        "seconds": seconds,
        "counts": counts,
        "command": command,
        "findings": [asdict(finding) for finding in findings],
    }
    write_json(run_dir / FILE, values)
    page = write(_page(findings, result, command), run_dir)
    console.print(f"report {page}", soft_wrap=True)
    return code


def _place(finding: Finding) -> int:
    return ORDER.index(finding.check) if finding.check in ORDER else len(ORDER)


def _summary(counts: dict[str, int]) -> str:
    statuses = (OK, FAILURE, WARNING, SKIPPED)
    return ", ".join(f"{counts[status]} {status}" for status in statuses if counts[status])


def table(findings: Sequence[Finding]) -> RichTable:
    """One row for each check."""
    drawn = RichTable(title="same result on any number of processes?")
    for heading in ("check", "status", "found", "allowed"):
        drawn.add_column(heading, overflow="fold", no_wrap=heading != "check")
    drawn.add_column("what was found, and the remedy", overflow="fold")
    for finding in findings:
        text = Text(finding.detail)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", "bold")
        drawn.add_row(
            finding.check,
            Text(finding.status, STYLES[finding.status]),
            _number(finding, "found") or "",
            _number(finding, "allowed") or "",
            text,
        )
    return drawn


def _page(findings: Sequence[Finding], result: str, command: str) -> Report:
    rows = [
        [
            finding.check,
            finding.status,
            _number(finding, "found"),
            _number(finding, "allowed"),
            finding.detail,
            finding.remedy,
        ]
        for finding in findings
    ]
    columns = ["check", "status", "found", "allowed", "what was found", "remedy"]
    note = "found: the largest relative difference. Skipped checks are not proved."
    if result == INCOMPLETE:
        intro = "The answer is incomplete, since the time limit prove.seconds was over."
    else:
        intro = f"Same result on any number of processes: {result}."
    return Report(
        title="Is the result the same however the job is divided?",
        intro=intro,
        sections=[Table("Checks", columns, rows, note)],
        facts=provenance(),
        commands=[command],
    )


def _number(finding: Finding, name: str) -> str | None:
    """A measured value of a finding as text; None if it has none."""
    value = finding.numbers.get(name)
    if value is None:
        return None
    return f"{value:.0e}" if value else "0"
