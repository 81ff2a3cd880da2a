"""What happens in an optimizer step, and what is true of each optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ddp_train.config.key import key


class OptimizerFacts:
    """What every optimizer answers; the defaults are those of an optimizer that nothing is known
    about."""

    has_fused: ClassVar[bool] = False
    """Whether torch 2.11 to 2.15 have a fused implementation (adadelta, rmsprop, lars, lamb and
    muon have none)."""
    can_be_captured: ClassVar[bool] = False
    """Whether its step runs without waiting for the host: a flag on the device skips it, its rate
    may lie there."""
    adapts_per_layer: ClassVar[bool] = False
    """Whether the learning rate is adapted to each layer."""
    lr_scaling = "none"
    nesterov = False


@dataclass
class Groups:
    """Keys of every optimizer, a class of your own included. docs/finetuning.md"""

    groups: list[dict[str, Any]] = key(
        [],
        "other arguments for parts of the model, [{match: head.*, lr: 1e-2, weight_decay: 0}]:"
        " globs over names of parameters, the first match wins",
        example="[{match: head.*, lr: 0.01}]",
    )
    layer_decay: float | None = key(
        None,
        "the learning rate of a layer is that of the next one times this. Layers are the blocks:"
        " the members of the outermost nn.Sequential, ModuleList or ModuleDict with two or more of"
        " one class; what comes before is the first layer, what comes after the last; without such,"
        " the children of the model",
        above=0,
        at_most=1,
    )


@dataclass
class OptimizerConfig(Groups, OptimizerFacts):
    name: str = "sgd"
    lr: float = key(0.05, "learning rate after warm-up", above=0)
    weight_decay: float = key(0.0, "weight decay, as torch's optimizer defines it", at_least=0)
    decay_norm_and_bias: bool = key(
        True, "weight decay for norms and biases (parameters of at most one dimension) too"
    )
    lr_scaling: str = key(
        "none",
        "multiply lr by global_batch_size / lr_base_batch, or its root",
        choices=("none", "linear", "sqrt"),
    )
    lr_base_batch: int = key(
        256, "global batch size that lr is meant for, with lr_scaling", at_least=1
    )


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


_ADAPT_NORM_AND_BIAS = "decay and adapt norms and biases (parameters of at most one dimension) too"


@dataclass
class LarsConfig(OptimizerConfig):
    """SGD with a learning rate adapted to each layer (arXiv:1708.03888), for batches of
    thousands."""

    name: str = "lars"
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
        1e-3, "norm of an update over that of the layer's weights, at lr=1", above=0
    )
    eps: float = key(0.0, "added to the denominator of the trust ratio", at_least=0)


@dataclass
class LambConfig(AdamConfig):
    """Adam with a learning rate adapted to each layer (arXiv:1904.00962), for batches of
    thousands."""

    name: str = "lamb"
    has_fused: ClassVar[bool] = False
    adapts_per_layer: ClassVar[bool] = True
    lr: float = key(
        5e-3, "norm of an update over that of the layer's weights, after warm-up", above=0
    )
    weight_decay: float = key(0.01, "weight decay, part of the update that is adapted", at_least=0)
    decay_norm_and_bias: bool = key(False, _ADAPT_NORM_AND_BIAS)
    eps: float = key(1e-6, "added to the denominator", above=0)
    max_trust_ratio: float | None = key(None, "upper bound of the trust ratio; null: none", above=0)


@dataclass
class MuonConfig(OptimizerConfig):
    """Momentum orthogonalised for matrices, AdamW for the rest. docs/optimizers.md"""

    name: str = "muon"
    can_be_captured: ClassVar[bool] = True
    lr: float = key(0.02, "learning rate of matrices after warm-up", above=0)
    weight_decay: float = key(
        0.01, "weight decay, decoupled from the gradient, of both methods", at_least=0
    )
    momentum: float = key(0.95, "momentum of matrices", at_least=0, below=1)
    nesterov: bool = key(True, "Nesterov momentum")
    ns_steps: int = key(5, "iterations that orthogonalise", at_least=1, at_most=20)
    adjust_lr: str = key(
        "original",
        "learning rate by shape: times sqrt(max(1, rows / columns)), or times 0.2 sqrt(max(rows,"
        " columns)), so that learning rates found for AdamW fit",
        choices=("original", "match_rms_adamw"),
    )
    matrices: list[str] = key(
        [],
        "globs over names of what Muon updates; default: weights of two and more dimensions, but of"
        " embeddings and of the output layer",
        example="[blocks.*.weight]",
    )
    adamw_lr: float = key(3e-4, "learning rate of the rest after warm-up, AdamW's", above=0)
    beta1: float = key(0.9, "AdamW's decay of the first moment", at_least=0, below=1)
    beta2: float = key(0.95, "AdamW's decay of the second moment", at_least=0, below=1)
    eps: float = key(1e-8, "AdamW's, added to the denominator", above=0)


OPTIMIZERS = (
    SgdConfig,
    AdamConfig,
    AdamWConfig,
    AdadeltaConfig,
    RmspropConfig,
    LarsConfig,
    LambConfig,
    MuonConfig,
)
