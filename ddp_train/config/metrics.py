"""Metrics that keys name: which there are, and which direction is better. What a task of your own
has is known only once it is loaded, and whether data of your own have a validation set once they
are opened."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddp_train.options.custom import Code
from ddp_train.options.problem import Problem
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import Config, built_in_directions
from ddp_train.text import OF_AVERAGE, RESERVED, did_you_mean, shown, snake_case

AUTO = "auto"
SPLITS = ("validation", "test")
MEASURED = {"samples_per_second": "max", "seconds": "min"}
"""Numbers of summary.json that are no metrics, and the better direction."""
BY_TEST = "selects by the test set, whose score then flatters what was selected; "
LIBRARY = "torchmetrics"


@dataclass(frozen=True)
class FurtherMetric:
    """One item of `metrics`: a class of torchmetrics, or what makes an object of one."""

    key: str
    """metrics[0]"""
    given: dict[str, Any]

    @property
    def code(self) -> Code:
        """What is called, and with what."""
        own = ("_target_", "name", "better")
        arguments = {name: value for name, value in self.given.items() if name not in own}
        return Code(str(self.given.get("_target_") or ""), arguments)

    @property
    def name(self) -> str:
        """As given, or that of the class in snake case. An object that holds several metrics has
        names of its own."""
        return str(self.given.get("name") or snake_case(self.code.target.rpartition(".")[2]))

    @property
    def is_named(self) -> bool:
        """Whether its metrics surely have `name`, or begin with it: code of one's own may make a
        collection."""
        return bool(self.given.get("name")) or self.code.target.startswith(f"{LIBRARY}.")

    @property
    def better(self) -> str | None:
        """As given; None: what the class says."""
        return self.given.get("better")

    def may_have(self, name: str) -> bool:
        """Whether a metric of that name can come of it, as far as one can tell before it is
        loaded."""
        return not self.is_named or f"{name}_".startswith(f"{self.name}_")

    def problems(self) -> list[str]:
        """What is wrong with the keys that are not arguments."""
        name = self.given.get("name")
        better = self.given.get("better")
        found = []
        if "name" in self.given and not (
            isinstance(name, str) and re.fullmatch(r"[A-Za-z]\w*", name)
        ):
            found.append(f"{self.key}.name={shown(name)}: must be a name of letters, digits and _")
        elif name in RESERVED:
            found.append(
                f"{self.key}.name={name}: no metric may have the name {name}; give it another,"
                " name: NAME"
            )
        if "better" in self.given and better not in ("max", "min"):
            found.append(f"{self.key}.better={shown(better)}: must be one of max, min")
        return found


def further(config: Config) -> list[FurtherMetric]:
    """The items of `metrics`."""
    return [FurtherMetric(f"metrics[{place}]", given) for place, given in enumerate(config.metrics)]


def further_problems(config: Config) -> list[str]:
    """What is wrong with the items of `metrics`, beside the code that they name."""
    taken = list(metrics_of(config))
    problems = []
    for one in further(config):
        problems += one.problems()
        if not one.is_named or one.given.get("name") in RESERVED:
            continue
        if one.name in taken:
            if one.name in metrics_of(config):
                whose = f"task={config.task.name} has"
            else:
                whose = "another item has"
            problems.append(
                f"{one.key}: {whose} a metric {one.name} too; give this one another, name: NAME"
            )
        taken.append(one.name)
    return problems


def metrics_of(config: Config) -> dict[str, str]:
    """The metrics of the task, and the better direction of each; {} if the task is not known yet.
    An average of the weights has them too; whether a checkpoint has one, an evaluation sees only
    when it loads it."""
    return _with_average(config, _of_task(config))


def _with_average(config: Config, better: dict[str, Any]) -> dict[str, Any]:
    if _may_average(config):
        averaged = {OF_AVERAGE + name: way for name, way in better.items()}
    else:
        averaged = {}
    return {**better, **averaged}


def _may_average(config: Config) -> bool:
    return config.train.ema_decay is not None or config.uses_trained


def _of_task(config: Config) -> dict[str, str]:
    if config.task.name != AUTO:
        return config.task.metrics
    chosen = {
        True: ("regression",),
        False: ("classification",),
        None: ("classification", "regression"),
    }
    return {
        name: better
        for task in chosen[config.data.is_regression]
        for name, better in OPTIONS["task"][task].metrics.items()
    }


def unusable(config: Config, names: list[str], better: Mapping[str, str | None]) -> list[str]:
    """What is wrong with the metrics that keys name, once all metrics are known, those of an
    average too. better: their directions, where the task says so; None: torchmetrics does not."""
    problems = []
    for key, value in named(config):
        name = value.partition(".")[2]
        if name not in names and name.removeprefix(OF_AVERAGE) in names:
            whose = "the checkpoint has" if config.mode == "evaluate" else "there is"
            plain = f"{value.partition('.')[0]}.{name.removeprefix(OF_AVERAGE)}"
            problems.append(f"{key}={value}: {whose} no average of the weights; use {key}={plain}")
        elif name not in names:
            close = did_you_mean(name, names)
            problems.append(
                f"{key}={value}: the task has no metric {name}; it has {', '.join(names)}{close}"
            )
        elif name not in better:
            plain = name.removeprefix(OF_AVERAGE)
            ways = f'better = {{"{plain}": "max"}}, or "min", to its class'
            problems.append(
                f"{key}={value}: the task does not say which direction of {plain} is better; add"
                f" {ways}"
            )
        elif better[name] is None:
            problems.append(
                f"{key}={value}: {LIBRARY} does not say which direction of {name} is better; add"
                " better: max, or better: min, to its item of metrics"
            )
    return problems


def by_test(config: Config) -> str:
    """What a user must know who selects by the test set. Windows of a text cannot be held out: see
    `conflicts`."""
    windows = config.data.task == "language_model"
    return BY_TEST + (
        "keep another text for the final score" if windows else "add data.validation=0.1"
    )


def has_validation(config: Config) -> bool | None:
    """Whether there will be a validation set; None if only the data know."""
    return config.data.has_validation()


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


def all_problems(config: Config) -> Iterator[Problem]:
    """What can be known to be wrong with metrics before anything is loaded."""
    messages = further_problems(config) + problems(config, has_validation(config))
    for message in messages:
        found, _, rest = message.partition(": ")
        rule, _, remedy = rest.partition("; ")
        yield Problem(found, rule, remedy)


def problems(config: Config, validation: bool | None) -> list[str]:
    """What is wrong with the metrics that keys name. validation: whether there is a validation set;
    None: unknown."""
    return [
        problem
        for key, value in named(config)
        if (problem := _problem(config, key, value, validation))
    ]


def _problem(config: Config, key: str, value: str, validation: bool | None) -> str:
    split, _, name = value.partition(".")
    known = metrics_of(config)
    added = further(config)
    if known:
        known |= _with_average(config, {one.name: one.better for one in added})
    plain = name.removeprefix(OF_AVERAGE)
    possible = {name, plain} if _may_average(config) else {name}
    if split not in SPLITS or not name:
        words = [AUTO, *(MEASURED if key == "objective" else ()), "test.NAME", "validation.NAME"]
        close = did_you_mean(
            value, [f"{one}.{metric}" for one in ("test", "validation") for metric in known]
        )
        return f"{key}={value}: must be one of {', '.join(words)}{close}"
    if (
        known
        and name not in known
        and not any(one.may_have(maybe) for one in added for maybe in possible)
    ):
        if config.data.is_regression and name == "accuracy":
            return f"{key}={value}: data={config.data.name} has no classes; use {key}={split}.loss"
        if name != plain and (plain in known or any(one.may_have(plain) for one in added)):
            return f"{key}={value}: there is no average of the weights; add train.ema_decay=0.999"
        close = did_you_mean(name, list(known))
        return (
            f"{key}={value}: task={config.task.name} has no metric {name}; it has"
            f" {', '.join(known)}{close}"
        )
    if split == "validation" and validation is False:
        return (
            f"{key}={value}: there is no validation set; add data.validation=0.1, or use"
            f" {key}=test.{name}"
        )
    if split == "test" and validation and key != "objective":
        return (
            f"{key}={value}: with a validation set the test set is scored at the end only; use"
            f" {key}=validation.{name}"
        )
    return ""


def objective_name(objective: str, validation: bool | None) -> str:
    """The objective that `auto` stands for."""
    if objective != AUTO:
        return objective
    return "validation.loss" if validation else "test.loss"


def direction_of(objective: str, config: Config) -> str | None:
    """max or min; None if only the task knows."""
    if objective in MEASURED:
        return MEASURED[objective]
    name = objective.partition(".")[2]
    stated = _with_average(config, {one.name: one.better for one in further(config) if one.better})
    if objective == AUTO or name == "loss":
        return "min"
    return {**metrics_of(config), **stated}.get(name)


def read_objective(objective: str, summary: dict[str, Any]) -> tuple[str, float | None, str]:
    """Its name, its value in a summary.json, and the better direction, max or min.

    The value is None where there is no number: nothing was measured, or it is not finite. Raises
    KeyError if the summary has no such metric.
    """
    name = objective_name(objective, bool(summary.get("validation")))
    split, _, metric = name.partition(".")
    value = summary.get(name) if name in MEASURED else (summary.get(split) or {})[metric]
    better = MEASURED.get(name) or summary.get("better", built_in_directions()).get(metric) or "min"
    return name, value if isinstance(value, int | float) and math.isfinite(value) else None, better
