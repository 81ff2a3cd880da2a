"""The gradients that a loop has added up when a checkpoint is saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.distributed.process_group import from_all_ranks, ranks, total
from ddp_train.sessions.parameter_groups import parameters_of
from ddp_train.sessions.windows import Windows

PART_BYTES = 2**25
"""Gradients that are exchanged at once: an exchange needs a copy of them."""
Gradients = dict[str, Tensor]
"""Gradients by the names of their parameters; a parameter without one is not there."""


class GradientWatch:
    """Tells which gradients the next step may need: those that are there, but for used ones.

    A loop is seen to drop used ones, by `zero_grad`, before the next backward pass. One that was
    not seen to may go on adding to them.
    """

    def __init__(self) -> None:
        self.sees_steps = True
        """False where the loop updates the weights without an optimizer of torch's."""
        self.are_used = True
        """The optimizer has stepped since the last loss, if its steps are seen."""
        self.had_backward = False
        """A loss of the step that began last has gone backward."""
        self.had_own = False
        """In it an optimizer has used gradients that the loop itself has set."""
        self.windows = Windows()
        self.updates = 0
        """Steps of optimizers of the model."""
        self._looked_at: dict[Optimizer, Tensor] = {}
        """A parameter of each optimizer, which had a gradient at a step."""
        self._stepped: set[Optimizer] = set()
        """The optimizers that have stepped since the last backward pass."""
        self._keeps_used: bool | None = None
        """The loop was seen to keep used gradients; None: it was not seen to do either."""

    @property
    def had_some(self) -> bool:
        """The step that began last has had gradients, which are those of all processes."""
        return self.had_backward or self.had_own

    def begin_step(self) -> None:
        """Called when a step begins."""
        self.had_backward = False
        self.had_own = False

    def see_loss(self) -> None:
        """Called when a loss is made."""
        self.are_used = not self.sees_steps

    def see_backward(self) -> None:
        """Called when a backward pass begins."""
        self.had_backward = True
        for optimizer in self._stepped & self._looked_at.keys():
            if self._looked_at[optimizer].grad is not None:
                self._keeps_used = True
            elif self._keeps_used is None:
                self._keeps_used = False
        self._stepped.clear()

    def see_step(self, optimizer: Optimizer) -> None:
        """Called before a step of an optimizer of the model."""
        self.are_used = True
        self.updates += 1
        self.windows.see_step(optimizer)
        self._stepped.add(optimizer)
        if optimizer in self._looked_at:
            return
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                self._looked_at[optimizer] = parameter
                return

    def wanted(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Gradients:
        """The gradients that a checkpoint must hold, not copied."""
        used: set[int] = set()
        if self._keeps_used is False:
            for optimizer in self._stepped:
                used |= {id(parameter) for parameter in parameters_of(optimizer)}
        return {
            name: parameter.grad
            for name, parameter in named_parameters
            if parameter.grad is not None and id(parameter) not in used
        }


@torch.no_grad()
def exchanged(module: nn.Module, gradients: Gradients) -> Gradients:
    """The gradients as all processes have them. A collective: every process must call it.

    Where a process has its own, all get the mean: as DDP is linear in what was added up before its
    exchange, the next step is the same.
    """
    if ranks() == 1:
        return gradients
    parameters = dict(module.named_parameters())
    device = next(iter(parameters.values())).device
    facts = torch.full((len(parameters),), -1.0, dtype=torch.float64, device=device)
    for place, name in enumerate(parameters):
        if name in gradients:
            facts[place] = _norm(gradients[name])
    of_ranks = from_all_ranks(facts)
    if bool(((of_ranks == of_ranks[0]) | of_ranks.isnan()).all()):
        return gradients
    somewhere = (of_ranks != -1).any(0).tolist()
    for (name, parameter), is_there in zip(parameters.items(), somewhere, strict=True):
        if not is_there:
            continue
        gradient = gradients.get(name)
        mean = torch.zeros_like(parameter)
        if gradient is not None:
            mean += gradient
        parameter.grad = total(mean) / ranks()
        gradients[name] = parameter.grad
    return gradients


@torch.no_grad()
def average_reached(parameters: Sequence[nn.Parameter], reached: Sequence[nn.Parameter]) -> None:
    """Replace the gradients that a backward pass has reached by their mean over all processes.

    A collective. What another process has reached, and this one not, is zero here.

    parameters: of the model, the same on all processes.
    reached: those of them that have, or may have, a gradient of this pass.
    """
    if not parameters:
        return
    are_reached = {id(parameter) for parameter in reached}
    flags = torch.zeros(2, len(parameters))
    for place, parameter in enumerate(parameters):
        if parameter.grad is not None and id(parameter) in are_reached:
            flags[0, place] = 1
            flags[1, place] = parameter.grad.is_sparse
    counts, sparse_counts = total(flags.to(parameters[0].device)).tolist()
    gradients = []
    for parameter, count, sparse_count in zip(parameters, counts, sparse_counts, strict=True):
        if not count:
            continue
        if sparse_count == count:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter, layout=torch.sparse_coo)
            parameter.grad = total(gradient.coalesce()) / ranks()
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad = parameter.grad.to_dense()  # itself, if it is
        gradients.append(parameter.grad)
    for part in _parts(gradients):
        mean = total(torch.cat([gradient.flatten() for gradient in part])) / ranks()
        rows = mean.split([gradient.numel() for gradient in part])
        for gradient, row in zip(part, rows, strict=True):
            gradient.copy_(row.view_as(gradient))


def _parts(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one type and device, of some 32 MiB together."""
    part: list[Tensor] = []
    nbytes = 0
    for gradient in gradients:
        other = part and (gradient.dtype, gradient.device) != (part[0].dtype, part[0].device)
        if other or nbytes >= PART_BYTES:
            yield part
            part = []
            nbytes = 0
        part.append(gradient)
        nbytes += gradient.nbytes
    if part:
        yield part


def _norm(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return torch.linalg.vector_norm(gradient.float())


def as_saved(gradient: Tensor) -> Tensor | dict[str, Any]:
    """A gradient as a checkpoint holds it.

    Of a sparse one that is places, values and shape: torch looks through a file without reading its
    tensors, and cannot do so with sparse ones.
    """
    if not gradient.is_sparse:
        return gradient
    coalesced = gradient.coalesce()
    return {
        "places": coalesced.indices(),
        "values": coalesced.values(),
        "shape": list(gradient.shape),
    }


def put_back(module: nn.Module, gradients: Mapping[str, Tensor | dict[str, Any]]) -> None:
    """Set the gradients of a checkpoint, see `as_saved`, on its parameters' device and in their
    layout."""
    for name, parameter in module.named_parameters():
        saved = gradients.get(name)
        if saved is None:
            parameter.grad = None
        elif isinstance(saved, dict):
            parameter.grad = torch.sparse_coo_tensor(
                saved["places"],
                saved["values"],
                saved["shape"],
                device=parameter.device,
                check_invariants=True,
                is_coalesced=True,
            )
        elif saved.layout == parameter.layout:
            parameter.grad = torch.empty_like(parameter).copy_(saved)
        else:
            parameter.grad = saved.to(parameter.device)
