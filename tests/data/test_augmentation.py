"""Mixup, CutMix and random erasing: torchvision's formulas, and the same batches on any number of
processes."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import v2

from ddp_train.assembly.batches import loader_options
from ddp_train.data import augmentation
from ddp_train.data.augmentation import ERASING_TRIES, Erasing, erase, erasing_boxes
from ddp_train.data.batch_plan import BatchPlan, MicroBatch
from ddp_train.data.datasets import ArraySource, BatchSource
from ddp_train.data.image_folder.config import ImageFolderConfig
from ddp_train.data.loader import Loader
from ddp_train.data.mix import Mix, mix_of
from ddp_train.data.rng import uniform
from ddp_train.data.user_dataset import UserDataset
from ddp_train.distributed.world import World
from ddp_train.engine.loop import fit
from ddp_train.errors import ConfigError, DataError
from ddp_train.options.schema import Config
from ddp_train.options.sections import TuningConfig
from ddp_train.tasks.builtin import Classification
from tests.support.jobs import config_of, datasets_of, job_of, largest_difference
from tests.support.ranks import on_ranks

SAMPLES = 29
GLOBAL_BATCH = 16
STEPS = 6
CLASSES = 4
SMOOTHING = 0.1
"""A prime: the last global batch has 13 of 16 samples, which 2, 3 and 4 processes share
unevenly."""
MIX = Mix(seed=0, classes=CLASSES, mixup=0.4, cutmix=1.0)


def images() -> ArraySource:
    """Shifted, flipped and erased at random."""
    draw = torch.Generator().manual_seed(0)
    moved = functools.partial(augmentation.move, by=1, flips=True)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=draw)
    source = ArraySource(torch.randn(SAMPLES, 2, 8, 6, generator=draw), labels, augmentation=moved)
    source.erasing = Erasing(0.5, seed=0)
    return source


def by_torchvision(inputs: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """The same draws in torchvision's own transforms, of a whole global batch."""
    targets = nn.functional.one_hot(labels, CLASSES).to(inputs.dtype)
    share, centre = MIX.mixture(step)
    kind = v2.MixUp if centre is None else v2.CutMix
    transform: Any = kind(num_classes=CLASSES)
    transform._dist = mock.Mock(**{"sample.return_value": torch.tensor(share, dtype=torch.float64)})
    places = iter(centre[::-1] if centre else ())  # it draws the column first
    with mock.patch.object(
        torch, "randint", lambda high, size: torch.tensor([int(next(places) * high)])
    ):
        params = transform.make_params([inputs])
    params |= {"labels": targets, "batch_size": len(inputs)}
    return transform.transform(inputs, params), transform.transform(targets, params)


# --- mixing ---------------------------------------------------------------------------------------


def test_a_global_batch_is_mixed_as_by_torchvision() -> None:
    draw = torch.Generator().manual_seed(1)
    kinds = set()
    labels = torch.arange(7) % CLASSES
    for step in range(40):
        inputs = torch.randn(7, 2, 9, 5, generator=draw, dtype=torch.float64)
        fetched = MicroBatch(0, step, np.array([6, *range(7)]), 7, 1.0, True)
        (mixed, targets), micro_batch = MIX(
            (inputs[fetched.indices], labels[fetched.indices]), fetched
        )
        expected, parts = by_torchvision(inputs, labels, step)
        torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-14)
        torch.testing.assert_close(targets, parts, rtol=0, atol=1e-14)
        assert micro_batch.indices.tolist() == list(range(7)) and mixed.shape == inputs.shape
        kinds.add(MIX.mixture(step).centre is None)
    assert kinds == {True, False}


