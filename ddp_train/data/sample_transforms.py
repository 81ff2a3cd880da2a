"""Transforms of samples: which change an image alone, and which its masks and boxes too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import nn

from ddp_train.data.sample_tensors import TV_TENSORS, is_instance, is_pair
from ddp_train.errors import ConfigError
from ddp_train.tensor_tree import tensors
from ddp_train.text import first_line

Transform = Callable[..., Any]
POSITIONED = ("Mask", "BoundingBoxes", "KeyPoints")
"""torchvision's types whose numbers stand for places in an image."""


def apply_transform(transform: Transform, sample: Any) -> Any:
    """The sample that a transform makes of one.

    Transforms of torchvision.transforms.v2, what derives from them or consists of them, take all of
    a sample, and change images, masks and boxes together. Any other takes the input of an (input,
    target), or all of a sample of another structure.

    Raises ConfigError if such a target has masks or boxes, which would stay where they are.
    """
    if not is_pair(sample) or changes_targets(transform):
        return transform(sample)
    _check_no_positions(transform, sample[1])
    return transform(sample[0]), sample[1]


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
            f"data._target_: torchvision does not support {type(dataset).__name__} as it is called:"
            f" {first_line(error)}; use {remedy}"
        )
        raise ConfigError([problem]) from error
    return dataset


def _check_no_positions(transform: Transform, target: Any) -> None:
    """Raises ConfigError if a target has masks or boxes."""
    for tensor in tensors(target):
        for kind in POSITIONED:
            if not is_instance(TV_TENSORS, kind, tensor):
                continue
            problem = (
                f"data.transform: {type(transform).__name__} takes the image alone, and the target"
                f" has a {kind}, which would not change with it; use torchvision.transforms.v2, and"
                f" classes that derive from its Transform, inside {type(transform).__name__} too"
            )
            raise ConfigError([problem])
