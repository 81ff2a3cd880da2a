"""Names copies that move along in a task or a hook of the user's, and are in no checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from ddp_train.engine.loop import Job
from ddp_train.models.living_objects import LivingObjects, objects_within
from ddp_train.models.unsaved_copies import UnsavedCopies
from ddp_train.telemetry.console import Display
from ddp_train.text import see_page, with_article

LEVELS = 2
"""Levels at which a task or a hook may hold a copy: in an attribute, or in a list there."""
NOT_SAVED = (
    "note: {} changed during training but is in no checkpoint: a resumed run would begin"
    " with a new one. Keep it in the model, or in a hook with state_dict() and"
    f" load_state_dict(state){see_page('Hooks and logging')}"
)


class CopiesHook:
    """Names unsaved copies that differ at a checkpoint from what they were at the last one."""

    def __init__(
        self,
        display: Display,
        model: nn.Module,
        holders: Mapping[str, Any],
        next_checkpoint: Callable[[Job], int],
    ) -> None:
        """Note the copies that there are now.

        model: the model, which checkpoints hold.
        holders: the task, and the hooks without a state, by their names.
        next_checkpoint: returns the next step after which a checkpoint is saved.
        """
        self.display = display
        self.holders = holders
        self.next_checkpoint = next_checkpoint
        self.copies = UnsavedCopies([model], [])
        self.next_step = 0
        self.copies.look_for(self._living())

    def due(self, job: Job) -> int:
        self.next_step = self.next_checkpoint(job)
        return self.next_step

    def act(self, job: Job) -> None:
        if job.step != self.next_step:
            return
        for copy in self.copies.changed():
            self.display.line(NOT_SAVED.format(self._name_of(copy)))
        self.copies.look_for(self._living())

    def _living(self) -> LivingObjects:
        living = LivingObjects()
        for _, item in self._objects():
            if isinstance(item, nn.Module):
                living.modules.append(item)
            else:
                living.averages.append(item)
        return living

    def _name_of(self, copy: Any) -> str:
        """The holder of an object and its class: an attribute `teacher` of my.Task (Net)."""
        kind = type(copy).__name__
        for name, item in self._objects():
            if item is copy:
                return f"{name} ({kind})"
        return with_article(kind)

    def _objects(self) -> Iterator[tuple[str, Any]]:
        """The holders, their attributes and what lists and dicts in these hold, by names."""
        for holder_name, holder in self.holders.items():
            yield holder_name, holder
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                for item in objects_within([value], LEVELS - 1):
                    if isinstance(item, nn.Module) or hasattr(item, "__dict__"):
                        yield f"{holder_name}.{name}", item
