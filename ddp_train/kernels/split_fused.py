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
"""Parts of all tensors together: one launch takes 36 tensors of Adam's."""


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
        is_whole = size >= CHUNK or not all(tensor.is_contiguous() for tensor in together)
        for into, tensor in zip(parts, together, strict=True):
            into.extend([tensor] if is_whole else tensor.view(-1).split(size))
        origin += [index] * (len(parts[0]) - len(origin))
    return parts, origin


def for_rate(kernel: Any, rate: float | Tensor) -> Any:
    """The overload that leaves a rate on the device; the other would read a 0-dim tensor."""
    if isinstance(rate, Tensor):
        return kernel.tensor_lr
    return kernel.default


def _flags(optimizer: Any) -> dict[str, Tensor | None]:
    """Attributes that a GradScaler, or the guard, sets on a fused optimizer."""
    return {name: getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")}


class SGD(torch.optim.SGD):
    """torch.optim.SGD(fused=True); its momentum must exist before the first step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        names = ("weight_decay", "momentum", "lr", "dampening", "nesterov")
        for group in self.param_groups:
            params, grads, momenta = ([] for _ in range(3))
            self._init_group(group, params, grads, momenta)
            if not params:
                continue
            lists = [params, grads, momenta] if momenta else [params, grads]
            parts, _ = in_parts(lists)
            if not momenta:
                parts.append([])
            update = for_rate(aten._fused_sgd_, group["lr"])
            update(
                *parts,
                **{name: group[name] for name in names},
                maximize=False,
                is_first_step=False,
                **_flags(self),
            )


class _SplitAdam:
    """The step of Adam and AdamW."""

    param_groups: list[dict[str, Any]]
    _init_group: Any

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        flags = _flags(self)
        found_inf = flags["found_inf"]
        for group in self.param_groups:
            params, grads, averages, squares, none, steps = ([] for _ in range(6))
            self._init_group(group, params, grads, averages, squares, none, steps)
            if not params:
                continue
            aten._foreach_add_.Scalar(steps, 1)
            parts, origin = in_parts([params, grads, averages, squares])
            kernel = aten._fused_adamw_ if group["decoupled_weight_decay"] else aten._fused_adam_
            update = for_rate(kernel, group["lr"])
            beta1, beta2 = group["betas"]
            update(
                *parts,
                [],
                [steps[index] for index in origin],
                **{name: group[name] for name in ("lr", "weight_decay", "eps")},
                beta1=beta1,
                beta2=beta2,
                amsgrad=False,
                maximize=False,
                **flags,
            )
            if found_inf is not None:
                aten._foreach_sub_.List(steps, [found_inf] * len(steps))


class Adam(_SplitAdam, torch.optim.Adam):
    """torch.optim.Adam(fused=True)."""


class AdamW(_SplitAdam, torch.optim.AdamW):
    """torch.optim.AdamW(fused=True)."""


CLASSES: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
}
"""torch's class -> the one here."""
