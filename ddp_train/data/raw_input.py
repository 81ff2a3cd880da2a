"""Raw samples, photographs for instance, as inputs of a trained model.

They are used outside of a run, without its data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ddp_train.data.augmentation import normalise
from ddp_train.data.crop import crop_box_for, resize_crop
from ddp_train.data.image_files import OVER_8_BITS, NotPixelsError, decode_image, in_mode, pixels_of
from ddp_train.data.sample_tensors import as_tensors
from ddp_train.data.sample_transforms import Transform, apply_transform
from ddp_train.errors import DataError

ToInput = Callable[[Any], Tensor]
"""A raw sample -> an input of the model, without the dimension of the batch."""
PIL_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
"""Modes of PIL by the number of channels that a model takes."""


@dataclass(frozen=True)
class ImageInput:
    """Images as a built-in data set gives them to a model.

    Its fields are written into checkpoints.
    """

    shape: Sequence[int]
    """[channels, height, width]."""
    mean: Sequence[float]
    """Mean of each channel, of pixels from 0 to 1."""
    std: Sequence[float]
    """Standard deviation of each channel."""
    crop: bool = False
    """The middle is cut out, as of photographs; else all of the image is resized."""

    def __call__(self, image: Any) -> Tensor:
        """The normalised image, float32 [channels, height, width].

        image: a path, an image of PIL, or pixels [h, w], [h, w, c] or [c, h, w]: uint8 from 0 to
            255, or floating point from 0 to 1.
        """
        pixels = self.pixels(image)
        channels = self.shape[0]
        if len(pixels) != channels:
            raise DataError(
                f"an image has {len(pixels)} channels, but the model takes {channels}",
                "pass a path or an image of PIL (it is converted), or convert the image yourself",
            )
        resized = self._resize(pixels)
        if resized.dtype == torch.uint8:
            batch = normalise(resized[None], tuple(self.mean), tuple(self.std), torch.float32)
            return batch[0]
        mean = torch.tensor(self.mean)[:, None, None]
        std = torch.tensor(self.std)[:, None, None]
        return (resized - mean) / std

    def pixels(self, image: Any) -> Tensor:
        """The pixels of an image, uint8 or float32 [c, h, w]. Raises DataError."""
        if isinstance(image, str | PathLike):
            path = Path(image)
            return self._pixels_of_pil(open_image(path), str(path))
        if hasattr(image, "convert"):
            return self._pixels_of_pil(image, "an image of PIL")
        pixels = _bytes_or_floats(torch.as_tensor(image))
        if pixels.ndim == 2:
            return pixels[None]
        if pixels.ndim != 3:
            raise DataError(
                f"pixels of shape {list(pixels.shape)} are not one image",
                "pass one image: [h, w], [h, w, c] or [c, h, w]",
            )
        if self._is_channels_last(pixels):
            return pixels.permute(2, 0, 1)
        return pixels

    def _resize(self, pixels: Tensor) -> Tensor:
        """The pixels in the size that the model takes."""
        _, height, width = self.shape
        if self.crop and pixels.dtype == torch.uint8:  # as image_folder does it
            box = crop_box_for(pixels.shape[-2], pixels.shape[-1], height, None)
            return resize_crop(pixels, box, height)
        if pixels.shape[-2:] == (height, width):
            return pixels
        floats = pixels.float() / (255 if pixels.dtype == torch.uint8 else 1)
        batch = functional.interpolate(
            floats[None], (height, width), mode="bilinear", antialias=True
        )
        return batch[0]

    def _pixels_of_pil(self, image: Any, name: str) -> Tensor:
        """The pixels of an image of PIL, uint8 [channels, h, w]. Raises DataError by its name."""
        channels = self.shape[0]
        if channels not in PIL_MODES:
            raise DataError(
                f"{name}: the model takes {channels} channels, which no image of PIL has",
                "pass pixels, [c, h, w]",
            )
        try:
            return pixels_of(in_mode(image, PIL_MODES[channels]))
        except NotPixelsError as error:
            raise DataError(f"{name}: {error}", OVER_8_BITS) from error
        except ValueError as error:
            raise DataError(f"{name}: {error}", "pass its pixels") from error

    def _is_channels_last(self, pixels: Tensor) -> bool:
        """True for [h, w, c], False for [c, h, w]. Raises DataError if it may be either."""
        may_be_first = pixels.shape[0] == self.shape[0]
        may_be_last = pixels.shape[2] == self.shape[0]
        if may_be_first and may_be_last:
            raise DataError(
                f"pixels of shape {list(pixels.shape)} may be [c, h, w] or [h, w, c]",
                "pass an image of PIL, or a path",
            )
        if may_be_first or may_be_last:
            return may_be_last
        return pixels.shape[0] not in (1, 3, 4) and pixels.shape[2] in (1, 3, 4)


@dataclass(frozen=True)
class TransformedInput:
    """Inputs of your own data set, through the transforms that its scored samples go through."""

    transforms: Sequence[Transform]

    def __call__(self, sample: Any) -> Tensor:
        """The input of a model.

        sample: what the data set returns as an input; a path is opened as an image.
        """
        if isinstance(sample, str | PathLike):
            sample = open_image(Path(sample))
        for transform in self.transforms:
            sample = apply_transform(transform, sample)
        return torch.as_tensor(as_tensors(sample))


@dataclass(frozen=True)
class TextInput:
    """Texts as the tokens of `data=text`."""

    encode: Callable[[str], list[int]]

    def __call__(self, text: str) -> Tensor:
        """The tokens of a text, int64 [tokens]."""
        return torch.tensor(self.encode(text))


def number_input(sample: Any) -> Tensor:
    """A row of a table, float32; integers, such as tokens, stay what they are."""
    values = torch.as_tensor(sample)
    return values.float() if values.is_floating_point() else values


def open_image(path: Path) -> Any:
    """An image of PIL. Raises DataError."""
    try:
        return decode_image(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read as an image: {error}", "pass a file in a format that PIL knows"
        ) from error


def _bytes_or_floats(pixels: Tensor) -> Tensor:
    """Pixels that are uint8 as they are, others as float32.

    Raises DataError if these are not floating-point numbers from 0 to 1.
    """
    if pixels.dtype == torch.uint8:
        return pixels
    remedy = "pass uint8 (0 to 255), or floating-point numbers from 0 to 1"
    if not pixels.is_floating_point():
        raise DataError(f"pixels are of {pixels.dtype}", remedy)
    low = float(pixels.min())
    high = float(pixels.max())
    if not (low >= 0 and high <= 1):
        raise DataError(f"pixels of {pixels.dtype} lie between {low:g} and {high:g}", remedy)
    return pixels.float()