def test_what_is_drawn_depends_on_seed_and_step_alone() -> None:
    drawn = [MIX.mixture(step) for step in range(2_000)]
    assert (
        drawn == [Mix(0, 9, 0.4, 1.0).mixture(step) for step in range(2_000)]
        and len(set(drawn)) == 2_000
    )
    assert MIX.mixture(0) != Mix(1, CLASSES, 0.4, 1.0).mixture(0)
    cut = [one.share for one in drawn if one.centre]
    mixed = [one.share for one in drawn if one.centre is None]
    assert 0.45 < len(cut) / 2_000 < 0.55
    # The variance of Beta(a, a) is 1 / (4 (2 a + 1)): 0.139 for 0.4, 0.083 for 1.
    assert np.mean(cut) == pytest.approx(0.5, abs=0.03) and np.var(cut) == pytest.approx(
        0.083, abs=0.01
    )
    assert np.mean(mixed) == pytest.approx(0.5, abs=0.04) and np.var(mixed) == pytest.approx(
        0.139, abs=0.01
    )
    assert all(Mix(0, 9, 0.4, 0.0).mixture(step).centre is None for step in range(9))
    assert all(Mix(0, 9, 0.0, 0.4).mixture(step).centre for step in range(9))


def made(world: World, accumulation: int, **more: Any) -> Any:
    source = images()
    plain = images()
    plain.erasing = None
    config = config_of(
        world,
        **{
            "model": {"name": "mlp", "hidden": 8},
            "data": {"name": "synthetic", "mixup": MIX.mixup, "cutmix": MIX.cutmix},
            "task": {"name": "classification", "label_smoothing": SMOOTHING},
            "train": {
                "global_batch_size": GLOBAL_BATCH,
                "accumulation_steps": accumulation,
                "max_steps": STEPS,
                "epochs": 3,
            },
            "optimizer": {"name": "sgd", "lr": 0.1},
            "schedule": {"name": "constant"},
            "tuning": {"precision": "fp64", "num_workers": 0},
            **more,
        },
    )
    return job_of(config, world, (source, plain))


def ladder(world: World) -> list[dict[str, Tensor]]:
    found = []
    for accumulation in (1, 2):
        job = made(world, accumulation)
        fit(job)
        found.append(
            {name: tensor.clone() for name, tensor in job.module.model.state_dict().items()}
        )
    return found


