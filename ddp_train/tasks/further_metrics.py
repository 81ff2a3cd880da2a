"""Metrics of torchmetrics beside those of a task: those of the whole data set, on any number of
processes.

A metric here never holds more than one batch. Its states are taken out after each batch, travel
between the processes at the end of the evaluation, and are merged in the order of the batches, each
by its own reduction (`dist_reduce_fx`). The batches are the same on any number of processes, and so
are the bits of the result; an evaluation that is cut off leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_train.data.rng import hash_key, keyed_generators
from ddp_train.distributed.exchange import tensors_from_all_ranks
from ddp_train.distributed.process_group import from_leader
from ddp_train.errors import ConfigError, LaunchError, is_out_of_memory
from ddp_train.text import RESERVED, first_line, snake_case

PREDICTIONS = "(predictions)"
"""Where `ModelWithTask.score` puts the predictions of a batch: the name of no metric."""


class Predictions(NamedTuple):
    """What metrics are updated with."""

    outputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class NamedMetric:
    """A metric of torchmetrics, or a collection of them, as the config names it."""

    key: str
    """With its value, for messages."""
    name: str
    """Of the metric; of a collection, "" or the first part of the names of its metrics."""
    better: str | None
    """max or min, in place of the metric's own `higher_is_better`."""
    made: Any


@dataclass(frozen=True)
class _State:
    """One state of a metric, or of a metric inside of it."""

    owner: Any
    name: str
    reduction: Callable[[Any], Any] | None
    is_list: bool

    def now(self) -> list[Tensor]:
        found = getattr(self.owner, self.name)
        # Copies: a compiled model with CUDA graphs of its own writes its next outputs where the
        # last ones are.
        if isinstance(found, list | tuple):
            return [part.detach().clone() for part in found]
        return [found.detach()]

    def set(self, of_batches: list[list[Tensor]]) -> None:
        """of_batches: in the order of the batches; of one batch, as it was."""
        if self.is_list:
            place = "cpu" if self.owner.compute_on_cpu else None
            value: Any = [
                part.to(place) if place else part for parts in of_batches for part in parts
            ]
        else:
            parts = [part for (part,) in of_batches]
            value = parts[0] if len(parts) == 1 else self.reduced(parts)
        setattr(self.owner, self.name, value)

    def reduced(self, parts: list[Tensor]) -> Tensor:
        if getattr(self.reduction, "__name__", "") == "dim_zero_cat":
            return torch.cat(parts)
        if self.reduction is None:
            return torch.stack(parts)
        return self.reduction(torch.stack(parts))

    def is_exact(self, part: Tensor) -> bool:
        """Whether the order of a reduction does not matter, not even for the last bit."""
        name = getattr(self.reduction, "__name__", "")
        whole = not (part.is_floating_point() or part.is_complex())
        return name in ("dim_zero_max", "dim_zero_min") or (name == "dim_zero_sum" and whole)


StatesOfBatches = list[dict[int, list[Tensor]]]
"""For each state of all metrics: the number of a batch -> what it was after that batch alone. Where
the order does not matter, batches are merged at once, under the number of the first: 1,000 classes
squared are 8 MB."""


