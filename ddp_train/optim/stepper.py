"""Backward passes, and the optimizer step that ends them: check, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.errors import ConfigError
from ddp_train.optim.ema import WeightAverage
from ddp_train.optim.nan_guard import DeviceNonFiniteCheck, NonFiniteCheck
from ddp_train.optim.schedules.schedule import Schedule
from ddp_train.plain_state import plain_state
from ddp_train.tasks.logged_numbers import LoggedNumbers
from ddp_train.tasks.mean_loss import ExtraPayload, Mean, RunningLoss
from ddp_train.text import see_page


class StepObserver:
    """Called at four points of each step, on every process; a subclass overrides those it needs.

    An observer must not hold the stepper, or anything else that refers to the wrapped model: DDP
    must be freed before its process group is closed.
    """

    def before_backward(self, loss: Tensor, units: Tensor | None, micro_batch: MicroBatch) -> None:
        """Called before each backward pass, with the arguments of `Stepper.backward`."""

    def after_backward(self, micro_batch: MicroBatch) -> None:
        """Called after each; behind the last one of a step DDP has exchanged the gradients."""

    def before_update(self) -> None:
        """Called before gradients are unscaled, divided by the units and clipped.

        For the gradients of the mean use `optimizer.register_step_pre_hook`.
        """

    def after_update(self, steps_done: int) -> None:
        """Called after the optimizer step, which `steps_done` includes."""


class StateCopies(Protocol):
    """Copies of weights and moments that may still be made when the next update is queued."""

    def before_update(self) -> None:
        """Let the update wait for them, on the device. A captured step waits in each replay."""
        ...


@dataclass(frozen=True)
class UpdateRules:
    """Rules for gradients between the backward passes and the update."""

    mean_of_units: Callable[[Tensor], Callable[[], Tensor]] = lambda scaled: scaled.sum
    """Begins the exchange of a step's number of units; see `Strategy`."""
    check_gradients: Callable[[], None] = lambda: None
    """Called before the update; see `Strategy`."""
    max_grad_norm: float | None = None
    """The norm that gradients are clipped to."""
    allow_missing_grads: bool = False
    """Parameters may have no gradient in a step, so one gradient is no proxy for all."""
    most_skipped: int | None = None
    """A step whose loss is not finite is skipped with a warning, and training continues until so
    many in a row are; None: the first one ends it."""


