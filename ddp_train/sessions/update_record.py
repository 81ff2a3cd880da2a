"""The gradients and changes of a session's first updates, for `ddp-train prove train.py`.

Each update is taken back: all begin with the same weights, so that rounding does not grow, and
gradients on another number of processes are the same or not. So are, in float64, the changes that
optimizers make with them, and those that the loop makes by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_train.distributed.environment import BY_LOOP, BY_OPTIMIZER, DRAWS, GRADIENTS
from ddp_train.distributed.replicas import check_same_weights
from ddp_train.sessions.parameter_groups import parameters_of

UPDATES = 3
"""Updates of each optimizer: what a step leaves for the next one is seen in the second. An epoch's
short last batch comes in the last of them."""
MOST_STEPS = 50
"""Steps of the loop after which an optimizer without an update is waited for no longer."""
ROUNDING = 1e-10
"""The part of the largest weight that what adds and subtracts again (SAM) may leave."""
DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


class UpdateRecord:
    """Records the gradients of the first updates, and takes the updates back."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.module: nn.Module | None = None
        """All models that train; None before run.resume."""
        self.updates: dict[Optimizer, int] = {}
        """Updates of each optimizer that run.resume got."""
        self.gradients: dict[str, Tensor] = {}
        """Gradients, and changes of weights, on this process: with the update and the name of the
        parameter."""
        self.known: dict[str, Tensor] = {}
        """The weights in float64, as they are known to be, by the names of the parameters."""
        self.draws_by_process = False
        """A step has drawn random numbers that depend on the process."""
        self._weights: list[tuple[Tensor, Tensor]] = []
        """The parameters of an optimizer in its step, each with what it was before."""
        self._handles = [
            register_optimizer_step_pre_hook(self._keep_weights),
            register_optimizer_step_post_hook(self._record_and_restore),
        ]

    def begin(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Record from now on. Dropout layers keep everything, since they draw by process.

        module: all models that train.
        """
        self.module = module
        self.updates = dict.fromkeys(optimizers, 0)
        for name, parameter in module.named_parameters():
            if parameter.dtype == torch.float64:
                self.known[name] = parameter.detach().clone()
        for layer in module.modules():
            if isinstance(layer, DROPOUTS):
                layer.p = 0.0

    def is_complete(self, step: int) -> bool:
        """True after the step of the loop that is the last one to look at."""
        has_all = bool(self.updates) and min(self.updates.values()) >= UPDATES
        return has_all or step >= MOST_STEPS

    @torch.no_grad()
    def end_step(self, step: int) -> None:
        """Record what the loop itself has changed in weights. step: of the loop, from 1."""
        if self.module is None:
            return
        for name, parameter in self.module.named_parameters():
            known = self.known.get(name)
            if known is None or known.shape != parameter.shape:
                continue
            change = parameter - known
            if change.numel() and change.abs().max() > ROUNDING * known.abs().max():
                self.gradients[f"{BY_LOOP} {step} {name}"] = _as_written(change)
                known.copy_(parameter)

    def close(self) -> None:
        """See no more updates."""
        for handle in self._handles:
            handle.remove()
        self._weights = []

    def write(self) -> None:
        """Write what was recorded, and the buffers as they are now."""
        tensors = dict(self.gradients)
        if self.module is not None:
            for name, buffer in self.module.named_buffers():
                if buffer.is_floating_point():
                    tensors[f"buffer {name}"] = _as_written(buffer)
        metadata = {DRAWS: str(int(self.draws_by_process))}
        save_file(tensors, self.run_dir / GRADIENTS, metadata)

    def _keep_weights(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer in self.updates:
            parameters = parameters_of(optimizer)
            self._weights = [(parameter, parameter.detach().clone()) for parameter in parameters]

    @torch.no_grad()
    def _record_and_restore(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer not in self.updates or self.module is None:
            return
        self.updates[optimizer] += 1
        check_same_weights(self.module)  # a checkpoint, which would do it, is never reached
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        number = self.updates[optimizer]
        for parameter, before in self._weights:
            change = parameter - before
            parameter.copy_(before)
            name = names.get(id(parameter))
            if not name or parameter.grad is None or number > UPDATES:
                continue
            self.gradients[f"update {number} {name}"] = _as_written(parameter.grad)
            if change.dtype == torch.float64:
                self.gradients[f"{BY_OPTIMIZER} {number} {name}"] = _as_written(change)
        self._weights = []


def _as_written(tensor: Tensor) -> Tensor:
    """A copy on the CPU, in at least 32 bits."""
    dense = tensor.detach().to_dense().cpu()
    if dense.dtype != torch.float64:
        dense = dense.float()
    return dense.clone().contiguous()
