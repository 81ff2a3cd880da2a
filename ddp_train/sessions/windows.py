"""Gradients of several batches that are those of one mean, over all that counts in them.

The number of tokens of a window of batches is known at its end alone. So the gradients are, after
each batch, those of the mean over the batches so far: with u units before and v in this one, the
earlier gradients count u / (u + v) of what they did, and the loss is a sum over u + v. Whatever
follows, clipping, a GradScaler, a step that comes early at the end of an epoch, finds a mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_train.sessions.parameter_groups import parameters_of
from ddp_train.sessions.settings import UsageError

TWO_LOSSES = (
    "run.mean(..., accumulate=optimizer) was called twice in this step, but takes one loss in a"
    " step",
    "add the losses before the call: run.mean(losses + others, over=mask, accumulate=optimizer)",
)


class Window:
    """The batches whose gradients one optimizer has not used yet."""

    def __init__(self, optimizer: Optimizer, scalers: list[torch.amp.GradScaler]) -> None:
        """scalers: all of the loop's, which may leave out a step of the optimizer."""
        self.optimizer = optimizer
        self.scalers = scalers
        self.is_used = True
        """The optimizer has made a step since."""
        self.units: Tensor | None = None
        """A scalar, float64, over all processes."""
        self.records: list[Any] = []
        """The record that each scaler keeps of the current step; another one after its `update`."""

    def begin(self, units: Tensor) -> Tensor:
        """The units of the window with those of a further batch.

        units: of that, over all processes, a scalar, float64.
        """
        is_updated = any(
            record is not known
            for record, known in zip(self._records(), self.records, strict=False)
        )
        if self.is_used or is_updated or not self.gradients():
            self.units = None
        if self.units is None:
            return units
        return self.units + units

    def see_backward(self, before: Tensor | None, after: Tensor) -> None:
        """Called when a batch's loss goes backward, before its gradients are added.

        before, after: the units without it, and with it.

        Raises UsageError if another loss has done so since it was made.
        """
        if self.units is not before:
            raise UsageError(*TWO_LOSSES)
        gradients = self.gradients()
        if before is not None and gradients:
            share = torch.where(after == 0, 1.0, before / after)
            with torch.no_grad():
                # In 16 bits the share itself would be rounded.
                share = share.to(torch.promote_types(gradients[0].dtype, torch.float32))
                torch._foreach_mul_(gradients, share)  # pyright: ignore[reportPrivateImportUsage]
        self.units = after
        self.is_used = False
        self.records = self._records()

    def gradients(self) -> list[Tensor]:
        gradients = [parameter.grad for parameter in parameters_of(self.optimizer)]
        return [gradient for gradient in gradients if gradient is not None]

    def _records(self) -> list[Any]:
        return [scaler._per_optimizer_states for scaler in self.scalers]


class Windows:
    """The windows of all optimizers that have one."""

    def __init__(self) -> None:
        self.scalers: list[torch.amp.GradScaler] = []
        self.known: dict[Optimizer, Window] = {}

    def see_objects(self, objects: Iterable[object]) -> None:
        """Take note of what run.resume got."""
        scalers = [value for value in objects if isinstance(value, torch.amp.GradScaler)]
        self.scalers = [scaler for scaler in scalers if scaler.is_enabled()]

    def of(self, optimizer: Optimizer) -> Window:
        if optimizer not in self.known:
            self.known[optimizer] = Window(optimizer, self.scalers)
        return self.known[optimizer]

    def see_step(self, optimizer: Optimizer) -> None:
        """Called before a step of an optimizer."""
        window = self.known.get(optimizer)
        if window is not None:
            window.is_used = True

    def state(self, objects: Mapping[str, Any]) -> dict[str, float]:
        """The units of the windows that a checkpoint lies in, by the names of the optimizers."""
        found = {}
        for name, value in objects.items():
            window = self.known.get(value) if isinstance(value, Optimizer) else None
            if window and window.units is not None and not window.is_used:
                found[name] = window.units.item()
        return found

    def put_back(self, objects: Mapping[str, Any], state: dict[str, float], device: str) -> None:
        """Go on with the windows of a checkpoint."""
        for name, units in state.items():
            window = self.of(objects[name])
            window.units = torch.tensor(units, dtype=torch.float64, device=device)
            window.is_used = False
            window.records = window._records()
