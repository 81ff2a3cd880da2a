"""What every model answers, and where each begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddp_train.options.key import key


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
