"""The user's model while a session lasts: DDP where gradients are taken, the model itself
everywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.parallel.naming_ddp import NamingDdp, ddp_arguments
from ddp_train.parallel.strategy import warm_up_ddp_buckets
from ddp_train.parallel.sync_batch_norm import synchronised_on
from ddp_train.tensor_tree import tensors


class Wrapped(nn.Module):
    """The model, called, trained and evaluated like any other; what it lacks of attributes is that
    model's.

    `state_dict` has the model's own names. Without gradients (`torch.no_grad`) no process waits for
    another: an evaluation may have another number of batches on each. When the session is over it
    is the model alone.
    """

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
        self.module = module.to(device)
        ddp = None
        if processes > 1:
            ddp = NamingDdp(
                self.module, **ddp_arguments(device, broadcast_buffers=False, **options)
            )
        # At three ranks and more DDP's buckets decide the order of additions: see
        # `warm_up_ddp_buckets`. With find_unused_parameters torch lays them out once.
        is_cold = processes > 2 and not options.get("find_unused_parameters")
        vars(self).update(_ddp=ddp, _is_cold=is_cold)  # not as a submodule: it would be there twice

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        ddp: NamingDdp | None = vars(self)["_ddp"]
        if ddp is None or not torch.is_grad_enabled():
            return self.module(*inputs, **keywords)
        if vars(self)["_is_cold"]:
            vars(self)["_is_cold"] = False
            self._warm_up(ddp, inputs, keywords)
        return ddp(*inputs, **keywords)

    def _warm_up(self, ddp: NamingDdp, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        def loss() -> Tensor:
            outputs = [one for one in tensors(ddp(*inputs, **keywords)) if one.requires_grad]
            return torch.stack([one.float().sum() for one in outputs]).sum()

        before = [parameter.grad for parameter in self.parameters()]
        devices = [torch.cuda.current_device()] if next(self.parameters()).is_cuda else []
        with torch.random.fork_rng(devices):
            warm_up_ddp_buckets(ddp, loss)
        for parameter, gradient in zip(self.parameters(), before, strict=True):
            parameter.grad = gradient

    def release(self) -> None:
        """Lets go of DDP, which must not outlive the process group."""
        ddp = vars(self).pop("_ddp", None)
        vars(self)["_ddp"] = None
        if ddp is not None:
            ddp._remove_autograd_hooks()

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
        if (
            name.startswith("_") or name == "module"
        ):  # nn.Module's own; `module` is not there yet while it is made
            return super().__getattr__(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)
