"""Image folders: files are decoded and cropped to uint8, and normalised on the device.

They are decoded on the host or on a GPU.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_train.data import augmentation
from ddp_train.data.crop import CropBox, crop_box_for, resize_crop, resize_crops
from ddp_train.data.device_copy import to_device
from ddp_train.data.image_files import decode_image, in_mode, pixels_of, undecodable
from ddp_train.data.image_folder.decoder import (
    decode_jpegs,
    decode_or_skip,
    is_jpeg,
    is_usual_jpeg,
)
from ddp_train.data.rng import hash_key, uniform
from ddp_train.errors import DataError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
DRAWS = 5
"""For each sample: four for its crop, one for its mirroring."""


def open_image_folder(
    root: str, image_size: int, augment: bool, decode: str, seed: int
) -> tuple[FolderSource, FolderSource]:
    """The training and the test split of a folder.

    Without train/, which a run that reads the test set alone need not have, it is twice the test
    split. Raises DataError if they differ in classes.
    """
    test = FolderSource(Path(root, "val"), image_size, False, seed, decode)
    if not Path(root, "train").is_dir():
        return test, test
    train = FolderSource(Path(root, "train"), image_size, augment, seed, decode)
    if train.classes != test.classes:
        different = sorted(set(train.classes) ^ set(test.classes))
        raise DataError(
            f"data.root={root}: not all classes are in both train/ and val/:"
            f" {', '.join(different[:5])}",
            "make a folder for each class in both",
        )
    return train, test


def open_image_set(
    where: str,
    given: str,
    train: FolderSource,
    root: str,
    image_size: int,
    augment: bool,
    decode: str,
) -> FolderSource:
    """A further set of images that are scored.

    where: key and value that name it, for messages.
    given: the folder, a path relative to `root`, or an absolute one.
    train: the training set, which has the classes.

    Raises DataError if they differ.
    """
    folder = Path(root, given)
    source = FolderSource(folder, image_size, False, train.seed, decode)
    if source.classes != train.classes:
        different = sorted(set(train.classes) ^ set(source.classes))
        raise DataError(
            f"{where}: its classes differ from those of the training set:"
            f" {', '.join(different[:5])}",
            "make a folder for each class in both",
        )
    return source


class FolderSource:
    """One split of an image folder with one sub-folder per class. Images are decoded on access.

    A sample's pixels depend on the decoder, the seed, the epoch and the sample number, never on its
    batch.
    """

    def __init__(
        self, folder: Path, image_size: int, augmented: bool, seed: int, decode: str
    ) -> None:
        """Lists the files.

        decode: `pil` (PIL decodes and resizes); with any other value `get_batch` uses torchvision's
            decoder (libjpeg-turbo) on the host, and `crops_on` decodes on a GPU. PIL decodes the
            files that torchvision does not support.

        Raises DataError if a class has no image.
        """
        self.classes = _class_folders(folder)
        samples = _labelled_files(folder, self.classes)
        labels_with_images = {label for _, label in samples}
        for label, name in enumerate(self.classes):
            if label not in labels_with_images:
                raise _without_images(folder / name)
        if not samples:
            raise _without_images(folder)
        self.paths = [path for path, _ in samples]
        self.targets = torch.tensor([label for _, label in samples])
        self.image_size = image_size
        self.augmented = augmented
        self.seed = seed
        self.decode = decode
        self.erasing: augmentation.Erasing | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def select(self, numbers: np.ndarray) -> FolderSource:
        """See BatchSource."""
        selection = copy.copy(self)
        selection.paths = [self.paths[number] for number in numbers.tolist()]
        selection.targets = self.targets[torch.from_numpy(numbers)]
        return selection

    @property
    def outputs(self) -> int:
        return len(self.classes)

    def image_facts(self) -> dict[str, Any]:
        """The arguments of `data.raw_input.ImageInput`."""
        side = self.image_size
        return {"shape": [3, side, side], "mean": IMAGENET_MEAN, "std": IMAGENET_STD, "crop": True}

    def get_batch(self, indices: np.ndarray, epoch: int | None) -> tuple[Tensor, Tensor]:
        """Crops, uint8 [n, 3, size, size], and labels, int64 [n].

        `finish` flips and normalises the crops.
        """
        size = self.image_size
        crops = torch.empty(len(indices), 3, size, size, dtype=torch.uint8)
        draws = self.draws(indices, epoch)
        for row, number, draws_of_sample in zip(
            crops.numpy(), indices.tolist(), draws, strict=True
        ):
            # torch would copy with all its threads in each of ours.
            np.copyto(row, self._crop(number, draws_of_sample))
        return crops, self.targets[torch.from_numpy(indices)]

    def finish(
        self, inputs: Tensor, indices: np.ndarray, epoch: int | None, dtype: torch.dtype
    ) -> Tensor:
        """The inputs of a model: crops, flipped at random and normalised, on their own device.

        inputs: crops of `get_batch` or `crops_on`.
        dtype: the number type of the result.
        """
        numbers = torch.from_numpy(indices)
        if self.augmented and epoch is not None:
            draws = uniform(hash_key(self.seed, "augment", epoch), numbers, DRAWS)[:, 4]
            inputs = augmentation.flip(inputs, to_device(draws.contiguous(), inputs.device))
        images = augmentation.normalise(inputs, IMAGENET_MEAN, IMAGENET_STD, dtype)
        if self.erasing and epoch is not None:
            images = self.erasing(images, numbers, epoch)
        return images

    def read(self, indices: np.ndarray) -> list[np.ndarray]:
        """The contents of the files, uint8 [bytes] each. Raises DataError."""
        return [self.read_file(number) for number in indices.tolist()]

    def read_file(self, number: int) -> np.ndarray:
        """The content of a sample's file, uint8 [bytes]. Raises DataError."""
        try:
            return np.fromfile(self.paths[number], np.uint8)
        except OSError as error:
            raise self._corrupt(number, error) from error

    def crops_on(
        self,
        device: torch.device,
        files: Sequence[np.ndarray],
        indices: np.ndarray,
        epoch: int | None,
    ) -> Tensor:
        """Crops as those of `get_batch`, decoded on `device`.

        Other formats than JPEG are decoded on the host, and so are files without a JPEG end marker,
        since a GPU would decode a truncated file without an error, and those whose colours are not
        gray or YCbCr.

        files: what `read` returned for `indices`.
        """
        usual = [torch.from_numpy(file) if is_usual_jpeg(file) else None for file in files]
        images = []
        for image, number, file in zip(
            decode_or_skip(device, usual), indices.tolist(), files, strict=True
        ):
            if image is None:
                image = self._decode(number, file).to(device)
            images.append(image)
        boxes = [
            self._crop_box(image.shape, draws)
            for image, draws in zip(images, self.draws(indices, epoch), strict=True)
        ]
        return resize_crops(images, boxes, self.image_size)

    def draws(self, indices: np.ndarray, epoch: int | None) -> list[list[float] | None]:
        """Five numbers for each sample, uniform in [0, 1); None where nothing is augmented."""
        if not self.augmented or epoch is None:
            return [None] * len(indices)
        key = hash_key(self.seed, "augment", epoch)
        return uniform(key, torch.from_numpy(indices), DRAWS).tolist()

    def _crop_box(self, shape: Sequence[int], draws: list[float] | None) -> CropBox:
        return crop_box_for(shape[-2], shape[-1], self.image_size, draws and draws[:4])

    def _crop(self, number: int, draws: list[float] | None) -> np.ndarray:
        """The crop of a sample, uint8 [3, size, size]."""
        file = self.read_file(number)
        if self.decode == "pil":
            return self._crop_by_pil(number, file, draws)
        image = self._decode(number, file)
        box = self._crop_box(image.shape, draws)
        return resize_crop(image, box, self.image_size).numpy()

    def _decode(self, number: int, file: np.ndarray) -> Tensor:
        """uint8 [3, height, width], decoded by torchvision, or by PIL if torchvision cannot."""
        if is_jpeg(file):
            try:
                return decode_jpegs([torch.from_numpy(file)], torch.device("cpu"))[0]
            except RuntimeError:  # PIL supports more, and its errors name the cause
                pass
        return pixels_of(self._decode_by_pil(number, file))

    def _crop_by_pil(self, number: int, file: np.ndarray, draws: list[float] | None) -> np.ndarray:
        from PIL.Image import Resampling

        image = self._decode_by_pil(number, file)
        box = self._crop_box((image.height, image.width), draws)
        cut = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
        resized = cut.resize((box.columns, box.rows), Resampling.BILINEAR)
        whole = np.asarray(resized).transpose(2, 0, 1)
        rows = slice(box.first_row, box.first_row + self.image_size)
        columns = slice(box.first_column, box.first_column + self.image_size)
        return whole[:, rows, columns]

    def _decode_by_pil(self, number: int, file: np.ndarray) -> Any:
        """An image of PIL in RGB."""
        try:
            return in_mode(decode_image(file.tobytes()), "RGB")
        except ValueError as error:
            raise self._corrupt(number, error) from error

    def _corrupt(self, number: int, error: Exception) -> DataError:
        return undecodable(f"{self.paths[number]} (sample {number})", error)


