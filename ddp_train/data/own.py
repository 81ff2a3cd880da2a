"""A data set of the user's own, any map-style one: its samples, the transforms of a config, keyed
random draws."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from ddp_train.data.device_copy import to_device
from ddp_train.data.rng import global_states, hash_key, keyed_generators
from ddp_train.errors import ConfigError, DataError
from ddp_train.tensor_tree import tensors
from ddp_train.text import counted, first_line

Transform = Callable[..., Any]
MAP_STYLE = (
    "name a map-style dataset, not an iterable one: for tar files of webdataset data=shards, for"
    " parquet files Hugging Face's datasets without streaming (docs/data.md)"
)
TENSORS = "torchvision.tv_tensors"
PLACED = ("Mask", "BoundingBoxes", "KeyPoints")
"""What has its place in an image."""
MODES = ("L", "LA", "RGB", "RGBA")
"""Modes of PIL whose bytes are pixels of 0 to 255."""


class UserDataset:
    """Any map-style data set as a BatchSource; a HeldSource if it has `get_batch(numbers, epoch)`
    and `to(device)`.

    The random draws of its samples and transforms (from torch's, numpy's and Python's global
    generators) are keyed by seed, epoch and sample. What its own `get_batch` draws is its own
    business.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        transforms: Sequence[Transform] = (),
        fields: Sequence[str] = (),
        outputs: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """transforms: called in turn with each sample. fields: of samples that are dicts, which
        become the sample. outputs: what a model must produce; None: the data set says it. collate:
        from samples to a batch; None: the data set's own method `collate_fn`, or else torch's.

        Raises DataError if it is no map-style data set, or empty.
        """
        self.dataset = as_torchvision_has_them(dataset)
        self.seed = seed
        self.name = type(dataset).__name__
        self.transforms = transforms
        self.fields = fields
        self.given_outputs = outputs
        iterable = issubclass(type(dataset), IterableDataset)  # which inherits a __getitem__
        if iterable or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise DataError(
                f"data._target_: {self.name} has no __getitem__ or no __len__", MAP_STYLE
            )
        if not len(dataset):
            raise DataError(
                f"data._target_: {self.name} has no samples", "check its arguments, data.NAME=VALUE"
            )
        self.collate = collate or getattr(dataset, "collate_fn", None) or collated
        self.gives_batches = has_get_batch(dataset) and not (fields or collate)
        """Itself, which transforms of samples would not change."""
        self.device = torch.device("cpu")
        self.numbers: np.ndarray | None = None
        """Those of the data set's samples that belong to this split; None: all."""

    def __len__(self) -> int:
        if self.numbers is None:
            return len(self.dataset)
        return len(self.numbers)

    def select(self, numbers: np.ndarray) -> UserDataset:
        other = copy.copy(self)
        other.numbers = numbers if self.numbers is None else self.numbers[numbers]
        return other

    def transformed(self, transforms: Sequence[Transform]) -> UserDataset:
        """The same samples with other transforms."""
        other = copy.copy(self)
        other.transforms = transforms
        return other

    @property
    def sample_bytes(self) -> int:
        """With its target."""
        return sum(tensor.nbytes for tensor in tensors(self.get_batch(np.zeros(1, np.int64), None)))

    def to(self, device: torch.device, channels_last: bool = False) -> UserDataset:
        """See HeldSource; whoever places a batch sees to its memory format. Raises ConfigError if
        it cannot be held."""
        if self.gives_batches and not self.transforms:
            batch = self.get_batch(np.zeros(1, np.int64), None)
        else:
            batch = None
        is_pair = (
            isinstance(batch, tuple | list)
            and len(batch) == 2
            and all(isinstance(one, Tensor) for one in batch)
        )
        if not is_pair or not hasattr(self.dataset, "to"):
            rule = (
                "get_batch(numbers, epoch), which returns (inputs, targets), two tensors, and"
                " to(device)"
            )
            keys = "data.transform, data.fields and data.collate_fn"
            why = f"{self.name} needs the methods {rule}, and no {keys}; use data.placement=host"
            raise ConfigError([f"data.placement=device: {why}"])
        other = copy.copy(self)
        other.dataset = self.dataset.to(device)
        other.device = device
        return other

    @property
    def outputs(self) -> int:
        if self.given_outputs is not None:
            return self.given_outputs
        with keyed_generators() as seed:
            sample = as_tensors(self._sample(0, None, seed))
        target = sample[1] if isinstance(sample, tuple | list) and len(sample) == 2 else None
        if (
            isinstance(target, Tensor | np.ndarray | float)
            and torch.as_tensor(target).is_floating_point()
        ):
            return torch.as_tensor(target).numel()
        if hasattr(self.dataset, "classes"):
            return len(self.dataset.classes)
        if isinstance(number := getattr(self.dataset, "num_classes", None), int):
            return number
        raise ConfigError(
            [
                f"data._target_: {self.name} needs an attribute `classes`, the list of the classes'"
                " names; or add data.outputs=NUMBER, the number of classes"
            ]
        )

    def get_batch(self, indices: np.ndarray, epoch: int | None) -> Any:
        chosen = indices if self.numbers is None else self.numbers[indices]
        if self.gives_batches and not self.transforms:
            batch = self.dataset.get_batch(to_device(torch.from_numpy(chosen), self.device), epoch)
            odd = next(
                (one for one in tensors(batch) if one.ndim and len(one) != len(chosen)), None
            )
            if odd is not None:
                asked = counted(len(chosen), "number")
                raise DataError(
                    f"data._target_: {self.name}.get_batch gave {counted(len(odd), 'row')} for"
                    f" {asked}",
                    "return one row for each of `numbers`, in their order",
                )
            return batch
        numbers = chosen.tolist()
        with keyed_generators() as seed:
            samples = [self._sample(number, epoch, seed) for number in numbers]
            seed(self._key(epoch, numbers[0], "collate"))
            try:
                return self.collate(samples)
            except (TypeError, RuntimeError, StopIteration) as error:
                why = first_line(error) or type(error).__name__
                raise DataError(
                    f"data._target_: samples of {self.name} cannot be put into one batch: {why}",
                    "return tensors, arrays, images or numbers of one shape, for images with"
                    " data.transform=[{_target_:torchvision.transforms.v2.Resize,size:[224,224]}],"
                    " or give the data set a method collate_fn(samples), or"
                    " data.collate_fn=package.function",
                ) from error

    def drawing(self) -> list[int]:
        """The places of the transforms that draw random numbers for the first sample."""
        found = []
        if not self.transforms:
            return found
        with keyed_generators() as seed:
            sample = self._untransformed(0, None, seed)
            for place, transform in enumerate(self.transforms):
                before = global_states()
                sample = applied(transform, sample)
                found += [place] * (global_states() != before)
        return found

    def _key(self, epoch: int | None, number: int, *purpose: str) -> int:
        return hash_key(self.seed, "augment", -1 if epoch is None else epoch, number, *purpose)

    def _sample(self, number: int, epoch: int | None, seed: Callable[[int], None]) -> Any:
        try:
            sample = self._untransformed(number, epoch, seed)
            for transform in self.transforms:
                sample = applied(transform, sample)
        except StopIteration as error:  # a reader of the batches would take it for their end
            raise DataError(
                f"data._target_: {self.name} raised StopIteration for sample {number}",
                "give every sample below its len(); call next(iterator, default) in __getitem__ and"
                " transforms",
            ) from error
        return sample

    def _untransformed(self, number: int, epoch: int | None, seed: Callable[[int], None]) -> Any:
        seed(self._key(epoch, number))
        try:
            sample = self.dataset[number]
        except Exception as error:
            error.add_note(f"(sample {number} of {self.name})")
            raise
        if not self.fields:
            return sample
        asked = f"data.fields=[{','.join(self.fields)}]"
        if not isinstance(sample, dict):
            raise ConfigError(
                [
                    f"{asked}: a sample of {self.name} is a {type(sample).__name__}, no dict; leave"
                    " it out"
                ]
            )
        if missing := [name for name in self.fields if name not in sample]:
            there = ", ".join(map(str, sample))
            raise ConfigError(
                [f"{asked}: a sample of {self.name} has no {missing[0]}; it has {there}"]
            )
        return tuple(sample[name] for name in self.fields)


