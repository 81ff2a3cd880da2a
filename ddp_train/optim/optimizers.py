"""Optimizers with their groups and the implementation that was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddp_train.kernels import interface
from ddp_train.optim.groups import as_groups, split_group


def build_optimizer(
    parameters: Iterable[nn.Parameter] | Sequence[dict[str, Any]],
    optimizer_class: type[Optimizer],
    *,
    implementation: str,
    captured: bool = False,
    decay_norm_and_bias: bool = True,
    **arguments: Any,
) -> Optimizer:
    """The optimizer of parameters, or of groups of them. Those without a gradient stay as they are.

    optimizer_class: takes the keys of its option as arguments, but `betas` for beta1 and beta2.
    implementation: loop, foreach or fused, as torch calls them, or default for that of the class.
    captured: its steps run from a CUDA graph, so that host time per step does not matter.
    decay_norm_and_bias: weight decay for parameters of at most one dimension too.
    arguments: lr, weight_decay, and what else the class takes; a group may have its own.
    """
    groups = as_groups(parameters)
    if not decay_norm_and_bias:
        groups = [part for group in groups for part in without_decay_of_vectors(group)]
    # The arguments last: a group may have but one of the two.
    for keys in (*groups, arguments):
        if keys.keys() & {"beta1", "beta2"}:
            beta1 = keys.pop("beta1", arguments.get("beta1"))
            beta2 = keys.pop("beta2", arguments.get("beta2"))
            keys["betas"] = (beta1, beta2)
    if implementation == "fused":
        arguments |= {"foreach": None, "fused": True}
    elif implementation != "default":
        arguments["foreach"] = implementation == "foreach"
    dtypes = {parameter.dtype for group in groups for parameter in group["params"]}
    if captured and implementation == "fused" and len(dtypes) == 1:
        optimizer_class = interface.split_optimizer_class(optimizer_class)
    optimizer = optimizer_class(groups, **arguments)
    if implementation == "fused" and isinstance(optimizer, torch.optim.SGD):
        zero_momentum_buffers(optimizer)
    return optimizer


def zero_momentum_buffers(optimizer: torch.optim.SGD) -> None:
    """Begin the momentum of SGD's fused kernel at zeros, from which its first step is the same.

    Where a GradScaler leaves out the first step, as float16 often needs it, torch's kernel leaves
    new buffers unwritten: ResNet-50 had a loss of NaN in step 2.
    """
    for group in optimizer.param_groups:
        if group["momentum"]:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def without_decay_of_vectors(group: dict[str, Any]) -> list[dict[str, Any]]:
    """A group as two, in the second of which those of at most one dimension, norms and biases, have
    no weight decay.

    LARS and LAMB do not adapt the learning rate of those either; torch's optimizers ignore
    `layer_adaptation`.
    """
    no_decay = {"weight_decay": 0.0, "layer_adaptation": False}
    return split_group(group, lambda parameter: parameter.ndim > 1, {}, no_decay)
