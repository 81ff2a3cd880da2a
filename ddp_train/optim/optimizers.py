"""Optimizers by name: torch's own, LARS and LAMB."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddp_train.config.user_code import instantiate
from ddp_train.optim import split_fused
from ddp_train.optim.lars_lamb import Lamb, Lars


def build_optimizer(
    parameters: Iterable[nn.Parameter], config: Any, implementation: str, recorded: bool = False
) -> Optimizer:
    """torch's own optimizer, or LARS or LAMB. implementation: loop, foreach or fused, as torch calls them. recorded:
    its steps are recorded and replayed, so that they may take the host longer."""
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if config.name == "custom":
        return instantiate("optimizer", config, parameters)
    groups = parameters if config.decay_norm_and_bias else without_decay_of_vectors(parameters)
    common = {"lr": config.lr, "weight_decay": config.weight_decay}
    if implementation != "default":
        common |= {"foreach": implementation == "foreach"}
    if implementation == "fused":
        common |= {"foreach": None, "fused": True}
    in_parts = recorded and implementation == "fused" and len({parameter.dtype for parameter in parameters}) == 1
    torchs = split_fused if in_parts else torch.optim
    if config.name == "sgd":
        sgd = torchs.SGD(groups, momentum=config.momentum, nesterov=config.nesterov, **common)
        if implementation == "fused" and config.momentum:
            # Where a GradScaler leaves out the first step, as float16 often needs it, torch's kernel leaves the new
            # buffers unwritten: ResNet-50 had a loss of NaN in step 2. From zeros the first step is the same.
            for parameter in parameters:
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return sgd
    if config.name == "adadelta":
        return torch.optim.Adadelta(groups, rho=config.rho, eps=config.eps, **common)
    if config.name == "rmsprop":
        return torch.optim.RMSprop(groups, alpha=config.alpha, momentum=config.momentum, eps=config.eps, **common)
    if config.name == "lars":
        trust = config.trust_coefficient
        return Lars(groups, momentum=config.momentum, trust_coefficient=trust, eps=config.eps, **common)
    common |= {"betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.name == "lamb":
        return Lamb(groups, max_trust_ratio=config.max_trust_ratio, **common)
    cls = torchs.AdamW if config.name == "adamw" else torchs.Adam
    return cls(groups, **common)


def without_decay_of_vectors(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Groups of an optimizer: parameters of at most one dimension, which are norms and biases, do not decay.

    LARS and LAMB do not adapt their rate either; torch's optimizers pass over `layer_adaptation`.
    """
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1]},
        {
            "params": [parameter for parameter in parameters if parameter.ndim <= 1],
            "weight_decay": 0.0,
            "layer_adaptation": False,
        },
    ]
    return [group for group in groups if group["params"]]