class Stepper:
    """Backward passes and the optimizer step that ends them."""

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule,
        scaler: torch.amp.GradScaler,
        rules: UpdateRules = UpdateRules(),
        average: WeightAverage | None = None,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        """Take over an optimizer.

        schedule: of this optimizer.
        average: average of the weights that is updated in each step.
        observers: called in this order.
        """
        self.optimizer = optimizer
        self.schedule = schedule
        self.scaler = scaler
        self.rules = rules
        self.average = average
        self.observers = list(observers)
        groups = optimizer.param_groups
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.base_lrs = [group.setdefault("initial_lr", group["lr"]) for group in groups]
        self.device = str(self.parameters[0].device)
        self.losses = RunningLoss()
        self.logged = LoggedNumbers(self.device)
        """Numbers that the user's code logs."""
        self.scaled = scaler.is_enabled()
        self.check_finite = self._build_check()
        self.constants: dict[float, Tensor] = {}
        self.scaled_units: list[Tensor] = []
        self.divisor: Callable[[], Tensor] | None = None
        self.norm: Tensor | None = None
        self.steps_done = 0
        self.copies: StateCopies | None = None
        """Copies of the state that are made beside the next step."""
        self.travelling: list[ExtraPayload] = []
        """Numbers that travel with each exchange of losses."""
        self.values = schedule.values(0)
        self.rates_set = self.rates_now()
        self.continue_from(0)

    def _build_check(self) -> NonFiniteCheck:
        rules = self.rules
        if rules.allow_missing_grads or rules.most_skipped is not None or self.device == "cpu":
            reads_flag = False
        else:  # torch's fused optimizers, and ours
            reads_flag = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        if reads_flag:
            return DeviceNonFiniteCheck(self.optimizer, self.losses, self.scaled)
        return NonFiniteCheck(
            self.optimizer,
            self.losses,
            self.scaled,
            rules.allow_missing_grads,
            rules.most_skipped,
        )

    def continue_from(self, step: int) -> None:
        """Set the number of optimizer steps that are done; after `load_state`, if that is
        called."""
        self.steps_done = step
        if step:  # a checkpoint of this very step has the learning rates of the last one
            self.set_values(step - 1)

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint must hold beside the weights.

        Raises StateError if the optimizer's is no plain data.
        """
        return {
            "optimizer": plain_state(
                self.optimizer.state_dict(), "the state_dict of the optimizer"
            ),
            "scaler": self.scaler.state_dict(),
            "gradient_norm": self.norm,
            "logged": self.logged.state(),
            "skipped": [self.check_finite.skipped, self.check_finite.skipped_in_a_row],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take moments from a checkpoint; learning rates, decay and implementation stay those of
        this run's config."""
        own = self.optimizer.state_dict()
        self.optimizer.load_state_dict({**own, "state": state["optimizer"]["state"]})
        for parameter, moments in self.optimizer.state.items():
            for name, moment in moments.items():
                # The run that saved them may have had another memory format.
                if torch.is_tensor(moment) and moment.shape == parameter.shape:
                    like = torch.empty_like(parameter, dtype=moment.dtype, device=moment.device)
                    moments[name] = like.copy_(moment)
        self.scaler.load_state_dict(state["scaler"])
        self.logged.load_state(state.get("logged", ()))
        skipped = state.get("skipped", (0, 0))
        self.check_finite.skipped = skipped[0]
        self.check_finite.skipped_in_a_row = skipped[1]
        self.norm = state["gradient_norm"]
        if self.norm is not None:
            self.norm = self.norm.to(self.device)

    def backward(self, loss: Tensor, units: Tensor | None, micro_batch: MicroBatch) -> None:
        """Run a backward pass, from the micro-batch's scale, or from NaN if the loss is not finite.

        loss: sum of the losses of the micro-batch, a scalar, or [replicas] of them.
        units: their number, likewise, float64; None if they are the samples, whose number the plan
            knows.
        """
        for observer in self.observers:
            observer.before_backward(loss, units, micro_batch)
        if self.logged.pending:
            self.logged.count_pass(micro_batch.step, counts=micro_batch.num_real > 0)
        self._backward(loss, units, micro_batch)
        for observer in self.observers:
            observer.after_backward(micro_batch)

    def _backward(self, loss: Tensor, units: Tensor | None, micro_batch: MicroBatch) -> None:
        self.count(units, micro_batch.scale, micro_batch.is_last)
        if loss.is_cpu:
            seen = loss.item()
            value = micro_batch.scale if math.isfinite(seen) else math.nan
            start = self.constants.get(value)
            if start is None:  # kept: making a tensor costs more than all the rest of this method
                start = self.constants[value] = torch.full_like(loss, value)
            self.check_finite.poison.zero = None if value == micro_batch.scale else start
        else:  # looking at the loss would wait for the GPU
            # A compiled model with CUDA graphs of its own writes the next loss there.
            seen = loss.detach().clone()
            start = self.start(seen, micro_batch.scale)
        self.losses.add(seen, self.units_seen(units, micro_batch), micro_batch)
        torch.autograd.backward((loss,), (self.scaler.scale(start) if self.scaled else start,))

    def start(self, loss: Tensor, scale: float | Tensor) -> Tensor:
        """Gradient that a backward pass on a GPU starts from: `scale`, or NaN where the loss is not
        finite."""
        zero = loss * 0
        self.check_finite.poison.zero = zero if zero.ndim == 0 else zero.sum()  # of replicas
        return zero + scale

    def count(self, units: Tensor | None, scale: float | Tensor, is_last: bool) -> None:
        """Begin the exchange of a step's number of units, beside the backward pass that follows."""
        if units is not None:
            self.scaled_units.append(units.sum() * scale)
            if is_last:
                self.divisor = self.rules.mean_of_units(torch.stack(self.scaled_units))
                self.scaled_units.clear()

    @staticmethod
    def units_seen(units: Tensor | None, micro_batch: MicroBatch) -> float | Tensor:
        """Number of units for the mean loss that is reported; a stand-in has none."""
        if units is None:
            return micro_batch.num_real
        if units.is_cpu:
            return units.item() if micro_batch.num_real else 0
        return units.clone() if micro_batch.num_real else torch.zeros_like(units)

    def step(self) -> None:
        """Do one optimizer step.

        Raises NonFiniteLossError, on all ranks alike, if a loss is not finite; on a GPU with a
        fused optimizer it is `mean_loss` that raises it.
        """
        for observer in self.observers:
            observer.before_update()
        self._step()
        for observer in self.observers:
            observer.after_update(self.steps_done)

    def _step(self) -> None:
        self.follow_schedule()
        self.update()
        self.steps_done += 1

    def follow_schedule(self) -> None:
        """Set the learning rates of the step that comes next.

        Raises ConfigError if somebody else has changed them.
        """
        if self.rates_now() != self.rates_set:
            raise ConfigError([self._change_of_rates()])
        self.set_values(self.steps_done)

    def set_values(self, step: int) -> None:
        """Set every group of the optimizer to what the schedule says of a step."""
        self.values = self.schedule.values(step)
        self.rates_set = rates = []
        for group, values in zip(self.optimizer.param_groups, self.values, strict=True):
            group.update(values)
            rates.append(values["lr"])

    def rates_now(self) -> list[Any]:
        """The learning rate of each group, or what tells that it was changed."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def _change_of_rates(self) -> str:
        groups = self.optimizer.param_groups
        if len(groups) != len(self.values):
            return (
                f"optimizer.param_groups has {len(groups)} groups before step"
                f" {self.steps_done + 1}, but had {len(self.values)} when training began, and the"
                " schedule sets no rates for new groups; to train some parameters later use"
                " model.freeze=[head.*] model.freeze_epochs=1"
            )
        pairs = zip(self.rates_now(), self.rates_set, strict=True)
        place = next(place for place, (now, then) in enumerate(pairs) if now != then)
        return (
            f"optimizer.param_groups[{place}]['lr'] is {float(groups[place]['lr']):g} before step"
            f" {self.steps_done + 1}, but the schedule had set {self.values[place]['lr']:g}; a"
            " hook, or a scheduler on job.optimizer, has changed the rate, and the schedule"
            " would overwrite the change; use schedule._target_=package.function, called with"
            f" (step, steps), or one of torch's schedulers{see_page('Optimizers and schedules')}"
        )

    def update(self) -> None:
        """Make new weights from the gradients, and drop those: check, clip, step."""
        if self.copies:
            self.copies.before_update()
        if self.scaled:
            self.scaler.unscale_(self.optimizer)
        self.norm = None
        if self.divisor:
            self._divide_gradients(self.divisor())
            self.divisor = None
        elif self.rules.max_grad_norm is not None:
            self.norm = nn.utils.clip_grad_norm_(self.parameters, self.rules.max_grad_norm)
        allowed = self.check_finite.allows(self.steps_done, self.norm)
        # not before: zeros that it fills in are finite though the loss is not
        self.rules.check_gradients()
        if self.scaled:
            self.scaler.step(self.optimizer)
            if self.average:
                found = self.scaler._found_inf_per_device(self.optimizer)  # forgotten by `update`
                self.average.update(skipped=next(iter(found.values())))
            self.scaler.update()
        elif allowed:
            self.optimizer.step()
            if self.average:
                self.average.update()
        else:
            self.logged.forget(self.steps_done)
        # As optimizer.zero_grad(), which takes 20 us for four parameters, and this 1.
        for parameter in self.parameters:
            parameter.grad = None

    def _divide_gradients(self, units: Tensor) -> None:
        """Make gradients of sums those of means, and clip them, in one pass over them.

        A global batch without units leaves zeros.
        """
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        dtype = gradients[0].dtype
        limit = self.rules.max_grad_norm
        factor = torch.where(units == 0, 0.0, 1 / units)
        if limit is not None:  # as clip_grad_norm_
            self.norm = nn.utils.get_total_norm(gradients) * factor.to(dtype)
            factor = factor * (limit / (self.norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor.to(dtype))  # pyright: ignore[reportPrivateImportUsage]

    def mean_loss(self, *further: ExtraPayload) -> Mean:
        """The mean loss since the last call, over all units of all processes; without units if all
        steps were skipped. Waits for the device.

        further: sent along with the losses.

        Raises NonFiniteLossError if a loss was not finite.
        """
        extras = [*further, *self.travelling]
        check = self.check_finite.to_exchange(self.steps_done)
        if check is not None:
            extras.insert(0, check)  # it may raise: the others then keep what they have
        return self.losses.mean(self.device, extras)

    def check(self) -> None:
        """Raise NonFiniteLossError if a loss was not finite, or a weight is not: before a
        checkpoint."""
        self.check_finite.check_losses(self.steps_done)
        self.check_finite.check_weights(self.steps_done)

    def close(self) -> None:
        """Free what was captured: after the last step, before the process group is closed."""

    @property
    def last_learning_rate(self) -> float:
        """Learning rate of the last step, in the first group."""
        return self.last_learning_rates[0]

    @property
    def last_learning_rates(self) -> list[float]:
        """Learning rate of the last step, in each group."""
        return [values["lr"] for values in self.values]

    @property
    def last_gradient_norm(self) -> float | None:
        """Gradient norm of the last step, before clipping; None without clipping. Waits for the
        device."""
        return None if self.norm is None else self.norm.item()
