"""The score of a checkpoint that is loaded for it."""

from __future__ import annotations

from pathlib import Path

from ddp_train.checkpoints import reader
from ddp_train.engine.loop import Evaluation, evaluate
from ddp_train.engine.scoring import join_scores
from ddp_train.tasks.score import Score


def score_checkpoint(path: Path, evaluation: Evaluation) -> Score | None:
    """Load a checkpoint and score it, and its average of the weights if it has one.

    Returns None if a stop request ended an evaluation.
    """
    model = evaluation.module.model
    reader.load_model(path, model)
    score = evaluate(evaluation)
    if score is None or not reader.has_average(path):
        return score
    reader.load_model(path, model, reader.AVERAGE)
    return join_scores(score, evaluate(evaluation))