def _class_folders(folder: Path) -> list[str]:
    """The names of the sub-folders, as torchvision's ImageFolder has them, but for hidden ones.

    Jupyter leaves .ipynb_checkpoints wherever it opens one.
    """
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.is_dir() and not entry.name.startswith(".")
    )


def _labelled_files(folder: Path, classes: Sequence[str]) -> list[tuple[str, int]]:
    """The path and the label of each image that does not lie in a hidden folder.

    They are in torchvision's order: by folder, then by name. A link to a folder around it is not
    followed: it would bring the same files again, forty times.
    """
    samples = []
    for label, name in enumerate(classes):
        for path, names in sorted(_folders_below(folder / name)):
            samples += [(os.path.join(path, file), label) for file in sorted(names)]  # noqa: PTH118
    return samples


def _folders_below(top: Path) -> Iterator[tuple[str, list[str]]]:
    """Each folder that is not hidden, links among them, and the names of its images."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    around = {str(top): {os.path.realpath(top)}}
    for path, folders, files in os.walk(top, followlinks=True):
        kept = []
        for name in folders:
            inner = os.path.join(path, name)  # noqa: PTH118
            real = os.path.realpath(inner)
            if name.startswith(".") or real in around[path]:
                continue
            kept.append(name)
            around[inner] = around[path] | {real}
        folders[:] = kept
        yield (
            path,
            [
                name
                for name in files
                if name.lower().endswith(IMG_EXTENSIONS) and not name.startswith(".")
            ],
        )


def _without_images(folder: Path) -> DataError:
    return DataError(f"{folder} holds no image", "add images, or remove the folder of this class")
