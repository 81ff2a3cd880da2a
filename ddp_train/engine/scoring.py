"""Scores of a data set, with those of the averaged weights beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ddp_train.engine.loop import Evaluation, evaluate
from ddp_train.errors import ConfigError
from ddp_train.optim.ema import WeightAverage
from ddp_train.tasks.score import Score
from ddp_train.text import OF_AVERAGE


def score_with_average(evaluation: Evaluation, average: WeightAverage | None) -> Score | None:
    """Score a data set; with an average of the weights ema_loss, ema_accuracy ... are in it too.

    Returns None if a stop request ended an evaluation.
    """
    score = evaluate(evaluation)
    if score is None or average is None:
        return score
    with average.in_model():
        score_of_average = evaluate(evaluation)
    if score_of_average is None:
        return None
    return join_scores(score, score_of_average)


def score_sets(
    evaluations: Mapping[str, Evaluation], average: WeightAverage | None
) -> dict[str, Score] | None:
    """Score several sets, by their names, see `score_with_average`.

    Returns None if a stop request ended an evaluation.
    """
    scores = {}
    for name, evaluation in evaluations.items():
        score = score_with_average(evaluation, average)
        if score is None:
            return None
        scores[name] = score
    return scores


def join_scores(score: Score, score_of_average: Score) -> Score:
    """One score with the metrics of both."""
    names_with_average(list(score.metrics))
    prefixed = {OF_AVERAGE + name: value for name, value in score_of_average.metrics.items()}
    return dataclasses.replace(score, metrics={**score.metrics, **prefixed})


def names_with_average(names: Sequence[str]) -> list[str]:
    """The names of metrics, followed by those of the averaged weights.

    Raises ConfigError if a metric has the name of an averaged one.
    """
    prefixed = [OF_AVERAGE + name for name in names]
    taken = set(names) & set(prefixed)
    if taken:
        raise ConfigError(
            [
                f"train.ema_decay: a metric of yours is named {min(taken)}, which is a name for"
                " the averaged weights; give your metric another name"
            ]
        )
    return [*names, *prefixed]
