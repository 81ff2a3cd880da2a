"""Optimizers, learning-rate schedules, and the optimizer step: check, clip, update."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.config.schema import ScheduleConfig
from ddp_train.custom import call
from ddp_train.data.plan import Share
from ddp_train.distributed.session import from_all_ranks
from ddp_train.errors import NonFiniteLossError
from ddp_train.heartbeat import Position
from ddp_train.large_batch import Lamb, Lars
from ddp_train.metrics import RunningLoss, is_finite

log = logging.getLogger(__name__)

Factor = Callable[[int], float]


def build_optimizer(parameters: Iterable[nn.Parameter], config: Any, implementation: str) -> Optimizer:
    """torch's own optimizer, or LARS or LAMB. implementation: loop, foreach or fused, as torch calls them."""
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if config.name == "custom":
        return call("optimizer", config, parameters)
    groups = parameters if config.decay_norm_and_bias else without_decay_of_vectors(parameters)
    common = {"lr": config.lr, "weight_decay": config.weight_decay, "foreach": implementation == "foreach"}
    if implementation == "fused":
        common |= {"foreach": None, "fused": True}
    if config.name == "sgd":
        return torch.optim.SGD(groups, momentum=config.momentum, nesterov=config.nesterov, **common)
    if config.name == "adadelta":
        return torch.optim.Adadelta(groups, rho=config.rho, eps=config.eps, **common)
    if config.name == "rmsprop":
        return torch.optim.RMSprop(groups, alpha=config.alpha, momentum=config.momentum, eps=config.eps, **common)
    if config.name == "lars":
        trust = config.trust_coefficient
        return Lars(groups, momentum=config.momentum, trust_coefficient=trust, eps=config.eps, **common)
    common |= {"betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.name == "lamb":
        return Lamb(groups, max_trust_ratio=config.max_trust_ratio, **common)
    cls = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return cls(groups, **common)


def without_decay_of_vectors(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Groups of an optimizer: parameters of at most one dimension, which are norms and biases, do not decay.

    LARS and LAMB do not adapt their rate either; torch's optimizers pass over `layer_adaptation`.
    """
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1]},
        {
            "params": [parameter for parameter in parameters if parameter.ndim <= 1],
            "weight_decay": 0.0,
            "layer_adaptation": False,
        },
    ]
    return [group for group in groups if group["params"]]


def warmup_steps(config: ScheduleConfig, steps_per_epoch: int) -> int:
    """The optimizer steps of the warm-up, which may be given in epochs."""
    return config.warmup_steps if config.warmup_epochs is None else round(config.warmup_epochs * steps_per_epoch)


def build_schedule(config: ScheduleConfig, total_steps: int, steps_per_epoch: int) -> Factor:
    """The factor of the learning rate in optimizer step 0, 1, ... total_steps - 1: a function without state.

    Warm-up is linear and reaches the full rate after its steps; the schedule proper runs over the steps after it.
    """
    warmup = warmup_steps(config, steps_per_epoch)
    main = _SCHEDULES[config.name](config, max(1, total_steps - warmup))
    if not warmup:
        return main
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
    at one gradient. A gradient that is not finite though the loss is (sqrt at 0) may escape that look; the weights it
    spoils spoil the next loss, and `check_weights` keeps them out of every checkpoint.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        factor: Factor,
        max_grad_norm: float | None,
        scaler: torch.amp.GradScaler,
        position: Position,
        any_may_lack: bool = False,
        skip_non_finite: bool = False,
    ) -> None:
        """any_may_lack: some steps leave some parameters without a gradient: no single one can speak for all.
        skip_non_finite: a step with a loss that is not finite is left out with a warning, and training goes on."""
        self.skip_non_finite = skip_non_finite
        self.optimizer, self.factor, self.max_grad_norm, self.scaler = optimizer, factor, max_grad_norm, scaler
        self.position = position
        self.any_may_lack, self.witness = any_may_lack, nn.Parameter(requires_grad=False)
        self.witness_is_short = False
        """To be read without a kernel, which takes 3 us less."""
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.full_rates = [group.setdefault("initial_lr", group["lr"]) for group in optimizer.param_groups]
        self.losses = RunningLoss()
        self.scaled = scaler.is_enabled()
        self.constants: dict[float, Tensor] = {}
        self.steps_done = 0
        self.continue_from(0)

    def continue_from(self, step: int) -> None:
        """`step` optimizer steps are done already. After the optimizer's state was loaded, if it was."""
        self.steps_done = self.position.step = step
        self.rated = list(zip(self.optimizer.param_groups, self.full_rates, strict=True))

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the weights."""
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """The moments come from the checkpoint; rates, decay and implementation are those of this run's config."""
        own = self.optimizer.state_dict()
        self.optimizer.load_state_dict({**own, "state": state["optimizer"]["state"]})
        self.scaler.load_state_dict(state["scaler"])

    def backward(self, loss: Tensor, share: Share) -> None:
        """loss: the sum of the sample losses of a share, a scalar, or [replicas] of them.

        The backward pass starts from the share's scale, or from NaN if the loss is not finite.
        """
        self.position.phase = "backward"
        if loss.is_cpu:
            seen = loss.item()
            value = share.scale if math.isfinite(seen) else math.nan
            start = self.constants.get(value)
            if start is None:  # kept: making a tensor costs more than all the rest of this method
                start = self.constants[value] = torch.full_like(loss, value)
        else:  # looking at the loss would wait for the GPU
            seen = loss.detach()
            start = seen * 0 + share.scale
        self.losses.add(seen, share)
        torch.autograd.backward((loss,), (self.scaler.scale(start) if self.scaled else start,))

    def step(self) -> None:
        """One optimizer step. Raises NonFiniteLossError, on all ranks alike, if a loss is not finite."""
        self.position.phase = "optimizer step"
        if self.scaled:
            self.scaler.unscale_(self.optimizer)
        if self.max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
            finite = math.isfinite(norm)
        else:
            finite = math.isfinite(self._gradient_to_ask())
        skipped = not finite and self._is_skipped()
        factor = self.factor(self.steps_done)
        for group, full_rate in self.rated:
            group["lr"] = full_rate * factor
        if self.scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif not skipped:
            self.optimizer.step()
        for parameter in self.parameters:  # as optimizer.zero_grad(), which takes 20 us for four parameters, and this 1
            parameter.grad = None
        self.steps_done += 1
        self.position.step = self.steps_done

    @property
    def last_learning_rate(self) -> float:
        """Of the step that was done last, in the first group."""
        return self.full_rates[0] * self.factor(self.steps_done - 1)

    def _gradient_to_ask(self) -> float:
        """A scalar that is not finite if a loss was not: of the smallest gradient, which costs least to read."""
        if self.any_may_lack:
            return nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]).item()
        gradient = self.witness.grad
        if gradient is None:
            self.witness = min((p for p in self.parameters if p.grad is not None), key=Tensor.numel)
            gradient = self.witness.grad
            assert gradient is not None
            self.witness_is_short = gradient.is_cpu and gradient.ndim == 1 and len(gradient) <= 64
        return sum(gradient.tolist()) if self.witness_is_short else gradient.sum().item()

    def check_weights(self) -> None:
        """Raises NonFiniteLossError if a weight is not finite. Waits for the device: for checkpoints, not for steps."""
        if not math.isfinite(nn.utils.get_total_norm(self.parameters)):
            raise self._error(f"after step {self.steps_done} the weights are not finite", rank=None)

    def _is_skipped(self) -> bool:
        """Finds the guilty rank, and what is to be done. Raises NonFiniteLossError unless such steps are left out.

        Float16 gradients may overflow with finite losses: GradScaler skips that step by itself.
        """
        seen = self.losses.of_step(self.steps_done)
        good = all(is_finite(loss) for loss, _ in seen)
        verdicts = from_all_ranks(torch.tensor(float(good), device=self.parameters[0].device)).tolist()
        guilty = [rank for rank, verdict in enumerate(verdicts) if not verdict]
        if not guilty and self.scaled:
            return True
        if guilty:
            bad = [share.ids for loss, share in seen if not is_finite(loss)]
            mine = f"; samples here: {bad[0].tolist()[:20]}" if bad else ""
            what = f"the loss is not finite on rank {', '.join(map(str, guilty))}"
        else:
            mine, what = "", "the gradients are not finite, though every rank's loss is"
        error = self._error(f"step {self.steps_done}: {what}{mine}", rank=guilty[0] if guilty else None)
        if not self.skip_non_finite:
            raise error
        log.warning("%s; the step is skipped (train.on_non_finite=skip)", error)
        self.losses.forget(self.steps_done)
        return True

    def _error(self, detail: str, rank: int | None) -> NonFiniteLossError:
        remedy = f"lower optimizer.lr={self.full_rates[0]:g}, clip with train.max_grad_norm=1, or look at those samples"
        return NonFiniteLossError(detail, remedy, rank)
