"""Labels, lengths and weights: what a data set must know of each sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddp_train.assembly.data_sets import open_datasets
from ddp_train.data.config import DigitsConfig, LinearRegressionDataConfig
from ddp_train.data.sample_facts import labels_of, lengths_of, training_weights
from ddp_train.data.splits import split_for_validation
from ddp_train.data.user_dataset import UserDataset
from ddp_train.data.weighted_draws import WeightedDraws
from ddp_train.errors import ConfigError
from ddp_train.options.schema import Config
from tests.support.jobs import table


def test_balanced_weights_draw_each_training_class_as_often() -> None:
    """8 of the digits' classes are made rare: the draws do not show it."""
    splits = open_datasets(Config(data=DigitsConfig(validation=0.2, limit=900, weights="balanced")))
    labels = labels_of(splits.train)
    assert splits.weights is not None and len(splits.weights) == len(splits.train) == 900
    of_class = [splits.weights[labels == label].sum() for label in range(10)]
    assert np.allclose(of_class, 1) and len({*np.bincount(labels)}) > 1
    source = open_datasets(Config(data=DigitsConfig())).train
    rare = source.select(np.flatnonzero(labels_of(source) * np.arange(len(source)) % 9 == 0))
    weights = training_weights("balanced", rare, np.arange(len(rare)), len(rare))
    drawn = np.bincount(
        labels_of(rare)[
            np.concatenate([WeightedDraws(weights).epoch(0, epoch) for epoch in range(9)])
        ]
    )
    assert (
        drawn.max() < 1.3 * drawn.min()
        and np.bincount(labels_of(rare)).max() > 3 * np.bincount(labels_of(rare)).min()
    )


def test_weights_of_a_file_belong_to_numbers_before_any_split(tmp_path: Path) -> None:
    kept = split_for_validation(1433, 0.3, 0)[0]
    np.save(tmp_path / "w.npy", np.arange(1433, dtype=np.int32))
    (tmp_path / "w.txt").write_text("\n".join(map(str, range(1433))))
    for name in ("w.npy", "w.txt"):
        data = DigitsConfig(validation=0.3, limit=50, weights=str(tmp_path / name))
        assert np.array_equal(open_datasets(Config(data=data)).weights, kept[:50])
    regression = LinearRegressionDataConfig(samples=1433, weights=str(tmp_path / "w.npy"))
    assert np.array_equal(open_datasets(Config(data=regression)).weights, np.arange(1433))


