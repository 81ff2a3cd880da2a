"""Random numbers of a model, fixed: dropout keeps all, noise is its mean.

Then they do not depend on how a batch is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

DROPOUT = "dropout"
_DROPOUT_NAMES = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)
_DROPOUT_FUNCTIONS = tuple(
    getattr(module, name)
    for module in (functional, torch)
    for name in _DROPOUT_NAMES
    if hasattr(module, name)
)
ATTENTION_DROPOUT = 4
"""Place of dropout_p among the arguments of scaled_dot_product_attention."""


class FixedDraws(TorchFunctionMode):
    """Inside, dropout keeps every number and the functions of MEANS draw nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.met: set[str] = set()
        """The functions that would have drawn."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUT_FUNCTIONS:
            return self._without_dropout(args, kwargs)
        if func is functional.scaled_dot_product_attention:
            args = self._attention_arguments(args, kwargs)
        elif func in MEANS and kwargs.get("generator") is None:
            kwargs.pop("generator", None)
            self.met.add(getattr(func, "__name__", "random numbers"))
            return MEANS[func](*args, **kwargs)
        return func(*args, **kwargs)

    def _without_dropout(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The input, untouched. args and kwargs: input, p, training (or train)."""
        arguments = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        probability = arguments.get("p", 0.5)
        is_training = arguments.get("training", arguments.get("train", True))
        if probability and is_training:
            self.met.add(DROPOUT)
        return arguments["input"]

    def _attention_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """The arguments without dropout; changes kwargs."""
        if len(args) > ATTENTION_DROPOUT:
            probability = args[ATTENTION_DROPOUT]
            args = (*args[:ATTENTION_DROPOUT], 0.0, *args[ATTENTION_DROPOUT + 1 :])
        else:
            probability = kwargs.pop("dropout_p", 0.0)
        if probability:
            self.met.add(DROPOUT)
        return args


# --- means in place of draws ----------------------------------------------------------------------


def _filled(value: float) -> Callable[..., Tensor]:
    """A function like torch.rand that returns a tensor full of a value."""

    def full(*size: Any, **options: Any) -> Tensor:
        shape = options.pop("size", size)
        if len(shape) == 1 and not isinstance(shape[0], int):
            shape = shape[0]
        return torch.full(shape, value, **_plain_options(options))

    return full


def _filled_like(value: float) -> Callable[..., Tensor]:
    """A function like torch.rand_like that returns a tensor full of a value."""

    def full_like(like: Tensor, **options: Any) -> Tensor:
        return torch.full_like(like, value, **_plain_options(options))

    return full_like


def _plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a draw without the layout and the memory format."""
    kept = ("dtype", "device", "requires_grad")
    return {name: value for name, value in options.items() if name in kept}


def _chances(chances: Tensor, *_: Any, **__: Any) -> Tensor:
    return chances.clone()


def _fill_with_chances(target: Tensor, p: Any = 0.5, **_: Any) -> Tensor:
    return target.copy_(p) if isinstance(p, Tensor) else target.fill_(p)


def _fill_with_middle(target: Tensor, low: float = 0.0, high: float = 1.0, **more: Any) -> Tensor:
    return target.fill_((low + high) / 2)


def _fill_with_mean(target: Tensor, mean: float = 0.0, *_: Any, **__: Any) -> Tensor:
    return target.fill_(mean)


MEANS: dict[Any, Callable[..., Any]] = {
    torch.rand_like: _filled_like(0.5),
    torch.randn_like: _filled_like(0.0),
    torch.rand: _filled(0.5),
    torch.randn: _filled(0.0),
    torch.bernoulli: _chances,
    Tensor.bernoulli: _chances,
    Tensor.bernoulli_: _fill_with_chances,
    Tensor.uniform_: _fill_with_middle,
    Tensor.normal_: _fill_with_mean,
}
"""Functions that draw a number for each element, and what gives the mean in their place.

Others (multinomial, randperm) have no mean.
"""


@contextmanager
def fixed_draws(model: nn.Module) -> Iterator[FixedDraws]:
    """Inside, the model draws nothing that can be fixed.

    Dropout that torch's own layers do inside (recurrent ones, attention) is switched off in them.
    """
    mode = FixedDraws()
    switched_off: list[tuple[nn.Module, str, float]] = []
    for layer in model.modules():
        name = _dropout_attribute(layer)
        probability = getattr(layer, name) if name else 0.0
        if probability:
            switched_off.append((layer, name, probability))
            setattr(layer, name, 0.0)
            mode.met.add(DROPOUT)
    try:
        with mode:
            yield mode
    finally:
        for layer, name, probability in switched_off:
            setattr(layer, name, probability)


def _dropout_attribute(layer: nn.Module) -> str:
    """Name of the attribute with the probability; empty for a layer without dropout."""
    if isinstance(layer, _DropoutNd):
        return "p"
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
        return "dropout"
    return ""
