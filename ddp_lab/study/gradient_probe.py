"""Records the gradients of a run's first step, as the optimizer gets them, and possible problems of
its model.

Used in a run of one step: micro-batches, strategy and precision are those of the run.
"""

from __future__ import annotations

import json
from functools import partial
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


class GradientProbe(StepObserver):
    """Inside, the first optimizer step writes its gradients to RUN_DIR/probe, from rank 0.

    Switches dropout off: its random numbers depend on the process.
    """

    def __init__(self, job: HookContext, run_dir: Path, world: World) -> None:
        self.job = job
        self.folder = run_dir / FOLDER
        self.is_leader = world.is_leader
        self.model = job.module.model
        self.is_written = False
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
        if self.model._compiled_call_impl or self.job.module._compiled_call_impl:
            self.facts["unseen"].append("the layers of a compiled model")
        else:
            self.handles = [self.model.register_forward_pre_hook(self._before_first_forward)]
        self.job.observe(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._remove_hooks()
        self.job.stop_observing(self)

    def before_update(self) -> None:
        """Write the gradients of the first step: they are complete, exchanged and as the backward
        pass left them."""
        if self.is_written:
            return
        self.is_written = True
        scale = self._scale()
        gradients: dict[str, Tensor] = {}
        unused = []
        for name, parameter in self._trained():
            if parameter.grad is None:
                unused.append(name)
            else:
                gradients[name] = parameter.grad.detach() / scale
        self.facts["unused"] = unused
        self.facts["ranks_differ"] = self._differing(gradients)
        if self.is_leader:
            self.folder.mkdir(exist_ok=True)
            plain = {name: gradient.cpu().contiguous() for name, gradient in gradients.items()}
            save_file(plain, self.folder / GRADIENTS)
            (self.folder / FACTS).write_text(json.dumps(self.facts) + "\n")

    def _before_first_forward(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        self._remove_hooks()  # this one too: the lint runs a copy of the model with all hooks
        biases = biases_before_norm(model, args[0])
        if biases is None:
            self.facts["unseen"].append(
                "biases before norm layers: the model cannot run on the meta device"
            )
        self.facts["bias_before_norm"] = biases or []
        for name, layer in model.named_modules():
            if isinstance(layer, _BatchNorm):
                hook = partial(self._note_batch, name)
                self.handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))

    def _note_batch(
        self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Note the smallest batch of a layer of batch norm."""
        samples = len(next(iter((*args, *kwargs.values()))))
        smallest = self.facts["batch_norm"]
        smallest[name] = min(smallest.get(name, samples), samples)

    def _remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def _scale(self) -> float | Tensor:
        """The factor of the gradients before the optimizer step divides them."""
        stepper = self.job.stepper
        scale = stepper.scaler.get_scale() if stepper.scaled else 1.0
        if stepper.divisor:  # the number of tokens or pixels, which may be asked for once
            units = stepper.divisor()
            stepper.divisor = lambda: units
            scale *= units
        return scale

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        named = self.model.named_parameters()
        return [(name, parameter) for name, parameter in named if parameter.requires_grad]

    def _differing(self, gradients: dict[str, Tensor]) -> list[str]:
        """Parameters whose gradients are not bit for bit equal on all ranks. A collective: every
        rank must call it."""
        names = []
        sums = []
        for name, parameter in self._trained():
            names.append(name)
            if name in gradients:
                sums.append(gradients[name].double().abs().sum())
            else:
                sums.append(torch.zeros((), dtype=torch.float64, device=parameter.device))
        of_all = from_all_ranks(torch.stack(sums))
        are_equal = (of_all == of_all[0]).all(0).tolist()
        return [name for name, is_equal in zip(names, are_equal, strict=True) if not is_equal]
