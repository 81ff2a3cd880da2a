"""Finds a loss that is NaN or infinite on any rank, keeps it out of the weights, and names rank,
step and samples.

`Stepper.backward` turns such a loss into NaN gradients, and the gradient exchange spreads them to
every rank. So all ranks agree without a collective of their own: each looks at one gradient, to
which a hook brings the NaN whatever lies between. Gradients that are not finite although the loss
is (sqrt at 0) can escape that look; they make the weights non-finite, the next loss shows it, and
such weights are never saved.
"""

from __future__ import annotations

import logging
import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.distributed.connections import StopFlag
from ddp_train.distributed.process_group import from_all_ranks
from ddp_train.errors import NonFiniteLossError, PeersLostError
from ddp_train.tasks.mean_loss import ExtraPayload, RunningLoss, is_finite

log = logging.getLogger(__name__)


class Poison:
    """A hook of a parameter: makes its gradient NaN where the loss is not finite. The backward pass
    alone does not: a ReLU that lets nothing through gives zero for NaN. Knows no parameter, and so
    keeps none alive."""

    def __init__(self) -> None:
        self.zero: Tensor | None = None
        """The loss times zero, a scalar; None if the loss is known to be finite."""

    def __call__(self, gradient: Tensor) -> Tensor | None:
        if self.zero is None:
            return None
        return gradient * (self.zero + 1).to(gradient.dtype)


class NonFiniteCheck:
    """Looks at a gradient on the host before every step, which on a GPU waits for the device."""

    def __init__(
        self,
        optimizer: Optimizer,
        losses: RunningLoss,
        scaled: bool = False,
        allow_missing_grads: bool = False,
        skip: bool = False,
    ) -> None:
        """losses: of the steps since the last logging interval. scaled: a GradScaler skips steps
        that overflow. allow_missing_grads: parameters may have no gradient in a step, so one
        gradient is no proxy for all. skip: a step with such a loss is skipped with a warning, and
        training continues."""
        self.losses = losses
        self.scaled = scaled
        self.allow_missing_grads = allow_missing_grads
        self.skip = skip
        self.parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        self.base_lr = optimizer.param_groups[0]["initial_lr"]
        self.peers: StopFlag | None = None
        """Says that gradients may be what an aborted exchange left."""
        self.poison = Poison()
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        self.sentinel = min(trained or self.parameters, key=Tensor.numel)
        """The parameter whose gradient is looked at: the smallest."""
        self.hooked = self.sentinel.register_hook(self.poison) if trained else None

    def allows(self, step: int, norm: Tensor | None) -> bool:
        """Whether the optimizer step may be taken. norm: of all gradients, if it is known.

        Raises NonFiniteLossError, on all ranks alike, if a loss is not finite and such steps are
        not skipped, and PeersLostError if peers are lost.
        """
        scalar = norm.item() if norm is not None else self._scalar_to_check()
        if (
            self.peers and self.peers.is_set
        ):  # asked when the exchange is over, which was aborted after it was set
            raise PeersLostError
        return math.isfinite(scalar) or self._is_overflow(step)

    def steps_taken(self, steps_done: int) -> int:
        """Of the optimizer steps that the host has done so far, those that have changed the
        weights."""
        return steps_done

    def check_losses(self, steps_done: int) -> None:
        """Raises NonFiniteLossError if `allows` let a non-finite loss pass in any step so far. May
        wait for the device."""

    def to_exchange(self, steps_done: int) -> ExtraPayload | None:
        """What does the same as `check_losses` in an exchange of others; None if there is nothing
        to check."""

    def check_weights(self, steps_done: int) -> None:
        """Raises NonFiniteLossError if a weight is not finite. Waits for the device: for
        checkpoints, not for steps."""
        if not math.isfinite(nn.utils.get_total_norm(self.parameters)):
            raise self._error(
                f"after step {steps_done} the weights are not finite", steps_done, None
            )

    def _scalar_to_check(self) -> float:
        """A scalar that is not finite if a loss was not: of the smallest gradient, which costs
        least to read."""
        if self.allow_missing_grads:
            return nn.utils.get_total_norm(
                [p.grad for p in self.parameters if p.grad is not None]
            ).item()
        gradient = self.gradient_to_check()
        if (
            gradient.is_cpu and gradient.ndim == 1 and len(gradient) <= 64
        ):  # without a kernel, which takes 3 us more
            return sum(gradient.tolist())
        return gradient.sum().item()

    def gradient_to_check(self) -> Tensor:
        """Of the sentinel. Where no loss depends on that one, another takes its place from the next
        step on."""
        if self.sentinel.grad is None:
            self.sentinel = min(
                (p for p in self.parameters if p.grad is not None), key=Tensor.numel
            )
            if self.hooked:
                self.hooked.remove()
            self.hooked = self.sentinel.register_hook(self.poison)
        return cast(Tensor, self.sentinel.grad)

    def _is_overflow(self, step: int) -> bool:
        """What to do about gradients that are not finite: True leaves the step to the GradScaler,
        which sees that float16 overflowed; False skips it."""
        if self.scaled and not self._culprits(step):
            return True
        error = self._explain(step)
        if not self.skip:
            raise error
        log.warning("%s; the step is skipped (train.on_non_finite=skip)", error)
        self.losses.forget(step)
        return False

    def _culprits(self, step: int) -> list[int]:
        """The ranks whose loss was not finite in a step."""
        good = all(is_finite(loss) for loss, _, _ in self.losses.of_step(step))
        verdicts = from_all_ranks(
            torch.tensor(float(good), device=self.parameters[0].device)
        ).tolist()
        return [rank for rank, verdict in enumerate(verdicts) if not verdict]

    def _explain(self, step: int) -> NonFiniteLossError:
        culprits = self._culprits(step)
        seen = self.losses.of_step(step)
        bad = [micro_batch.indices for loss, _, micro_batch in seen if not is_finite(loss)]
        mine = f"; samples here: {bad[0].tolist()[:20]}" if bad else ""
        what = "the gradients are not finite, though every rank's loss is"
        if culprits:
            what = f"the loss is not finite on rank {', '.join(map(str, culprits))}"
        return self._error(f"step {step}: {what}{mine}", step, culprits[0] if culprits else None)

    def _error(self, detail: str, step: int, rank: int | None) -> NonFiniteLossError:
        remedy = (
            f"lower optimizer.lr={self.base_lr:g}, clip with train.max_grad_norm=1, or look at"
            " those samples"
        )
        if step == 0:  # nothing has been learned yet
            remedy = f"look for NaN in the inputs and targets of those samples; else {remedy}"
        return NonFiniteLossError(detail, remedy, rank, step)


