"""The objects that `run.resume` got: the models of `run.wrap`, and what else a session saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ddp_train.plain_state import PLAIN_DATA, problem_of_extra_state, problem_of_state
from ddp_train.sessions.models import Models
from ddp_train.sessions.parameter_groups import parameters_of, shared_parameters
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.wrapped import Wrapped

SET_BY_SCHEDULERS = ("step", "_opt_called", "_step_count")
"""Attributes that torch's schedulers set on an optimizer."""


class Stateful(Protocol):
    """An object that a session saves: an optimizer, a scheduler, one of the user's own."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def check_objects(
    objects: dict[str, Any], models: Models
) -> tuple[dict[str, Wrapped], dict[str, Stateful]]:
    """The models, which must all be among the objects, and the objects beside them.

    Raises UsageError for what cannot be saved.
    """
    if not models.wrapped:
        raise UsageError(
            "run.resume: there is no model yet", "call model = run.wrap(model) before run.resume"
        )
    named: dict[str, Wrapped] = {}
    others: dict[str, Any] = {}
    for name, value in objects.items():
        model = _wrapped_of(value, models)
        if model is None:
            others[name] = value
        elif model not in named.values():
            named[name] = model
    missing = [model for model in models if model not in named.values()]
    if missing:
        what = "the model of run.wrap"
        if len(models.wrapped) > 1:
            what = f"a model of run.wrap ({type(missing[0].module).__name__})"
        raise UsageError(
            f"run.resume: {what} is not among its arguments, and would not be saved",
            "use run.resume(model=model, optimizer=optimizer), with every model of run.wrap",
        )
    for model in models:
        problem = problem_of_extra_state(model.module)
        if problem:
            raise UsageError(f"run.resume: {problem}", PLAIN_DATA)
    for name, value in others.items():
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise UsageError(
                f"run.resume: {name} is a {type(value).__name__}, without state_dict and"
                " load_state_dict",
                "pass objects that have both, such as models, optimizers and schedulers",
            )
        if isinstance(value, Optimizer):
            _check_optimizer(name, value, models)
        _check_plain(name, value)
    return named, others


def _wrapped_of(value: Any, models: Models) -> Wrapped | None:
    """The wrapped model that an argument of run.resume stands for; None if it is none."""
    compiled = getattr(value, "_orig_mod", value)  # of torch.compile
    for model in models:
        if any(known in (value, compiled) for known in (model, model.module)):
            return model
    return None


def _check_optimizer(name: str, optimizer: Optimizer, models: Models) -> None:
    """Raise UsageError for parameters whose gradients nobody would exchange."""
    known = [parameter for model in models for parameter in model.parameters()]
    if not shared_parameters(known, parameters_of(optimizer)):
        raise UsageError(
            f"run.resume: {name} was built with parameters that are not in the model of run.wrap",
            f"build {name} after model = run.wrap(model), with model.parameters()",
        )
    ours = {id(parameter) for parameter in known}
    for parameter in parameters_of(optimizer):
        if id(parameter) not in ours and parameter.requires_grad:
            raise UsageError(
                f"run.resume: {name} has a parameter of shape {list(parameter.shape)} that is in"
                " no model of run.wrap, so each process would train a different copy of it",
                "call run.wrap for the module of that parameter too (a head, a loss with"
                " weights), or make it a parameter of the model",
            )


def _check_plain(name: str, holder: Stateful) -> None:
    """Raise UsageError if no checkpoint could be read with the state of an object."""
    problem = problem_of_state(holder.state_dict())
    if problem:
        raise UsageError(
            f"run.resume: the state_dict of {name} is not plain data: {problem}", PLAIN_DATA
        )


def copies_on(device: str, objects: Mapping[str, Any]) -> dict[str, nn.Module]:
    """The modules among the objects whose buffers are on this process's device, by their names:
    averages, teachers, losses with buffers."""
    place = torch.device(device)
    return {
        name: item
        for name, item in objects.items()
        if isinstance(item, nn.Module) and all(buffer.device == place for buffer in item.buffers())
    }


def beside_states(objects: Mapping[str, Stateful]) -> dict[str, Any]:
    """Attributes of optimizers of the user's own that no state_dict has, by their names in code."""
    found: dict[str, Any] = {}
    for name, holder in objects.items():
        if not isinstance(holder, Optimizer) or not has_torchs_state(holder):
            continue
        of_torch = {*vars(Optimizer([torch.zeros(1)], {})), *SET_BY_SCHEDULERS}
        for attribute, value in vars(holder).items():
            if attribute not in of_torch:
                found[f"{name}.{attribute}"] = value
    return found


def has_torchs_state(optimizer: Optimizer) -> bool:
    """Whether its state_dict has nothing but `state` and `param_groups`."""
    return type(optimizer).state_dict is Optimizer.state_dict
