"""The user's model while a session lasts."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import update_bn

from ddp_train.distributed.training_step import BATCH_NORM, CURRENT
from ddp_train.parallel.naming_ddp import ddp_arguments
from ddp_train.parallel.sync_batch_norm import TOGETHER, synchronised_on
from ddp_train.sessions.gradient_exchange import GradientExchange
from ddp_train.sessions.parameter_groups import parameters_of, shared_parameters
from ddp_train.sessions.settings import UsageError

OWN_ATTRIBUTES = frozenset({*vars(nn.Module()), "_compiled_call_impl", "_exchange", "module"})
"""Attributes of the wrapper itself: those of every torch module, and its own."""

UPDATE_BN = inspect.unwrap(update_bn).__code__
WAY_OF_UPDATE_BN = (
    "use run.update_bn(loader, swa_model), with loader = run.loader(data, global_batch_size=64)"
)
MOST_FRAMES = 40
"""Calls between torch's `update_bn` and a layer of its model, or a loader, and some more."""


class Wrapped(nn.Module):
    """The model, called, trained and evaluated like any other: DDP where gradients are taken.

    What it lacks of attributes is that model's, and `state_dict` has the model's own names. Without
    gradients (`torch.no_grad`) no process waits for another: an evaluation may have another number
    of batches on each. When the session is over it is the model alone.
    """

    _exchange: GradientExchange | None
    """None after the session."""

    def __init__(
        self,
        module: nn.Module,
        device: str,
        processes: int,
        sync_batch_norm: bool,
        options: dict[str, Any],
    ) -> None:
        """options: of torch's DistributedDataParallel, by torch's names."""
        super().__init__()
        module = compiled_in_place(module)
        if processes > 1 and sync_batch_norm:
            module = synchronised_on(device, module)
            for layer in module.modules():
                has_hook = _before_batch_norm in layer._forward_pre_hooks.values()
                if isinstance(layer, TOGETHER) and not has_hook:
                    layer.register_forward_pre_hook(_before_batch_norm)
        self.module = module.to(device)
        arguments = None
        if processes > 1:
            arguments = ddp_arguments(device, broadcast_buffers=False, **options)
        self._exchange = GradientExchange(self.module, arguments)

    @property
    def gradient_exchange(self) -> GradientExchange:
        """The exchange of this model's gradients, while the session lasts."""
        assert self._exchange
        return self._exchange

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """The function that a call of the wrapper leads to: on one process the model.

        torch.compile takes a method of torch's own as a part of its caller. With a method of ours,
        which it compiled by itself, a step of BERT-base took 3 to 6 ms of 30 longer (H200, torch
        2.11).
        """
        if self._exchange is None or self._exchange.options is None:
            return self.module.__call__
        return self._forward_over_processes

    def _forward_over_processes(self, *inputs: Any, **keywords: Any) -> Any:
        exchange = self._exchange
        if exchange is None:  # after the session, where torch.compile was given this method
            return self.module(*inputs, **keywords)
        if exchange.is_ready():
            outputs = exchange.forward(inputs, keywords)
        else:
            outputs = self.module(*inputs, **keywords)
        exchange.keep_outputs(outputs)
        return outputs

    def is_trained_by(self, optimizer: Optimizer) -> bool:
        """True if an optimizer updates a parameter of this model."""
        return bool(shared_parameters(self.parameters(), parameters_of(optimizer)))

    def release(self) -> None:
        """Let go of DDP, which must not outlive the process group."""
        if self._exchange is not None:
            self._exchange.release()
        self._exchange = None

    def _apply(self, *arguments: Any, **keywords: Any) -> Any:
        """Convert the model, as `half()` and `cpu()` do. torch forgets DDP's hooks then."""
        if self._exchange is not None:
            self._exchange.kind = None
        return super()._apply(*arguments, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies (`copy.deepcopy`, as averages of weights make them) and pickles are of the model.

        They take no gradients over processes, and nothing of the session goes with them.
        """
        return _itself, (self.module,)

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        """Set the mode, as torch does, or call the model's own method of this name."""
        if _is_mode(arguments, keywords):
            return super().train(*arguments, **keywords)
        return self.module.train(*arguments, **keywords)

    def eval(self, *arguments: Any, **keywords: Any) -> Any:
        """Set the mode, as torch does, or call the model's own method of this name."""
        if arguments or keywords:
            evaluate: Any = self.module.eval
            return evaluate(*arguments, **keywords)
        return super().eval()

    # What is registered is the model's, whose state_dict is saved.

    def register_buffer(self, *arguments: Any, **keywords: Any) -> None:
        self.module.register_buffer(*arguments, **keywords)

    def register_parameter(self, *arguments: Any, **keywords: Any) -> None:
        self.module.register_parameter(*arguments, **keywords)

    def add_module(self, *arguments: Any, **keywords: Any) -> None:
        self.module.add_module(*arguments, **keywords)

    def state_dict(self, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        return self.module.state_dict(*arguments, **keywords)

    def load_state_dict(self, state_dict: Any, *arguments: Any, **keywords: Any) -> Any:
        return self.module.load_state_dict(state_dict, *arguments, **keywords)

    def named_parameters(
        self, *arguments: Any, **keywords: Any
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*arguments, **keywords)

    def named_buffers(self, *arguments: Any, **keywords: Any) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        # `module` is not there yet while it is made.
        if name.startswith("__") or name in OWN_ATTRIBUTES:
            return super().__getattr__(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        """A part of a model that has numbered or named ones, as Sequential and ParameterList.

        By it Python also iterates over the numbered ones.
        """
        module: Any = self.module
        return module[key]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the user's model, which its forward reads."""
        if name in OWN_ATTRIBUTES:
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)


def _is_mode(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether these are arguments of torch's `Module.train`: at most a bool."""
    values = [*arguments, *keywords.values()]
    return len(values) < 2 and all(isinstance(value, bool) for value in values)


def compiled_in_place(module: nn.Module) -> nn.Module:
    """The module that torch.compile was given, which it calls compiled; others as they are.

    Its state_dict has the names of the module that is not compiled.
    """
    original = getattr(module, "_orig_mod", None)
    if not isinstance(original, nn.Module):
        return module
    compiled: Any = module
    original._compiled_call_impl = compiled.dynamo_ctx(original._call_impl)
    return original


def is_in_update_bn() -> bool:
    """True if torch's `update_bn` has called what calls this."""
    frame = sys._getframe(1)
    for _ in range(MOST_FRAMES):
        if frame is None:
            return False
        if frame.f_code is UPDATE_BN:
            return True
        frame = frame.f_back
    return False


def _itself(model: nn.Module) -> nn.Module:
    return model


def _before_batch_norm(layer: nn.Module, _: Any) -> None:
    """Raise UsageError for a layer that would wait for processes that have no more batches or do
    something else, or count each sample once for each process.

    Copies of a model have this hook too: averages of its weights.
    """
    if not layer.training:
        return
    if CURRENT.is_shared_out:
        raise UsageError(
            "batch norm in train mode got a batch of run.test_loader. Batch norm waits for a"
            " batch of each process, but some processes have fewer batches than others",
            "call model.eval() before the model is scored. If this is torch's update_bn,"
            f" {WAY_OF_UPDATE_BN}",
        )
    if CURRENT.step is None and is_in_update_bn():
        raise UsageError(
            "update_bn got a model whose batch norm is computed over all processes, but a loader"
            " that gives each process its own batches",
            WAY_OF_UPDATE_BN,
        )
    # Not in a compiled graph, which a write to shared memory would break.
    if CURRENT.see_exchange and not torch.compiler.is_compiling():
        CURRENT.see_exchange(BATCH_NORM)
