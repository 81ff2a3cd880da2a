"""How often a step is kept on a GPU."""

from __future__ import annotations

import math

import pytest

from ddp_train.recovery.pace import HOST_SECONDS, SHARE, DevicePace


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
