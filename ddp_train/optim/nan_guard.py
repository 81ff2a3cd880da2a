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
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.distributed.process_group import from_all_ranks
from ddp_train.errors import NonFiniteLossError
from ddp_train.tasks.mean_loss import ExtraPayload, RunningLoss, is_finite
from ddp_train.text import counted

SHOWN_SAMPLES = 20
"""Most samples that an error names."""
log = logging.getLogger(__name__)


class Poison:
    """A hook of a parameter: makes its gradient NaN where the loss is not finite.

    The backward pass alone does not: a ReLU that lets nothing through gives zero for NaN. The hook
    does not refer to its parameter, and so does not keep it alive.
    """

    def __init__(self) -> None:
        self.zero: Tensor | None = None
        """The loss times zero, a scalar; None if the loss is known to be finite."""

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        # torch's SyncBatchNorm gives none to a process whose batch is empty, and whose loss is 0.
        if self.zero is None or gradient is None:
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
        most_skipped: int | None = None,
    ) -> None:
        """Watch the parameters of an optimizer.

        losses: of the steps since the last logging interval.
        scaled: a GradScaler skips steps that overflow.
        allow_missing_grads: parameters may have no gradient in a step, so one gradient is no proxy
            for all.
        most_skipped: a step with such a loss is skipped with a warning, and training continues
            until so many in a row are; None: the first one ends it.
        """
        self.losses = losses
        self.scaled = scaled
        self.allow_missing_grads = allow_missing_grads
        self.most_skipped = most_skipped
        self.skipped = 0
        """Steps of the run that were skipped."""
        self.skipped_in_a_row = 0
        """Those of them since the last step that was taken."""
        groups = optimizer.param_groups
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.base_lr = groups[0]["initial_lr"]
        self.non_finite_samples: Callable[[MicroBatch], list[int]] | None = None
        """Finds the samples whose data are not finite; None: it is not known where they come
        from."""
        self.poison = Poison()
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        self.sentinel = min(trained or self.parameters, key=Tensor.numel)
        """The parameter whose gradient is looked at: the smallest."""
        self.hooked = self.sentinel.register_hook(self.poison) if trained else None

    def allows(self, step: int, norm: Tensor | None) -> bool:
        """Whether the optimizer step may be taken, or is left to a GradScaler to skip.

        norm: of all gradients, if it is known.

        Raises NonFiniteLossError, on all ranks alike, if a loss is not finite and such steps are
        not skipped, or if too many in a row were.
        """
        scalar = norm.item() if norm is not None else self._scalar_to_check()
        if math.isfinite(scalar):
            self.skipped_in_a_row = 0
            return True
        culprits = self._culprits(step)
        if self.scaled and not culprits:
            return True  # float16 overflowed
        error = self._error_of_step(step, culprits)
        if self.most_skipped is None:
            raise error
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.most_skipped:
            raise _too_many_skipped(error, self.skipped_in_a_row)
        log.warning("%s; the step is skipped (train.on_non_finite=skip)", error)
        self.losses.forget(step)
        return False

    def check_losses(self, steps_done: int) -> None:
        """Raise NonFiniteLossError if `allows` let a non-finite loss pass in any step so far. May
        wait for the device."""

    def to_exchange(self, steps_done: int) -> ExtraPayload | None:
        """A payload that does the same as `check_losses` in an exchange of others; None if there is
        nothing to check."""

    def check_weights(self, steps_done: int) -> None:
        """Raise NonFiniteLossError if a weight, or the norm of all, is not finite. Waits for the
        device: for checkpoints, not for steps."""
        if not math.isfinite(nn.utils.get_total_norm(self.parameters)):
            detail = f"after step {steps_done} the weights or their norm are not finite"
            remedy = f"lower optimizer.lr={self.base_lr:g}, or clip with train.max_grad_norm=1"
            raise NonFiniteLossError(detail, remedy, None, steps_done)

    def _scalar_to_check(self) -> float:
        """A scalar that is not finite if a loss was not: from the smallest gradient, which costs
        least to read."""
        if self.allow_missing_grads:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            return nn.utils.get_total_norm(gradients).item()
        gradient = self.gradient_to_check()
        # Without a kernel, which takes 3 us more.
        if gradient.is_cpu and gradient.ndim == 1 and len(gradient) <= 64:
            return sum(gradient.tolist())
        return gradient.sum().item()

    def gradient_to_check(self) -> Tensor:
        """The gradient of the sentinel. Where no loss depends on that one, another takes its place
        from the next step on."""
        gradient = self.sentinel.grad
        if gradient is None:
            known = [parameter for parameter in self.parameters if parameter.grad is not None]
            self.sentinel = min(known, key=Tensor.numel)
            if self.hooked:
                self.hooked.remove()
            self.hooked = self.sentinel.register_hook(self.poison)
            gradient = self.sentinel.grad
            assert gradient is not None
        return gradient

    def _culprits(self, step: int) -> list[int]:
        """The ranks whose loss was not finite in a step. A collective."""
        good = all(is_finite(loss) for loss, _, _ in self.losses.of_step(step))
        verdict = torch.tensor(float(good), device=self.parameters[0].device)
        verdicts = from_all_ranks(verdict).tolist()
        return [rank for rank, is_good in enumerate(verdicts) if not is_good]

    def _error_of_step(self, step: int, culprits: list[int]) -> NonFiniteLossError:
        detail = f"step {step}: the gradients are not finite, but the loss of each rank is"
        if culprits:
            ranks = ", ".join(map(str, culprits))
            detail = f"step {step}: the loss is not finite on rank {ranks}"
        rank = culprits[0] if culprits else None
        bad = [batch for loss, _, batch in self.losses.of_step(step) if not is_finite(loss)]
        if not bad:
            return self._error(detail, step, rank)
        numbers = [number for batch in bad for number in batch.indices.tolist()]
        log.error("the loss of these samples is not finite: %s", numbers)
        if self.non_finite_samples is None:
            return self._error(f"{detail}; samples of this rank: {_listed(numbers)}", step, rank)
        samples_here = f"{counted(len(numbers), 'sample')} of this rank"
        culprit_samples = [number for batch in bad for number in self.non_finite_samples(batch)]
        if culprit_samples:
            own = [number for number in culprit_samples if number in numbers]
            if own:
                detail += f"; of the {samples_here} these have NaN or infinite data: {_listed(own)}"
            else:
                detail += f"; the {samples_here} have finite data, but the sample that is"
                detail += f" mixed into the first of them is not: {_listed(culprit_samples)}"
            remedy = "correct those samples, or leave them out"
            return NonFiniteLossError(detail, remedy, rank, step)
        detail += f"; the data of the {samples_here} are finite: {_listed(numbers)}"
        return self._error(detail, step, rank)

    def _error(self, detail: str, step: int, rank: int | None) -> NonFiniteLossError:
        remedy = (
            f"lower optimizer.lr={self.base_lr:g}, clip with train.max_grad_norm=1, or look at"
            " those samples"
        )
        if step == 0:  # nothing has been learned yet
            first_remedy = "check what the model and the loss compute for those samples"
            if self.non_finite_samples is None:
                first_remedy = "look for NaN in the inputs and targets of those samples"
            remedy = f"{first_remedy}; else {remedy}"
        return NonFiniteLossError(detail, remedy, rank, step)


