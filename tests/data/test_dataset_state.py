"""A data set that changes while it is read: each sample is of its epoch, whatever reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from ddp_train.data.batch_plan import BatchPlan, MicroBatch, epoch_order
from ddp_train.data.dataset_content import LargeData, content_of
from ddp_train.data.dataset_state import READS, AttributeWatch
from ddp_train.data.loader import Loader, LoaderOptions
from ddp_train.data.streams.worker import WorkerStream
from ddp_train.data.user_dataset import UserDataset
from ddp_train.errors import DataError

LEVELS = {"now": 0}
"""As scripts keep what they change from epoch to epoch."""


class Stages(Dataset):
    """Its samples tell the epoch that it was told."""

    classes = ("a", "b")

    def __init__(self, samples: int = 6, grows_by: int = 0) -> None:
        self.samples = samples
        self.grows_by = grows_by
        self.level = -1

    def set_epoch(self, epoch: int) -> None:
        self.level = epoch

    def __len__(self) -> int:
        return self.samples + self.grows_by * max(0, self.level)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.tensor([100.0 * self.level + number]), 0

    def to(self, device: torch.device) -> Stages:
        return self.__class__()


class WholeStages(Stages):
    def get_batch(self, numbers: Tensor, epoch: int | None) -> tuple[Tensor, Tensor]:
        return 100.0 * self.level + numbers[:, None].float(), torch.zeros_like(numbers)


class Plain(Dataset):
    """A data set whose loop changes what it likes."""

    def __init__(self) -> None:
        self.level = 0
        self.extra: list[int] = []
        self.offsets = torch.zeros(2)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> float:
        return number + LEVELS["now"] + self.level


def inputs(loader: Loader) -> list[float]:
    try:
        return [value for batch in loader for value in batch.inputs.flatten().tolist()]
    finally:
        loader.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Stages, WholeStages, lambda: Subset(Stages(), range(6))])
def test_samples_are_those_of_their_epoch(kind: Any, workers: int) -> None:
    plan = BatchPlan(samples=6, global_batch_size=4, accumulation_steps=1, steps=6, seed=0)
    source = UserDataset(kind(), 0, outputs=2)
    options = LoaderOptions(num_workers=workers)
    expected = [100 * epoch + number for epoch in range(3) for number in epoch_order(0, epoch, 6)]
    assert inputs(Loader(source, plan.from_step(0), "cpu", options)) == expected
    resumed = inputs(Loader(source, plan.from_step(3), "cpu", options))
    assert resumed == expected[10:], "also from the middle of an epoch on"
    source.get_batch(np.array([1]), 2)
    assert source.get_batch(np.array([1]), None)[0].item() == 1, "scored as in epoch 0"


def test_a_copy_on_the_device_is_told_its_epochs() -> None:
    plan = BatchPlan(samples=6, global_batch_size=4, accumulation_steps=1, steps=4, seed=0)
    loader = Loader(
        UserDataset(WholeStages(), 0), plan.from_step(0), "cpu", LoaderOptions(resident=True)
    )
    expected = [100 * epoch + number for epoch in range(2) for number in epoch_order(0, epoch, 6)]
    assert inputs(loader) == expected


def test_a_length_that_changes_is_refused_before_the_run() -> None:
    source = UserDataset(Stages(grows_by=3), 0)
    with pytest.raises(DataError, match="Stages had 6 samples when the run began, but has 9 in"):
        source.check_lengths(5)
    calm = UserDataset(Stages(), 0)
    calm.check_lengths(5)
    assert calm.get_batch(np.array([2]), None)[0].item() == 2


def test_a_length_that_a_hook_changes_is_refused_in_its_epoch() -> None:
    dataset = Stages()
    source = UserDataset(dataset, 0)
    source.get_batch(np.array([0]), 0)
    dataset.samples = 5
    with pytest.raises(DataError, match="had 6 samples when the run began, but has 5 in epoch 1"):
        source.get_batch(np.array([0]), 1)


CHANGES = {
    "level": lambda data: setattr(data, "level", 2),
    "extra": lambda data: data.extra.append(1),
    "offsets": lambda data: data.offsets.add_(1),
    "new": lambda data: setattr(data, "new", 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_attribute_is_named(name: str) -> None:
    dataset = Plain()
    watch = AttributeWatch(Subset(dataset, [0]))
    dataset.level = 0
    watch.check()
    CHANGES[name](dataset)
    with pytest.raises(DataError, match=rf"`dataset\[0\]\.{name}` of Subset was changed"):
        watch.check()


def test_what_reading_changes_is_no_change() -> None:
    dataset = Plain()
    watch = AttributeWatch(dataset)
    UserDataset(dataset, 0, outputs=1).get_batch(np.array([0]), None)
    dataset.level = 1
    watch.check()
    reads = READS.count
    dataset.level = 2
    assert watch.changed() == "level" and READS.count == reads


def test_loader_processes_see_what_was_changed_before_their_pass() -> None:
    dataset = Plain()
    source = UserDataset(dataset, 0, outputs=1)
    source.epochs = None
    options = LoaderOptions(num_workers=1, persistent_workers=True)
    shares = [MicroBatch(None, 0, np.arange(4), 4, 1.0, True)]
    loader = Loader(source, shares, "cpu", options)

    def batch() -> list[float]:
        (only,) = loader
        return only.data.tolist()

    def processes() -> list[int]:
        assert isinstance(loader.stream, WorkerStream)
        batches: Any = loader.stream.data_loader._iterator
        return [worker.pid for worker in batches._workers]

    try:
        assert batch() == [0, 1, 2, 3]
        first = processes()
        assert batch() == [0, 1, 2, 3] and processes() == first, "nothing has changed: they live on"
        dataset.level = 10
        assert batch() == [10, 11, 12, 13]
        LEVELS["now"] = 100
        assert batch() == [110, 111, 112, 113]
    finally:
        LEVELS["now"] = 0
        loader.close()


def test_a_change_while_loader_processes_read_ahead_is_refused() -> None:
    dataset = Plain()
    shares = [MicroBatch(None, step, np.arange(4), 4, 1.0, True) for step in range(6)]
    loader = Loader(UserDataset(dataset, 0, outputs=1), shares, "cpu", LoaderOptions(num_workers=1))
    try:
        batches = iter(loader)
        next(batches)
        dataset.level = 1
        with pytest.raises(
            DataError, match="`level` of Plain was changed, but samples are read from copies"
        ) as caught:
            next(batches)
        assert "set_epoch(epoch)" in caught.value.remedy
    finally:
        loader.close()


def test_a_change_in_one_of_many_parts_is_refused_in_its_pass() -> None:
    parts = [Plain() for _ in range(100)]
    source = UserDataset(ConcatDataset(parts), 0, outputs=1)
    shares = [MicroBatch(None, step, np.arange(4), 4, 1.0, True) for step in range(4)]
    loader = Loader(source, shares, "cpu", LoaderOptions(num_workers=1))
    try:
        batches = iter(loader)
        next(batches)
        parts[7].level = 1
        with pytest.raises(DataError, match=r"`dataset\[7\]\.level` of ConcatDataset was changed"):
            list(batches)
    finally:
        loader.close()


def test_a_change_of_a_large_tensor_is_seen_without_reading_it() -> None:
    held = TensorDataset(torch.zeros(12_000_000))
    assert content_of(held) == "", "48 MB are too much to read"
    large = LargeData()
    first = content_of(held, large)
    assert first and content_of(held, large) == first
    held.tensors[0][7] = 1
    second = content_of(held, large)
    assert second not in ("", first)
    held.tensors[0].data.fill_(3)  # which torch does not count
    assert content_of(held, large) not in ("", second)
    held.tensors = (held.tensors[0].clone(),)
    third = content_of(held, large)
    held.tensors = (held.tensors[0].clone(),)  # in the memory that the last one had, perhaps
    assert content_of(held, large) not in ("", third)
    held.tensors[0].numpy()  # may be changed unseen from now on
    assert content_of(held, large) == ""


def test_arrays_that_nobody_may_write_to_are_not_read(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros(12_000_000, np.float32))
    dataset = Plain()
    large = LargeData()

    def content() -> str:
        return content_of(dataset, large)

    for mode in ("r", "r+", "c"):
        dataset.table = np.load(tmp_path / "rows.npy", mmap_mode=mode)  # type: ignore[attr-defined]
        assert bool(content()) == (mode == "r"), "48 MB are too much to read"
    array = np.arange(20_000_000, dtype=np.float32)
    dataset.table = array  # type: ignore[attr-defined]
    assert content() == ""
    dataset.table = array[::2]  # type: ignore[attr-defined]
    dataset.table.setflags(write=False)  # type: ignore[attr-defined]
    assert content() == "", "40 MB, which the array may write to that this is a view of"
    array.setflags(write=False)
    first = content()
    assert first and content() == first
    dataset.table = array[1::2]  # type: ignore[attr-defined]
    assert content() not in ("", first)


def test_content_follows_all_that_samples_follow_from() -> None:
    dataset = Plain()
    dataset.table = np.zeros(3)  # pyright: ignore[reportAttributeAccessIssue]
    contents = [content_of(dataset)]
    assert contents[0] and content_of(dataset) == contents[0]

    def changed() -> bool:
        contents.append(content_of(dataset))
        return contents[-1] != contents[-2]

    dataset.table[1] = 5  # pyright: ignore[reportAttributeAccessIssue]
    assert changed()
    dataset.transform = lambda row: row  # pyright: ignore[reportAttributeAccessIssue]
    assert changed()
    dataset.transform = lambda row: row + 1  # pyright: ignore[reportAttributeAccessIssue]
    assert changed()
    try:
        LEVELS["now"] = 1
        assert changed()
    finally:
        LEVELS["now"] = 0
    dataset.file = open("/dev/null")  # noqa: PTH123, SIM115  # pyright: ignore[reportAttributeAccessIssue]
    with dataset.file:  # pyright: ignore[reportAttributeAccessIssue]
        assert content_of(dataset) == "", "not to be told"
