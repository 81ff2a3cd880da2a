"""The data sets that `data=NAME` has: images, numbers and texts, from files or made in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp_train.data.corpus.sources import TextFiles, TokenFiles
from ddp_train.data.datasets import BatchSource
from ddp_train.data.image_folder.source import open_image_folder
from ddp_train.data.small_datasets import make_linear_regression, make_synthetic, open_digits
from ddp_train.data.torchvision_images import CIFAR10, FASHION_MNIST, MNIST

Pair = tuple[BatchSource, BatchSource]
"""The training and the test split of a data set."""


def build_datasets(name: str, seed: int, **arguments: Any) -> Pair:
    """The training and the test split of a built-in data set.

    arguments: the keys of `data=NAME`.

    Raises DataError if files are missing or corrupt.
    """
    return _BUILDERS[name](seed=seed, **arguments)


def _open_text(**arguments: Any) -> Pair:
    return TextFiles(**arguments).open()


def _open_tokens(**arguments: Any) -> Pair:
    return TokenFiles(**arguments).open()


_BUILDERS: dict[str, Callable[..., Pair]] = {
    "digits": open_digits,
    "mnist": MNIST.open,
    "fashion_mnist": FASHION_MNIST.open,
    "cifar10": CIFAR10.open,
    "image_folder": open_image_folder,
    "synthetic": make_synthetic,
    "linear_regression": make_linear_regression,
    "text": _open_text,
    "tokens": _open_tokens,
}
"""For each built-in data set a function of the keys of `data=NAME` and the seed."""
