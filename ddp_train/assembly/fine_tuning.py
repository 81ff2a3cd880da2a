"""Where a model begins, what of it trains with which optimizer, and what happens when its frozen
part begins to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.checkpoints import reader
from ddp_train.config.auto import optimizer_at_batch
from ddp_train.config.user_code import instantiate
from ddp_train.distributed.process_group import local_leader_first
from ddp_train.distributed.world import World
from ddp_train.engine.loop import Job
from ddp_train.errors import ConfigError, DataError, ModelError
from ddp_train.models.freezing import Frozen
from ddp_train.models.initial_weights import (
    Origin,
    Weights,
    load_initial_weights,
    read_weights,
    torchvision_weights,
)
from ddp_train.models.torchvision.config import TorchvisionConfig
from ddp_train.optim.groups import MATCH, depths_of, parameter_groups
from ddp_train.optim.optimizers import build_optimizer
from ddp_train.options.custom import CustomOptimizerConfig
from ddp_train.options.registry import implementation_of
from ddp_train.options.schema import Config
from ddp_train.tasks.task import ModelWithTask
from ddp_train.text import did_you_mean, shown


def weights_of(init_from: str) -> Weights:
    """Of a file, of a checkpoint, or of a run: its best one if that is kept, else its last.

    Raises DataError if there are none that can be trusted.
    """
    path = Path(init_from)
    key = f"model.init_from={init_from}"
    if not path.is_dir():
        return read_weights(path, key)
    try:
        found = reader.find(init_from, path, "auto")
    except DataError as error:
        raise DataError(f"{key}: {error}", "name another run, a checkpoint, or a file") from error
    assert found, "it is named, and find raises if it is not valid"
    return read_weights(found / reader.MODEL, key if found == path else f"{key} ({found.name})")


def begin(config: Config, model: nn.Module, world: World, device: str) -> Origin | None:
    """Gives a model the weights that the config names; None if it names none. Raises DataError or
    ConfigError, on all processes alike, if they do not fit. A collective, if weights may have to be
    downloaded: one process of a host does.
    """
    section = config.model
    if section.init_from is not None:
        return load_initial_weights(model, weights_of(section.init_from), section.init_ignore)
    if not isinstance(section, TorchvisionConfig) or section.weights is None:
        return None
    with local_leader_first(world, device):
        weights = torchvision_weights(section.arch, section.weights)
    return load_initial_weights(model, weights, section.init_ignore)


def trained_parameters(config: Config, module: ModelWithTask) -> dict[str, nn.Parameter]:
    """Those that train at any time of the run, by name, in the order of the model. Raises
    ModelError for none."""
    later = module.frozen.parameters if module.frozen and config.model.freeze_epochs else {}
    named = module.model.named_parameters()
    trained = {
        name: parameter for name, parameter in named if parameter.requires_grad or name in later
    }
    if not trained:
        raise ModelError(
            "no parameter of the model wants a gradient", "train some of them: requires_grad_(True)"
        )
    return trained


@dataclass(frozen=True)
class UnfreezeHook:
    """The frozen parameters train too, from a step on.

    The optimizer has had them all along, and has left them alone for want of gradients. DDP has
    not: its buckets are made once, of what wants gradients then, so the model is wrapped again.
    """

    step: int
    """Optimizer steps that are done by then."""
    frozen: Frozen
    wrap: Callable[[], Callable[[Any], tuple[Tensor, Tensor | None]]]

    def due(self, job: Job) -> int:
        return self.step if job.step < self.step else sys.maxsize

    def act(self, job: Job) -> None:
        if self.step <= job.step < job.plan.steps and self.frozen.lasts:
            self.frozen.unfreeze()
            job.module.train()
            job.wrapped = self.wrap()


READS_FLAG = "_step_supports_amp_scaling"
"""torch's own name for it: `found_inf` on the device leaves the step out, and nothing waits for the
host."""


def optimizer_of(config: Config, module: ModelWithTask, captured: bool) -> torch.optim.Optimizer:
    """Of the parameters that train at any time. captured: its steps will be. Raises ConfigError."""
    section = optimizer_at_batch(config)
    trained = trained_parameters(config, module)
    if isinstance(section, CustomOptimizerConfig):
        own = section.arguments
    else:
        own = vars(section)
    depths = None if section.layer_decay is None else depths_of(module.model)
    if depths and len(set(depths.values())) == 1:
        raise ConfigError(
            [
                f"optimizer.layer_decay={section.layer_decay:g}: the model has one layer; leave"
                " it out"
            ]
        )
    frozen = module.frozen.parameters if module.frozen else ()
    groups = parameter_groups(
        trained, own.get("lr"), section.groups, depths, section.layer_decay, frozen
    )
    groups = section.split_groups(groups, module.model, trained)
    if not isinstance(section, CustomOptimizerConfig):
        arguments = {
            name: value
            for name, value in vars(section).items()
            if name not in section.beside_arguments
        }
        implementation = config.tuning.optimizer
        return build_optimizer(
            groups,
            implementation_of(section.implementation),
            implementation=implementation,
            captured=captured,
            **arguments,
        )
    made = instantiate(
        "optimizer",
        section.code,
        groups if len(groups) > 1 or section.groups else groups[0]["params"],
    )
    if captured and not getattr(made, READS_FLAG, False):
        rule = (
            f"{section.target} has no attribute {READS_FLAG}: it may wait for the host"
            " (docs/optimizers.md)"
        )
        raise ConfigError([f"tuning.cuda_graph=true: {rule}; use tuning.cuda_graph=false"])
    taken = list(made.defaults)
    for group in section.groups:
        if unknown := [name for name in group if name != MATCH and name not in taken]:
            rule = f"{section.target} has no argument {unknown[0]} for a group"
            raise ConfigError(
                [f"optimizer.groups=[{shown(group)}]: {rule}{did_you_mean(unknown[0], taken)}"]
            )
    return made
