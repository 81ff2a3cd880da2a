"""Hooks of the user's own: what `hooks=[my_pkg.Hook]` names, between steps and around training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ddp_train.engine.hook_context import HookContext
from ddp_train.engine.loop import Job
from ddp_train.errors import ConfigError

PLAIN = (type(None), bool, int, float, str, Tensor)


class UserHook:
    """A hook of the user's own as the loop calls hooks: it acts after the steps that it asks for,
    and no others."""

    def __init__(self, hook: Any, path: str) -> None:
        """hook: with `act(job)`, and perhaps `due(job)`, without which it acts at the end of each
        epoch; perhaps with `state_dict()` and `load_state_dict(state)`. path: the dotted path of
        its class."""
        self.hook = hook
        self.path = path
        self.next: int | None = None

    def due(self, job: Job) -> int:
        self.next = self._asked(job)
        return self.next

    def act(self, job: Job) -> None:
        if self.next is None:  # owed by the processes before this one
            self.next = self._asked(replace(job, step=job.step - 1))
        if job.step == self.next:
            self.hook.act(HookContext(job))

    def _asked(self, job: Job) -> int:
        if not hasattr(self.hook, "due"):
            return job.plan.epoch_end(job.step)
        step = self.hook.due(HookContext(job))
        if not isinstance(step, int) or step <= job.step:
            raise ConfigError(
                [
                    f"hooks: {self.path}.due(job) returned {step!r} and must return a whole number"
                    f" above job.step={job.step}, the next step after which act is called"
                ]
            )
        return step

    def state(self) -> Any:
        """Of `state_dict`; None if it has none. Raises ConfigError if a checkpoint could not be
        read with it."""
        state = self.hook.state_dict() if hasattr(self.hook, "state_dict") else None
        wrong = next((value for value in _leaves(state) if type(value) not in PLAIN), None)
        if wrong is not None:
            raise ConfigError(
                [
                    f"hooks: {self.path}.state_dict() has a {type(wrong).__name__}; numbers, texts"
                    " and tensors alone, in dicts and lists, can be read again without running"
                    " code"
                ]
            )
        return _copied(state)  # the hook may change later what it has returned


class UserHooks:
    """All of a run."""

    def __init__(self, made: Sequence[Any], paths: Sequence[str]) -> None:
        """paths: of their classes."""
        self.made = [UserHook(hook, path) for hook, path in zip(made, paths, strict=True)]
        self.acting = [one for one in self.made if hasattr(one.hook, "act")]
        self.state()  # one that cannot be saved is refused now

    def state(self) -> list[list[Any]]:
        """For a checkpoint: path and state of each."""
        return [[hook.path, hook.state()] for hook in self.made]

    def load_state(self, saved: Sequence[Sequence[Any]]) -> list[str]:
        """Returns what the user should know. saved: perhaps by a run with other hooks; those of one
        class take theirs in their order."""
        left = [(path, state) for path, state in saved if state is not None]
        for hook in self.made:
            mine = next((one for one in left if one[0] == hook.path), None)
            if mine and hasattr(hook.hook, "load_state_dict"):
                left.remove(mine)
                hook.hook.load_state_dict(mine[1])
        return [
            f"note: the checkpoint has a state of the hook {path}, which no hook takes"
            for path, _ in left
        ]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enters those with `__enter__`, in their order, around training."""
        with contextlib.ExitStack() as stack:
            for one in self.made:
                if hasattr(one.hook, "__enter__"):
                    stack.enter_context(one.hook)
            yield


def _leaves(value: Any) -> Iterator[Any]:
    """Classes that derive from dict, float and so on count as leaves: numpy's numbers are among
    them."""
    if type(value) in (dict, list, tuple):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copied, value))
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value
