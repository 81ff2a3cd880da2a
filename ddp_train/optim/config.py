"""Optimizers of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddp_train.options.key import key
from ddp_train.options.optimizer import OptimizerConfig


@dataclass
class SgdConfig(OptimizerConfig):
    name: str = "sgd"
    has_fused: ClassVar[bool] = True
    can_be_captured: ClassVar[bool] = True
    momentum: float = key(0.9, "momentum", at_least=0, below=1)
    nesterov: bool = key(False, "Nesterov momentum")


@dataclass
class AdamConfig(OptimizerConfig):
    name: str = "adam"
    has_fused: ClassVar[bool] = True
    can_be_captured: ClassVar[bool] = True
    lr: float = key(1e-3, "learning rate after warm-up", above=0)
    beta1: float = key(0.9, "decay of the first moment", at_least=0, below=1)
    beta2: float = key(0.999, "decay of the second moment", at_least=0, below=1)
    eps: float = key(1e-8, "added to the denominator", above=0)


@dataclass
class AdamWConfig(AdamConfig):
    name: str = "adamw"
    weight_decay: float = key(0.01, "weight decay, decoupled from the gradient", at_least=0)


@dataclass
class AdadeltaConfig(OptimizerConfig):
    name: str = "adadelta"
    lr: float = key(1.0, "learning rate after warm-up", above=0)
    rho: float = key(0.9, "decay of the averages", at_least=0, below=1)
    eps: float = key(1e-6, "added to the denominator", above=0)


@dataclass
class RmspropConfig(OptimizerConfig):
    name: str = "rmsprop"
    lr: float = key(1e-3, "learning rate after warm-up", above=0)
    alpha: float = key(0.99, "decay of the average of squared gradients", at_least=0, below=1)
    momentum: float = key(0.0, "momentum", at_least=0, below=1)
    eps: float = key(1e-8, "added to the denominator", above=0)
