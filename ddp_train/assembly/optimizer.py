"""The parameters that train, and the optimizer that a config names for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddp_train.assembly.arguments import arguments_of, needs_argument
from ddp_train.config.user_code import instantiate
from ddp_train.errors import ConfigError, ModelError
from ddp_train.optim.groups import MATCH, depths_of, layer_rates, parameter_groups
from ddp_train.optim.optimizers import build_optimizer
from ddp_train.options.custom import CustomOptimizerConfig
from ddp_train.options.registry import implementation_of
from ddp_train.options.schema import Config
from ddp_train.tasks.task import ModelWithTask
from ddp_train.text import did_you_mean, see_page, shown

READS_FLAG = "_step_supports_amp_scaling"
"""torch's own name for it: `found_inf` on the device leaves the step out, and nothing waits for the
host."""


def trained_parameters(config: Config, module: ModelWithTask) -> dict[str, nn.Parameter]:
    """The parameters that train at any time of the run, by name, in the order of the model.

    Raises ModelError if there are none.
    """
    later = module.frozen.parameters if module.frozen and config.model.freeze_epochs else {}
    trained = {
        name: parameter
        for name, parameter in module.model.named_parameters()
        if parameter.requires_grad or name in later
    }
    if not trained:
        raise ModelError(
            "no parameter requires grad: the whole model is frozen",
            "train some of them: requires_grad_(True)",
        )
    return trained


def optimizer_of(
    config: Config, module: ModelWithTask, trained: Mapping[str, nn.Parameter], captured: bool
) -> Optimizer:
    """The optimizer of the parameters that train at any time.

    captured: its steps will be captured as CUDA graphs.

    Raises ConfigError if it does not fit the model.
    """
    section = config.optimizer.at_batch(config.train.global_batch_size)
    is_custom = isinstance(section, CustomOptimizerConfig)
    rates = None
    if section.layer_decay is not None:
        lr = section.arguments["lr"] if is_custom else section.lr
        rates = _layer_rates(module.model, lr, section.layer_decay)
    frozen = module.frozen.parameters if module.frozen else ()
    groups = parameter_groups(trained, section.groups, rates, frozen)
    groups = section.split_groups(groups, module.model, trained)
    if is_custom:
        return _custom_optimizer(section, groups, captured)
    return build_optimizer(
        groups,
        implementation_of(section.implementation),
        implementation=config.tuning.optimizer,
        captured=captured,
        **arguments_of(section, *section.beside_arguments),
    )


def _layer_rates(model: nn.Module, lr: float, layer_decay: float) -> dict[str, float]:
    depths = depths_of(model)
    if len(set(depths.values())) == 1:
        rule = "the model has one layer; leave optimizer.layer_decay out"
        raise ConfigError([f"optimizer.layer_decay={layer_decay:g}: {rule}"])
    return layer_rates(depths, lr, layer_decay)


def _custom_optimizer(
    section: CustomOptimizerConfig, groups: list[dict[str, Any]], captured: bool
) -> Optimizer:
    """The optimizer of a class of the user's own."""
    params = groups
    if len(groups) == 1 and not section.groups:
        params = groups[0]["params"]
    optimizer = instantiate("optimizer", section.code, params)
    if needs_argument(optimizer.step):  # as that of LBFGS
        rule = f"{section.target}.step needs a closure, and a run calls step() without one"
        remedy = "use another optimizer, or a loop of your own in ddp_train.session"
        raise ConfigError([f"optimizer._target_={section.target}: {rule}; {remedy}"])
    if captured and not getattr(optimizer, READS_FLAG, False):
        rule = (
            f"{section.target} does not have {READS_FLAG} = True, so its step() may make the CPU"
            " wait for the GPU"
        )
        remedy = f"use tuning.cuda_graph=false{see_page('Performance')}"
        raise ConfigError([f"tuning.cuda_graph=true: {rule}; {remedy}"])
    known = list(optimizer.defaults)
    for group in section.groups:
        for name in group:
            if name != MATCH and name not in known:
                rule = f"{section.target} has no argument {name} for a group"
                raise ConfigError(
                    [f"optimizer.groups=[{shown(group)}]: {rule}{did_you_mean(name, known)}"]
                )
    return optimizer
