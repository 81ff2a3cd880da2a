"""What a loop changes at the beginning of an epoch, before its first batch, and would change again
in a run that is resumed inside of that epoch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_train.models.python_state import changed, state_of
from ddp_train.models.unsaved_copies import norms_of
from ddp_train.models.unsaved_copies import state_of as tensors_of
from ddp_train.tensor_tree import tensors

log = logging.getLogger(__name__)
DONE_AGAIN = (
    "%s: changed in an epoch before its first batch. A run that is resumed inside of the epoch"
    " makes the change a second time, and ends with other weights. Make the change after the"
    " loop over batches, or save only at the end of epochs: run.epochs(..., whole=True)"
)
WAS_DONE_AGAIN = (
    "%s: changed before the first batch of an epoch. The run was resumed inside of that epoch,"
    " so the change was made twice, and the weights will differ. Make the change after the loop"
    " over batches, or save only at the end of epochs: run.epochs(..., whole=True). Then start"
    " over in a new folder: ddp_train.session('runs/new')"
)
COUNT_OF_CALLS = "['_step_count']"
"""The end of a path: schedules count their calls, also of `step(epoch)`, which may come again."""

STATE = "['state']"
"""The path of what an optimizer keeps of each parameter."""

State = dict[str, str]
"""Digests by paths."""


class EpochBeginning:
    """Compares what run.resume got between the beginning of an epoch and its first batch."""

    def __init__(self, models: Mapping[str, nn.Module], objects: Mapping[str, Any]) -> None:
        """models, objects: what run.resume got, by names."""
        self.holders = {**models, **objects}
        self.epochs = 0
        """Epochs that this process has begun."""
        self.before: dict[str, State] | None = None
        """The states at the beginning of the epoch; None where they are not compared any more."""
        self.told: set[str] = set()

    def begin(self, is_resumed: bool) -> None:
        """Note the states where an epoch begins. is_resumed: the run goes on inside of it."""
        self.epochs += 1
        # The first may fill what is empty. Looked at are the second, the fourth, the eighth ...
        is_due = self.epochs > 1 and self.epochs.bit_count() == 1
        self.before = self._states() if is_due or is_resumed else None

    def see_first_batch(self, epoch: int, is_resumed: bool) -> None:
        """Name what has changed since, each once.

        epoch: its number.
        is_resumed: the run goes on inside of it. Then every change was made twice; otherwise those
            are left out that may be made twice, since they follow from the number of the epoch.
        """
        if self.before is None:
            return
        before = self.before
        self.before = None
        names = []
        for name, state in self._states().items():
            paths = _changed(before[name], state)
            if not is_resumed:
                paths = _unless_by_epoch(paths, state, self.holders[name], epoch)
            if paths and name not in self.told:
                names.append(name)
        self.told |= {*names}
        if names:
            log.warning(WAS_DONE_AGAIN if is_resumed else DONE_AGAIN, ", ".join(names))

    def _states(self) -> dict[str, State]:
        return {name: _state_of(holder) for name, holder in self.holders.items()}


def _state_of(holder: Any) -> State:
    """Digests of a state by paths. Of models and of an optimizer's averages, which are large, the
    norms alone."""
    if isinstance(holder, nn.Module):
        parts = [tensor for part in holder.modules() for tensor in tensors_of(part)]
        return {"": _digest_of(parts)}
    state = holder.state_dict()
    if not isinstance(holder, Optimizer):
        return state_of({"": state})
    groups = {key: value for key, value in state.items() if key != "state"}
    return state_of({"": groups}) | {STATE: _digest_of(tensors(state.get("state")))}


def _digest_of(of_holder: Iterable[Tensor]) -> str:
    """The norms of tensors, without counts and formats that have none."""
    with_norm = [
        tensor
        for tensor in of_holder
        if tensor.is_floating_point()
        and tensor.itemsize > 1
        and tensor.layout == torch.strided
        and not tensor.is_meta
    ]
    return str(norms_of(with_norm).tolist())


def _changed(before: State, now: State) -> list[str]:
    paths = [*changed(before, now), *(before.keys() - now.keys())]
    return [path for path in paths if not path.endswith(COUNT_OF_CALLS)]


def _unless_by_epoch(paths: list[str], state: State, holder: Any, epoch: int) -> list[str]:
    """The paths without those that a loop sets by the number of the epoch: rates, and the number.

    state: after they were set.
    """
    if isinstance(holder, Optimizer):
        return [path for path in paths if path == STATE]
    if isinstance(holder, LRScheduler) and holder.last_epoch == epoch:
        return []  # step(epoch)
    return [path for path in paths if state.get(path) != repr(epoch)]
