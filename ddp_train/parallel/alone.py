"""DistributedDataParallel's numbers and errors where a process is alone, without torch's DDP."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ddp_train.data.loader import Batch
from ddp_train.parallel.naming_ddp import without_gradient
from ddp_train.parallel.strategy import DistributedDataParallel
from ddp_train.tasks.task import ModelWithTask


class Alone(DistributedDataParallel):
    """Where DDP would but average gradients: it would copy each into a bucket, in a kernel of its own, for nobody."""

    exchanges = False

    def wrap(self, module: ModelWithTask) -> nn.Module:
        self.find_sync_batch_norms(module)
        self.gradients = WantedGradients(module)
        return module

    def warm_up(self, first_batch: Callable[[], Batch]) -> None:
        """Nothing to do: there are no buckets."""

    def mean_of_units(self, scaled: Tensor) -> Callable[[], Tensor]:
        return scaled.sum

    def check_gradients(self) -> None:
        self.gradients.check()


class WantedGradients:
    """Refuses parameters that the backward passes of a step do not reach, and fills in zeros where they bring nothing.

    So does DDP. They bring nothing to a parameter that they reach if a function returns None for its gradient. To tell
    the two apart takes a hook, of a microsecond a step, for which reason only a parameter that once had no gradient has
    one: the error comes in the second step without a gradient, as DDP's does.
    """

    def __init__(self, module: nn.Module) -> None:
        self.trained = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        self.watched: set[str] = set()
        self.reached: set[str] = set()
        """Of those that are watched, in this step."""

    def check(self) -> None:
        """After the backward passes of a step, before its gradients are used. Raises ModelError."""
        missing = [(name, parameter) for name, parameter in self.trained if parameter.grad is None]
        if never := [name for name, _ in missing if name in self.watched - self.reached]:
            raise without_gradient(never)
        for name, parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
            if name not in self.watched:
                self._watch(name, parameter)
        self.reached.clear()

    def _watch(self, name: str, parameter: nn.Parameter) -> None:
        self.watched.add(name)
        parameter.register_post_accumulate_grad_hook(lambda _: self.reached.add(name))