def has_get_batch(dataset: Any) -> bool:
    """Whether a data set makes batches itself, by what the method and its parameters are called:
    others have a `get_batch` too, of a size or a split."""
    try:
        names = [*inspect.signature(dataset.get_batch).parameters]
    except (
        AttributeError,
        TypeError,
        ValueError,
    ):  # it has none; it is no function; it is one in C
        return False
    return names[:2] == ["numbers", "epoch"]


def as_torchvision_has_them(dataset: Any) -> Any:
    """torchvision's own data sets with masks and boxes as such, so that its transforms change them
    with the image."""
    if type(dataset).__module__.startswith("torchvision.datasets."):
        from torchvision.datasets import wrap_dataset_for_transforms_v2

        try:
            with contextlib.suppress(TypeError):  # one that it knows no masks and boxes of
                return wrap_dataset_for_transforms_v2(dataset)
        except (RuntimeError, ValueError) as error:
            name = type(dataset).__name__
            clips = getattr(dataset, "video_clips", None)
            if clips:
                remedy = "data.output_format=TCHW"
            else:
                remedy = "other arguments, or call it in a class of your own"
            raise ConfigError(
                [
                    f"data._target_: torchvision does not support {name} as it is called:"
                    f" {first_line(error)}; use {remedy}"
                ]
            ) from error
    return dataset


