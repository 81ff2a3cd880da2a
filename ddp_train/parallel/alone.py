"""DistributedDataParallel's numbers and errors where a process is alone, without torch's DDP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.parallel.naming_ddp import requiring_grad, without_gradient
from ddp_train.parallel.strategy import DistributedDataParallel, unknown
from ddp_train.tasks.task import ModelWithTask


class Alone(DistributedDataParallel):
    """Where DDP would do no more than average gradients: it would copy each into a bucket, by a
    kernel of its own, and nobody reads the bucket.

    It trains what DDP refuses for its hooks' sake: a layer that is used twice, once in a reentrant
    checkpoint.
    """

    exchanges = False
    gradients: WantedGradients | None = None

    def wrap(
        self, module: ModelWithTask, step_flops: Callable[[], int | None] = unknown
    ) -> nn.Module:
        """Raises ModelError for parameters of lazy layers, which DDP refuses too."""
        self.find_sync_batch_norms(module)
        if self.gradients:
            self.gradients.release()
        self.gradients = WantedGradients(module)
        return module

    def warm_up(self, first_batch: Callable[[], Batch]) -> None:
        """Nothing to do: there are no buckets."""

    def sync_gradients(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        if micro_batch.is_last and self.gradients:
            self.gradients.reached.clear()
        return super().sync_gradients(micro_batch)

    def mean_of_units(self, scaled: Tensor) -> Callable[[], Tensor]:
        return scaled.sum

    def check_gradients(self) -> None:
        if self.gradients:
            self.gradients.check()


class WantedGradients:
    """Refuses parameters that the last backward pass of a step does not reach, as DDP does a step
    later, and fills in zeros where none brings a gradient, as DDP's buckets do.

    A backward pass that reaches a parameter may bring nothing: a function may return None for its
    gradient. So hooks tell, which take a microsecond each.
    """

    def __init__(self, module: nn.Module) -> None:
        """Raises ModelError for parameters of lazy layers."""
        self.trained = requiring_grad(module)
        self.reached: set[str] = set()
        """In the last backward pass."""
        # The hooks know the set and not this object: they live as long as their parameters, and may
        # not keep them.
        self.handles = [
            one.register_post_accumulate_grad_hook(
                lambda _, add=self.reached.add, name=name: add(name)
            )
            for name, one in self.trained.items()
        ]

    def check(self) -> None:
        """After the backward passes of a step, before the optimizer's. Raises ModelError."""
        if len(self.reached) < len(self.trained):
            raise without_gradient([name for name in self.trained if name not in self.reached])
        for parameter in self.trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def release(self) -> None:
        for handle in self.handles:
            handle.remove()
