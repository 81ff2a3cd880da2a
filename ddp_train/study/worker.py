"""A worker that a study measures: the ordinary one, with somebody attending its training (`probe`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ddp_train.config.schema import Config
from ddp_train.distributed.world import World
from ddp_train.study.gradient_probe import GradientProbe
from ddp_train.study.step_times import StepTimes
from ddp_train.training import worker
from ddp_train.training.loop import Job


def attend(config: Config, world: World, job: Job) -> AbstractContextManager[Any]:
    """What `probe` names."""
    if config.probe == "gradients":
        return GradientProbe(job, Path(str(config.run_dir)), world.is_leader)
    return StepTimes(job, Path(str(config.run_dir)), world.rank)


if __name__ == "__main__":
    worker.main(attend)
