"""Samples: each one once in an epoch, and the same tensor whoever fetches it, when and how
often."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

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
from ddp_train.data.user_dataset import UserDataset, parts_of, transform_name
from ddp_train.models.python_state import changed, state_of
from ddp_train.tensor_tree import tensors
from ddp_train.text import counted

SAMPLES = 12
"""Number of samples that are fetched one by one, in two orders and two epochs."""
MOST_STEPS = 50
"""Most steps of an epoch whose samples are counted."""
WORLDS = (1, 2, 3)
EPOCHS = 8
"""Epochs in which samples are fetched: some augmentation changes a sample seldom."""


def order_of_samples(source: BatchSource, again: BatchSource, plan: BatchPlan) -> Finding:
    """Compare the samples of one epoch on 1, 2 and 3 processes.

    again: the same data set, made once more.
    """
    steps = min(plan.steps_per_epoch, MOST_STEPS)
    for processes in WORLDS:
        for step, numbers in enumerate(_numbers_by_step(plan, processes, steps)):
            if Counter(numbers) != Counter(plan.global_batch(step).tolist()):
                detail = (
                    f"step {step} has other samples on {counted(processes, 'process')} than on 1"
                )
                return failure(detail, "this is a bug of ddp-train: please report it")
    length = plan.samples
    if plan.sampled is None and length != len(source):
        detail = f"len() of the data set was {length} and is {len(source)}"
        return failure(detail, "return the same len() each time", cause="state")
    # if two digests of one object differ, `augmentation` says why
    if digests(again) != digests(source) == digests(source):
        data_set = _described(source)
        detail = f"{data_set} has other samples, or another order, when it is created again"
        return causes.finding(Cause("randomness", detail, MAKE_THEM_ALIKE))
    once = ""
    if plan.weights is None and plan.sampled is None:
        once = ", each sample once"
    return ok(
        f"{counted(steps, 'step')} of an epoch of {length}{once}, the same on 1, 2, 3 processes"
    )


def _numbers_by_step(plan: BatchPlan, processes: int, steps: int) -> list[list[int]]:
    """The numbers of the samples that all processes compute, by step."""
    numbers: list[list[int]] = [[] for _ in range(steps)]
    for rank in range(processes):
        for micro_batch in replace(
            plan, rank=rank, world_size=processes, steps=steps
        ).micro_batches():
            real = micro_batch.indices[: micro_batch.num_real]
            numbers[micro_batch.step] += real.tolist()
    return numbers


def augmentation(splits: Splits, plan: BatchPlan, initial_state: dict[str, str]) -> Finding:
    """Fetch samples that train, in several epochs, and those that are scored.

    initial_state: `state_of(parts_of(splits.train))` before anything was fetched.
    """
    numbers = np.unique(plan.global_batch(0))[:SAMPLES]
    unseen = int(plan.global_batch(plan.steps_per_epoch - 1)[-1])
    finding = _training_samples(splits.train, numbers, unseen, initial_state)
    if finding.status == FAILURE:
        return finding
    name, source = splits.scored
    scored = _Fetches(source, np.arange(min(len(source), SAMPLES)), None)
    before = state_of(parts_of(source))
    differing = scored.differing()
    if differing:
        return _differing_samples(scored, before, f"{name} set, sample {differing[0]}")
    return finding


@dataclass(frozen=True)
class _Fetches:
    """Some samples of one epoch, which may be fetched again."""

    source: BatchSource
    numbers: np.ndarray
    epoch: int | None
    """None for samples that are scored."""

    def fetched(self, numbers: np.ndarray | None = None) -> list[Any]:
        """Fetch each sample as a batch of its own.

        numbers: the samples in the order in which they are fetched; None: that of `self.numbers`.
        """
        order = self.numbers if numbers is None else numbers
        return [self.source.get_batch(np.array([number]), self.epoch) for number in order]

    def differing(self) -> list[int]:
        """The numbers of samples that differ when all are fetched again, in reverse order."""
        first = self.fetched()
        again = self.fetched(self.numbers[::-1])[::-1]
        triples = zip(self.numbers, first, again, strict=True)
        return [int(number) for number, one, other in triples if _unequal(one, other)]


def _training_samples(
    source: BatchSource, numbers: np.ndarray, unseen: int, initial_state: dict[str, str]
) -> Finding:
    """Check that samples of the training set are the same when they are read again.

    numbers: the samples to read.
    unseen: the number of a sample that nobody has fetched.
    initial_state: the state of the data source before anything was fetched, for `changed`.
    """
    fetches = _Fetches(source, numbers, 0)
    differing = fetches.differing()
    if differing:
        return _differing_samples(fetches, initial_state, f"sample {differing[0]}")
    changed_state = changed(initial_state, state_of(parts_of(source)))
    samples = counted(len(numbers), "sample")
    first = fetches.fetched()
    asked = unseeded(fetches.fetched)
    if asked:
        detail = (
            f"{_described(source)} uses {causes.listed(asked)}, but {samples} were the same in"
            " this process"
        )
        remedy = (
            "let a sample depend only on its index and on random numbers of torch, numpy and random"
        )
        return warning(detail, remedy)
    detail = f"{samples}, read in two orders, are the same"
    later = (replace(fetches, epoch=epoch).fetched() for epoch in range(1, EPOCHS))
    if any(_unequal(first, samples_of_epoch) for samples_of_epoch in later):
        return ok(f"{detail} in one epoch, others in the next", found=0)
    cause = _why_same_in_each_epoch(source, unseen, changed_state)
    if cause:
        return causes.finding(cause)
    return ok(f"{detail}, and the same in each epoch (nothing augments)", found=0)


def _unequal(one: Any, other: Any) -> bool:
    """Compare two trees of tensors. True if any tensor differs in a bit, or in shape."""
    mine = list(tensors(one))
    theirs = list(tensors(other))
    if len(mine) != len(theirs):
        return True
    return any(
        a.shape != b.shape or not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(mine, theirs, strict=True)
    )


def _differing_samples(fetches: _Fetches, before: dict[str, str], about: str) -> Finding:
    """Find out why a sample is not the same when it is fetched again.

    fetches: samples, of which at least one differs.
    before: the state of the data source before anything was fetched, for `changed`.
    about: the sample that differs, for the message.

    Returns a finding that names the part at fault (data set, transform or collate_fn) and the
    cause.
    """
    part, where = _culprit(fetches)
    asked = unseeded(part.fetched)
    changed_state = changed(before, state_of(parts_of(fetches.source)))
    cause = causes.of_samples(f"{where} ({about})", asked, changed_state)
    return causes.finding(cause, 1, 0)


def _culprit(fetches: _Fetches) -> tuple[_Fetches, str]:
    """The shortest chain of data set, transforms and collate_fn that gives a sample two values."""
    source = fetches.source
    if not isinstance(source, UserDataset):
        return fetches, _described(source)
    where = _described(source)
    for count in range(len(source.transforms) + 1):
        if count:
            where = f"the transform {transform_name(source.transforms[count - 1])}"
        part = source.transformed(source.transforms[:count])
        part.collate = _uncollated
        of_part = replace(fetches, source=part)
        if of_part.differing():
            return of_part, where
    return fetches, f"the collate_fn of {_described(source)}"


def _uncollated(samples: list[Any]) -> Any:
    """Replace a collate_fn: PIL images and numbers become tensors, and nothing is put together."""
    converted = [as_tensors(sample) for sample in samples]
    return [
        torch.as_tensor(sample) if isinstance(sample, float | int | np.ndarray) else sample
        for sample in converted
    ]


def _why_same_in_each_epoch(
    source: BatchSource, unseen: int, changed_state: list[str]
) -> Cause | None:
    """Why what draws random numbers for a sample gives the same in each epoch.

    None if nothing draws, or the draws only happen to have no effect. Only a user's data set can
    have a cause: ours draw by keys.

    unseen: the number of a sample that nobody has fetched: a cache would draw no more.
    """
    if not isinstance(source, UserDataset):
        return None
    stages = _stages(source, unseen, 1)
    others = _stages(source, unseen, 2)
    drawing = [place for place, stage in enumerate(stages) if stage.drawn_from]
    if not drawing:
        return None
    for place in drawing:
        drawn_from = stages[place].drawn_from
        pairs = zip(stages, others, strict=True)
        seeders = [stage.name for stage, other in pairs if drawn_from & stage.left_alike(other)]
        if place and seeders:  # a data set may seed itself for itself: synthetic samples
            return causes.same_in_each_epoch(seeders[0], [])
    if changed_state:
        return causes.same_in_each_epoch(stages[drawing[0]].name, changed_state)
    return None


@dataclass(frozen=True)
class _Stage:
    """How the data set or a transform moved the generators while it made one sample."""

    name: str
    before: tuple[bytes, ...]
    """States of all generators before this stage."""
    after: tuple[bytes, ...]

    @property
    def drawn_from(self) -> set[int]:
        """Numbers of the generators that moved in this stage."""
        pairs = zip(self.before, self.after, strict=True)
        return {number for number, (before, after) in enumerate(pairs) if after != before}

    def left_alike(self, other: _Stage) -> set[int]:
        """Numbers of the generators that have the same state after this stage and another."""
        pairs = zip(self.after, other.after, strict=True)
        return {number for number, (mine, theirs) in enumerate(pairs) if mine == theirs}


def _stages(source: UserDataset, number: int, seed: int) -> list[_Stage]:
    """Make one sample: the data set, then each transform, with what they did to the generators.

    seed: of all generators, before the data set is asked.
    """
    stages: list[_Stage] = []
    if source.numbers is not None:
        number = int(source.numbers[number])
    with keyed_generators() as seed_generators:
        seed_generators(seed)
        before = global_states()
        sample = source.dataset[number]
        after = global_states()
        stages.append(_Stage(_described(source), before, after))
        if source.fields:
            sample = tuple(sample[name] for name in source.fields)
        for transform in source.transforms:
            before = after
            sample = apply_transform(transform, sample)
            after = global_states()
            stages.append(_Stage(f"the transform {transform_name(transform)}", before, after))
    return stages


def _described(source: BatchSource) -> str:
    return f"the data set {getattr(source, 'name', type(source).__name__)}"
