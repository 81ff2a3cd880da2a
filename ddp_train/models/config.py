"""The networks of the zoo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddp_train.options.key import key
from ddp_train.options.model import ModelConfig


@dataclass
class CnnConfig(ModelConfig):
    """Two convolutions per scale, then one linear layer."""

    name: str = "cnn"
    takes_images: ClassVar[bool | None] = True
    smallest_side: ClassVar[int] = 2
    channels: int = key(
        32, "channels of the first scale; each further scale doubles them", at_least=1
    )
    norm: str = key(
        "group", "norm layer after each convolution", choices=("none", "batch", "group")
    )
    dropout: float = key(0.0, "dropout before the last layer", at_least=0, below=1)

    def is_launch_bound(self, units: float) -> bool:
        return True

    def has_batch_norm(self) -> bool:
        return self.norm == "batch"


@dataclass
class _DenseConfig(ModelConfig):
    """Linear layers only."""

    takes_images: ClassVar[bool | None] = False

    def is_launch_bound(self, units: float) -> bool:
        return True

    def has_batch_norm(self) -> bool:
        return False


@dataclass
class MlpConfig(_DenseConfig):
    """Linear layers with ReLU."""

    name: str = "mlp"
    hidden: int = key(128, "features of each hidden layer", at_least=1)
    layers: int = key(2, "number of hidden layers", at_least=1)
    dropout: float = key(0.0, "dropout after each hidden layer", at_least=0, below=1)


@dataclass
class LinearRegressionConfig(_DenseConfig):
    """One linear layer."""

    name: str = "linear_regression"


@dataclass
class GeluMlpConfig(_DenseConfig):
    """Linear layers with the hand-written GELU of the PyTorch tuning guide, a chain of pointwise
    operations."""

    name: str = "gelu_mlp"
    hidden: int = key(1024, "features of each hidden layer", at_least=1)
    layers: int = key(2, "number of hidden layers", at_least=1)
    fused: bool = key(False, "fuse the pointwise operations with torch.compile")


@dataclass
class TorchvisionConfig(ModelConfig):
    """Any classifier of torchvision, from scratch or with its weights."""

    name: str = "torchvision"
    takes_images: ClassVar[bool | None] = True
    channels_taken: ClassVar[tuple[int, ...]] = (1, 3)
    arch: str = key("resnet18", "name of the classifier in torchvision.models")
    weights: str | None = key(
        None,
        "begin with torchvision's weights for it, DEFAULT or a name like IMAGENET1K_V1; downloaded"
        " once per host",
    )

    def worth_compiling(self) -> bool:
        return True
