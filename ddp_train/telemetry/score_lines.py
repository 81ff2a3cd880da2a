"""A score in words: all of it, or the one number that is of most interest."""

from __future__ import annotations

from typing import Any

from ddp_train.text import OF_AVERAGE

NOT_METRICS = ("correct", "samples")
PERCENT = ("accuracy", "top5", "f1_macro", "exact_match", "pixel_accuracy", "mean_iou")
"""Metrics from 0 to 1 that are read as percentages, the one of most interest first."""
OTHERS_BUILT_IN = ("loss", "perplexity", "bits_per_byte", "rmse", "mae", "mse")
MOST_OWN = 3
MOST = 20
"""The most metrics of one's own in an epoch's line, and of all metrics at the end: one may have a
number for each of a thousand classes."""


def headline(score: dict[str, Any]) -> str:
    """What an epoch's line says: the one built-in metric of most interest, `97.50%`, `mean_iou
    81.20%`, `perplexity 12.3` or `loss 0.1234`, and metrics of one's own; with an average of the
    weights the first one's too: `97.50% (ema 97.80%)`. Of more than three of one's own the last:
    what is derived stands behind what it is of."""
    name = next((name for name in (*PERCENT, "perplexity", "rmse") if name in score), "loss")
    if name == "accuracy":
        text = shown_metric(name, score[name])
    else:
        text = f"{name} {shown_metric(name, score[name])}"
    if (of_average := score.get(OF_AVERAGE + name)) is not None:
        text += f" (ema {shown_metric(name, of_average)})"
    built_in = (*PERCENT, *OTHERS_BUILT_IN, *NOT_METRICS)
    own = [name for name in score if name not in built_in and not name.startswith(OF_AVERAGE)]
    return "  ".join(
        [text, *(f"{name} {shown_metric(name, score[name])}" for name in own[-MOST_OWN:])]
    )


def score_line(score: dict[str, Any]) -> str:
    """All metrics, the loss last: `accuracy 97.50% (351/360), loss 0.1234`."""
    names = [name for name in score if name not in ("loss", *NOT_METRICS)]
    texts = [f"{name} {shown_metric(name, score[name])}" for name in names]
    if "correct" in score:
        place = names.index("accuracy")
        texts[place] += f" ({score['correct']}/{score['samples']})"
    if len(texts) > MOST:
        texts[MOST:] = [f"{len(texts) - MOST} more in summary.json"]
    over = "" if texts else f" over {score['samples']} samples"
    return ", ".join([*texts, f"loss {shown_metric('loss', score['loss'])}{over}"])


def shown_metric(name: str, value: float) -> str:
    if name.removeprefix(OF_AVERAGE) in PERCENT:
        return f"{value:.2%}"
    return f"{value:,.1f}" if abs(value) >= 1_000 else f"{value:.4f}"
