"""Image folders: files are read, decoded and cropped to uint8 on the host or a GPU, and normalised
on the device."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_train.data import augmentation
from ddp_train.data.crop import CropBox, crop_box_for, resize_crop, resize_crops
from ddp_train.data.device_copy import to_device
from ddp_train.data.rng import hash_key, uniform
from ddp_train.errors import ConfigError, DataError
from ddp_train.text import first_line

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
JPEG_START = b"\xff\xd8\xff"
JPEG_END = b"\xff\xd9"


class FolderSource:
    """One split of an image folder with one sub-folder per class. Images are decoded on access.

    decode: `pil` (PIL decodes and resizes); with any other value `get_batch` uses torchvision's
    decoder (libjpeg-turbo) on the host, and `crops_on` decodes on a GPU. PIL decodes the files that
    torchvision does not support. A sample's pixels depend on the decoder, the seed, the epoch and
    the sample number, never on its batch.
    """

    def __init__(
        self, folder: Path, image_size: int, augmented: bool, seed: int, decode: str
    ) -> None:
        from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

        # As torchvision's ImageFolder, but for hidden folders: Jupyter leaves .ipynb_checkpoints
        # wherever it opens one.
        self.classes = sorted(
            one.name for one in folder.iterdir() if one.is_dir() and not one.name.startswith(".")
        )
        numbers = {name: number for number, name in enumerate(self.classes)}
        if numbers:
            samples = make_dataset(str(folder), numbers, IMG_EXTENSIONS, allow_empty=True)
        else:
            samples = []
        samples = [one for one in samples if "/." not in one[0][len(str(folder)) :]]
        empty = sorted({*self.classes} - {self.classes[number] for _, number in samples})
        if empty or not samples:
            where = folder / empty[0] if empty else folder
            raise DataError(
                f"{where} holds no image", "put some in, or remove the folder of the class"
            )
        self.paths = [path for path, _ in samples]
        self.targets = torch.tensor([number for _, number in samples])
        self.image_size = image_size
        self.augmented = augmented
        self.seed = seed
        self.decode = decode
        self.erasing: augmentation.Erasing | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def select(self, numbers: np.ndarray) -> FolderSource:
        """Some of these samples as a split of their own. numbers: int64 [n]."""
        other = copy.copy(self)
        other.paths = [self.paths[number] for number in numbers.tolist()]
        other.targets = self.targets[torch.from_numpy(numbers)]
        return other

    @property
    def outputs(self) -> int:
        return len(self.classes)

    def image_facts(self) -> dict[str, Any]:
        """What `data.raw_input.ImageInput` needs."""
        side = self.image_size
        return {"shape": [3, side, side], "mean": IMAGENET_MEAN, "std": IMAGENET_STD, "crop": True}

    def get_batch(self, indices: np.ndarray, epoch: int | None) -> tuple[Tensor, Tensor]:
        """Crops, uint8 [n, 3, size, size], which `finish` flips and normalises, and labels, int64
        [n]."""
        crops = self.empty(len(indices))
        self.fill(crops, indices, epoch)
        return crops, self.targets[torch.from_numpy(indices)]

    def empty(self, count: int, pinned: bool = False) -> Tensor:
        """An uninitialised tensor for `count` crops: uint8 [count, 3, size, size]."""
        return torch.empty(
            count, 3, self.image_size, self.image_size, dtype=torch.uint8, pin_memory=pinned
        )

    def fill(self, crops: Tensor, indices: np.ndarray, epoch: int | None) -> None:
        """Writes the crop of each sample into its row of `crops`: contiguous, uint8 [n, 3, size,
        size]."""
        crop = self._crop_by_pil if self.decode == "pil" else self._crop
        for row, number, draws in zip(
            crops.numpy(), indices.tolist(), self._draws(indices, epoch), strict=True
        ):
            np.copyto(
                row, crop(number, draws)
            )  # torch would copy with all its threads in each of ours

    def finish(
        self, crops: Tensor, indices: np.ndarray, epoch: int | None, dtype: torch.dtype
    ) -> Tensor:
        """The inputs of a model: crops of `get_batch`, flipped at random and normalised, on the
        device of the crops."""
        if self.augmented and epoch is not None:
            draws = uniform(hash_key(self.seed, "augment", epoch), torch.from_numpy(indices), 5)[
                :, 4
            ]
            crops = augmentation.flip(crops, to_device(draws.contiguous(), crops.device))
        images = augmentation.normalise(crops, IMAGENET_MEAN, IMAGENET_STD, dtype)
        if self.erasing and epoch is not None:
            images = self.erasing(images, torch.from_numpy(indices), epoch)
        return images

    def read(self, indices: np.ndarray) -> list[np.ndarray]:
        """The contents of the files, uint8 [bytes] each."""
        return [self._read(number) for number in indices.tolist()]

    def crops_on(
        self,
        device: torch.device,
        files: Sequence[np.ndarray],
        indices: np.ndarray,
        epoch: int | None,
    ) -> Tensor:
        """Crops as those of `get_batch`, decoded on `device`. files: what `read` returned for
        `indices`.

        Other formats than JPEG are decoded on the host, and so are files without a JPEG end marker:
        a GPU would decode a truncated file without an error.
        """
        images = decoded_on(
            device, [torch.from_numpy(file) if _is_whole_jpeg(file) else None for file in files]
        )
        for row, (number, file) in enumerate(zip(indices.tolist(), files, strict=True)):
            if images[row] is None:
                images[row] = self._decoded(number, file).to(device)
        decoded = [image for image in images if image is not None]
        boxes = [
            self._crop_box(image.shape, draws)
            for image, draws in zip(decoded, self._draws(indices, epoch), strict=True)
        ]
        return resize_crops(decoded, boxes, self.image_size)

    def _draws(self, indices: np.ndarray, epoch: int | None) -> list[list[float] | None]:
        if not self.augmented or epoch is None:
            return [None] * len(indices)
        return uniform(hash_key(self.seed, "augment", epoch), torch.from_numpy(indices), 5).tolist()

    def _crop_box(self, shape: Sequence[int], draws: list[float] | None) -> CropBox:
        return crop_box_for(shape[-2], shape[-1], self.image_size, draws and draws[:4])

    def _read(self, number: int) -> np.ndarray:
        try:
            return np.fromfile(self.paths[number], np.uint8)
        except OSError as error:
            raise self._corrupt(number, error) from error

    def _crop(self, number: int, draws: list[float] | None) -> np.ndarray:
        image = self._decoded(number, self._read(number))
        return resize_crop(image, self._crop_box(image.shape, draws), self.image_size).numpy()

    def _decoded(self, number: int, file: np.ndarray) -> Tensor:
        """uint8 [3, height, width], decoded by torchvision, or by PIL if torchvision cannot."""
        if file[:3].tobytes() == JPEG_START:
            try:
                return _decode([torch.from_numpy(file)], torch.device("cpu"))[0]
            except RuntimeError:  # PIL supports more, and its errors name the cause
                pass
        return torch.from_numpy(np.array(self._decoded_by_pil(number, file))).permute(2, 0, 1)

    def _crop_by_pil(self, number: int, draws: list[float] | None) -> np.ndarray:
        from PIL.Image import Resampling

        image = self._decoded_by_pil(number, self._read(number))
        box = self._crop_box((image.height, image.width), draws)
        size = self.image_size
        cut = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
        whole = np.asarray(cut.resize((box.columns, box.rows), Resampling.BILINEAR)).transpose(
            2, 0, 1
        )
        return whole[
            :, box.first_row : box.first_row + size, box.first_column : box.first_column + size
        ]

    def _decoded_by_pil(self, number: int, file: np.ndarray):
        """A PIL image in RGB."""
        from PIL import Image

        try:
            return Image.open(io.BytesIO(file.tobytes())).convert("RGB")
        except (
            OSError,
            ValueError,
            SyntaxError,
            Image.DecompressionBombError,
        ) as error:  # what PIL raises
            raise self._corrupt(number, error) from error

    def _corrupt(self, number: int, error: Exception) -> DataError:
        if "<_io.BytesIO" not in str(error):
            text = str(error)
        else:
            text = "no image format that PIL knows"
        return DataError(
            f"{self.paths[number]} (sample {number}) cannot be decoded: {text}",
            "repair or remove the file",
        )


def _is_whole_jpeg(file: np.ndarray) -> bool:
    return file[:3].tobytes() == JPEG_START and file[-2:].tobytes() == JPEG_END


def decoded_on(device: torch.device, files: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Decodes JPEG files in memory on `device`: uint8 [3, height, width] each; None for None and
    for corrupt files."""
    present = [row for row, file in enumerate(files) if file is not None]
    images: list[Tensor | None] = [None] * len(files)
    for rows in (
        present,
        *([row] for row in present),
    ):  # all at once; if a corrupt file makes that fail, one by one
        try:
            decoded = _decode([file for row in rows if (file := files[row]) is not None], device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            continue
        for row, image in zip(rows, decoded, strict=True):
            images[row] = image
        if rows is present:
            break
    return images


def _decode(files: list[Tensor], device: torch.device) -> list[Tensor]:
    from torchvision.io import ImageReadMode, decode_jpeg

    if not files:
        return []
    images = decode_jpeg(files, mode=ImageReadMode.RGB, device=device)
    return images if isinstance(images, list) else [images]


def require_decoder(device: torch.device) -> None:
    """Raises ConfigError if torchvision cannot decode a JPEG on this device."""
    from torchvision.io import encode_jpeg

    image = encode_jpeg(torch.zeros(3, 16, 16, dtype=torch.uint8))
    try:
        _decode([image] if isinstance(image, Tensor) else image, device)
    except RuntimeError as error:
        problem = (
            f"this torchvision cannot decode on {device}: {first_line(error)}; use"
            " data.decode=processes"
        )
        raise ConfigError([f"data.decode=gpu: {problem}"]) from error
