"""Data sets that need no download: scikit-learn's digits, and random ones."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddp_train.data import augmentation
from ddp_train.data.datasets import ArraySource
from ddp_train.data.rng import hash_key
from ddp_train.errors import DataError

DIGITS_FILE = "datasets/data/digits.csv.gz"
"""Below the folder of scikit-learn: 64 pixels from 0 to 16 and a label on each line."""
TEST_EVERY = 5
"""Every fifth image of a class tests."""


def open_digits(augment: bool, seed: int) -> tuple[ArraySource, ArraySource]:
    """scikit-learn's digits, from the file it ships. Raises DataError if it is not installed."""
    # Importing sklearn would take a second in every process.
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "data=digits: scikit-learn ships the images and is not installed",
            f"run {sys.executable} -m pip install scikit-learn",
        )
    file = Path(spec.submodule_search_locations[0], DIGITS_FILE)
    table = np.loadtxt(file, delimiter=",")
    pixels = torch.from_numpy(table[:, :64]).float().view(-1, 1, 8, 8)
    images = pixels / 8 - 1  # from -1 to 1
    labels = torch.from_numpy(table[:, 64]).long()
    tests = _every_fifth_of_a_class(labels)
    moved = functools.partial(augmentation.move, by=1, flips=False) if augment else None
    train = ArraySource(images[~tests], labels[~tests], augmentation=moved, seed=seed)
    test = ArraySource(images[tests], labels[tests])
    for split in (train, test):
        split.scaled = ((0.5,), (0.5,))
        split.classes = list("0123456789")
    return train, test


def make_synthetic(
    samples: int, test_samples: int, channels: int, image_size: int, classes: int, seed: int
) -> tuple[ArraySource, ArraySource]:
    """Random images: a pattern for each class, with noise."""
    shape = (channels, image_size, image_size)
    labels = torch.arange(samples + test_samples) % classes
    generator = torch.Generator().manual_seed(hash_key(seed, "synthetic"))
    patterns = torch.randint(0, 128, (classes, *shape), dtype=torch.uint8, generator=generator)
    noise = torch.randint(0, 128, (len(labels), *shape), dtype=torch.uint8, generator=generator)
    images = patterns[labels] + noise
    half = (0.5,) * channels
    train = ArraySource(images[:samples], labels[:samples], half, half)
    test = ArraySource(images[samples:], labels[samples:], half, half)
    for split in (train, test):
        split.outputs = classes  # a few samples may not show all classes
    return train, test


def make_linear_regression(
    samples: int, test_samples: int, features: int, noise: float, seed: int
) -> tuple[ArraySource, ArraySource]:
    """A random table whose targets are a linear function of it, with noise."""
    generator = torch.Generator().manual_seed(hash_key(seed, "linear_regression"))
    weights = torch.randn(features, generator=generator)
    table = torch.randn(samples + test_samples, features, generator=generator)
    targets = table @ weights + 0.5 + torch.randn(len(table), generator=generator) * noise
    train = ArraySource(table[:samples], targets[:samples])
    test = ArraySource(table[samples:], targets[samples:])
    return train, test


def _every_fifth_of_a_class(labels: Tensor) -> Tensor:
    """A mask of the images that test, bool [n]: a share of each class, the same for every seed."""
    tests = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        images_of_class = (labels == label).nonzero().flatten()
        tests[images_of_class[::TEST_EVERY]] = True
    return tests