class DeviceNonFiniteCheck(NonFiniteCheck):
    """Looks at a gradient on the GPU, and keeps the result there until the host reads the losses:
    no step waits.

    From the first bad step on a flag on the device stops the optimizer, a fused one, which reads it
    as it reads that of a GradScaler: the weights stay those before that step, however late the host
    learns of it. With a GradScaler, which resets its flag, only the bad steps themselves are
    skipped.
    """

    def __init__(self, optimizer: Optimizer, losses: RunningLoss, scaled: bool = False) -> None:
        super().__init__(optimizer, losses, scaled)
        device = self.parameters[0].device
        self.stopped = torch.zeros((), device=device)
        self.one = torch.ones((), device=device)
        self.steps_skipped = torch.zeros((), device=device)
        self.steps_done = 0
        """By the host, when the flag was read last."""
        if not scaled:
            optimizer.found_inf = self.stopped  # pyright: ignore[reportAttributeAccessIssue]

    def allows(self, step: int, norm: Tensor | None) -> bool:
        if not self.scaled:
            checked = norm if norm is not None else self.gradient_to_check()
            # What GradScaler does, with a scale of one: sets the flag if a number is not finite,
            # and never resets it.
            torch._amp_foreach_non_finite_check_and_unscale_(  # pyright: ignore[reportPrivateImportUsage]
                [checked], self.stopped, self.one
            )
            if self.peers:  # looked at once, after the exchange: the whole update does as it says
                torch.maximum(self.stopped, self.peers.on_device, out=self.stopped)
            self.steps_skipped.add_(self.stopped)
        return True

    def steps_taken(self, steps_done: int) -> int:
        """Waits for the device."""
        return steps_done - int(self.steps_skipped)

    def check_losses(self, steps_done: int) -> None:
        (flag,) = self.to_exchange(steps_done).collect()
        self.deliver([[one] for one in from_all_ranks(flag).tolist()])

    def to_exchange(self, steps_done: int) -> DeviceNonFiniteCheck:
        self.steps_done = steps_done
        return self

    def collect(self) -> list[Tensor]:
        """A scalar that says whether a step so far had a non-finite loss."""
        if self.scaled and self.losses.passes:
            seen = torch.cat([torch.as_tensor(loss).view(-1) for loss, _, _ in self.losses.passes])
            return [seen.sum(dtype=torch.float64).to(self.one.device)]
        # The same on all ranks, as the exchanged gradients are. Exchanged all the same: NCCL
        # watches no collective of a replayed graph, but under torchrun it ends this one after
        # launch.timeout_seconds if a rank hangs.
        return [self.steps_skipped]

    def deliver(self, of_ranks: list[list[float]]) -> None:
        """Raises NonFiniteLossError if the scalar of one rank says so."""
        flags = [flag for (flag,) in of_ranks]
        bad = self.steps_done
        if not self.scaled:
            bad -= int(max(flags))
        elif not all(map(math.isfinite, flags)):
            first_bad = torch.tensor(self.losses.first_bad_step(never=bad), device=self.one.device)
            bad = int(from_all_ranks(first_bad).min())
        if bad < self.steps_done:
            raise self._explain(bad)
