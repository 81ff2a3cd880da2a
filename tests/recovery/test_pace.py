"""How often a step is kept on a GPU."""

from __future__ import annotations

import math

import pytest

from ddp_train.recovery.pace import HOST_SECONDS, SHARE, DevicePace, SessionPace


class Copies:
    """Copies that take so long."""

    def __init__(self, seconds: float) -> None:
        self.taken = seconds

    def seconds(self) -> float:
        return self.taken


def kept_steps(pace: DevicePace, steps: int) -> list[int]:
    return [step for step in range(1, steps + 1) if pace.comes_to_keep()]


def test_each_step_is_kept_until_its_time_is_known() -> None:
    pace = DevicePace(Copies(0.0))
    assert kept_steps(pace, 3) == [1, 2, 3]
    pace.deliver([[math.inf, 0.0]])
    assert pace.every == 1


@pytest.mark.parametrize(
    ("step_seconds", "copy_seconds"), [(160e-6, 20e-6), (0.033, 0.0007), (1.0, 0.0007)]
)
def test_keeping_takes_no_more_than_its_share(step_seconds: float, copy_seconds: float) -> None:
    pace = DevicePace(Copies(copy_seconds))
    pace.deliver([[step_seconds, copy_seconds]])
    cost = (HOST_SECONDS + copy_seconds) / (pace.every * step_seconds)
    assert cost <= SHARE
    redone_seconds = (pace.every - 1) * step_seconds
    assert redone_seconds <= (HOST_SECONDS + copy_seconds) / SHARE
    pace.since = 0
    assert kept_steps(pace, 2 * pace.every) == [pace.every, 2 * pace.every]


def test_all_ranks_keep_the_same_steps() -> None:
    """The slowest copy and the shortest step decide."""
    of_ranks = [[0.010, 0.001], [0.012, 0.002], [0.011, 0.0]]
    paces = [DevicePace(Copies(0.0)) for _ in range(3)]
    for pace in paces:
        pace.deliver(of_ranks)
    assert [pace.every for pace in paces] == [
        math.ceil((HOST_SECONDS + 0.002) / (SHARE * 0.010))
    ] * 3


def test_states_of_hooks_that_take_long_are_kept_less_often() -> None:
    pace = DevicePace(Copies(0.0007))
    assert kept_steps(pace, 1) == [1]
    pace.took(0.05)
    _, cost = pace.collect()
    pace.deliver([[0.01, cost]])
    assert pace.every == math.ceil((HOST_SECONDS + 0.0507) / (SHARE * 0.01))


def kept_of_session(pace: SessionPace, steps: int) -> list[int]:
    kept = []
    for step in range(1, steps + 1):
        pace.count_step()
        if pace.comes_to_keep():
            kept.append(step)
    return kept


def test_a_session_keeps_each_step_that_is_cheap() -> None:
    pace = SessionPace(share=0.1, free_seconds=0.001)
    pace.deliver([[0.001, 0.0009], [0.002, 0.0001]])
    assert kept_of_session(pace, 3) == [1, 2, 3]
    pace.deliver([[0.1, 0.009], [0.2, 0.008]])
    assert pace.every == 1


def test_a_session_keeps_what_is_large_at_a_pace() -> None:
    """The slowest rank decides; steps that cannot be kept count too."""
    pace = SessionPace(share=0.1, free_seconds=0.001)
    pace.deliver([[0.02, 0.001], [0.01, 0.005]])
    assert pace.every == 5
    assert kept_of_session(pace, 10) == [5, 10]
    for _ in range(7):
        pace.count_step()
    assert pace.comes_to_keep() and not pace.comes_to_keep()


def test_a_session_agrees_less_and_less_often() -> None:
    pace = SessionPace(share=0.1)
    agreed = []
    for step in range(1, 2000):
        pace.count_step()
        if pace.is_due:
            agreed.append(step)
            pace.took(0.5)
            pace.took(0.25)
            assert pace.collect()[1] == 0.25
    assert agreed == [16, 32, 64, 128, 256, 512, 1024, 1536]
