"""An exponential moving average of the weights, updated in every optimizer step.

The formula is that of `torch.optim.swa_utils.AveragedModel` with `use_buffers=True`: after the
first step the average is a copy of the weights, after each further one decay * average + (1 -
decay) * weights. Batch norm's running statistics are averaged with the weights. What is not a
floating-point number, or is not trained, is the model's own. So is a buffer that holds an infinity
or NaN at the start, an attention mask for one: infinity minus infinity is NaN.
"""

# pyright: reportPrivateImportUsage=false
# torch._foreach_*: torch's own average is made of them.
from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from ddp_train.errors import ConfigError


class WeightAverage:
    """The average of a model's trained parameters and floating-point buffers, on their device and
    of their type."""

    def __init__(
        self,
        model: nn.Module,
        decay: float,
        warmup: bool = False,
        may_skip: bool = False,
        trained: Iterable[nn.Parameter] | None = None,
    ) -> None:
        """Begin with the weights as they are now.

        warmup: the n-th update, from 1 on, has a decay of at most n / (9 + n), as in TensorFlow's
            `ExponentialMovingAverage(num_updates)`: a short run's average soon forgets its first
            weights.
        may_skip: only the device knows whether a step was taken, as with a GradScaler.
        trained: the parameters to average; None: those that require gradients now. The average of
            one that is frozen is the parameter itself.

        Raises ConfigError for parameters of 16 bits: adding a thousandth of a difference would not
        change them.
        """
        if trained is None:
            trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        self.trained = list(trained)
        _refuse_16_bits(self.trained, decay)
        self.buffers: list[tuple[nn.Module, str]] = []
        for path, buffer in model.named_buffers():
            if buffer.is_floating_point() and buffer.isfinite().all():
                owner, _, name = path.rpartition(".")
                self.buffers.append((model.get_submodule(owner), name))
        self.decay = decay
        self.warmup = warmup
        self.average = [tensor.clone() for tensor in self.live()]
        self.updates = torch.zeros((), dtype=torch.float64, device=self.average[0].device)
        """Number of updates. On the device, where a captured step counts."""
        self.rate_on_device = warmup or may_skip
        self.has_updates = False

    def live(self) -> list[Tensor]:
        """The tensors of the model that are averaged. Buffers are looked up: a model may put new
        tensors in their place."""
        parameters = [parameter.detach() for parameter in self.trained]
        return parameters + [getattr(owner, name).detach() for owner, name in self.buffers]

    @torch.no_grad()
    def update(self, skipped: Tensor | None = None) -> None:
        """Count in the weights after an optimizer step. Waits for nothing.

        skipped: 1 if the step was not taken, on the device; None if it was.
        """
        live = self.live()
        if self.rate_on_device:
            taken = torch.ones_like(self.updates) if skipped is None else 1 - skipped.double()
            self._move(live, self._rate() * taken, may_skip=skipped is not None)
            self.updates += taken
        else:
            if self.has_updates:
                torch._foreach_lerp_(self.average, live, 1 - self.decay)
            else:
                torch._foreach_copy_(self.average, live)
            self.has_updates = True
            self.updates += 1

    def _rate(self) -> Tensor:
        """Weight of the current parameters in the next update; 1 in the first."""
        rate = torch.full_like(self.updates, 1 - self.decay)
        if self.warmup:
            rate = torch.maximum(rate, 9 / (10 + self.updates))
        return torch.where(self.updates == 0, 1.0, rate)

    def _move(self, live: list[Tensor], rate: Tensor, may_skip: bool) -> None:
        """Do as `lerp`, for which torch has no call with a rate on the device for many tensors.

        A rate of 0 changes nothing: a step that is skipped leaves finite weights, but perhaps
        statistics that are not, and 0 * NaN is NaN.
        """
        difference = list(torch._foreach_sub(live, self.average))
        for dtype in {tensor.dtype for tensor in live}:
            of_dtype = [tensor for tensor in difference if tensor.dtype == dtype]
            torch._foreach_mul_(of_dtype, rate.to(dtype))
        if may_skip:
            for number in range(len(self.trained), len(live)):
                difference[number] = torch.where(rate == 0, 0, difference[number])
        torch._foreach_add_(self.average, difference)

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Inside, the model has the average, and this object the weights: their contents change
        places, so that what refers to the tensors, a captured step above all, never notices."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for live, average in zip(self.live(), self.average, strict=True):
            weights = live.clone()
            live.copy_(average)
            average.copy_(weights)

    @torch.no_grad()
    def begin(self, updates: Tensor | None = None) -> None:
        """Take what is in the model for the average.

        updates: their number in the run that it comes from; None begins anew.
        """
        torch._foreach_copy_(self.average, self.live())
        self.updates.zero_()
        if updates is not None:
            self.updates.copy_(updates)
        self.has_updates = bool(self.updates)


def _refuse_16_bits(parameters: list[nn.Parameter], decay: float) -> None:
    dtypes = {parameter.dtype for parameter in parameters}
    narrow = [str(dtype).removeprefix("torch.") for dtype in dtypes if torch.finfo(dtype).bits < 32]
    if narrow:
        problem = (
            f"train.ema_decay={decay:g}: an average of {' and '.join(sorted(narrow))} parameters"
            " would not change; keep the parameters in float32 (with tuning.precision=bf16 the"
            " model computes in bfloat16), or leave train.ema_decay out"
        )
        raise ConfigError([problem])
