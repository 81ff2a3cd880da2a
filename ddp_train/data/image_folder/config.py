"""The option data=image_folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ddp_train.data.config import LabelledImagesConfig
from ddp_train.options.data_keys import named_test_sets, named_validation_sets
from ddp_train.options.key import key
from ddp_train.options.problem import Problem
from ddp_train.options.schema import Config
from ddp_train.text import shown

A_FOLDER = (
    "a folder that has one folder per class: a path relative to data.root, or an absolute path"
)


@dataclass
class ImageFolderConfig(LabelledImagesConfig):
    """One folder per class under ROOT/train and ROOT/val: the layout of ImageNet."""

    name: str = "image_folder"
    implementation: ClassVar[str] = "ddp_train.data.image_folder.source:open_image_folder"
    set_implementation: ClassVar[str] = "ddp_train.data.image_folder.source:open_image_set"
    class_folders: ClassVar[tuple[str, ...]] = ("train", "val")
    root: str = key("data/imagenet", "folder that holds train/ and val/", is_path=True)
    image_size: int = key(224, "height and width after the crop, in pixels", at_least=1)
    augment: bool = key(True, "random resized crop and horizontal flip")
    validation_sets: dict[str, Any] = named_validation_sets(A_FOLDER)
    test_sets: dict[str, Any] = named_test_sets(A_FOLDER)
    decode: str = key(
        "auto",
        "JPEG decoder: PIL, torchvision in loader processes, or the GPU; auto: gpu with fewer"
        " than 8 cores per GPU, else processes",
        choices=("auto", "pil", "processes", "gpu"),
    )

    def image_shape(self) -> tuple[int, int]:
        return 3, self.image_size

    def sample_bytes(self) -> int:
        return 3 * self.image_size**2  # uint8 until it is on the device

    def missing(self, config: Config) -> Iterator[Problem]:
        yield from super().missing(config)
        if self.decode == "gpu" and config.device == "cpu":
            yield Problem("data.decode=gpu", "needs a GPU", "use data.decode=processes")
            return
        for name in self._folders_read(config):
            folder = Path(self.root, name)
            if not has_folders(folder):
                remedy = f"name the folder that holds {name}/"
                if folder.is_dir():
                    remedy = f"sort the images of {folder} into one folder per class, or {remedy}"
                yield Problem(
                    f"data.root={self.root}", f"{folder} must hold a folder per class", remedy
                )
                return
        for key_of_set, given in self.sets_by_key().items():
            found = f"{key_of_set}={shown(given)}"
            if not isinstance(given, str):
                yield Problem(found, f"must name {A_FOLDER}")
                continue
            folder = Path(self.root, given)
            if not has_folders(folder):
                yield Problem(found, f"{folder} must hold a folder per class")
            elif folder.resolve() == Path(self.root, "train").resolve():
                yield Problem(
                    found,
                    "its images are the training images",
                    f"name another folder than train: {A_FOLDER}",
                )

    def _folders_read(self, config: Config) -> tuple[str, ...]:
        """The folders among `class_folders` whose images a run reads."""
        reads_test_alone = config.mode == "evaluate" and not config.evaluate.sets
        if config.mode == "predict":
            reads_test_alone = config.predict.split == "test"
        if reads_test_alone:
            return ("val",)
        return self.class_folders


def has_folders(path: Path) -> bool:
    """Tell whether a path is a folder with a folder in it."""
    return path.is_dir() and any(entry.is_dir() for entry in path.iterdir())
