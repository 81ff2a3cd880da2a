"""What is current while batches are scored, in one loader or in the two of a zip."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp_train.distributed.training_step import CURRENT, TrainingStep, scored


def batches(*shares: Any) -> Iterator[Any]:
    for share in shares:
        with scored(share):
            yield share


def test_nothing_is_current_behind_a_zip_of_loaders() -> None:
    for first, second in ((["a", "b"], ["c", "d"]), (["a", "b"], ["c"]), (["a"], ["c", "d"])):
        pairs = zip(batches(*first), batches(*second), strict=False)
        assert [CURRENT.share for _ in pairs] == second[: len(first)]
        del pairs
        assert CURRENT.share is None and not CURRENT.scored


def test_a_step_is_current_again_behind_a_zip_of_loaders() -> None:
    share: Any = "step"
    step = TrainingStep(share=share)
    with step:
        for _ in zip(batches("a", "b"), batches("c", "d"), strict=True):
            pass
        assert CURRENT.share == "step"
    assert CURRENT.share is None


def test_an_iterator_that_was_kept_leaves_a_later_step_alone() -> None:
    kept = batches("a", "b")
    next(kept)
    share: Any = "step"
    with TrainingStep(share=share):
        kept.close()
        assert CURRENT.share == "step"
    assert CURRENT.share is None
