"""Which network, and what is true of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddp_train.config.key import key


class ModelFacts:
    """What every model answers; the defaults are those of a model that nothing is known about."""

    takes_images: ClassVar[bool | None] = None
    """Whether it has convolutions over images; None: unknown."""
    takes_tokens: ClassVar[bool | None] = None
    """Whether its inputs are numbers of tokens; None: unknown."""
    smallest_side: ClassVar[int] = 1
    """Of its images, in pixels."""
    channels_taken: ClassVar[tuple[int, ...]] = ()
    """Numbers of channels of its images; (): any."""
    fused = False

    def is_launch_bound(self, units: float) -> bool:
        """Whether a GPU runs its kernels faster than a host launches them. units: samples, or
        tokens, of a process in a step."""
        return False

    def worth_compiling(self) -> bool:
        """Whether torch.compile saves more in a long run than it costs at the start."""
        return False

    def has_batch_norm(self) -> bool | None:
        """None: unknown."""
        return None


@dataclass
class FineTuning:
    """Keys of every model, a class of your own included: where it begins, and what of it trains.
    docs/finetuning.md"""

    init_from: str | None = key(
        None,
        "begin with the weights of a file (.safetensors, .pt), a run or a checkpoint; strict",
        is_path=True,
    )
    init_ignore: list[str] = key(
        [], "globs over names that init_from leaves alone, [head.*]: in the model and the file"
    )
    freeze: list[str] = key(
        [], "globs over names of parameters that do not train, [layer1.*]; batch norms there rest"
    )
    freeze_epochs: int | None = key(
        None,
        "epochs for which `freeze` holds; then these parameters train too; null: to the end",
        at_least=1,
    )


@dataclass
class ModelConfig(FineTuning, ModelFacts):
    name: str = "cnn"
    takes_tokens: ClassVar[bool | None] = False


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


_LAUNCH_BOUND_BLOCKS = 10**6
"""Layers times width squared: a block has twelve times its width squared parameters. GPT-2's
smallest has 7 million."""
_LAUNCH_BOUND_OPERATIONS = 10**12
"""Of a step, six for each parameter of a block and token. 6 x 384 with 65,536 tokens has 4.2e12,
takes 65 ms on an H200 if it is only captured, and 37 if it is compiled: docs/log.md, 2026-11-23."""


@dataclass
class GptConfig(ModelConfig):
    """GPT-2: a decoder-only transformer. Its context is data.length, its vocabulary that of the
    data."""

    name: str = "gpt"
    takes_images: ClassVar[bool | None] = False
    takes_tokens: ClassVar[bool | None] = True
    layers: int = key(4, "number of blocks", at_least=1)
    heads: int = key(4, "attention heads of a block; they divide the width", at_least=1)
    width: int = key(128, "features of a token", at_least=1)
    dropout: float = key(0.0, "dropout of embeddings, attention and residuals", at_least=0, below=1)
    vocabulary_multiple: int = key(
        64,
        "round the vocabulary up to a multiple, for faster matrix products: 50,257 to 50,304",
        at_least=1,
    )

    def is_launch_bound(self, units: float) -> bool:
        blocks = self.layers * self.width**2
        return blocks < _LAUNCH_BOUND_BLOCKS and 6 * 12 * blocks * units < _LAUNCH_BOUND_OPERATIONS

    def worth_compiling(self) -> bool:
        return True

    def has_batch_norm(self) -> bool:
        return False


MODELS = (CnnConfig, MlpConfig, LinearRegressionConfig, GeluMlpConfig, GptConfig, TorchvisionConfig)
