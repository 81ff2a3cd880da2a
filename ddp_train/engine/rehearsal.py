"""Compilation and capture before the clock starts, by steps that are undone."""

from __future__ import annotations

import torch

from ddp_train.distributed.process_group import barrier
from ddp_train.engine.loop import Job
from ddp_train.performance.cuda_graph import GraphedStepper


def rehearse(job: Job) -> None:
    """Capture the training step, and score the first batch of an evaluation.

    Nothing is reported as done, and the weights stay what they are. Without captured steps, or a
    whole batch, it does nothing.
    """
    stepper = job.stepper
    if not isinstance(stepper, GraphedStepper):
        return
    if job.step >= job.plan.steps or not job.plan.is_full(job.step):
        return
    job.module.train()
    job.seed_step(job.step)
    stepper.rehearse(next(iter(job.batches)), job.module, job.strategy.sync_gradients)
    job.module.eval()
    with torch.no_grad():
        job.module.score(next(iter(job.evaluation.batches)).data)
    # Each rank compiles, and one may take seconds longer: they begin to train together.
    barrier(stepper.device)
