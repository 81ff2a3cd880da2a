"""The report of the doctor, and checks that give no answer."""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest

from ddp_lab.doctor import (
    findings,
    isolated_check,
    main,
)
from ddp_lab.doctor.findings import FAILURE, OK, SKIPPED, WARNING, Finding
from ddp_lab.doctor.isolated_check import IsolatedCheck, NoAnswerError
from ddp_train.config.prepare import prepare
from ddp_train.linux import state_of
from tests.support.commands import (
    PROGRAM,
    read,
    wait_until,
)
from tests.support.doctor import (
    DOCTOR,
    apart,
    is_failure,
    with_fuse,
)
from tests.support.silent_disk import silent_disk

pytestmark = pytest.mark.timeout(300)  # several commands each, on a machine that may be busy


def test_exit_code_is_that_of_the_first_failure(
    tmp_path: Path,
) -> None:
    def breaks() -> Finding:
        raise KeyError("no such file in /proc")

    broken = findings.run_check("cores", breaks)
    assert broken.status == FAILURE and "KeyError: 'no such file in /proc'" in broken.detail
    found = [
        findings.ok("fine"),
        findings.warning("slow", "faster"),
        findings.failure("not there", "put it there", 65),
        broken,
    ]
    assert findings.exit_code(found[:2]) == 0
    assert findings.report(found, ["here"], tmp_path / "run", time.monotonic()) == 65
    said = read(tmp_path / "run", "doctor.json")
    assert (said["status"], said["exit_code"]) == (FAILURE, 65)
    assert said["counts"] == {OK: 1, WARNING: 1, FAILURE: 2, SKIPPED: 0}
    assert said["findings"][2]["remedy"] == "put it there"


def test_hosts_that_found_the_same_share_a_row() -> None:
    same = [
        dataclasses.replace(findings.warning("too few", "more"), host=name) for name in ("a", "b")
    ]
    other = dataclasses.replace(findings.warning("far too few", "more"), host="c")
    made = findings.table([*same, other], ["a", "b", "c"])
    assert list(made.columns[1].cells) == ["a, b", "c"]


def test_isolated_check_answers_or_is_given_up() -> None:
    soon = time.monotonic() + 30
    assert IsolatedCheck(sorted, [2, 1]).answer(soon) == [1, 2]
    assert len(IsolatedCheck(str.ljust, "", 2**20).answer(soon)) == 2**20, "more than a pipe holds"
    with pytest.raises(RuntimeError, match="ValueError: invalid literal"):
        IsolatedCheck(int, "one").answer(soon)
    with pytest.raises(RuntimeError, match="died"):
        IsolatedCheck(os.abort).answer(soon)
    slow = IsolatedCheck(time.sleep, 60)
    other = IsolatedCheck(os.getpid)
    began = time.monotonic()
    with pytest.raises(NoAnswerError, match=r"^no answer within \d s$"):
        slow.answer(began + 0.1)
    assert time.monotonic() - began < 5 and not state_of(slow.pid), "it was killed and buried"
    wait_until(lambda: state_of(other.pid) == "Z", "end of the other")
    assert other.answer(began) == other.pid, "it was there in time"


@pytest.mark.slow
@with_fuse
def test_a_disk_that_gives_no_answer_is_a_finding(tmp_path: Path) -> None:
    """Nobody waits for it: neither the config nor the checks of run directory and data nor the
    report."""
    dead = tmp_path / "dead"

    def look() -> Finding:
        words = [
            *DOCTOR,
            f"run_dir={dead}/run",
            "data=image_folder",
            f"data.root={dead}",
            "data.decode=auto",
        ]
        on_it = prepare(PROGRAM, words, None).config
        with (
            mock.patch.object(main, "LOCAL_CHECKS_SECONDS", 1.0),
            mock.patch.object(findings, "REPORT_SECONDS", 0.2),
            mock.patch.object(isolated_check, "END_SECONDS", 0.2),
        ):
            began = time.monotonic()
            _, found = main.check_at_rest(on_it, several=False, under_torchrun=False)
            code = findings.report(found, ["here"], dead / "run", began)
        return findings.ok("", code=code, found=[asdict(finding) for finding in found])

    said = apart(silent_disk(dead), look)
    assert said.status == OK, said
    found = {one["check"]: Finding(**one) for one in said.numbers["found"]}
    is_failure(found["run_dir"], 73, "no answer within ", "survives SIGKILL (state D)", "dmesg")
    is_failure(found["data set"], 65, "no answer within")
    assert found["shared memory"].status == OK and said.numbers["code"] == 73
