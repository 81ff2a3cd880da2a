"""The metrics of a run: those of torchmetrics are made, all are tried before the first step, and
some select."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch

from ddp_train.assembly.batches import scored_batches
from ddp_train.config import metrics
from ddp_train.config.metrics import FurtherMetric
from ddp_train.config.user_code import instantiate
from ddp_train.data.batch import Batch
from ddp_train.data.splits import Splits
from ddp_train.distributed.training_step import scored
from ddp_train.engine.metrics_hook import MetricsHook
from ddp_train.engine.scoring import names_with_average
from ddp_train.engine.selection import AUTO, Best, Selection
from ddp_train.engine.selection_hook import EarlyStopping, SelectionHook, TimeLimit
from ddp_train.errors import ConfigError
from ddp_train.options.custom import CustomOption
from ddp_train.options.schema import Config, built_in_directions
from ddp_train.tasks.further_metrics import FurtherMetrics, NamedMetric
from ddp_train.tasks.task import ModelWithTask, ScoreSums, Task, can_predict
from ddp_train.tasks.trial import undisturbed
from ddp_train.telemetry.own_numbers import OF_THE_LINE
from ddp_train.text import OF_AVERAGE, did_you_mean, first_line

DEPENDS = (
    "scoring a batch {}: metrics and predictions depend on the number of processes and on"
    " train.evaluate_batch_size; in eval mode the model must not draw random numbers, change"
    " buffers or switch to train mode"
)
SAMPLES = "samples"
"""The number of samples of an evaluation, in its line."""
log = logging.getLogger(__name__)


def build_further(items: Sequence[FurtherMetric], task: Task, device: str) -> FurtherMetrics | None:
    """The metrics of torchmetrics that the config names; None if it names none.

    Raises ConfigError if one cannot be made, or if the task cannot predict.
    """
    if not items:
        return None
    if not can_predict(task):
        raise ConfigError(
            [
                "metrics=[...]: the task has no method predict(model, batch), which returns"
                " (outputs, targets); add one, or use 'metrics=[]'"
            ]
        )
    return FurtherMetrics([_named_metric(item) for item in items], device)


def _named_metric(item: FurtherMetric) -> NamedMetric:
    key = f"{item.key}._target_={item.code.target}"
    try:
        metric = instantiate(item.key, item.code)
    # torchmetrics checks its arguments, and names packages.
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError([f"{key}: {type(error).__name__}: {first_line(error)}"]) from error
    name = item.given.get("name")
    if not name and type(metric).__name__ != "MetricCollection":
        name = item.name
    return NamedMetric(key, name or "", item.better, metric)


@torch.no_grad()
def metric_names(module: ModelWithTask, batches: Iterable[Batch]) -> list[str]:
    """The names of all metrics, found by scoring a batch: with further metrics the first that has a
    unit. Warns of scores that depend on the division into batches.

    Raises ConfigError if a further metric does not fit.
    """
    for batch in batches:
        with undisturbed(module, "the trial of score()") as effects, scored(batch.micro_batch):
            score = module.score(batch.data)
        if effects:
            log.warning("%s", DEPENDS.format(" and ".join(effects[:2])))
        names = [*score.sums, *_derived_names(module.task, score.sums)]
        if module.further_metrics is None or score.predictions is None:
            return names
        if not score.predictions.is_empty:
            return names + module.further_metrics.try_out(score.predictions, names)
    problem = (
        f"the loss counts no {module.task.unit} of the scored set, so metrics have no value; use"
        " metrics=[]"
    )
    raise ConfigError([f"metrics=[...]: {problem}"])


def _derived_names(task: Task, scores: ScoreSums) -> list[str]:
    """The names of what the task derives from the scores of a batch; none if that fails, which is
    logged."""
    means = {}
    for name, (total, weight) in scores.items():
        divisor = float(torch.as_tensor(weight).sum()) or 1.0
        means[name] = float(torch.as_tensor(total).sum()) / divisor
    try:
        return list(task.derive(means))
    except Exception as error:  # noqa: BLE001  of one batch, of a model that has not learned anything
        cause = f"{type(error).__name__}: {first_line(error)}"
        log.warning("derive() failed for one batch, so its metrics are not known yet: %s", cause)
        return []


def directions(module: ModelWithTask) -> dict[str, str | None]:
    """The better direction, max or min, of each metric that says so.

    A metric of a task of your own may have that of the built-in metric of its name; one of the
    average of the weights has that of the metric itself. None for a further metric whose direction
    nobody knows.
    """
    better: dict[str, str | None] = {**built_in_directions(), **module.task.better}
    if module.further_metrics:
        better |= module.further_metrics.better
    of_average = {OF_AVERAGE + name: direction for name, direction in better.items()}
    return of_average | better


def check_metrics(
    config: Config,
    module: ModelWithTask,
    splits: Splits,
    device: str,
    averaged: bool,
) -> None:
    """Check what the keys say of metrics by scoring a batch, the same on all processes.

    averaged: whether there is an average of the weights, whose metrics must not have the names of
        others.

    Raises ConfigError if a key names a metric that there is not, or a set that is not scored then,
    or if a further metric or a task of the user's own does not fit.
    """
    sets = [*splits.validation_sets, *splits.test_sets]
    found = metrics.named_problems(config, bool(splits.validation_sets), sets)
    problems = [str(problem) for problem in found]
    target = config.task.target if isinstance(config.task, CustomOption) else ""
    if not problems and (module.further_metrics or target or any(metrics.metric_keys(config))):
        names = metric_names(module, scored_batches(config, splits.scored.source, device))
        if target:
            problems = reserved_names(target, names)
            problems += _unknown_directions(module.task, target, names)
        all_names = names_with_average(names) if averaged else names
        unusable = metrics.unusable_metrics(config, all_names, directions(module))
        problems += [str(problem) for problem in unusable]
    if problems:
        raise ConfigError(problems)


def reserved_names(target: str, names: Iterable[str]) -> list[str]:
    """A problem for each metric that would be another field of its line of metrics.jsonl."""
    return [
        f"task._target_={target}: score() returns a metric {name}, but metrics.jsonl has a {name}"
        " of its own; give it another name"
        for name in names
        if name in (*OF_THE_LINE, SAMPLES)
    ]


def _unknown_directions(task: Task, target: str, names: list[str]) -> list[str]:
    """A problem for each metric in `better` of a task that is not scored; built-in ones may be
    inherited."""
    known = {*names, *built_in_directions()}
    return [
        f"task._target_={target}: better[{name!r}]: there is no metric {name}; there are"
        f" {', '.join(names)}{did_you_mean(name, names)}"
        for name in task.better
        if name not in known
    ]


def build_selection(
    config: Config, better: Mapping[str, str | None], splits: Splits, metrics_hook: MetricsHook
) -> SelectionHook:
    """The hook that compares evaluations. better: see `directions`."""
    known = {name: direction for name, direction in better.items() if direction}

    def selection_by(metric: str, auto: str) -> Selection:
        if metric == metrics.AUTO:
            return Selection(splits.scored.name, auto, known)
        split, _, name = metric.partition(".")
        return Selection(split, name, known)

    section = config.train.early_stopping
    early_stopping = None
    if section.patience:
        best = Best(selection_by(section.metric, "loss"), section.min_delta)
        early_stopping = EarlyStopping(best, section.patience)
    time_limit = None
    if config.train.max_minutes:
        time_limit = TimeLimit(config.train.max_minutes, metrics_hook)
    best = Best(selection_by(config.checkpoint.best_metric, AUTO))
    return SelectionHook(best, early_stopping, time_limit)
