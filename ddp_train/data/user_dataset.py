"""Your own data set, any map-style one, as a source of batches whose random draws are keyed."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_train.data.batch_plan import NUMBERS
from ddp_train.data.dataset_state import READS, Epochs
from ddp_train.data.device_copy import to_device
from ddp_train.data.numbered_stream import NumberedStream
from ddp_train.data.rng import global_states, hash_key, keyed_generators
from ddp_train.data.sample_stream import is_iterable_of_torch
from ddp_train.data.sample_tensors import as_tensors, is_pair
from ddp_train.data.sample_tensors import collate as default_collate
from ddp_train.data.sample_transforms import (
    Transform,
    apply_transform,
    refuse_files_that_are_cut_off,
    with_masks_and_boxes,
)
from ddp_train.data.stream_place import StreamPlace
from ddp_train.errors import ConfigError, DataError
from ddp_train.tensor_tree import tensors
from ddp_train.text import counted, first_line, see_page

Collate = Callable[[list[Any]], Any]
"""Samples -> a batch."""
SeedGenerators = Callable[[int], None]
"""Seeds the global generators with a key."""
OUTPUTS = "data.outputs"
MAP_STYLE = (
    "return a map-style data set, which has both, or an iterable one, which has"
    f" __iter__{see_page('Data')}"
)


@dataclass(frozen=True)
class DeclaredClasses:
    """The number of classes that a config or a data set declares."""

    count: int
    said_by: str
    """The key or attribute that declares it, for messages."""

    def way_to(self, count: int) -> str:
        """The remedy that makes them another number."""
        verb = "add"
        if self.said_by.startswith(OUTPUTS):
            verb = "use"
        return f"{verb} {OUTPUTS}={count}"


class UserDataset:
    """Any map-style data set as a BatchSource.

    It is a HeldSource if it has `get_batch(numbers, epoch)` and `to(device)`.

    The random draws of its samples and transforms (from torch's, numpy's and Python's global
    generators) are keyed by seed, epoch and sample. What its own `get_batch` draws is its own
    business. A data set with `set_epoch(epoch)` is told the epoch of the samples that are read.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        transforms: Sequence[Transform] = (),
        fields: Sequence[str] = (),
        outputs: int | None = None,
        collate: Collate | None = None,
    ) -> None:
        """Checks and wraps a data set.

        transforms: called in turn with each sample.
        fields: names in samples that are dicts; the sample is then a tuple of their values.
        outputs: what a model must produce; None: the data set says it.
        collate: None: the data set's own method `collate_fn`, or else torch's.

        Raises DataError if it is not a map-style data set, or is empty.
        """
        refuse_files_that_are_cut_off(dataset)
        self.dataset = with_masks_and_boxes(dataset)
        _check_map_style(dataset)
        self.seed = seed
        self.name = type(dataset).__name__
        if isinstance(dataset, NumberedStream):
            self.name = dataset.name
        self.transforms = transforms
        self.fields = fields
        self.given_outputs = outputs
        self.collate: Collate = collate or getattr(dataset, "collate_fn", None) or default_collate
        self.can_make_batches = makes_batches(dataset) and not (fields or collate)
        """The data set itself makes batches, which transforms of samples would not change."""
        self.device = torch.device("cpu")
        self.epochs: Epochs | None = Epochs(self.dataset, seed)
        """Tells the data set its epoch; None in a loop of the user's own, which does so itself."""
        self.numbers: np.ndarray | None = None
        """The data set's samples that belong to this split, int64 [n]; None: all."""

    def __len__(self) -> int:
        if self.numbers is None:
            return len(self.dataset)
        return len(self.numbers)

    @property
    def is_read_in_order(self) -> bool:
        """True for a stream, whose samples can only be read in order: see `NumberedStream`."""
        return isinstance(self.dataset, NumberedStream)

    @property
    def has_no_end(self) -> bool:
        """True for a stream that begins again at its end, for as many samples as a run needs."""
        return isinstance(self.dataset, NumberedStream) and self.dataset.is_repeated

    @property
    def stream_place(self) -> StreamPlace | None:
        """The place behind the last sample that was read; None except for a stream with a state."""
        if isinstance(self.dataset, NumberedStream):
            return self.dataset.stream_place
        return None

    def select(self, numbers: np.ndarray) -> UserDataset:
        selection = copy.copy(self)
        selection.numbers = self._numbers_in_data_set(numbers)
        return selection

    def transformed(self, transforms: Sequence[Transform]) -> UserDataset:
        """The same samples with other transforms."""
        other = copy.copy(self)
        other.transforms = transforms
        return other

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample with its target."""
        batch = self.get_batch(np.zeros(1, np.int64), None)
        return sum(tensor.nbytes for tensor in tensors(batch))

    def to(self, device: torch.device, channels_last: bool = False) -> UserDataset:
        """The same split on a device, see HeldSource.

        channels_last: has no meaning here: whoever places a batch sees to its memory format.

        Raises ConfigError if it cannot be held.
        """
        if not self._can_be_held():
            rule = (
                "get_batch(numbers, epoch), which returns (inputs, targets), two tensors, and"
                " to(device)"
            )
            keys = "data.transform, data.fields and data.collate_fn"
            why = (
                f"{self.name} needs the methods {rule}, and {keys} must not be set; otherwise use"
                " data.placement=host"
            )
            raise ConfigError([f"data.placement=device: {why}"])
        held = copy.copy(self)
        held.dataset = self.dataset.to(device)
        held.epochs = Epochs(held.dataset, self.seed)
        held.device = device
        return held

    @property
    def outputs(self) -> int:
        """The outputs that a model must have. Raises ConfigError if nothing says it."""
        if self.given_outputs is not None:
            return self.given_outputs
        numbers = self._numbers_of_a_target()
        if numbers is not None:
            return numbers
        declared = self.declared_classes
        if declared:
            return declared.count
        problem = (
            f"data._target_: {self.name} needs an attribute `classes`, the list of the classes'"
            " names; or add data.outputs=NUMBER, the number of classes"
        )
        raise ConfigError([problem])

    @property
    def declared_classes(self) -> DeclaredClasses | None:
        """The number of classes that the config or the data set declares; None if neither does.

        Raises ConfigError if the data set declares two.
        """
        if self.given_outputs is not None:
            return DeclaredClasses(self.given_outputs, f"{OUTPUTS}={self.given_outputs}")
        found = []
        for name in ("classes", "num_classes"):
            count = _count_in(getattr(self.dataset, name, None))
            if count is not None:
                found.append(DeclaredClasses(count, f"`{name}` of {self.name}"))
        if not found:
            return None
        first = found[0]
        for other in found[1:]:
            if other.count != first.count:
                problem = (
                    f"data._target_: {first.said_by} gives {first.count} classes, but"
                    f" {other.said_by} gives {other.count}; correct one of them, or give the"
                    " number by data.outputs=NUMBER"
                )
                raise ConfigError([problem])
        return first

    def get_batch(self, indices: np.ndarray, epoch: int | None) -> Any:
        numbers = self._numbers_in_data_set(indices)
        if self.can_make_batches and not self.transforms:
            return self._batch_of_data_set(numbers % NUMBERS, epoch)
        return self._batch_of_samples(numbers.tolist(), epoch)

    def check_lengths(self, epochs: int) -> None:
        """Raise DataError if one of the epochs of a run has another number of samples."""
        if self.epochs:
            self.epochs.check_lengths(epochs)

    def transforms_that_draw(self) -> list[int]:
        """The places of the transforms that draw random numbers for the first sample."""
        if not self.transforms:
            return []
        places = []
        with keyed_generators() as seed_generators:
            sample = self._untransformed(0, None, seed_generators)
            for place, transform in enumerate(self.transforms):
                before = global_states()
                sample = apply_transform(transform, sample)
                if global_states() != before:
                    places.append(place)
        return places

    def _enter_epoch(self, epoch: int | None) -> None:
        if self.epochs is None:
            READS.count += 1
        else:
            self.epochs.enter(epoch)

    def _numbers_in_data_set(self, numbers: np.ndarray) -> np.ndarray:
        """Sample numbers of this split as numbers of the whole data set."""
        if self.numbers is None:
            return numbers
        return self.numbers[numbers]

    def _can_be_held(self) -> bool:
        if self.transforms or not self.can_make_batches or not hasattr(self.dataset, "to"):
            return False
        batch = self.get_batch(np.zeros(1, np.int64), None)
        return is_pair(batch) and all(isinstance(part, Tensor) for part in batch)

    def _numbers_of_a_target(self) -> int | None:
        """The number of elements in the target of a sample; None if it is not of floating point."""
        with keyed_generators() as seed_generators:
            sample = as_tensors(self._sample(0, None, seed_generators))
        kinds = Tensor | np.ndarray | np.floating | float
        if not is_pair(sample) or not isinstance(sample[1], kinds):
            return None
        target = torch.as_tensor(sample[1])
        if not target.is_floating_point():
            return None
        return target.numel()

    def _batch_of_data_set(self, numbers: np.ndarray, epoch: int | None) -> Any:
        """The batch that the data set itself makes. Raises DataError if a row is missing."""
        self._enter_epoch(epoch)
        batch = self.dataset.get_batch(to_device(torch.from_numpy(numbers), self.device), epoch)
        for tensor in tensors(batch, in_objects=False):  # a graph's edges are no rows
            if tensor.ndim and len(tensor) != len(numbers):
                rows = counted(len(tensor), "row")
                raise DataError(
                    f"data._target_: {self.name}.get_batch gave {rows} for"
                    f" {counted(len(numbers), 'number')}",
                    "return one row for each of `numbers`, in their order",
                )
        return batch

    def _batch_of_samples(self, numbers: list[int], epoch: int | None) -> Any:
        """Samples put together. Raises DataError if they do not fit together."""
        with keyed_generators() as seed_generators:
            samples = [self._sample(number, epoch, seed_generators) for number in numbers]
            seed_generators(self._key(epoch, numbers[0], "collate"))
            try:
                return self.collate(samples)
            except (TypeError, RuntimeError, StopIteration) as error:
                why = first_line(error) or type(error).__name__
                raise DataError(
                    f"data._target_: samples of {self.name} cannot be put into one batch: {why}",
                    "return tensors, arrays, images or numbers of one shape (for images add"
                    " 'data.transform=[{_target_:torchvision.transforms.v2.Resize,"
                    "size:[224,224]}]'),"
                    " or add data.collate_fn=package.function, which makes the batch",
                ) from error

    def _key(self, epoch: int | None, number: int, *purpose: str) -> int:
        epoch_number = -1 if epoch is None else epoch
        return hash_key(self.seed, "augment", epoch_number, number, *purpose)

    def _sample(self, number: int, epoch: int | None, seed_generators: SeedGenerators) -> Any:
        """A sample after its transforms. Raises DataError in place of StopIteration."""
        try:
            sample = self._untransformed(number, epoch, seed_generators)
            for transform in self.transforms:
                sample = apply_transform(transform, sample)
        except StopIteration as error:  # a reader of the batches would take it for their end
            raise DataError(
                f"data._target_: {self.name} raised StopIteration for sample {number % NUMBERS}",
                "return a sample for every number below len(); in __getitem__ and transforms use"
                " next(iterator, default)",
            ) from error
        return sample

    def _untransformed(
        self, number: int, epoch: int | None, seed_generators: SeedGenerators
    ) -> Any:
        """Fetch a sample from the data set, before its transforms.

        Before, a new epoch is told to the data set, and the generators are seeded by epoch and
        sample.

        number: an index of a batch: the number of the sample, plus a multiple of `NUMBERS`.
        epoch: None for samples that are scored.
        seed_generators: seeds the global generators with the key of the sample.

        Returns what the data set returns, or with `fields` a tuple of their values. An exception of
        the data set gets a note with the number of the sample.
        """
        self._enter_epoch(epoch)
        seed_generators(self._key(epoch, number))
        try:
            sample = self.dataset[number % NUMBERS]
        except Exception as error:
            error.add_note(f"(sample {number % NUMBERS} of {self.name})")
            raise
        if not self.fields:
            return sample
        return self._fields_of(sample)

    def _fields_of(self, sample: Any) -> tuple[Any, ...]:
        """The values of `fields`. Raises ConfigError if a sample lacks one."""
        key = f"data.fields=[{','.join(self.fields)}]"
        if not isinstance(sample, dict):
            kind = type(sample).__name__
            problem = f"{key}: a sample of {self.name} is a {kind}, not a dict; leave the key out"
            raise ConfigError([problem])
        for name in self.fields:
            if name not in sample:
                names = ", ".join(map(str, sample))
                problem = f"{key}: a sample of {self.name} has no {name}; it has {names}"
                raise ConfigError([problem])
        return tuple(sample[name] for name in self.fields)


def numbered_stream_of(source: Any) -> NumberedStream | None:
    """The stream of a source; None if it is none."""
    if isinstance(source, UserDataset) and isinstance(source.dataset, NumberedStream):
        return source.dataset
    return None


def parts_of(source: Any) -> dict[str, Any]:
    """The objects that may keep something between two samples, by names; none of ours does."""
    if not isinstance(source, UserDataset):
        return {}
    transforms = {transform_name(transform): transform for transform in source.transforms}
    dataset = source.dataset
    if isinstance(dataset, NumberedStream):
        dataset = dataset.stream
    return {source.name: dataset, **transforms, "collate_fn": source.collate}


def transform_name(transform: Any) -> str:
    return getattr(transform, "__name__", type(transform).__name__)


def _count_in(value: Any) -> int | None:
    """The number of classes in a list of names, or in a number; None if it is neither."""
    if isinstance(value, Sized) and not isinstance(value, str):
        return len(value)
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value)
    return None


def makes_batches(dataset: Any) -> bool:
    """True if a data set makes batches itself, by the names of the method and its parameters.

    Others have a `get_batch` too, of a size or a split.
    """
    try:
        parameters = inspect.signature(dataset.get_batch).parameters
    except (AttributeError, TypeError, ValueError):
        # It has none; it is not a function; it is a function in C.
        return False
    return list(parameters)[:2] == ["numbers", "epoch"]


def _check_map_style(dataset: Any) -> None:
    """Raises DataError if a data set is not a map-style one, or is empty."""
    name = type(dataset).__name__
    if isinstance(dataset, NumberedStream):
        name = dataset.name
    has_both = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if is_iterable_of_torch(dataset) or not has_both:
        raise DataError(f"data._target_: {name} has no __getitem__ or no __len__", MAP_STYLE)
    if not len(dataset):
        raise DataError(
            f"data._target_: {name} has no samples", "check its arguments, data.NAME=VALUE"
        )
