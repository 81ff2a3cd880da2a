"""The protocol of data sets, and the data set that is held in memory.

A source answers one question: which inputs and targets are these samples, in this epoch?
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ddp_train.data.augmentation import Erasing
from ddp_train.data.device_copy import to_device
from ddp_train.data.rng import hash_key, uniform
from ddp_train.data.rows import NormalisedRows, normalised_rows, rows
from ddp_train.data.stream_place import StreamPlace
from ddp_train.errors import DataError
from ddp_train.tensor_tree import tensors

Augmentation = Callable[[Tensor, Tensor], Tensor]
"""(images [n, c, h, w], draws [n, 3] uniform in [0, 1)) -> images."""
CONVERTED_AT_ONCE = 1_024
"""Images whose memory format is changed at a time."""


class BatchSource(Protocol):
    """One split of a data set."""

    def __len__(self) -> int: ...

    @property
    def outputs(self) -> int:
        """The outputs that a model must have for one sample: one per class, or per number."""
        ...

    def get_batch(self, indices: np.ndarray, epoch: int | None) -> Any:
        """These samples as a batch: from most data sets (inputs, targets).

        indices: sample numbers, int64 [n].
        epoch: the epoch whose augmentation is applied; None: no augmentation.
        """
        ...

    def select(self, numbers: np.ndarray) -> BatchSource:
        """Some of these samples as a split of their own. numbers: sample numbers, int64 [n]."""
        ...


@runtime_checkable
class HeldSource(Protocol):
    """A BatchSource that can be held whole where it is needed: `data.placement=device`.

    A batch is (inputs, targets).

    `isinstance` looks these attributes up: it must not ask for `outputs`, which your own data set
    may refuse.
    """

    def get_batch(self, indices: np.ndarray, epoch: int | None) -> tuple[Tensor, Tensor]:
        """See BatchSource."""
        ...

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample's inputs in a batch."""
        ...

    def select(self, numbers: np.ndarray) -> Self:
        """See BatchSource. The outputs stay those of all."""
        ...

    def to(self, device: torch.device, channels_last: bool = False) -> Self:
        """The same split on a device, where `get_batch` then works and gives the same batches.

        channels_last: the memory format of images there, and of what is fetched.
        """
        ...


class ArraySource:
    """A split that is held in memory: the host's, or a GPU's."""

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        mean: tuple[float, ...] = (),
        std: tuple[float, ...] = (),
        augmentation: Augmentation | None = None,
        seed: int = 0,
    ) -> None:
        """Keeps the samples.

        inputs: [n, ...], uint8 images (scaled to [0, 1], then normalised) or float32 as they are.
        targets: [n] int64 class labels, or float32 numbers.
        mean, std: of each channel of uint8 images.
        seed: of the augmentation.
        """
        self.inputs = inputs
        self.targets = targets
        self.augmentation = augmentation
        self.seed = seed
        self.mean = mean
        self.std = std
        self.classes: list[str] | None = None
        """Names of the classes."""
        self.scaled: tuple[tuple[float, ...], tuple[float, ...]] | None = None
        """Mean and standard deviation with which pixels from 0 to 1 became `inputs`, if they are
        not scaled here."""
        self.fetch_normalised: NormalisedRows = normalised_rows
        """Fetches and normalises images; on GPUs by one kernel, see `kernels.fetch`."""
        self.erasing: Erasing | None = None
        self.outputs = _outputs_for(targets)

    def __len__(self) -> int:
        return len(self.inputs)

    def image_facts(self) -> dict[str, Any]:
        """The arguments of `data.raw_input.ImageInput`; {} if the inputs are not pixels."""
        mean, std = self.scaled or (self.mean, self.std)
        if std:
            return {"shape": list(self.inputs.shape[1:]), "mean": mean, "std": std}
        return {}

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample's inputs as float32."""
        return 4 * self.inputs[0].numel()

    def select(self, numbers: np.ndarray) -> ArraySource:
        """See BatchSource. The number of classes stays that of all."""
        index = torch.from_numpy(numbers)
        return self._with_tensors(self.inputs[index], self.targets[index])

    def to(self, device: torch.device, channels_last: bool = False) -> ArraySource:
        """See HeldSource."""
        targets = self.targets.to(device)
        if not channels_last or self.inputs.ndim != 4:
            return self._with_tensors(self.inputs.to(device), targets)
        images = torch.empty_like(self.inputs, device=device, memory_format=torch.channels_last)
        # In pieces: never two copies of all images on the device.
        for piece, held in zip(
            images.split(CONVERTED_AT_ONCE), self.inputs.split(CONVERTED_AT_ONCE), strict=True
        ):
            piece.copy_(held)
        return self._with_tensors(images, targets)

    def get_batch(self, indices: np.ndarray, epoch: int | None) -> tuple[Tensor, Tensor]:
        index = to_device(torch.from_numpy(indices), self.inputs.device)
        if self.std:
            inputs = self.fetch_normalised(self.inputs, index, self.mean, self.std)
        else:
            inputs = rows(self.inputs, index)
        if self.augmentation and epoch is not None:
            draws = uniform(hash_key(self.seed, "augment", epoch), index, 3)
            inputs = self.augmentation(inputs, draws)
        if self.erasing and epoch is not None:
            inputs = self.erasing(inputs, index, epoch)
        return inputs, self.targets[index]

    def _with_tensors(self, inputs: Tensor, targets: Tensor) -> ArraySource:
        other = copy.copy(self)
        other.inputs = inputs
        other.targets = targets
        return other


