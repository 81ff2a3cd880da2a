"""Optimizers by name: torch's own, LARS and LAMB."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddp_train.optim import split_fused
from ddp_train.optim.lars_lamb import Lamb, Lars

CLASSES: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
    "lars": Lars,
    "lamb": Lamb,
}
"""Their arguments are the keys of `optimizer=NAME`, but for `betas`, which are `beta1` and `beta2`."""


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    name: str,
    *,
    implementation: str,
    captured: bool = False,
    decay_norm_and_bias: bool = True,
    **arguments: Any,
) -> Optimizer:
    """The optimizer of parameters. Those without a gradient stay as they are, with torch's classes and ours.

    implementation: loop, foreach or fused, as torch calls them, or default for that of the class. captured: its steps
    run from a CUDA graph, so that host time per step does not matter. decay_norm_and_bias: weight decay for parameters
    of at most one dimension too. arguments: lr, weight_decay, and what else the class takes.
    """
    trained = list(parameters)
    groups = trained if decay_norm_and_bias else without_decay_of_vectors(trained)
    if "beta1" in arguments:
        arguments["betas"] = (arguments.pop("beta1"), arguments.pop("beta2"))
    if implementation == "fused":
        arguments |= {"foreach": None, "fused": True}
    elif implementation != "default":
        arguments["foreach"] = implementation == "foreach"
    cls = CLASSES[name]
    one_dtype = len({parameter.dtype for parameter in trained}) == 1
    if captured and implementation == "fused" and one_dtype:
        cls = split_fused.CLASSES[cls]
    optimizer = cls(groups, **arguments)
    if implementation == "fused" and name == "sgd" and arguments["momentum"]:
        # Where a GradScaler leaves out the first step, as float16 often needs it, torch's kernel leaves the new buffers
        # unwritten: ResNet-50 had a loss of NaN in step 2. From zeros the first step is the same.
        for parameter in trained:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def without_decay_of_vectors(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameter groups in which those of at most one dimension, norms and biases, have no weight decay.

    LARS and LAMB do not adapt the learning rate of those either; torch's optimizers ignore `layer_adaptation`.
    """
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0, "layer_adaptation": False},
    ]
    return [group for group in groups if group["params"]]