class FurtherMetrics:
    """The metrics of `metrics=[...]`. Each is updated with the predictions of a batch, (outputs,
    targets)."""

    def __init__(self, named: list[NamedMetric], device: str) -> None:
        """Raises ConfigError if something is no metric, or if two have one name."""
        self.device = device
        self.gpus = [torch.device(device).index or 0] if device.startswith("cuda") else []
        """Whose random numbers metrics may draw."""
        self.metrics: dict[str, Any] = {}
        self.better: dict[str, str | None] = {}
        """max, min, or None where a metric does not say. Vectors add their own names when they are
        computed."""
        self.numbers: dict[str, list[str]] = {}
        """The names of what a metric gave when it was computed last: its own name, or those of a
        vector."""
        self.keys: dict[str, str] = {}
        base, collection = (
            getattr(import_module("torchmetrics"), name) for name in ("Metric", "MetricCollection")
        )
        for one in named:
            if isinstance(one.made, collection):
                # Each by itself: members of a group share states, which are taken out here.
                members = {
                    _joined(one.name, snake_case(name)): metric for name, metric in one.made.items()
                }
            elif isinstance(one.made, base):
                members = {one.name: one.made}
            else:
                what = f"made an object of {type(one.made).__name__}"
                raise ConfigError(
                    [f"{one.key}: {what}, which is no torchmetrics.Metric or MetricCollection"]
                )
            for name, metric in members.items():
                self._add(one, name, metric.to(device), base, collection)
        self.states = [
            _State(inner, name, inner._reductions[name], isinstance(default, list))
            for metric in self.metrics.values()
            for inner in _modules(metric, base)
            for name, default in inner._defaults.items()
        ]
        self.owners = [
            inner for metric in self.metrics.values() for inner in _modules(metric, base)
        ]

    def _add(self, one: NamedMetric, name: str, metric: Any, base: type, collection: type) -> None:
        if name in self.metrics or name in RESERVED:
            if name in self.metrics:
                which = "two metrics have the name"
            else:
                which = "no metric may have the name"
            raise ConfigError([f"{one.key}: {which} {name}; give it another, name: NAME"])
        for inner in _modules(metric, base):
            inner.sync_on_compute = inner._to_sync = (
                False  # it would exchange what is merged already
            )
        for inner in _modules(metric, collection):
            inner._enable_compute_groups = False
        higher: bool | None = metric.higher_is_better
        self.metrics[name], self.keys[name] = metric, one.key
        self.better[name] = one.better or (None if higher is None else "max" if higher else "min")

    def new_states(self) -> StatesOfBatches:
        """For an evaluation."""
        return [{} for _ in self.states]

    def update(self, states: StatesOfBatches, batch: int, predictions: Predictions) -> None:
        """Adds what a batch gives. Raises ConfigError if a metric does not take it."""
        if not predictions.targets.numel():
            return
        with self._alone(batch):
            self._update(predictions)
            for state, of_batches in zip(self.states, states, strict=True):
                found = state.now()
                before = next(iter(of_batches), batch)
                if before != batch and not state.is_list and state.is_exact(found[0]):
                    of_batches[before] = [state.reduced([*of_batches[before], *found])]
                else:
                    of_batches[batch] = found

    def _update(self, predictions: Predictions) -> None:
        for name, metric in self.metrics.items():
            with self._told(
                name,
                f"cannot take outputs {_shape(predictions[0])} and targets"
                f" {_shape(predictions[1])}",
            ):
                metric.update(*predictions)

    def merged(self, states: StatesOfBatches) -> dict[str, float]:
        """The metrics of the whole set, on all processes the same. A collective. All have the same
        states, but what GPUs compute of them may differ in the last bit, and a decision with it:
        rank 0's numbers are those of all."""
        tensors = [part for of_batches in states for parts in of_batches.values() for part in parts]
        layout = [
            [[batch, len(parts)] for batch, parts in of_batches.items()] for of_batches in states
        ]
        whole = self.new_states()
        for its_layout, its_tensors in tensors_from_all_ranks(layout, tensors, self.device):
            left = iter(its_tensors)
            for of_batches, found in zip(whole, its_layout, strict=True):
                of_batches.update(
                    {batch: [next(left) for _ in range(count)] for batch, count in found}
                )
        return from_leader(self._computed(whole), self.device)

    def _computed(self, states: StatesOfBatches) -> dict[str, float]:
        batches = {batch for of_batches in states for batch in of_batches}
        if not batches:  # no unit in the whole set
            return {
                number: math.nan
                for name in self.metrics
                for number in self.numbers.get(name, [name])
            }
        with self._alone(-1):
            for state, of_batches in zip(self.states, states, strict=True):
                state.set([of_batches[batch] for batch in sorted(of_batches)])
            for owner in self.owners:
                owner._update_count = 1
                owner._computed = None
            return self._values()

    def _values(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, metric in self.metrics.items():
            with self._told(name, "cannot be computed"):
                numbers = list(self._numbers(name, metric.compute(), self.keys[name]))
            for number, value in numbers:
                if number in found:
                    problem = f"two metrics have the name {number}; give it another, name: NAME"
                    raise ConfigError([f"{self.keys[name]}: {problem}"])
                found[number] = value
            self.numbers[name] = [number for number, _ in numbers]
            self.better |= dict.fromkeys(self.numbers[name], self.better[name])
        return found

    def _numbers(self, name: str, value: Any, key: str) -> Iterator[tuple[str, float]]:
        """A number under its name, a vector as NAME_0, NAME_1 ..., a dict as NAME_KEY."""
        if isinstance(value, Tensor) and value.numel() == 1:
            yield name, value.item()
        elif isinstance(value, Tensor) and value.ndim == 1:
            yield from ((f"{name}_{place}", number) for place, number in enumerate(value.tolist()))
        elif isinstance(value, Mapping):
            for inner, one in value.items():
                yield from self._numbers(_joined(name, snake_case(str(inner))), one, key)
        elif isinstance(value, int | float):
            yield name, float(value)
        else:
            if isinstance(value, Tensor):
                what = f"a tensor {list(value.shape)}"
            else:
                what = f"a {type(value).__name__}"
            remedy = (
                "name one that gives a number, a vector or a dict of them, or a class of your own"
                " that does"
            )
            raise ConfigError([f"{key}: {name} gives {what}, which is no number; {remedy}"])

    def try_out(self, predictions: Predictions, taken: list[str]) -> list[str]:
        """The names of all numbers, found with one batch, which is forgotten. taken: those of the
        task's metrics.

        Raises ConfigError if a metric does not take the batch, has the name of another, or keeps
        numbers outside of its states, which cannot be merged: what is computed from the states of
        the batch after an update with a part of it must be what is computed at once. Not to the
        bit, for sums on a GPU may differ.
        """
        states = self.new_states()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a batch need not have every class
            self.update(states, 0, predictions)
            with self._alone(1):
                self._update(_half(predictions))
            found = self._computed(states)
            with self._alone(0) as seed:
                self._update(predictions)
                seed(-1)
                direct = self._values()
        for name, value in found.items():
            key = next(self.keys[base] for base, numbers in self.numbers.items() if name in numbers)
            if name in taken or name in RESERVED:
                raise ConfigError(
                    [
                        f"{key}: the task has a metric {name} itself; give this one another, name:"
                        " NAME"
                    ]
                )
            both_nan = math.isnan(direct.get(name, math.nan)) and math.isnan(value)
            if not (
                both_nan
                or math.isclose(direct.get(name, math.nan), value, rel_tol=1e-4, abs_tol=1e-6)
            ):
                remedy = "keep them in states, by add_state"
                raise ConfigError(
                    [
                        f"{key}: {name} keeps numbers that are no states, and cannot be merged;"
                        f" {remedy}"
                    ]
                )
        return list(found)

    @contextlib.contextmanager
    def _told(self, name: str, what: str) -> Iterator[None]:
        """Turns an error of a metric into one that names it."""
        try:
            yield
        except LaunchError:
            raise
        except Exception as error:  # of any metric there is
            if is_out_of_memory(error):
                raise
            raise ConfigError(
                [f"{self.keys[name]}: {name} {what}: {type(error).__name__}: {first_line(error)}"]
            ) from error

    @contextlib.contextmanager
    def _alone(self, batch: int) -> Iterator[Callable[[int], None]]:
        """Inside, the metrics begin with nothing, and end with nothing. Those that draw random
        numbers (of torch, numpy or Python) draw the same for the same batch, and disturb nobody
        else's. Gives what seeds for another batch."""
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


def _half(predictions: Predictions) -> Predictions:
    """The second half of the samples; all, if there is only one, or if they do not correspond."""
    sizes = {len(part) if part.ndim else 0 for part in predictions}
    start = max(sizes) // 2 if len(sizes) == 1 and max(sizes) > 1 else 0
    return Predictions(*(part[start:] if start else part for part in predictions))


def _modules(metric: Any, kind: type) -> list[Any]:
    return [inner for inner in metric.modules() if isinstance(inner, kind)]


def _joined(first: str, second: str) -> str:
    return f"{first}_{second}" if first else second


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"
