"""Columns of predictions, and the file that they are written to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddp_train.assembly.data_sets import open_datasets
from ddp_train.errors import TaskError, WriteError
from ddp_train.inference.predictions import checked_columns, labels_of, write_predictions
from ddp_train.options.custom import CustomDataConfig
from ddp_train.options.schema import Config
from ddp_train.tasks.builtin import Multilabel, Regression, Segmentation
from ddp_train.tasks.language_model.task import LanguageModel
from ddp_train.tasks.task import Task
from tests.checkpoints.test_checkpoint import small_disk
from tests.inference.models import Returns


def columns(*names: str, rows: int = 4) -> dict[str, np.ndarray]:
    return {name: np.arange(rows * 2, dtype=np.float32).reshape(rows, 2) for name in names}


def test_rows_of_another_shape_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    def batches() -> Iterator[dict[str, np.ndarray]]:
        yield columns("mask")
        assert list(tmp_path.iterdir()) == [], "nothing that a killed process could leave"
        yield {"mask": np.zeros((4, 3), dtype=np.float32)}

    message = (
        r"column 'mask' has rows of \[2\] float32 in one batch and of \[3\] float32 in another"
    )
    with pytest.raises(TaskError, match=message) as refused:
        write_predictions(batches(), tmp_path / "predictions.npz", np.arange(8), None, None)
    assert refused.value.remedy.startswith("pad them in the task's predictions()")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_and_leaves_the_old_file(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        path = disk / "predictions.npz"
        write_predictions(iter([columns("output")]), path, np.arange(4), None, None)
        before = path.read_bytes()
        with pytest.raises(WriteError, match="No space left"):
            write_predictions(
                iter([columns("output", rows=9_000)]), path, np.arange(9_000), None, None
            )
        assert path.read_bytes() == before and [one.name for one in disk.iterdir()] == [
            "predictions.npz"
        ]


def test_classes_have_labels_where_they_have_names() -> None:
    assert labels_of(torch.tensor([1, 0, 2]), ["cat", "dog"]) == [
        "dog",
        "cat",
        "2",
    ], "a model may have more outputs"
    assert labels_of(np.array([-1, 10**12]), ["cat", "dog"]) == ["-1", "1000000000000"]
    for other in (
        None,
        np.array([0.5]),
        torch.tensor([0.5]),
        torch.tensor([True]),
        np.array([[1, 0]]),
    ):
        assert labels_of(other, ["cat", "dog"]) is None


class Plain:
    classes = ("a", "b")

    def __init__(self, train: bool, augment: bool = True) -> None:
        self.augment = augment

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return torch.full((2,), float(self.augment)), number % 2


def test_training_samples_are_predicted_without_augmentation() -> None:
    data = CustomDataConfig(
        target=f"{__name__}.Plain", transform=["torch.nn.Dropout"], test_transform=[]
    )
    first = {}
    for mode in ("predict", "train"):
        first[mode] = open_datasets(Config(mode=mode, data=data)).train.get_batch(
            np.arange(4), None
        )[0]
    assert first["predict"].tolist() == [[0, 0]] * 4 and first["train"].max() == 2


def test_columns_without_a_row_per_sample_name_their_method() -> None:
    with pytest.raises(
        TaskError, match=r"predictions\(\) of the task Multilabel returned a tensor \[5\]"
    ):
        checked_columns({"prediction": torch.zeros(5)}, 4, Multilabel())
    with pytest.raises(TaskError, match="the task Nodes has no predictions") as caught:
        checked_columns({"output": torch.zeros(5, 2)}, 4, type("Nodes", (Task,), {})())
    assert caught.value.remedy.startswith("add a method predictions(model, batch)")


def test_the_columns_of_each_task() -> None:
    numbers = torch.tensor([[0.5, -1.0], [2.0, 3.0]])
    many = Multilabel().predictions(Returns(numbers), torch.zeros(2, 4))
    assert many["prediction"].tolist() == [[True, False], [True, True]] and "target" not in many
    assert Regression().predictions(Returns(numbers[:, :1]), (torch.zeros(2, 4), torch.zeros(2)))[
        "prediction"
    ].shape == (2,)
    pixels = Segmentation().predictions(
        Returns({"out": torch.eye(3)[None, :, :, None]}), torch.zeros(1, 3, 3, 1)
    )
    assert pixels["prediction"].tolist() == [[[0], [1], [2]]]
    logits = torch.zeros(2, 3, 7)
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, -100, -100]])
    text = LanguageModel().predictions(Returns(logits), ids)
    assert text["tokens"].tolist() == [3, 1]
    torch.testing.assert_close(text["loss"], torch.full((2,), 7.0).log())
