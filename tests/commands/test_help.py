"""The help of the command."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys

import pytest

from ddp_train.commands.help import wrapped
from ddp_train.config.keys import all_keys
from tests.support.configs import (
    FILES,
    ROOT,
    launch,
)

pytestmark = pytest.mark.usefixtures("folder_without_gpus")


def test_help_names_every_key() -> None:
    done = launch("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for key in all_keys():
        if not key.endswith((".name", ".arguments")):
            assert f"  {key}=" in done.stdout.replace("._target_=", ".target="), key
    for name in FILES:
        assert name.split("/")[1] in done.stdout


def test_help_names_choices_and_what_works() -> None:
    told = launch("--help").stdout
    for expected in (
        "model._target_=",
        "model.ANY=",
        "(none, batch, group)",
        "(auto, nccl, gloo)",
        "(train, evaluate, predict, export, study, doctor, prove)",
        "MNIST to 99 %",
        "Small, slow and loud",
    ):
        assert expected in told


@pytest.mark.parametrize("command", ["init", "resize", "compare", "watch", "check", "prove"])
def test_each_command_says_how_it_is_used(command: str) -> None:
    told = launch(command, "--help")
    assert (told.returncode, told.stderr) == (0, "")
    assert f"launch.py {command} " in told.stdout.splitlines()[0]
    assert max(map(len, told.stdout.splitlines())) <= 100
    assert launch(command, "-h").stdout == told.stdout


def test_a_proved_script_has_its_own_help() -> None:
    assert "there is no script gone.py" in launch("prove", "gone.py", "--help").stderr


@pytest.mark.parametrize("width", [60, 80, 120])
def test_help_fits_a_terminal_and_loses_no_word(width: int) -> None:
    text = launch("--help").stdout
    seen = wrapped(text, width)
    assert max(map(len, seen.splitlines())) <= width < max(map(len, text.splitlines()))
    assert "".join(seen.split()) == "".join(text.split())
    if width == 80:
        at = seen.index("launch.grace_seconds=30.0")
        first, second = seen[at:].splitlines()[:2]
        assert second.startswith(" " * (first.index("time to save") + 2)), (
            "below the meaning of the key"
        )


def test_help_in_a_terminal_is_folded() -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, ROOT / "launch.py", "--help"]
    with subprocess.Popen(command, stdout=follower, env=os.environ | {"COLUMNS": "60"}):
        os.close(follower)
        seen = b""
        with contextlib.suppress(OSError):  # Linux tells so that the other end is closed
            while part := os.read(leader, 65536):
                seen += part
    os.close(leader)
    assert max(map(len, seen.decode().splitlines())) == 60


def test_help_into_a_pipe_that_closes_ends_quietly() -> None:
    command = f"{sys.executable} {ROOT / 'launch.py'} --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
