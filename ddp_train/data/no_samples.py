"""The batch of a process that has no sample in a step: types and shapes as ever, the length 0."""

from __future__ import annotations

import contextlib
import copy
import weakref
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_train.data.datasets import BatchSource
from ddp_train.errors import DataError
from ddp_train.tensor_tree import (
    LEAVES,
    SEQUENCES,
    attributes_of,
    has_items,
    set_attribute,
    with_items,
    with_members,
)

SAME = (type(None), str, bytes, bool, np.generic, Enum, weakref.ref)
"""Types whose values a batch without samples has as one of a single sample has them."""


def batch_without_samples(source: BatchSource, number: int, epoch: int | None) -> Any:
    """The batch of a source without samples, which a collate_fn cannot make of an empty list.

    number: a sample to read for it.
    epoch: the epoch whose augmentation that gets.

    Raises DataError as `without_samples` does.
    """
    one = source.get_batch(np.array([number]), epoch)
    two = source.get_batch(np.array([number, number]), epoch)
    return without_samples(one, two)


def without_samples(one: Any, two: Any) -> Any:
    """The batch of no samples, from a batch of one sample and a batch of two copies of it.

    The dimension in which tensors differ is that of the samples: it gets the length 0. So do lists.
    What has the same shape in both goes on in a straight line: a count of samples becomes 0, and
    what is equal stays. Containers and objects of any type keep theirs.

    Raises DataError for an object that differs without a tensor, number or text that does.
    """
    return _Cut()(one, two)


class _Cut:
    """One walk of `without_samples`, in which an object that comes twice is cut once."""

    def __init__(self) -> None:
        self.done: dict[int, Any] = {}
        """The cut objects, by the ids of the whole ones."""

    def __call__(self, one: Any, two: Any) -> Any:
        if isinstance(one, Tensor | np.ndarray):
            return _array_without_samples(one, two)
        if isinstance(one, int | float) and not isinstance(one, bool | Enum):
            return 2 * one - two
        if one is two or isinstance(one, SAME):
            return one
        if id(one) in self.done:
            return self.done[id(one)]
        if has_items(one):
            items = {name: self(value, two[name]) for name, value in one.items()}
            return self._with_attributes(one, with_items(one, items), two)
        if isinstance(one, SEQUENCES):
            members = []
            if len(one) == len(two):
                members = list(map(self, one, two))
            return self._with_attributes(one, with_members(one, members), two)
        if not isinstance(one, LEAVES) and attributes_of(one):
            return self._with_attributes(one, copy.copy(one), two)
        if _are_equal(one, two):
            return one
        raise DataError(
            f"a batch has a {type(one).__name__}, which cannot be made empty; a process gets an"
            " empty batch where there are fewer samples than processes",
            "let collate_fn return tensors, in dicts, lists, tuples or dataclasses, or choose a"
            " global_batch_size with which each process has a sample in the last batch",
        )

    def _with_attributes(self, one: Any, clone: Any, two: Any) -> Any:
        """Give the copy of an object of one sample the attributes of one without samples."""
        self.done[id(one)] = clone  # it may lead to itself
        of_one = attributes_of(one)
        of_two = attributes_of(two)
        for name, part in attributes_of(clone).items():
            # A dict may set its items as attributes too, which are those of none then.
            is_as_before = not isinstance(one, dict) or part is of_one.get(name)
            if name in of_two and is_as_before:
                set_attribute(clone, name, self(part, of_two[name]))
        return clone


def _are_equal(one: Any, two: Any) -> bool:
    with contextlib.suppress(Exception):  # any object may refuse to be compared
        return bool(one == two)
    return False


def _array_without_samples(one: Any, two: Any) -> Any:
    """A tensor or an array without samples."""
    differing = [
        place
        for place, (length, length_of_two) in enumerate(zip(one.shape, two.shape, strict=True))
        if length != length_of_two
    ]
    # A sample that is of another size each time it is read differs in further dimensions.
    doubled = [place for place in differing if two.shape[place] == 2 * one.shape[place]]
    for place in doubled or differing:
        # Where samples begin, with the end behind them, has the lengths 2, 3 and, for none, 1.
        is_with_end = two.shape[place] == one.shape[place] + 1
        length = one.shape[place] - 1 if is_with_end and not doubled else 0
        one = _first(one, place, length)
    if differing:
        return one
    if isinstance(one, Tensor):
        is_same = one.dtype == torch.bool or torch.equal(one, two)
    else:
        is_same = one.dtype.kind not in "iuf" or np.array_equal(one, two)
    return one if is_same else 2 * one - two


def _first(array: Any, dimension: int, length: int) -> Any:
    """The first entries of an array or tensor in one of its dimensions."""
    if isinstance(array, Tensor):
        return array.narrow(dimension, 0, length)
    return array[(*[slice(None)] * dimension, slice(0, length))]
