"""The user's model while a session lasts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.distributed.training_step import CURRENT
from ddp_train.parallel.naming_ddp import NamingDdp, ddp_arguments
from ddp_train.parallel.strategy import warm_up_ddp_buckets
from ddp_train.parallel.sync_batch_norm import SyncBatchNorm, synchronised_on
from ddp_train.sessions.settings import UsageError
from ddp_train.tensor_tree import tensors


class Wrapped(nn.Module):
    """The model, called, trained and evaluated like any other: DDP where gradients are taken.

    What it lacks of attributes is that model's, and `state_dict` has the model's own names. Without
    gradients (`torch.no_grad`) no process waits for another: an evaluation may have another number
    of batches on each. When the session is over it is the model alone.
    """

    _ddp: NamingDdp | None
    """None on one process, and after the session."""
    _is_cold: bool
    """The buckets of DDP are not laid out yet."""

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
        if processes > 1 and sync_batch_norm:
            module = synchronised_on(device, module)
            for layer in module.modules():
                if isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm):
                    layer.register_forward_pre_hook(_refuse_shared_out)
        self.module = module.to(device)
        self._hold(None)
        if processes > 1:
            arguments = ddp_arguments(device, broadcast_buffers=False, **options)
            self._hold(NamingDdp(self.module, **arguments))
        # At three ranks and more DDP's buckets decide the order of additions: see
        # `warm_up_ddp_buckets`. With find_unused_parameters torch lays them out once.
        self._is_cold = processes > 2 and not options.get("find_unused_parameters")

    def _hold(self, ddp: NamingDdp | None) -> None:
        """Keep it as a plain attribute: as a submodule the model would be there twice."""
        object.__setattr__(self, "_ddp", ddp)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        if self._ddp is None or not torch.is_grad_enabled():
            return self.module(*inputs, **keywords)
        if self._is_cold:
            self._is_cold = False
            self._warm_up(self._ddp, inputs, keywords)
        return self._ddp(*inputs, **keywords)

    def _warm_up(self, ddp: NamingDdp, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        def loss() -> Tensor:
            outputs = tensors(ddp(*inputs, **keywords))
            sums = [output.float().sum() for output in outputs if output.requires_grad]
            return torch.stack(sums).sum()

        warm_up_ddp_buckets({"model": self.module}, loss)

    def is_trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if an optimizer updates a parameter of this model."""
        ours = {id(parameter) for parameter in self.parameters()}
        groups = optimizer.param_groups
        return any(id(parameter) in ours for group in groups for parameter in group["params"])

    def release(self) -> None:
        """Let go of DDP, which must not outlive the process group."""
        if self._ddp is not None:
            self._ddp._remove_autograd_hooks()
        self._hold(None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies (`copy.deepcopy`, as averages of weights make them) and pickles are of the model.

        They take no gradients over processes, and nothing of the session goes with them.
        """
        return _itself, (self.module,)

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
        # What begins with `_` is nn.Module's own; `module` is not there yet while it is made.
        if name.startswith("_") or name == "module":
            return super().__getattr__(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def _itself(model: nn.Module) -> nn.Module:
    return model


def _refuse_shared_out(layer: nn.Module, _: Any) -> None:
    """Raise UsageError for a layer that would wait for processes that have no more batches.

    Copies of a model have this hook too: averages of its weights.
    """
    if layer.training and CURRENT.is_shared_out:
        raise UsageError(
            "batch norm in train mode was given a batch of run.test_loader: processes have"
            " different numbers of them, and would wait for each other",
            "model.eval() to score; for update_bn make the average before run.wrap,"
            " AveragedModel(net), and update_bn(DataLoader(data, 64), average, device=run.device)",
        )
