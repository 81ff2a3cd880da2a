"""Images in a folder per class: read, decoded and cropped to uint8 on the host or the GPU; the rest on the device."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddp_train.data import augment
from ddp_train.data.copy_stream import sent
from ddp_train.data.crop import CropBox, resized, resized_together, window
from ddp_train.data.rng import hash_key, uniform
from ddp_train.errors import ConfigError, DataError
from ddp_train.text import first_line

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
JPEG_START, JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"


class FolderSource:
    """One split, its images decoded when they are asked for.

    decode: pil (PIL decodes and resizes), else torchvision's decoder, libjpeg-turbo, on the host, whatever calls
    `get_batch`; `crops_on` decodes on a GPU. A file that torchvision cannot take, PIL may. Draws are keyed by seed,
    epoch and sample; what a sample becomes depends on the decoder besides, never on its batch.
    """

    def __init__(self, folder: Path, image_size: int, augmented: bool, seed: int, decode: str) -> None:
        from torchvision.datasets import ImageFolder

        images = ImageFolder(str(folder))
        self.classes, self.paths = images.classes, [path for path, _ in images.samples]
        self.targets = torch.tensor(images.targets)
        self.image_size, self.augmented, self.seed, self.decode = image_size, augmented, seed, decode

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def outputs(self) -> int:
        return len(self.classes)

    def get_batch(self, indices: np.ndarray, epoch: int | None) -> tuple[Tensor, Tensor]:
        """Crops, uint8 [n, 3, size, size], and labels. `finish` mirrors and normalises them."""
        crops = self.empty(len(indices))
        self.fill(crops, indices, epoch)
        return crops, self.targets[torch.from_numpy(indices)]

    def empty(self, count: int, pinned: bool = False) -> Tensor:
        """Room for `count` crops."""
        return torch.empty(count, 3, self.image_size, self.image_size, dtype=torch.uint8, pin_memory=pinned)

    def fill(self, crops: Tensor, indices: np.ndarray, epoch: int | None) -> None:
        """Writes the crop of each sample into its row: contiguous, uint8 [n, 3, size, size]."""
        crop = self._crop_by_pil if self.decode == "pil" else self._crop
        for row, number, draws in zip(crops.numpy(), indices.tolist(), self._draws(indices, epoch), strict=True):
            np.copyto(row, crop(number, draws))  # torch would copy with all its threads, in each thread that calls this

    def finish(self, crops: Tensor, indices: np.ndarray, epoch: int | None, dtype: torch.dtype) -> Tensor:
        """The inputs of a model, from the crops of `get_batch`: mirrored by draw and normalised, where the crops
        are."""
        if self.augmented and epoch is not None:
            draws = uniform(hash_key(self.seed, "augment", epoch), torch.from_numpy(indices), 5)[:, 4]
            crops = augment.flip(crops, sent(draws.contiguous(), crops.device))
        return augment.normalise(crops, IMAGENET_MEAN, IMAGENET_STD, dtype)

    def read(self, indices: np.ndarray) -> list[np.ndarray]:
        """The bytes of the files."""
        return [self._read(number) for number in indices.tolist()]

    def crops_on(
        self, device: torch.device, files: Sequence[np.ndarray], indices: np.ndarray, epoch: int | None
    ) -> Tensor:
        """Crops as `get_batch` gives them, on a device that decodes them itself. files: what `read` gave for `indices`.

        What its decoder cannot take is decoded on the host: other formats, and files that do not end as a JPEG does, of
        which a GPU would show what there is without a word.
        """
        images = decoded_on(device, [torch.from_numpy(file) if _is_whole_jpeg(file) else None for file in files])
        for row, (number, file) in enumerate(zip(indices.tolist(), files, strict=True)):
            if images[row] is None:
                images[row] = self._decoded(number, file).to(device)
        whole = [image for image in images if image is not None]
        windows = [
            self._window(image.shape, draws) for image, draws in zip(whole, self._draws(indices, epoch), strict=True)
        ]
        return resized_together(whole, windows, self.image_size)

    def _draws(self, indices: np.ndarray, epoch: int | None) -> list[list[float] | None]:
        if not self.augmented or epoch is None:
            return [None] * len(indices)
        return uniform(hash_key(self.seed, "augment", epoch), torch.from_numpy(indices), 5).tolist()

    def _window(self, shape: Sequence[int], draws: list[float] | None) -> CropBox:
        return window(shape[-2], shape[-1], self.image_size, draws and draws[:4])

    def _read(self, number: int) -> np.ndarray:
        try:
            return np.fromfile(self.paths[number], np.uint8)
        except OSError as error:
            raise self._corrupt(number, error) from error

    def _crop(self, number: int, draws: list[float] | None) -> np.ndarray:
        image = self._decoded(number, self._read(number))
        return resized(image, self._window(image.shape, draws), self.image_size).numpy()

    def _decoded(self, number: int, file: np.ndarray) -> Tensor:
        """uint8 [3, height, width], by torchvision, or by PIL if that cannot."""
        if file[:3].tobytes() == JPEG_START:
            try:
                return _decode([torch.from_numpy(file)], torch.device("cpu"))[0]
            except RuntimeError:  # PIL takes more, and says of the rest what is wrong
                pass
        return torch.from_numpy(np.array(self._decoded_by_pil(number, file))).permute(2, 0, 1)

    def _crop_by_pil(self, number: int, draws: list[float] | None) -> np.ndarray:
        from PIL.Image import Resampling

        image = self._decoded_by_pil(number, self._read(number))
        at, size = self._window((image.height, image.width), draws), self.image_size
        box = image.crop((at.left, at.top, at.left + at.width, at.top + at.height))
        whole = np.asarray(box.resize((at.columns, at.rows), Resampling.BILINEAR)).transpose(2, 0, 1)
        return whole[:, at.first_row : at.first_row + size, at.first_column : at.first_column + size]

    def _decoded_by_pil(self, number: int, file: np.ndarray):
        """A PIL image in RGB."""
        from PIL import Image

        try:
            return Image.open(io.BytesIO(file.tobytes())).convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # what PIL raises
            raise self._corrupt(number, error) from error

    def _corrupt(self, number: int, error: Exception) -> DataError:
        text = str(error) if "<_io.BytesIO" not in str(error) else "no image format that PIL knows"
        return DataError(
            f"{self.paths[number]} (sample {number}) cannot be decoded: {text}", "repair or remove the file"
        )


def _is_whole_jpeg(file: np.ndarray) -> bool:
    return file[:3].tobytes() == JPEG_START and file[-2:].tobytes() == JPEG_END


def decoded_on(device: torch.device, files: Sequence[Tensor | None]) -> list[Tensor | None]:
    """uint8 [3, height, width] on the device for each JPEG file in memory; None for None and what cannot be decoded."""
    there = [row for row, file in enumerate(files) if file is not None]
    images: list[Tensor | None] = [None] * len(files)
    for rows in (there, *([row] for row in there)):  # all together; if one corrupts that, each alone
        try:
            decoded = _decode([file for row in rows if (file := files[row]) is not None], device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            continue
        for row, image in zip(rows, decoded, strict=True):
            images[row] = image
        if rows is there:
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
        told = f"this torchvision cannot decode on {device}: {first_line(error)}; use data.decode=processes"
        raise ConfigError([f"data.decode=gpu: {told}"]) from error
