"""Any map-style data set, whose draws are keyed and whose errors name the sample."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset

from ddp_train.assembly.data_sets import open_datasets
from ddp_train.data import rng
from ddp_train.data.batch_plan import BatchPlan, MicroBatch
from ddp_train.data.loader import Loader, LoaderOptions
from ddp_train.data.rng import keyed_generators
from ddp_train.data.sample_tensors import as_tensors
from ddp_train.data.user_dataset import UserDataset
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, DataError
from ddp_train.resilience.failure import failure_from
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.tensor_tree import tensors
from tests.support.jobs import config_of, loader_of
from tests.support.ranks import on_ranks
from tests.support.user_data import PLAIN, V2, batch, joined, opened


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        yield torch.zeros(3), 0


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "data._target_: list has no samples"),
        (Stream(), "Stream has no __getitem__ or no __len__"),
        (
            [(object(), 0)],
            "cannot be put into one batch: default_collate: batch must contain tensors",
        ),
        (
            [(torch.zeros(3), 0), (torch.zeros(2), 0)],
            "samples of list cannot be put into one batch: stack expects",
        ),
    ],
    ids=["empty", "iterable", "object", "shapes"],
)
def test_what_is_no_data_set_is_told(dataset: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        UserDataset(dataset, 0).get_batch(np.arange(len(dataset)), None)


class Spoilt(torch.utils.data.Dataset):
    """A foreign dataset one of whose samples raises."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        if number == 3:
            raise ValueError("bad row")
        return torch.zeros(2), 0


class Noisy(torch.utils.data.Dataset):
    """A foreign dataset that draws from torch's and Python's global generators."""

    classes = ("a", "b")

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.rand(2) + random.random(), number % 2


def test_a_foreign_dataset_that_raises_is_told_with_the_sample() -> None:
    with pytest.raises(ValueError, match="bad row") as caught:
        UserDataset(Spoilt(), 0).get_batch(np.array([2, 3]), 0)
    detail = failure_from(caught.value, 0, RankStatus(), Path("log"), "").detail
    assert detail == "ValueError: bad row (sample 3 of Spoilt)"


def test_draws_of_a_foreign_data_set_are_keyed() -> None:
    source = UserDataset(Noisy(), seed=3)
    torch.manual_seed(0)
    expected_next = torch.rand(1)
    torch.manual_seed(0)
    together = source.get_batch(np.array([1, 2, 3]), 0)[0]
    assert torch.equal(torch.rand(1), expected_next)
    assert torch.equal(source.get_batch(np.array([2]), 0)[0][0], together[1])
    assert not torch.equal(source.get_batch(np.array([2]), 1)[0][0], together[1])
    assert source.outputs == 2


def test_draws_are_those_of_torch_manual_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = rng.hash_key(3, "augment", 0, 2)
    torch.manual_seed(key)
    random.seed(key)
    expected = Noisy()[2][0]
    monkeypatch.setattr(
        traceback, "format_stack", lambda *_: pytest.fail("torch noted a stack for a device")
    )
    assert torch.equal(UserDataset(Noisy(), seed=3).get_batch(np.array([2]), 0)[0][0], expected)


RANDOM = [
    {"_target_": f"{V2}.RandAugment", "interpolation": "bilinear"},
    {"_target_": f"{V2}.RandomResizedCrop", "size": 8},
    {
        "_target_": f"{V2}.RandomApply",
        "transforms": [{"_target_": f"{V2}.ColorJitter", "brightness": 0.5}],
        "p": 0.5,
    },
    f"{V2}.ToImage",
    {"_target_": f"{V2}.ToDtype", "dtype": "torch.float32", "scale": True},
    {"_target_": f"{V2}.RandomErasing", "p": 0.9},
    "tests.support.user_data.Noise",
]


FAKE = {
    "_target_": "torchvision.datasets.FakeData",
    "size": 21,
    "image_size": [3, 12, 12],
    "num_classes": 3,
    "splits": {"test": {"size": 4, "random_offset": 21}},
    "transform": RANDOM,
    "test_transform": [{"_target_": f"{V2}.CenterCrop", "size": 8}],
}


def pixels(world: World, workers: int, first_step: int = 0) -> dict[tuple[int | None, int], bytes]:
    """The training inputs of two epochs, by epoch and sample."""
    config = config_of(world, data=FAKE, tuning={"num_workers": workers}, **PLAIN)
    plan = BatchPlan(21, 6, 1, 8, config.seed, world.rank, world.size)
    micro_batches = list(plan.micro_batches(first_step))
    found = {}
    for given in loader_of(open_datasets(config).train, micro_batches, config.tuning, "cpu"):
        for row, number in enumerate(
            given.micro_batch.indices[: given.micro_batch.num_real].tolist()
        ):
            found[given.micro_batch.epoch, number] = given.inputs[row].numpy().tobytes()
    return found


@pytest.mark.slow
def test_transforms_give_the_same_pixels_on_any_world() -> None:
    alone = pixels(World(), 0)
    assert len(alone) == 42 and len(set(alone.values())) == 42, "other pixels in each epoch"
    assert pixels(World(), 1) == pixels(World(), 2) == alone
    parts = on_ranks(3, pixels, 0)
    assert {key: value for part in parts for key, value in part.items()} == alone
    resumed = pixels(World(), 0, 5)
    assert resumed.items() <= alone.items() and len(resumed) == 21 - 6, (
        "the second step of the second epoch on"
    )


