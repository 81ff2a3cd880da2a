"""Images of torchvision's data sets that fit into memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ddp_train.data import augmentation
from ddp_train.data.datasets import ArraySource
from ddp_train.errors import DataError


@dataclass(frozen=True)
class TorchvisionImages:
    """A data set of torchvision."""

    name: str
    """As in `data=NAME`."""
    class_name: str
    """Its class in torchvision.datasets."""
    mean: tuple[float, ...]
    """Mean of each channel, of pixels from 0 to 1."""
    std: tuple[float, ...]
    """Standard deviation of each channel."""
    shift: int
    """The most pixels to shift by, where images are augmented."""
    flips: bool = False
    """Images are mirrored at random too."""

    def open(
        self, root: str, download: bool, augment: bool, seed: int
    ) -> tuple[ArraySource, ArraySource]:
        """The training and the test split.

        root: the folder that holds the data set.
        augment: the training images are augmented.

        Raises DataError if files are missing or corrupt.
        """
        train = self._open_split(root, download, train=True)
        if augment:
            train.augmentation = functools.partial(
                augmentation.move, by=self.shift, flips=self.flips
            )
        train.seed = seed
        return train, self._open_split(root, download, train=False)

    def _open_split(self, root: str, download: bool, train: bool) -> ArraySource:
        from torchvision import datasets

        kind = getattr(datasets, self.class_name)
        try:
            dataset = kind(root, train=train, download=download)
        except (RuntimeError, OSError, ValueError) as error:
            remedy = "check data.root; add data.download=true"
            if download:
                remedy = "check the network, or copy the files to data.root"
            raise DataError(f"data={self.name} in data.root={root}: {error}", remedy) from error
        images = torch.as_tensor(dataset.data)
        if images.ndim == 3:
            images = images[:, None]
        else:
            images = images.permute(0, 3, 1, 2).contiguous()
        split = ArraySource(images, torch.as_tensor(dataset.targets), self.mean, self.std)
        split.classes = list(getattr(dataset, "classes", ())) or None
        return split


open_mnist = TorchvisionImages("mnist", "MNIST", (0.1307,), (0.3081,), shift=2).open
open_fashion_mnist = TorchvisionImages(
    "fashion_mnist", "FashionMNIST", (0.2860,), (0.3530,), shift=2, flips=True
).open
open_cifar10 = TorchvisionImages(
    "cifar10",
    "CIFAR10",
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    shift=4,
    flips=True,
).open
