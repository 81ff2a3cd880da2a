"""Scores of a data set are exact sums on any number of processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddp_train.data.datasets import ArraySource
from ddp_train.distributed.world import World
from ddp_train.engine.loop import evaluate
from ddp_train.errors import TaskError
from ddp_train.tasks.language_model.task import LanguageModel
from ddp_train.tasks.score import Score, Scorer
from ddp_train.tasks.task import BatchScore
from tests.support.jobs import config_of, job_of
from tests.support.ranks import on_ranks
from tests.support.task_samples import CASES, IMAGES, MASKS


def few_batches(world: World) -> Score | None:
    """Two batches on three processes: the last has none, and does not know which metrics there
    are."""
    kind, task, _ = CASES["segmentation"]
    sources = ArraySource(IMAGES, MASKS), ArraySource(IMAGES[:6], MASKS[:6])
    config = config_of(
        world,
        task=task,
        model={"_target_": "tests.support.task_samples.Head", "kind": kind},
        train={"evaluate_batch_size": 4, "global_batch_size": 8},
    )
    return evaluate(job_of(config, world, sources).evaluation)


def test_processes_without_a_batch_have_the_score_of_all() -> None:
    (alone,), many = on_ranks(1, few_batches), on_ranks(3, few_batches)
    assert (
        alone
        and alone.samples == 6
        and set(alone.metrics) == {"loss", "pixel_accuracy", "mean_iou"}
    )
    assert many == [alone] * 3


def other_metrics(world: World) -> list[object]:
    """The score of batches whose metrics come in another order, or are others, on the last rank."""
    is_last = world.rank == world.size - 1
    pairs: dict[str, Any] = {
        "loss": (0.5, 1),
        "right": (torch.tensor([1.0]), 2),
        "of classes": (torch.ones(3), torch.ones(3)),
    }
    if is_last:
        pairs = dict(reversed(pairs.items()))
        pairs["right"] = (1, 2)
    scorer = Scorer(world.size, "cpu")
    scorer.add(world.rank, BatchScore(pairs), 1)
    result = scorer.result()
    unlike = Scorer(world.size, "cpu")
    unlike.add(world.rank, BatchScore({"loss": (1, 1), f"recall_{int(is_last)}": (1, 1)}), 1)
    with pytest.raises(TaskError) as error:
        unlike.result()
    return [result, str(error.value)]


def test_metrics_are_put_together_by_their_names() -> None:
    for score, message in on_ranks(3, other_metrics):
        assert isinstance(score, Score)
        assert score.metrics == {"loss": 0.5, "right": 0.5, "of classes": 1.0}
        assert "ranks 0 and 1: loss, recall_0; rank 2: loss, recall_1" in str(message)


def test_batches_with_other_metrics_are_refused() -> None:
    scorer = Scorer(2, "cpu")
    scorer.add(0, BatchScore({"loss": (1, 2), "right": (1, 2)}), 2)
    with pytest.raises(TaskError, match="loss, right, and for batch 1 loss, right \\[3\\]"):
        scorer.add(1, BatchScore({"loss": (1, 2), "right": (torch.ones(3), torch.ones(3))}), 2)


def test_data_without_a_unit_are_told(caplog: pytest.LogCaptureFixture) -> None:
    scorer = Scorer(1, "cpu", LanguageModel().derive)
    scorer.add(0, BatchScore({"loss": (torch.zeros(()), torch.tensor(0))}), 3)
    scorer.result()
    assert "the perplexity of an evaluation is" in caplog.text
    assert "there is nothing to average, since every target is left out" in caplog.text
