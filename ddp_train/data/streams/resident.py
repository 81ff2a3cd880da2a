"""Batches of a data set that lies on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.dataset_state import AttributeWatch
from ddp_train.data.datasets import HeldSource
from ddp_train.data.streams.placement import Placement

GPU_GROUP_BYTES = 2**26
CPU_GROUP_BYTES = 2**19
"""Stays in a core's cache."""


class ResidentStream:
    """Cuts batches out of a data set that is held where they are needed.

    No process, no queue and no copy from the host takes part.

    Several micro-batches are fetched as one, so that the dozen operations of a fetch are shared by
    many small batches.
    """

    in_flight = ()

    def __init__(
        self,
        source: HeldSource,
        micro_batches: Iterable[MicroBatch],
        placement: Placement,
        original: Any = None,
    ) -> None:
        """Keeps a data set that is on the device.

        placement: brings what is fetched into the run's number type and memory format.
        original: the data set of the user's own of which it is a copy, if it is one.
        """
        self.source = source
        self.watch = None if original is None else AttributeWatch(original)
        self.micro_batches = micro_batches
        self.placement = placement
        on_gpu = placement.device.type == "cuda"
        group_bytes = GPU_GROUP_BYTES if on_gpu else CPU_GROUP_BYTES
        self.samples_per_group = group_bytes // max(1, source.sample_bytes)

    def __iter__(self) -> Iterator[Batch]:
        """See BatchStream. Raises DataError too if the user's code has changed the original."""
        for group in self.groups():
            if self.watch:
                self.watch.check()
            yield from self._fetch(group)

    def place(self, batch: Batch) -> Batch:
        """The batch itself, which is on the device already."""
        return batch

    def close(self) -> None:
        """Nothing is open."""

    def groups(self) -> Iterator[list[MicroBatch]]:
        """Micro-batches of one epoch that are fetched as one."""
        group: list[MicroBatch] = []
        samples = 0
        for micro_batch in self.micro_batches:
            samples += len(micro_batch.indices)
            is_full = samples > self.samples_per_group
            if group and (is_full or micro_batch.epoch != group[0].epoch):
                yield group
                group = []
                samples = len(micro_batch.indices)
            group.append(micro_batch)
        if group:
            yield group

    def _fetch(self, group: list[MicroBatch]) -> Iterator[Batch]:
        indices = np.concatenate([micro_batch.indices for micro_batch in group])
        inputs, targets = self.source.get_batch(indices, group[0].epoch)
        sizes = [len(micro_batch.indices) for micro_batch in group]
        parts_of_inputs = self.placement.place_tensor(inputs).split(sizes)
        parts_of_targets = self.placement.place_tensor(targets).split(sizes)
        for pair, micro_batch in zip(
            zip(parts_of_inputs, parts_of_targets, strict=True), group, strict=True
        ):
            yield Batch(pair, micro_batch)
