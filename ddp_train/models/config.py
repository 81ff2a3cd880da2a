"""The options model=cnn, mlp, linear_regression and gelu_mlp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddp_train.options.key import key
from ddp_train.options.schema import ModelConfig


@dataclass
class CnnConfig(ModelConfig):
    """Two convolutions per scale, then one linear layer."""

    name: str = "cnn"
    implementation: ClassVar[str] = "ddp_train.models.networks:build_cnn"
    takes_tokens: ClassVar[bool | None] = False
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

    takes_tokens: ClassVar[bool | None] = False
    takes_images: ClassVar[bool | None] = False

    def is_launch_bound(self, units: float) -> bool:
        return True

    def has_batch_norm(self) -> bool:
        return False


@dataclass
class MlpConfig(_DenseConfig):
    """Linear layers with ReLU."""

    name: str = "mlp"
    implementation: ClassVar[str] = "ddp_train.models.networks:build_mlp"
    hidden: int = key(128, "features of each hidden layer", at_least=1)
    layers: int = key(2, "number of hidden layers", at_least=1)
    dropout: float = key(0.0, "dropout after each hidden layer", at_least=0, below=1)


@dataclass
class LinearRegressionConfig(_DenseConfig):
    """One linear layer."""

    name: str = "linear_regression"
    implementation: ClassVar[str] = "ddp_train.models.networks:build_linear_regression"


@dataclass
class GeluMlpConfig(_DenseConfig):
    """Linear layers with the hand-written GELU of the PyTorch tuning guide, a chain of pointwise
    operations."""

    name: str = "gelu_mlp"
    implementation: ClassVar[str] = "ddp_train.models.networks:build_gelu_mlp"
    hidden: int = key(1024, "features of each hidden layer", at_least=1)
    layers: int = key(2, "number of hidden layers", at_least=1)
    fused: bool = key(False, "fuse the pointwise operations with torch.compile")
