"""Hooks of the user's own: what `hooks=[my_pkg.Hook]` names, between steps and around training."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ddp_train.engine.hook_context import HookContext
from ddp_train.engine.loop import Job
from ddp_train.errors import ConfigError, StateError
from ddp_train.plain_state import plain_state
from ddp_train.tasks.logged_numbers import Moment, logging_at
from ddp_train.telemetry.own_numbers import HOOK


class UserHook:
    """A hook of the user's own as the loop calls hooks: it acts after the steps that it asks for,
    and no others."""

    def __init__(self, hook: Any, path: str, context: HookContext) -> None:
        """Adapt an object to the loop.

        hook: with `act(job)`, and perhaps `due(job)`, without which it acts at the end of each
            epoch; perhaps with `state_dict()` and `load_state_dict(state)`.
        path: dotted path of its class.
        """
        self.hook = hook
        self.path = path
        self.context = context
        self.next_step: int | None = None

    def due(self, job: Job) -> int:
        self.next_step = self._step_after(self.context)
        return self.next_step

    def act(self, job: Job) -> None:
        if self.next_step is None:  # owed by the processes before this one
            self.next_step = self._step_after(self.context.one_step_earlier())
        if job.step == self.next_step:
            with logging_at(Moment(HOOK, job.step)):
                self.hook.act(self.context)

    def _step_after(self, context: HookContext) -> int:
        if not hasattr(self.hook, "due"):
            return context.plan.epoch_end(context.step)
        step = self.hook.due(context)
        if not isinstance(step, int) or step <= context.step:
            raise ConfigError(
                [
                    f"hooks: {self.path}.due(job) returned {step!r}; return the step after which"
                    f" act is called next, a whole number above job.step={context.step}"
                ]
            )
        return step

    def state(self) -> Any:
        """The hook's state: its own tensors, and copies of all else. None if it has no state_dict.

        Raises StateError if a checkpoint with it could not be read again.
        """
        if not hasattr(self.hook, "state_dict"):
            return None
        return _copy(plain_state(self.hook.state_dict(), f"{self.path}.state_dict()"))


class UserHooks:
    """All hooks of the user's own in a run."""

    def __init__(self, hooks: Sequence[Any], paths: Sequence[str], context: HookContext) -> None:
        """paths: dotted paths of their classes. Raises ConfigError if one cannot be saved."""
        self.hooks = [
            UserHook(hook, path, context) for hook, path in zip(hooks, paths, strict=True)
        ]
        self.acting = [hook for hook in self.hooks if hasattr(hook.hook, "act")]
        try:
            self.state()
        except StateError as error:
            raise ConfigError([f"hooks: {error}; {error.remedy}"]) from error

    def state(self) -> list[list[Any]]:
        """Path and state of each hook, for a checkpoint."""
        return [[hook.path, hook.state()] for hook in self.hooks]

    @property
    def have_state(self) -> bool:
        """Whether a hook has a state, which it may change at any time."""
        return any(hasattr(hook.hook, "state_dict") for hook in self.hooks)

    def load_state(self, state: Sequence[Sequence[Any]]) -> list[str]:
        """Give the hooks their states; those of one class take theirs in their order.

        state: of a run that perhaps had other hooks.

        Returns notes on states that no hook takes.
        """
        left = [(path, of_hook) for path, of_hook in state if of_hook is not None]
        for hook in self.hooks:
            if not hasattr(hook.hook, "load_state_dict"):
                continue
            for entry in left:
                if entry[0] == hook.path:
                    hook.hook.load_state_dict(entry[1])
                    left.remove(entry)
                    break
        return [
            f"note: the checkpoint has the state of a hook {path}; this run has no such hook, and"
            " leaves the state out"
            for path, _ in left
        ]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, those with `__enter__` are entered, in their order."""
        with contextlib.ExitStack() as stack:
            for hook in self.hooks:
                if hasattr(hook.hook, "__enter__"):
                    stack.enter_context(hook.hook)
            yield


def _copy(state: Any) -> Any:
    """A copy of plain data around the same tensors, with a dict for an OrderedDict."""
    kind = type(state)
    if kind in (dict, OrderedDict):  # state_dict() of a module gives the latter
        return {name: _copy(item) for name, item in state.items()}
    if kind in (list, tuple):
        return kind(map(_copy, state))
    if isinstance(state, Tensor):
        return state.detach()
    return copy.deepcopy(state)
