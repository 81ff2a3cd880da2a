"""Data sets of the user's own: any map-style class by `_target_`, its splits and
transforms."""

from __future__ import annotations

import dataclasses
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from torchvision import datasets, transforms, tv_tensors
from torchvision.transforms import v2
from torchvision.tv_tensors import _dataset_wrapper

from ddp_train.assembly.data_digests import common_digests, scored_digests
from ddp_train.assembly.data_sets import open_datasets
from ddp_train.assembly.user_splits import arguments_of_splits
from ddp_train.config import code_checks, metrics
from ddp_train.config.composition import read_config
from ddp_train.config.overrides import read_overrides
from ddp_train.data.batch_plan import BatchPlan, MicroBatch
from ddp_train.data.loader import Loader, LoaderOptions
from ddp_train.data.rng import global_states, keyed_generators
from ddp_train.data.sample_tensors import as_tensors
from ddp_train.data.sample_transforms import apply_transform
from ddp_train.data.splits import Splits
from ddp_train.data.user_dataset import UserDataset
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, DataError, PeerError
from ddp_train.hardware import Hardware
from ddp_train.options.custom import CustomDataConfig
from ddp_train.options.schema import Config, RequestedRun
from ddp_train.tensor_tree import tensors
from tests.support.commands import PROGRAM
from tests.support.jobs import config_of, loader_of, table
from tests.support.ranks import on_ranks

V2 = "torchvision.transforms.v2"
PLAIN = {"strategy": {"name": "single"}}


def opened(target: str, seed: int = 0, downloads: bool = True, **keys: Any) -> Splits:
    return open_datasets(Config(data=CustomDataConfig(target=target, **keys), seed=seed), downloads)


def batch(source: Any, *numbers: int, epoch: int | None = 0) -> Any:
    return source.get_batch(np.array(numbers), epoch)


class Rows:
    """Somebody's data set, without `limit`, `transform` or anything else."""

    classes = ("even", "odd")

    def __init__(self, split: str, first: int = 0) -> None:
        if split == "validation":
            raise ValueError("Unknown split 'validation'")
        self.first = first

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.full((2,), float(self.first + number)), number % 2


class Noise:
    """A transform that draws from all generators which people use; it takes the input alone."""

    def __call__(self, image: Tensor) -> Tensor:
        return image + torch.rand(image.shape) + np.random.rand() + random.random()


class NoTransform:
    """Whose objects cannot be called."""


class ToCorner(v2.Transform):
    """One's own, as torchvision asks for it."""

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return v2.functional.crop(inpt, 0, 0, 2, 2)


class Clips(datasets.VisionDataset):
    """UCF101, without its films."""

    def __init__(self, output_format: str = "THWC") -> None:
        self.video_clips = type("", (), {"output_format": output_format})


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


def joined(samples: list[Any]) -> Any:
    return torch.stack([sample[0] for sample in samples]).flatten(), torch.tensor(
        [sample[1] for sample in samples]
    )


# --- keyed transforms -----------------------------------------------------------------------------

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
    f"{__name__}.Noise",
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


