"""What is known of every sample without opening one: its class label, its length, its weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from torch import Tensor

from ddp_train.data.datasets import BatchSource
from ddp_train.data.user_dataset import UserDataset
from ddp_train.errors import ConfigError
from ddp_train.text import counted, first_line

BALANCED = "balanced"
"""The value of `data.weights` that weights every class alike."""


def training_weights(
    asked: str, source: BatchSource, numbers: np.ndarray, samples: int
) -> np.ndarray:
    """The weight of each sample of the training set, float64 [n]. Raises ConfigError.

    asked: `data.weights`, balanced or a file. numbers: which of the `samples` of the whole training
    set are in `source`; the others validate, or are cut off by `data.limit`.
    """
    if asked == BALANCED:
        _, classes, counts = np.unique(labels_of(source), return_inverse=True, return_counts=True)
        return 1 / counts[classes]
    weights = _read(asked)
    if weights.shape != (samples,):
        _refuse(
            f"data.weights={asked}: has {_shape(weights)}, and the whole training set {samples:,}"
            " samples",
            "write one weight for each sample",
        )
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        number = wrong[0]
        weight = weights[wrong[0]]
        _refuse(
            f"data.weights={asked}: the weight of sample {number:,} is {weight:g}",
            "use finite numbers, 0 or above",
        )
    weights = weights[numbers]
    if not 0 < weights.sum() < np.inf:
        total = weights.sum()
        _refuse(
            f"data.weights={asked}: the weights of the samples that train add up to {total:g}",
            "use a sum above 0",
        )
    return weights


def labels_of(source: BatchSource) -> np.ndarray:
    """The class label of each sample, int64 [n]. Raises ConfigError if the data set does not tell,
    or has none."""
    labels = _told_by(source, ("targets", "labels"), f"data.weights={BALANCED}")
    if labels is None:
        _refuse(
            f"data.weights={BALANCED}: {_name(source)} does not tell the labels of its samples",
            "give it an attribute `targets`, a list of the class label of each sample, or use"
            " data.weights=FILE",
        )
    return labels


def class_names(source: BatchSource) -> list[str] | None:
    """The names of the classes, in the order of their labels; None if the data set has none."""
    names = getattr(source, "classes", None) or getattr(
        getattr(source, "dataset", None), "classes", None
    )
    if isinstance(names, list | tuple):
        return [str(name) for name in names]
    return None


def lengths_of(source: BatchSource, longest: int) -> np.ndarray:
    """The length of each sample, int64 [n]. Raises ConfigError if the data set does not tell, or if
    one is longer than `longest`, the tokens of a global batch."""
    key = "data.batch_by=tokens"
    lengths = _told_by(source, ("lengths",), key)
    if lengths is None:
        _refuse(
            f"{key}: {_name(source)} does not tell the lengths of its samples",
            "give it an attribute or a method `lengths`, a list of the number of tokens of each"
            " sample, or use data.batch_by=samples",
        )
    if lengths.min() < 1:
        number = int(lengths.argmin())
        which = f"sample {_number(source, number):,} has the length {lengths[number]}"
        _refuse(f"{key}: {which}", "leave it out of the data set: a length is at least 1")
    too_long = np.flatnonzero(lengths > longest)
    if len(too_long):
        number = int(too_long[0])
        others = len(too_long) - 1
        more = f", and {counted(others, 'other sample')} more than that many" if others else ""
        which = f"{_number(source, number):,} has {lengths[number]:,}{more}"
        _refuse(
            f"train.global_batch_size={longest}: counts tokens with data.batch_by=tokens, and"
            f" sample {which}",
            f"use train.global_batch_size={lengths.max()} or more, or leave such samples out of the"
            " data set",
        )
    return lengths


def _told_by(source: BatchSource, names: tuple[str, ...], key: str) -> np.ndarray | None:
    """Whole numbers, one for each sample, that a data set has under one of these names; None if it
    has none of them."""
    holder: Any = source.dataset if isinstance(source, UserDataset) else source
    name = next((name for name in names if getattr(holder, name, None) is not None), None)
    if name is None:
        return None
    told = getattr(holder, name)
    told = told() if callable(told) else told
    found = told.cpu().numpy() if isinstance(told, Tensor) else _array(told)
    expected = len(holder)
    if found.shape != (expected,) or found.dtype.kind not in "iub":
        if found.dtype.kind in "iub":
            kind = "whole numbers"
        else:
            kind = f"values of the type {found.dtype}"
        _refuse(
            f"{key}: `{name}` of {_name(source)} has {_shape(found)}, {kind}",
            f"it must have {expected:,} whole numbers, one for each sample",
        )
    numbers = source.numbers if isinstance(source, UserDataset) else None
    return (found if numbers is None else found[numbers]).astype(np.int64)


def _array(told: Any) -> np.ndarray:
    try:
        return np.asarray(told)
    except ValueError:  # rows of different lengths
        return np.asarray(told, dtype=object)


def _read(path: str) -> np.ndarray:
    """float64, of any shape. Raises ConfigError."""
    try:
        if Path(path).suffix == ".npy":
            return np.load(path, allow_pickle=False).astype(np.float64)
        return np.array([float(line) for line in Path(path).read_text().split()])
    except (
        OSError,
        ValueError,
        TypeError,
        AttributeError,
    ) as error:  # the last: .npz by another name
        remedy = (
            f"use {BALANCED}, a .npy file with an array of numbers, or a text with one number per"
            " line"
        )
        _refuse(f"data.weights={path}: cannot be read: {first_line(error)}", remedy)


def _refuse(problem: str, remedy: str) -> NoReturn:
    raise ConfigError([f"{problem}; {remedy}"])


def _shape(array: np.ndarray) -> str:
    if array.ndim == 1:
        return f"{array.size:,} numbers"
    return f"the shape {list(array.shape)}"


def _name(source: BatchSource) -> str:
    if isinstance(source, UserDataset):
        return source.name
    return type(source).__name__


def _number(source: BatchSource, number: int) -> int:
    """In the data set, of a sample of this split."""
    numbers = source.numbers if isinstance(source, UserDataset) else None
    return number if numbers is None else int(numbers[number])
