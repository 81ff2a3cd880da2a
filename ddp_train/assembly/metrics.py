"""The metrics of a run: those of torchmetrics are made, all are tried before the first step, and
some select."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ddp_train.config import metrics
from ddp_train.config.metrics import FurtherMetric
from ddp_train.config.user_code import instantiate
from ddp_train.data.batch import Batch
from ddp_train.data.datasets import BatchSource
from ddp_train.data.splits import Splits
from ddp_train.engine.metrics_hook import MetricsHook
from ddp_train.engine.scoring import names_with_average
from ddp_train.engine.selection import AUTO, Best, Selection
from ddp_train.engine.selection_hook import SelectionHook
from ddp_train.errors import ConfigError
from ddp_train.options.custom import CustomOption
from ddp_train.options.schema import Config, built_in_directions
from ddp_train.tasks.further_metrics import FurtherMetrics, NamedMetric
from ddp_train.tasks.task import ModelWithTask, ScoreSums, Task, can_predict
from ddp_train.tasks.trial import undisturbed
from ddp_train.text import OF_AVERAGE, did_you_mean, first_line

DEPENDS = (
    "scoring a batch {}: metrics and predictions depend on the number of processes and on"
    " train.evaluate_batch_size; let the model draw nothing and write nothing in eval mode, and"
    " leave it in that"
)
log = logging.getLogger(__name__)


def build_further(items: Sequence[FurtherMetric], task: Task, device: str) -> FurtherMetrics | None:
    """None if the config names none. Raises ConfigError if one cannot be made, or if the task
    cannot predict."""
    if not items:
        return None
    if not can_predict(task):
        problem = (
            "metrics=[...]: the task has no method predict(model, batch), which returns (outputs,"
            " targets)"
        )
        raise ConfigError([f"{problem}; add one, or use metrics=[]"])
    named = []
    for item in items:
        key = f"{item.key}._target_={item.code.target}"
        given_name = item.given.get("name")
        made = _made(key, item)
        is_collection = type(made).__name__ == "MetricCollection"
        named.append(
            NamedMetric(key, given_name or ("" if is_collection else item.name), item.better, made)
        )
    return FurtherMetrics(named, device)


def _made(key: str, item: FurtherMetric) -> Any:
    try:
        return instantiate(item.key, item.code)
    except (
        ValueError,
        TypeError,
        ImportError,
    ) as error:  # torchmetrics checks its arguments, and names packages
        raise ConfigError([f"{key}: {type(error).__name__}: {first_line(error)}"]) from error


@torch.no_grad()
def metric_names(module: ModelWithTask, batches: Iterable[Batch]) -> list[str]:
    """The names of all metrics, found by scoring a batch: with further metrics the first that has a
    unit. Raises ConfigError if one of those does not fit. Warns of scores that depend on the
    division into batches."""
    for batch in batches:
        with undisturbed(module) as done:
            score = module.score(batch.data)
        if done:
            log.warning("%s", DEPENDS.format(" and ".join(done[:2])))
        names = [*score.sums, *_derived(module.task, score.sums)]
        if module.further_metrics is None or score.predictions is None:
            return names
        if not score.predictions.is_empty:
            return names + module.further_metrics.try_out(score.predictions, names)
    problem = (
        f"no {module.task.unit} of the set that is scored counts, and they would have no value; use"
        " metrics=[]"
    )
    raise ConfigError([f"metrics=[...]: {problem}"])


def _derived(task: Task, scores: ScoreSums) -> list[str]:
    """The names of what the task derives from the scores of a batch; none if that fails, of which
    the log tells."""
    known = {
        name: float(torch.as_tensor(total).sum()) / float(torch.as_tensor(weight).sum() or 1)
        for name, (total, weight) in scores.items()
    }
    try:
        return list(task.derive(known))
    except Exception as error:  # noqa: BLE001  of one batch, of a model that has not learned anything
        log.warning(
            "derive() could not be tried with one batch: %s: %s",
            type(error).__name__,
            first_line(error),
        )
        return []


def directions(module: ModelWithTask) -> dict[str, str | None]:
    """Which direction is better, max or min, for each metric that says so; one of a task of your
    own may have that of the built-in metric of its name. None for a further metric whose direction
    nobody knows. That of a metric of the average of the weights is the metric's own."""
    better = {
        **built_in_directions(),
        **module.task.better,
        **(module.further_metrics.better if module.further_metrics else {}),
    }
    return {**{OF_AVERAGE + name: way for name, way in better.items()}, **better}


def check_metrics(
    config: Config,
    module: ModelWithTask,
    sources: Splits,
    batches: Callable[[BatchSource], Iterable[Batch]],
    averaged: bool,
) -> None:
    """Raises ConfigError if a key names a metric that there is not, or a set that is not scored
    then, or if a further metric or a task of the user's own does not fit: a batch is scored to see.
    batches: of an evaluation, on all processes the same. averaged: whether there is an average of
    the weights, whose metrics must not have the names of others."""
    problems = metrics.problems(config, sources.validation is not None)
    own = config.task.target if isinstance(config.task, CustomOption) else ""
    if not problems and (module.further_metrics or own or any(metrics.named(config))):
        names = metric_names(module, batches(sources.scored[1]))
        problems = [
            f"task._target_={own}: better[{name!r}]: there is no metric {name}, but"
            f" {', '.join(names)}{did_you_mean(name, names)}"
            for name in module.task.better
            if own and name not in names and name not in built_in_directions()  # inherited, perhaps
        ]
        all_names = names_with_average(names) if averaged else names
        problems += metrics.unusable(config, all_names, directions(module))
    if problems:
        raise ConfigError(problems)


def build_selection(
    config: Config, better: Mapping[str, str | None], sources: Splits, record: MetricsHook
) -> SelectionHook:
    """What follows from each evaluation. better: see `directions`."""
    split = sources.scored[0]
    known = {name: way for name, way in better.items() if way}
    stopping = config.train.early_stopping

    def by(metric: str, auto: str) -> Selection:
        return Selection(split, auto if metric == metrics.AUTO else metric.partition(".")[2], known)

    return SelectionHook(
        record,
        best=Best(by(config.checkpoint.best_metric, AUTO)),
        stopping=(
            Best(by(stopping.metric, "loss"), stopping.min_delta) if stopping.patience else None
        ),
        patience=stopping.patience or 0,
        max_minutes=config.train.max_minutes,
    )