@pytest.mark.parametrize(
    "which, draw", [(0, lambda: torch.rand(1)), (1, np.random.rand), (2, random.random)]
)
def test_a_draw_is_seen_in_the_state_of_its_own_generator(which: int, draw: Any) -> None:
    """numpy keeps a position beside its 624 words: they change once in 624 draws."""
    before = global_states()
    for _ in range(2):
        draw()
        after = global_states()
        assert [one != other for one, other in zip(before, after, strict=True)] == [
            i == which for i in range(3)
        ]
        before = after


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


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (
            {"transform": [f"{V2}.ToImage", f"{V2}.RandAugment"]},
            ["data.transform=", "RandAugment would draw", f"data.test_transform=[{V2}.ToImage]"],
        ),
        (
            {"test_transform": [f"{V2}.RandAugment"]},
            ["data.test_transform=", "would draw", "data.test_transform=[]"],
        ),
        (
            {"transform": [f"{V2}.RandAugmnt"]},
            ["data.transform[0]._target_=", "did you mean RandAugment?"],
        ),
        (
            {"transform": [{"_target_": f"{V2}.Resize", "sise": 3}]},
            ["data.transform[0]._target_=", "sise=3"],
        ),
        (
            {"transform": [f"{__name__}.NoTransform"]},
            ["data.transform[0]._target_=", "cannot be called"],
        ),
        ({"transform": [f"{V2}.functional.resize"]}, ["nothing else may be named there"]),
        (
            {"fields": ["image"]},
            ["data.fields=[image]: a sample of FakeData is a tuple, no dict; leave it out"],
        ),
        ({"collate_fn": f"{__name__}.joinde"}, ["data.collate_fn=", "did you mean joined?"]),
    ],
)
def test_wrong_transforms_are_named(keys: dict[str, Any], parts: list[str]) -> None:
    arguments = {"size": 4, "image_size": [3, 8, 8]}
    with pytest.raises(ConfigError) as caught:
        batch(
            opened(
                "torchvision.datasets.FakeData",
                arguments=arguments,
                splits={"test": {"size": 2}},
                **keys,
            )[0],
            0,
        )
    (problem,) = caught.value.problems
    assert all(part in problem for part in parts), problem


def test_masks_and_boxes_change_with_their_image() -> None:
    image = tv_tensors.Image(torch.arange(16).view(1, 4, 4))
    mask = tv_tensors.Mask(torch.arange(16).view(1, 4, 4))
    for of_both in (
        ToCorner(),
        nn.Sequential(v2.RandomVerticalFlip(1), ToCorner()),
        transforms.Compose(
            [v2.RandomHorizontalFlip(1), transforms.RandomApply([v2.RandomRotation(90)], 1)]
        ),
    ):
        changed, target = apply_transform(of_both, (image, mask))
        assert changed.tolist() == target.tolist() != image.tolist()
    box = tv_tensors.BoundingBoxes(torch.ones(1, 4), format="XYXY", canvas_size=(4, 4))  # pyright: ignore
    for alone in (transforms.CenterCrop(2), nn.Sequential(v2.CenterCrop(2), nn.Flatten()), Noise()):
        for target, kind in ((mask, "Mask"), ({"boxes": [box]}, "BoundingBoxes")):
            with pytest.raises(
                ConfigError, match=rf"data\.transform: \w+ takes the image alone, .* has a {kind}, "
            ):
                apply_transform(alone, (image, target))
    assert apply_transform(transforms.CenterCrop(2), (image, 3))[0].shape == (1, 2, 2)


def test_what_torchvision_does_not_support_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = _dataset_wrapper.video_classification_wrapper_factory
    monkeypatch.setitem(_dataset_wrapper.WRAPPER_FACTORIES, Clips, wrapper)
    monkeypatch.setattr(Clips, "__module__", "torchvision.datasets.ucf101")
    with pytest.raises(
        ConfigError,
        match=r"_target_: torchvision does not .* as it is called: .*output_format=TCHW",
    ):
        UserDataset(Clips(), 0)
    with pytest.raises(DataError, match="Stream has no __getitem__") as caught:
        UserDataset(Stream(), 0)
    assert "not an iterable one" in caught.value.remedy


def test_what_validates_is_not_transformed_as_what_trains() -> None:
    keys = {
        "transform": [f"{__name__}.Noise"],
        "test_transform": [],
        "validation": 0.25,
        "limit": 12,
    }
    train, test, validation = opened(f"{__name__}.Rows", **keys)[:3]
    assert validation is not None and (len(train), len(test), len(validation)) == (12, 12, 5)
    assert (batch(train, 0)[0] % 1).any() and not (batch(validation, 0, 1, 2, 3, 4)[0] % 1).any()


class Drawn(Rows):
    """Draws with a generator of its own, which is not keyed."""

    draws = np.random.default_rng()

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.full((2,), self.draws.random()), 0


