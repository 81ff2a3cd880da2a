"""Samples: each one once in an epoch, and the same tensor whoever fetches it, when and how
often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ddp_lab.doctor.findings import FAILURE, Finding, failure, ok, warning
from ddp_lab.prove import causes
from ddp_lab.prove.causes import Cause
from ddp_lab.prove.real_runs import MAKE_THEM_ALIKE
from ddp_lab.prove.unseeded import unseeded
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.data.datasets import BatchSource, digests
from ddp_train.data.rng import global_states, keyed_generators
from ddp_train.data.sample_tensors import as_tensors
from ddp_train.data.sample_transforms import apply_transform
from ddp_train.data.splits import Splits
from ddp_train.data.user_dataset import UserDataset
from ddp_train.models.python_state import changed, state_of
from ddp_train.tensor_tree import tensors
from ddp_train.text import counted

SAMPLES = 12
"""That are fetched one by one, in two orders and two epochs."""
WORLDS = (1, 2, 3)
EPOCHS = 8
"""Some augmentation changes a sample seldom."""


def order_of_samples(source: BatchSource, again: BatchSource, plan: BatchPlan) -> Finding:
    """Of one epoch on 1, 2 and 3 processes. again: the same data set, made once more."""
    check = "order of samples"
    steps = min(plan.steps_per_epoch, 50)
    for size in WORLDS:
        ranks = [replace(plan, rank=rank, world_size=size, steps=steps) for rank in range(size)]
        seen: list[list[int]] = [[] for _ in range(steps)]
        for rank in ranks:
            for micro_batch in rank.micro_batches():
                seen[micro_batch.step] += micro_batch.indices[: micro_batch.num_real].tolist()
        for step, numbers in enumerate(seen):
            if Counter(numbers) != Counter(plan.global_batch(step).tolist()):
                return failure(
                    check,
                    f"step {step} has other samples on {counted(size, 'process')}",
                    "report this: it is a bug",
                )
    length = plan.samples
    now = len(source)
    if length != now:
        return failure(
            check,
            f"len() of the data set was {length} and is {now}",
            "return the same len() each time",
            cause="state",
        )
    if digests(again) != digests(source) == digests(source):  # else `augmentation` says why
        words = f"{_name(source)} has other samples, or in another order, when it is made again"
        return causes.finding(check, Cause("randomness", words, MAKE_THEM_ALIKE))
    twice = "" if plan.weights is not None else ", each sample once"
    return ok(
        check,
        f"{counted(steps, 'step')} of an epoch of {length}{twice}, the same on 1, 2, 3 processes",
    )


def augmentation(splits: Splits, plan: BatchPlan, at_first: dict[str, str]) -> list[Finding]:
    """Of samples that train, and of those that are scored. The first is about epochs too. at_first:
    the state of what trains (`state_of(roots(...))`) before anything was fetched."""
    numbers = np.unique(plan.global_batch(0))[:SAMPLES]
    found = [
        _trains(
            splits.train, numbers, int(plan.global_batch(plan.steps_per_epoch - 1)[-1]), at_first
        )
    ]
    name, source = splits.scored
    scored = np.arange(min(len(source), SAMPLES))
    before = state_of(roots(source))
    if found[0].status != FAILURE and (place := _differing(source, scored, None)):
        found = [_cause_of(source, scored, None, before, f"{name} set, sample {place[0]}")]
    return found


def _trains(
    source: BatchSource, numbers: np.ndarray, fresh: int, before: dict[str, str]
) -> Finding:
    if place := _differing(source, numbers, 0):
        return _cause_of(source, numbers, 0, before, f"sample {place[0]}")
    now_changed = changed(before, state_of(roots(source)))
    count = counted(len(numbers), "sample")
    first = fetched(source, numbers, 0)
    if asked := unseeded(lambda: fetched(source, numbers, 0)):
        return warning(
            "augmentation",
            f"{_name(source)} asks {causes.listed(asked)}; {count} were the same all the same, in"
            " this process",
            "make a sample of its number and the draws of torch, numpy and random alone",
        )
    if any(_unequal(first, fetched(source, numbers, epoch)) for epoch in range(1, EPOCHS)):
        return ok(
            "augmentation",
            f"{count}, fetched in two orders: the same in one epoch, others in the next",
            found=0,
        )
    if cause := _keeps_or_seeds(source, fresh, now_changed):
        return causes.finding("augmentation", cause)
    return ok(
        "augmentation",
        f"{count}, fetched in two orders: the same, in each epoch too (nothing augments)",
        found=0,
    )


def fetched(
    source: BatchSource, numbers: Sequence[int] | np.ndarray, epoch: int | None
) -> list[Any]:
    """Each sample as a batch of its own."""
    return [source.get_batch(np.array([number]), epoch) for number in numbers]


def _differing(source: BatchSource, numbers: np.ndarray, epoch: int | None) -> list[int]:
    """The numbers of samples that are something else when they are fetched again, in another
    order."""
    first = fetched(source, numbers, epoch)
    again = fetched(source, numbers[::-1], epoch)[::-1]
    return [
        int(number)
        for number, one, other in zip(numbers, first, again, strict=True)
        if _unequal([one], [other])
    ]


def _unequal(one: Any, other: Any) -> bool:
    """Whether any tensor differs in a bit, or in shape."""
    mine = list(tensors(one))
    theirs = list(tensors(other))
    return len(mine) != len(theirs) or any(
        a.shape != b.shape or not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(mine, theirs, strict=True)
    )


def _cause_of(
    source: BatchSource, numbers: np.ndarray, epoch: int | None, before: dict[str, str], about: str
) -> Finding:
    """Which part of the data makes a sample differ, and by what."""
    part, where = _culprit(source, numbers, epoch)
    asked = unseeded(lambda: fetched(part, numbers, epoch))
    now_changed = changed(before, state_of(roots(source)))
    cause = causes.of_samples(f"{where} ({about})", asked, now_changed)
    return causes.finding("augmentation", cause, 1, 0)


def _culprit(
    source: BatchSource, numbers: np.ndarray, epoch: int | None
) -> tuple[BatchSource, str]:
    """The shortest chain of data set, transforms and collate_fn that gives a sample two values."""
    if not isinstance(source, UserDataset):
        return source, _name(source)
    for count in range(len(source.transforms) + 1):
        part = source.transformed(source.transforms[:count])
        whole = part.collate
        part.collate = _as_they_are
        if _differing(part, numbers, epoch):
            last = source.transforms[count - 1] if count else None
            return part, f"the transform {_called(last)}" if count else _name(source)
        part.collate = whole
    return source, f"the collate_fn of {_name(source)}"


def _as_they_are(samples: list[Any]) -> Any:
    """Instead of a collate_fn: PIL images and numbers become tensors, and nothing is put
    together."""
    found = [as_tensors(sample) for sample in samples]
    return [
        torch.as_tensor(one) if isinstance(one, float | int | np.ndarray) else one for one in found
    ]


def _keeps_or_seeds(source: BatchSource, number: int, now_changed: list[str]) -> Cause | None:
    """Why what draws random numbers for a sample gives the same in each epoch; None if nothing
    does, or the draws only happen to have no effect. Of own data sets alone: ours draw by keys.
    number: of a sample that nobody has fetched: a cache would draw no more."""
    if not isinstance(source, UserDataset):
        return None
    one = _stages(source, number, 1)
    other = _stages(source, number, 2)
    drawing = [place for place, stage in enumerate(one) if stage.moved]
    if not drawing:
        return None
    for place in drawing:
        moved = one[place].moved
        seeders = [
            stage.name for stage, same in zip(one, other, strict=True) if moved & stage.alike(same)
        ]
        if place and seeders:  # a data set may seed itself for itself: synthetic samples
            return causes.same_in_each_epoch(seeders[0], [])
    if now_changed:
        return causes.same_in_each_epoch(one[drawing[0]].name, now_changed)
    return None


class _Stage(NamedTuple):
    name: str
    moved: set[int]
    """The generators that it drew from."""
    after: tuple[bytes, ...]
    """The generators when it was done."""

    def alike(self, other: _Stage) -> set[int]:
        """The generators that it leaves as the other one does."""
        return {number for number, state in enumerate(self.after) if state == other.after[number]}


def _stages(source: UserDataset, number: int, key: int) -> list[_Stage]:
    """The data set, and each transform, for one sample with generators of this seed."""
    found: list[_Stage] = []

    def note(name: str, before: tuple[bytes, ...]) -> tuple[bytes, ...]:
        now = global_states()
        found.append(
            _Stage(name, {place for place, state in enumerate(now) if state != before[place]}, now)
        )
        return now

    number = number if source.numbers is None else int(source.numbers[number])
    with keyed_generators() as seed:
        seed(key)
        before = global_states()
        sample = source.dataset[number]
        before = note(_name(source), before)
        if source.fields:
            sample = tuple(sample[name] for name in source.fields)
        for transform in source.transforms:
            sample = apply_transform(transform, sample)
            before = note(f"the transform {_called(transform)}", before)
    return found


def roots(source: BatchSource) -> dict[str, Any]:
    """What may keep something between two samples. Of ours, nothing does."""
    if not isinstance(source, UserDataset):
        return {}
    transforms = {_called(transform): transform for transform in source.transforms}
    return {source.name: source.dataset, **transforms, "collate_fn": source.collate}


def _name(source: BatchSource) -> str:
    return f"the data set {getattr(source, 'name', type(source).__name__)}"


def _called(transform: Any) -> str:
    return getattr(transform, "__name__", type(transform).__name__)
