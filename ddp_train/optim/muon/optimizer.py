"""Muon: momentum of matrices, orthogonalised, with AdamW for all other parameters.

From https://kellerjordan.github.io/posts/muon/; the factor on the learning rate that lets it be
AdamW's is from arXiv:2502.16982. torch.optim.Muon takes matrices alone, one after the other, and
computes all of them on every process. Here matrices of one shape are computed together, and under
DDP each process computes its share of them.
"""

# pyright: reportPrivateImportUsage=false
# torch._foreach_*: torch's own optimizers are made of them.
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ddp_train.distributed.process_group import from_all_ranks, place_among_ranks
from ddp_train.errors import ConfigError
from ddp_train.optim.groups import as_groups, split_group
from ddp_train.optim.skippable import SkippableOptimizer, descend, move_towards
from ddp_train.text import counted, matching, unmatched

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Coefficients of the quintic that is iterated: they raise small singular values fastest, and end
between 0.7 and 1.2."""
TOGETHER = 4
"""The most matrices of one computation. It does not depend on the number of processes, so that
neither do the bits."""
USE_MUON = "use_muon"
"""The entry of a group that says which of the two methods updates it."""
FACTORS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""`adjust_lr` -> what multiplies the learning rate of a matrix. The names are those of
torch.optim.Muon."""


