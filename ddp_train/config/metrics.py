"""Metrics that keys name: which there are, and which direction is better. What a task of your own has is known only
once it is loaded, and whether data of your own have a validation set once they are opened."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ddp_train.config.schema import DIRECTIONS, OPTIONS, Config
from ddp_train.text import OF_AVERAGE, did_you_mean

AUTO = "auto"
SPLITS = ("validation", "test")
MEASURED = {"samples_per_second": "max", "seconds": "min"}
"""Numbers of summary.json that are no metrics, and the better direction."""
BY_TEST = "selects by the test set, whose score then flatters what was selected; add data.validation=0.1"


def metrics_of(config: Config) -> dict[str, str]:
    """The metrics of the task, and the better direction of each; {} if the task is not known yet. An average of the
    weights has them too; whether a checkpoint has one, an evaluation sees only when it loads it."""
    found = _of_task(config)
    averaged = config.train.ema_decay is not None or config.mode == "evaluate"
    return {**found, **{OF_AVERAGE + name: better for name, better in found.items() if averaged}}


def _of_task(config: Config) -> dict[str, str]:
    if config.task.name != AUTO:
        return config.task.metrics
    chosen = {True: ("regression",), False: ("classification",), None: ("classification", "regression")}
    return {
        name: better
        for task in chosen[config.data.is_regression]
        for name, better in OPTIONS["task"][task].metrics.items()
    }


def has_validation(config: Config) -> bool | None:
    """Whether there will be a validation set; None if only the data know."""
    if config.data.validation is None:
        return None if config.data.name == "custom" else False
    return config.data.validation > 0


def named(config: Config) -> Iterator[tuple[str, str]]:
    """The keys that name a metric, and their values; `auto` and what is no metric are left out."""
    values = {
        "objective": config.objective,
        "checkpoint.best_metric": config.checkpoint.best_metric,
        "train.early_stopping.metric": config.train.early_stopping.metric,
    }
    for key, value in values.items():
        if value != AUTO and not (key == "objective" and value in MEASURED):
            yield key, value


def problems(config: Config, validation: bool | None) -> list[str]:
    """What is wrong with the metrics that keys name. validation: whether there is a validation set; None: unknown."""
    return [problem for key, value in named(config) if (problem := _problem(config, key, value, validation))]


def _problem(config: Config, key: str, value: str, validation: bool | None) -> str:
    split, _, name = value.partition(".")
    known = metrics_of(config)
    if split not in SPLITS or not name:
        words = [AUTO, *(MEASURED if key == "objective" else ()), "test.NAME", "validation.NAME"]
        close = did_you_mean(value, [f"{one}.{metric}" for one in ("test", "validation") for metric in known])
        return f"{key}={value}: must be one of {', '.join(words)}{close}"
    if known and name not in known:
        if config.data.is_regression and name == "accuracy":
            return f"{key}={value}: data={config.data.name} has no classes; use {key}={split}.loss"
        if name.removeprefix(OF_AVERAGE) in known:
            return f"{key}={value}: there is no average of the weights; add train.ema_decay=0.999"
        close = did_you_mean(name, list(known))
        return f"{key}={value}: task={config.task.name} has no metric {name}; it has {', '.join(known)}{close}"
    if split == "validation" and validation is False:
        return f"{key}={value}: there is no validation set; add data.validation=0.1, or use {key}=test.{name}"
    if split == "test" and validation and key != "objective":
        return (
            f"{key}={value}: with a validation set the test set is scored at the end only; use {key}=validation.{name}"
        )
    return ""


def objective_name(objective: str, validation: bool | None) -> str:
    """The objective that `auto` stands for."""
    return objective if objective != AUTO else "validation.loss" if validation else "test.loss"


def direction_of(objective: str, config: Config) -> str | None:
    """max or min; None if only the task knows."""
    if objective in MEASURED:
        return MEASURED[objective]
    name = objective.partition(".")[2]
    return "min" if objective == AUTO or name == "loss" else metrics_of(config).get(name)


def read_objective(objective: str, summary: dict[str, Any]) -> tuple[str, float | None, str]:
    """Its name, its value in a summary.json, and the better direction, max or min.

    The value is None where there is no number: nothing was measured, or it is not finite. Raises KeyError if the
    summary has no such metric.
    """
    name = objective_name(objective, bool(summary.get("validation")))
    split, _, metric = name.partition(".")
    value = summary.get(name) if name in MEASURED else (summary.get(split) or {})[metric]
    better = MEASURED.get(name) or summary.get("better", DIRECTIONS).get(metric, "min")
    return name, value if isinstance(value, int | float) and math.isfinite(value) else None, better
