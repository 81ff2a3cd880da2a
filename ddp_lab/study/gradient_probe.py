"""Records the gradients of a run's first step, as the optimizer gets them, and possible problems of
its model.

Used in a run of one step: micro-batches, strategy and precision are those of the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.hooks import RemovableHandle

from ddp_train.distributed.process_group import from_all_ranks
from ddp_train.distributed.world import World
from ddp_train.engine.hook_context import HookContext
from ddp_train.optim.stepper import StepObserver
from ddp_train.performance.bias_lint import biases_before_norm

FOLDER = "probe"
GRADIENTS = "gradients.safetensors"
FACTS = "model.json"


class GradientProbe:
    """Inside, the first optimizer step writes its gradients to RUN_DIR/probe, from rank 0.

    Switches dropout off: its random numbers depend on the process.
    """

    def __init__(self, job: HookContext, run_dir: Path, world: World) -> None:
        self.job = job
        self.folder = run_dir / FOLDER
        self.is_leader = world.is_leader
        self.model = job.module.model
        self.facts: dict[str, Any] = {
            "batch_norm": {},
            "bias_before_norm": [],
            "dropout": [],
            "unseen": [],
        }
        self.handles: list[RemovableHandle] = []

    def __enter__(self) -> GradientProbe:
        for name, layer in self.model.named_modules():
            if isinstance(layer, _DropoutNd) and layer.p:
                self.facts["dropout"].append(name)
                layer.p = 0.0
        if not self.model._compiled_call_impl and not self.job.module._compiled_call_impl:
            self.handles = [self.model.register_forward_pre_hook(self._look)]
        else:
            self.facts["unseen"].append("the layers of a compiled model")
        self.observer = _FirstUpdate(self.take)
        self.job.observe(self.observer)
        return self

    def __exit__(self, *_: object) -> None:
        self._forget()
        self.job.stop_observing(self.observer)

    def _look(self, model: nn.Module, given: tuple[Any, ...]) -> None:
        """Called before the first forward pass."""
        self._forget()  # removes its own hook: the lint runs a copy of the model with all hooks
        biases = biases_before_norm(model, given[0])
        if biases is None:
            self.facts["unseen"].append(
                "biases before norm layers: the model cannot run on the meta device"
            )
        self.facts["bias_before_norm"] = biases or []
        norms = [
            (name, layer) for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)
        ]
        self.handles = [
            layer.register_forward_pre_hook(self._received(name), with_kwargs=True)
            for name, layer in norms
        ]

    def _received(self, name: str):
        def note(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            samples = len(next(iter((*given, *named.values()))))
            self.facts["batch_norm"][name] = min(
                self.facts["batch_norm"].get(name, samples), samples
            )

        return note

    def _forget(self) -> None:
        for handle in self.handles:
            handle.remove()

    def take(self) -> None:
        """Before the optimizer step: the gradients are complete, exchanged and as the backward pass
        left them."""
        scale = self.job.stepper.scaler.get_scale() if self.job.stepper.scaled else 1.0
        if (
            self.job.stepper.divisor
        ):  # the number of tokens or pixels, by which the optimizer step divides
            units = self.job.stepper.divisor()
            self.job.stepper.divisor = lambda: units
            scale *= units
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        missing = [name for name, parameter in named.items() if parameter.grad is None]
        found = {name: p.grad.detach() / scale for name, p in named.items() if p.grad is not None}
        self.facts["unused"] = missing
        self.facts["ranks_differ"] = self._differing(found)
        if self.is_leader:
            self.folder.mkdir(exist_ok=True)
            save_file(
                {name: grad.cpu().contiguous() for name, grad in found.items()},
                self.folder / GRADIENTS,
            )
            (self.folder / FACTS).write_text(json.dumps(self.facts) + "\n")

    def _differing(self, found: dict[str, Tensor]) -> list[str]:
        """Parameters whose gradients are not bit for bit equal on all ranks. A collective: every
        rank must call it."""
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        device = named[0][1].device
        sums = [
            found[n].double().abs().sum() if n in found else torch.zeros((), device=device).double()
            for n, _ in named
        ]
        of_all = from_all_ranks(torch.stack(sums))
        return [
            name
            for (name, _), same in zip(named, (of_all == of_all[0]).all(0).tolist(), strict=True)
            if not same
        ]


class _FirstUpdate(StepObserver):
    """Calls a function before the first optimizer step."""

    def __init__(self, take: Callable[[], None]) -> None:
        self.take = take
        self.is_taken = False

    def before_update(self) -> None:
        if not self.is_taken:
            self.take()
            self.is_taken = True
