"""Small training jobs for the tests, built as the worker builds them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_train.config.auto import resolve
from ddp_train.config.bind import bind
from ddp_train.config.hardware import Hardware
from ddp_train.config.schema import Config
from ddp_train.data.datasets import ArraySource, BatchSource, build_datasets
from ddp_train.distributed.world import World
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.training.loop import Job, fit
from ddp_train.training.setup import build_job, build_module


def config_of(world: World, machine: Hardware | None = None, **sections: Any) -> Config:
    """A resolved config, on a machine without GPUs unless one is given. Sections not given have their defaults."""
    config, problems = bind(copy.deepcopy(sections))
    assert not problems, problems
    return resolve(config, machine or Hardware(cpus=world.size), world)


def table(samples: int, features: int = 6, classes: int = 3, seed: int = 1) -> ArraySource:
    """A random classification table."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, features, generator=generator)
    labels = (inputs[:, :classes] + 0.3 * torch.randn(samples, classes, generator=generator)).argmax(1)
    return ArraySource(inputs, labels)


def job_of(
    config: Config, world: World, sources: tuple[BatchSource, BatchSource] | None = None, first_step: int = 0
) -> Job:
    """A job as the worker builds it."""
    sources, device = sources or build_datasets(config.data, config.seed), world.device(config.device)
    module = build_module(config, sources[0], device)
    return build_job(config, world, device, module, sources, RankStatus(), first_step)


def trained(world: World, config: Config, sources: tuple[BatchSource, BatchSource] | None = None) -> dict[str, Tensor]:
    """The weights after a whole run."""
    job = job_of(config, world, sources)
    fit(job)
    return {name: tensor.clone() for name, tensor in job.module.model.state_dict().items()}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest absolute difference between two sets of weights."""
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def ids_of(job: Job) -> list[np.ndarray]:
    """The samples of each micro-batch of this process, stand-ins left out."""
    return [micro_batch.indices[: micro_batch.num_real] for micro_batch in job.plan.micro_batches()]