def by_hand() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Plain PyTorch and torchvision: each global batch whole, on one process. The weights before
    and after."""
    job = made(World(), 1, strategy={"name": "single"})
    model = job.module.model
    before = {name: tensor.clone() for name, tensor in job.module.model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        inputs, labels = images().get_batch(
            job.plan.global_batch(step), step // job.plan.steps_per_epoch
        )
        inputs, targets = by_torchvision(inputs.double(), labels, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets, label_smoothing=SMOOTHING).backward()
        optimizer.step()
    return before, model.state_dict()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_same_weights_on_any_number_of_processes_as_by_hand() -> None:
    before, expected = by_hand()
    assert largest_difference(before, expected) > 1e-2, "the comparison would be idle"
    for ranks in (1, 2, 3, 4):
        for found in on_ranks(ranks, ladder, timeout_seconds=200):
            for accumulation, weights in zip((1, 2), found, strict=True):
                assert largest_difference(weights, expected) < 1e-10, (ranks, accumulation)


def test_every_part_of_a_batch_knows_the_sample_before_it() -> None:
    for ranks, accumulation, shards in ((1, 1, None), (3, 2, None), (4, 1, None), (2, 1, 8)):
        before = {}
        for rank in range(ranks):
            plan = BatchPlan(SAMPLES, GLOBAL_BATCH, accumulation, 4, 0, rank, ranks, shards)
            for one in plan.micro_batches():
                if one.num_real:
                    pairs = zip(one.indices, [one.sample_before, *one.indices[:-1]], strict=True)
                    before |= {(one.step, int(mine)): int(partner) for mine, partner in pairs}
        for step in range(4):
            whole = plan.global_batch(step)
            for mine, partner in zip(whole, np.roll(whole, 1), strict=True):
                assert before.pop((step, int(mine))) == partner
        assert not before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    numbers = np.random.default_rng(0)
    for split, count in (("train", 13), ("val", 2)):
        for number in range(count):
            path = root / split / "ab"[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(numbers.integers(0, 255, (20, 30, 3), dtype=np.uint8)).save(path)
    return root


def batches(
    source: BatchSource, mix: Mix | None, ranks: int, resident: bool = False, **tuning: Any
) -> list[Any]:
    """Inputs and targets of the three global batches of an epoch, put together from the parts of
    all ranks."""
    off = {
        "precision": "fp32",
        "num_workers": 0,
        "pin_memory": False,
        "non_blocking": False,
        "channels_last": False,
    }
    config = Config(tuning=TuningConfig(**{**off, **tuning}))
    options = replace(loader_options(config), resident=resident)
    found = []
    for rank in range(ranks):
        plan = BatchPlan(len(source), 6, 1, 3, 0, rank, ranks)
        loader = Loader(source, list(plan.micro_batches()), "cpu", options, mix)
        found.append(
            [
                (*batch.data, batch.micro_batch.num_real, batch.micro_batch.indices)
                for batch in loader
            ]
        )
    whole = []
    for parts in zip(*found, strict=True):
        assert all(len(inputs) == len(indices) for inputs, _, _, indices in parts)
        whole.append([torch.cat([part[place][: part[2]] for part in parts]) for place in (0, 1)])
    return whole


@pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")  # of torchvision 0.29
@pytest.mark.parametrize("where", ["host", "device", "loader process", "pil", "processes", "gpu"])
def test_however_samples_are_fetched_the_batches_are_the_same(where: str, folder: Path) -> None:
    mix = Mix(0, 2, 0.4, 1.0)
    more = {"num_workers": 1} if where == "loader process" else {}
    source: BatchSource = images().select(np.arange(13))
    if where in ("pil", "processes", "gpu"):
        section = ImageFolderConfig(
            root=str(folder), image_size=8, decode=where, random_erasing=0.5
        )
        source = datasets_of(section)[0]
    else:
        mix = MIX
    plain = batches(source, None, 1)
    found = batches(source, mix, 3, where == "device", **more)
    assert len(found) == 3 and [len(inputs) for inputs, _ in found] == [6, 6, 1]
    for step, ((inputs, labels), (mixed, targets)) in enumerate(zip(plain, found, strict=True)):
        rows = torch.tensor([len(inputs) - 1, *range(len(inputs))])
        fetched = MicroBatch(0, step, rows.numpy(), len(inputs), 1.0, True)
        (expected, parts), _ = mix((inputs[rows], labels[rows]), fetched)
        assert torch.equal(mixed, expected) and torch.equal(targets, parts), step


def test_soft_labels_are_mixed_for_a_model_with_more_outputs() -> None:
    soft = torch.eye(3)[torch.tensor([0, 1, 2])] * 0.7 + 0.1
    (_, targets), _ = Mix(0, 3, 1.0, 0)(
        (torch.randn(3, 5), soft), MicroBatch(0, 0, np.arange(3), 2, 1.0, True)
    )
    share = Mix(0, 3, 1.0, 0).mixture(0).share
    torch.testing.assert_close(targets, soft[1:] * share + soft[:-1] * (1 - share))
    outputs = torch.randn(2, 7)
    wide = Classification(3, label_smoothing=0.1).sum_of_losses(outputs, targets)
    padded = nn.functional.pad(targets, (0, 4))
    assert wide == nn.functional.cross_entropy(
        outputs, padded, reduction="sum", label_smoothing=0.1
    )


class Whole:
    """A data set that does not say how many classes there are."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return self.value, number % 2


