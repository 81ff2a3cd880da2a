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
        """Freeze the parameters.

        globs: over the names of parameters.

        Raises ConfigError if a glob matches no parameter, or if nothing is left to train.
        """
        parameters = dict(model.named_parameters())
        problems = unmatched("model.freeze=[{}]", globs, list(parameters))
        if problems:
            raise ConfigError(problems)
        names = {name for glob in globs for name in matching(glob, parameters)}
        self.parameters = {
            name: parameter
            for name, parameter in parameters.items()
            if name in names and parameter.requires_grad
        }
        for parameter in self.parameters.values():
            parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in parameters.values()):
            problem = (
                f"model.freeze={shown(list(globs))}: these globs match every parameter, so"
                " nothing is left to train; name fewer"
            )
            raise ConfigError([problem])
        self.at_rest = _layers_at_rest(model, globs)
        """Layers that compute as in evaluation."""

    def unfreeze(self) -> None:
        """Let the parameters train from here on."""
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        self.at_rest.clear()

    @property
    def lasts(self) -> bool:
        """True while the parameters are frozen."""
        return any(not parameter.requires_grad for parameter in self.parameters.values())


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """The numbers that a model consists of: `all`, and those that are `trained`."""
    parameters = list(model.parameters())
    return {
        "all": sum(parameter.numel() for parameter in parameters),
        "trained": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
    }


def _layers_at_rest(model: nn.Module, globs: Sequence[str]) -> list[nn.Module]:
    """Layers with statistics of their own, all of whose own parameters are frozen."""
    layers = []
    for path, layer in model.named_modules():
        statistics = _statistics(layer, path)
        if statistics and _is_frozen(layer, statistics, globs):
            layers.append(layer)
    return layers


def _statistics(layer: nn.Module, path: str) -> list[str]:
    """The names of a layer's own statistics: floating-point buffers that checkpoints have."""
    # Masks and the like, which the weights do not depend on.
    temporary = layer._non_persistent_buffers_set
    return [
        name
        for name, buffer in layer.named_buffers(path, recurse=False)
        if buffer.is_floating_point() and name.rpartition(".")[2] not in temporary
    ]


def _is_frozen(layer: nn.Module, statistics: list[str], globs: Sequence[str]) -> bool:
    """True if all own parameters of a layer are frozen.

    Without any, its statistics must have such names.
    """
    parameters = list(layer.parameters(recurse=False))
    if parameters:
        return not any(parameter.requires_grad for parameter in parameters)
    return all(any(matching(glob, [name]) for glob in globs) for name in statistics)
