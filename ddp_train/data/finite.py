"""Finds the samples of a batch whose inputs or targets are not finite."""

from __future__ import annotations

import logging

import numpy as np
from torch import Tensor

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.data.datasets import BatchSource
from ddp_train.tensor_tree import tensors
from ddp_train.text import first_line

log = logging.getLogger(__name__)


def non_finite_samples(source: BatchSource, mixes: bool, micro_batch: MicroBatch) -> list[int]:
    """The samples with a NaN or an infinity in an input or a target, as their epoch augments them.

    Each is read again, by itself. A sample that cannot be read so is logged, and passes for finite.

    mixes: mixup or cutmix gives the first sample a part of the one before, which is looked at if
        all those of the batch are finite.
    """
    found = _non_finite(source, micro_batch.indices.tolist(), micro_batch.epoch)
    if mixes and not found and micro_batch.sample_before >= 0:
        return _non_finite(source, [micro_batch.sample_before], micro_batch.epoch)
    return found


def _non_finite(source: BatchSource, numbers: list[int], epoch: int | None) -> list[int]:
    found = []
    for number in dict.fromkeys(numbers):
        try:
            batch = source.get_batch(np.array([number]), epoch)
        except Exception as error:  # noqa: BLE001  code of the user's, and training has failed already
            log.warning(
                "sample %d cannot be read by itself, so it is not searched for NaN: %s",
                number,
                first_line(error),
            )
            continue
        if not all(map(_is_finite, tensors(batch))):
            found.append(number)
    return found


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
