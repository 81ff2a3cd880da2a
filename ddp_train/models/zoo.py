"""The networks that `model=NAME` has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.models.gpt.network import Gpt
from ddp_train.models.networks import (
    build_cnn,
    build_gelu_mlp,
    build_linear_regression,
    build_mlp,
)
from ddp_train.models.torchvision_networks import build_torchvision


def build_model(name: str, input_shape: Sequence[int], outputs: int, **arguments: Any) -> nn.Module:
    """A built-in network that fits a data set.

    input_shape: of one sample.
    outputs: classes, or the numbers of a regression.
    arguments: the keys of `model=NAME`.

    Raises ConfigError if a network cannot take such inputs.
    """
    return _BUILDERS[name](tuple(input_shape), outputs, **arguments)


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """The numbers that a model consists of: `all`, and those that are `trained`."""
    parameters = list(model.parameters())
    return {
        "all": sum(parameter.numel() for parameter in parameters),
        "trained": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
    }


def _build_gpt(shape: tuple[int, ...], outputs: int, **arguments: Any) -> nn.Module:
    """A Gpt whose context is the length of a sample, and whose vocabulary is that of the data."""
    if len(shape) != 1:
        problem = f"model=gpt: takes tokens, [n, t], and an input has the shape {['n', *shape]}"
        raise ConfigError([problem])
    return Gpt(outputs, shape[0], **arguments)


_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "cnn": build_cnn,
    "mlp": build_mlp,
    "linear_regression": build_linear_regression,
    "gelu_mlp": build_gelu_mlp,
    "gpt": _build_gpt,
    "torchvision": build_torchvision,
}
"""For each built-in network a function of the shape of a sample, the outputs, and the keys of
`model=NAME`."""
