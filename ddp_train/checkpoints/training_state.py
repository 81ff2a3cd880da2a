"""State that training resumes from beside the weights: the contents of training.pt.

A configured run, what was kept of it, and a session all save and resume through
`TrainingState`. The weights lie beside it, under the model's own names (writer.py).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ddp_train.checkpoints import reader
from ddp_train.distributed.process_group import ranks, set_buffers
from ddp_train.engine.loop import Job
from ddp_train.optim.ema import WeightAverage
from ddp_train.parallel.strategy import Strategy
from ddp_train.plain_state import plain_extra_state, plain_state
from ddp_train.tasks.task import ModelWithTask
from ddp_train.tensor_tree import map_tensors

STEPPER = "stepper"
METRICS = "metrics"
SELECTION = "selection"
SCHEDULE = "schedule"
USER_HOOKS = "user_hooks"
STREAM = "stream"


HookStates = dict[str, Any]
"""State of each hook that has one, by its name in training.pt."""


class StatefulHook(Protocol):
    """A hook that a resumed run continues."""

    def state(self) -> Any:
        """Plain data and tensors."""
        ...

    def load_state(self, state: Any, /) -> list[str] | None:
        """Continue from `state`. Returns notes for the user, if there are any."""
        ...


@dataclass(frozen=True)
class AverageState:
    """The moving average of the weights, without the weights: they are in ema.safetensors."""

    updates: Tensor
    """Number of updates of the average, a scalar."""
    buffers: Tensor
    """Averaged floating-point buffers of each rank: [ranks, n], float64."""


@dataclass(frozen=True)
class TrainingState:
    """All that training continues with after a step, beside the weights. Plain data and tensors."""

    objects: dict[str, Any]
    """State of each object, by its name. A configured run has STEPPER (optimizer, loss scaler, last
    gradient norm) and three hooks: METRICS, SELECTION, USER_HOOKS, and SCHEDULE if it follows the
    evaluations. STREAM is the position in a stream that has a state of its own. A session has those
    that `run.resume` got, by the names that the user gave them."""
    buffers: Tensor
    """Floating-point buffers of each rank: [ranks, n], float64. The model's file has their mean."""
    average: AverageState | None = None
    """None without train.ema_decay."""
    session: dict[str, Any] | None = None
    """Position of a session's loop and facts of its batches; None in a configured run."""

    @classmethod
    def collect(
        cls, job: Job, hook_states: HookStates, buffers: Tensor, average: AverageState | None
    ) -> TrainingState:
        """The state of a configured run after `job.step`.

        hook_states: see `states_of`.
        buffers: those of each rank, [ranks, n].
        """
        objects = {STEPPER: job.stepper.state(), **hook_states}
        return cls(objects, buffers, average)

    @classmethod
    def load(cls, path: Path) -> TrainingState:
        """Read the training.pt of a checkpoint onto the host.

        Raises DataError if it is not plain data.
        """
        content = reader.load_training(path)
        content.pop(reader.EXTRA_STATE, None)  # it goes with the weights, see `reader.load_model`
        average = content.pop("average")
        if average is not None:
            average = AverageState(**average)
        return cls(**content, average=average)

    def as_dict(self) -> dict[str, Any]:
        """The contents of training.pt, with copies of all tensors.

        The copies are on the device of the originals, so that training waits for no transfer.
        """
        average = None
        if self.average:
            average = vars(self.average)
        return map_tensors(copy_of, {**vars(self), "average": average})

    def apply(
        self, path: Path, job: Job, hooks: Mapping[str, StatefulHook], rank: int
    ) -> list[str]:
        """Continue a configured run from here: weights, average, optimizer and hooks.

        path: the checkpoint that this state was loaded from.
        hooks: those that take their state, by their names in training.pt.

        Returns notes for the user. Raises DataError if the weights belong to another model.
        """
        notes = []
        # First, for it overwrites the model.
        note = self._apply_average(path, job.stepper.average, job.module, rank)
        if note:
            notes.append(note)
        self.apply_weights(path, job.module.model, job.module, rank)
        job.stepper.load_state(self.objects[STEPPER])
        for name, hook in hooks.items():
            if name in self.objects:
                notes += hook.load_state(self.objects[name]) or []
            else:
                notes.append(
                    f"note: {path.name} has no state of the {name}, which starts from its initial"
                    " state"
                )
        return notes

    def apply_weights(self, path: Path, model: nn.Module, module: nn.Module, rank: int) -> None:
        """Load the weights, and this rank's own buffers if as many ranks saved them.

        model: the network whose weights the checkpoint has.
        module: owner of the buffers: the network, or the network with its task.
        """
        reader.load_model(path, model)
        apply_buffers(module, self.buffers, rank)

    def _apply_average(
        self, path: Path, average: WeightAverage | None, module: ModelWithTask, rank: int
    ) -> str:
        """Continue the average of the weights. Returns a note for the user, "" if there is none."""
        if average is None:
            if self.average is None:
                return ""
            return (
                f"note: {path.name} has an average of the weights, which this run does not"
                " continue; to continue the average, add train.ema_decay=0.999"
            )
        if self.average is None:
            reader.load_model(path, module.model)
            average.begin()
            return (
                f"note: {path.name} has no average of the weights, so the average starts with the"
                " weights after the next step"
            )
        reader.load_model(path, module.model, reader.AVERAGE)
        apply_buffers(module, self.average.buffers, rank)
        average.begin(self.average.updates)
        return ""


def states_of(hooks: Mapping[str, StatefulHook]) -> HookStates:
    """State that the hooks of a resumed run continue from.

    Raises StateError if one is no plain data.
    """
    return {name: plain_state(hook.state(), f"the state of {name}") for name, hook in hooks.items()}


@dataclass(frozen=True)
class AveragedModel:
    """The averaged weights, taken out of the model's place for a checkpoint."""

    weights: dict[str, Tensor]
    """Under the model's own names; empty on a process that does not write."""
    state: AverageState


def copy_of(tensor: Tensor) -> Tensor:
    """A copy on the same device, so that training waits for no transfer; on the host if the GPU's
    memory is full."""
    try:
        return tensor.detach().clone()
    except torch.OutOfMemoryError:
        return tensor.detach().cpu()


def copies_of(weights: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state_dict; what it has beside tensors is copied too.

    Raises StateError if that is no plain data.
    """
    copies = {}
    for name, value in weights.items():
        if isinstance(value, Tensor):
            copies[name] = copy_of(value)
        else:
            copies[name] = copy.deepcopy(plain_extra_state(name, value))
    return copies


def apply_buffers(module: nn.Module, buffers: Tensor, rank: int) -> None:
    """Set this rank's own buffers, if as many processes saved them as there are now.

    Otherwise the mean, which came with the weights, stays.

    buffers: those of each rank, [ranks, n].
    """
    if len(buffers) == ranks() > 1:
        set_buffers(module, buffers[rank])


def collect_average(
    average: WeightAverage, strategy: Strategy, module: ModelWithTask, copies: bool
) -> AveragedModel:
    """Take the averaged weights for a checkpoint. A collective: every process must call it.

    Buffers in the weights are the mean over the processes.

    copies: whether this process writes; the others need no weights.
    """
    with average.in_model(), strategy.averaged(module) as buffers:
        weights = strategy.full_weights(module.model)
        weights = copies_of(weights) if copies else {}
    return AveragedModel(weights, AverageState(average.updates, buffers))
