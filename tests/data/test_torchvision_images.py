"""Images of torchvision's data sets, and files that are missing or truncated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ddp_train.data.config import (
    Cifar10Config,
    MnistConfig,
)
from ddp_train.distributed.world import World
from ddp_train.errors import DataError
from tests.support.jobs import config_of, datasets_of


def write_idx(path: Path, array: np.ndarray) -> None:
    """The format of MNIST (yann.lecun.com/exdb/mnist): magic number with type and dimensions,
    sizes, bytes."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(
        size.to_bytes(4, "big") for size in array.shape
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def test_mnist_files_are_read_and_normalised(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (30, 28, 28))
    labels = generator.integers(0, 10, 30)
    raw = tmp_path / "MNIST" / "raw"
    for split, part in (("train", slice(0, 20)), ("t10k", slice(20, 30))):
        write_idx(raw / f"{split}-images-idx3-ubyte", images[part])
        write_idx(raw / f"{split}-labels-idx1-ubyte", labels[part])
    train, test = datasets_of(MnistConfig(root=str(tmp_path)), 0)
    inputs, targets = train.get_batch(np.array([3, 7]), None)
    expected = (torch.from_numpy(images[[3, 7]]).float()[:, None] / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(inputs, expected)
    assert targets.tolist() == labels[[3, 7]].tolist() and len(test) == 10


def test_a_truncated_mnist_file_is_named_before_anything_starts(tmp_path: Path) -> None:
    for split, count in (("train", 30), ("t10k", 5)):
        write_idx(
            tmp_path / f"MNIST/raw/{split}-images-idx3-ubyte", np.zeros((count, 28, 28), np.uint8)
        )
        write_idx(tmp_path / f"MNIST/raw/{split}-labels-idx1-ubyte", np.zeros(count, np.uint8))
    config = config_of(World(), data={"name": "mnist", "root": str(tmp_path), "download": True})
    assert list(config.data.missing(config)) == []
    images = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    for length in (1000, 10, 2):
        images.write_bytes(images.read_bytes()[:length])
        (problem,) = config.data.missing(config)
        assert f"{images} is truncated; remove it" in str(problem)


def test_cifar_without_files_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.root="):
        datasets_of(Cifar10Config(root=str(tmp_path)), 0)
