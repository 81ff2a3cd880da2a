"""Overrides of a command line are read one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from ddp_train.config.overrides import read_overrides
from ddp_train.config.prepare import prepare, read_run
from ddp_train.errors import ConfigError
from ddp_train.text import shown
from tests.support.commands import PROGRAM
from tests.support.configs import (
    VALUES,
)

pytestmark = pytest.mark.usefixtures("folder_without_gpus")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (f"seed={'9' * 400}", "must be below 9223372036854775808"),
        (f"train.epochs={'9' * 400}", "must be below 9223372036854775808"),
        (f"seed={'9' * 5000}", "not of the form key=value"),
        (
            "train.epochs=glob(*)",
            "glob() works only for groups of options, and train.epochs is not a group",
        ),
        ("model=glob(*)", "several values; add -m"),
        (f"train.epochs={'[' * 1000}{']' * 1000}", "(2,013 characters): not of the form key=value"),
        (f"train.{'a' * 300}=1", "(308 characters): no such key"),
        (f"{'a' * 300}=1", "(302 characters): no such key"),
        (f"run_dir={'/aaaaaaaaa' * 420}", "is too long: a name may have 255 bytes, a path 4,095"),
        (f"checkpoint.resume={'a' * 300}", "is too long"),
        ("name=Größe,b", "the value needs quotes; use \"name='Größe,b'\""),
        ("tuning.num_workers=1000000", "makes 1,000,000 loader processes for "),
        ("launch.threads_per_process=100000000", "makes 100,000,000 threads for "),
    ],
    ids=lambda text: text[:20],
)
def test_overrides_of_any_length_and_depth_get_a_message(
    word: str, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(PROGRAM, ["model=mlp", "launch.nproc_per_node=1", word], None)
    (problem,) = caught.value.problems
    assert problem.startswith(word.partition("=")[0][:100]) and expected in problem


def test_letters_outside_of_ascii_need_no_quotes() -> None:
    config, problems = read_run(
        PROGRAM, read_overrides(PROGRAM, ["name=Größe", "run_dir='ünï/a b'"])
    )
    assert (problems, config.name, config.run_dir) == ([], "Größe", "ünï/a b")


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(value=VALUES)
def test_a_shown_value_can_be_pasted(value: Any) -> None:
    read = read_overrides(PROGRAM, [f"some.key={shown(value)}"])
    assert read.problems == []
    assert read.given == {"some.key": value}


def test_preset_is_taken_back_by_null() -> None:
    read = read_overrides(PROGRAM, ["debug=tiny", "model=mlp", "debug=null"])
    assert read.problems == [] and read.arguments == ["model=mlp"]
    assert read.choices == {"debug": "None", "model": "mlp"}
