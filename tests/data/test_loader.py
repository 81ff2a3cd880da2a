"""Batches in order and again, the same from any number of loader processes."""

from __future__ import annotations

import gzip
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset

from ddp_train.data.batch_plan import BatchPlan, MicroBatch, evaluation_batches
from ddp_train.data.config import (
    DigitsConfig,
)
from ddp_train.data.datasets import BatchSource
from ddp_train.data.image_folder.config import ImageFolderConfig
from ddp_train.data.loader import Loader, LoaderOptions
from ddp_train.data.numbered_stream import NumberedStream
from ddp_train.data.streams.resident import ResidentStream
from ddp_train.data.user_dataset import UserDataset
from ddp_train.distributed.world import World
from ddp_train.engine.loop import evaluate
from ddp_train.errors import DataError
from ddp_train.linux import children_of, state_of
from ddp_train.options.sections import TuningConfig
from ddp_train.resilience.failure import failure_from
from ddp_train.resilience.heartbeat import RankStatus
from tests.data.test_user_dataset import Spoilt
from tests.support.commands import wait_until
from tests.support.jobs import config_of, datasets_of, job_of, loader_of
from tests.support.ranks import forked_rank, on_ranks

LOADER = {"pin_memory": False, "non_blocking": False, "channels_last": False}


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


def test_a_loader_hands_out_its_shares_in_order_and_again() -> None:
    train, _ = datasets_of(DigitsConfig(limit=50), 0)
    micro_batches = evaluation_batches(50, 8, 0, 1)
    loader = loader_of(train, micro_batches, TuningConfig(num_workers=2, **LOADER), "cpu")
    for _ in range(2):
        assert [batch.micro_batch.indices.tolist() for batch in loader] == [
            micro_batch.indices.tolist() for micro_batch in micro_batches
        ]


class Counting(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(20.0).view(20, 1))


def test_a_batch_without_samples_reads_little_of_a_stream() -> None:
    source = UserDataset(NumberedStream(Counting(), seed=0), seed=0)
    stand_in = MicroBatch(0, 3, np.array([17]), num_real=0, scale=0.0, is_last=True)
    options = LoaderOptions(num_workers=1)
    (batch,) = Loader(source, [stand_in], "cpu", options, has_empty_batches=True)
    assert batch.data.shape == (0, 1)
    assert source.dataset.place == 0, "a loader process has read the stream"


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


def _hold_a_loader(world: World, place: Path) -> None:
    """Writes the process ids of itself and its loader, and waits."""
    multiprocessing.set_start_method("forkserver", force=True)  # the default from Python 3.14 on
    data = {"name": "digits", "limit": 96, "placement": "host"}
    single = {"name": "single"}
    config = config_of(world, strategy=single, data=data, tuning={"num_workers": 1})
    batches = iter(job_of(config, world).batches)
    next(batches)
    (loader,) = multiprocessing.active_children()
    (place / "pids.part").write_text(f"{os.getpid()} {loader.pid}")
    (place / "pids.part").rename(place / "pids")
    time.sleep(60)


@pytest.mark.slow
def test_loader_process_ends_with_its_rank_below_a_fork_server(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    work = (World(), "cpu", str(tmp_path), _hold_a_loader, (tmp_path,))
    with ours, theirs, forked_rank(theirs, work, tmp_path / "work") as process:
        wait_until((tmp_path / "pids").exists, "the loader process", 60)
        rank, loader = map(int, (tmp_path / "pids").read_text().split())
        assert loader not in children_of(rank), "it is a child of the server"
        signal.pidfd_send_signal(process, signal.SIGKILL)
    wait_until(lambda: state_of(loader) in ("", "Z"), "end of the loader process", 10)
