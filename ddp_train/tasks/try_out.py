"""Tries a task of the user's own before the first step: whether its loss and scores are sums, and
what over."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ddp_train.distributed.process_group import buffer_places
from ddp_train.errors import ConfigError, LaunchError
from ddp_train.tasks.predictions import PREDICTIONS
from ddp_train.tasks.task import ModelWithTask
from ddp_train.text import first_line

log = logging.getLogger(__name__)

COPIES = (1, 2, 5)
"""How often the same sample stands in a batch."""
DIFFERENT = 7
"""Samples of the one batch without copies."""
SAME = 0.02
"""Two losses that differ by less are the same: bfloat16 has 8 bits."""


@torch.no_grad()
def check_loss(
    module: ModelWithTask, batch_of: Callable[[np.ndarray], Any], samples: int, key: str
) -> None:
    """Raises ConfigError if `loss` returns a mean, or units that are not those of the batch.

    A sum over five copies of a sample is five times that of one, and has five times the units. A
    mean stays what it is; it would weight the samples of a small micro-batch more than those of a
    large one. Units of a batch are those of its samples one by one: padding, which depends on what
    else is in the batch, has none. batch_of: a batch of the samples of these numbers, on the
    device. samples: of the data set. key: of the task, with its value.
    """
    numbers = np.arange(min(samples, DIFFERENT))
    try:
        with undisturbed(module):
            found = [
                _numbers(module, batch_of(np.zeros(copies, dtype=np.int64))) for copies in COPIES
            ]
            _, of_different = _numbers(module, batch_of(numbers))
            one_by_one = math.fsum(
                _numbers(module, batch_of(number))[1] for number in np.split(numbers, len(numbers))
            )
    except Exception as error:
        if isinstance(error, LaunchError):
            raise
        what = f"{type(error).__name__}: {first_line(error)}"
        log.warning("%s: its loss could not be tried in eval mode: %s", key, what)
        return
    losses, units = zip(*found, strict=True)
    remedy = "return the sum of the losses of all units, and their number"
    if module.task.units_are_samples:
        counts = [*zip(units, COPIES, strict=True), (of_different, len(numbers))]
        wrong = next(((unit, count) for unit, count in counts if unit != count), None)
        if wrong:
            problem = (
                f"units_are_samples is True, but loss() counts {wrong[0]:g} units in a batch of"
                f" {wrong[1]}"
            )
            raise ConfigError(
                [f"{key}: {problem}; leave units_are_samples out, or count the samples"]
            )
    if not all(map(math.isfinite, losses)) or not units[0]:
        return  # a loss of one sample need not have a value, nor the first sample a unit
    seen = (
        f"loss() gives {losses[0]:.6g} for one sample and {losses[-1]:.6g} for a batch of"
        f" {COPIES[-1]} copies of it"
    )
    if len(set(units)) == 1:
        problem = f"{seen}, and counts {units[0]:g} {module.task.unit} in either"
        whole = (
            f"{remedy}; of a loss of the batch as a whole, that loss times the number of samples,"
            " and their number"
        )
        raise ConfigError(
            [f"{key}: {problem}: the result would depend on the number of processes; {whole}"]
        )
    if losses[0] and all(math.isclose(loss, losses[0], rel_tol=SAME) for loss in losses):
        problem = f"{seen}: that is a mean, not a sum"
        raise ConfigError([f'{key}: {problem}; {remedy}, as with reduction="sum"'])
    if not math.isclose(of_different, one_by_one):
        counted = f"{of_different:g} {module.task.unit}s in a batch of {len(numbers)} samples"
        problem = f"loss() counts {counted}, and {one_by_one:g} if they come one by one"
        why = "the result would depend on the number of processes"
        raise ConfigError(
            [f"{key}: {problem}: {why}; count what is valid, mask.sum(), and no padding"]
        )


@torch.no_grad()
def check_scores(
    module: ModelWithTask, batch_of: Callable[[np.ndarray], Any], samples: int, key: str
) -> None:
    """Raises ConfigError if `score` returns a mean; its parameters are those of `check_loss`.

    It is told by a batch of seven samples and each of them by itself: a mean is their mean there, a
    sum their sum. One that compares samples with each other is neither.
    """
    numbers = np.arange(min(samples, DIFFERENT))
    batches = [numbers, *np.split(numbers, len(numbers))]
    try:
        with undisturbed(module):
            whole, *each = (_totals(module.score(batch_of(batch))) for batch in batches)
    except Exception as error:
        if (
            isinstance(error, LaunchError) and not error.__cause__
        ):  # else a loss of one sample, or without gradients
            raise
        what = f"{type(error).__name__}: {first_line(error)}"
        log.warning("%s: its score could not be tried in eval mode: %s", key, what)
        return
    for name, (value, weight) in whole.items():
        values, weights = zip(*(one.get(name, (math.nan, 0.0)) for one in each), strict=True)
        if len(each) < 2 or not all(map(math.isfinite, [value, *values])):
            continue
        seen = f"score() gives {name} = ({value:.6g}, {weight:g}) for {len(each)} samples"
        if weight and {*weights} == {weight}:
            problem = f"{seen} and ({values[0]:.6g}, {weight:g}) for the first of them"
            why = "the result would depend on train.evaluate_batch_size"
            raise ConfigError([f"{key}: {problem}: {why}; return (sum, what it is a sum over)"])
        means = [math.fsum(values) / len(each)]
        if sum(weights):
            means.append(math.fsum(map(operator.mul, values, weights)) / sum(weights))
        is_sum = math.isclose(value, math.fsum(values), rel_tol=SAME)
        if (
            len({*values}) > 1
            and not is_sum
            and any(math.isclose(value, mean, rel_tol=SAME) for mean in means)
        ):
            problem = f"{seen}, which is the mean of what it gives for each of them"
            raise ConfigError([f"{key}: {problem}; return (sum, weight), not (mean, weight)"])


def _totals(scores: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Of each metric its sum and weight over all classes."""
    return {
        name: tuple(float(torch.as_tensor(part, dtype=torch.float64).sum()) for part in pair)
        for name, pair in scores.items()
        if name != PREDICTIONS
    }  # type: ignore[return-value]