def digests(source: BatchSource, samples: int = 8) -> dict[str, str]:
    """The identity of a data set: `count`, its number of samples, and sha256 of some by number."""
    count = str(len(source))
    if getattr(source, "has_no_end", False):
        count = "no end"
    return {"count": count} | {
        str(number): _digest(source, number) for number in spread(source, samples).tolist()
    }


def spread(source: BatchSource, count: int) -> np.ndarray:
    """Numbers of samples from the first to the last one, int64 [count] at most.

    Of a stream, which comes in its order alone, they are the first ones.
    """
    samples = len(source)
    if is_read_in_order(source):
        samples = min(samples, count)
    last = samples - 1
    steps = max(count - 1, 1)
    return np.unique(np.array([place * last // steps for place in range(count)], np.int64))


def is_read_in_order(source: BatchSource) -> bool:
    """True for the samples of a stream: to read one, all before it in its pass are read."""
    return getattr(source, "is_read_in_order", False)


def place_of_stream(source: BatchSource) -> StreamPlace | None:
    """The place behind the last sample that was read; None but for a stream with a state."""
    return getattr(source, "stream_place", None)


def check_same_data(
    name: str, root: str | None, before: dict[str, str], now: dict[str, str]
) -> None:
    """Raises DataError if the data are not those of a checkpoint.

    name, root: of the data set, for the message.
    before, now: as `digests` gave them.
    """
    if before == now:
        return
    changed = next(key for key in {**before, **now} if before.get(key) != now.get(key))
    if changed == "count":
        then = before.get("count", "an unknown number")
        what = f"the training set has {now['count']} samples now, and had {then}"
    elif changed.isdigit():
        what = f"sample {changed} differs"
    else:
        what = f"the {changed} of its samples differ"
    where = f" in data.root={root}" if root else ""
    raise DataError(
        f"data={name}{where} changed since the checkpoint: {what}",
        "restore the old data, or start a new run with checkpoint.resume=never. If the files are"
        " unchanged, the data set has another order each time it is created: let it seed its"
        " random numbers, and loop over sorted(...) in place of a Python set",
    )


def _outputs_for(targets: Tensor) -> int:
    """The number of classes, up to the largest label; for a regression the numbers of a target."""
    if not targets.is_floating_point():
        return int(targets.max()) + 1
    if targets.ndim == 1:
        return 1
    return targets[0].numel()


def _digest(source: BatchSource, number: int) -> str:
    """sha256 of the tensors of one sample. Raises DataError if they are not on the CPU."""
    digest = hashlib.sha256()
    for tensor in tensors(source.get_batch(np.array([number]), None)):
        if tensor.device.type != "cpu":
            raise DataError(
                f"sample {number} of the data set is on {tensor.device}; samples must be on the"
                " CPU, and each batch is moved to the GPU",
                "let the data set return tensors on the CPU. To hold the data on the GPU, use"
                " data.placement=device; in a session, index them with the numbers from"
                " run.loader(range(n), global_batch_size=...)",
            )
        content = tensor.contiguous().view(-1).view(torch.uint8)
        digest.update(content.numpy().tobytes())
    return digest.hexdigest()