def applied(transform: Transform, sample: Any) -> Any:
    """What a transform makes of a sample. Those of torchvision.transforms.v2, what derives from
    them or consists of them, take all of it, and change images, masks and boxes together; any other
    takes the input of an (input, target), or all of a sample of another structure.

    Raises ConfigError if such a target has masks or boxes, which would stay where they are.
    """
    is_pair = isinstance(sample, tuple | list) and len(sample) == 2
    if not is_pair or takes_targets(transform):
        return transform(sample)
    found = next(
        (kind for one in tensors(sample[1]) for kind in PLACED if _is(TENSORS, kind, one)), None
    )
    if found:
        name = type(transform).__name__
        raise ConfigError(
            [
                f"data.transform: {name} takes the image alone, and the target has a {found}, which"
                " would not change with it; use torchvision.transforms.v2, and classes that derive"
                f" from its Transform, inside {name} too"
            ]
        )
    return transform(sample[0]), sample[1]


def takes_targets(transform: Any) -> bool:
    """Whether a transform changes the masks and boxes of a target together with the image."""
    if any(
        f"{one.__module__}.".startswith("torchvision.transforms.v2.")
        for one in type(transform).__mro__
    ):
        return True
    is_v1 = type(transform).__module__ == "torchvision.transforms.transforms"
    if isinstance(transform, nn.Sequential):
        inner = transform
    else:
        inner = is_v1 and getattr(transform, "transforms", None)
    return bool(inner) and all(map(takes_targets, inner))


def collated(samples: list[Any]) -> Any:
    """A batch as torch's default_collate makes it, of samples as `as_tensors` makes them."""
    from torch.utils.data import default_collate

    return default_collate([as_tensors(sample) for sample in samples])


def as_tensors(sample: Any) -> Any:
    """A sample whose images and lists of numbers are tensors.

    Images, those of PIL and uint8 ones of torchvision, become float32 [channels, height, width]
    from 0 to 1. A mask that is the target becomes the classes of pixels, int64 [height, width].
    Lists of numbers within it become tensors.
    """
    if isinstance(sample, tuple | list) and len(sample) == 2 and _is(TENSORS, "Mask", sample[1]):
        return as_tensors(sample[0]), sample[1].as_subclass(Tensor).squeeze(0).long()
    if isinstance(sample, dict):
        return {name: _member(value) for name, value in sample.items()}
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return type(sample)(*map(_member, sample))
    if isinstance(sample, tuple | list):
        return type(sample)(map(_member, sample))
    if _is("PIL.Image", "Image", sample):
        return _pixels(sample)
    if isinstance(sample, Tensor):
        is_image = _is(TENSORS, "Image", sample) and sample.dtype == torch.uint8
        if is_image:
            return sample.as_subclass(Tensor).float().div(255)
        return sample.as_subclass(Tensor)
    return sample


def _is(module: str, name: str, value: Any) -> bool:
    """Whether a value is of a class of a module, which is not imported for it."""
    return module in sys.modules and isinstance(value, getattr(sys.modules[module], name, ()))


def _member(value: Any) -> Any:
    is_numbers = (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int | float) for item in value)
    )
    return torch.tensor(value) if is_numbers else as_tensors(value)


def _pixels(image: Any) -> Tensor:
    """float32 [channels, height, width] from 0 to 1, of a PIL image."""
    if image.mode not in MODES:
        raise DataError(
            f"data._target_: an image of PIL's mode {image.mode}, whose numbers are no pixels of 0"
            " to 255",
            "add data.transform=[torchvision.transforms.v2.RGB]; if it is a mask, return a tensor"
            " of integers",
        )
    pixels = torch.from_numpy(np.array(image))
    return (
        (pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1))
        .contiguous()
        .float()
        .div(255)
    )
