"""A score as text: all of it, or the metric of most interest. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ddp_train.text import OF_AVERAGE

NOT_METRICS = ("correct", "samples")
PERCENT = ("accuracy", "top5", "f1_macro", "exact_match", "pixel_accuracy", "mean_iou")
"""Metrics from 0 to 1 that are read as percentages, the one of most interest first."""
OTHER_BUILT_IN = ("loss", "perplexity", "bits_per_byte", "rmse", "mae", "mse")
HEADLINES = (*PERCENT, "perplexity", "rmse")
"""Metrics of an epoch's line, the first that is there."""
BUILT_IN = (*PERCENT, *OTHER_BUILT_IN, *NOT_METRICS)
USER_METRICS = 3
"""Most metrics of the user in an epoch's line."""
MOST_METRICS = 20
"""Most metrics at the end of a run: there may be one for each of a thousand classes."""


def headline(score: Mapping[str, Any]) -> str:
    """The score in an epoch's line.

    That is the built-in metric of most interest (`97.50%`, `mean_iou 81.20%`, `perplexity 12.3` or
    `loss 0.1234`), the same of the averaged weights (`97.50% (ema 97.80%)`), and the last three
    metrics of the user: a derived metric comes after those that it is derived from.
    """
    name = next((name for name in HEADLINES if name in score), "loss")
    text = shown_metric(name, score[name])
    if name != "accuracy":
        text = f"{name} {text}"
    of_average = score.get(OF_AVERAGE + name)
    if of_average is not None:
        text += f" (ema {shown_metric(name, of_average)})"
    users = [f"{name} {shown_metric(name, score[name])}" for name in users_metrics(score)]
    return "  ".join([text, *users[-USER_METRICS:]])


def users_metrics(names: Iterable[str]) -> list[str]:
    """The user's own among some metrics, without those of the averaged weights."""
    return [name for name in names if name not in BUILT_IN and not name.startswith(OF_AVERAGE)]


def score_line(score: Mapping[str, Any]) -> str:
    """All metrics, the loss last: `accuracy 97.50% (351/360), loss 0.1234`."""
    texts = []
    for name, value in score.items():
        if name == "loss" or name in NOT_METRICS:
            continue
        text = f"{name} {shown_metric(name, value)}"
        if name == "accuracy" and "correct" in score:
            text += f" ({score['correct']}/{score['samples']})"
        texts.append(text)
    loss = f"loss {shown_metric('loss', score['loss'])}"
    if not texts:
        return f"{loss} over {score['samples']} samples"
    if len(texts) > MOST_METRICS:
        texts[MOST_METRICS:] = [f"{len(texts) - MOST_METRICS} more in summary.json"]
    return ", ".join([*texts, loss])


def shown_metric(name: str, value: float) -> str:
    """`97.50%`, `0.1234` or `1,234.5`."""
    if name.removeprefix(OF_AVERAGE) in PERCENT:
        return f"{value:.2%}"
    if abs(value) >= 1_000:
        return f"{value:,.1f}"
    return f"{value:.4f}"


def built_in_direction(name: str) -> str | None:
    """The better direction, max or min, of a metric of a built-in task; None for another one."""
    if name in PERCENT:
        return "max"
    return "min" if name in OTHER_BUILT_IN else None


def is_percent(name: str) -> bool:
    """Tell whether a metric, or an objective such as `test.accuracy`, is read as a percentage."""
    return name.rpartition(".")[2] in PERCENT


def column_of(name: str) -> str:
    """The name of a metric's column: `accuracy %`, `test.loss`."""
    if is_percent(name):
        return f"{name} %"
    return name


def in_column(name: str, value: Any) -> Any:
    """The value of a metric in its column; None stays None."""
    if value is not None and is_percent(name):
        return 100 * value
    return value
