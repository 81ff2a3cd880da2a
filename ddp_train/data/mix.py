"""Mixup and CutMix: each sample of a global batch is mixed with the one before it in that batch.

The order of an epoch is random, so the sample before is a random partner; torchvision's `MixUp` and
`CutMix` take the same one (`roll(1, 0)`). A part of a global batch, whichever process computes it,
then needs one sample beside its own: the one before its first. It is fetched as any other, with its
own augmentation. Nothing is exchanged, and neither the number of processes nor of accumulation
steps changes an input or a target.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.datasets import BatchSource
from ddp_train.data.rng import hash_key
from ddp_train.data.sample_tensors import is_pair
from ddp_train.errors import ConfigError, DataError


class Mixture(NamedTuple):
    """The draws for a global batch."""

    share: float
    """Share of a sample itself; the rest is its partner's. Where a box is cut, before it is clipped
    to the image."""
    centre: tuple[float, float] | None
    """Centre of the box that CutMix takes from the partner, as parts of height and width; None:
    mixup."""


class Mix:
    """Mixes whole batches. One per run: what is drawn depends on the seed and the step alone."""

    def __init__(self, seed: int, classes: int, mixup: float, cutmix: float) -> None:
        """Keeps what to mix.

        classes: how many there are, for labels that are numbers.
        mixup, cutmix: alpha of the Beta distribution; 0: not this one. With both, each step takes
            one of them with probability 1/2.
        """
        self.seed = seed
        self.classes = classes
        self.mixup = mixup
        self.cutmix = cutmix

    def mixture(self, step: int) -> Mixture:
        """The draws for the global batch of a step, as in arXiv:1710.09412 and arXiv:1905.04899."""
        # A new generator each time: there is no stream.
        generator = random.Random(hash_key(self.seed, "mix", step))
        coin = generator.random()
        row = generator.random()
        column = generator.random()
        cuts = not self.mixup or (self.cutmix > 0 and coin < 0.5)
        if cuts:
            return Mixture(generator.betavariate(self.cutmix, self.cutmix), (row, column))
        return Mixture(generator.betavariate(self.mixup, self.mixup), None)

    def with_partners(self, micro_batches: Iterable[MicroBatch]) -> Iterable[MicroBatch]:
        """The micro-batches to fetch, each behind the sample that comes before its first.

        Iterated again it starts over.
        """
        return _WithPartners(micro_batches)

    def __call__(self, data: Any, fetched: MicroBatch) -> tuple[Any, MicroBatch]:
        """The mixed samples of a batch, and their micro-batch.

        data: (inputs, targets) of a micro-batch of `with_partners`: [1 + n, ...] floating-point
            inputs and class labels [1 + n] or soft labels [1 + n, k].

        Returns inputs [n, ...] and soft labels [n, k]. Raises DataError for samples that cannot be
        mixed.
        """
        micro_batch = dataclasses.replace(fetched, indices=fetched.indices[1:])
        inputs, targets = self._check_pair(data)
        soft = targets if targets.ndim == 2 else self._one_hot(targets)
        soft = soft.to(inputs.dtype)
        mixture = self.mixture(fetched.step)
        if mixture.centre is None:
            mixed = blend(inputs, mixture.share), blend(soft, mixture.share)
            return mixed, micro_batch
        height, width = inputs.shape[-2:]
        top, bottom, left, right = cutmix_box(mixture.share, mixture.centre, height, width)
        cut = inputs[1:].clone()
        cut[..., top:bottom, left:right] = inputs[:-1, ..., top:bottom, left:right]
        share_kept = 1 - (bottom - top) * (right - left) / (height * width)
        return (cut, blend(soft, share_kept)), micro_batch

    def _one_hot(self, labels: Tensor) -> Tensor:
        try:
            return functional.one_hot(labels, self.classes)
        except RuntimeError as error:
            lowest = int(labels.min())
            highest = int(labels.max())
            raise DataError(
                f"the data set declares {self.classes} classes, but its labels go from {lowest}"
                f" to {highest}",
                "name every class in the attribute `classes` of the data set, and let labels"
                " begin at 0",
            ) from error

    def _check_pair(self, data: Any) -> tuple[Tensor, Tensor]:
        """The inputs and targets of a batch. Raises DataError if they cannot be mixed."""
        if is_pair(data) and all(isinstance(part, Tensor) for part in data):
            inputs, targets = data
            least_dimensions = 4 if self.cutmix else 2
            is_input = inputs.is_floating_point() and inputs.ndim >= least_dimensions
            if is_input and (_is_labels(targets) or _is_soft_labels(targets)):
                return inputs, targets
        if self.cutmix:
            key = f"data.cutmix={self.cutmix:g}"
            needed = "floating-point images [channels, height, width]"
        else:
            key = f"data.mixup={self.mixup:g}"
            needed = "floating-point tensors"
        raise DataError(
            f"{key}: a sample is {_describe_sample(data)}",
            f"return {needed} with a class label each, or leave {key} out",
        )


def mix_of(
    source: BatchSource, seed: int, mixup: float, cutmix: float, classifies: bool
) -> Mix | None:
    """The Mix of a training set; None if neither mixup nor cutmix is set.

    classifies: the task takes soft labels.

    Raises ConfigError if it does not, or if nobody knows how many classes there are.
    """
    settings = {"data.mixup": mixup, "data.cutmix": cutmix}
    used = {key: alpha for key, alpha in settings.items() if alpha}
    if not used:
        return None
    if not classifies:
        what = "mixes class labels, and the targets are not class labels"
        raise ConfigError([f"{key}={alpha:g}: {what}; use {key}=0" for key, alpha in used.items()])
    return Mix(seed, source.outputs, mixup, cutmix)


class _WithPartners:
    """Micro-batches, each with the sample before its first."""

    def __init__(self, micro_batches: Iterable[MicroBatch]) -> None:
        self.micro_batches = micro_batches

    def __iter__(self) -> Iterator[MicroBatch]:
        for micro_batch in self.micro_batches:
            indices = np.concatenate([[micro_batch.sample_before], micro_batch.indices])
            yield dataclasses.replace(micro_batch, indices=indices)


def blend(rows: Tensor, share: float) -> Tensor:
    """share times each row but the first, and the rest of the one before: [1 + n, ...] -> [n, ...].

    The operations are rounded separately, so that the bits of a number do not depend on its place
    in the batch.
    """
    return rows[1:].mul(share).add_(rows[:-1].mul(1 - share))


def cutmix_box(
    share: float, centre: tuple[float, float], height: int, width: int
) -> tuple[int, int, int, int]:
    """Top, bottom, left and right of the box that CutMix takes from the partner.

    It has 1 - share of the image, and is clipped to it.

    As in Algorithm 1 of arXiv:1905.04899, rounded as by torchvision.
    """
    half = 0.5 * math.sqrt(1 - share)
    top, bottom = _clipped_edges(centre[0], half, height)
    left, right = _clipped_edges(centre[1], half, width)
    return top, bottom, left, right


def _clipped_edges(centre: float, half: float, size: int) -> tuple[int, int]:
    middle = int(centre * size)
    reach = int(half * size)
    return max(0, middle - reach), min(size, middle + reach)


def _is_labels(targets: Tensor) -> bool:
    return targets.ndim == 1 and targets.dtype == torch.int64


def _is_soft_labels(targets: Tensor) -> bool:
    return targets.ndim == 2 and targets.is_floating_point()


def _describe_sample(data: Any) -> str:
    """One sample of a batch, in words."""
    if isinstance(data, Tensor):
        return f"{str(data.dtype).removeprefix('torch.')} {list(data.shape[1:])}"
    if isinstance(data, tuple | list):
        return f"({', '.join(map(_describe_sample, data))})"
    return type(data).__name__
