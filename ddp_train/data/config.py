"""Data sets that are held in memory, and the keys of all that are not a class of your own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ddp_train.options.data_keys import (
    batch_sampler,
    drop_last,
    mixing_alpha,
    sample_weights,
    sampler,
    validation_part,
)
from ddp_train.options.key import key
from ddp_train.options.problem import Problem
from ddp_train.options.schema import Config, DataConfig


@dataclass
class BuiltInDataConfig(DataConfig):
    """The keys of every data set but a class of your own."""

    name: str = "digits"
    is_regression: ClassVar[bool | None] = False
    limit: int | None = key(None, "use only this many samples of each split", at_least=1)
    validation: float | None = validation_part()
    weights: str | None = sample_weights()
    sampler: dict[str, Any] = sampler()
    batch_sampler: dict[str, Any] = batch_sampler()
    drop_last: bool = drop_last()
    placement: str = key(
        "auto",
        "where the data are held; auto: device if they fit",
        choices=("auto", "host", "device"),
    )


@dataclass
class LabelledImagesConfig(BuiltInDataConfig):
    """Images with class labels."""

    mixup: float = mixing_alpha("mixup, the weighted mean of")
    cutmix: float = mixing_alpha("CutMix, which exchanges a box between")
    random_erasing: float = key(
        0.0, "probability that a box of a training image is erased", at_least=0, at_most=1
    )


@dataclass
class DigitsConfig(LabelledImagesConfig):
    """1,797 handwritten digits, 8x8, that scikit-learn ships; 1,433 to train, 364 to test, no
    download."""

    name: str = "digits"
    implementation: ClassVar[str] = "ddp_train.data.small_datasets:open_digits"
    augment: bool = key(True, "shift each image by up to one pixel")

    images: ClassVar[tuple[int, int, int] | None] = (1797, 1, 8)


@dataclass
class TorchvisionDataConfig(LabelledImagesConfig):
    root: str = key("data", "folder that holds the data set", is_path=True)
    download: bool = key(False, "download it if it is missing")
    augment: bool = key(False, "random shifts; flips too for cifar10 and fashion_mnist")

    def missing(self, config: Config) -> Iterator[Problem]:
        yield from super().missing(config)
        paths = [Path(self.root, name) for name in self.files]
        absent = [path for path in paths if not path.is_file()]
        if absent and not self.download:
            packed = absent[0].with_name(f"{absent[0].name}.gz")
            if packed.is_file():
                remedy = f"unpack it: gunzip -k {packed.parent}/*.gz"
            else:
                remedy = "add data.download=true"
            yield Problem(
                f"data.root={self.root}",
                f"{absent[0]} is missing",
                f"{remedy}, or name the folder that holds {self.name}",
            )
            return
        cut = [path for path in paths if path.name.endswith("-ubyte") and is_truncated(path)]
        if cut:
            yield Problem(
                f"data.root={self.root}",
                f"{cut[0]} is truncated",
                "remove it, and fetch it with data.download=true",
            )


_IDX_FILES = tuple(
    f"raw/{name}-ubyte"
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
)


@dataclass
class MnistConfig(TorchvisionDataConfig):
    """60,000 + 10,000 handwritten digits, 28x28."""

    name: str = "mnist"
    implementation: ClassVar[str] = "ddp_train.data.torchvision_images:open_mnist"
    files: ClassVar[tuple[str, ...]] = tuple(f"MNIST/{name}" for name in _IDX_FILES)
    images: ClassVar[tuple[int, int, int] | None] = (70_000, 1, 28)


@dataclass
class FashionMnistConfig(MnistConfig):
    """60,000 + 10,000 pieces of clothing, 28x28."""

    name: str = "fashion_mnist"
    implementation: ClassVar[str] = "ddp_train.data.torchvision_images:open_fashion_mnist"
    files: ClassVar[tuple[str, ...]] = tuple(f"FashionMNIST/{name}" for name in _IDX_FILES)


@dataclass
class Cifar10Config(TorchvisionDataConfig):
    """50,000 + 10,000 colour photographs, 32x32."""

    name: str = "cifar10"
    implementation: ClassVar[str] = "ddp_train.data.torchvision_images:open_cifar10"
    files: ClassVar[tuple[str, ...]] = tuple(
        f"cifar-10-batches-py/{name}"
        for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
    )
    images: ClassVar[tuple[int, int, int] | None] = (60_000, 3, 32)


@dataclass
class SyntheticConfig(LabelledImagesConfig):
    """Random images with a class-dependent pattern, made on the fly: for benchmarks."""

    name: str = "synthetic"
    implementation: ClassVar[str] = "ddp_train.data.small_datasets:make_synthetic"
    samples: int = key(4096, "samples in the training set", at_least=1)
    test_samples: int = key(1024, "samples in the test set", at_least=1)
    channels: int = key(3, "channels of an image", at_least=1)
    image_size: int = key(32, "height and width in pixels", at_least=1)
    classes: int = key(10, "number of classes", at_least=2)

    def in_memory_bytes(self) -> int:
        return (self.samples + self.test_samples) * self.channels * self.image_size**2

    def image_shape(self) -> tuple[int, int]:
        return self.channels, self.image_size


@dataclass
class LinearRegressionDataConfig(BuiltInDataConfig):
    """A generated table: y = w x + b + noise."""

    name: str = "linear_regression"
    implementation: ClassVar[str] = "ddp_train.data.small_datasets:make_linear_regression"
    is_regression: ClassVar[bool | None] = True
    samples: int = key(2048, "samples in the training set", at_least=1)
    test_samples: int = key(512, "samples in the test set", at_least=1)
    features: int = key(20, "columns of the table", at_least=1)
    noise: float = key(0.1, "standard deviation of the noise", at_least=0)

    def in_memory_bytes(self) -> int:
        return (self.samples + self.test_samples) * self.sample_bytes()

    def sample_bytes(self) -> int:
        return 4 * self.features


def is_truncated(path: Path) -> bool:
    """Tell whether an IDX file is shorter than its header says.

    The header is two zeros, the type, the number of dimensions, and their sizes as uint32; bytes
    follow.
    """
    if not path.is_file():
        return False
    with path.open("rb") as file:
        header = file.read(4)
        sizes = file.read(4 * header[3]) if len(header) == 4 else b""
    if len(header) < 4 or len(sizes) < 4 * header[3]:
        return True
    numbers = [int.from_bytes(sizes[at : at + 4]) for at in range(0, len(sizes), 4)]
    return path.stat().st_size < 4 + len(sizes) + math.prod(numbers)
