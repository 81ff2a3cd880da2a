"""Scores of a data set are exact sums on any number of processes."""

from __future__ import annotations

import pytest
import torch

from ddp_train.data.datasets import ArraySource
from ddp_train.distributed.world import World
from ddp_train.engine.loop import evaluate
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


def test_data_without_a_unit_are_told(caplog: pytest.LogCaptureFixture) -> None:
    scorer = Scorer(1, "cpu", LanguageModel().derive)
    scorer.add(0, BatchScore({"loss": (torch.zeros(()), torch.tensor(0))}), 3)
    scorer.result()
    assert "the perplexity of an evaluation is" in caplog.text
    assert "there is no unit in all of the data: each target is left out" in caplog.text
