"""Hooks of the real runs of a proof: gradients, fixed random numbers, a sudden end."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_lab.prove.fixed_draws import fixed_draws
from ddp_lab.study.gradient_probe import GradientProbe
from ddp_train.checkpoints.layout import MANIFEST, places
from ddp_train.distributed.world import World
from ddp_train.engine.hook_context import HookContext
from ddp_train.linux import wait_until
from ddp_train.models.python_state import state_of
from ddp_train.resilience.whole_files import write_json

WRITTEN_SECONDS = 60.0
"""Time limit for a checkpoint whose writing has started. Without one the proof says that the killed
run left none."""


class Fixed:
    """Inside, the model draws no random numbers in training: see `fixed_draws`. Samples are drawn
    as ever."""

    def __init__(self, job: HookContext, run_dir: Path, world: World) -> None:
        self.job = job
        self.wrapped = job.wrapped

    def __enter__(self) -> Fixed:
        self.job.wrapped = self._forward
        return self

    def __exit__(self, *_: object) -> None:
        self.job.wrapped = self.wrapped

    def _forward(self, data: Any) -> tuple[Tensor, Tensor | None]:
        with fixed_draws(self.job.module.model):
            return self.wrapped(data)


class Gradients(GradientProbe):
    """The gradients of the first step, with random numbers fixed."""

    def __init__(self, job: HookContext, run_dir: Path, world: World) -> None:
        super().__init__(job, run_dir, world)
        self.fixed = Fixed(job, run_dir, world)

    def __enter__(self) -> Gradients:
        self.fixed.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.fixed.__exit__()


class States:
    """Leaves digests of some state at the end of training, from each process."""

    def __init__(
        self, job: HookContext, run_dir: Path, world: World, names: list[str], file: str
    ) -> None:
        """names: paths, as `state_of` has them.

        file: its name in `run_dir`, to which the rank is added.
        """
        self.job = job
        self.names = names
        self.path = run_dir / f"{file}.{world.rank}"

    def __enter__(self) -> States:
        return self

    def __exit__(self, *_: object) -> None:
        module = self.job.module
        digests = state_of({"model": module.model, "task": module.task})
        write_json(self.path, {name: digests.get(name) for name in self.names})


class KillAt:
    """Kills every process of the run by SIGKILL after a step, once a checkpoint is whole."""

    def __init__(self, job: HookContext, run_dir: Path, world: World, step: int) -> None:
        self.step = step
        self.run_dir = run_dir

    def due(self, job: HookContext) -> int:
        return self.step if job.step < self.step else job.plan.steps + 1

    def act(self, job: HookContext) -> None:
        # It is written beside training.
        wait_until(
            lambda: any((place / MANIFEST).exists() for place in places(self.run_dir)),
            WRITTEN_SECONDS,
            0.01,
        )
        os.kill(os.getpid(), signal.SIGKILL)
