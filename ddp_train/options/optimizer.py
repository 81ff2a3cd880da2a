"""What every optimizer answers, and its groups of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ddp_train.options.key import key


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
