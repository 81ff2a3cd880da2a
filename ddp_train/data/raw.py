"""From a raw sample, a photograph for instance, to what a trained model takes: outside of a run,
without its data."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ddp_train.data.augment import normalise
from ddp_train.data.crop import crop_box_for, resized
from ddp_train.data.own import Transform, applied, as_tensors
from ddp_train.errors import DataError

ToInput = Callable[[Any], Tensor]
"""A raw sample -> an input of the model, without the dimension of the batch."""


@dataclass(frozen=True)
class ImageInput:
    """Images as a data set of ours gives them to a model. Its fields are written into
    checkpoints."""

    shape: Sequence[int]
    """[channels, height, width]."""
    mean: Sequence[float]
    std: Sequence[float]
    """Of each channel, of pixels from 0 to 1."""
    crop: bool = False
    """Whether the middle is cut out, as of photographs; else all of it is resized."""

    def __call__(self, image: Any) -> Tensor:
        """float32 [channels, height, width]. image: a path, an image of PIL, or pixels [h, w], [h,
        w, c] or [c, h, w]: uint8 from 0 to 255, or floating point from 0 to 1."""
        pixels = self.pixels(image)
        channels, height, width = self.shape
        if len(pixels) != channels:
            raise DataError(
                f"an image of {len(pixels)} channels, and the model takes {channels}",
                "pass a path or an image of PIL, which is converted, or convert it",
            )
        if self.crop and pixels.dtype == torch.uint8:  # as image_folder does it
            pixels = resized(pixels, crop_box_for(*pixels.shape[-2:], height, None), height)
        elif pixels.shape[-2:] != (height, width):
            floats = pixels.float() / (255 if pixels.dtype == torch.uint8 else 1)
            pixels = functional.interpolate(
                floats[None], (height, width), mode="bilinear", antialias=True
            )[0]
        if pixels.dtype == torch.uint8:
            return normalise(pixels[None], tuple(self.mean), tuple(self.std), torch.float32)[0]
        column = [torch.tensor(values)[:, None, None] for values in (self.mean, self.std)]
        return (pixels - column[0]) / column[1]

    def pixels(self, image: Any) -> Tensor:
        """uint8 or float32 [c, h, w]."""
        if isinstance(image, str | PathLike):
            image = opened(Path(image))
        if is_pil := hasattr(image, "convert"):
            image = np.array(image.convert({1: "L", 3: "RGB"}.get(self.shape[0], image.mode)))
            image = image if image.ndim == 2 else image.transpose(2, 0, 1)
        pixels = torch.as_tensor(image)
        if pixels.dtype != torch.uint8:
            low = float(pixels.min())
            high = float(pixels.max())
            if not (pixels.is_floating_point() and low >= 0 and high <= 1):
                raise DataError(
                    f"pixels of {pixels.dtype} from {low:g} to {high:g}",
                    "pass uint8, or numbers from 0 to 1",
                )
            pixels = pixels.float()
        if pixels.ndim == 2:
            return pixels[None]
        if pixels.ndim != 3:
            raise DataError(
                f"pixels of shape {list(pixels.shape)}",
                "pass one image: [h, w], [h, w, c] or [c, h, w]",
            )
        if is_pil:
            return pixels
        first, last = (pixels.shape[end] == self.shape[0] for end in (0, 2))
        if first and last:
            problem = f"pixels of shape {list(pixels.shape)} may be [c, h, w] or [h, w, c]"
            raise DataError(problem, "pass an image of PIL, or a path")
        is_last = last or (pixels.shape[0] not in (1, 3, 4) and pixels.shape[2] in (1, 3, 4))
        return pixels.permute(2, 0, 1) if is_last and not first else pixels


@dataclass(frozen=True)
class TransformedInput:
    """Inputs of a data set of the user's own: through the transforms that its scored samples go
    through."""

    transforms: Sequence[Transform]

    def __call__(self, sample: Any) -> Tensor:
        """sample: what the data set returns as an input; a path is opened as an image."""
        if isinstance(sample, str | PathLike):
            sample = opened(Path(sample))
        for transform in self.transforms:
            sample = applied(transform, sample)
        return torch.as_tensor(as_tensors(sample))


@dataclass(frozen=True)
class TextInput:
    """Texts as the tokens of `data=text`."""

    encode: Callable[[str], list[int]]

    def __call__(self, text: str) -> Tensor:
        """int64 [tokens]."""
        return torch.tensor(self.encode(text))


def numbers(sample: Any) -> Tensor:
    """A row of a table, float32; integers, such as tokens, stay what they are."""
    values = torch.as_tensor(sample)
    return values.float() if values.is_floating_point() else values


def opened(path: Path) -> Any:
    """An image of PIL. Raises DataError."""
    from PIL import Image

    try:
        return Image.open(io.BytesIO(path.read_bytes()))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{path} cannot be read as an image: {error}", "name a file that PIL knows"
        ) from error
