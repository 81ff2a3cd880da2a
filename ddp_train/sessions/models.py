"""The models of a session: those that `run.wrap` got."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_train.sessions.parameter_groups import shared_parameters
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.wrapped import Wrapped

DDP_OPTIONS = frozenset(signature(DistributedDataParallel.__init__).parameters) - {
    "self",
    "module",
    "device_ids",
    "output_device",
    "broadcast_buffers",
    "forward_sync_buffers",
    "process_group",
    "device_mesh",
}
"""Options of torch's DDP that a session leaves to its user."""


class Models:
    """The wrapped models of one process, in the order of their `wrap`."""

    def __init__(self, device: str, processes: int) -> None:
        self.device = device
        self.processes = processes
        self.wrapped: list[Wrapped] = []
        self.has_own_batch_norm = False
        """True if the user chose, for a model, batch norm over the samples of each process."""
        self.backward_pass = -1
        """The number of the last backward pass of a loss of run.mean; torch counts from 0."""
        self.registrations = 0
        """How often a module anywhere has got another module, a parameter or a buffer."""
        self._handles: list[Any] = []

    def __iter__(self) -> Iterator[Wrapped]:
        return iter(self.wrapped)

    def add(self, model: nn.Module, sync_batch_norm: bool, options: dict[str, Any]) -> Wrapped:
        """See Run.wrap. Raises UsageError if it has parameters of an earlier one."""
        unknown = set(options) - DDP_OPTIONS
        if unknown:
            raise UsageError(
                f"run.wrap: {sorted(unknown)[0]} is not an option of torch's"
                " DistributedDataParallel",
                f"use one of {', '.join(sorted(DDP_OPTIONS))}",
            )
        for earlier in self.wrapped:
            if shared_parameters(earlier.parameters(), model.parameters()):
                raise UsageError(
                    "run.wrap got the same parameters twice, but each parameter may be in one"
                    " wrapped model only",
                    "wrap a part that two models share separately: encoder = run.wrap(encoder),"
                    " head = run.wrap(head), and call head(encoder(x)). Or put the models into"
                    " one nn.Module, and wrap that",
                )
        if not self._handles:
            self._handles = [
                register_module_module_registration_hook(self._see_registration),
                register_module_parameter_registration_hook(self._see_registration),
                register_module_buffer_registration_hook(self._count_registration),
            ]
        wrapped = Wrapped(model, self.device, self.processes, sync_batch_norm, options)
        self.wrapped.append(wrapped)
        if not sync_batch_norm:
            self.has_own_batch_norm = True
        return wrapped

    def release(self) -> None:
        """Let go of all DDPs and hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for model in self.wrapped:
            model.release()

    def trained_by(self, optimizer: Optimizer) -> list[Wrapped]:
        """The models whose parameters an optimizer updates."""
        return [model for model in self.wrapped if model.is_trained_by(optimizer)]

    def see_backward(self) -> bool:
        """Called when a loss of run.mean goes backward; several may in one backward pass.

        Returns True for the first one of a pass that exchanges gradients.
        """
        number = torch._C._current_graph_task_id()
        if number == self.backward_pass:
            return False
        self.backward_pass = number
        Variable._execution_engine.queue_callback(self._see_end)
        for model in self.wrapped:
            model.gradient_exchange.begin_backward(number)
        return any(model.gradient_exchange.is_in_exchange() for model in self.wrapped)

    def are_in_autograd_grad(self) -> bool:
        """True if this backward pass is that of `torch.autograd.grad`, of their parameters."""
        return any(model.gradient_exchange.is_in_autograd_grad() for model in self.wrapped)

    def are_reached(self) -> bool:
        """True if this backward pass, which has begun, adds gradients to some of them."""
        return any(model.gradient_exchange.is_reached() for model in self.wrapped)

    def _see_end(self) -> None:
        """Called when a backward pass has ended, before DDP's buckets are copied back."""
        for model in self.wrapped:
            model.gradient_exchange.end_backward()

    def _see_registration(self, *_: object) -> None:
        """Called when a module anywhere gets another module or a parameter."""
        self._count_registration()
        for model in self.wrapped:
            model.gradient_exchange.is_stale = True

    def _count_registration(self, *_: object) -> None:
        self.registrations += 1


def as_one(named: Mapping[str, Wrapped]) -> nn.Module:
    """The module whose state_dict a checkpoint has: the model itself, or several by their names."""
    modules = {name: model.module for name, model in named.items()}
    if len(modules) == 1:
        return next(iter(modules.values()))
    return nn.ModuleDict(modules)
