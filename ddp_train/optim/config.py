"""Optimizers of torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ddp_train.options.key import key
from ddp_train.options.problem import Problem
from ddp_train.options.schema import OptimizerConfig, RequestedRun


@dataclass
class BuiltInOptimizerConfig(OptimizerConfig):
    """The keys of every optimizer but a class of your own."""

    lr: float = key(0.05, "learning rate after warm-up", above=0)
    weight_decay: float = key(0.0, "weight decay, as torch's optimizer defines it", at_least=0)
    decay_norm_and_bias: bool = key(
        True, "weight decay for norms and biases (parameters of at most one dimension) too"
    )
    lr_scaling: str = key(
        "none",
        "multiply lr by train.global_batch_size / lr_base_batch (linear), or by its root (sqrt)",
        choices=("none", "linear", "sqrt"),
    )
    lr_base_batch: int = key(
        256, "global batch size that lr is meant for, with lr_scaling", at_least=1
    )

    def problems(self, run: RequestedRun) -> Iterator[Problem]:
        if run.config.tuning.optimizer == "fused" and not self.has_fused:
            yield Problem(
                "tuning.optimizer=fused",
                f"torch has no fused {self.name}",
                "use tuning.optimizer=foreach",
            )
        has_default = self.lr_base_batch == type(self)().lr_base_batch
        if self.lr_scaling == "none" and not has_default:
            yield Problem(
                f"optimizer.lr_base_batch={self.lr_base_batch}",
                "has an effect only with optimizer.lr_scaling",
                "add optimizer.lr_scaling=linear, or leave optimizer.lr_base_batch out",
            )
        if self.lr_scaling != "none" and has_default and run.config.data.batch_by == "tokens":
            yield Problem(
                f"optimizer.lr_scaling={self.lr_scaling}",
                "with data.batch_by=tokens optimizer.lr_base_batch must be given, in tokens",
                "add optimizer.lr_base_batch=TOKENS, the global batch for which optimizer.lr was"
                " chosen",
            )
        yield from super().problems(run)

    def notices(self, run: RequestedRun) -> Iterator[str]:
        if not (self.decay_norm_and_bias or self.weight_decay or self.adapts_per_layer):
            yield "optimizer.decay_norm_and_bias=false has no effect: optimizer.weight_decay=0.0"


@dataclass
class SgdConfig(BuiltInOptimizerConfig):
    name: str = "sgd"
    implementation: ClassVar[str] = "torch.optim:SGD"
    has_fused: ClassVar[bool] = True
    can_be_captured: ClassVar[bool] = True
    momentum: float = key(0.9, "momentum", at_least=0, below=1)
    nesterov: bool = key(False, "Nesterov momentum")

    def problems(self, run: RequestedRun) -> Iterator[Problem]:
        yield from super().problems(run)
        if self.nesterov and not self.momentum:
            yield Problem("optimizer.nesterov=true", "needs momentum", "add optimizer.momentum=0.9")


@dataclass
class AdamConfig(BuiltInOptimizerConfig):
    name: str = "adam"
    implementation: ClassVar[str] = "torch.optim:Adam"
    has_fused: ClassVar[bool] = True
    can_be_captured: ClassVar[bool] = True
    lr: float = key(1e-3, "learning rate after warm-up", above=0)
    beta1: float = key(0.9, "decay of the first moment", at_least=0, below=1)
    beta2: float = key(0.999, "decay of the second moment", at_least=0, below=1)
    eps: float = key(1e-8, "added to the denominator", above=0)


@dataclass
class AdamWConfig(AdamConfig):
    name: str = "adamw"
    implementation: ClassVar[str] = "torch.optim:AdamW"
    weight_decay: float = key(0.01, "weight decay, decoupled from the gradient", at_least=0)


@dataclass
class AdadeltaConfig(BuiltInOptimizerConfig):
    name: str = "adadelta"
    implementation: ClassVar[str] = "torch.optim:Adadelta"
    lr: float = key(1.0, "learning rate after warm-up", above=0)
    rho: float = key(0.9, "decay of the averages", at_least=0, below=1)
    eps: float = key(1e-6, "added to the denominator", above=0)


@dataclass
class RmspropConfig(BuiltInOptimizerConfig):
    name: str = "rmsprop"
    implementation: ClassVar[str] = "torch.optim:RMSprop"
    lr: float = key(1e-3, "learning rate after warm-up", above=0)
    alpha: float = key(0.99, "decay of the average of squared gradients", at_least=0, below=1)
    momentum: float = key(0.0, "momentum", at_least=0, below=1)
    eps: float = key(1e-8, "added to the denominator", above=0)