def test_a_set_that_is_scored_and_has_changed_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not one that draws its samples anew, nor one of a checkpoint that knows no digests."""
    then = scored_digests(Splits(table(9), table(7), table(4)), {})
    assert list(then) == ["validation", "test"] and caplog.text == ""
    assert scored_digests(Splits(table(8), table(7), table(4)), then) == then and caplog.text == ""
    drawn = Splits(table(9), UserDataset(Drawn("train"), 0))
    scored_digests(drawn, scored_digests(drawn, {}))
    assert caplog.text == ""
    scored_digests(Splits(table(9), table(6), UserDataset(Rows("train", 100), 0)), then)
    assert (
        "the test set has changed since the checkpoint: 6 samples, not 7; scores before and after"
        in caplog.text
    )
    assert "the validation set has changed since the checkpoint: " in caplog.text


def read_by(world: World) -> list[str]:
    """What the last process finds if it reads other files than the others."""
    same = table(9)
    other = world.rank == 2
    found = []
    for sources in (
        Splits(table(8) if other else same, same),
        Splits(same, same, table(4 - other)),
        Splits(same, table(7) if other else same),
        Splits(UserDataset(Rows("train", 100 * other), 0), same),
    ):
        with pytest.raises(PeerError) as caught:
            common_digests(sources, sources.train, "cpu")
        found.append(f"{caught.value}")
    drawn = UserDataset(Drawn("train"), 0)
    assert common_digests(Splits(drawn, drawn), drawn, "cpu")["count"] == "20"
    assert common_digests(Splits(same, same), same, "cpu") == common_digests(
        Splits(same, drawn), same, "cpu"
    )
    return found


def test_processes_that_read_different_data_are_refused() -> None:
    found, *others = on_ranks(3, read_by)
    assert all(other == found for other in others)
    sizes = ["training set", "validation set", "test set"]
    assert [size in text for size, text in zip(sizes, found, strict=False)] == [True] * 3
    assert (
        "(rank 0: 9, rank 1: 9, rank 2: 8)" in found[0]
        and "a digest of the samples is not the same" in found[3]
    )


# --- splits ---------------------------------------------------------------------------------------


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


def test_splits_are_told_apart_by_signature_or_config() -> None:
    def found(parameters: str, splits: dict[str, Any] | None = None, **arguments: Any) -> Any:
        data = CustomDataConfig(target="a.B", arguments=arguments, splits=splits or {})
        return arguments_of_splits(data, parameters.split())

    train = {"train": {"train": True}, "test": {"train": False}}
    both = {"train": {"root": "a"}, "test": {"root": "b"}}
    assert found("root split")["test"] == {"split": "test"} and "validation" in found(
        "root split train"
    )
    assert found("root train") == found("root split train", split="letters") == train
    assert found("root split train", both) == both
    assert found("x", {"test": {"x": 1}, "validation": {"x": 2}}).keys() == {
        "train",
        "test",
        "validation",
    }
    for wrong in (
        ("root", {}),
        ("kwargs", {}),
        ("root split kwargs", {"split": "letters"}),
        ("train", {"train": True}),
    ):
        with pytest.raises(
            ConfigError, match=r"a\.B: B\(.*\).*; say what .*: data\.splits\.train\.\w+="
        ):
            found(wrong[0], **wrong[1])


def test_splits_with_names_of_their_own_are_named_by_the_config() -> None:
    with pytest.raises(
        ConfigError, match=r"split='validation' failed: ValueError: .*; use data\.validation=0"
    ):
        opened(f"{__name__}.Rows")
    pet = "torchvision.datasets.OxfordIIITPet"
    with pytest.raises(
        ConfigError,
        match=r"split='train' failed: .*trainval.*; use its own names: data\.splits\.train",
    ):
        opened(pet, arguments={"root": "/nowhere"})
    with pytest.raises(DataError, match="not found") as caught:
        opened(
            pet,
            arguments={"root": "/nowhere"},
            splits={"train": {"split": "trainval"}, "test": {"split": "test"}},
        )
    assert "data.download=true" in caught.value.remedy
    sets = {
        name: {"split": "train", "first": at}
        for name, at in (("train", 0), ("test", 100), ("validation", 200))
    }
    train, test, validation = opened(f"{__name__}.Rows", splits=sets)[:3]
    assert [batch(source, 1)[0][0, 0].item() for source in (train, test, validation)] == [
        1,
        101,
        201,
    ]


class Plain(Rows):
    """Says whether it augments."""

    classes = ("a",)

    def __init__(
        self, train: bool = True, augment: bool = True, first: int = 0, download: bool = False
    ) -> None:
        super().__init__("train")
        self.augment = augment
        self.download = download

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.full((2,), float(self.augment)), 0


def test_what_trains_neither_tests_nor_validates() -> None:
    """A split has the defaults of the signature for what is not given."""
    for splits, message in (
        (
            {"train": {"download": True}},
            r"and test set would .*, with \{train:true,first:0\}; add data\.splits\.train\.tr",
        ),
        (
            {"train": {"train": True}},
            r"add data\.splits\.train\.train=true data\.splits\.test\.train=false",
        ),
        (
            {"test": {"train": False}, "validation": {"augment": False}},
            r"training and validation set would be the same",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(f"{__name__}.Plain", splits=splits)


def test_samples_that_are_scored_are_not_augmented() -> None:
    def augmented(**keys: Any) -> list[float]:
        return [
            batch(source, 0)[0][0, 0].item()
            for source in opened(f"{__name__}.Plain", **keys)[:3]
            if source
        ]

    assert augmented() == augmented(arguments={"augment": True}) == [1, 0]
    sets = {"test": {"train": False}, "validation": {"train": False, "first": 1}}
    assert augmented(splits=sets) == [1, 0, 0]
    sets = {"train": {"augment": True}, "test": {"train": False, "augment": True}}
    assert augmented(splits=sets, validation=0.2) == [1, 1, 0], "as it is given for a split"


class Fetched(Rows):
    asked: list[bool] = []  # noqa: RUF012

    def __init__(self, train: bool, download: bool) -> None:
        self.asked.append(download)
        super().__init__("train")


def test_one_process_of_a_host_downloads() -> None:
    Fetched.asked.clear()
    for downloads in (True, False):
        opened(f"{__name__}.Fetched", downloads=downloads, arguments={"download": True})
    assert Fetched.asked == [True, True, False, False]
    asks = (
        CustomDataConfig(arguments={"download": True}),
        CustomDataConfig(splits={"train": {"download": True}}),
        CustomDataConfig(target="ddp_train.data.shards.TarShards"),
        CustomDataConfig(arguments={"download": False}),
    )
    assert [data.writes_files() for data in asks] == [True, True, True, False]


def idx(path: Path, array: np.ndarray) -> None:
    """A file as MNIST's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(head + array.tobytes())