def test_what_cannot_be_mixed_is_refused() -> None:
    picture = torch.zeros(1, 4, 4)
    assert mix_of(images(), 0, 0.0, 0.0, classifies=False) is None
    with pytest.raises(
        ConfigError,
        match=r"data\.cutmix=1: mixes class labels, and the targets are not class labels",
    ):
        mix_of(images(), 0, 0.0, 1.0, classifies=False)
    with pytest.raises(ConfigError, match="needs an attribute `classes`"):
        mix_of(UserDataset(Whole(picture), 0), 0, 0.2, 0.0, classifies=True)
    micro_batch = MicroBatch(0, 0, np.arange(2), 1, 1.0, True)
    one = torch.zeros(2, 3)
    labels = torch.tensor([0, 1])
    for mix, data, says in (
        (
            Mix(0, 2, 0.0, 1.0),
            (one, labels),
            r"data\.cutmix=1: a sample is \(float32 \[3\], int64 \[\]\)",
        ),
        (
            Mix(0, 2, 0.2, 0.0),
            (one.byte(), labels),
            r"data\.mixup=0\.2: a sample is \(uint8 \[3\], int64 \[\]\)",
        ),
        (Mix(0, 2, 0.2, 0.0), {"image": one}, r"data\.mixup=0\.2: a sample is dict"),
        (Mix(0, 1, 0.2, 0.0), (one, labels), "declares 1 classes, but its labels go from 0 to 1"),
    ):
        with pytest.raises(DataError, match=says):
            mix(data, micro_batch)


# --- random erasing -------------------------------------------------------------------------------


def test_boxes_are_drawn_as_by_torchvision() -> None:
    """The distribution: of the same number of draws, means and spreads of every edge agree within
    their error."""
    height = 16
    width = 11
    count = 4_000
    draws = uniform(3, torch.arange(count), 3 + 2 * ERASING_TRIES)
    ours = erasing_boxes(draws, height, width, 1.0)
    assert torch.equal(ours[[7]], erasing_boxes(draws[[7]], height, width, 1.0)), (
        "its own draws alone"
    )
    torch.manual_seed(0)
    transform = v2.RandomErasing(p=1.0)
    theirs = []
    for _ in range(count):
        params = transform.make_params([torch.empty(1, height, width)])
        top, left, rows, columns = (params[name] for name in ("i", "j", "h", "w"))
        theirs.append(
            [top, top + rows, left, left + columns] if params["v"] is not None else [0, 0, 0, 0]
        )
    one = ours.double()
    other = torch.tensor(theirs).double()
    sizes = [torch.stack([b[:, 1] - b[:, 0], b[:, 3] - b[:, 2]], 1) for b in (one, other)]
    for mine, reference in zip(
        torch.cat([one, sizes[0]], 1).T, torch.cat([other, sizes[1]], 1).T, strict=True
    ):
        error = (2 / count) ** 0.5 * reference.std()
        assert (mine.mean() - reference.mean()).abs() < 4 * error
        assert mine.std() == pytest.approx(reference.std().item(), rel=0.05)
    assert (ours[:, 1] <= height).all() and (ours[:, 3] <= width).all() and (ours >= 0).all()
    some = erasing_boxes(draws, height, width, 0.25)
    erased = (some[:, 1] > some[:, 0]) & (some[:, 3] > some[:, 2])
    assert 0.22 < erased.double().mean() < 0.28 and torch.equal(some[erased], ours[erased])


def test_a_box_is_set_to_zero_and_nothing_else() -> None:
    pictures = torch.rand(3, 2, 6, 5).add(1).contiguous(memory_format=torch.channels_last)
    boxes = torch.tensor([[1, 3, 2, 5], [0, 0, 0, 0], [0, 6, 0, 5]])
    expected = pictures.clone()
    expected[0, :, 1:3, 2:5] = 0
    expected[2] = 0
    found = erase(pictures, boxes)
    assert torch.equal(found, expected) and found.is_contiguous(memory_format=torch.channels_last)


def test_sample_is_erased_alike_in_any_batch_of_training_alone() -> None:
    source = images()
    plain = images()
    plain.erasing = None
    numbers = np.arange(SAMPLES)
    whole = source.get_batch(numbers, 3)[0]
    assert torch.equal(source.get_batch(numbers[5:9], 3)[0], whole[5:9])
    assert torch.equal(source.get_batch(numbers, None)[0], plain.get_batch(numbers, None)[0])
    touched = (whole != plain.get_batch(numbers, 3)[0]).flatten(1).any(1)
    assert 5 < touched.sum() < 24
    other = (source.get_batch(numbers, 4)[0] != plain.get_batch(numbers, 4)[0]).flatten(1).any(1)
    assert not torch.equal(touched, other), "another epoch, other draws"


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
