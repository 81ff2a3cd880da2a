"""Metrics that keys name: which there are, and which direction is better.

What a task of your own has is known only once it is loaded, and whether data of your own have a
validation set once they are opened.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_train.options.custom import Code
from ddp_train.options.problem import Problem
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import Config, built_in_directions
from ddp_train.scored_sets import (
    TEST,
    VALIDATION,
    is_set,
    kind_of,
    main_set,
    sets_of,
)
from ddp_train.text import (
    NAME_IS_RESERVED,
    OF_AVERAGE,
    RESERVED,
    did_you_mean,
    shown,
    snake_case,
)

AUTO = "auto"
OBJECTIVE = "objective"
STUDY_METRIC = "study.metric"
AT_THE_END = (OBJECTIVE, STUDY_METRIC)
"""Keys of a metric that is read when a run has ended. Others select while it trains."""
MEASURED = {"samples_per_second": "max", "seconds": "min"}
"""Numbers of summary.json that are not metrics, and the better direction."""
BY_TEST = "selects by the test set, so the test score will be too good; "
LIBRARY = "torchmetrics"
NOT_ARGUMENTS = ("_target_", "name", "better")
"""Keys of an item of `metrics` that its class is not called with."""


@dataclass(frozen=True)
class FurtherMetric:
    """One item of `metrics`: a class of torchmetrics, or what makes an object of one."""

    key: str
    """metrics[0]"""
    given: dict[str, Any]

    @property
    def code(self) -> Code:
        """The class or function that is called, with its arguments."""
        target = str(self.given.get("_target_") or "")
        arguments = {name: value for name, value in self.given.items() if name not in NOT_ARGUMENTS}
        return Code(target, arguments)

    @property
    def name(self) -> str:
        """The name as given, or that of the class in snake case.

        An object that holds several metrics has names of its own.
        """
        class_name = self.code.target.rpartition(".")[2]
        return str(self.given.get("name") or snake_case(class_name))

    @property
    def is_named(self) -> bool:
        """Whether the names of its metrics surely begin with `name`.

        Your own code may make a collection, which has others.
        """
        return bool(self.given.get("name")) or self.code.target.startswith(f"{LIBRARY}.")

    @property
    def better(self) -> str | None:
        """The better direction as given; None: that of the class."""
        return self.given.get("better")

    def may_have(self, name: str) -> bool:
        """Tell whether it may have a metric of that name, as far as is known before it is made."""
        return not self.is_named or f"{name}_".startswith(f"{self.name}_")

    def problems(self) -> Iterator[Problem]:
        """Problems of the keys that are not arguments."""
        name = self.given.get("name")
        better = self.given.get("better")
        is_name = isinstance(name, str) and re.fullmatch(r"[A-Za-z]\w*", name)
        if "name" in self.given and not is_name:
            yield Problem(
                f"{self.key}.name={shown(name)}",
                "must begin with a letter and contain only letters, digits and _",
            )
        elif name in RESERVED:
            yield Problem(
                f"{self.key}.name={name}",
                NAME_IS_RESERVED,
                f"use another name, for example name: my_{name}",
            )
        if "better" in self.given and better not in ("max", "min"):
            yield Problem(f"{self.key}.better={shown(better)}", "must be one of max, min")


def further_metrics(config: Config) -> list[FurtherMetric]:
    """The items of `metrics`."""
    return [FurtherMetric(f"metrics[{place}]", given) for place, given in enumerate(config.metrics)]


@dataclass(frozen=True)
class MetricKey:
    """A key that names a metric, `objective=validation.accuracy`."""

    key: str
    value: str

    @property
    def split(self) -> str:
        return self.value.partition(".")[0]

    @property
    def name(self) -> str:
        """The metric."""
        return self.value.partition(".")[2]

    @property
    def plain_name(self) -> str:
        """The metric without what says that the average of the weights has it."""
        return self.name.removeprefix(OF_AVERAGE)

    def with_name(self, name: str) -> str:
        """The override that names another metric of the same split."""
        return f"{self.key}={self.split}.{name}"


def metric_keys(config: Config) -> Iterator[MetricKey]:
    """The keys that name a metric, without those that are `auto` or name another number."""
    values = {
        OBJECTIVE: config.objective,
        "checkpoint.best_metric": config.checkpoint.best_metric,
        "train.early_stopping.metric": config.train.early_stopping.metric,
        "schedule.metric": config.schedule.metric,
    }
    for key, value in values.items():
        is_measured = key == OBJECTIVE and value in MEASURED
        if value != AUTO and not is_measured:
            yield MetricKey(key, value)


def problems(config: Config) -> Iterator[Problem]:
    """Problems of metrics that can be known before anything is loaded."""
    yield from further_problems(config)
    yield from named_problems(config, config.data.has_validation(), config.data.sets())


def further_problems(config: Config) -> Iterator[Problem]:
    """Problems of the items of `metrics`, beside the code that they name."""
    of_task = metrics_of(config)
    names = set(of_task)
    for item in further_metrics(config):
        yield from item.problems()
        if not item.is_named or item.given.get("name") in RESERVED:
            continue
        if item.name in names:
            whose = "another item has"
            if item.name in of_task:
                whose = f"task={config.task.name} has"
            yield Problem(
                item.key,
                f"{whose} a metric named {item.name} too",
                f"give this item another name, for example name: my_{item.name}",
            )
        names.add(item.name)


def named_problems(
    config: Config, has_validation: bool | None, sets: Collection[str] | None = None
) -> Iterator[Problem]:
    """Problems of the metrics that keys name.

    has_validation: whether there is a validation set; None: unknown.
    sets: the names of all that are scored; None: unknown.
    """
    for key in metric_keys(config):
        found = [*_form_problems(config, key), *_unknown(config, key, has_validation, sets)]
        yield from found[:1]


def study_problems(config: Config, metric: str) -> Iterator[Problem]:
    """The first problem of the metric by which a study compares such runs, if it is one of a set;
    what code logs is known only when it has run."""
    key = MetricKey(STUDY_METRIC, metric)
    if not is_set(key.split):
        return
    yield from [*_unknown(config, key, config.data.has_validation(), config.data.sets())][:1]


def _unknown(
    config: Config, key: MetricKey, has_validation: bool | None, sets: Collection[str] | None
) -> Iterator[Problem]:
    yield from _name_problems(config, key)
    yield from _split_problems(config, key, has_validation, sets)


def _form_problems(config: Config, key: MetricKey) -> Iterator[Problem]:
    if is_set(key.split) and key.name:
        return
    found = f"{key.key}={key.value}"
    allowed = ["test.NAME", "validation.NAME", "validation/SET.NAME"]
    if key.key == OBJECTIVE:
        allowed = [*MEASURED, *allowed]
    known = _known_metrics(config)
    metrics = [f"test.{name}" for name in known] + [f"validation.{name}" for name in known]
    guess = did_you_mean(key.value, metrics)
    yield Problem(found, f"must be one of {AUTO}, {', '.join(allowed)}{guess}")


def _name_problems(config: Config, key: MetricKey) -> Iterator[Problem]:
    """The problem of a name that no metric has; none if only the task knows."""
    known = _known_metrics(config)
    items = further_metrics(config)
    possible = {key.name}
    if _may_average(config):
        possible.add(key.plain_name)
    if not known or key.name in known or _may_be_further(items, possible):
        return
    found = f"{key.key}={key.value}"
    is_of_average = key.name != key.plain_name
    is_plain_known = key.plain_name in known or _may_be_further(items, {key.plain_name})
    if config.data.is_regression and key.name == "accuracy":
        rule = f"data={config.data.name} has no classes"
        yield Problem(found, rule, f"use {key.key}={key.split}.loss")
    elif is_of_average and is_plain_known:
        yield Problem(found, "there is no average of the weights", "add train.ema_decay=0.999")
    else:
        listed = f"{', '.join(known)}{did_you_mean(key.name, list(known))}"
        rule = f"task={config.task.name} has no metric {key.name}"
        yield Problem(found, rule, f"it has {listed}")


def _may_be_further(items: Sequence[FurtherMetric], names: set[str]) -> bool:
    return any(item.may_have(name) for item in items for name in names)


def _split_problems(
    config: Config,
    key: MetricKey,
    has_validation: bool | None,
    sets: Collection[str] | None,
) -> Iterator[Problem]:
    found = f"{key.key}={key.value}"
    kind = kind_of(key.split)
    if kind == VALIDATION and has_validation is False:
        remedy = "add data.validation=0.1"
        if config.data.task == "language_model":  # of its windows none can be held out
            remedy = f"use data.validation_sets.other=FILE {key.key}={VALIDATION}/other.{key.name}"
        yield Problem(
            found, "there is no validation set", f"{remedy}, or use {key.key}=test.{key.name}"
        )
    elif kind == TEST and has_validation and key.key not in AT_THE_END:
        validation = main_set(sets or [VALIDATION])
        yield Problem(
            found,
            "with a validation set the test set is scored at the end only",
            f"use {key.key}={validation}.{key.name}",
        )
    elif sets is not None and key.split not in sets:
        known = ", ".join(sets)
        guess = did_you_mean(key.split, list(sets))
        yield Problem(found, f"there is no set {key.split}", f"there are {known}{guess}")


def unusable_metrics(
    config: Config, names: list[str], better: Mapping[str, str | None]
) -> Iterator[Problem]:
    """Problems of the metrics that keys name, once all metrics are known.

    names: those of an average too.
    better: their directions, where the task says so; None: torchmetrics does not.
    """
    for key in metric_keys(config):
        found = f"{key.key}={key.value}"
        name = key.name
        plain_name = key.plain_name
        if name not in names and plain_name in names:
            rule = "there is no average of the weights"
            if config.mode == "evaluate":
                rule = "the checkpoint has no average of the weights"
            yield Problem(found, rule, f"use {key.with_name(plain_name)}")
        elif name not in names:
            listed = f"{', '.join(names)}{did_you_mean(name, names)}"
            yield Problem(found, f"the task has no metric {name}", f"it has {listed}")
        elif name not in better:
            yield Problem(
                found,
                f"the task does not say whether a high or a low {plain_name} is better",
                f'add the entry "{plain_name}": "max", or "min", to the dict `better` of its class',
            )
        elif better[name] is None:
            yield Problem(
                found,
                f"{LIBRARY} does not say whether a high or a low {name} is better",
                "add better: max, or better: min, next to the _target_ of its item in `metrics`",
            )


def metrics_of(config: Config) -> dict[str, str]:
    """The metrics of the task, and the better direction of each; {} if the task is not known yet.

    An average of the weights has them too. Whether a checkpoint has one, an evaluation sees only
    when it loads it.
    """
    return _with_average(config, _of_task(config))


def _of_task(config: Config) -> dict[str, str]:
    if config.task.name != AUTO:
        return config.task.metrics
    of_classification = OPTIONS["task"]["classification"].metrics
    of_regression = OPTIONS["task"]["regression"].metrics
    match config.data.is_regression:
        case True:
            return of_regression
        case False:
            return of_classification
        case None:
            return of_classification | of_regression


def _known_metrics(config: Config) -> dict[str, Any]:
    """The metrics of the task and of `metrics`, by name; {} if the task is not known yet."""
    of_task = metrics_of(config)
    if not of_task:
        return {}
    return of_task | _with_average(
        config, {item.name: item.better for item in further_metrics(config)}
    )


def _with_average(config: Config, better: dict[str, Any]) -> dict[str, Any]:
    if not _may_average(config):
        return better
    return better | {OF_AVERAGE + name: direction for name, direction in better.items()}


def _may_average(config: Config) -> bool:
    return config.train.ema_decay is not None or config.uses_trained


def by_test(config: Config) -> str:
    """The warning for a user who selects by the test set."""
    # Windows of a text cannot be held out: see `DataConfig.problems`.
    if config.data.task == "language_model":
        return BY_TEST + "add data.validation_sets.NAME=PATH with another text"
    return BY_TEST + "add data.validation=0.1"


def objective_name(objective: str, sets: Collection[str]) -> str:
    """The objective that `auto` stands for.

    sets: the names of those that are scored.
    """
    if objective != AUTO:
        return objective
    return f"{main_set(sets)}.loss"


def direction_of(objective: str, config: Config) -> str | None:
    """The better direction, max or min; None if only the task knows."""
    name = objective.partition(".")[2]
    if objective in MEASURED:
        return MEASURED[objective]
    if objective == AUTO or name == "loss":
        return "min"
    stated = {item.name: item.better for item in further_metrics(config) if item.better}
    return (metrics_of(config) | _with_average(config, stated)).get(name)


def read_objective(objective: str, summary: dict[str, Any]) -> tuple[str, float | None, str]:
    """The name of an objective, its value in a summary.json, and the better direction, max or min.

    The value is None where there is no number: nothing was measured, or it is not finite. Raises
    KeyError if the summary has no such metric.
    """
    name = objective_name(objective, sets_of(summary))
    if name in MEASURED:
        value = summary.get(name)
        better = MEASURED[name]
    else:
        split, _, metric = name.partition(".")
        value = (summary.get(split) or {})[metric]
        better = summary.get("better", built_in_directions()).get(metric) or "min"
    if not isinstance(value, int | float) or not math.isfinite(value):
        value = None
    return name, value, better