def _numbers(module: ModelWithTask, batch: Any) -> tuple[float, float]:
    loss, units = module.loss_of(batch)
    return float(loss), float(units)


@contextlib.contextmanager
def undisturbed(module: ModelWithTask) -> Iterator[list[str]]:
    """Inside, a loss may draw torch's random numbers, write into buffers (a queue of keys) and put
    others in their place: all is as before at the end, and the list says what of that it has
    done."""
    before = [(holder, name, holder[name]) for holder, name in buffer_places(module)]
    values = [None if buffer is None else buffer.clone() for _, _, buffer in before]
    gpus = sorted({one.device.index or 0 for one in module.parameters() if one.is_cuda})
    done: list[str] = []
    module.eval()
    try:
        with torch.random.fork_rng(gpus):
            states = _generators(gpus)
            yield done
            done += ["draws random numbers"] * (states != _generators(gpus))
    finally:
        module.train()
        for (holder, name, buffer), value in zip(before, values, strict=True):
            if buffer is not None and value is not None:
                done += [f"changes the buffer {name}"] * _differs(holder.get(name), value)
                buffer.copy_(value)
            holder[name] = buffer


def _differs(now: Any, before: torch.Tensor) -> bool:
    """Whether a buffer has other numbers; not if it has another size, as a cache that grows, or
    cannot be compared."""
    with contextlib.suppress(RuntimeError, AttributeError):  # sparse, on another device; deleted
        one, other = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (now, before))
        return one.shape == other.shape and not torch.equal(one, other)
    return False


def _generators(gpus: list[int]) -> list[bytes]:
    """The states of torch's generators of random numbers."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in gpus)]
    return [state.numpy().tobytes() for state in states]
