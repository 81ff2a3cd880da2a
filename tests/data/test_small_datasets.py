"""Digits are scikit-learn's, generated sets depend on the seed alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ddp_train.data.config import (
    DigitsConfig,
    LinearRegressionDataConfig,
    SyntheticConfig,
)
from ddp_train.data.datasets import BatchSource
from tests.support.jobs import datasets_of


def everything(source: BatchSource) -> tuple[Tensor, Tensor]:
    return source.get_batch(np.arange(len(source)), None)


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    train, test = datasets_of(DigitsConfig(), 0)
    assert (len(train), len(test), train.outputs) == (1433, 364, 10)
    images = torch.cat([everything(train)[0], everything(test)[0]]).view(-1, 64)
    theirs = torch.from_numpy(load_digits().data).float() / 8 - 1
    assert sorted(map(tuple, images.tolist())) == sorted(map(tuple, theirs.tolist()))
    assert (
        len(
            set(map(tuple, everything(train)[0].flatten(1).tolist()))
            & set(map(tuple, everything(test)[0].flatten(1).tolist()))
        )
        == 0
    )
    assert everything(test)[1].bincount().min() >= 34, "every class has its share"


def test_generated_sets_depend_on_the_seed_alone() -> None:
    for config in (
        SyntheticConfig(samples=20, test_samples=5),
        LinearRegressionDataConfig(samples=20, test_samples=5),
    ):
        one, again, other = (everything(datasets_of(config, seed)[0])[0] for seed in (0, 0, 1))
        assert torch.equal(one, again) and not torch.equal(one, other)


def test_fewer_samples_than_classes_leave_no_class_out() -> None:
    train, test = datasets_of(
        SyntheticConfig(samples=4, test_samples=4, classes=10, image_size=2), 0
    )
    assert (train.outputs, test.outputs) == (10, 10)
    assert (
        test.get_batch(np.arange(4), None)[1].max() > train.get_batch(np.arange(4), None)[1].max()
    )
