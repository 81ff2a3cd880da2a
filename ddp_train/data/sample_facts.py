"""Facts of every sample without opening one: its class label, its length, its weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from torch import Tensor

from ddp_train.data.datasets import BatchSource, spread
from ddp_train.data.sample_tensors import is_pair
from ddp_train.data.user_dataset import UserDataset
from ddp_train.errors import ConfigError
from ddp_train.text import counted, first_line

BALANCED = "balanced"
"""The value of `data.weights` that weights every class alike."""
LABEL_NAMES = ("targets", "labels")
"""The attributes by which a data set tells its labels."""
COMPARED_SAMPLES = 32
"""Samples whose labels are compared with those that are told."""


def training_weights(
    setting: str, source: BatchSource, numbers: np.ndarray, samples: int
) -> np.ndarray:
    """The weight of each sample of the training set, float64 [n].

    setting: `data.weights`, balanced or a file.
    numbers: which samples of the whole training set are in `source`; the others validate, or are
        cut off by `data.limit`.
    samples: of the whole training set.

    Raises ConfigError if weights are missing or wrong.
    """
    if setting == BALANCED:
        _, classes, counts = np.unique(labels_of(source), return_inverse=True, return_counts=True)
        return 1 / counts[classes]
    weights = _read_weights(setting)
    if weights.shape != (samples,):
        _refuse(
            f"data.weights={setting}: has {_describe_shape(weights)}, but the whole training set"
            f" has {samples:,} samples",
            "write one weight for each sample",
        )
    is_right = np.isfinite(weights) & (weights >= 0)
    if not is_right.all():
        number = np.flatnonzero(~is_right)[0]
        _refuse(
            f"data.weights={setting}: the weight of sample {number:,} is {weights[number]:g}",
            "use finite numbers, 0 or above",
        )
    weights = weights[numbers]
    if not weights.any():
        _refuse(
            f"data.weights={setting}: the weights of the training samples add up to 0",
            "use a sum above 0",
        )
    with np.errstate(over="ignore"):
        total = weights.sum()
    if not np.isfinite(total):
        _refuse(
            f"data.weights={setting}: the sum of the weights is too large for a float64",
            "divide all of them by the largest: only their ratios matter",
        )
    return weights


def labels_of(source: BatchSource) -> np.ndarray:
    """The class label of each sample, int64 [n]. Raises ConfigError if the data set has none."""
    labels = _whole_numbers(source, LABEL_NAMES, f"data.weights={BALANCED}")
    if labels is None:
        _refuse(
            f"data.weights={BALANCED}: {_name(source)} does not give the labels of its samples",
            "give it an attribute `targets`, a list of the class label of each sample, or use"
            " data.weights=FILE",
        )
    _check_told_labels(source, labels)
    return labels


def told_labels(source: BatchSource) -> np.ndarray | None:
    """The labels that a data set tells of its samples, int64 [n], without reading them.

    None if it tells none, or something else.
    """
    try:
        return _whole_numbers(source, LABEL_NAMES, "")
    except ConfigError:
        return None


def _check_told_labels(source: BatchSource, labels: np.ndarray) -> None:
    """Raise ConfigError if the labels that a data set tells are not those of its samples."""
    if not isinstance(source, UserDataset):
        return
    numbers = spread(source, COMPARED_SAMPLES)
    batch = source.get_batch(numbers, None)
    if not is_pair(batch) or not isinstance(batch[1], Tensor):
        return
    targets = batch[1].cpu()
    if targets.ndim == 2 and targets.shape[1] > 1:
        targets = targets.argmax(1)  # a part of each class
    if targets.numel() != len(numbers):
        return
    for number, target in zip(numbers.tolist(), targets.flatten().tolist(), strict=True):
        if labels[number] != target:
            _refuse(
                f"data.weights={BALANCED}: {_name(source)} gives the label {labels[number]} for"
                f" sample {_number_in_data_set(source, number):,}, but the target of that sample"
                f" is {target:g}",
                "let its `targets` (or `labels`) have the targets that __getitem__ returns, or use"
                " data.weights=FILE",
            )


def class_names(source: BatchSource) -> list[str] | None:
    """The names of the classes, in the order of their labels; None if the data set has none."""
    dataset = getattr(source, "dataset", None)
    names = getattr(source, "classes", None) or getattr(dataset, "classes", None)
    if isinstance(names, list | tuple):
        return [str(name) for name in names]
    return None


def lengths_of(source: BatchSource, longest: int) -> np.ndarray:
    """The length of each sample, int64 [n].

    longest: the tokens of a global batch.

    Raises ConfigError if the data set has no lengths, or if one is above `longest`.
    """
    key = "data.batch_by=tokens"
    lengths = _whole_numbers(source, ("lengths",), key)
    if lengths is None:
        _refuse(
            f"{key}: {_name(source)} does not give the lengths of its samples",
            "give it an attribute or a method `lengths`, a list of the number of tokens of each"
            " sample, or use data.batch_by=samples",
        )
    shortest = int(lengths.argmin())
    if lengths[shortest] < 1:
        number = _number_in_data_set(source, shortest)
        _refuse(
            f"{key}: sample {number:,} has the length {lengths[shortest]}",
            "leave it out of the data set; a length must be at least 1",
        )
    too_long = np.flatnonzero(lengths > longest)
    if len(too_long):
        first = int(too_long[0])
        others = len(too_long) - 1
        more = f" (also too long: {counted(others, 'other sample')})" if others else ""
        number = _number_in_data_set(source, first)
        _refuse(
            f"train.global_batch_size={longest}: is a number of tokens with data.batch_by=tokens,"
            f" and sample {number:,} has {lengths[first]:,}{more}",
            f"use train.global_batch_size={lengths.max()} or more, or leave such samples out of the"
            " data set",
        )
    return lengths


def told_lengths(source: BatchSource) -> np.ndarray | None:
    """The lengths that a data set tells of its samples, int64 [n]; None as for `told_labels`."""
    try:
        return _whole_numbers(source, ("lengths",), "")
    except ConfigError:
        return None


def _whole_numbers(source: BatchSource, names: tuple[str, ...], key: str) -> np.ndarray | None:
    """Whole numbers, one for each sample, under the first of these names that a data set has.

    None if it has none of them.

    key: key and value that need them, for messages.
    """
    dataset: Any = source.dataset if isinstance(source, UserDataset) else source
    available = [name for name in names if getattr(dataset, name, None) is not None]
    if not available:
        return None
    name = available[0]
    value = getattr(dataset, name)
    array = _as_array(value() if callable(value) else value)
    is_whole = array.dtype.kind in "iub"
    if array.shape != (len(dataset),) or not is_whole:
        kind = "whole numbers" if is_whole else f"values of the type {array.dtype}"
        _refuse(
            f"{key}: `{name}` of {_name(source)} has {_describe_shape(array)}, {kind}",
            f"give it {len(dataset):,} whole numbers, one for each sample",
        )
    if isinstance(source, UserDataset) and source.numbers is not None:
        array = array[source.numbers]
    return array.astype(np.int64)


def _as_array(values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        return values.cpu().numpy()
    try:
        return np.asarray(values)
    except ValueError:  # rows of different lengths
        return np.asarray(values, dtype=object)


def _read_weights(path: str) -> np.ndarray:
    """The numbers in a file, float64, of any shape. Raises ConfigError."""
    try:
        if Path(path).suffix == ".npy":
            return np.load(path, allow_pickle=False).astype(np.float64)
        return np.array([float(line) for line in Path(path).read_text().split()])
    except (OSError, ValueError, TypeError, AttributeError) as error:
        # AttributeError: .npz by another name.
        _refuse(
            f"data.weights={path}: cannot be read: {first_line(error)}",
            f"use {BALANCED}, a .npy file with an array of numbers, or a text with one number per"
            " line",
        )


def _refuse(problem: str, remedy: str) -> NoReturn:
    raise ConfigError([f"{problem}; {remedy}"])


def _describe_shape(array: np.ndarray) -> str:
    if array.ndim == 1:
        return f"{array.size:,} numbers"
    return f"the shape {list(array.shape)}"


def _name(source: BatchSource) -> str:
    if isinstance(source, UserDataset):
        return source.name
    return type(source).__name__


def _number_in_data_set(source: BatchSource, number: int) -> int:
    """The number in the whole data set of a sample of this split."""
    if isinstance(source, UserDataset) and source.numbers is not None:
        return int(source.numbers[number])
    return number
