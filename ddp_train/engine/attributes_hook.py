"""Names attributes of the model and of the task, and values in the groups of the optimizer, that
change in training and are in no checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

from ddp_train.engine.loop import Job
from ddp_train.models.python_state import attribute_of, replaced, state_of
from ddp_train.optim.stepper import Stepper
from ddp_train.telemetry.console import Display
from ddp_train.text import see_page

MOST_NAMES = 3
"""The most names that a note lists."""
NOT_SAVED = (
    "note: {} changed during training but is in no checkpoint: a resumed run would have"
    " its first value. Set it in __enter__ of a hook too, or keep it in a buffer of the"
    " model, filled from the samples of all processes (ddp_train.all_gather)"
    f"{see_page('Hooks and logging')}"
)


class AttributesHook:
    """Names unsaved attributes that differ at a checkpoint from what they were at the last one.

    A look takes 7 to 8 ms on one process (resnet50, vit_b_16 with AdamW, one core).
    """

    def __init__(
        self, display: Display, hooks: Iterable[Any], next_checkpoint: Callable[[Job], int]
    ) -> None:
        """
        hooks: the user's hooks. Attributes that a hook sets in `__enter__` are not named.
        next_checkpoint: returns the next step after which a checkpoint is saved.
        """
        self.display = display
        self.set_again = {name for hook in hooks for name in names_set_at_start(hook)}
        self.next_checkpoint = next_checkpoint
        self.next_step = 0
        self.before: dict[str, str] = {}
        """Digests by paths; empty before the first step, until all hooks are entered."""
        self.told: set[str] = set()

    def due(self, job: Job) -> int:
        self.next_step = self.next_checkpoint(job)
        if not self.before:
            self.before = unsaved_state(job)
        return self.next_step

    def act(self, job: Job) -> None:
        if job.step != self.next_step:
            return
        now = unsaved_state(job)
        names = [path for path in replaced(self.before, now) if self._is_news(path)]
        self.before |= now
        self.told |= set(map(_attribute_of, names))
        if names:
            self.display.line(NOT_SAVED.format(", ".join(sorted(names)[:MOST_NAMES])))

    def _is_news(self, path: str) -> bool:
        """Tell whether a change is to be named: it was not yet, and no hook makes it again."""
        attribute = _attribute_of(path)
        is_set_again = attribute.rpartition(".")[2] in self.set_again
        return attribute not in self.told and not is_set_again


def unsaved_state(job: Job) -> dict[str, str]:
    """Digests of what no checkpoint of a run holds, by paths."""
    model = job.module.model
    saved = model.state_dict(keep_vars=True)
    roots: dict[str, Any] = {"task": job.module.task}
    if not any(name.endswith("_extra_state") for name in saved):  # it may hold the attributes
        roots["model"] = model
    found = state_of(roots, known={f"model.{name}": value for name, value in saved.items()})
    of_roots = {
        path: digest
        for path, digest in found.items()
        if path.startswith(("model.", "task.")) and "'s hook " not in path
    }
    return {**of_roots, **dict(_values_of_groups(job.stepper))}


def _values_of_groups(stepper: Stepper) -> Iterator[tuple[str, str]]:
    """Values in the groups of the optimizer that the schedule does not set, by paths."""
    groups = stepper.optimizer.param_groups
    for place, (group, scheduled) in enumerate(zip(groups, stepper.values, strict=False)):
        for name, value in group.items():
            if name != "params" and name not in scheduled:
                yield f"optimizer.param_groups[{place}].{name}", repr(value)


def names_set_at_start(hook: Any) -> set[str]:
    """The names in what a hook does when a run begins or resumes, before its first step.

    They are in the code of `__enter__` and `load_state_dict`, and of the methods that these call.
    """
    names: set[str] = set()
    methods = ["__enter__", "load_state_dict"]
    while methods:
        code = getattr(getattr(type(hook), methods.pop(), None), "__code__", None)
        if code:
            new = set(_names_in(code)) - names
            names |= new
            methods += new
    return names


def _names_in(code: CodeType) -> Iterator[str]:
    """Attributes, variables and texts: `epoch` of `task.epoch` and of `group["epoch"]`."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names_in(constant)


def _attribute_of(path: str) -> str:
    """The path of the attribute that an item belongs to; each value of a group is its own."""
    if path.startswith("optimizer."):
        return path
    return attribute_of(path)
