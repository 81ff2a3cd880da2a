"""Whether the run directory may be written."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from ddp_train.config.overrides import read_overrides
from tests.support.commands import PROGRAM
from tests.support.configs import (
    accepted,
    problems_of,
)

pytestmark = pytest.mark.usefixtures("folder_without_gpus")


@pytest.mark.parametrize(
    ("run_dir", "what"), [("/", "root"), ("~", "home"), (".", "working"), ("a/..", "working")]
)
def test_a_run_fills_no_folder_that_is_another_ones(
    run_dir: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home/mine").mkdir(parents=True)
    given = run_dir.replace("~", str(tmp_path / "home"))
    (problem,) = problems_of(f"run_dir={given}")
    assert (
        f"run_dir={given}: a run would put its files into the {what} folder; use a folder for this"
        " run alone, run_dir=" in problem
    )


def test_run_begins_and_resumes_in_an_empty_folder(tmp_path: Path) -> None:
    accepted("run_dir=.", "model=mlp")
    assert (tmp_path / "config.yaml").exists()
    accepted("run_dir=.", "model=mlp")


def test_remedy_with_a_folder_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "my runs [1]"
    (here / "mine").mkdir(parents=True)
    monkeypatch.chdir(here)
    (problem,) = problems_of("run_dir=.")
    (word,) = shlex.split(problem.partition("use a folder for this run alone, ")[2])
    assert read_overrides(PROGRAM, [word]).given == {"run_dir": str(here / "runs/NAME")}


@pytest.mark.parametrize(
    ("run_dir", "remedy"),
    [
        ("~/x", "use run_dir=$HOME/x, or in a preset ${oc.env:HOME}/x"),
        ("~", "use run_dir=$HOME/runs/NAME, or in a preset ${oc.env:HOME}/runs/NAME"),
        ("~ann/x", "write the full path of the home folder of ann"),
    ],
)
def test_home_folder_by_its_sign_is_refused(run_dir: str, remedy: str) -> None:
    (problem,) = problems_of(f"run_dir='{run_dir}'")
    assert problem == f"run_dir={run_dir}: ~ is not expanded here; {remedy}"
