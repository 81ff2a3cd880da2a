"""Data: the same order, the same augmented pixels in any process; and sources that read what they
say."""

from __future__ import annotations

import gzip
import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset

from ddp_train.data import augmentation, rng
from ddp_train.data.batch_plan import BatchPlan, MicroBatch, evaluation_batches
from ddp_train.data.config import (
    Cifar10Config,
    DigitsConfig,
    LinearRegressionDataConfig,
    MnistConfig,
    SyntheticConfig,
)
from ddp_train.data.datasets import ArraySource, BatchSource
from ddp_train.data.image_folder.config import ImageFolderConfig
from ddp_train.data.streams.resident import ResidentStream
from ddp_train.data.user_dataset import UserDataset
from ddp_train.distributed.world import World
from ddp_train.engine.loop import evaluate
from ddp_train.errors import ConfigError, DataError
from ddp_train.linux import children_of, state_of
from ddp_train.options.sections import TuningConfig
from ddp_train.resilience.failure import failure_from
from ddp_train.resilience.heartbeat import RankStatus
from tests.support.commands import wait_until
from tests.support.jobs import config_of, datasets_of, job_of, loader_of
from tests.support.ranks import on_ranks

LOADER = {"pin_memory": False, "non_blocking": False, "channels_last": False}


# --- keyed randomness -----------------------------------------------------------------------------


def test_a_draw_depends_on_its_key_and_number_alone() -> None:
    numbers = torch.arange(1000)
    together = rng.uniform(5, numbers, 3)
    alone = torch.cat([rng.uniform(5, number[None], 3) for number in numbers[[17, 500, 999]]])
    assert torch.equal(together[[17, 500, 999]], alone)
    assert not torch.equal(together, rng.uniform(6, numbers, 3))


def test_bits_are_splitmix64() -> None:
    """Against the reference generator (prng.di.unimi.it/splitmix64.c) in plain Python integers."""

    def reference(state: int) -> int:
        mask = (1 << 64) - 1
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    start = rng.hash_key(42)
    expected = [
        reference((start + n * 0x9E3779B97F4A7C15) & (1 << 64) - 1) & (1 << 63) - 1
        for n in range(50)
    ]
    assert rng.hash_bits(42, torch.arange(50)).tolist() == expected


def test_uniform_numbers_are_uniform() -> None:
    draws = rng.uniform(1, torch.arange(100_000), 2)
    assert draws.min() >= 0 and draws.max() < 1
    # standard error of the mean: 0.29 / sqrt(200,000) = 0.00065
    assert abs(draws.mean() - 0.5) < 0.004 and abs(draws.var() - 1 / 12) < 0.002
    assert abs(torch.corrcoef(draws.T)[0, 1]) < 0.015


def test_an_order_is_a_permutation_and_each_epoch_has_its_own() -> None:
    orders = [rng.order(rng.hash_key(0, "order", epoch), 1433) for epoch in range(3)]
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(1433))
    assert not torch.equal(orders[0], orders[1]) and not torch.equal(orders[1], orders[2])


def test_keys_do_not_collide_by_adding_up() -> None:
    keys = {rng.hash_key(seed, "augment", epoch) for seed in range(50) for epoch in range(50)}
    assert len(keys) == 2500
    assert rng.hash_key(1, 2) != rng.hash_key(2, 1)


