"""Parameters that must have a gradient, and the error that names those without one."""

from __future__ import annotations

import torch
from torch import nn

from ddp_train.errors import ModelError
from ddp_train.text import counted

NAMES_SHOWN = 5


class GradientCheck:
    """DDP's demand that each step uses all parameters, where one process has no DDP.

    DDP finds the error one step later. A backward pass that reaches a parameter may bring nothing,
    since a function may return None as its gradient: such a gradient becomes zero, as in DDP's
    buckets. Therefore hooks look, which take a microsecond each.
    """

    def __init__(self, module: nn.Module) -> None:
        """Raises ModelError for parameters of lazy layers."""
        self.trained = trained_parameters(module)
        self.reached: set[str] = set()
        """Parameters that the last backward pass has reached."""
        # The hooks know the set and not this object: they live as long as their parameters, and
        # must not keep them alive.
        self.handles = [
            parameter.register_post_accumulate_grad_hook(
                lambda _, add=self.reached.add, name=name: add(name)
            )
            for name, parameter in self.trained.items()
        ]

    def check(self) -> None:
        """Raise ModelError if the last backward pass of a step has missed a parameter."""
        if len(self.reached) < len(self.trained):
            raise missing_gradients([name for name in self.trained if name not in self.reached])
        for parameter in self.trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def release(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require a gradient, by name.

    Raises ModelError for those of lazy layers: each process would draw its own weights in its first
    forward pass.
    """
    trained = {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    lazy = [name for name, parameter in trained.items() if nn.parameter.is_lazy(parameter)]
    if lazy:
        names = ", ".join(name.removeprefix("model.") for name in lazy[:NAMES_SHOWN])
        raise ModelError(
            f"lazy layers have {counted(len(lazy), 'parameter')} without a shape yet: {names}",
            "give these layers their number of inputs, or call the model once after it is created",
        )
    return trained


def missing_gradients(parameters: list[str]) -> ModelError:
    """The error for parameters without a gradient.

    parameters: their names in ModelWithTask.
    """
    names = ", ".join(name.removeprefix("model.") for name in parameters[:NAMES_SHOWN])
    if len(parameters) > NAMES_SHOWN:
        names += f" and {len(parameters) - NAMES_SHOWN} more"
    return ModelError(
        f"the loss does not depend on {counted(len(parameters), 'parameter')}: {names}",
        "use these parameters in forward, remove or freeze them, or add"
        " strategy.find_unused_parameters=true",
    )
