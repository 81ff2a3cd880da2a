"""Random numbers of a model, fixed: dropout keeps all, noise is its mean. Then they do not depend
on a division."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

_DROPS = tuple(
    getattr(place, name)
    for place in (functional, torch)
    for name in (
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_alpha_dropout",
    )
    if hasattr(place, name)
)
_MEANS: dict[Any, Callable[..., Any]] = {
    torch.rand_like: lambda like, **more: torch.full_like(like, 0.5, **_without_layout(more)),
    torch.randn_like: lambda like, **more: torch.zeros_like(like, **_without_layout(more)),
    torch.rand: lambda *size, **more: torch.full(_size(size, more), 0.5, **_without_layout(more)),
    torch.randn: lambda *size, **more: torch.zeros(_size(size, more), **_without_layout(more)),
    torch.bernoulli: lambda chance, *_, **__: chance.clone(),
    Tensor.bernoulli: lambda chance, *_, **__: chance.clone(),
    Tensor.bernoulli_: lambda target, p=0.5, **_: (
        target.copy_(p) if isinstance(p, Tensor) else target.fill_(p)
    ),
    Tensor.uniform_: lambda target, low=0.0, high=1.0, **_: target.fill_((low + high) / 2),
    Tensor.normal_: lambda target, mean=0.0, *_, **__: target.fill_(mean),
}
"""What draws a number for each element: in its place, the mean. Others (multinomial, randperm) have
none."""


class FixedDraws(TorchFunctionMode):
    """Inside, dropout keeps every number and the functions of `_MEANS` draw nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.met: set[str] = set()
        """The functions that would have drawn."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPS:
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            training = kwargs.get(
                "training", kwargs.get("train", args[2] if len(args) > 2 else True)
            )
            self.met |= {"dropout"} if p and training else set()
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                self.met |= {"dropout"} if args[4] else set()
                args = (*args[:4], 0.0, *args[5:])
            elif kwargs.get("dropout_p"):
                self.met.add("dropout")
                kwargs = {**kwargs, "dropout_p": 0.0}
        if func in _MEANS and kwargs.get("generator") is None:
            self.met.add(getattr(func, "__name__", "random numbers"))
            return _MEANS[func](
                *args, **{name: value for name, value in kwargs.items() if name != "generator"}
            )
        return func(*args, **kwargs)


def _size(size: tuple[Any, ...], more: dict[str, Any]) -> Any:
    given = more.pop("size", size)
    if len(given) == 1 and not isinstance(given[0], int):
        return given[0]
    return given


def _without_layout(more: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in more.items() if name in ("dtype", "device", "requires_grad")
    }


@contextmanager
def fixed_draws(model: nn.Module) -> Iterator[FixedDraws]:
    """Inside, the model draws nothing that can be fixed. Dropout that torch's own layers do inside
    (recurrent ones, attention) is switched off in them."""
    mode = FixedDraws()
    before = []
    for layer in model.modules():
        names = ["p"] if isinstance(layer, _DropoutNd) else []
        names += ["dropout"] if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) else []
        for name in names:
            if p := getattr(layer, name):
                before.append((layer, name, p))
                setattr(layer, name, 0.0)
                mode.met.add("dropout")
    try:
        with mode:
            yield mode
    finally:
        for layer, name, p in before:
            setattr(layer, name, p)
