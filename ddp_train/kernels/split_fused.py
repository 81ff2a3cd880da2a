"""torch's fused SGD, Adam and AdamW for small models on a GPU: the same numbers, from more thread
blocks.

torch's kernels give every 65,536 numbers of a tensor to one thread block. A small model has few
such chunks: AdamW's update of 150,000 weights, three chunks and some biases, takes an H200 50 us, a
third of the whole training step, while most of its 132 multiprocessors have nothing to do. Here
tensors are cut into parts, each a tensor of its own. Each number is updated as before, to the last
bit. Cutting costs the host a microsecond for each part: this is for steps that are recorded once
and replayed (`cuda_graph`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
"""Overloads are named: where one must be found, torch prints the tensors that do not fit, and reads
them for it."""
CHUNK = 65_536
"""Numbers for one thread block (ATen/native/cuda/MultiTensorApply.cuh)."""
ROUND = 2_048
"""Numbers that a thread block updates at once: 512 threads, four each."""
PARTS = 32
"""For all tensors together: one launch takes 36 tensors of Adam's."""


def in_parts(lists: list[list[Tensor]]) -> tuple[list[list[Tensor]], list[int]]:
    """Parallel lists of tensors (weights, gradients, moments), cut alike.

    Returns the lists of parts, which share the memory of the tensors, and for each part the index
    of its tensor. What is not contiguous stays whole.
    """
    total = sum(tensor.numel() for tensor in lists[0])
    size = -(-total // (PARTS * ROUND)) * ROUND
    parts: list[list[Tensor]] = [[] for _ in lists]
    origin: list[int] = []
    for index, together in enumerate(zip(*lists, strict=True)):
        whole = size >= CHUNK or not all(tensor.is_contiguous() for tensor in together)
        for into, tensor in zip(parts, together, strict=True):
            into.extend([tensor] if whole else tensor.view(-1).split(size))
        origin += [index] * (len(parts[0]) - len(origin))
    return parts, origin


def for_rate(kernel: Any, rate: float | Tensor) -> Any:
    """The overload that leaves a rate on the device; the other would read a 0-dim tensor."""
    if isinstance(rate, Tensor):
        return kernel.tensor_lr
    return kernel.default


class _ReadsGradScaler:
    """What a GradScaler, or the guard, tells a fused optimizer: see torch.optim.Optimizer."""

    def grad_scaler_kwargs(self) -> dict[str, Tensor | None]:
        return {
            "grad_scale": getattr(self, "grad_scale", None),
            "found_inf": getattr(self, "found_inf", None),
        }


class SGD(torch.optim.SGD, _ReadsGradScaler):
    """torch.optim.SGD(fused=True); its momentum must exist before the first step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            params = []
            grads = []
            momenta = []
            self._init_group(group, params, grads, momenta)
            parts, _ = in_parts([params, grads, *([momenta] if momenta else [])])
            if params:
                for_rate(aten._fused_sgd_, group["lr"])(
                    *(parts if momenta else [*parts, []]),
                    **{
                        name: group[name]
                        for name in ("weight_decay", "momentum", "lr", "dampening", "nesterov")
                    },
                    maximize=False,
                    is_first_step=False,
                    **self.grad_scaler_kwargs(),
                )


class _InParts(_ReadsGradScaler):
    """The step of Adam and AdamW."""

    param_groups: list[dict[str, Any]]
    _init_group: Any

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            params, grads, averages, squares, none, steps = ([] for _ in range(6))
            self._init_group(group, params, grads, averages, squares, none, steps)
            if not params:
                continue
            aten._foreach_add_.Scalar(steps, 1)
            parts, origin = in_parts([params, grads, averages, squares])
            update = aten._fused_adamw_ if group["decoupled_weight_decay"] else aten._fused_adam_
            beta1, beta2 = group["betas"]
            grad_scaler_kwargs = self.grad_scaler_kwargs()
            for_rate(update, group["lr"])(
                *parts,
                [],
                [steps[index] for index in origin],
                **{name: group[name] for name in ("lr", "weight_decay", "eps")},
                beta1=beta1,
                beta2=beta2,
                amsgrad=False,
                maximize=False,
                **grad_scaler_kwargs,
            )
            if grad_scaler_kwargs["found_inf"] is not None:
                aten._foreach_sub_.List(steps, [grad_scaler_kwargs["found_inf"]] * len(steps))


class Adam(_InParts, torch.optim.Adam):
    """torch.optim.Adam(fused=True)."""


class AdamW(_InParts, torch.optim.AdamW):
    """torch.optim.AdamW(fused=True)."""


CLASSES: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
}
"""torch's class -> the one here."""