def test_transforms_leave_the_generators_of_training_alone() -> None:
    train, test, _ = open_datasets(config_of(World(), data=FAKE, **PLAIN))[:3]
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    first = batch(train, 3)[0]
    assert (train.outputs, test.outputs) == (3, 3)
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected
    assert torch.equal(batch(train, 5, 3)[0][1], first[0]) and not torch.equal(
        batch(train, 3, epoch=1)[0], first
    )
    scored = batch(test, 0, 1, epoch=None)[0]
    assert scored.shape == (2, 3, 8, 8) and scored.min() >= 0 and scored.max() <= 1
    with keyed_generators() as seed:
        seed(7)
        assert abs(torch.rand(1, dtype=torch.float64).item() - np.random.rand()) > 1e-6, (
            "not one sequence for both"
        )


class Ending:
    """Its sample 7 is an iterator that is exhausted."""

    classes = ("left", "right")

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return next(iter([torch.zeros(2)] * (number != 7))), 0


@pytest.mark.parametrize("workers", [0, 1])
def test_sample_with_stop_iteration_does_not_end_the_data(workers: int) -> None:
    """The evaluation was taken for one that was stopped, and the run left with 75: come back
    later."""
    shares = [MicroBatch(None, step, np.arange(4) + 4 * step, 4, 1.0, True) for step in range(3)]
    loader = Loader(UserDataset(Ending(), 0), shares, "cpu", LoaderOptions(num_workers=workers))
    try:
        with pytest.raises(DataError, match="Ending raised StopIteration for sample 7"):
            list(loader)
    finally:
        loader.close()
    exhausted = UserDataset(Ending(), 0, collate=lambda samples: next(iter(())))
    with pytest.raises(DataError, match="cannot be put into one batch: StopIteration"):
        batch(exhausted, 1)


def test_rows_of_tables_become_tensors() -> None:
    rows = [
        {"ids": [1, 2, n], "image": Image.new("L", (3, 2), 255), "label": n, "text": "a"}
        for n in range(3)
    ]
    whole = batch(UserDataset(rows, 0), 0, 2)
    assert whole["ids"].tolist() == [[1, 2, 0], [1, 2, 2]] and whole["image"].shape == (2, 1, 2, 3)
    images, labels = batch(UserDataset(rows, 0, fields=["image", "label"]), 1, 2)
    assert (images.unique().tolist(), labels.tolist()) == ([1.0], [1, 2])
    with pytest.raises(
        ConfigError,
        match=r"data\.fields=\[image,lable\]: a sample of list has no lable; it has ids, im",
    ):
        batch(UserDataset(rows, 0, fields=["image", "lable"]), 0)
    with pytest.raises(DataError, match="PIL's mode P, whose values"):
        as_tensors((Image.new("P", (2, 2)), 0))
    pair = [(torch.ones(2), 1), (torch.zeros(2), 0)]
    assert (
        batch(
            opened(
                "tests.support.user_data.Rows",
                validation=0.5,
                collate_fn="tests.support.user_data.joined",
            )[0],
            0,
        )[0].ndim
        == 1
    )
    assert batch(UserDataset(pair, 0, collate=joined), 0, 1)[1].tolist() == [1, 0]
    given = UserDataset(
        [(Image.new("L", (3, 2)), 1)],
        0,
        collate=lambda samples: torch.tensor([samples[0][0].width]),
    )
    assert next(tensors(batch(given, 0))).item() == 3, (
        "a function of one's own gets samples as they are"
    )


def test_hugging_faces_data_sets_are_map_style(tmp_path: Path) -> None:
    reason = "pip install datasets: a recipe of docs/guides/data.md, no dependency"
    datasets = pytest.importorskip("datasets", reason=reason)
    for name, rows in (("train", 8), ("test", 4)):
        table = datasets.Dataset.from_dict(
            {"x": [[n / 2, 1.0] for n in range(rows)], "y": [n % 2 for n in range(rows)]}
        )
        table.to_parquet(tmp_path / f"{name}.parquet")
        table.save_to_disk(tmp_path / name)
    files = {name: str(tmp_path / f"{name}.parquet") for name in ("train", "test")}
    parquet = {"path": "parquet", "data_files": files, "cache_dir": str(tmp_path / "cache")}
    places = {name: {"dataset_path": str(tmp_path / name)} for name in ("train", "test")}
    for target, keys in (
        ("datasets.load_dataset", {"arguments": parquet, "validation": 0.0}),
        ("datasets.load_from_disk", {"splits": places}),
    ):
        train, test, _ = opened(target, fields=["x", "y"], outputs=2, **keys)[:3]
        inputs, labels = batch(train, 1, 6)
        assert (len(train), len(test), inputs.tolist(), labels.tolist()) == (
            8,
            4,
            [[0.5, 1], [3, 1]],
            [1, 0],
        )
    with pytest.raises(ConfigError, match=r"split='validation' failed: .*; use data\.validation=0"):
        opened("datasets.load_dataset", arguments=parquet)