def _too_many_skipped(last: NonFiniteLossError, steps: int) -> NonFiniteLossError:
    """The error that ends a run whose last `steps` steps were all skipped."""
    detail = (
        f"{last}; the last {counted(steps, 'step')} were all skipped"
        " (train.on_non_finite=skip): the weights no longer change"
    )
    return NonFiniteLossError(detail, last.remedy, last.rank, last.step)


def _listed(numbers: list[int]) -> str:
    """Numbers of samples, the first ones where there are many."""
    numbers = list(dict.fromkeys(numbers))
    shown = ", ".join(map(str, numbers[:SHOWN_SAMPLES]))
    left_out = len(numbers) - SHOWN_SAMPLES
    if left_out > 0:
        shown += f" and {left_out:,} more, all in the log of this rank"
    return shown


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
        """Steps that the host had done when the flag was read last."""
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
            self.steps_skipped.add_(self.stopped)
        return True

    def check_losses(self, steps_done: int) -> None:
        (flag,) = self.to_exchange(steps_done).collect()
        self.deliver([[of_rank] for of_rank in from_all_ranks(flag).tolist()])

    def to_exchange(self, steps_done: int) -> DeviceNonFiniteCheck:
        self.steps_done = steps_done
        return self

    def collect(self) -> list[Tensor]:
        """A scalar that says whether a step so far had a non-finite loss."""
        if self.scaled and self.losses.passes:
            losses = torch.cat(
                [torch.as_tensor(loss).view(-1) for loss, _, _ in self.losses.passes]
            )
            return [losses.sum(dtype=torch.float64).to(self.one.device)]
        # The same on all ranks, as the exchanged gradients are. Exchanged all the same: NCCL
        # watches no collective of a replayed graph, but under torchrun it ends this one after
        # launch.timeout_seconds if a rank hangs.
        return [self.steps_skipped]

    def deliver(self, of_ranks: list[list[float]]) -> None:
        """Raise NonFiniteLossError if the scalar of one rank says so."""
        flags = [flag for (flag,) in of_ranks]
        bad = self.steps_done
        if not self.scaled:
            bad -= int(max(flags))
        elif not all(map(math.isfinite, flags)):
            first_bad = torch.tensor(self.losses.first_bad_step(never=bad), device=self.one.device)
            bad = int(from_all_ranks(first_bad).min())
        if bad < self.steps_done:
            raise self._error_of_step(bad, self._culprits(bad))
