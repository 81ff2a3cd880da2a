"""Six cases of tests/campaigns/fuzz.py, whose faults no other test has, and further ones at night;
`make fuzz` runs hundreds. And its judge, which must see."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns.fuzz import (
    CASES_PER_COMMAND,
    SAMPLES,
    Fuzzer,
    Outcome,
    Result,
    differences,
    prepared,
    table,
)
from tests.campaigns.fuzz_faults import FAULTS
from tests.campaigns.fuzz_scripts import (
    OddError,
    check_refusal,
    drawn_loop,
    is_of_scripts,
    wrong_lines,
)

CASES = {
    # a task with keyed noise that logs numbers, two ranks, evaluations within an epoch, a plateau
    26700: (
        "SIGKILL: launcher",
        "SIGTERM: launcher",
        "after: newest checkpoint damaged",
        "disk full",
        "SIGTERM, then SIGKILL: rank",
    ),
    # batch norm and dropout, three ranks with a loader process each, one restart, an average of the
    # weights, a schedule of torch's
    28765: (
        "SIGKILL: rank",
        "SIGKILL: loader",
        "own code: sample raises",
        "paused: rank",
        "own code: nan",
    ),
    # batches of a class of the user's with means over words, four ranks, no checkpoint before the
    # end, the best one kept
    19955: (
        "SIGKILL: rank, then another",
        "SIGSTOP: rank",
        "SIGINT: launcher",
        "own code: raises",
        "after: NaN in the newest checkpoint",
    ),
    10530: (  # a table, one process, one restart, evaluations within an epoch
        "removed meanwhile: checkpoints",
        "after: checkpoints removed",
        "removed meanwhile: lock.json",
        "disk read-only",
        "SIGKILL: fork server",
    ),
}
"""Faults by the seed of the first case: five cases share a command, whose undisturbed run is made
once."""
NIGHTLY = {
    "after: newest checkpoint damaged",
    "SIGTERM: launcher",
    "SIGTERM, then SIGKILL: rank",
    "SIGKILL: fork server",
    *CASES[28765],
    *CASES[19955],
}
"""Faults that have tests of their own: tests/test_map.md."""


def cases() -> list[Any]:
    return [
        pytest.param(first, number, marks=[pytest.mark.nightly] * (name in NIGHTLY))
        for first, names in CASES.items()
        for number, name in enumerate(names)
    ]


@pytest.fixture(scope="module")
def fuzzer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, Fuzzer]]:
    with prepared(tmp_path_factory.mktemp("fuzz")) as made:
        yield request.param, made


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("fuzzer", "number"), cases(), indirect=["fuzzer"])
def test_a_fault_changes_nothing_or_is_named(number: int, fuzzer: tuple[int, Fuzzer]) -> None:
    first, made = fuzzer
    name = CASES[first][number]
    if os.geteuid() != 0 and next(fault for fault in FAULTS if fault.name == name).needs_root:
        pytest.skip("needs root")
    result = made.case(first + number, name)
    assert result.outcome != "WRONG", f"{result.why}\n{result.command}"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [2188, 1296])
def test_a_loop_in_a_session_is_the_plain_loop(seed: int, tmp_path: Path) -> None:
    """Three processes, killed once: two models with keyed noise, a batch sampler and a second
    loader; and a mean over the masked numbers of three batches of a stream in parts."""
    with prepared(tmp_path) as made:
        result = made.case(seed)
    assert result.outcome in ("as in one process", "resumed"), result.why


def test_scripts_are_drawn_alike_from_a_seed() -> None:
    loops = [drawn_loop(random.Random("script 1"), 3) for _ in range(2)]
    assert loops[0] == loops[1]
    for first in CASES:
        assert not is_of_scripts(first // CASES_PER_COMMAND)


def test_a_script_must_say_why_it_is_refused() -> None:
    check_refusal("FATAL data (rank 0 on a, step 0, build): no samples\n  remedy: some\n")
    check_refusal("train.py:3: ddp_train.session: another run is in x\n  remedy: wait for it\n")
    with pytest.raises(OddError):
        check_refusal("Traceback (most recent call last):\nFATAL exception (rank 0): boom\n")


def changed(**values: Any) -> Callable[[Outcome], None]:
    def change(outcome: Outcome) -> None:
        vars(outcome).update(values)

    return change


LINES = [
    {"kind": "train", "step": 3, "loss": 0.5, "lr": 0.1},
    {"kind": "test", "step": 3, "accuracy": 0.5},
    {"kind": "train", "step": 6, "loss": 0.4, "lr": 0.1},
]
EXPECTED = Outcome(
    "bytes", LINES, {"steps": 6, "test": {"loss": 0.25}}, {(0, 0, 0): "1 2", (1, 0, 0): "3"}
)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (changed(state="others"), "weights, optimizer or buffers"),
        (changed(summary={"steps": 6, "test": {"loss": 0.26}}), "summary.json: test"),
        (changed(summary={"steps": 6}), "summary.json: test"),
        (changed(samples={(0, 0, 0): "1 2", (1, 0, 0): "4"}), "samples of"),
        (changed(samples={(0, 0, 0): "1 2"}), "samples of"),
        (changed(lines=LINES[:2]), "lacks [('train', 6)]"),
        (changed(lines=[*LINES, LINES[2]]), "twice"),
        (changed(lines=[LINES[2], *LINES[:2]]), "out of order"),
        (changed(lines=[*LINES, {"kind": "train", "step": 7}]), "has [('train', 7)] too"),
        (
            changed(lines=[*LINES[:2], {**LINES[2], "loss": 0.41}]),
            "loss of ('train', 6): 0.41, not 0.4",
        ),
    ],
)
def test_the_judge_sees_what_is_wrong(change: Callable[[Outcome], None], seen: str) -> None:
    assert differences(copy.deepcopy(EXPECTED), EXPECTED, stopped=False, lines_lost=False) == []
    found = copy.deepcopy(EXPECTED)
    change(found)
    wrong = differences(found, EXPECTED, stopped=False, lines_lost=False)
    assert len(wrong) == 1 and seen in wrong[0], wrong


def test_stop_adds_a_line_of_fewer_steps() -> None:
    found = copy.deepcopy(EXPECTED)
    found.lines.insert(2, {"kind": "train", "step": 4, "loss": 0.3, "lr": 0.1})
    found.lines[3]["loss"] = 0.45
    assert differences(found, EXPECTED, stopped=True, lines_lost=False) == []
    found.lines[3]["lr"] = 0.2
    assert "lr of ('train', 6)" in differences(found, EXPECTED, stopped=True, lines_lost=False)[0]


def test_numbers_of_a_lost_rank_may_lack_samples_alone() -> None:
    expected = copy.deepcopy(EXPECTED)
    expected.lines[0] |= {SAMPLES: 24.0, "own/loss": 0.5}
    found = copy.deepcopy(expected)
    found.lines[0] |= {SAMPLES: 8.0, "own/loss": 0.7}
    lost = {"stopped": False, "lines_lost": False, "numbers_lost": True}
    assert differences(found, expected, **lost) == []
    assert len(differences(found, expected, stopped=False, lines_lost=False)) == 2
    found.lines[0][SAMPLES] = 24.0
    assert "own/loss of ('train', 3)" in differences(found, expected, **lost)[0]
    found.lines[0] |= {SAMPLES: 48.0, "own/loss": 0.5}
    assert len(differences(found, expected, **lost)) == 1


def test_a_loops_lines_are_compared_with_what_it_logged(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [{"kind": "train", "step": 2, "own/loss": 2.0}, {"kind": "test", "step": 2}]
    lines.append({"kind": "train", "step": 3, "own/loss": 5.0})
    logged = {1: [3.0, 3], 2: [3.0, 0], 3: [5.0, 1]}
    file.write_text("\n".join(map(json.dumps, lines)))
    assert wrong_lines(file, logged) == []
    assert len(wrong_lines(file, logged | {4: [1.0, 1]})) == 1
    assert len(wrong_lines(file, logged | {2: [4.0, 0]})) == 1


def test_the_faults_have_names_of_their_own_and_a_row_each() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) and {
        name for names_ in CASES.values() for name in names_
    } <= set(names)
    results = [vars(Result(1, "none", "went on")), vars(Result(2, "none", "WRONG"))]
    assert json.loads(json.dumps(results)) == results
    assert table(results).splitlines()[-1] == "| all | 1 |  |  |  |  |  |  |  | 1 |"


def test_resized_run_gives_samples_to_other_ranks() -> None:
    found = copy.deepcopy(EXPECTED)
    found.state = "others"
    found.samples = {(0, 0, 0): "1", (1, 0, 0): "2", (2, 0, 0): "3", (3, 0, 0): "1"}
    found.lines[0]["loss"] += 1e-12
    assert differences(found, EXPECTED, stopped=False, lines_lost=False, resized=True) == []
    found.samples[2, 0, 0] = "4"
    found.lines[0]["loss"] += 1e-6
    wrong = differences(found, EXPECTED, stopped=False, lines_lost=False, resized=True)
    assert len(wrong) == 2 and "samples of" in wrong[0] and "loss of" in wrong[1]
