"""What every data set answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ddp_train.options.key import key


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
