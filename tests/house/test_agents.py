"""docs/reference/files.md says what real runs write: its tables have every key that is there, and no other.
Those of runs and sweeps: `test_the_page_for_agents_has_the_keys_that_are_written` in test_e2e."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from ddp_train.errors import ConfigError, LaunchError
from ddp_train.resilience.failure import Failure
from ddp_train.resilience.preemption import INTERRUPTED, SAVED, UNSAVED
from tests.support.commands import ONE, ROOT, SMALL, run

PAGE = (ROOT / "docs/reference/files.md").read_text()


def told(heading: str) -> set[str]:
    """The keys in the first column of the table below a heading."""
    section = re.split(r"^## ", PAGE, flags=re.M)
    (text,) = [part for part in section if part.startswith(heading + "\n")]
    return {
        key
        for row in re.findall(r"^\| (`.*?) \|", text, re.M)
        for key in re.findall(r"`(\w+)`", row)
    }


def test_the_exit_codes_are_those_of_the_code() -> None:
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.M)}
    classes = {LaunchError, *LaunchError.__subclasses__(), ConfigError}
    assert codes == {0, SAVED, UNSAVED, INTERRUPTED} | {cls.exit_code for cls in classes}


def test_the_keys_of_a_failure_are_those_of_the_file() -> None:
    assert told("failure.json") == {field.name for field in dataclasses.fields(Failure)}


def test_the_page_is_found_from_the_root() -> None:
    text = (ROOT / "AGENTS.md").read_text()
    paths = re.findall(r"\]\(([^)#]+)", text)
    assert (
        "docs/reference/files.md" in paths
        and all((ROOT / path).exists() for path in paths)
        and len(text.splitlines()) < 12
    )


@pytest.mark.slow
def test_check_starts_nothing_and_says_what_is_wrong(tmp_path: Path) -> None:
    done = run("check", *SMALL, ONE, "seed=3", "run_dir=a", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "valid: mode=train, 1 x cpu; nothing was started" and {
        "seed=3",
        "model=mlp",
    } <= {*lines}
    done = run("check", "-m", "optimizer.lr=0.1,0.2", *SMALL, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (
        0,
        "valid: 2 trials over optimizer.lr; nothing was started\n",
    )
    done = run("check", "--multirun", *SMALL, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (
        0,
        "valid: 1 trial, no key is swept; nothing was started\n",
    )
    done = run("check", "train.epochs=-1", "optimizer.lrr=1", cwd=tmp_path)
    assert done.returncode == 2 and "2 problems" in done.stderr and not list(tmp_path.iterdir())
