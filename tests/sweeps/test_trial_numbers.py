"""The number and the folder of a trial, through all starts of its sweep."""

from __future__ import annotations

import random
from pathlib import Path

from ddp_train.sweeps.results import (
    append_row,
)
from ddp_train.sweeps.trial_numbers import TrialNumbers


def claimed(folder: Path, *trials: str, total: int = 0, start: str = "") -> list[int]:
    """The numbers that a start of a sweep gives to trials, each in a word. Each then has a run in
    its folder."""
    numbers = TrialNumbers(folder, total or len(trials), start or str(random.random()))
    found = [numbers.number_of(asked, [word]) for asked, word in enumerate(trials)]
    for number in found:
        (folder / str(number)).mkdir(exist_ok=True)
        (folder / str(number) / "config.yaml").touch()
    return found


def test_a_trial_keeps_its_number_whatever_the_grid_becomes(tmp_path: Path) -> None:
    """Its folder has its run and no other: the number that Hydra gives it changes with the grid."""
    assert claimed(tmp_path, "a=1", "a=2", "a=3") == [0, 1, 2]
    assert claimed(tmp_path, "a=1", "a=2", "a=3", "a=4") == [0, 1, 2, 3], "longer"
    assert claimed(tmp_path, "a=0", "a=1", "a=2") == [4, 0, 1], "longer at its front"
    assert claimed(tmp_path, "a=3", "a=1") == [2, 0], "shorter, and in another order"
    assert claimed(tmp_path, "a=1 seed=1", "a=2 seed=1") == [5, 6], "another word that all share"
    assert claimed(tmp_path, "a=1", "a=1", "a=2", "a=2") == [
        0,
        7,
        1,
        8,
    ], "words that come twice are two trials"
    assert claimed(tmp_path, "a=1", "a=1", "a=2", "a=2") == [0, 7, 1, 8]
    with (tmp_path / "trials.jsonl").open("a") as file:
        file.write('{"trial": 9, "wor')  # the sweep was killed while it wrote
    assert claimed(tmp_path, "a=9") == [9]
    assert claimed(tmp_path, "a=9", "a=8") == [9, 10], "and that is the end of that line alone"


def test_a_job_that_is_put_back_into_the_queue_keeps_its_number(tmp_path: Path) -> None:
    """Of SLURM: each is a process that knows nothing of the others. Words that come twice are told
    apart by it."""
    assert claimed(tmp_path, "a=1", "a=1", start="one") == [0, 1]
    assert claimed(tmp_path, "a=1", "a=1", start="one") == [0, 1]


def test_a_folder_of_unknown_words_is_nobodys(tmp_path: Path) -> None:
    """Of a sweep that an older version began: a row tells the words, a folder alone does not."""
    append_row(tmp_path, {"trial": 1, "status": "failed", "words": ["a=2"]})
    for name in "012":
        (tmp_path / name).mkdir()
    (tmp_path / "0/config.yaml").touch()
    assert claimed(tmp_path, "a=1", "a=2", "a=3") == [3, 1, 2], "0 may be another's, 2 is empty"
