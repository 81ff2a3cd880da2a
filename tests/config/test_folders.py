"""Whose folder it is decides who may work in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_train.checkpoints.layout import MANIFEST, digest_of, place_of
from ddp_train.commands.check import check
from ddp_train.config.folders import is_of_run, is_of_script
from ddp_train.errors import ConfigError
from tests.support.commands import ONE, PROGRAM


def with_checkpoint(folder: Path, step: int, **entries: object) -> None:
    manifest = {"step": step, **entries}
    place = place_of(folder, step)
    place.mkdir(parents=True)
    (place / MANIFEST).write_text(json.dumps({**manifest, "sha256": digest_of(manifest)}))


def test_a_new_folder_is_anyones(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine: 1\n")
    for folder in (tmp_path, tmp_path / "none"):
        assert not is_of_run(folder) and not is_of_script(folder)


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_the_folder_of_a_run_is_told_by_its_files(tmp_path: Path, has_checkpoint: bool) -> None:
    if has_checkpoint:
        with_checkpoint(tmp_path, 3, config={"seed": 0})
        place_of(tmp_path, 4).mkdir()  # a torn one
    else:
        (tmp_path / "commands.jsonl").touch()
    assert is_of_run(tmp_path) and not is_of_script(tmp_path)


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_the_folder_of_a_script_is_told_by_its_files(tmp_path: Path, has_checkpoint: bool) -> None:
    if has_checkpoint:
        with_checkpoint(tmp_path, 3)
    else:
        (tmp_path / "summary.json").write_text('{"mode": "session"}')
    assert is_of_script(tmp_path) and not is_of_run(tmp_path)


@pytest.mark.usefixtures("folder_without_gpus")
def test_check_refuses_the_folder_of_a_script(tmp_path: Path) -> None:
    with_checkpoint(tmp_path, 3)
    with pytest.raises(ConfigError, match="was written by ddp_train"):
        check(PROGRAM, ["model=mlp", ONE, f"run_dir={tmp_path}"])
