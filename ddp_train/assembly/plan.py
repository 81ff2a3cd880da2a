"""The batch plan of a run, and its warm-up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ddp_train.data.batch_plan import BatchPlan
from ddp_train.data.length_batches import LengthBatches
from ddp_train.data.sampled_epochs import SampledEpochs
from ddp_train.data.weighted_draws import WeightedDraws
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.options.schema import Config
from ddp_train.text import counted


def build_plan(
    config: Config,
    world: World,
    samples: int,
    weights: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    sampled: SampledEpochs | None = None,
    units_per_sample: float = 1.0,
    in_order: bool = False,
) -> BatchPlan:
    """The plan of which process computes which samples in which step.

    weights: of the samples, where the config asks for draws by weight.
    lengths: of the samples, where it asks for batches by length.
    sampled: the epochs of a sampler, where it names one.
    units_per_sample, in_order: see `BatchPlan`.

    Raises ConfigError if no step is left.
    """
    train = config.train
    if sampled is not None:
        samples = len(sampled)
    plan = BatchPlan(
        samples=samples,
        global_batch_size=train.global_batch_size,
        accumulation_steps=train.accumulation_steps,
        steps=0,
        seed=config.seed,
        rank=world.rank,
        world_size=world.size,
        virtual_shards=config.strategy.virtual_shards,
        weights=None if weights is None else WeightedDraws(weights),
        lengths=None if lengths is None else LengthBatches(lengths, train.global_batch_size),
        sampled=sampled,
        drop_last=config.data.drop_last,
        units_per_sample=units_per_sample,
        in_order=in_order,
    )
    if not plan.steps_per_epoch:
        size = train.global_batch_size
        count = counted(samples, "sample")
        rule = (
            f"leaves no batch, since train.global_batch_size={size} is more than the {count}"
            " of the training set"
        )
        raise ConfigError([f"data.drop_last=true: {rule}; use data.drop_last=false"])
    ends = []
    if train.most_epochs:
        ends.append(train.most_epochs * plan.steps_per_epoch)
    if train.max_steps:
        ends.append(train.max_steps)
    return replace(plan, steps=min(ends))


def warmup_steps(schedule: Any, plan: BatchPlan) -> int:
    """Number of optimizer steps of the warm-up. Raises ConfigError if it is longer than the run."""
    steps = schedule.warmup_asked(plan.steps_per_epoch)
    if schedule.warmup_at_most is not None:
        return min(steps, int(schedule.warmup_at_most * plan.steps))
    if steps >= plan.steps:
        key = f"warmup_steps={steps}"
        if schedule.warmup_epochs is not None:
            key = f"warmup_epochs={schedule.warmup_epochs:g} ({steps} steps)"
        rule = (
            f"the run ends before the warm-up does, after {plan.steps} steps; make the"
            f" warm-up shorter than {plan.steps} steps"
        )
        raise ConfigError([f"schedule.{key}: {rule}"])
    return steps
