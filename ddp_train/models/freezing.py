"""Parameters that do not train, for some epochs or to the end."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ddp_train.errors import ConfigError
from ddp_train.text import matching, shown, unmatched


class Frozen:
    """The parameters of a model that `model.freeze` names, and the layers that must rest with them.

    Such a parameter wants no gradient: DDP has no bucket for it, clipping and the gradient norm do
    not see it, and an optimizer leaves it alone. A layer that keeps statistics (batch norm) rests
    when all its own parameters are frozen: in training it computes as in evaluation, and its
    statistics stay as they are. Statistics that change under frozen weights would be those of other
    data than the weights were made for.
    """

    def __init__(self, model: nn.Module, globs: Sequence[str]) -> None:
        """Freezes them. Raises ConfigError if a glob matches no parameter, or if nothing is left to
        train."""
        named = dict(model.named_parameters())
        if problems := unmatched("model.freeze=[{}]", globs, list(named)):
            raise ConfigError(problems)
        matched = {name for glob in globs for name in matching(glob, named)}
        self.parameters = {
            name: named[name] for name in named if name in matched and named[name].requires_grad
        }
        for parameter in self.parameters.values():
            parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in named.values()):
            raise ConfigError(
                [f"model.freeze={shown(list(globs))}: nothing is left to train; freeze less"]
            )
        self.at_rest = [
            layer
            for path, layer in model.named_modules()
            if (statistics := _statistics(layer, path)) and _is_frozen(layer, statistics, globs)
        ]

    def unfreeze(self) -> None:
        """From here on they train."""
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        self.at_rest.clear()

    @property
    def lasts(self) -> bool:
        """Whether they are still frozen."""
        return any(not parameter.requires_grad for parameter in self.parameters.values())


def _statistics(layer: nn.Module, path: str) -> list[str]:
    """The names of a layer's own statistics: buffers of floating-point numbers that checkpoints
    have."""
    temporary = (
        layer._non_persistent_buffers_set
    )  # masks and the like, which the weights do not depend on
    own = layer.named_buffers(f"{path}" if path else "", recurse=False)
    return [
        name
        for name, one in own
        if one.is_floating_point() and name.rpartition(".")[2] not in temporary
    ]


def _is_frozen(layer: nn.Module, statistics: list[str], globs: Sequence[str]) -> bool:
    """Whether all own parameters of a layer are frozen; of one without any, whether its statistics
    have such names."""
    own = list(layer.parameters(recurse=False))
    if own:
        return not any(parameter.requires_grad for parameter in own)
    return all(any(matching(glob, [name]) for glob in globs) for name in statistics)
