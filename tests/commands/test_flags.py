"""Flags of the command, and its completion in a shell."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ddp_train import __version__
from ddp_train.commands.flags import require_one_purpose, suggestion_for
from ddp_train.config.bind import bind
from ddp_train.errors import ConfigError
from tests.support.configs import (
    composed,
    launch,
    problems_of,
)

pytestmark = pytest.mark.usefixtures("folder_without_gpus")


def test_only_what_is_alike_is_suggested() -> None:
    assert problems_of("data.crop=32") == ["data.crop=32: no such key"]
    assert not any("did you mean" in problem for problem in problems_of("optimizer=null"))


def test_the_version_is_ours() -> None:
    assert launch("--version").stdout == f"ddp_train {__version__}\n"


def test_cfg_job_shows_the_config_and_runs_nothing(tmp_path: Path) -> None:
    done = launch("--cfg", "job", "optimizer=adam", "optimizer.lr=0.25")
    assert done.returncode == 0, done.stderr
    values = yaml.safe_load(done.stdout)
    config, problems = bind(values)
    assert problems == []
    assert config == composed("optimizer=adam", "optimizer.lr=0.25")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_flags_may_stand_in_any_order_with_their_values() -> None:
    done = launch("--cfg", "job", "--package", "train", "train.epochs=3")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["epochs"] == 3


@pytest.mark.slow
def test_info_defaults_shows_the_files(tmp_path: Path) -> None:
    done = launch("--info", "defaults")
    assert done.returncode == 0, done.stderr
    for name in (
        "strategy/ddp",
        "model/cnn",
        "data/digits",
        "optimizer/sgd",
        "schedule/cosine",
        "tuning/recommended",
    ):
        assert name in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--cfg", "--info"], "--cfg: contradicts --info; give one of them"),
        (["-i", "-m"], "-m: contradicts -i; give one of them"),
        (["-c", "-sc"], "-c: contradicts -sc; give one of them"),
        (["-m", "--hydra-help"], "-m: contradicts --hydra-help; give one of them"),
    ],
)
def test_flags_of_two_purposes_are_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        require_one_purpose(flags)
    assert refused.value.problems == [problem]


def test_flags_of_one_purpose_are_taken() -> None:
    require_one_purpose(["-c", "--cfg", "--resolve", "-p"])


@pytest.mark.parametrize("words", [["--cfg", "job", "--info"], ["-sc"]])
def test_flags_that_hydra_refuses_are_config_errors(words: list[str]) -> None:
    done = launch(*words)
    assert done.returncode == ConfigError.exit_code
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--experiment", "experiment=VALUE"),
        ("--lr", "optimizer.lr=VALUE"),
        ("--batch-size", ""),
        ("--epochs", "train.epochs=VALUE"),
        ("--hlep", "--help"),
        ("--run", ""),
    ],
)
def test_a_key_typed_as_a_flag_is_recognised(flag: str, meant: str) -> None:
    assert (
        f"; did you mean {meant}?" if meant else "no such flag"
    ) in "no such flag" + suggestion_for(flag)


@pytest.mark.parametrize("flag", ["--check", "--dry-run"])
def test_a_flag_that_would_check_is_answered_with_the_command(flag: str) -> None:
    done = launch("train.epochs=3", flag, "optimizer=adam")
    assert done.returncode == ConfigError.exit_code
    _, _, typed = done.stderr.strip().partition("to check this command and run nothing, use: ")
    program, words = typed.split(" check ")
    assert program.endswith("launch.py")
    assert words.splitlines()[0] == "train.epochs=3 optimizer=adam"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("strategy=", {"strategy=ddp", "strategy=dp", "strategy=ordered", "strategy=single"}),
        ("optimizer.mom", {"optimizer.momentum="}),
        ("optimizer=adamw optimizer.be", {"optimizer.beta1=", "optimizer.beta2="}),
    ],
)
def test_the_shell_completes(typed: str, offered: set[str]) -> None:
    """As bash asks, after eval "$(python launch.py -sc install=bash)"."""
    line = f"python launch.py {typed}"
    done = launch(
        "-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)), COMP_KEY="9", COMP_TYPE="9"
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == offered


def test_completion_installs_itself() -> None:
    done = launch("-sc", "install=bash")
    assert done.returncode == 0, done.stderr
    assert "complete " in done.stdout
