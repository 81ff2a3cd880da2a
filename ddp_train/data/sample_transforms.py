"""Transforms of samples: which change an image alone, and which its masks and boxes too."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.data.image_files import OVER_8_BITS, NotPixelsError, is_wide, rgb_image
from ddp_train.data.sample_tensors import TV_TENSORS, is_instance, is_pair
from ddp_train.errors import ConfigError, DataError
from ddp_train.tensor_tree import tensors
from ddp_train.text import first_line

Transform = Callable[..., Any]
POSITIONED = ("Mask", "BoundingBoxes", "KeyPoints")
"""torchvision's types whose numbers stand for places in an image."""
MOST_MEMBERS = 16
"""Parts of a sample among which images are looked for."""


def apply_transform(transform: Transform, sample: Any) -> Any:
    """The sample that a transform makes of one.

    Transforms of torchvision.transforms.v2, what derives from them or consists of them, take all of
    a sample, and change images, masks and boxes together. Any other takes the input of an (input,
    target), or all of a sample of another structure.

    Raises ConfigError if such a target has masks or boxes, which would stay where they are, and
    DataError if an image of more than 8 bits comes out with numbers that were cut off.
    """
    if not is_pair(sample) or changes_targets(transform):
        changed = transform(sample)
        _check_not_cut_off(transform, sample, changed)
        return changed
    _check_no_positions(transform, sample[1])
    changed = transform(sample[0])
    _check_not_cut_off(transform, sample[0], changed)
    return changed, sample[1]


def changes_targets(transform: Any) -> bool:
    """True if a transform changes the masks and boxes of a target together with the image."""
    modules = [f"{base.__module__}." for base in type(transform).__mro__]
    if any(module.startswith("torchvision.transforms.v2.") for module in modules):
        return True
    if isinstance(transform, nn.Sequential):
        parts = list(transform)
    elif type(transform).__module__ == "torchvision.transforms.transforms":
        parts = getattr(transform, "transforms", [])
    else:
        parts = []
    return bool(parts) and all(changes_targets(part) for part in parts)


def with_masks_and_boxes(dataset: Any) -> Any:
    """torchvision's own data sets with masks and boxes as such; others as they are.

    So its transforms change these with the image.

    Raises ConfigError if torchvision does not support how its data set was called.
    """
    if not type(dataset).__module__.startswith("torchvision.datasets."):
        return dataset
    from torchvision.datasets import wrap_dataset_for_transforms_v2

    try:
        # TypeError: one of which torchvision knows no masks and boxes.
        with contextlib.suppress(TypeError):
            return wrap_dataset_for_transforms_v2(dataset)
    except (RuntimeError, ValueError) as error:
        if getattr(dataset, "video_clips", None):
            remedy = "data.output_format=TCHW"
        else:
            remedy = "other arguments, or call it in a class of your own"
        problem = (
            f"data._target_: torchvision does not support {type(dataset).__name__} with these"
            f" arguments: {first_line(error)}; use {remedy}"
        )
        raise ConfigError([problem]) from error
    return dataset


def refuse_files_that_are_cut_off(dataset: Any) -> None:
    """Let torchvision's folders of images refuse files that have no pixels of 0 to 255.

    torchvision's own loader cuts their numbers off at 255.
    """
    folder = "torchvision.datasets.folder"
    if not is_instance(folder, "DatasetFolder", dataset):
        return
    if dataset.loader is sys.modules[folder].default_loader:
        dataset.loader = rgb_image


def _check_not_cut_off(transform: Transform, before: Any, after: Any) -> None:
    """Raises DataError if an image of more than 8 bits lost what is above 255, or its sign.

    PIL cuts such numbers off at 255 where it makes pixels of them, and torchvision's ToTensor takes
    those from 32,768 on for negative ones.

    before, after: an image, or a tuple, list or dict of which one is.
    """
    for name, image in _members(before).items():
        mode = _mode_in_pil(image)
        if not is_wide(mode):
            continue
        result = _members(after).get(name)
        mode_after = _mode_in_pil(result)
        is_cut = bool(mode_after) and not is_wide(mode_after)
        step = f"data.transform: {type(transform).__name__}"
        if is_cut:
            raise DataError(f"{step} got {NotPixelsError(mode)}", OVER_8_BITS)
        if isinstance(result, Tensor) and result.dtype == torch.int16:
            raise DataError(
                f"{step} makes int16 of an image of PIL's mode {mode}: values from 32,768 on"
                " become negative",
                OVER_8_BITS,
            )


def _mode_in_pil(value: Any) -> str:
    """The mode of an image of PIL; "" for anything else."""
    return value.mode if is_instance("PIL.Image", "Image", value) else ""


def _members(sample: Any) -> dict[Any, Any]:
    """The first parts of a sample by name or place; a sample that has none by itself."""
    if isinstance(sample, dict):
        return sample
    if isinstance(sample, tuple | list):
        return dict(enumerate(sample[:MOST_MEMBERS]))  # a text has thousands of tokens
    return {0: sample}


def _check_no_positions(transform: Transform, target: Any) -> None:
    """Raises ConfigError if a target has masks or boxes."""
    for tensor in tensors(target):
        for kind in POSITIONED:
            if not is_instance(TV_TENSORS, kind, tensor):
                continue
            problem = (
                f"data.transform: {type(transform).__name__} changes the image alone, but the"
                f" target has a {kind} that must change with it; use transforms of"
                f" torchvision.transforms.v2, inside {type(transform).__name__} too"
            )
            raise ConfigError([problem])
