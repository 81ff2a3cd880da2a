"""The tasks for classes and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddp_train.options.key import key
from ddp_train.options.schema import TaskConfig

_CLASS_WEIGHTS = (
    "a factor for the loss of each class; the mean loss is still over the number of {unit}s"
)


@dataclass
class AutoTaskConfig(TaskConfig):
    """Classification for class labels, regression for numbers; other targets are refused with the
    candidates."""

    name: str = "auto"


@dataclass
class ClassificationConfig(TaskConfig):
    """Class labels, or a part of each class (soft labels)."""

    metrics: ClassVar[dict[str, str]] = {"loss": "min", "accuracy": "max", "top5": "max"}
    name: str = "classification"
    implementation: ClassVar[str] = "ddp_train.tasks.builtin:Classification"
    loss: str = key("cross_entropy", "loss of a sample", choices=("cross_entropy",))
    label_smoothing: float = key(0.0, "label smoothing of the cross entropy", at_least=0, below=1)
    class_weights: list[float] | None = key(None, _CLASS_WEIGHTS.format(unit="sample"), at_least=0)


@dataclass
class MultilabelConfig(TaskConfig):
    """Any number of labels per sample, each 0 or 1."""

    metrics: ClassVar[dict[str, str]] = {"loss": "min", "f1_macro": "max", "exact_match": "max"}
    name: str = "multilabel"
    implementation: ClassVar[str] = "ddp_train.tasks.builtin:Multilabel"
    loss: str = key("bce", "loss of a sample, the mean over its labels", choices=("bce",))
    pos_weight: list[float] | None = key(
        None,
        "for each label, a factor for the loss of samples to which the label applies",
        at_least=0,
    )


@dataclass
class RegressionConfig(TaskConfig):
    """One number per sample, or several."""

    metrics: ClassVar[dict[str, str]] = {"loss": "min", "mae": "min", "mse": "min", "rmse": "min"}
    name: str = "regression"
    implementation: ClassVar[str] = "ddp_train.tasks.builtin:Regression"
    loss: str = key(
        "mse",
        "loss of a sample, the mean over its numbers",
        choices=("mse", "mae", "huber", "smooth_l1"),
    )


@dataclass
class SegmentationConfig(TaskConfig):
    """A class for each pixel."""

    metrics: ClassVar[dict[str, str]] = {"loss": "min", "pixel_accuracy": "max", "mean_iou": "max"}
    name: str = "segmentation"
    implementation: ClassVar[str] = "ddp_train.tasks.builtin:Segmentation"
    loss: str = key("cross_entropy", "loss of a pixel", choices=("cross_entropy",))
    ignore_index: int = key(-100, "pixels of this class are left out of the loss and the metrics")
    class_weights: list[float] | None = key(
        None, _CLASS_WEIGHTS.format(unit="valid pixel"), at_least=0
    )
