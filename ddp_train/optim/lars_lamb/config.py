"""The options optimizer=lars and optimizer=lamb."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddp_train.optim.config import AdamConfig, BuiltInOptimizerConfig
from ddp_train.options.key import key

_ADAPT_NORM_AND_BIAS = (
    "apply weight decay and the layer's ratio to norms and biases (parameters of at most one"
    " dimension) too"
)


@dataclass
class LarsConfig(BuiltInOptimizerConfig):
    """SGD with a learning rate adapted to each layer (arXiv:1708.03888), for batches of
    thousands."""

    name: str = "lars"
    implementation: ClassVar[str] = "ddp_train.optim.lars_lamb.optimizers:Lars"
    can_be_captured: ClassVar[bool] = True
    adapts_per_layer: ClassVar[bool] = True
    lr: float = key(1.0, "learning rate after warm-up, before each layer's ratio", above=0)
    weight_decay: float = key(
        5e-5, "weight decay, part of the gradient that is adapted", at_least=0
    )
    decay_norm_and_bias: bool = key(False, _ADAPT_NORM_AND_BIAS)
    momentum: float = key(
        0.9, "momentum of the update, learning rate included", at_least=0, below=1
    )
    trust_coefficient: float = key(
        1e-3, "norm of an update divided by the norm of the layer's weights, at lr=1", above=0
    )
    eps: float = key(0.0, "added to the denominator of the trust ratio", at_least=0)


@dataclass
class LambConfig(AdamConfig):
    """Adam with a learning rate adapted to each layer (arXiv:1904.00962), for batches of
    thousands."""

    name: str = "lamb"
    implementation: ClassVar[str] = "ddp_train.optim.lars_lamb.optimizers:Lamb"
    has_fused: ClassVar[bool] = False
    adapts_per_layer: ClassVar[bool] = True
    lr: float = key(
        5e-3, "norm of an update divided by the norm of the layer's weights, after warm-up", above=0
    )
    weight_decay: float = key(0.01, "weight decay, part of the update that is adapted", at_least=0)
    decay_norm_and_bias: bool = key(False, _ADAPT_NORM_AND_BIAS)
    eps: float = key(1e-6, "added to the denominator", above=0)
    max_trust_ratio: float | None = key(None, "upper bound of the trust ratio; null: none", above=0)
