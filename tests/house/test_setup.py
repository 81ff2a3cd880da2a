"""Set-up: what `make` installs for what, and what launch.py says where its packages are missing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from ddp_train.commands.new_project import create
from ddp_train.commands.packages import NEEDED
from ddp_train.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
BARE = [sys.executable, "-S"]
"""A Python without site-packages, as outside of .venv."""


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["mode=doctor"], ["-m", "optimizer.lr=1,2"]], ids=" ".join
)
def test_a_python_without_packages_is_told_what_to_do(words: list[str], tmp_path: Path) -> None:
    ended = subprocess.run(
        [*BARE, ROOT / "launch.py", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 2 and ended.stdout == ""
    first, *remedies = ended.stderr.splitlines()
    assert first.startswith(
        f"launch.py: {sys.executable} does not have torch, hydra, omegaconf, pynvml"
    )
    assert str(ROOT) in first, "remedies are for that folder, wherever the user stands"
    assert (
        "  make train" in ended.stderr
        and "pip install --constraint constraints.txt --editable ." in ended.stderr
    )
    assert ("source .venv/bin/activate" in ended.stderr) == (ROOT / ".venv/bin/activate").exists()
    assert len(remedies) <= 3 and "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_new_project_is_five_short_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/house/test_installed.py runs it, and its tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/ddp-train"])
    Path("spot-finder").mkdir()
    assert create(["spot-finder"]) == 0
    said = capsys.readouterr().out
    files = sorted(path for path in Path("spot-finder").rglob("*") if path.is_file())
    assert [str(path.relative_to("spot-finder")) for path in files] == [
        "conf/experiment/spots.yaml",
        "spot_finder/data.py",
        "spot_finder/model.py",
        "spot_finder/task.py",
        "test_spot_finder.py",
    ]
    assert all(str(path) in said for path in files) and "  ddp-train experiment=spots\n" in said
    contents = "".join(path.read_text() for path in files)
    assert "my_project" not in contents
    assert "spot_finder.data.Spots" in contents
    before = {path: path.stat().st_mtime_ns for path in files}
    for words, message in (
        (["spot-finder"], "init spot-finder: exists, and is not an empty folder"),
        ([], "init: needs the name of a new folder; use"),
        (["a", "b"], "init: needs the name of a new folder; use"),
        (["--here"], "init: needs the name of a new folder; use"),
        (["json"], "a package json is installed already"),
        (["2nd"], "2nd cannot be the name of a package, which begins.* init my_2nd$"),
        (["class"], "no Python keyword; use ddp-train init my_class$"),
        (["spot-finder/conf/experiment/spots.yaml/x"], "cannot be"),
    ):
        with pytest.raises(ConfigError, match=message):
            create(words)
    assert {path: path.stat().st_mtime_ns for path in files} == before and len(
        list(tmp_path.iterdir())
    ) == 1


def test_what_is_looked_for_is_what_a_plain_install_brings() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = {
        text.split(">")[0].split("<")[0].split("=")[0].strip() for text in project["dependencies"]
    }
    providers = packages_distributions()
    assert all({name.lower() for name in providers[module]} & installed for module in NEEDED)


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A checkout in which nothing has been set up."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return tmp_path


def planned(folder: Path, target: str) -> str:
    """What make would run."""
    command = ["make", "--dry-run", target]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=30, check=True
    ).stdout


def installs(plan: str) -> list[str]:
    return [line.split("--editable ")[1] for line in plan.splitlines() if "--editable" in line]


def test_training_installs_no_tool_for_tests(fresh: Path) -> None:
    plan = planned(fresh, "train")
    assert installs(plan) == ["."]
    assert "--quiet" not in plan, "a download of gigabytes shows its progress"
    assert "--constraint constraints.txt" in plan and "GB" in plan
    (fresh / ".venv").mkdir()
    (fresh / ".venv/base").touch()
    assert installs(planned(fresh, "train")) == [], "once"


@pytest.mark.parametrize("target", ["test", "check"])
def test_tests_bring_their_tools(fresh: Path, target: str) -> None:
    assert installs(planned(fresh, target)) == ["'.[dev]'"], "in one go"
    (fresh / ".venv").mkdir()
    (fresh / ".venv/base").touch()
    assert installs(planned(fresh, target)) == ["'.[dev]'"], "on top of what trains"
    (fresh / ".venv/ready").touch()
    assert installs(planned(fresh, target)) == installs(planned(fresh, "train")) == [], "once"


def test_make_help_names_every_target_of_its_own(fresh: Path) -> None:
    listed = subprocess.run(
        ["make"], cwd=fresh, capture_output=True, text=True, timeout=30, check=True
    ).stdout
    assert {"help", "train", "test", "check", "lint", "clean"} <= {
        line.split()[0] for line in listed.splitlines()
    }


def test_ci_runs_what_the_readme_says() -> None:
    assert "exec make check" in (ROOT / ".ci/run").read_text()


def test_the_readme_has_the_numbers_of_the_benchmark() -> None:
    readme = (ROOT / "README.md").read_text()
    speed = (ROOT / "docs/inside/benchmarks/speed.md").read_text()
    for number in ("13,328", "17,270", "18,267", "18,278", "25,772", "26,231"):
        assert number in readme and number in speed
    for picture in ("terminal.svg", "report.png"):
        assert (ROOT / "docs/images" / picture).stat().st_size < 200_000
