"""The splits of a user's data set, by its signature or the config."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ddp_train.assembly.data_sets import open_datasets
from ddp_train.assembly.user_splits import arguments_of_splits
from ddp_train.config import metrics
from ddp_train.data.image_folder.config import ImageFolderConfig
from ddp_train.errors import ConfigError, DataError
from ddp_train.hardware import Hardware
from ddp_train.options.custom import CustomDataConfig
from ddp_train.options.schema import Config, RequestedRun
from tests.support.user_data import V2, Rows, batch, opened


def test_what_validates_is_not_transformed_as_what_trains() -> None:
    keys = {
        "transform": ["tests.support.user_data.Noise"],
        "test_transform": [],
        "validation": 0.25,
        "limit": 12,
    }
    train, test, validation = opened("tests.support.user_data.Rows", **keys)[:3]
    assert validation is not None and (len(train), len(test), len(validation)) == (12, 12, 5)
    assert (batch(train, 0)[0] % 1).any() and not (batch(validation, 0, 1, 2, 3, 4)[0] % 1).any()


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
            ConfigError, match=r"a\.B: B\(.*\).*; give the arguments .*: data\.splits\.train\.\w+="
        ):
            found(wrong[0], **wrong[1])


def test_splits_with_names_of_their_own_are_named_by_the_config() -> None:
    with pytest.raises(
        ConfigError, match=r"split='validation' failed: ValueError: .*; use data\.validation=0"
    ):
        opened("tests.support.user_data.Rows")
    pet = "torchvision.datasets.OxfordIIITPet"
    with pytest.raises(
        ConfigError,
        match=r"split='train' failed: .*trainval.*; use the names of splits that the class knows: data\.splits\.train",
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
    train, test, validation = opened("tests.support.user_data.Rows", splits=sets)[:3]
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
            r"and the test set would .* gets \{train:true,first:0\} for both; add data\.splits\.train\.tr",
        ),
        (
            {"train": {"train": True}},
            r"add data\.splits\.train\.train=true data\.splits\.test\.train=false",
        ),
        (
            {"test": {"train": False}, "validation": {"augment": False}},
            r"the training and the validation set would have the same",
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


class Tinted(Rows):
    """Another class, of the same kind of samples."""

    def __init__(self, size: int, augment: bool = True) -> None:
        super().__init__("test", 1000 * augment)
        self.size = size

    def __len__(self) -> int:
        return self.size


class Shifted(Rows):
    def __init__(self, split: str, first: int = 0) -> None:
        super().__init__("test", {"train": 0, "test": 100}.get(split, 200) + first)


def several(split: str) -> Any:
    """A validation set for each of two years."""
    if split == "validation":
        return {"1998": Shifted(split), "1999": Shifted(split, first=50)}
    return Shifted(split)


HERE = __name__


def first_of(source: Any) -> float:
    return batch(source, 0)[0][0, 0].item()


def test_further_sets_have_the_arguments_of_their_split() -> None:
    sets = {
        "late": {"first": 7},
        "other": {"split": "test", "first": 1},
        "tinted": {"_target_": f"{HERE}.Tinted", "size": 3},
    }
    blurred = {"blurred": {"first": 9}}
    splits = opened(f"{HERE}.Shifted", validation_sets=sets, test_sets=blurred, limit=12)
    found = {name: first_of(one) for name, one in splits.validation_sets.items()}
    assert found == {
        "validation": 200.0,
        "validation/late": 207.0,
        "validation/other": 101.0,
        "validation/tinted": 0.0,
    }
    assert {name: first_of(one) for name, one in splits.test_sets.items()} == {
        "test": 100.0,
        "test/blurred": 109.0,
    }
    assert len(splits.further["validation/late"]) == 12
    assert len(splits.further["validation/tinted"]) == 3
    assert [*splits.scored_sets] == [*found] and splits.scored.name == "validation"


def test_a_class_may_return_its_validation_sets() -> None:
    splits = opened(f"{HERE}.several")
    assert {name: first_of(one) for name, one in splits.validation_sets.items()} == {
        "validation/1998": 200.0,
        "validation/1999": 250.0,
    }
    assert splits.validation is None and splits.scored.name == "validation/1998"


def test_a_further_set_that_cannot_be_is_refused() -> None:
    def refused(**sets: Any) -> str:
        with pytest.raises((ConfigError, DataError)) as caught:
            opened("tests.support.user_data.Rows", validation=0.0, validation_sets=sets)
        return str(caught.value)

    assert "data.validation_sets.a={split:train}: would have the training samples" in refused(
        a={"split": "train"}
    )
    assert "data.validation_sets.b: cannot be opened with {split:validation" in refused(
        b={"first": 2}
    )
    said = refused(c={"_target_": f"{HERE}.Tinted", "sise": 2})
    assert f"data.validation_sets.c._target_={HERE}.Tinted: cannot be called with" in said


def test_image_folders_give_sets_by_name(tmp_path: Path) -> None:
    for number in range(12):
        for split in ("train", "val", "sketches"):
            folder = tmp_path / split / f"class_{number % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20, 20), (20 * number, 0, 0)).save(folder / f"{number}.png")
    section = ImageFolderConfig(
        root=str(tmp_path),
        image_size=16,
        decode="processes",
        validation_sets={"sketches": "sketches"},
        test_sets={"again": str(tmp_path / "val")},
    )
    splits = open_datasets(Config(data=section))
    assert {name: len(one) for name, one in splits.further.items()} == {
        "validation/sketches": 12,
        "test/again": 12,
    }
    assert section.sets() == ["validation/sketches", "test", "test/again"]
    assert not list(section.missing(Config(data=section)))
    (tmp_path / "sketches/class_3").mkdir()
    Image.new("RGB", (20, 20)).save(tmp_path / "sketches/class_3/a.png")
    with pytest.raises(
        DataError, match="its classes differ from those of the training set: class_3"
    ):
        open_datasets(Config(data=section))
    section.validation_sets = {"none": "nowhere"}
    (problem,) = section.missing(Config(data=section))
    assert str(problem).startswith("data.validation_sets.none=nowhere: ")


def test_a_key_may_name_a_metric_of_any_set() -> None:
    sets = {"noisy": {"x": 1}, "clean": {"x": 2}}
    data = CustomDataConfig(target="a.B", validation=0.0, validation_sets=sets)

    def found(value: str, data: Any = data) -> list[str]:
        config = Config(data=data)
        config.checkpoint.best_metric = value
        return [str(problem) for problem in metrics.named_problems(config, True, data.sets())]

    assert found("validation/noisy.accuracy") == found("validation/clean.loss") == []
    (problem,) = found("validation/nosy.loss")
    assert problem.endswith(
        "there is no set validation/nosy; there are validation/noisy, validation/clean, test; did"
        " you mean validation/noisy?"
    )
    (problem,) = found("validation.loss")
    assert "there is no set validation;" in problem
    (problem,) = found("test.loss")
    assert problem.endswith("use checkpoint.best_metric=validation/noisy.loss")
    assert metrics.objective_name("auto", data.sets() or []) == "validation/noisy.loss"
    with_own = CustomDataConfig(target="a.B", validation_sets=sets)
    assert with_own.sets() is None and with_own.has_validation() is True
    dotted = CustomDataConfig(target="a.B", validation_sets={"a.b": {}})
    requested = RequestedRun(Config(data=dotted), Config(data=dotted), Hardware(cpus=1))
    assert "a.b must be a name of letters, digits, _ and -" in str(next(dotted.problems(requested)))
