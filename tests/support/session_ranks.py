"""Sessions on the processes of `on_ranks`: no command, no launcher."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ddp_train.distributed.world import World
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.resilience.preemption import StopController
from ddp_train.sessions.run import Run
from ddp_train.sessions.settings import Settings
from ddp_train.sessions.steps import Steps
from ddp_train.sessions.watches import first_epoch


class Interrupted(Exception):
    """What a loop raises in place of a kill: all that was saved before is on the disk."""


@contextlib.contextmanager
def session_on(world: World, folder: str | None = None, device: str = "cpu") -> Iterator[Run]:
    """The run of one process of a session.

    folder: that of all processes; None: nothing is read from it, and one of its own is written.
    """
    with tempfile.TemporaryDirectory() as own:
        settings = Settings(
            run_dir=Path(folder or own),
            processes=world.size,
            device=device,
            seed=0,
            keep=2,
            max_restarts=0,
            timeout_seconds=60.0,
            grace_seconds=10.0,
        )
        steps = Steps(settings, world, device, RankStatus(), StopController())
        try:
            with contextlib.suppress(Interrupted):
                yield Run(steps)
                steps.end()
            if steps.saving:
                steps.saving.checkpoints.finish()
        finally:
            steps.close()


def told_by(world: World, loop: Callable[[Run], Any]) -> tuple[list[str], Any]:
    """The warnings of the first epoch on one process, and what a loop returns."""
    messages: list[str] = []
    first_epoch.log.warning = lambda text, *names: messages.append(text % names)  # type: ignore[method-assign]
    with session_on(world) as run:
        found = loop(run)
    return messages, found
