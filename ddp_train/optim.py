"""Optimizers, learning-rate schedules, and the optimizer step: check, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train import fused
from ddp_train.config.schema import ScheduleConfig
from ddp_train.custom import call
from ddp_train.data.plan import Share
from ddp_train.guard import DeviceGuard, Guard
from ddp_train.heartbeat import Position
from ddp_train.large_batch import Lamb, Lars
from ddp_train.metrics import Along, RunningLoss

Factor = Callable[[int], float]


def build_optimizer(
    parameters: Iterable[nn.Parameter], config: Any, implementation: str, recorded: bool = False
) -> Optimizer:
    """torch's own optimizer, or LARS or LAMB. implementation: loop, foreach or fused, as torch calls them. recorded:
    its steps are recorded and replayed, so that they may take the host longer."""
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if config.name == "custom":
        return call("optimizer", config, parameters)
    groups = parameters if config.decay_norm_and_bias else without_decay_of_vectors(parameters)
    common = {"lr": config.lr, "weight_decay": config.weight_decay, "foreach": implementation == "foreach"}
    if implementation == "fused":
        common |= {"foreach": None, "fused": True}
    in_parts = recorded and implementation == "fused" and len({parameter.dtype for parameter in parameters}) == 1
    torchs = fused if in_parts else torch.optim
    if config.name == "sgd":
        sgd = torchs.SGD(groups, momentum=config.momentum, nesterov=config.nesterov, **common)
        if implementation == "fused" and config.momentum:
            # Where a GradScaler leaves out the first step, as float16 often needs it, torch's kernel leaves the new
            # buffers unwritten: ResNet-50 had a loss of NaN in step 2. From zeros the first step is the same.
            for parameter in parameters:
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return sgd
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
    cls = torchs.AdamW if config.name == "adamw" else torchs.Adam
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
    """Backward passes and the optimizer step that ends them."""

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
        """any_may_lack, skip_non_finite: see `guard.Guard`."""
        self.optimizer, self.factor, self.max_grad_norm, self.scaler = optimizer, factor, max_grad_norm, scaler
        self.position = position
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.full_rates = [group.setdefault("initial_lr", group["lr"]) for group in optimizer.param_groups]
        self.device = str(self.parameters[0].device)
        self.losses = RunningLoss()
        self.scaled = scaler.is_enabled()
        watched = self.losses, position, self.scaled
        reads_flags = getattr(optimizer, "_step_supports_amp_scaling", False)  # torch's fused ones, and ours
        if reads_flags and self.device != "cpu" and not (any_may_lack or skip_non_finite):
            self.guard: Guard = DeviceGuard(optimizer, *watched)
        else:
            self.guard = Guard(optimizer, *watched, any_may_lack, skip_non_finite)
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
        for parameter, moments in self.optimizer.state.items():
            for name, moment in moments.items():  # the run that saved them may have had another memory format
                if torch.is_tensor(moment) and moment.shape == parameter.shape:
                    like = torch.empty_like(parameter, dtype=moment.dtype, device=moment.device)
                    moments[name] = like.copy_(moment)
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
            seen = loss.detach().clone()  # a compiled model with CUDA graphs of its own writes the next loss there
            start = seen * 0 + share.scale
        self.losses.add(seen, share)
        torch.autograd.backward((loss,), (self.scaler.scale(start) if self.scaled else start,))

    def step(self) -> None:
        """One optimizer step. Raises NonFiniteLossError, on all ranks alike, if a loss is not finite; on a GPU with a
        fused optimizer it is `mean_loss` that raises it."""
        self.position.phase = "optimizer step"
        self.set_rates(self.factor(self.steps_done))
        self.update()
        self.count_step()

    def set_rates(self, factor: float) -> None:
        """Of all groups: their full rate times `factor`."""
        for group, full_rate in self.rated:
            group["lr"] = full_rate * factor

    def update(self) -> None:
        """From the gradients to new weights: check, clip, step. No gradients are left."""
        if self.scaled:
            self.scaler.unscale_(self.optimizer)
        limit = self.max_grad_norm
        norm = None if limit is None else nn.utils.clip_grad_norm_(self.parameters, limit)
        allowed = self.guard.allows(self.steps_done, norm)
        if self.scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif allowed:
            self.optimizer.step()
        for parameter in self.parameters:  # as optimizer.zero_grad(), which takes 20 us for four parameters, and this 1
            parameter.grad = None

    def count_step(self) -> None:
        """One more is done."""
        self.steps_done += 1
        self.position.step = self.steps_done

    def mean_loss(self, along: Along | None = None) -> float:
        """The mean loss per sample since the last call, over all processes, NaN if all steps were skipped. Raises
        NonFiniteLossError if a loss was not finite. Waits for the device. along: what travels with the losses."""
        self.guard.look(self.steps_done)
        return self.losses.mean(self.device, along)

    def check(self) -> None:
        """Raises NonFiniteLossError if a loss was not finite, or a weight is not: before a checkpoint."""
        self.guard.look(self.steps_done)
        self.guard.check_weights(self.steps_done)

    @property
    def last_learning_rate(self) -> float:
        """Of the step that was done last, in the first group."""
        return self.full_rates[0] * self.factor(self.steps_done - 1)