def test_data_sets_of_torchvision_need_no_code(tmp_path: Path) -> None:
    """One by `train`, one by its folders, one of masks that are cropped together with their
    images."""
    numbers = np.random.default_rng(0)
    for part in ("train", "t10k"):
        idx(
            tmp_path / f"MNIST/raw/{part}-images-idx3-ubyte",
            numbers.integers(0, 256, (6, 28, 28), np.uint8),
        )
        idx(tmp_path / f"MNIST/raw/{part}-labels-idx1-ubyte", np.arange(6, dtype=np.uint8))
    train, test, _ = opened("torchvision.datasets.MNIST", arguments={"root": str(tmp_path)})[:3]
    images, labels = batch(train, 2, 4)
    assert (images.shape, images.dtype, labels.tolist()) == ((2, 1, 28, 28), torch.float32, [2, 4])
    assert train.outputs == 10 and not torch.equal(images, batch(test, 2, 4)[0])

    voc = tmp_path / "VOCdevkit/VOC2012"
    for folder in ("ImageSets/Segmentation", "JPEGImages", "SegmentationClass"):
        (voc / folder).mkdir(parents=True)
    for name, side in (("train", 40), ("val", 20)):
        (voc / f"ImageSets/Segmentation/{name}.txt").write_text(name)
        classes = np.repeat(
            np.repeat(numbers.integers(0, 3, (side // 4, side // 4), np.uint8), 4, 0), 4, 1
        )
        Image.fromarray(np.stack([classes * 80] * 3, 2)).save(
            voc / f"JPEGImages/{name}.jpg", quality=100
        )
        mask = Image.fromarray(classes, "P")
        mask.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0])
        mask.save(voc / f"SegmentationClass/{name}.png")
    sets = {"train": {"image_set": "train"}, "test": {"image_set": "val"}}
    crop = [{"_target_": f"{V2}.RandomCrop", "size": 12}, f"{V2}.RandomHorizontalFlip"]
    keys = {
        "arguments": {"root": str(tmp_path)},
        "splits": sets,
        "transform": crop,
        "test_transform": [],
        "outputs": 3,
    }
    train, test, _ = opened("torchvision.datasets.VOCSegmentation", **keys)[:3]
    crops = [batch(train, 0, epoch=epoch) for epoch in range(4)]
    for image, classes in crops:
        assert (image.shape, classes.shape, classes.dtype) == (
            (1, 3, 12, 12),
            (1, 12, 12),
            torch.int64,
        )
        assert torch.equal((image[:, 0] * 255 / 80).round().long(), classes), (
            "image and mask were cut as one"
        )
    assert len({image.numpy().tobytes() for image, _ in crops}) == 4
    assert batch(test, 0, epoch=None)[1].shape == (1, 20, 20) and train.outputs == 3

    for folder, side in (("a", 9), ("b", 8)):
        (tmp_path / "folder" / folder).mkdir(parents=True)
        Image.new("RGB", (side, 8)).save(tmp_path / "folder" / folder / "0.png")
    both = {"train": {"root": str(tmp_path / "folder")}, "test": {"root": f"{tmp_path}/folder/"}}
    ragged = opened("torchvision.datasets.ImageFolder", splits=both)[0]
    with pytest.raises(DataError, match="cannot be put into one batch") as caught:
        batch(ragged, 0, 1)
    assert "Resize" in caught.value.remedy


# --- samples --------------------------------------------------------------------------------------


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
    with pytest.raises(DataError, match="PIL's mode P, whose numbers"):
        as_tensors((Image.new("P", (2, 2)), 0))
    pair = [(torch.ones(2), 1), (torch.zeros(2), 0)]
    assert (
        batch(opened(f"{__name__}.Rows", validation=0.5, collate_fn=f"{__name__}.joined")[0], 0)[
            0
        ].ndim
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
    reason = "pip install datasets: a recipe of docs/data.md, no dependency"
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


# --- the config -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "words", "expected"),
    [
        ("data: {_target_: a.B, size: 8}", "", ""),
        ("defaults: [{override /data: custom}]\ndata: {_target_: a.B, size: 8}", "debug=tiny", ""),
        (
            "data: {_target_: a.B, size: 8, limit: 9}\nmodel: {_target_: a.C}",
            "data.size=9 debug=tiny",
            "",
        ),
        (
            "data: {_target_: a.B}",
            "data=digits",
            "data._target_=a.B: contradicts data=digits; give one of them",
        ),
        ("defaults: [inner, _self_]\ndata: {size: 8}", "debug=tiny", ""),
        (
            "defaults: [/experiment/inner]\nname: x",
            "data=digits",
            "data._target_=a.B: contradicts data=digits; give one of them",
        ),
        (
            "defaults: [inner",
            "",
            "conf/experiment/mine.yaml: line 3: cannot be read: expected ',' or ']'",
        ),
    ],
)
def test_a_preset_names_a_data_set_of_ones_own(
    preset: str, words: str, expected: str, tmp_path: Path
) -> None:
    conf = tmp_path / "conf"
    (conf / "experiment").mkdir(parents=True)
    (conf / "experiment/inner.yaml").write_text("# @package _global_\ndata: {_target_: a.B}\n")
    (conf / "experiment/mine.yaml").write_text(f"# @package _global_\n{preset}\n")
    program = dataclasses.replace(PROGRAM, own=conf)
    try:
        config, problems = read_config(
            program, read_overrides(program, ["experiment=mine", *words.split()])
        )
    except ConfigError as error:
        config = Config()
        problems = error.problems
    if expected:
        assert problems[0].replace(str(conf), "conf").startswith(expected), problems
        return
    assert problems == [] and config.data == CustomDataConfig(
        target="a.B",
        arguments={"size": 9 if "=9" in words else 8},
        limit=240 if "tiny" in words else None,
    )
    assert config.trusted_modules == ["a"]


def messages_of(config: Config) -> list[str]:
    """What can be known to be wrong with the data before anything is loaded."""
    run = RequestedRun(config, config, Hardware(cpus=2))
    found = [*config.data.problems(run), *config.data.missing(config)]
    return [str(problem) for problem in (*found, *code_checks.problems(config))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "data.splits.tain.x=1 data.splits.train.x=1",
            "data.splits.tain={x:1}: the splits are train, validation, test; d",
        ),
        (
            "data.splits.train=3 data.splits.test.a=1",
            "data.splits.train=3: must be arguments; use data.splits.train.NA",
        ),
        (
            "data.splits.train.x=1 data.splits.test.x=1",
            "data.splits={train:{x:1},test:{x:1}}: training and test set would",
        ),
        (
            "data.splits.train.download=true data.splits.test.augment=false",
            "data.splits={train:{download:true},test:{augment:false}}: training and test set would",
        ),
        (
            "data.splits.test.x=1 data.splits.validation.x=2 data.validation=0.1",
            (
                "data.validation=0.1: contradicts data.splits.validation, which validates; leave"
                " one of them out"
            ),
        ),
        (
            "data.splits.test.x=1 data.splits.validation.x=2 data.validation=0",
            "data.validation=0: contradicts",
        ),
        (
            "data.splits.test.x=1 data.splits.validation.download=true",
            "data.splits={test:{x:1},validation:{download:tr",
        ),
        ("data.weights=nosuch.npy", "data.weights=nosuch.npy: no such file"),
        ("data.transform=[3]", "data.transform[0]=3: must be a class with its arguments"),
        (
            "data.transforms=[{_target_:a.B}]",
            "data.transforms.0._target_: arguments are plain values; only data._target_",
        ),
        (
            "data.splits.train.a._target_=a.B",
            "data.splits.train.a._target_: arguments are plain values",
        ),
        (
            "data.splits.train.api_key=x data.splits.test.a=1",
            "data.splits.train.api_key=(hidden): the config is written",
        ),
        (
            "data.transform=[{_target_:torch.nn.ReLU,inner:{_target_:torch.nn.ReLU,api_key:x}}]",
            "data.transform.0.inner.api_key=(hidden): the config is written to files",
        ),
        (
            "data.test_transform=[{_target_:torch.nn.ReLU,token:x}]",
            "data.test_transform.0.token=(hidden): the config",
        ),
        ("data.transform=[nosuch.Crop]", "data.transform[0]=nosuch.Crop: no module nosuch in"),
        ("data.collate_fn=joined", "data.collate_fn=joined: must be a dotted path"),
    ],
)
def test_wrong_keys_are_found_before_anything_starts(words: str, message: str) -> None:
    config, problems = read_config(
        PROGRAM, read_overrides(PROGRAM, ["data._target_=torch.nn.Linear", *words.split()])
    )
    found = problems + messages_of(config)
    assert found and found[0].startswith(message), found


def test_named_validation_split_is_known_before_data_are_opened() -> None:
    splits = {"test": {"x": 1}, "validation": {"x": 2}}
    assert metrics.has_validation(Config(data=CustomDataConfig(splits=splits))) is True
    assert metrics.has_validation(Config(data=CustomDataConfig())) is None


def test_class_that_a_checkpoint_names_must_be_trusted() -> None:
    content = {
        "name": "custom",
        "target": "torchvision.datasets.FakeData",
        "splits": {"test": {"size": 2}},
    }
    content |= {
        "transform": [{"_target_": f"{V2}.RandomApply", "transforms": [{"_target_": "os.system"}]}]
    }
    overrides = read_overrides(
        PROGRAM, ["data.splits.test.root=b", "data.size=3", "data.collate_fn=a.f"]
    )
    config, problems = read_config(PROGRAM, overrides, {"data": {**content, "arguments": {}}})
    assert (problems, config.data.splits, config.data.arguments) == (
        [],
        {"test": {"size": 2, "root": "b"}},
        {"size": 3},
    )
    found = messages_of(config)
    assert [problem.partition(": ")[0] for problem in found] == [
        "data.transform[0].transforms.0._target_=os.system",
        "data.collate_fn=a.f",
    ]
