"""Training and evaluation. No rank, no strategy, no tip and no config in here: whatever differs is a collaborator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ddp_train.data.loader import Batch
from ddp_train.data.plan import Plan
from ddp_train.metrics import RunningLoss, Score, Scorer
from ddp_train.optim import Stepper
from ddp_train.strategy import ModelWithLoss, Strategy


@dataclass
class Evaluation:
    """Everything that one process needs to evaluate."""

    module: ModelWithLoss
    strategy: Strategy
    batches: Iterable[Batch]
    new_scorer: Callable[[], Scorer]


@dataclass
class Job:
    """Everything that one process needs to train. `step` counts the optimizer steps that are done."""

    plan: Plan
    module: ModelWithLoss
    wrapped: nn.Module
    strategy: Strategy
    stepper: Stepper
    batches: Iterable[Batch]
    evaluation: Evaluation
    seed_step: Callable[[int], None]
    losses: RunningLoss
    hooks: Sequence[Hook] = ()
    step: int = 0


class Hook(Protocol):
    """Something that happens beside training, on every process alike."""

    def after_step(self, job: Job) -> None: ...

    def after_epoch(self, job: Job) -> None: ...


def fit(job: Job) -> None:
    """Trains from `job.step` to the end of the plan."""
    batches = iter(job.batches)
    while job.step < job.plan.steps:
        train_epoch(job, batches)
        for hook in job.hooks:
            hook.after_epoch(job)


def train_epoch(job: Job, batches: Iterator[Batch]) -> None:
    """Trains to the end of the current epoch, or of the plan."""
    job.module.train()
    end = job.plan.epoch_end(job.step)
    while job.step < end:
        job.seed_step(job.step)
        exchange = False
        while not exchange:
            batch = next(batches)
            exchange = batch.share.last
            with job.strategy.sync_gradients(job.wrapped, now=exchange):
                loss = job.wrapped(batch.inputs, batch.targets)
                seen = job.stepper.backward(loss, batch)
            job.losses.add(seen, batch.share.count)
        job.stepper.step()
        job.step += 1
        for hook in job.hooks:
            hook.after_step(job)


@torch.no_grad()
def evaluate(evaluation: Evaluation) -> Score:
    """Scores the test set: each sample once, the same numbers on any number of processes."""
    evaluation.strategy.agree(evaluation.module)
    evaluation.module.eval()
    scorer = evaluation.new_scorer()
    for batch in evaluation.batches:
        loss, correct = evaluation.module.score(batch.inputs, batch.targets)
        scorer.add(batch.share.step, loss, correct, batch.share.count)
    return scorer.result()
