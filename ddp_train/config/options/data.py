"""Which samples, and what is true of each data set."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ddp_train.config.key import key


def validation_part() -> Any:
    meaning = (
        "part of the training set that validates; 0: none; null: the data set's own validation"
        " split, if any"
    )
    return key(None, meaning, at_least=0, below=1)


def mixing_alpha(what: str) -> Any:
    return key(0.0, f"alpha of {what} two samples of the global batch; 0: off", at_least=0)


def sample_weights() -> Any:
    meaning = (
        "draw an epoch's n samples with replacement: balanced, each class as often; or a file, .npy"
        " or text, with a weight for each; null: each sample once"
    )
    return key(None, meaning)


class DataFacts:
    """What every data set answers; the defaults are those of a data set that nothing is known
    about."""

    is_regression: ClassVar[bool | None] = None
    """Whether its targets are numbers, not class labels; None: unknown."""
    task: ClassVar[str | None] = None
    """What task=auto means with it; None: the targets of a batch tell."""
    files: ClassVar[tuple[str, ...]] = ()
    """Files that must exist, below `root`."""
    class_folders: ClassVar[tuple[str, ...]] = ()
    """Folders with one sub-folder per class that must exist, below `root`."""
    images: ClassVar[tuple[int, int, int] | None] = None
    """Number, channels and side of a fixed set of images that is held in memory."""
    placement = "host"
    root = decode = ""
    path = tokenizer = None
    download = False
    validation = weights = None
    batch_by = "samples"
    mixup = cutmix = random_erasing = 0.0

    def writes_files(self) -> bool:
        """Whether opening it writes files, a download for example: one process of each host does
        that first."""
        return bool(self.download)

    def in_memory_bytes(self) -> int | None:
        """Size of a data set that is held in memory: a batch is one indexing operation, which
        loader processes do not make faster. None: it is not held in memory."""
        if self.images:
            return self.images[0] * self.images[1] * self.images[2] ** 2
        return None

    def image_shape(self) -> tuple[int, int] | None:
        """Channels and side of its images; None: no images, or unknown."""
        return self.images[1:] if self.images else None

    def sample_bytes(self) -> int:
        """Of the inputs of one sample, as loader processes hand them over; 0: unknown."""
        shape = self.image_shape()
        return 4 * shape[0] * shape[1] ** 2 if shape else 0


@dataclass
class DataConfig(DataFacts):
    name: str = "digits"
    is_regression: ClassVar[bool | None] = False
    limit: int | None = key(None, "use only this many samples of each split", at_least=1)
    validation: float | None = validation_part()
    weights: str | None = sample_weights()
    placement: str = key(
        "auto",
        "where the data are held; auto: device if they fit",
        choices=("auto", "host", "device"),
    )


@dataclass
class LabelledImagesConfig(DataConfig):
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
    augment: bool = key(True, "shift each image by up to one pixel")

    images: ClassVar[tuple[int, int, int] | None] = (1797, 1, 8)


@dataclass
class TorchvisionDataConfig(LabelledImagesConfig):
    root: str = key("data", "folder that holds the data set", is_path=True)
    download: bool = key(False, "download it if it is missing")
    augment: bool = key(False, "random shifts; flips too for cifar10 and fashion_mnist")


_IDX_FILES = tuple(
    f"raw/{name}-ubyte"
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
)


@dataclass
class MnistConfig(TorchvisionDataConfig):
    """60,000 + 10,000 handwritten digits, 28x28."""

    name: str = "mnist"
    files: ClassVar[tuple[str, ...]] = tuple(f"MNIST/{name}" for name in _IDX_FILES)
    images: ClassVar[tuple[int, int, int] | None] = (70_000, 1, 28)


@dataclass
class FashionMnistConfig(MnistConfig):
    """60,000 + 10,000 pieces of clothing, 28x28."""

    name: str = "fashion_mnist"
    files: ClassVar[tuple[str, ...]] = tuple(f"FashionMNIST/{name}" for name in _IDX_FILES)


@dataclass
class Cifar10Config(TorchvisionDataConfig):
    """50,000 + 10,000 colour photographs, 32x32."""

    name: str = "cifar10"
    files: ClassVar[tuple[str, ...]] = tuple(
        f"cifar-10-batches-py/{name}"
        for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
    )
    images: ClassVar[tuple[int, int, int] | None] = (60_000, 3, 32)


@dataclass
class ImageFolderConfig(LabelledImagesConfig):
    """One folder per class under ROOT/train and ROOT/val: the layout of ImageNet."""

    name: str = "image_folder"
    class_folders: ClassVar[tuple[str, ...]] = ("train", "val")
    root: str = key("data/imagenet", "folder that holds train/ and val/", is_path=True)
    image_size: int = key(224, "height and width after the crop, in pixels", at_least=1)
    augment: bool = key(True, "random resized crop and horizontal flip")
    decode: str = key(
        "auto",
        "JPEG decoder: PIL, torchvision in processes, or the GPU; auto: gpu with under 8 cores per"
        " GPU, else processes",
        choices=("auto", "pil", "processes", "gpu"),
    )

    def image_shape(self) -> tuple[int, int]:
        return 3, self.image_size

    def sample_bytes(self) -> int:
        return 3 * self.image_size**2  # uint8 until it is on the device


@dataclass
class SyntheticConfig(LabelledImagesConfig):
    """Random images with a class-dependent pattern, made on the fly: for benchmarks."""

    name: str = "synthetic"
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
class LinearRegressionDataConfig(DataConfig):
    """A generated table: y = w x + b + noise."""

    name: str = "linear_regression"
    is_regression: ClassVar[bool | None] = True
    samples: int = key(2048, "samples in the training set", at_least=1)
    test_samples: int = key(512, "samples in the test set", at_least=1)
    features: int = key(20, "columns of the table", at_least=1)
    noise: float = key(0.1, "standard deviation of the noise", at_least=0)

    def in_memory_bytes(self) -> int:
        return (self.samples + self.test_samples) * self.sample_bytes()

    def sample_bytes(self) -> int:
        return 4 * self.features


_LIBRARY_BYTES = 12 * 2**20
"""Of Python's standard library without its tests, about; only whether it fits into a GPU's memory
hangs on it."""
_TOKENIZER = "tokenizer.json of Hugging Face's tokenizers"


@dataclass
class TextConfig(DataConfig):
    """Text files as bytes, or through a tokenizer; by default Python's own standard library,
    without a download."""

    name: str = "text"
    task: ClassVar[str | None] = "language_model"
    pattern: ClassVar[str] = "*.txt"
    path: str | None = key(
        None, "file or folder; null: the .py files of Python's standard library", is_path=True
    )
    glob: str | None = key(None, "files of the folder, below it too; null: *.txt")
    length: int = key(256, "tokens of a window, which is a sample", at_least=2)
    test_part: float = key(
        0.05, "part of the text that is held out, whole files where they fit", above=0, below=1
    )
    tokenizer: str | None = key(None, f"{_TOKENIZER}; null: each byte is a token")

    def in_memory_bytes(self) -> int:
        width = (
            4 if self.tokenizer else 1
        )  # of four bytes at most; there are fewer tokens than bytes
        if self.path:
            return width * _bytes_of(self.path, self.glob or self.pattern)
        return width * _LIBRARY_BYTES

    def sample_bytes(self) -> int:
        return 16 * self.length


@dataclass
class TokensConfig(DataConfig):
    """Files of tokens, mapped into memory: .bin as nanoGPT (no header) and llm.c (with one) write
    them."""

    name: str = "tokens"
    task: ClassVar[str | None] = "language_model"
    pattern: ClassVar[str] = "*.bin"
    path: str | None = key(
        None,
        "a .bin file, or a folder with some; those with val or test in their names are held out",
    )
    length: int = key(1024, "tokens of a window, which is a sample", at_least=2)
    vocabulary: int = key(50_257, "number of tokens; those of the files are below it", at_least=1)
    dtype: str = key(
        "uint16", "type of the tokens in files without a header", choices=("uint16", "uint32")
    )
    test_part: float = key(
        0.05, "part that is held out where no file is: the end of the last one", above=0, below=1
    )
    tokenizer: str | None = key(None, f"{_TOKENIZER}, to show text that the model writes")
    bytes_per_token: float | None = key(
        None, "bytes of text that a token stands for, for bits_per_byte", above=0
    )

    def in_memory_bytes(self) -> int:
        return _bytes_of(self.path, self.pattern) if self.path else 0

    def sample_bytes(self) -> int:
        return 16 * self.length


@functools.lru_cache(maxsize=1)  # asked several times, and a folder may hold many files
def _bytes_of(path: str, glob: str) -> int:
    """Of a file, or of the files in a folder that match; 0 if there is none."""
    files = [Path(path)] if Path(path).is_file() else Path(path).rglob(glob)
    return sum(file.stat().st_size for file in files if file.is_file())


DATA_SETS = (
    DigitsConfig,
    MnistConfig,
    FashionMnistConfig,
    Cifar10Config,
    ImageFolderConfig,
    SyntheticConfig,
    LinearRegressionDataConfig,
    TextConfig,
    TokensConfig,
)
