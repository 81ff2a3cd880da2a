"""Samples as tensors, and several of them as a batch."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ddp_train.data.image_files import OVER_8_BITS, NotPixelsError, is_wide, pixels_of
from ddp_train.errors import DataError

TV_TENSORS = "torchvision.tv_tensors"
PIXEL_MODES = ("L", "LA", "RGB", "RGBA")
"""Modes of PIL whose bytes are pixels of 0 to 255."""


def collate(samples: list[Any]) -> Any:
    """A batch as torch's default_collate makes it, of samples as `as_tensors` makes them."""
    from torch.utils.data import default_collate

    return default_collate([as_tensors(sample) for sample in samples])


def as_tensors(sample: Any) -> Any:
    """A sample whose images and lists of numbers are tensors.

    Images, those of PIL and uint8 ones of torchvision, become float32 [channels, height, width]
    from 0 to 1. A mask that is the target becomes the classes of pixels, int64 [height, width].
    Lists of numbers within the sample become tensors.
    """
    if is_pair(sample) and is_instance(TV_TENSORS, "Mask", sample[1]):
        classes_of_pixels = sample[1].as_subclass(Tensor).squeeze(0).long()
        return as_tensors(sample[0]), classes_of_pixels
    if isinstance(sample, dict):
        return {name: _member_as_tensors(value) for name, value in sample.items()}
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return type(sample)(*map(_member_as_tensors, sample))
    if isinstance(sample, tuple | list):
        return type(sample)(map(_member_as_tensors, sample))
    if is_instance("PIL.Image", "Image", sample):
        return _pixels(sample)
    if isinstance(sample, Tensor):
        plain = sample.as_subclass(Tensor)
        if is_instance(TV_TENSORS, "Image", sample) and sample.dtype == torch.uint8:
            return plain.float().div(255)
        return plain
    return sample


def is_pair(value: Any) -> bool:
    """True for a tuple or list of two: (input, target), or batches of them."""
    return isinstance(value, tuple | list) and len(value) == 2


def is_instance(module: str, name: str, value: Any) -> bool:
    """True if a value is an instance of `module.name`. The module is not imported for it."""
    if module not in sys.modules:
        return False
    return isinstance(value, getattr(sys.modules[module], name, ()))


def _member_as_tensors(value: Any) -> Any:
    is_list = isinstance(value, list) and bool(value)
    if is_list and all(isinstance(item, int | float) for item in value):
        return torch.tensor(value)
    return as_tensors(value)


def _pixels(image: Any) -> Tensor:
    """The pixels of an image of PIL: float32 [channels, height, width] from 0 to 1."""
    if is_wide(image.mode):
        raise DataError(f"data._target_: {NotPixelsError(image.mode)}", OVER_8_BITS)
    if image.mode not in PIXEL_MODES:
        raise DataError(
            f"data._target_: an image of PIL's mode {image.mode}, whose values are not the"
            " brightness of a pixel",
            "add 'data.transform=[torchvision.transforms.v2.RGB]'; if it is a mask, return a tensor"
            " of integers",
        )
    return pixels_of(image).contiguous().float().div(255)
