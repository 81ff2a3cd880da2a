"""Numbers that a loop carries from step to step, or from epoch to epoch, into its losses."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_train.distributed.exchange import texts_from_all_ranks
from ddp_train.models.loop_variables import user_frames
from ddp_train.sessions.watches.carried_names import LoopCode
from ddp_train.sessions.watches.code_names import as_code
from ddp_train.sessions.watches.states_of_ranks import are_same, numbers_of

LOOKS = 3
"""Steps that are looked at: the first may set what each of the next changes."""
CARRIED = (
    "%s: the losses depend on a value that the loop keeps from earlier steps or epochs, and that"
    " differs between processes, since each has only its own samples. So the result depends on"
    " the number of processes. For a mean over all samples use"
    " run.sum(values.sum()) / run.sum(len(values))"
)


class CarriedNumbers:
    """Tells which of the loop's variables carry other numbers on each process."""

    def __init__(self) -> None:
        self.looks = 0
        """Steps that were looked at."""
        self.samples = 0
        """Samples of this process in the last step."""
        self.numbers: dict[str, list[float]] = {}
        """Numbers of each carried variable after the last of these steps, without hidden states."""

    @property
    def is_complete(self) -> bool:
        return self.looks >= LOOKS

    def look(self, samples: int) -> None:
        """To be called when a step ends. samples: of this process in it."""
        self.samples = samples
        if not self.is_complete:
            self.looks += 1
            self.numbers = self._numbers_now()

    def _numbers_now(self) -> dict[str, list[float]]:
        """The numbers that the innermost loop carries whose step or epoch ends now."""
        for frame in user_frames():
            code = LoopCode.of_frame(frame)
            loop = code.loop_names()
            if loop is None:
                continue
            values = {name: code.value_of(name) for name in sorted(loop.carried)}
            numbers = {
                name: _numbers_of(value)
                for name, value in values.items()
                if not _is_hidden_state(value, self.samples)
            }
            return {name: of_one for name, of_one in numbers.items() if of_one}
        return {}

    def apart(self, device: str) -> list[str]:
        """The variables that are not the same on all processes, at the end of an epoch.

        A collective: every process must call it.
        """
        numbers = self.numbers | self._numbers_now()
        texts = texts_from_all_ranks(json.dumps(numbers), device)
        of_ranks = [json.loads(text) for text in texts]
        names = set.intersection(*map(set, of_ranks))
        return [
            as_code(name)
            for name in sorted(names)
            if not are_same([numbers[name] for numbers in of_ranks])
        ]


def _is_hidden_state(value: Any, samples: int) -> bool:
    """True for what has rows for each sample of the batch, [n, ...] or [layers, n, ...]."""
    if not isinstance(value, Tensor | np.ndarray):
        return False
    return value.ndim > 1 and samples in value.shape[:2]


def _numbers_of(value: Any) -> list[float] | None:
    """Numbers by which a variable is compared; None for what is no number, and for parameters."""
    if isinstance(value, nn.Parameter | bool):
        return None
    if isinstance(value, int | float | np.number):
        return [float(value)]
    if isinstance(value, list | tuple) and value:
        if not all(isinstance(item, int | float) for item in value):
            return None
        value = torch.tensor(value, dtype=torch.float64)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
        value = torch.as_tensor(value)
    if not isinstance(value, Tensor) or value.requires_grad:
        return None  # a loss that adds up is the part of this process
    if value.layout == torch.strided and value.numel():
        return numbers_of(value)
    return None
