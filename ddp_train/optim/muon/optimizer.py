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
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from ddp_train.distributed.process_group import from_all_ranks, place_among_ranks
from ddp_train.errors import ConfigError
from ddp_train.optim.flagged import (
    descend,
    kept,
    move_towards,
    of_one_type,
    refuse_scaled_gradients,
)
from ddp_train.text import matching, unmatched

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of the quintic that is iterated: they raise small singular values fastest, and end between 0.7
and 1.2."""
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


class Muon(Optimizer):
    """Muon for matrices, AdamW for the rest, on GPUs torch's fused kernel.

    With momentum b: m = b m + (1 - b) g; u = (1 - b) g + b m with Nesterov, else m; O = u
    orthogonalised, as a matrix whose columns are all dimensions but the first; w = w - lr (factor O
    + weight_decay w). Orthogonalising is done in bfloat16 on GPUs, elsewhere in the dtype of the
    parameter.

    `step` is a collective where there is a process group: gradients must be the same on all
    processes, as DDP leaves them. No weight and no moment changes before it has succeeded.
    """

    is_collective = True
    found_inf: Tensor | None = None
    """A float32 scalar on the device: 1 leaves weights and moments as they are."""
    _step_supports_amp_scaling = True  # GradScaler asks

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
        """params: a group without `use_muon` is taken apart, into parameters of two and more
        dimensions and the others. The `lr` of a group counts for its matrices; the others have its
        own `adamw_lr`, or else the one given here, raised or lowered as the group's `lr` is.
        ns_steps: iterations of the quintic. foreach: all parameters of a group together, as torch
        calls it; False: one after the other. Raises ValueError if a group with `use_muon` has a
        vector."""
        groups: list[dict[str, Any]] = []
        given = list(params)
        for group in [dict(one) for one in given if isinstance(one, dict)] or [{"params": given}]:
            group["params"] = list(group["params"])
            own_rate = adamw_lr * group.get("lr", lr) / lr
            rates = {True: group.pop("lr", lr), False: group.pop("adamw_lr", own_rate)}
            for part in [group] if USE_MUON in group else apart(group, lambda one: one.ndim > 1):
                groups.append({**part, "lr": rates[part[USE_MUON]]})
        if any(
            parameter.ndim < 2
            for group in groups
            if group[USE_MUON]
            for parameter in group["params"]
        ):
            raise ValueError("Muon takes parameters of two and more dimensions")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr": adjust_lr,
        }
        defaults |= {"weight_decay": weight_decay, "betas": betas, "eps": eps, "foreach": foreach}
        defaults |= {
            "capturable": True
        }  # as torch calls it: a loaded step counter goes to the device
        super().__init__(groups, defaults)

    @property
    def orthogonalised_parameters(self) -> int:
        """How many numbers are in its matrices."""
        return sum(
            one.numel() for group in self.param_groups if group[USE_MUON] for one in group["params"]
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Parameters without a gradient stay as they are. A collective. Raises
        RuntimeError if the gradients are still multiplied by the scale of a GradScaler."""
        refuse_scaled_gradients(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = self._updates()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for together in (
                of_one_type(parameters) if group["foreach"] else [[one] for one in parameters]
            ):
                gradients = [one.grad for one in together if one.grad is not None]
                if group[USE_MUON]:
                    self._muon(group, together, gradients, updates)
                else:
                    self._adamw(group, together, gradients)
        return loss

    def _muon(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        updates: dict[Tensor, Tensor],
    ) -> None:
        momenta = kept(self, parameters, "momentum_buffer")
        factor = FACTORS[group["adjust_lr"]]
        move_towards(momenta, gradients, 1 - group["momentum"], self.found_inf)
        steps = [
            updates[one].reshape(one.shape) * factor(len(one), one[0].numel()) for one in parameters
        ]
        descend(
            parameters, steps, self.found_inf, rate=group["lr"], weight_decay=group["weight_decay"]
        )

    def _updates(self) -> dict[Tensor, Tensor]:
        """Of each matrix its orthogonalised momentum, [rows, columns]. Nothing is changed."""
        batches = [
            batch for group in self.param_groups if group[USE_MUON] for batch in _batches(group)
        ]
        rank, ranks = place_among_ranks()
        shares = _shares([_operations(batch) for _, batch in batches], ranks)
        computed = {number: self._orthogonalised(*batches[number]) for number in shares[rank]}
        if ranks > 1 and batches:
            first = batches[0][1][0]
            dtype = functools.reduce(
                torch.promote_types, (_dtype(batch[0]) for _, batch in batches)
            )
            sizes = [
                sum(parameter.numel() for number in share for parameter in batches[number][1])
                for share in shares
            ]
            mine = torch.zeros(max(sizes), device=first.device, dtype=dtype)
            flat = [computed[number].to(dtype).flatten() for number in shares[rank]]
            if flat:
                torch.cat(flat, out=mine[: sizes[rank]])
            for share, row in zip(shares, from_all_ranks(mine), strict=True):
                lengths = [
                    sum(parameter.numel() for parameter in batches[number][1]) for number in share
                ]
                parts = row[: sum(lengths)].split(lengths) if lengths else ()
                computed |= {
                    n: part.view(len(batches[n][1]), -1)
                    for n, part in zip(share, parts, strict=True)
                }
        return {
            parameter: update.to(parameter.dtype)
            for number, (_, batch) in enumerate(batches)
            for parameter, update in zip(batch, computed[number], strict=True)
        }

    def _orthogonalised(self, group: dict[str, Any], parameters: list[Tensor]) -> Tensor:
        """[number, rows, columns]: what the momentum would become, orthogonalised."""
        gradients = [one.grad for one in parameters if one.grad is not None]
        momenta = [
            self.state.get(one, {}).get("momentum_buffer", torch.zeros_like(one))
            for one in parameters
        ]
        ahead = torch._foreach_lerp(momenta, gradients, 1 - group["momentum"])
        if group["nesterov"]:
            ahead = torch._foreach_lerp(gradients, ahead, group["momentum"])
        matrices = torch.stack([one.flatten(1) for one in ahead])
        return orthogonalised(matrices.to(_dtype(parameters[0])), group["ns_steps"])

    def _adamw(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        fused = parameters[0].is_cuda or self.found_inf is not None  # the others know no flag
        for parameter in parameters:
            self.state[parameter].setdefault(
                "step", torch.zeros((), dtype=torch.float32, device=parameter.device)
            )
        adamw(
            parameters,
            gradients,
            kept(self, parameters, "exp_avg"),
            kept(self, parameters, "exp_avg_sq"),
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


def orthogonalised(matrices: Tensor, steps: int) -> Tensor:
    """U V^T of each matrix U S V^T, roughly: its singular values end between 0.7 and 1.2. [number,
    rows, columns]

    Each is divided by its Frobenius norm first, so that the iteration converges; a matrix of zeros
    stays one."""
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
    """What Muon is made for: weights of two and more dimensions, but not those of embeddings and of
    the output layer.

    globs: over names, in place of that rule; every parameter that they match. The rule looks for
    parameters whose own name has `weight` in it, so that class tokens and positions stay outside;
    the output layer is the last module that has one. Raises ConfigError if there is none, if a glob
    matches nothing or if one matches a vector.
    """
    if globs:
        if problems := unmatched(
            "optimizer.matrices=[{}]", globs, list(trained), "parameter that trains"
        ):
            raise ConfigError(problems)
        found = {
            name: one
            for name, one in trained.items()
            if any(matching(glob, [name]) for glob in globs)
        }
        if vectors := [name for name, one in found.items() if one.ndim < 2]:
            raise ConfigError(
                [
                    f"optimizer.matrices: {vectors[0]} is a vector; Muon takes two and more"
                    " dimensions"
                ]
            )
        return set(found.values())
    owners = [
        (module, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if "weight" in name and parameter.ndim > 1 and min(len(parameter), parameter[0].numel()) > 1
    ]
    outside = {one for module, one in owners if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    outside |= {one for module, one in owners if module is owners[-1][0]}
    if not (inside := {one for _, one in owners} - outside & set(trained.values())):
        raise ConfigError(
            ["optimizer=muon: the model has no matrix between its input and its output; use adamw"]
        )
    return inside & set(trained.values())


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
    parts = [
        {
            **group,
            "params": [one for one in group["params"] if is_matrix(one) == use],
            USE_MUON: use,
        }
        for use in (True, False)
    ]
    return [part for part in parts if part["params"]]


def _batches(group: dict[str, Any]) -> list[tuple[dict[str, Any], list[Tensor]]]:
    """Its parameters with a gradient, those of one shape, dtype and device together, with the
    group."""
    found: dict[Any, list[Tensor]] = {}
    for one in group["params"]:
        if one.grad is not None:
            found.setdefault((one.flatten(1).shape, one.dtype, one.device), []).append(one)
    return [
        (group, same[n : n + TOGETHER])
        for same in found.values()
        for n in range(0, len(same), TOGETHER)
    ]


def _dtype(parameter: Tensor) -> torch.dtype:
    return torch.bfloat16 if parameter.is_cuda else parameter.dtype


def _operations(parameters: list[Tensor]) -> float:
    """What an iteration takes, up to a factor."""
    short, long = sorted((len(parameters[0]), parameters[0][0].numel()))
    return len(parameters) * short * short * (2 * long + short)


def _shares(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Which batches each rank computes: the next costly one goes to the rank that has least."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        least = loads.index(min(loads))
        shares[least].append(number)
        loads[least] += costs[number]
    return shares
