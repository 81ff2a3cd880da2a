"""Epochs by a sampler: one global order, the same on any number of processes and after a resume."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, Sampler

from ddp_train.assembly.plan import build_plan
from ddp_train.assembly.sampler import sampled_epochs
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.data.sampled_epochs import SampledEpochs
from ddp_train.data.user_dataset import UserDataset
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, DataError
from ddp_train.hardware import Hardware
from ddp_train.options.custom import CustomDataConfig
from ddp_train.options.schema import Config, RequestedRun

HERE = "tests.data.test_sampled_epochs"


class Rows:
    """Twenty samples of three classes."""

    targets: ClassVar = [number % 3 for number in range(20)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(2), self.targets[number]


class ClassesTogether(Sampler):
    """Two samples of each of two classes at a time, by a generator that it keeps."""

    def __init__(self, labels: list[int], batches: int = 4, seed: int | None = 5) -> None:
        self.labels = labels
        self.batches = batches
        self.random = random.Random(seed)

    def __len__(self) -> int:
        return 4 * self.batches

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.batches):
            for label in self.random.sample([0, 1, 2], 2):
                of_class = [i for i, other in enumerate(self.labels) if other == label]
                yield from self.random.sample(of_class, 2)


class ByEpoch(Sampler):
    """A part of the samples, by the epoch that it is told."""

    def __init__(self, data_source: Any) -> None:
        self.samples = len(data_source)
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        yield from ((self.epoch + number) % self.samples for number in range(6))


class Runs(Sampler):
    """Batches of 3, 5, 3, 5 ... neighbours, in another order in each epoch."""

    def __init__(self, dataset: Any, batch_size: int, grows: str = "") -> None:
        self.samples = len(dataset)
        self.batch_size = batch_size
        self.grows = grows
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 2 * (self.samples // 8)

    def __iter__(self) -> Iterator[list[int]]:
        starts = torch.randperm(self.samples // 8)
        batches = []
        for start in (8 * starts).tolist():
            batches += [[start, start + 1, start + 2], list(range(start + 3, start + 8))]
        if self.epoch and self.grows:
            batches.append([0])
        if self.epoch and self.grows == "samples":
            del batches[0]
        yield from batches


class Uneven(ByEpoch):
    def __iter__(self) -> Iterator[int]:
        yield from range(6 - self.epoch)


class Endless(Sampler):
    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


def opened(
    name: str, samples: np.ndarray | None = None, option: str = "sampler", **arguments: Any
) -> SampledEpochs:
    """The epochs of a sampler that a config names."""
    target = name if "." in name else f"{HERE}.{name}"
    config = Config(data=CustomDataConfig(target=f"{HERE}.Rows"), trusted_modules=["tests"])
    config.train.global_batch_size = 12
    setattr(config.data, option, {"_target_": target, **arguments})
    source = UserDataset(Rows(), seed=0)
    if samples is not None:
        source = source.select(samples)
    epochs = sampled_epochs(config, source)
    assert epochs is not None
    return epochs


def test_an_epoch_is_what_the_sampler_gives_in_one_process() -> None:
    epochs = opened("ClassesTogether")
    plain = ClassesTogether(Rows.targets)
    expected = [list(plain) for _ in range(4)]
    assert [epochs.epoch(number).tolist() for number in range(4)] == expected
    assert opened("ClassesTogether").epoch(3).tolist() == expected[3], "as after a resume"
    assert epochs.epoch(0).tolist() == expected[0], "it is made again for an earlier one"


def test_draws_from_global_generators_are_those_of_the_epoch() -> None:
    torch.manual_seed(1)
    name = "torch.utils.data.RandomSampler"
    epochs = opened(name, replacement=True, num_samples=30)
    drawn = [epochs.epoch(number).tolist() for number in (0, 1, 2)]
    torch.manual_seed(2)
    again = opened(name, replacement=True, num_samples=30)
    assert [again.epoch(number).tolist() for number in (2, 1, 0)] == drawn[::-1]
    assert drawn[0] != drawn[1] and len(drawn[0]) == 30
    assert isinstance(epochs.make(), RandomSampler)


def test_a_sampler_is_told_the_epoch_and_what_trains() -> None:
    epochs = opened("ByEpoch", samples=np.arange(10, 20))
    assert epochs.epoch(7).tolist() == [7, 8, 9, 0, 1, 2], "of the ten samples that train"


@pytest.mark.parametrize("world", [1, 3, 4])
def test_processes_share_the_batches_of_a_sampler(world: int) -> None:
    config = Config(data=CustomDataConfig(target=f"{HERE}.Rows"))
    config.train.epochs = 2
    config.train.global_batch_size = 12
    plain = ClassesTogether(Rows.targets)
    order = [[*plain], [*plain]]
    batches = [epoch[start : start + 12] for epoch in order for start in (0, 12)]
    found = [Counter[int]() for _ in batches]
    for rank in range(world):
        sampled = opened("ClassesTogether")
        plan = build_plan(config, World(rank, world, rank, world), 20, sampled=sampled)
        assert plan.samples_seen(plan.steps) == 32
        for micro_batch in plan.micro_batches():
            real = micro_batch.indices[: micro_batch.num_real]
            found[micro_batch.step].update(real.tolist())
    assert found == [Counter(batch) for batch in batches]


def test_samplers_that_no_plan_can_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="gives another order each time it is created"):
        opened("ClassesTogether", seed=None)
    with pytest.raises(
        ConfigError, match="Endless needs a __len__ above 0, by which steps are planned"
    ):
        opened("Endless")
    with pytest.raises(ConfigError, match="cannot be called with bats=3, labels="):
        opened("ClassesTogether", bats=3)
    uneven = opened("Uneven")
    with pytest.raises(
        DataError, match=r"Uneven gave 5 numbers in epoch 2, but its __len__.* was 6"
    ):
        uneven.epoch(1)
    with pytest.raises(DataError, match="gave the number 20, but the data set has 20 samples"):
        opened("torch.utils.data.SubsetRandomSampler", indices=[3, 20])


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world", [1, 3, 4])
def test_processes_share_the_batches_of_a_batch_sampler(world: int, accumulation: int) -> None:
    config = Config(data=CustomDataConfig(target=f"{HERE}.Rows"))
    config.train.epochs = 2
    config.train.global_batch_size = 6
    config.train.accumulation_steps = accumulation
    expected = opened("Runs", option="batch_sampler")
    cuts = [expected.cuts(epoch).tolist() for epoch in (0, 1)]
    batches = [
        expected.epoch(epoch)[start:end].tolist()
        for epoch in (0, 1)
        for start, end in pairwise(cuts[epoch])
    ]
    found = [Counter[int]() for _ in batches]
    weights = [0.0] * len(batches)
    for rank in range(world):
        sampled = opened("Runs", option="batch_sampler")
        plan = build_plan(config, World(rank, world, rank, world), 20, sampled=sampled)
        assert (plan.steps_per_epoch, plan.samples_per_epoch) == (4, 16), "four samples never come"
        assert [plan.samples_seen(step) for step in range(5)] == cuts[0]
        assert plan.samples_seen(5) == 16 + cuts[1][1]
        for micro_batch in plan.micro_batches():
            real = micro_batch.indices[: micro_batch.num_real]
            found[micro_batch.step].update(real.tolist())
            weights[micro_batch.step] += len(real) * micro_batch.scale / world
    assert found == [Counter(batch) for batch in batches]
    assert weights == pytest.approx([1.0] * len(batches)), "the mean over each global batch"
    assert batches[:4] != batches[4:]


def test_batch_samplers_that_no_plan_can_have_are_refused() -> None:
    runs = opened("Runs", option="batch_sampler")
    assert runs.make().batch_size == 12, "train.global_batch_size"
    assert runs.digest(0) != runs.digest(1)
    more = opened("Runs", option="batch_sampler", grows="batches")
    with pytest.raises(DataError, match=r"Runs gave 5 batches in epoch 2, but its __len__.* was 4"):
        more.check_epochs(2)
    fewer = opened("Runs", option="batch_sampler", samples=np.arange(16), grows="samples")
    with pytest.raises(DataError, match=r"gave 1[24] samples in epoch 2, but 16 in epoch 1"):
        fewer.check_epochs(9)
    name = "torch.utils.data.BatchSampler"
    numbers = {"sampler": [*range(20)], "drop_last": False}
    assert len(opened(name, option="batch_sampler", **numbers)) == 20
    with pytest.raises(
        DataError, match=r"list gave a batch of 16 .* global batches, .* of at most"
    ):
        opened(name, option="batch_sampler", batch_size=16, **numbers)
    with pytest.raises(DataError, match="gave 0, which are not numbers of samples"):
        opened("ByEpoch", option="batch_sampler")
    both = CustomDataConfig(target=f"{HERE}.Rows", drop_last=True)
    both.sampler = {"_target_": "my.Sampler"}
    both.batch_sampler = {"_target_": "my.Batches", "sampler": {"_target_": "my.Inner"}}
    config = Config(data=both)
    run = RequestedRun(config, config, Hardware(cpus=2))
    found = [problem.key for problem in both.problems(run)]
    assert "data.sampler._target_=my.Sampler" in found and "data.drop_last=true" in found
    assert "data.batch_sampler.sampler={_target_:my.Inner}" in found


@pytest.mark.parametrize("world", [1, 3, 4])
def test_the_last_batch_that_is_not_full_is_left_out(world: int) -> None:
    plans = [BatchPlan(29, 12, 1, 4, 3, rank, world, drop_last=True) for rank in range(world)]
    whole = BatchPlan(29, 12, 1, 6, 3)
    for step, same_step in enumerate((0, 1, 3, 4)):  # batch 2 and 5 have five samples
        assert plans[0].global_batch(step).tolist() == whole.global_batch(same_step).tolist()
    seen = [Counter[int](), Counter[int]()]
    for plan in plans:
        assert (plan.steps_per_epoch, plan.samples_seen(3), plan.is_full(1)) == (2, 36, True)
        assert not plan.has_empty_parts and plan.epoch_end(1) == 2
        for micro_batch in plan.micro_batches():
            assert micro_batch.num_real == len(micro_batch.indices) == 12 // world
            seen[micro_batch.epoch or 0].update(micro_batch.indices.tolist())
    assert [sorted(epoch.values()) for epoch in seen] == [[1] * 24] * 2
    assert seen[0].keys() != seen[1].keys(), "others are left out in another epoch"


def test_an_epoch_without_a_full_batch_is_refused() -> None:
    config = Config(data=CustomDataConfig(target=f"{HERE}.Rows", drop_last=True))
    config.train.global_batch_size = 24
    with pytest.raises(
        ConfigError, match=r"leaves no batch, since train\.global_batch_size=24 is more than the 20"
    ):
        build_plan(config, World(), 20)
