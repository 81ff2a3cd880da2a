"""The option data=image_folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ddp_train.data.config import LabelledImagesConfig
from ddp_train.options.key import key
from ddp_train.options.problem import Problem
from ddp_train.options.schema import Config


@dataclass
class ImageFolderConfig(LabelledImagesConfig):
    """One folder per class under ROOT/train and ROOT/val: the layout of ImageNet."""

    name: str = "image_folder"
    implementation: ClassVar[str] = "ddp_train.data.image_folder.source:open_image_folder"
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

    def missing(self, config: Config) -> Iterator[Problem]:
        yield from super().missing(config)
        if self.decode == "gpu" and config.device == "cpu":
            yield Problem("data.decode=gpu", "needs a GPU", "use data.decode=processes")
            return
        for name in self.class_folders:
            folder = Path(self.root, name)
            if folder.is_dir() and any(entry.is_dir() for entry in folder.iterdir()):
                continue
            yield Problem(
                f"data.root={self.root}",
                f"{folder} must hold a folder per class",
                f"name the folder that holds {name}/",
            )
            return
