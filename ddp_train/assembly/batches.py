"""The loaders of a run, and single batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ddp_train.assembly.arguments import keys_taken_by
from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import BatchPlan, MicroBatch, evaluation_batches
from ddp_train.data.datasets import BatchSource, is_read_in_order
from ddp_train.data.loader import Loader, LoaderOptions
from ddp_train.data.mix import Mix
from ddp_train.models.put_back import reading_ahead
from ddp_train.options.schema import Config
from ddp_train.tasks.supervised import Supervised
from ddp_train.tasks.task import Task


def loader_options(
    config: Config, task: Task | None = None, source: BatchSource | None = None
) -> LoaderOptions:
    """The options of a run's loaders.

    task: None if batches may hold anything.
    source: of a stream one loader process reads: several would each read all of it.
    """
    dtype = torch.float64 if config.tuning.precision == "fp64" else None
    one_target_per_sample = isinstance(task, Supervised) and task.units_are_samples
    options = LoaderOptions(
        dtype=dtype,
        one_target_per_sample=one_target_per_sample,
        **keys_taken_by(LoaderOptions, config.tuning),
    )
    if source is not None and is_read_in_order(source):
        options = replace(options, num_workers=min(1, options.num_workers))
    return options


def is_resident(data: Any) -> bool:
    """Whether the data set lies whole on the device."""
    return getattr(data, "placement", "host") == "device"


def first_batch(
    config: Config, plan: BatchPlan, source: BatchSource, device: str, mix: Mix | None = None
) -> Batch:
    """This process's first micro-batch, as training sees it; unmixed if `mix` is None."""
    return single_batch(config, source, next(plan.micro_batches()), device, mix)


def scored_batches(config: Config, source: BatchSource, device: str) -> Iterator[Batch]:
    """The batches of an evaluation, the same on all processes."""
    batch_size = config.train.evaluate_batch_size
    for micro_batch in evaluation_batches(len(source), batch_size, rank=0, world_size=1):
        yield single_batch(config, source, micro_batch, device)


def single_batch(
    config: Config,
    source: BatchSource,
    micro_batch: MicroBatch,
    device: str,
    mix: Mix | None = None,
    has_empty_batches: bool = False,
) -> Batch:
    """One batch; no loader process is started for it. has_empty_batches: see `Loader`."""
    options = replace(loader_options(config), num_workers=0)
    with reading_ahead(source):
        loader = Loader(source, [micro_batch], device, options, mix, has_empty_batches)
        return next(iter(loader))
