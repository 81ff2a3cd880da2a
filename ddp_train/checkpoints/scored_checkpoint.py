"""The score of a checkpoint that is loaded for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from ddp_train.checkpoints import reader
from ddp_train.engine.loop import Evaluation
from ddp_train.engine.scoring import join_scores, score_sets
from ddp_train.tasks.score import Score


def score_checkpoint(
    path: Path, model: nn.Module, evaluations: Mapping[str, Evaluation]
) -> dict[str, Score] | None:
    """Load a checkpoint and score it on each set, and its average of the weights if it has one.

    model: that of the evaluations.

    Returns None if a stop request ended an evaluation.
    """
    reader.load_model(path, model)
    scores = score_sets(evaluations, None)
    if scores is None or not reader.has_average(path):
        return scores
    reader.load_model(path, model, reader.AVERAGE)
    of_average = score_sets(evaluations, None)
    if of_average is None:
        return None
    return {name: join_scores(score, of_average[name]) for name, score in scores.items()}
