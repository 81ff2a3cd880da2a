"""The metrics of torchmetrics that a config names: made, and tried out before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from ddp_train.config.metrics import Further
from ddp_train.config.user_code import instantiate
from ddp_train.errors import ConfigError
from ddp_train.tasks.further_metrics import PREDICTIONS, FurtherMetrics, Named, Predictions
from ddp_train.tasks.task import ModelWithTask, Task, can_predict
from ddp_train.text import first_line


def build_further(items: Sequence[Further], task: Task, device: str) -> FurtherMetrics | None:
    """None if the config names none. Raises ConfigError if one cannot be made, or if the task cannot predict."""
    if not items:
        return None
    if not can_predict(task):
        problem = "metrics=[...]: the task has no method predict(model, batch), which returns (outputs, targets)"
        raise ConfigError([f"{problem}; add one, or use metrics=[]"])
    named = []
    for item in items:
        key, given_name = f"{item.key}._target_={item.custom.target}", item.given.get("name")
        made = _made(key, item)
        is_collection = type(made).__name__ == "MetricCollection"
        named.append(Named(key, given_name or ("" if is_collection else item.name), item.better, made))
    return FurtherMetrics(named, device)


def _made(key: str, item: Further) -> Any:
    try:
        return instantiate(item.key, item.custom)
    except (ValueError, TypeError, ImportError) as error:  # torchmetrics checks its arguments, and names packages
        raise ConfigError([f"{key}: {type(error).__name__}: {first_line(error)}"]) from error


@torch.no_grad()
def metric_names(module: ModelWithTask, batch: Any) -> list[str]:
    """The names of all metrics, found by scoring a batch. Raises ConfigError if a further metric does not fit."""
    module.eval()
    scores = dict(module.score(batch))
    predictions = cast(Predictions, scores.pop(PREDICTIONS, None))
    names = [*scores, *module.task.derive(dict.fromkeys(scores, 0.5))]
    return names + (module.further.try_out(predictions, names) if module.further else [])