WRONG = {
    "few": (
        "1\n2\n",
        r"has 2 numbers, but the whole training set has 4 samples; write one weight for each sample",
    ),
    "word": (
        "1\n2\nthree\n4",
        r"cannot be read: could not convert string to float: 'three'; use balanced, a \.npy file",
    ),
    "nan": ("1\n2\nnan\n4", r"the weight of sample 2 is nan; use finite numbers, 0 or above"),
    "negative": ("1\n-2\n3\n4", r"the weight of sample 1 is -2; use finite numbers"),
    "zero": ("0\n0\n0\n0", r"the weights of the training samples add up to 0; use a sum above 0"),
    "huge": (
        "1e308\n" * 4,
        r"the sum of the weights is too large for a float64; divide all of them by the largest",
    ),
    "table": (np.ones((4, 2)), r"has the shape \[4, 2\], but the whole training set has 4 samples"),
    "several": (b"", r"cannot be read: .*; use balanced, a \.npy file"),
    "words": (np.array(["a"]), r"cannot be read: could not convert string to float"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_weights_are_one_clear_error(name: str, tmp_path: Path) -> None:
    content, message = WRONG[name]
    path = tmp_path / (f"{name}.txt" if isinstance(content, str) else f"{name}.npy")
    if isinstance(content, bytes):
        np.savez(path.with_suffix(".npz"), np.ones(4))
        path.with_suffix(".npz").rename(path)
    else:
        path.write_text(content) if isinstance(content, str) else np.save(path, content)
    with pytest.raises(ConfigError, match=rf"data\.weights=\S+{path.name}: {message}"):
        training_weights(str(path), table(4), np.arange(4), 4)


class Own:
    """A data set that tells what it is given."""

    def __init__(self, **told: Any) -> None:
        vars(self).update(told)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.zeros(2), [3, 1, 1, 1][number]


def test_what_a_data_set_must_tell() -> None:
    def source(**told: Any) -> UserDataset:
        return UserDataset(Own(**told), 0)

    for told in (
        {"targets": [3, 1, 1, 1]},
        {"labels": np.array([3, 1, 1, 1])},
        {"targets": torch.tensor([3, 1, 1, 1])},
    ):
        assert labels_of(source(**told)).tolist() == [3, 1, 1, 1]
        assert labels_of(source(**told).select(np.array([2, 0]))).tolist() == [1, 3]
    assert lengths_of(source(lengths=lambda: [3, 4, 5, 6]), 6).tolist() == [3, 4, 5, 6]
    assert lengths_of(source(lengths=[9, 4, 5, 6]).select(np.array([1, 3])), 6).tolist() == [4, 6]
    for wrong, message in {
        "none": (
            r"data\.weights=balanced: Own does not give the labels of its samples; give it an"
            r" attribute `targets`"
        ),
        (
            1.0,
            2.0,
            3.0,
            4.0,
        ): (
            r"`targets` of Own has 4 numbers, values of the type float64; give it 4 whole"
            r" numbers"
        ),
        (
            1,
            2,
            3,
        ): (
            r"`targets` of Own has 3 numbers, whole numbers; give it 4 whole numbers, one for"
            r" each sample"
        ),
        ((1, 2), (3,), (4,), (5,)): r"`targets` of Own has 4 numbers, values of the type object",
    }.items():
        with pytest.raises(ConfigError, match=message):
            labels_of(source(**({} if wrong == "none" else {"targets": wrong})))
    for lengths, message in {
        None: (
            r"data\.batch_by=tokens: Own does not give the lengths of its samples; give it an"
            r" attribute or a method"
        ),
        (1, 2, 0, 3): r"data\.batch_by=tokens: sample 2 has the length 0",
        (
            1,
            70,
            9,
            80,
        ): (
            r"train\.global_batch_size=64: is a number of tokens with data\.batch_by=tokens, and"
            r" sample 1 has 70 "
            r"\(also too long: 1 other sample\); use train\.global_batch_size=80 or more, or leave"
            r" such samples out"
        ),
    }.items():
        with pytest.raises(ConfigError, match=message):
            lengths_of(source(lengths=lengths), 64)


class Labelled:
    """Samples of three labels, by turns; `targets` is what it is given."""

    def __init__(self, targets: Any, soft: bool = False) -> None:
        self.targets = targets
        self.soft = soft

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> tuple[Tensor, Any]:
        label = number % 3
        return torch.zeros(2), torch.eye(3)[label] if self.soft else label


def test_targets_that_are_no_labels_are_not_believed() -> None:
    right = [number % 3 for number in range(12)]
    for soft in (False, True):
        assert labels_of(UserDataset(Labelled(right, soft), 0)).tolist() == right
    for wrong, message in (
        (
            list(range(12)),
            "Labelled gives the label 3 for sample 3, but the target of that sample is 0",
        ),
        (
            [label + 1 for label in right],
            "the label 1 for sample 0, but the target of that sample is 0",
        ),
    ):
        source = UserDataset(Labelled(wrong), 0)
        with pytest.raises(ConfigError, match=message):
            labels_of(source)
    part = UserDataset(Labelled(list(range(12))), 0).select(np.arange(3, 12))
    with pytest.raises(
        ConfigError, match="the label 3 for sample 3, but the target of that sample is 0"
    ):
        labels_of(part)
