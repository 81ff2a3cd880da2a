"""What follows a failed attempt: a table of failures, histories and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ddp_train.launcher.decide import End, FailedAttempt, History, Restart, decide, sentences
from ddp_train.launcher.size import Size
from ddp_train.resilience.failure import Failure

FOUR = Size(4)
"""A fixed number of processes."""
TWO_TO_FOUR = Size(4, [2, 3, 4])
THREE_GPUS = Size(3, [1, 2, 3], ["a", "b", "c"])
NEW = History(newest_step=5)
EXHAUSTED = "launch.max_restarts=2 is used up, and no new step was saved in between"
SAME = "same failure at the same step in 3 attempts; restarting again would not help"
AGAIN = "failed twice, and no new step was saved in between"


def failure(**changes: Any) -> Failure:
    plain = Failure("died", 3, "here", 7, "forward", "killed by SIGKILL, pid 12", "", "", 70)
    return replace(plain, **changes)


def failed(**changes: Any) -> FailedAttempt:
    """Rank 3 was killed at step 7; the newest checkpoint is that of step 5."""
    plain = FailedAttempt(70, failure(), by_signal=True, newest_checkpoint=5)
    return replace(plain, **changes)


def exception(**changes: Any) -> FailedAttempt:
    return failed(failure=failure(kind="exception", **changes), by_signal=False)


def restart(size: Size, number: int, from_step: int | None = None) -> Restart:
    return Restart(size, from_step, counts_as_restart=True, number=number)


def without_device(size: Size, reason: str, otherwise: Restart | End) -> Restart:
    return Restart(size, None, counts_as_restart=False, reason=reason, otherwise=otherwise)


SECOND_OF_RANK_3 = replace(NEW, restarts_used=1, device_failures={"3": 1})
TWICE_THE_SAME = replace(NEW, signature=failed().signature(), repeats=2)
TABLE = {
    "the first failure": (failed(), NEW, FOUR, restart(FOUR, 1)),
    "a step was kept": (failed(kept_step=7), NEW, FOUR, restart(FOUR, 1, from_step=7)),
    "the last restart": (failed(), replace(NEW, restarts_used=1), FOUR, restart(FOUR, 2)),
    "no restart is left": (failed(), replace(NEW, restarts_used=2), FOUR, End(70, EXHAUSTED)),
    "a new checkpoint refills the budget": (
        failed(newest_checkpoint=10),
        replace(NEW, restarts_used=2),
        FOUR,
        restart(FOUR, 1),
    ),
    "a step that was kept refills it too": (
        failed(kept_step=7),
        replace(SECOND_OF_RANK_3, restarts_used=2),
        TWO_TO_FOUR,
        restart(TWO_TO_FOUR, 1, from_step=7),
    ),
    "a wrong config": (failed(code=2), NEW, FOUR, End(2)),
    "broken data": (failed(code=65), NEW, FOUR, End(65)),
    "a disk that takes nothing": (failed(code=73), NEW, FOUR, End(73)),
    "broken data, though a step was kept": (
        failed(code=65, kept_step=7),
        NEW,
        FOUR,
        End(65),
    ),
    "a stop was requested": (failed(stop_requested=True), NEW, FOUR, End(70)),
    "the same failure for the third time": (failed(), TWICE_THE_SAME, FOUR, End(70, SAME)),
    "the same failure but for numbers": (
        failed(failure=failure(detail="killed by SIGKILL, pid 345")),
        TWICE_THE_SAME,
        FOUR,
        End(70, SAME),
    ),
    "another rank": (failed(failure=failure(rank=2)), TWICE_THE_SAME, FOUR, restart(FOUR, 1)),
    "another step": (failed(failure=failure(step=8)), TWICE_THE_SAME, FOUR, restart(FOUR, 1)),
    "nothing is reported": (
        failed(failure=None),
        replace(NEW, repeats=2),
        FOUR,
        restart(FOUR, 1),
    ),
    "a rank is replaced once": (failed(), NEW, TWO_TO_FOUR, restart(TWO_TO_FOUR, 1)),
    "a rank fails again": (
        failed(),
        SECOND_OF_RANK_3,
        TWO_TO_FOUR,
        without_device(replace(TWO_TO_FOUR, count=3), f"rank 3 {AGAIN}", restart(TWO_TO_FOUR, 2)),
    ),
    "a rank fails again, and no restart is left": (
        failed(),
        replace(SECOND_OF_RANK_3, restarts_used=2),
        TWO_TO_FOUR,
        without_device(replace(TWO_TO_FOUR, count=3), f"rank 3 {AGAIN}", End(70, EXHAUSTED)),
    ),
    "a rank fails again after a new checkpoint": (
        failed(newest_checkpoint=10),
        SECOND_OF_RANK_3,
        TWO_TO_FOUR,
        restart(TWO_TO_FOUR, 1),
    ),
    "another rank fails": (
        failed(failure=failure(rank=2)),
        SECOND_OF_RANK_3,
        TWO_TO_FOUR,
        restart(TWO_TO_FOUR, 2),
    ),
    "a rank of a fixed number fails again": (failed(), SECOND_OF_RANK_3, FOUR, restart(FOUR, 2)),
    "fewer are not allowed": (
        failed(failure=failure(rank=1)),
        replace(NEW, device_failures={"1": 5}),
        replace(TWO_TO_FOUR, count=2),
        restart(replace(TWO_TO_FOUR, count=2), 1),
    ),
    "a GPU's rank fails again": (
        failed(failure=failure(rank=1)),
        replace(NEW, device_failures={"b": 1}),
        THREE_GPUS,
        without_device(
            replace(THREE_GPUS, count=2, given_up=("b",)),
            f"rank 1 (GPU b) {AGAIN}",
            restart(THREE_GPUS, 1),
        ),
    ),
    "a GPU is gone": (
        failed(failure=None, unreachable_gpus={"b"}),
        NEW,
        THREE_GPUS,
        without_device(
            replace(THREE_GPUS, count=2, given_up=("b",)), "GPU b is gone", restart(THREE_GPUS, 1)
        ),
    ),
    "a GPU is gone and there is a spare one": (
        failed(failure=None, unreachable_gpus={"b"}),
        NEW,
        replace(THREE_GPUS, count=2),
        without_device(
            replace(THREE_GPUS, count=2, given_up=("b",)),
            "GPU b is gone",
            restart(replace(THREE_GPUS, count=2), 1),
        ),
    ),
}


@pytest.mark.parametrize(("failed", "history", "size", "expected"), TABLE.values(), ids=TABLE)
def test_what_follows_a_failure(
    failed: FailedAttempt, history: History, size: Size, expected: Restart | End
) -> None:
    assert decide(failed, history, size, max_restarts=2) == expected


def test_without_restarts_a_failure_ends_the_run() -> None:
    assert decide(failed(unreachable_gpus={"a"}), NEW, THREE_GPUS, max_restarts=0) == End(70)


@pytest.mark.parametrize(
    ("failed", "rank"),
    [
        (failed(), 3),
        (failed(by_signal=False), None),
        (failed(failure=failure(kind="oom"), by_signal=False), 3),
        (exception(phase="start", detail="RuntimeError: CUDA-capable device is busy"), 3),
        (exception(detail="CUDA error: uncorrectable ECC"), 3),
        (exception(detail="ValueError: boom"), None),
        (failed(failure=failure(kind="non_finite_loss")), None),
        (failed(failure=None), None),
    ],
)
def test_which_failures_may_be_due_to_a_device(failed: FailedAttempt, rank: int | None) -> None:
    assert failed.suspect_rank() == rank


def codes_and_reasons(
    max_restarts: int, attempts: Sequence[FailedAttempt], size: Size = FOUR
) -> list[str]:
    """What is decided on one failure after the other: the reasons; empty for a plain restart."""
    history = History(newest_step=0)
    reasons = []
    for attempt in attempts:
        decision = decide(attempt, history, size, max_restarts)
        if isinstance(decision, Restart):
            history = history.after(attempt, size, decision)
            size = decision.size
        reasons.append(decision.reason)
    return reasons


def at(step: int, checkpoint: int, rank: int = 0) -> FailedAttempt:
    return failed(failure=failure(step=step, rank=rank), newest_checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("max_restarts", "attempts", "expected"),
    [
        (2, [at(1, 0), at(2, 0), at(3, 0)], ["", "", EXHAUSTED]),
        (1, [at(7, 5), at(12, 10), at(17, 15)], ["", "", ""]),
        (9, [at(7, 5), at(7, 5), at(8, 5), at(7, 5), at(7, 5)], [""] * 5),
        (9, [at(7, 5), at(7, 5), at(7, 5)], ["", "", SAME]),
        (9, [at(7, 5, 0), at(7, 5, 1), at(7, 5, 1)], ["", "", ""]),
        (9, [exception(rank=rank) for rank in (0, 1, 0)], ["", "", SAME]),
    ],
)
def test_failures_are_counted_between_checkpoints(
    max_restarts: int, attempts: list[FailedAttempt], expected: list[str]
) -> None:
    assert codes_and_reasons(max_restarts, attempts) == expected


def test_fewer_processes_have_not_failed_yet() -> None:
    again = [f"rank 3 {AGAIN}", f"rank 1 {AGAIN}"]
    ranks = [3, 3, 1, 2, 1, 0, 0]
    attempts = [at(step, 5, rank) for step, rank in enumerate(ranks)]
    expected = ["", again[0], "", "", again[1], "", ""]
    assert codes_and_reasons(2, attempts, TWO_TO_FOUR) == expected


def test_after_a_resize_ranks_may_be_on_other_devices() -> None:
    assert SECOND_OF_RANK_3.after_resize() == replace(NEW, restarts_used=1)


@pytest.mark.parametrize(
    ("decision", "kept_step", "lines"),
    [
        (restart(FOUR, 1), None, ["restarting (1 of 3 restarts)"]),
        (
            restart(FOUR, 2, from_step=7),
            7,
            [
                "step 7 is not lost: it was in memory outside the processes",
                "restarting (2 of 3 restarts), from step 7: no step is lost",
            ],
        ),
        (
            without_device(Size(3), "GPU a is gone", End(70)),
            None,
            ["continuing with 3 processes; GPU a is gone"],
        ),
        (
            replace(without_device(Size(1), "GPU a is gone", End(70)), from_step=7),
            7,
            [
                "step 7 is not lost: it was in memory outside the processes",
                "continuing with 1 process, from step 7: no step is lost; GPU a is gone",
            ],
        ),
        (End(70, "it is enough"), None, ["not restarted: it is enough"]),
        (End(70), None, []),
        (
            End(70, "it is enough"),
            7,
            [
                "saved step 7, which was in memory outside the processes; run_dir=runs/a resumes from it",
                "not restarted: it is enough",
            ],
        ),
    ],
)
def test_decisions_in_words(
    decision: Restart | End, kept_step: int | None, lines: list[str]
) -> None:
    said = sentences(decision, kept_step, max_restarts=3, words_to_resume="run_dir=runs/a")
    assert said == lines


def test_steps_that_are_computed_again_are_told() -> None:
    """On a GPU not each step is kept."""
    decision = restart(FOUR, 1, from_step=7)
    *_, said = sentences(decision, 7, 3, "run_dir=runs/a", steps_redone=2)
    assert (
        said == "restarting (1 of 3 restarts), from step 7: 2 steps after it must be computed again"
    )


@pytest.mark.parametrize(
    ("newest_step", "end"),
    [
        (-1, " starts over"),
        (
            5,
            " resumes from step 5; if that fails too, add checkpoint.resume=PATH of an older"
            " checkpoint, or checkpoint.resume=never to start over",
        ),
    ],
)
def test_where_a_run_resumes_whose_loss_is_not_finite(newest_step: int, end: str) -> None:
    (said,) = sentences(End(70), None, 0, "run_dir=runs/a", finite_step=newest_step)
    assert said == (
        "the steps since the last checkpoint are not saved, for their weights lead to that loss;"
        f" after the remedy, the same command with run_dir=runs/a{end}"
    )