# --- the plan -------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    samples=st.integers(1, 200),
    per_pass=st.integers(1, 9),
    world=st.integers(1, 5),
    accumulation=st.integers(1, 4),
)
def test_shares_hold_each_sample_once_and_every_rank_takes_part(
    samples: int, per_pass: int, world: int, accumulation: int
) -> None:
    size = per_pass * world * accumulation
    plans = [
        BatchPlan(samples, size, accumulation, -(-samples // size) * 2, 3, rank, world)
        for rank in range(world)
    ]
    of_rank = [list(plan.micro_batches()) for plan in plans]
    assert len({len(micro_batches) for micro_batches in of_rank}) == 1, (
        "every rank makes as many passes"
    )
    seen: dict[int, list[int]] = {0: [], 1: []}
    for micro_batches in zip(*of_rank, strict=True):
        assert (
            len({(micro_batch.step, micro_batch.is_last) for micro_batch in micro_batches}) == 1
        ), "ranks exchange gradients in the same passes"
        for micro_batch in micro_batches:
            assert (
                len(micro_batch.indices) >= 1
                and micro_batch.num_real in (0, len(micro_batch.indices))
                and len(micro_batch.indices) <= per_pass
            )
            assert (micro_batch.scale > 0) == (micro_batch.num_real > 0)
            seen[micro_batch.epoch or 0] += micro_batch.indices[: micro_batch.num_real].tolist()
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(samples))
    # the weights of all samples of a step add up to one, after DDP's division by the world
    for step in range(plans[0].steps):
        weight = (
            sum(
                s.scale * s.num_real
                for micro_batches in of_rank
                for s in micro_batches
                if s.step == step
            )
            / world
        )
        assert abs(weight - 1) < 1e-12
    assert plans[0].samples_seen(plans[0].steps) == 2 * samples


def test_a_plan_continues_where_it_stopped() -> None:
    plan = BatchPlan(101, 24, 2, 20, 0, rank=1, world_size=3)
    whole = list(plan.micro_batches())
    rest = list(plan.micro_batches(7))
    same = [micro_batch for micro_batch in whole if micro_batch.step >= 7]
    assert [(s.step, s.indices.tolist(), s.scale, s.is_last) for s in same] == [
        (s.step, s.indices.tolist(), s.scale, s.is_last) for s in rest
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_evaluation_shares_hold_each_sample_once(world: int) -> None:
    micro_batches = [
        micro_batch
        for rank in range(world)
        for micro_batch in evaluation_batches(101, 10, rank, world)
    ]
    assert sorted(
        number for micro_batch in micro_batches for number in micro_batch.indices.tolist()
    ) == list(range(101))
    assert sorted(micro_batch.step for micro_batch in micro_batches) == list(range(11))


# --- augmentation ---------------------------------------------------------------------------------


def augmented(world: World, workers: int, limit: int) -> dict[tuple[int, int], Tensor]:
    """What samples 17, 40 and 99 become in epochs 0 to 3, as the loader of this rank hands them
    out."""
    config = config_of(
        world,
        data={"name": "digits", "limit": limit, "augment": True},
        train={"global_batch_size": 48, "epochs": 4},
        tuning={"num_workers": workers},
    )
    seen = {}
    for batch in job_of(config, world).batches:
        for row, number in enumerate(
            batch.micro_batch.indices[: batch.micro_batch.num_real].tolist()
        ):
            if number in (17, 40, 99):
                seen[batch.micro_batch.epoch, number] = batch.inputs[row].clone()
    return seen


@pytest.mark.slow
def test_sample_is_one_tensor_on_any_rank_worker_and_world() -> None:
    runs = []
    for ranks, workers in ((1, 0), (1, 3), (3, 1)):
        merged: dict[tuple[int, int], Tensor] = {}
        for part in on_ranks(ranks, augmented, workers, 101):
            assert not merged.keys() & part.keys()
            merged |= part
        runs.append(merged)
    assert len(runs[0]) == 12
    for run in runs[1:]:
        assert run.keys() == runs[0].keys()
        assert all(torch.equal(run[key], runs[0][key]) for key in run)
    versions = {tuple(runs[0][epoch, 17].flatten().tolist()) for epoch in range(4)}
    assert len(versions) > 1, "epochs draw anew"


def loader_processes(world: World) -> tuple[int, int, int]:
    """While it trains, between two evaluations, and at the end."""
    config = config_of(
        world,
        data={"name": "digits", "limit": 101},
        train={"global_batch_size": 48, "epochs": 2},
        tuning={"num_workers": 2},
    )
    job = job_of(config, world)
    (training,) = {len(children_of(os.getpid())) for _ in job.batches}
    evaluate(job.evaluation)
    between = len(children_of(os.getpid()))
    job.evaluation.close()
    return training, between, len(children_of(os.getpid()))


@pytest.mark.slow
def test_loader_processes_end_when_they_are_not_needed_any_more() -> None:
    """Left to the garbage collector at the end of a run, each was waited for in vain, for ten
    seconds."""
    assert on_ranks(1, loader_processes) == [(2, 2, 0)]


def test_shift_moves_and_fills_with_zeros() -> None:
    images = torch.arange(1.0, 17).view(1, 1, 4, 4).repeat(3, 1, 1, 1)
    draws = torch.tensor([[0.5, 0.5], [0.0, 0.0], [0.99, 0.5]])
    moved = augmentation.shift(images, draws, by=1)
    assert torch.equal(moved[0], images[0])
    assert torch.equal(moved[1, 0, 1:, 1:], images[1, 0, :-1, :-1]) and moved[1, 0, 0].sum() == 0
    assert torch.equal(moved[2, 0, :-1], images[2, 0, 1:]) and moved[2, 0, -1].sum() == 0


def test_flip_mirrors_half() -> None:
    images = torch.rand(2, 3, 4, 5)
    flipped = augmentation.flip(images, torch.tensor([0.2, 0.7]))
    assert torch.equal(flipped[0], images[0].flip(-1)) and torch.equal(flipped[1], images[1])


@given(
    st.integers(1, 600),
    st.integers(1, 600),
    st.lists(st.floats(0, 0.999999), min_size=4, max_size=4),
)
def test_a_crop_lies_inside_the_image(width: int, height: int, draws: list[float]) -> None:
    top, left, crop_height, crop_width = augmentation.random_crop(width, height, draws)
    assert crop_height >= 1 and crop_width >= 1 and top >= 0 and left >= 0
    assert top + crop_height <= height and left + crop_width <= width


# --- sources --------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 5, 7), (1, 28, 28), (16,), (5,)], ids=str)
@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
def test_samples_are_copied_in_words_bit_for_bit(
    shape: tuple[int, ...], kind: torch.dtype, channels_last: bool
) -> None:
    held = torch.randint(256, (40, *shape), generator=torch.Generator().manual_seed(0)).to(kind)
    if kind == torch.uint8 and len(shape) == 3:
        means = ((0.4,) * shape[0], (0.3,) * shape[0])
    else:
        means = ((), ())
    source = (
        ArraySource(held, torch.arange(40), *means)
        .select(np.arange(39))
        .to(torch.device("cpu"), channels_last)
    )
    indices = np.array([38, 0, 7, 7, 21])
    inputs, targets = source.get_batch(indices, None)
    expected = held[indices]
    if means[0]:
        expected = expected.float() * (1 / (255 * torch.tensor(0.3))) - torch.tensor(
            0.4
        ) / torch.tensor(0.3)
    assert torch.equal(inputs, expected) and inputs.dtype == expected.dtype
    assert targets.tolist() == indices.tolist()
    if len(shape) == 3:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        assert inputs.is_contiguous(memory_format=layout)


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


def everything(source: BatchSource) -> tuple[Tensor, Tensor]:
    return source.get_batch(np.arange(len(source)), None)


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    train, test = datasets_of(DigitsConfig(), 0)
    assert (len(train), len(test), train.outputs) == (1433, 364, 10)
    images = torch.cat([everything(train)[0], everything(test)[0]]).view(-1, 64)
    theirs = torch.from_numpy(load_digits().data).float() / 8 - 1
    assert sorted(map(tuple, images.tolist())) == sorted(map(tuple, theirs.tolist()))
    assert (
        len(
            set(map(tuple, everything(train)[0].flatten(1).tolist()))
            & set(map(tuple, everything(test)[0].flatten(1).tolist()))
        )
        == 0
    )
    assert everything(test)[1].bincount().min() >= 34, "every class has its share"


def write_idx(path: Path, array: np.ndarray) -> None:
    """The format of MNIST (yann.lecun.com/exdb/mnist): magic number with type and dimensions,
    sizes, bytes."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(
        size.to_bytes(4, "big") for size in array.shape
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def test_mnist_files_are_read_and_normalised(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (30, 28, 28))
    labels = generator.integers(0, 10, 30)
    raw = tmp_path / "MNIST" / "raw"
    for split, part in (("train", slice(0, 20)), ("t10k", slice(20, 30))):
        write_idx(raw / f"{split}-images-idx3-ubyte", images[part])
        write_idx(raw / f"{split}-labels-idx1-ubyte", labels[part])
    train, test = datasets_of(MnistConfig(root=str(tmp_path)), 0)
    inputs, targets = train.get_batch(np.array([3, 7]), None)
    expected = (torch.from_numpy(images[[3, 7]]).float()[:, None] / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(inputs, expected)
    assert targets.tolist() == labels[[3, 7]].tolist() and len(test) == 10


def test_a_truncated_mnist_file_is_named_before_anything_starts(tmp_path: Path) -> None:
    for split, count in (("train", 30), ("t10k", 5)):
        write_idx(
            tmp_path / f"MNIST/raw/{split}-images-idx3-ubyte", np.zeros((count, 28, 28), np.uint8)
        )
        write_idx(tmp_path / f"MNIST/raw/{split}-labels-idx1-ubyte", np.zeros(count, np.uint8))
    config = config_of(World(), data={"name": "mnist", "root": str(tmp_path), "download": True})
    assert list(config.data.missing(config)) == []
    images = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    for length in (1000, 10, 2):
        images.write_bytes(images.read_bytes()[:length])
        (problem,) = config.data.missing(config)
        assert f"{images} is truncated; remove it" in str(problem)


def test_numbers_in_a_tensor_are_a_regression() -> None:
    source = UserDataset([(torch.zeros(3), torch.tensor(0.5))], seed=0)
    assert source.outputs == 1
    with pytest.raises(ConfigError, match="needs an attribute `classes`"):
        _ = UserDataset([(torch.zeros(3), torch.tensor(1))], seed=0).outputs


def test_cifar_without_files_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.root="):
        datasets_of(Cifar10Config(root=str(tmp_path)), 0)


@pytest.mark.slow
def test_an_image_folder_is_read_and_a_spoilt_file_is_named(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            for number in range(3):
                path = tmp_path / split / label / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(path)
    train, test = datasets_of(ImageFolderConfig(root=str(tmp_path), image_size=16), 0)
    inputs, targets = train.get_batch(np.array([0, 5]), 0)
    assert inputs.shape == (2, 3, 16, 16) and targets.tolist() == [0, 1] and train.outputs == 2
    assert torch.equal(train.get_batch(np.array([5]), 0)[0][0], inputs[1])
    assert not torch.equal(train.get_batch(np.array([5]), 1)[0][0], inputs[1])
    assert torch.equal(test.get_batch(np.array([1]), 0)[0], test.get_batch(np.array([1]), 1)[0]), (
        "the test set is not augmented"
    )
    (tmp_path / "train" / "dog" / "2.png").write_bytes(gzip.compress(b"no image"))
    with pytest.raises(DataError, match=r"2\.png \(sample 5\)"):
        train.get_batch(np.array([5]), 0)
    for workers in (
        0,
        1,
    ):  # in a process of the loader, too, the error keeps its type and its remedy
        ((kind, text, remedy, _),) = on_ranks(1, failing, train, 5, workers)
        assert (kind, remedy) == ("DataError", "repair or remove the file")
        assert "2.png (sample 5) cannot be decoded" in text


def failing(
    world: World, source: BatchSource, number: int, workers: int
) -> tuple[str, str, str, str]:
    """What a loader raises for a sample: its type, its text, its remedy, and what the FATAL line
    says."""
    tuning = config_of(world, tuning={"num_workers": workers}).tuning
    micro_batch = MicroBatch(0, 0, np.array([number]), 1, 1.0, True)
    try:
        next(iter(loader_of(source, [micro_batch], tuning, "cpu")))
    except Exception as error:  # noqa: BLE001  it is what the test looks at
        failure = failure_from(error, 0, RankStatus(), Path("log"), "")
        return type(error).__name__, str(error), getattr(error, "remedy", ""), failure.detail
    raise AssertionError("nothing was raised")


class Broken:
    """A source with an error of its own."""

    outputs = 2

    def __len__(self) -> int:
        return 1

    def get_batch(self, indices: np.ndarray, epoch: int | None) -> tuple[Tensor, Tensor]:
        raise RuntimeError("broken sample 77")


@pytest.mark.slow
def test_exception_in_a_loader_process_is_told_by_its_last_line() -> None:
    ((kind, text, _, detail),) = on_ranks(1, failing, Broken(), 0, 1)
    assert (kind, detail) == ("RuntimeError", "RuntimeError: broken sample 77")
    assert "in fetch" in text, "the traceback that leads to the line"
    ((_, _, _, detail),) = on_ranks(1, failing, UserDataset(Spoilt(), 0), 3, 1)
    assert detail == "ValueError: bad row (sample 3 of Spoilt)"


class Spoilt(torch.utils.data.Dataset):
    """A foreign dataset one of whose samples raises."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        if number == 3:
            raise ValueError("bad row")
        return torch.zeros(2), 0


def test_generated_sets_depend_on_the_seed_alone() -> None:
    for config in (
        SyntheticConfig(samples=20, test_samples=5),
        LinearRegressionDataConfig(samples=20, test_samples=5),
    ):
        one, again, other = (everything(datasets_of(config, seed)[0])[0] for seed in (0, 0, 1))
        assert torch.equal(one, again) and not torch.equal(one, other)


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


# --- the loader -----------------------------------------------------------------------------------


def test_a_loader_hands_out_its_shares_in_order_and_again() -> None:
    train, _ = datasets_of(DigitsConfig(limit=50), 0)
    micro_batches = evaluation_batches(50, 8, 0, 1)
    loader = loader_of(train, micro_batches, TuningConfig(num_workers=2, **LOADER), "cpu")
    for _ in range(2):
        assert [batch.micro_batch.indices.tolist() for batch in loader] == [
            micro_batch.indices.tolist() for micro_batch in micro_batches
        ]


def test_nested_inputs_travel_through_the_loader() -> None:
    class Nested:
        outputs = 1

        def __len__(self) -> int:
            return 4

        def get_batch(self, indices: np.ndarray, epoch: int | None) -> tuple[dict, Tensor]:
            return {
                "a": torch.ones(len(indices)),
                "b": [torch.zeros(len(indices), 2)],
            }, torch.zeros(len(indices))

    tuning = TuningConfig(num_workers=0, precision="fp64", **LOADER)
    (batch,) = loader_of(Nested(), [MicroBatch(None, 0, np.arange(3), 3, 1.0, True)], tuning, "cpu")
    assert batch.inputs["a"].dtype == torch.float64 and batch.inputs["b"][0].shape == (3, 2)


@pytest.mark.parametrize("augment", [False, True])
def test_a_resident_data_set_gives_the_same_batches(augment: bool) -> None:
    """Cut out of groups that end with the memory for one or with the epoch; in any precision."""
    train, _ = datasets_of(DigitsConfig(augment=augment), seed=3)
    plan = BatchPlan(
        samples=len(train),
        global_batch_size=100,
        accumulation_steps=2,
        steps=40,
        seed=3,
        rank=1,
        world_size=3,
    )
    for precision in ("fp32", "fp64"):
        tuning = TuningConfig(num_workers=0, **LOADER | {"precision": precision})
        made = [
            loader_of(train, list(plan.micro_batches()), tuning, "cpu", resident=r)
            for r in (False, True)
        ]
        held = made[1].stream
        assert isinstance(held, ResidentStream)
        held.samples_per_group = 100
        assert len(list(held.groups())) > 2 * 3, "several groups in each epoch"
        for batch, other in zip(*made, strict=True):
            assert (
                batch.micro_batch is other.micro_batch
                or batch.micro_batch.indices.tolist() == other.micro_batch.indices.tolist()
            )
            assert torch.equal(batch.inputs, other.inputs) and torch.equal(
                batch.targets, other.targets
            )
            assert batch.inputs.dtype == other.inputs.dtype


def test_a_step_knows_whether_its_batch_is_whole() -> None:
    for samples in (95, 96, 97):
        plan = BatchPlan(
            samples=samples, global_batch_size=24, accumulation_steps=1, steps=20, seed=0
        )
        assert [plan.is_full(step) for step in range(20)] == [
            len(plan.global_batch(step)) == 24 for step in range(20)
        ]


def test_fewer_samples_than_classes_leave_no_class_out() -> None:
    train, test = datasets_of(
        SyntheticConfig(samples=4, test_samples=4, classes=10, image_size=2), 0
    )
    assert (train.outputs, test.outputs) == (10, 10)
    assert (
        test.get_batch(np.arange(4), None)[1].max() > train.get_batch(np.arange(4), None)[1].max()
    )


def test_a_part_of_a_data_set_keeps_its_classes() -> None:
    source = ArraySource(torch.arange(6.0)[:, None], torch.tensor([0, 1, 0, 1, 2, 2]))
    part = source.select(np.arange(3))
    assert (len(part), part.outputs, len(source)) == (3, 3, 6)
    assert part.to(torch.device("cpu")).get_batch(np.array([2]), None)[0].tolist() == [[2.0]]


# --- processes of the loader ----------------------------------------------------------------------


def _hold_a_loader(pipe: Connection) -> None:
    """Tells the process id of its loader, and waits."""
    multiprocessing.set_start_method("forkserver", force=True)  # the default from Python 3.14 on
    data = {"name": "digits", "limit": 96, "placement": "host"}
    single = {"name": "single"}
    config = config_of(World(), strategy=single, data=data, tuning={"num_workers": 1})
    batches = iter(job_of(config, World()).batches)
    next(batches)
    (loader,) = multiprocessing.active_children()
    pipe.send(loader.pid)
    time.sleep(60)


@pytest.mark.slow
def test_loader_process_ends_with_its_rank_below_a_fork_server() -> None:
    server = multiprocessing.get_context("forkserver")
    ours, theirs = server.Pipe(duplex=False)
    rank = server.Process(target=_hold_a_loader, args=(theirs,))
    rank.start()
    try:
        loader = ours.recv()
        assert loader not in children_of(rank.pid or 0), "it is a child of the server"
    finally:
        rank.kill()
    wait_until(lambda: state_of(loader) in ("", "Z"), "end of the loader process", 10)
