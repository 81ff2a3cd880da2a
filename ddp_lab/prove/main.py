"""`mode=prove`: does this job give the same result however it is divided, and if not, what breaks
it? Torch-free."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ddp_lab.doctor.findings import FAILURE, FILE_WIDTH, OK, SKIPPED, STYLES, WARNING, Finding
from ddp_lab.prove.configs import WORDS, for_proof
from ddp_lab.prove.runs import Proof, StoppedError
from ddp_lab.study.provenance import provenance
from ddp_lab.study.request import key_of
from ddp_train.config.overrides import read_overrides
from ddp_train.config.prepare import lock_run_dir, read_run, resolve_and_check
from ddp_train.config.program import Program
from ddp_train.config.run_directory import unwritten
from ddp_train.distributed.environment import new_run_id
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.options.schema import Config
from ddp_train.resilience.preemption import UNSAVED
from ddp_train.resilience.whole_files import write_json
from ddp_train.telemetry.pages.page import write
from ddp_train.telemetry.pages.report import Report
from ddp_train.telemetry.pages.tables import Table

FILE = "prove.json"
FOLDER = "proof"
HOLDS = "holds"
BROKEN = "does not hold"
INCOMPLETE = "incomplete"
ORDER = (
    *("job", "gradients", "weights of units", "order of samples", "augmentation", "evaluation"),
    *("unused parameters", "random numbers", "state"),
)
"""Of the rows; those of real runs come after them."""


def prove(program: Program, argv: list[str], world: World | None) -> int:
    """Checks the job that the words name, prints the table, writes page and prove.json. Returns the
    exit code: 0 if all that could be checked holds. Raises ConfigError before anything runs."""
    began = time.monotonic()
    if world:
        raise ConfigError(
            [
                f"mode=prove: a proof starts its own processes; run it with {program.typed}, not"
                " torchrun"
            ]
        )
    if flags := [word for word in argv if word.startswith("-")]:
        raise ConfigError([f"{flags[0]}: mode=prove takes no flags; leave it out"])
    asked, run_dir = read_job(program, argv)
    lock = lock_run_dir(asked, None)
    stop = StopRequests()
    try:
        shutil.rmtree(run_dir / FOLDER, ignore_errors=True)  # of an earlier proof
        proof = Proof(
            for_proof(asked, run_dir), program, run_dir / FOLDER, began, stop, asked=asked
        )
        try:
            proof.run()
        except StoppedError:
            return stop.exit_code(UNSAVED)
        return report(proof.findings, run_dir, began, program.command(argv))
    except OSError as error:
        raise unwritten(run_dir, error) from None
    finally:
        lock.release()


def read_job(program: Program, argv: Sequence[str]) -> tuple[Config, Path]:
    """The job on CPUs, resolved, and the directory of its proof. Raises ConfigError."""
    given = {key_of(word): word.partition("=")[2] for word in argv}
    words = [word for word in argv if key_of(word) not in ("mode", "run_dir")]
    config, problems = read_run(program, read_overrides(program, [*words, *WORDS]))
    run_dir = given.get("run_dir") or f"runs/{config.name}/prove_{new_run_id(None)}"
    config.run_dir = run_dir
    resolved, more = resolve_and_check(config, None)
    if problems or more:
        raise ConfigError(list(dict.fromkeys(problems + more)))
    return resolved, Path(run_dir)


def verdict(findings: Sequence[Finding]) -> tuple[str, int]:
    """In a word, and as an exit code."""
    broken = [finding.exit_code for finding in findings if finding.status == FAILURE]
    late = [
        finding.exit_code for finding in findings if finding.status == SKIPPED and finding.exit_code
    ]
    if broken:
        return (BROKEN, broken[0])
    return (INCOMPLETE, late[0]) if late else (HOLDS, 0)


def report(findings: list[Finding], run_dir: Path, began: float, command: str) -> int:
    """Prints the table, writes prove.json and the page. Returns the exit code. Raises OSError."""
    findings = sorted(
        findings, key=lambda one: ORDER.index(one.check) if one.check in ORDER else len(ORDER)
    )
    word, code = verdict(findings)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(table(findings))
    counts = {status: sum(finding.status == status for finding in findings) for status in STYLES}
    seconds = round(time.monotonic() - began, 1)
    told = ", ".join(
        f"{counts[status]} {status}" for status in (OK, FAILURE, WARNING, SKIPPED) if counts[status]
    )
    console.print(f"{word}: {told}, {seconds} s", soft_wrap=True)
    if word != BROKEN and counts[SKIPPED]:
        console.print("what was skipped is not proved", soft_wrap=True)
    values = {
        "status": word,
        "exit_code": code,
        "seconds": seconds,
        "counts": counts,
        "command": command,
    }
    write_json(run_dir / FILE, values | {"findings": [asdict(finding) for finding in findings]})
    rows = [
        [
            one.check,
            one.status,
            _number(one, "found"),
            _number(one, "allowed"),
            one.detail,
            one.remedy,
        ]
        for one in findings
    ]
    page = Report(
        "Is the result the same however the job is divided?",
        (
            f"The answer: it {word}."
            if word != INCOMPLETE
            else "The answer is incomplete: the time was over."
        ),
        [
            Table(
                "Checks",
                ["check", "status", "found", "allowed", "what was found", "remedy"],
                rows,
                "found: the largest relative difference. What was skipped is not proved.",
            )
        ],
        provenance(),
        [command],
    )
    console.print(f"report {write(page, run_dir)}", soft_wrap=True)
    return code


def table(findings: Sequence[Finding]) -> RichTable:
    """One row for each check."""
    made = RichTable(title="the same result however it is divided?")
    for heading in ("check", "status", "found", "allowed", "what was found, and the remedy"):
        made.add_column(heading, overflow="fold", no_wrap=heading in ("status", "found", "allowed"))
    for one in findings:
        words = Text(one.detail)
        if one.remedy:
            words.append(f"\n-> {one.remedy}", "bold")
        made.add_row(
            one.check,
            Text(one.status, STYLES[one.status]),
            _number(one, "found") or "",
            _number(one, "allowed") or "",
            words,
        )
    return made


def _number(finding: Finding, name: str) -> Any:
    value = finding.numbers.get(name)
    if value is None:
        return None
    return f"{value:.0e}" if value else "0"
