"""Numbers in the data of an evaluation that are not finite, which no model can score."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ddp_train.data.batch import Batch
from ddp_train.data.sample_tensors import is_pair
from ddp_train.distributed.process_group import from_all_ranks
from ddp_train.tasks.score import OF_THE_MODEL
from ddp_train.tensor_tree import tensors

NONE = 2**62


def cause_of_non_finite_score(batches: Iterable[Batch], device: str) -> str:
    """The reason why a score is not finite: a sample of the data, or else the model. A collective.

    batches: those of this process, which are gone through again.
    """
    found = min((_first_in(batch) for batch in batches), default=NONE)
    first = int(from_all_ranks(torch.tensor(found, device=device)).min())
    if first == NONE:
        return OF_THE_MODEL
    number, is_input = divmod(first, 2)
    part = "input" if is_input else "target"
    return f"the {part} of sample {number:,} of that data set is not finite"


def _first_in(batch: Batch) -> int:
    """Twice the number of the first sample with such a number, plus 1 if it is an input.

    NONE if all are finite.
    """
    inputs: Any = batch.data
    targets: Any = ()
    if is_pair(batch.data):
        inputs, targets = batch.data
    found = NONE
    for part, is_input in ((targets, 0), (inputs, 1)):
        for tensor in tensors(part):
            indices = batch.micro_batch.indices
            if not tensor.is_floating_point() or not tensor.ndim or len(tensor) != len(indices):
                continue
            is_bad = ~tensor.isfinite().flatten(1).all(1) if tensor.ndim > 1 else ~tensor.isfinite()
            for number in indices[is_bad.cpu().numpy()][:1].tolist():
                found = min(found, 2 * number + is_input)
    return found
