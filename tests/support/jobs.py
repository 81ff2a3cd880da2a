"""Small training jobs for the tests, built as the worker builds them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.assembly.arguments import arguments_of
from ddp_train.assembly.batches import loader_options
from ddp_train.assembly.data_sets import open_datasets
from ddp_train.assembly.job import JobBuilder
from ddp_train.assembly.model import build_built_in_model, build_module
from ddp_train.assembly.strategy import build_strategy
from ddp_train.config.auto import resolve
from ddp_train.config.bind import bind
from ddp_train.config.user_code import instantiate
from ddp_train.data.batch_plan import BatchPlan, MicroBatch
from ddp_train.data.datasets import ArraySource, BatchSource
from ddp_train.data.loader import Loader
from ddp_train.data.splits import Splits
from ddp_train.distributed.world import World
from ddp_train.engine.loop import Job, fit
from ddp_train.hardware import Hardware
from ddp_train.optim.optimizers import build_optimizer
from ddp_train.optim.schedules.factors import Factor, build_schedule
from ddp_train.optim.schedules.schedule import FactorSchedule
from ddp_train.options.registry import implementation_of
from ddp_train.options.schema import Config
from ddp_train.options.sections import TuningConfig
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.tasks.task import ModelWithTask


def config_of(world: World, machine: Hardware | None = None, **sections: Any) -> Config:
    """A resolved config, on a machine without GPUs unless one is given. Sections not given have
    their defaults."""
    config, problems = bind(copy.deepcopy(sections))
    assert not problems, problems
    return resolve(config, machine or Hardware(cpus=world.size), world)


def table(samples: int, features: int = 6, classes: int = 3, seed: int = 1) -> ArraySource:
    """A random classification table."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, features, generator=generator)
    labels = (
        inputs[:, :classes] + 0.3 * torch.randn(samples, classes, generator=generator)
    ).argmax(1)
    return ArraySource(inputs, labels)


def datasets_of(section: Any, seed: int = 0) -> tuple[BatchSource, BatchSource]:
    """The splits that a data section of the config names."""
    return open_datasets(Config(data=section, seed=seed))[:2]


def model_of(section: Any, shape: Sequence[int], outputs: int) -> nn.Module:
    """The network that a model section of the config names."""
    return build_built_in_model(section, shape, outputs)


def optimizer_of(
    parameters: Iterable[nn.Parameter], section: Any, kind: str, captured: bool = False
) -> Optimizer:
    """The optimizer that an optimizer section of the config names. kind: loop, foreach or fused."""
    if section.name == "custom":
        return instantiate("optimizer", section.code, list(parameters))
    arguments = arguments_of(section, *section.beside_arguments)
    return build_optimizer(
        parameters,
        implementation_of(section.implementation),
        implementation=kind,
        captured=captured,
        **arguments,
    )


def constant(optimizer: Optimizer) -> FactorSchedule:
    """The schedule that changes nothing."""
    return FactorSchedule(lambda step: 1.0, optimizer)


def factor_of(section: Any, total_steps: int, steps_per_epoch: int) -> Factor:
    """The factors of the schedule that a section of the config names, one of the house."""
    warmup = section.warmup_steps
    epochs = section.warmup_epochs
    warmup = warmup if epochs is None else round(epochs * steps_per_epoch)
    arguments = arguments_of(section, "warmup_steps", "warmup_epochs", "warmup_at_most")
    return build_schedule(section.name, total_steps, warmup, **arguments)


def loader_of(
    source: BatchSource,
    micro_batches: Iterable[MicroBatch],
    tuning: TuningConfig,
    device: str,
    resident: bool = False,
) -> Loader:
    """A loader with the switches of a tuning section."""
    options = replace(loader_options(Config(tuning=tuning)), resident=resident)
    return Loader(source, micro_batches, device, options)


def module_of(config: Config, source: BatchSource, device: str = "cpu") -> ModelWithTask:
    """The model with its loss, as the worker builds it."""
    return build_module(config, source, build_strategy(config, World(), device), device)


def job_of(
    config: Config,
    world: World,
    sources: tuple[BatchSource, BatchSource] | None = None,
    first_step: int = 0,
    device: str | None = None,
    module: ModelWithTask | None = None,
) -> Job:
    """A job as the worker builds it. device: in place of the config's."""
    sources = sources or open_datasets(config)
    device = device or world.device(config.device)
    strategy = build_strategy(config, world, device)
    module = module or build_module(config, sources[0], strategy, device)
    builder = JobBuilder(config, world, device, module, strategy, RankStatus())
    splits = sources if isinstance(sources, Splits) else Splits(*sources)
    return builder.build_job(splits, first_step)


def learning_rates(job: Job, steps: int) -> list[float]:
    """Those of the first group in the first steps, as the schedule of a job has them."""
    return [job.stepper.schedule.values(step)[0]["lr"] for step in range(steps)]


def trained(
    world: World, config: Config, sources: tuple[BatchSource, BatchSource] | None = None
) -> dict[str, Tensor]:
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


def micro_batches_of(worlds: list[BatchPlan], step: int) -> list[MicroBatch]:
    """Those of all ranks in one step."""
    return [
        one
        for plan in worlds
        for one in itertools.takewhile(lambda one: one.step == step, plan.micro_batches(step))
    ]
