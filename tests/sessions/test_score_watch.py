"""Sums over batches that every process had, of which a session warns."""

from __future__ import annotations

import pytest

from ddp_train.sessions.score_watch import ScoreWatch


def test_sum_over_batches_of_a_test_loader_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    watch = ScoreWatch()
    with watch.scoring():
        watch.see_score()
    watch.see_sum(processes=2)
    assert not caplog.records


def test_sum_over_other_batches_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = ScoreWatch()
    for _ in range(2):
        watch.see_score()
        watch.see_sum(processes=2)
    assert caplog.text.count("the sum counts them 2 times") == 1


def test_one_process_may_sum_what_it_likes(caplog: pytest.LogCaptureFixture) -> None:
    watch = ScoreWatch()
    watch.see_score()
    watch.see_sum(processes=1)
    assert not caplog.records
