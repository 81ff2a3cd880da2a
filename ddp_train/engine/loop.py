"""Training and evaluation. No rank, no strategy, no tip and no config in here: whatever differs is
a collaborator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.distributed.training_step import scored
from ddp_train.engine.stream_position import StreamPosition
from ddp_train.optim.stepper import Stepper
from ddp_train.parallel.strategy import Strategy
from ddp_train.resilience.preemption import StopController
from ddp_train.tasks.score import OF_THE_MODEL, Score, Scorer
from ddp_train.tasks.task import ModelWithTask
from ddp_train.telemetry.trackers.media import Media

Forward = Callable[[Any], tuple[Tensor, Tensor | None]]
"""The loss of a batch as a scalar, and its number of units; None if these are the samples."""


@dataclass
class Evaluation:
    """Everything that one process needs to evaluate."""

    module: ModelWithTask
    strategy: Strategy
    batches: Iterable[Batch]
    new_scorer: Callable[[], Scorer]
    close: Callable[[], None] = lambda: None
    """End what keeps batches coming. To be called after the last use."""
    stop: StopController = field(default_factory=StopController)
    explain: Callable[[], str] = lambda: OF_THE_MODEL
    """Why a loss of these data is not finite. A collective."""


@dataclass
class Job:
    """Everything that one process needs to train. `step` counts the optimizer steps that are
    done."""

    plan: BatchPlan
    module: ModelWithTask
    wrapped: Forward
    strategy: Strategy
    stepper: Stepper
    batches: Iterable[Batch]
    evaluations: Mapping[str, Evaluation]
    """Evaluations of the sets that are scored while it trains, by their names: `validation`. The
    first is the one that selects, unless the user names another."""
    seed_step: Callable[[int], None]
    hooks: Sequence[Hook] = ()
    stop: StopController = field(default_factory=StopController)
    step: int = 0
    hooks_step: int = 0
    """The step after which hooks act next."""
    scores: Mapping[str, Score] = field(default_factory=dict)
    """The scores of `step` by the name of the set; empty if it was not evaluated."""
    stream_position: StreamPosition | None = None
    """Part of a checkpoint; None but for a stream that has a state of its own."""
    media: Media = field(default_factory=Media)
    """The way of images, texts and tables from hooks to trackers."""
    stand_ins_count: bool = False
    """A process without a sample in a micro-batch gets another's, which has no weight in the loss,
    and what the model or the task counts beside it has one sample too many."""

    @property
    def evaluation(self) -> Evaluation:
        """The first of `evaluations`: by default its scores select the best checkpoint."""
        return next(iter(self.evaluations.values()))

    @property
    def score(self) -> Score | None:
        """The score of `step` on the first set, if it was evaluated."""
        return next(iter(self.scores.values()), None)


class Hook(Protocol):
    """Something that happens beside training, between two steps, on every process alike."""

    def due(self, job: Job) -> int:
        """The next step, later than `job.step`, after which it must be called."""
        ...

    def act(self, job: Job) -> None:
        """Called after that step, and after those for which other hooks asked: it must look at
        `job.step` to know whether it is due."""
        ...


def fit(job: Job) -> None:
    """Train from `job.step` to the end of the plan, or to where the stop controller stops it."""
    batches = iter(job.batches)
    while job.step < job.plan.steps and job.stop.allows(job.step):
        due = [hook.due(job) for hook in job.hooks]
        job.hooks_step = min([job.plan.epoch_end(job.step), *due])
        train(job, batches, until=job.hooks_step)
        for hook in job.hooks:
            hook.act(job)


def train(job: Job, batches: Iterator[Batch], until: int) -> None:
    """Train until `until` optimizer steps are done, or until the stop controller stops it."""
    job.module.train()
    while (job.step < job.stop.limit or job.stop.allows(job.step)) and job.step < until:
        job.seed_step(job.step)
        exchange = False
        while not exchange:
            batch = next(batches)
            exchange = batch.micro_batch.is_last
            with job.strategy.sync_gradients(batch.micro_batch):
                loss, units = job.wrapped(batch.data)
                job.stepper.backward(loss, units, batch.micro_batch)
        job.stepper.step()
        job.step += 1


@torch.no_grad()
def evaluate(evaluation: Evaluation) -> Score | None:
    """Score a data set: each sample once, the same numbers on any number of processes.

    Returns None if a process was stopped.
    """
    evaluation.module.eval()
    scorer = evaluation.new_scorer()
    with evaluation.strategy.averaged(evaluation.module):
        for batch in evaluation.batches:
            if evaluation.stop.requested.is_set():
                break
            with scored(batch.micro_batch):
                scores = evaluation.module.score(batch.data)
            scorer.add(batch.micro_batch.step, scores, batch.micro_batch.num_real)
    return scorer.result(evaluation.explain)
