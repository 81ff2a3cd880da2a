"""Optimizers, learning-rate schedules, and the optimizer step: check, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.config.schema import ScheduleConfig
from ddp_train.custom import call
from ddp_train.data.loader import Batch
from ddp_train.distributed.session import from_all_ranks
from ddp_train.errors import NonFiniteLossError
from ddp_train.health import Position

Factor = Callable[[int], float]


def build_optimizer(parameters: Iterable[nn.Parameter], config: Any, implementation: str) -> Optimizer:
    """torch's own optimizer. implementation: loop, foreach or fused, as torch calls them."""
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if config.name == "custom":
        return call("optimizer", config, parameters)
    common = {"lr": config.lr, "weight_decay": config.weight_decay, "foreach": implementation == "foreach"}
    if implementation == "fused":
        common |= {"foreach": None, "fused": True}
    if config.name == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, nesterov=config.nesterov, **common)
    if config.name == "adadelta":
        return torch.optim.Adadelta(parameters, rho=config.rho, eps=config.eps, **common)
    if config.name == "rmsprop":
        return torch.optim.RMSprop(parameters, alpha=config.alpha, momentum=config.momentum, eps=config.eps, **common)
    cls = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return cls(parameters, betas=(config.beta1, config.beta2), eps=config.eps, **common)


def build_schedule(config: ScheduleConfig, total_steps: int) -> Factor:
    """The factor of the learning rate in optimizer step 0, 1, ... total_steps - 1: a function without state.

    Warm-up is linear and reaches the full rate after `warmup_steps`; the schedule proper runs over the steps after it.
    """
    warmup = config.warmup_steps
    main = _SCHEDULES[config.name](config, max(1, total_steps - warmup))
    return lambda step: (step + 1) / (warmup + 1) if step < warmup else main(step - warmup)


def _step(config: Any, steps: int) -> Factor:
    return lambda step: config.gamma ** (step // config.step_size)


def _cosine(config: Any, steps: int) -> Factor:
    """arXiv:1608.03983 without restarts; reaches final_factor one step after the last, as torch's does."""
    return lambda step: config.final_factor + (1 - config.final_factor) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _polynomial(config: Any, steps: int) -> Factor:
    return lambda step: config.final_factor + (1 - config.final_factor) * (1 - step / steps) ** config.power


def _one_cycle(config: Any, steps: int) -> Factor:
    """arXiv:1708.07120 with cosine flanks, as torch's OneCycleLR without the momentum cycle."""
    top, end = config.pct_start * steps - 1, steps - 1
    first = 1 / config.div_factor
    last = first / config.final_div_factor

    def between(start: float, stop: float, share: float) -> float:
        return stop + (start - stop) / 2 * (1 + math.cos(math.pi * min(max(share, 0.0), 1.0)))

    def factor(step: int) -> float:
        if step <= top:
            return between(first, 1, step / top if top > 0 else 1)
        return between(1, last, (step - top) / (end - top) if end > top else 1)

    return factor


_SCHEDULES: dict[str, Callable[[Any, int], Factor]] = {
    "constant": lambda config, steps: lambda step: 1.0,
    "step": _step,
    "cosine": _cosine,
    "polynomial": _polynomial,
    "one_cycle": _one_cycle,
}


class Stepper:
    """Backward passes and the optimizer step that ends them.

    A loss that is NaN or infinite on one rank must stop all ranks before the optimizer step. It makes that rank's
    gradients NaN, and the gradient exchange carries the news to every rank: agreement costs no collective, only a look
    at one gradient.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        factor: Factor,
        max_grad_norm: float | None,
        scaler: torch.amp.GradScaler,
        position: Position,
        any_may_lack: bool = False,
    ) -> None:
        """any_may_lack: some steps leave some parameters without a gradient: no single one can speak for all."""
        self.optimizer, self.factor, self.max_grad_norm, self.scaler = optimizer, factor, max_grad_norm, scaler
        self.position = position
        self.any_may_lack, self.witness = any_may_lack, nn.Parameter(requires_grad=False)
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.full_rates = [group.setdefault("initial_lr", group["lr"]) for group in optimizer.param_groups]
        self.losses: list[tuple[Tensor, Batch]] = []
        self.scaled = scaler.is_enabled()
        self.weights: dict[float, Tensor] = {}
        self.steps_done = 0
        self.continue_from(0)

    def continue_from(self, step: int) -> None:
        """`step` optimizer steps are done already."""
        self.steps_done = self.position.step = step
        self._set_learning_rate()

    def backward(self, loss: Tensor, batch: Batch) -> Tensor:
        """loss: the sum of the sample losses, or [replicas] of them. Returns it detached."""
        self.position.phase = "backward"
        seen = loss.detach()
        self.losses.append((seen, batch))
        weight = self._weight(seen, batch.share.scale)
        torch.autograd.backward((loss,), (self.scaler.scale(weight) if self.scaled else weight,))
        return seen

    def _weight(self, seen: Tensor, scale: float) -> Tensor:
        """What the backward pass starts from: `scale`, but NaN if the loss is not finite, so that all gradients are."""
        if not seen.is_cpu:
            return seen * 0 + scale  # looking at the loss would wait for the GPU
        weight = scale if math.isfinite(seen.item()) else math.nan
        if weight not in self.weights:  # making a tensor costs more than all the rest of this
            self.weights[weight] = torch.full_like(seen, weight)
        return self.weights[weight]

    def step(self) -> None:
        """One optimizer step. Raises NonFiniteLossError, on all ranks alike, if a loss or a gradient is not finite."""
        self.position.phase = "optimizer step"
        if self.scaled:
            self.scaler.unscale_(self.optimizer)
        if self.max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
            finite = math.isfinite(norm)
        else:
            finite = math.isfinite(self._gradient_to_ask())
        if not finite:
            self._explain()
        if self.scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.clear()
        self.steps_done += 1
        self.position.step = self.steps_done
        self._set_learning_rate()

    def _set_learning_rate(self) -> None:
        self.last_learning_rate = self.optimizer.param_groups[0]["lr"]
        factor = self.factor(self.steps_done)
        for group, full_rate in zip(self.optimizer.param_groups, self.full_rates, strict=True):
            group["lr"] = full_rate * factor

    def _gradient_to_ask(self) -> float:
        """A scalar that is finite if the gradients are: of the smallest of them, which costs least to read."""
        if self.any_may_lack:
            return nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]).item()
        if self.witness.grad is None:
            self.witness = min((p for p in self.parameters if p.grad is not None), key=Tensor.numel)
        assert self.witness.grad is not None
        return self.witness.grad.sum().item()

    def _explain(self) -> None:
        """Finds the guilty rank. Float16 gradients may overflow with finite losses: GradScaler skips that step."""
        good = all(bool(loss.isfinite().all()) for loss, _ in self.losses)
        verdicts = from_all_ranks(self.losses[0][0].new_tensor(float(good))).tolist()
        guilty = [rank for rank, verdict in enumerate(verdicts) if not verdict]
        if not guilty and self.scaled:
            return
        if guilty:
            bad = [batch.share.ids for loss, batch in self.losses if not loss.isfinite().all()]
            mine = f"; samples here: {bad[0].tolist()[:20]}" if bad else ""
            what = f"the loss is not finite on rank {', '.join(map(str, guilty))}"
        else:
            mine, what = "", "the gradients are not finite, though every rank's loss is"
        raise NonFiniteLossError(
            f"step {self.steps_done}: {what}{mine}",
            f"lower optimizer.lr={self.full_rates[0]:g}, clip with train.max_grad_norm=1, or look at those samples",
            rank=guilty[0] if guilty else None,
        )
