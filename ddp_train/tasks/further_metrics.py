"""Metrics of torchmetrics beside those of a task, over the whole data set.

They are the same on any number of processes, see `metric_states`. An evaluation that is cut off
leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

import torch
from torch import Tensor

from ddp_train.data.rng import hash_key, keyed_generators
from ddp_train.distributed.process_group import from_leader
from ddp_train.errors import ConfigError, LaunchError, is_out_of_memory
from ddp_train.tasks.metric_states import MetricState, StatesOfBatches, states_from_all_ranks
from ddp_train.tasks.predictions import Predictions, description
from ddp_train.text import NAME_IS_RESERVED, RESERVED, first_line, snake_case


@dataclass(frozen=True)
class NamedMetric:
    """A metric of torchmetrics, or a collection of them, as the config names it."""

    key: str
    """Key and value that name it, for messages."""
    name: str
    """Its name; for a collection "" or the first part of the names of its metrics."""
    better: str | None
    """max or min, in place of the metric's own `higher_is_better`."""
    metric: Any


class FurtherMetrics:
    """The metrics of `metrics=[...]`, each updated with the predictions of a batch."""

    def __init__(self, named_metrics: list[NamedMetric], device: str) -> None:
        """Move the metrics to a device.

        Raises ConfigError if something is not a metric, or if two have one name.
        """
        self.device = device
        self.gpus = [torch.device(device).index or 0] if device.startswith("cuda") else []
        """The GPUs whose random numbers metrics may draw."""
        self.metrics: dict[str, Any] = {}
        self.better: dict[str, str | None] = {}
        """max or min by name, None where a metric does not say. Vectors add the names of their
        numbers when they are computed."""
        self.number_names: dict[str, list[str]] = {}
        """For each metric the names of the numbers that it gave last: several for a vector."""
        self.keys: dict[str, str] = {}
        for named in named_metrics:
            for name, metric in _members(named).items():
                self._add(named, name, metric.to(device))
        self.owners: list[Any] = []
        self.states: list[MetricState] = []
        for metric in self.metrics.values():
            self.owners += _modules(metric, "Metric")
        for owner in self.owners:
            for name, default in owner._defaults.items():
                is_list = isinstance(default, list)
                self.states.append(MetricState(owner, name, owner._reductions[name], is_list))

    def _add(self, named: NamedMetric, name: str, metric: Any) -> None:
        if name in self.metrics:
            _refuse_name(named.key, name, "another metric has that name")
        if name in RESERVED:
            _refuse_name(named.key, name, NAME_IS_RESERVED)
        for inner in _modules(metric, "Metric"):
            # It would exchange what is merged already.
            inner.sync_on_compute = False
            inner._to_sync = False
        for inner in _modules(metric, "MetricCollection"):
            inner._enable_compute_groups = False
        self.metrics[name] = metric
        self.keys[name] = named.key
        self.better[name] = named.better or _direction(metric)

    def new_states(self) -> StatesOfBatches:
        """The states of an evaluation without a batch yet."""
        return [{} for _ in self.states]

    def update(self, states: StatesOfBatches, batch: int, predictions: Predictions) -> None:
        """Adds a batch to the states. Raises ConfigError if a metric does not accept it."""
        if predictions.is_empty:
            return
        with self._isolated(batch):
            self._update_metrics(predictions)
            for state, batches in zip(self.states, states, strict=True):
                state.add_to(batches, batch)

    def _update_metrics(self, predictions: Predictions) -> None:
        outputs, targets = predictions
        for name, metric in self.metrics.items():
            action = (
                f"cannot take outputs {description(outputs)} and targets {description(targets)}"
            )
            with self._naming_errors(name, action):
                metric.update(outputs, targets)

    def merged(self, states: StatesOfBatches) -> dict[str, float]:
        """The metrics of the whole set, the same on all processes. A collective.

        All processes have the same states, but what GPUs compute of them may differ in the last
        bit, and a decision with it: the numbers of rank 0 count for all.
        """
        metrics = self._compute(states_from_all_ranks(states, self.device))
        return from_leader(metrics, self.device)

    def _compute(self, states: StatesOfBatches) -> dict[str, float]:
        """The metrics of all batches; NaN if there is no batch, and so no unit in the set."""
        if not any(states):
            values: dict[str, float] = {}
            for name in self.metrics:
                values |= dict.fromkeys(self.number_names.get(name, [name]), math.nan)
            return values
        with self._isolated(-1):
            for state, batches in zip(self.states, states, strict=True):
                state.merge(batches)
            for owner in self.owners:
                owner._update_count = 1
                owner._computed = None
            return self._values()

    def _values(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, metric in self.metrics.items():
            key = self.keys[name]
            with self._naming_errors(name, "cannot be computed"):
                numbers = dict(_numbers(name, metric.compute(), key))
            for number in numbers:
                if number in values:
                    _refuse_name(key, number, "another metric has that name")
            values |= numbers
            self.number_names[name] = list(numbers)
            self.better |= dict.fromkeys(numbers, self.better[name])
        return values

    def try_out(self, predictions: Predictions, task_metrics: list[str]) -> list[str]:
        """The names of all numbers, found with one batch, which is forgotten.

        A metric must give the same numbers, to rounding, from the batch at once and from states
        that a part of it has updated before.

        task_metrics: names of the task's own metrics.

        Raises ConfigError if a metric does not accept the batch, has the name of another, or keeps
        numbers outside of its states, which cannot be merged.
        """
        states = self.new_states()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a batch need not have every class
            self.update(states, 0, predictions)
            with self._isolated(1):
                self._update_metrics(predictions.second_half())
            values = self._compute(states)
            with self._isolated(0) as seed:
                self._update_metrics(predictions)
                seed(-1)
                direct = self._values()
        for name, value in values.items():
            self._check_number(name, value, direct.get(name, math.nan), task_metrics)
        return list(values)

    def _check_number(
        self, name: str, value: float, direct: float, task_metrics: list[str]
    ) -> None:
        """Raise ConfigError if a number has a reserved name, or is not a function of the states.

        value: computed from the states of a batch.
        direct: computed without taking the states out.
        """
        owners = [metric for metric, names in self.number_names.items() if name in names]
        key = self.keys[owners[0]]
        if name in RESERVED:
            _refuse_name(key, name, NAME_IS_RESERVED)
        if name in task_metrics:
            _refuse_name(key, name, "the task has a metric of that name")
        if math.isnan(direct) and math.isnan(value):
            return
        if not math.isclose(direct, value, rel_tol=1e-4, abs_tol=1e-6):
            _refuse(
                key,
                f"{name} keeps numbers outside of its states, so the numbers of several processes"
                " cannot be merged; register each number by add_state",
            )

    @contextlib.contextmanager
    def _naming_errors(self, name: str, action: str) -> Iterator[None]:
        """Turn an error of a metric into one that names it."""
        try:
            yield
        except LaunchError:
            raise
        except Exception as error:  # of any metric there is
            if is_out_of_memory(error):
                raise
            cause = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError([f"{self.keys[name]}: {name} {action}: {cause}"]) from error

    @contextlib.contextmanager
    def _isolated(self, batch: int) -> Iterator[Callable[[int], None]]:
        """Start with empty metrics, and leave nothing of them at the end.

        Those that draw random numbers (of torch, numpy or Python) draw the same for the same batch,
        and do not disturb others. Yields a function that seeds for another batch.
        """
        with torch.random.fork_rng(self.gpus), keyed_generators() as seed_host, torch.no_grad():

            def seed(batch: int) -> None:
                key = hash_key("further metrics", batch)
                seed_host(key)
                for gpu in self.gpus:  # torch.manual_seed would move those of the other GPUs, too
                    torch.cuda.default_generators[gpu].manual_seed(key)

            seed(batch)
            self._reset()
            try:
                yield seed
            finally:
                self._reset()

    def _reset(self) -> None:
        for metric in self.metrics.values():
            metric.reset()


def _members(named: NamedMetric) -> dict[str, Any]:
    """Metrics by name. Those of a collection stand alone: members of a group would share states."""
    library = import_module("torchmetrics")
    if isinstance(named.metric, library.MetricCollection):
        members = named.metric.items()
        return {_joined(named.name, snake_case(name)): metric for name, metric in members}
    if not isinstance(named.metric, library.Metric):
        kind = type(named.metric).__name__
        _refuse(
            named.key,
            f"returns an object of {kind}, which is not a torchmetrics.Metric or MetricCollection",
        )
    return {named.name: named.metric}


def _modules(metric: Any, class_name: str) -> list[Any]:
    """A metric and what it consists of, where that is of a class of torchmetrics."""
    kind = getattr(import_module("torchmetrics"), class_name)
    return [inner for inner in metric.modules() if isinstance(inner, kind)]


def _direction(metric: Any) -> str | None:
    return {True: "max", False: "min", None: None}[metric.higher_is_better]


def _numbers(name: str, value: Any, key: str) -> Iterator[tuple[str, float]]:
    """The numbers of a value: NAME, for a vector NAME_0, NAME_1 ..., for a dict NAME_KEY."""
    if isinstance(value, Tensor) and value.numel() == 1:
        yield name, value.item()
    elif isinstance(value, Tensor) and value.ndim == 1:
        for place, number in enumerate(value.tolist()):
            yield f"{name}_{place}", number
    elif isinstance(value, Mapping):
        for inner_key, inner in value.items():
            yield from _numbers(_joined(name, snake_case(str(inner_key))), inner, key)
    elif isinstance(value, int | float):
        yield name, float(value)
    else:
        kind = type(value).__name__
        if isinstance(value, Tensor):
            kind = f"tensor {list(value.shape)}"
        _refuse(
            key,
            f"{name} returns a {kind}; use a metric that returns a number, a vector, or a dict of"
            " them",
        )


def _refuse(key: str, problem: str) -> NoReturn:
    raise ConfigError([f"{key}: {problem}"])


def _refuse_name(key: str, name: str, rule: str) -> NoReturn:
    remedy = f"set another name, for example name: my_{name}"
    _refuse(key, f"gives a metric {name}, but {rule}; {remedy}")


def _joined(first: str, second: str) -> str:
    return f"{first}_{second}" if first else second
