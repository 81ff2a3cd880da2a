"""The data sets that `data=NAME` has: images, numbers and texts, from files or made in memory."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_train.data import augmentation
from ddp_train.data.corpus.sources import text_sources, token_sources
from ddp_train.data.datasets import ArraySource, BatchSource
from ddp_train.data.image_folder.source import FolderSource
from ddp_train.data.rng import hash_key
from ddp_train.errors import DataError


def build_datasets(name: str, seed: int, **arguments: Any) -> tuple[BatchSource, BatchSource]:
    """The training and the test split of a built-in data set. arguments: those of its builder
    below, which are the keys of `data=NAME`.

    Raises DataError if files are missing or corrupt.
    """
    return _BUILDERS[name](seed=seed, **arguments)


def _digits(augment: bool, seed: int) -> tuple[BatchSource, BatchSource]:
    """scikit-learn's digits, from the file it ships: importing sklearn takes a second in every
    process."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "data=digits: scikit-learn ships the images and is not installed",
            "pip install scikit-learn",
        )
    table = np.loadtxt(
        Path(spec.submodule_search_locations[0], "datasets/data/digits.csv.gz"), delimiter=","
    )
    images = (
        torch.from_numpy(table[:, :64]).float().view(-1, 1, 8, 8) / 8 - 1
    )  # 0 ... 16 to -1 ... 1
    labels = torch.from_numpy(table[:, 64]).long()
    # Every fifth image of a class tests, so that each class has its share; the same split for every
    # seed.
    test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        test[(labels == label).nonzero().flatten()[::5]] = True
    moved = functools.partial(augmentation.move, by=1, flips=False) if augment else None
    splits = (
        ArraySource(images[~test], labels[~test], augmentation=moved, seed=seed),
        ArraySource(images[test], labels[test]),
    )
    for split in splits:
        split.scaled = ((0.5,), (0.5,))
        split.classes = list("0123456789")
    return splits


def _torchvision(
    name: str,
    cls: str,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    shift: int,
    flips: bool,
    root: str,
    download: bool,
    augment: bool,
    seed: int,
) -> tuple[BatchSource, BatchSource]:
    """A data set of torchvision that is held in memory. name: as in `data=NAME`. cls: its class
    there. shift: the most pixels to shift by."""
    from torchvision import datasets

    splits = []
    for train in (True, False):
        try:
            split = getattr(datasets, cls)(root, train=train, download=download)
        except (RuntimeError, OSError, ValueError) as error:
            if download:
                remedy = "check the network, or copy the files there"
            else:
                remedy = "add data.download=true"
            raise DataError(
                f"data={name} in data.root={root}: {error}", f"check data.root; {remedy}"
            ) from error
        images = torch.as_tensor(split.data)
        images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
        if augment and train:
            moved = functools.partial(augmentation.move, by=shift, flips=flips)
        else:
            moved = None
        splits.append(ArraySource(images, torch.as_tensor(split.targets), mean, std, moved, seed))
        splits[-1].classes = list(getattr(split, "classes", ())) or None
    return splits[0], splits[1]


def _image_folder(
    root: str, image_size: int, augment: bool, decode: str, seed: int
) -> tuple[BatchSource, BatchSource]:
    train = FolderSource(Path(root, "train"), image_size, augment, seed, decode)
    test = FolderSource(Path(root, "val"), image_size, False, seed, decode)
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        raise DataError(
            f"data.root={root}: train/ and val/ differ in classes: {', '.join(odd[:5])}",
            "make a folder of each in both",
        )
    return train, test


def _synthetic(
    samples: int, test_samples: int, channels: int, image_size: int, classes: int, seed: int
) -> tuple[BatchSource, BatchSource]:
    shape = (channels, image_size, image_size)
    labels = torch.arange(samples + test_samples) % classes
    generator = torch.Generator().manual_seed(hash_key(seed, "synthetic"))
    patterns = torch.randint(0, 128, (classes, *shape), dtype=torch.uint8, generator=generator)
    noise = torch.randint(0, 128, (len(labels), *shape), dtype=torch.uint8, generator=generator)
    images = patterns[labels] + noise
    half = (0.5,) * channels
    return (
        ArraySource(images[:samples], labels[:samples], half, half, classes=classes),
        ArraySource(images[samples:], labels[samples:], half, half, classes=classes),
    )


def _linear_regression(
    samples: int, test_samples: int, features: int, noise: float, seed: int
) -> tuple[BatchSource, BatchSource]:
    generator = torch.Generator().manual_seed(hash_key(seed, "linear_regression"))
    weights = torch.randn(features, generator=generator)
    table = torch.randn(samples + test_samples, features, generator=generator)
    targets = table @ weights + 0.5 + torch.randn(len(table), generator=generator) * noise
    return ArraySource(table[:samples], targets[:samples]), ArraySource(
        table[samples:], targets[samples:]
    )


_BUILDERS: dict[str, Callable[..., tuple[BatchSource, BatchSource]]] = {
    "digits": _digits,
    "mnist": functools.partial(_torchvision, "mnist", "MNIST", (0.1307,), (0.3081,), 2, False),
    "fashion_mnist": functools.partial(
        _torchvision, "fashion_mnist", "FashionMNIST", (0.2860,), (0.3530,), 2, True
    ),
    "cifar10": functools.partial(
        _torchvision,
        "cifar10",
        "CIFAR10",
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
        4,
        True,
    ),
    "image_folder": _image_folder,
    "synthetic": _synthetic,
    "linear_regression": _linear_regression,
    "text": text_sources,
    "tokens": token_sources,
}
"""For each built-in data set a function of the keys of `data=NAME` and the seed."""
