"""The batch of a process that has no sample in a step: of the right types and shapes, with a length
of 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_train.data.datasets import BatchSource
from ddp_train.errors import DataError


def batch_without_samples(source: BatchSource, number: int, epoch: int | None) -> Any:
    """What `source.get_batch` would give for no numbers, for which a collate_fn has no sample to
    look at.

    number: of a sample, which is read for it.
    """
    one = source.get_batch(np.array([number]), epoch)
    two = source.get_batch(np.array([number, number]), epoch)
    return without_samples(one, two)


def without_samples(one: Any, two: Any) -> Any:
    """The batch of no samples, found by what a batch of one has and a batch of two copies of it.

    The dimension in which tensors differ is that of the samples: it gets the length 0. So do lists.
    What has the same shape in both goes on in a straight line: a count of samples becomes 0, and
    what is equal stays.

    Raises DataError for an object that is none of tensors, arrays, numbers and texts, dicts, lists,
    tuples and dataclasses of them.
    """
    if isinstance(one, Tensor | np.ndarray):
        return _array_without_samples(one, two)
    if isinstance(one, Mapping):
        cut = {name: without_samples(value, two[name]) for name, value in one.items()}
        return cut if type(one) is dict else type(one)(cut)  # type: ignore[call-arg]
    if isinstance(one, tuple) and hasattr(one, "_fields"):
        return type(one)(*map(without_samples, one, two))
    if isinstance(one, list | tuple):
        if len(one) != len(two):
            return type(one)()
        return type(one)(map(without_samples, one, two))
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in dataclasses.fields(one) if field.init]
        cut = {name: without_samples(getattr(one, name), getattr(two, name)) for name in names}
        return dataclasses.replace(one, **cut)
    if isinstance(one, int | float) and not isinstance(one, bool):
        return 2 * one - two
    if one is None or isinstance(one, str | bytes | bool | np.generic):
        return one
    raise DataError(
        f"a batch has a {type(one).__name__}, of which nobody knows what it is without samples, as"
        " the batch of a process is where there are fewer samples than processes",
        "let collate_fn return tensors, in dicts, lists, tuples or dataclasses, or choose a"
        " global_batch_size that leaves each process a sample in the last batch",
    )


def _array_without_samples(one: Any, two: Any) -> Any:
    """The tensor, or the array, without samples."""
    differing = [
        place
        for place, (length, length_of_two) in enumerate(zip(one.shape, two.shape, strict=True))
        if length != length_of_two
    ]
    # A sample that is of another size each time it is read differs in further dimensions.
    doubled = [place for place in differing if two.shape[place] == 2 * one.shape[place]]
    dimensions = doubled or differing
    if dimensions:
        index = [slice(None)] * one.ndim
        for place in dimensions:
            index[place] = slice(0, 0)
        return one[tuple(index)]
    if isinstance(one, Tensor):
        is_same = one.dtype == torch.bool or torch.equal(one, two)
    else:
        is_same = one.dtype.kind not in "iuf" or np.array_equal(one, two)
    return one if is_same else 2 * one - two