class Muon(SkippableOptimizer):
    """The Muon optimizer for matrices, with AdamW for all other parameters.

    A parameter w with two or more dimensions is a matrix: its rows are the first dimension, its
    columns all others. With gradient g and momentum b: m = b m + (1 - b) g; u = (1 - b) g + b m
    with Nesterov momentum, else u = m; O is u orthogonalised; w = w - lr (factor O + weight_decay
    w). Orthogonalisation uses bfloat16 on GPUs, and the parameter's dtype elsewhere. AdamW uses
    torch's fused kernel on GPUs.

    With a process group, `step` is a collective: every process must call it, and gradients must be
    identical on all of them, as DDP leaves them. Weights and moments change only after all
    communication has succeeded.

    params: parameters or parameter groups, as in torch's optimizers. A group without the key
        `use_muon` is split into matrices and others. The group's `lr` applies to its matrices. All
        others use the group's `adamw_lr`. If the group has none, the argument `adamw_lr` is scaled
        as the group's `lr` is: adamw_lr * group["lr"] / lr.
    lr: learning rate of matrices.
    momentum: b.
    nesterov: use Nesterov momentum.
    ns_steps: number of Newton-Schulz iterations that orthogonalise.
    adjust_lr: the factor above. `original` is sqrt(max(1, rows / columns)). `match_rms_adamw` is
        0.2 sqrt(max(rows, columns)), which lets `lr` be one that suits AdamW.
    weight_decay: decoupled weight decay of all parameters.
    adamw_lr: learning rate of AdamW.
    betas: decay rates of AdamW's moments.
    eps: added to AdamW's denominator.
    foreach: True updates all parameters of a group together, False one after the other.

    Raises ValueError if a group with `use_muon=True` has a parameter with fewer than two
    dimensions.
    """

    is_collective = True

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr: str = "original",
        weight_decay: float = 0.0,
        adamw_lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        foreach: bool = True,
    ) -> None:
        groups: list[dict[str, Any]] = []
        for group in as_groups(params):
            matrix_lr = group.pop("lr", lr)
            vector_lr = group.pop("adamw_lr", adamw_lr * matrix_lr / lr)
            parts = [group] if USE_MUON in group else apart(group, lambda one: one.ndim > 1)
            for part in parts:
                part["lr"] = matrix_lr if part[USE_MUON] else vector_lr
                if part[USE_MUON] and any(parameter.ndim < 2 for parameter in part["params"]):
                    raise ValueError("Muon takes parameters of two and more dimensions")
                groups.append(part)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr": adjust_lr,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "foreach": foreach,
            "capturable": True,  # as torch calls it: a loaded step counter goes to the device
        }
        super().__init__(groups, defaults)

    @property
    def orthogonalised_parameters(self) -> int:
        """Number of parameters in the matrices."""
        groups = [group for group in self.param_groups if group[USE_MUON]]
        return sum(matrix.numel() for group in groups for matrix in group["params"])

    def update(self) -> None:
        """Change weights and moments. A collective where there is a process group."""
        directions = self._directions()
        for group in self.param_groups:
            for parameters, gradients in self.lists(group):
                if group[USE_MUON]:
                    self._update_matrices(group, parameters, gradients, directions)
                else:
                    self._update_vectors(group, parameters, gradients)

    def _update_matrices(
        self,
        group: dict[str, Any],
        matrices: list[Tensor],
        gradients: list[Tensor],
        directions: dict[Tensor, Tensor],
    ) -> None:
        """Count the gradients of matrices in their momenta, and take a step along the directions.

        directions: of all matrices, from the momenta as they become here.
        """
        factor = FACTORS[group["adjust_lr"]]
        momenta = self.moments(matrices, "momentum_buffer")
        move_towards(momenta, gradients, 1 - group["momentum"], self.found_inf)
        updates = [
            directions[matrix] * factor(len(matrix), matrix[0].numel()) for matrix in matrices
        ]
        descend(matrices, updates, self.found_inf, group["lr"], group["weight_decay"])

    def _update_vectors(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """Take a step of AdamW with the parameters that are not orthogonalised."""
        fused = parameters[0].is_cuda or self.found_inf is not None  # the others know no flag
        for parameter in parameters:
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        adamw(
            parameters,
            gradients,
            self.moments(parameters, "exp_avg"),
            self.moments(parameters, "exp_avg_sq"),
            [],
            [self.state[parameter]["step"] for parameter in parameters],
            foreach=None if fused else group["foreach"],
            fused=fused,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _directions(self) -> dict[Tensor, Tensor]:
        """The orthogonalised momentum of each matrix, in its shape and dtype.

        A collective where there is a process group. Weights and moments stay as they are.
        """
        stacks = [
            stack for group in self.param_groups if group[USE_MUON] for stack in stacks_of(group)
        ]
        rank, ranks = place_among_ranks()
        shares = shares_of([stack.operations for stack in stacks], ranks)
        computed = {number: self._orthogonalise(stacks[number]) for number in shares[rank]}
        if ranks > 1 and stacks:
            computed = _exchanged(computed, stacks, shares)
        directions = {}
        for number, stack in enumerate(stacks):
            for matrix, direction in zip(stack.matrices, computed[number], strict=True):
                directions[matrix] = direction.to(matrix.dtype).reshape(matrix.shape)
        return directions

    def _orthogonalise(self, stack: Stack) -> Tensor:
        """The momenta as they would become, orthogonalised, [number, rows, columns]."""
        momentum = stack.group["momentum"]
        gradients = [matrix.grad for matrix in stack.matrices if matrix.grad is not None]
        momenta = [
            self.state.get(matrix, {}).get("momentum_buffer", torch.zeros_like(matrix))
            for matrix in stack.matrices
        ]
        ahead = torch._foreach_lerp(momenta, gradients, 1 - momentum)
        if stack.group["nesterov"]:
            ahead = torch._foreach_lerp(gradients, ahead, momentum)
        stacked = torch.stack([matrix.flatten(1) for matrix in ahead])
        return orthogonalised(stacked.to(stack.dtype), stack.group["ns_steps"])


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape, dtype and device that are orthogonalised together."""

    group: dict[str, Any]
    matrices: list[Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """The type in which they are orthogonalised."""
        first = self.matrices[0]
        return torch.bfloat16 if first.is_cuda else first.dtype

    @property
    def size(self) -> int:
        return len(self.matrices) * self.matrices[0].numel()

    @property
    def operations(self) -> float:
        """Cost of an iteration, up to a factor."""
        first = self.matrices[0]
        short, long = sorted((len(first), first[0].numel()))
        return len(self.matrices) * short * short * (2 * long + short)


def stacks_of(group: dict[str, Any]) -> list[Stack]:
    """The matrices of a group that have gradients, in stacks."""
    alike: dict[Any, list[Tensor]] = {}
    for matrix in group["params"]:
        if matrix.grad is not None:
            kind = (matrix.flatten(1).shape, matrix.dtype, matrix.device)
            alike.setdefault(kind, []).append(matrix)
    return [
        Stack(group, matrices[first : first + TOGETHER])
        for matrices in alike.values()
        for first in range(0, len(matrices), TOGETHER)
    ]


def shares_of(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """The numbers of the stacks that each rank computes: the next costly one goes to the rank that
    has least."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        least = loads.index(min(loads))
        shares[least].append(number)
        loads[least] += costs[number]
    return shares


def _exchanged(
    computed: dict[int, Tensor], stacks: list[Stack], shares: list[list[int]]
) -> dict[int, Tensor]:
    """The directions that all ranks have computed, by the number of the stack. A collective.

    computed: those of this rank.
    shares: the numbers of the stacks of each rank.

    Returns [number, elements] each: a matrix is one row.
    """
    sizes = [[stacks[number].size for number in share] for share in shares]
    dtype = functools.reduce(torch.promote_types, (stack.dtype for stack in stacks))
    device = stacks[0].matrices[0].device
    row = torch.zeros(max(map(sum, sizes)), device=device, dtype=dtype)
    if computed:
        flat = [directions.to(dtype).flatten() for directions in computed.values()]
        torch.cat(flat, out=row[: sum(map(len, flat))])
    exchanged = {}
    for share, lengths, received in zip(shares, sizes, from_all_ranks(row), strict=True):
        if share:
            parts = received[: sum(lengths)].split(lengths)
            for number, part in zip(share, parts, strict=True):
                exchanged[number] = part.view(len(stacks[number].matrices), -1)
    return exchanged


def orthogonalised(matrices: Tensor, steps: int) -> Tensor:
    """U V^T of each matrix U S V^T, roughly: its singular values end between 0.7 and 1.2.

    Each is divided by its Frobenius norm first, so that the iteration converges; a matrix of zeros
    stays one.

    matrices: [number, rows, columns].
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.flatten(-2).norm(dim=-1).clamp(min=1e-7)[..., None, None]
    for _ in range(steps):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def hidden_matrices(
    model: nn.Module, trained: Mapping[str, nn.Parameter], globs: Sequence[str] = ()
) -> set[nn.Parameter]:
    """The parameters that Muon is made for: weights of two and more dimensions, but not those of
    embeddings and of the output layer.

    globs: over names, in place of that rule; every parameter that they match. The rule looks for
        parameters whose own name has `weight` in it, so that class tokens and positions stay
        outside; the output layer is the last module that has one.

    Raises ConfigError if there is none, if a glob matches nothing or if one matches a vector.
    """
    if globs:
        return _matching_matrices(trained, globs)
    owners = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_matrix = parameter.ndim > 1 and min(len(parameter), parameter[0].numel()) > 1
            if "weight" in name and is_matrix:
                owners.append((module, parameter))
    inside = {parameter for _, parameter in owners}
    for module, parameter in owners:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or module is owners[-1][0]:
            inside.discard(parameter)
    inside &= set(trained.values())
    if not inside:
        raise ConfigError(
            ["optimizer=muon: the model has no matrix between its input and its output; use adamw"]
        )
    return inside


def _matching_matrices(
    trained: Mapping[str, nn.Parameter], globs: Sequence[str]
) -> set[nn.Parameter]:
    problems = unmatched("optimizer.matrices=[{}]", globs, list(trained), "parameter that trains")
    if problems:
        raise ConfigError(problems)
    found = set()
    for name, parameter in trained.items():
        if any(matching(glob, [name]) for glob in globs):
            if parameter.ndim < 2:
                dimensions = counted(parameter.ndim, "dimension")
                rule = f"{name} has {dimensions}, Muon needs two or more"
                remedy = "use globs that do not match it"
                raise ConfigError([f"optimizer.matrices: {rule}; {remedy}"])
            found.add(parameter)
    return found


def split_groups(
    groups: list[dict[str, Any]],
    model: nn.Module,
    trained: Mapping[str, nn.Parameter],
    matrices: Sequence[str],
) -> list[dict[str, Any]]:
    """Each group as two: what is orthogonalised, and the rest. matrices: as `hidden_matrices`."""
    hidden = hidden_matrices(model, trained, matrices)
    return [part for group in groups for part in apart(group, hidden.__contains__)]


def apart(group: dict[str, Any], is_matrix: Callable[[Tensor], bool]) -> list[dict[str, Any]]:
    """A group as two, the one that Muon updates first."""
    return split_group(group, is_matrix, {USE_MUON: True}, {USE_MUON: False})
