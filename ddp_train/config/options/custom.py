"""Classes of your own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ddp_train.config.key import key
from ddp_train.config.options.data import DataFacts, mixing_alpha, sample_weights, validation_part
from ddp_train.config.options.model import ModelFacts
from ddp_train.config.options.optimizer import OptimizerFacts


@dataclass
class CustomConfig(ModelFacts, DataFacts, OptimizerFacts):
    """Your own class or function: `_target_=package.Name`, and its arguments beside it."""

    name: str = "custom"
    target: str = key("", "dotted path of your own class or function (see SECURITY.md)", may_be_empty=True)
    arguments: dict[str, Any] = key({}, "its keyword arguments, plain values")
    metrics: ClassVar[dict[str, str]] = {}


@dataclass
class CustomDataConfig(CustomConfig):
    """Your own data set: `_target_=package.Name`, and its arguments beside it."""

    validation: float | None = validation_part()
    mixup: float = mixing_alpha("mixup, the weighted mean of")
    cutmix: float = mixing_alpha("CutMix, which exchanges a box between")
    weights: str | None = sample_weights()
    batch_by: str = key(
        "samples",
        "what train.global_batch_size counts; tokens: samples of about one length together, by the data's `lengths`",
        choices=("samples", "tokens"),
    )
