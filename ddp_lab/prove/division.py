"""One global batch, divided as N processes and A accumulation steps would divide it, computed in
this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ddp_lab.prove.fixed_draws import fixed_draws
from ddp_lab.prove.layer_trace import Trace, recording
from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import BatchPlan, MicroBatch
from ddp_train.data.rng import StepSeed, moved_by_marks_alone
from ddp_train.distributed.training_step import CURRENT, TrainingStep
from ddp_train.errors import ConfigError
from ddp_train.tasks.task import ModelWithTask
from ddp_train.tensor_tree import map_tensors, tensors

GATHERS = "prove: rows of several processes are wanted, and there is one"


class GathersError(Exception):
    """The loss asks for the rows of all processes: only several processes can compute it."""


@dataclass(frozen=True)
class Pass:
    """The values that the optimizer would get for one global batch."""

    gradients: dict[str, np.ndarray]
    """Gradients of the mean over its units, by the names of the model's parameters."""
    missing: list[set[str]]
    """The parameters without a gradient, for each process."""
    forwards: list[Trace]
    """The forward passes of all micro-batches with samples, in the order of the global batch."""

    @property
    def loss(self) -> float:
        """Sum over the global batch."""
        return sum(forward.loss for forward in self.forwards)

    @property
    def units(self) -> float:
        return sum(forward.units for forward in self.forwards)


class Division:
    """Computes global batches of a job. Its module is in train mode; weights and buffers stay as
    they were."""

    def __init__(
        self,
        module: ModelWithTask,
        plan: BatchPlan,
        load: Callable[[Sequence[MicroBatch]], Iterable[Batch]],
    ) -> None:
        """plan: that of one process.

        load: the batches of these micro-batches.
        """
        self.module = module
        self.plan = plan
        self.load = load
        self.met: set[str] = set()
        """Functions in the model that drew random numbers, and were fixed."""
        self.unfixed = False
        """Something else drew from torch's generator."""

    def micro_batches(self, step: int, processes: int, accumulation: int) -> list[list[MicroBatch]]:
        """The micro-batches of each process."""
        plan = replace(
            self.plan, world_size=processes, accumulation_steps=accumulation, steps=step + 1
        )
        return [list(replace(plan, rank=rank).micro_batches(step)) for rank in range(processes)]

    def compute(
        self, step: int, processes: int = 1, accumulation: int = 1, trace: bool = False
    ) -> Pass:
        """Compute forward and backward of each micro-batch; gradients and units are summed as a
        strategy does it.

        trace: whether the calls of layers are kept.

        Raises GathersError.
        """
        is_divided = processes > 1 or accumulation > 1
        total: dict[str, Tensor] = {}
        scaled_units = 0.0
        missing = []
        forwards: list[tuple[MicroBatch, Trace]] = []
        for rank, micro_batches in enumerate(self.micro_batches(step, processes, accumulation)):
            with self._as_rank(rank, step):
                for batch in list(self.load(micro_batches)):
                    forward = self._forward_backward(batch, is_divided, trace)
                    scaled_units += forward.units * batch.micro_batch.scale
                    forwards.append((batch.micro_batch, forward))
                gradients = self._gradients()
            missing.append({name for name, gradient in gradients.items() if gradient is None})
            for name, gradient in gradients.items():
                if gradient is not None:
                    total[name] = total.get(name, 0.0) + gradient / processes
        divisor = 1.0 if self.module.task.units_are_samples else scaled_units / processes
        forwards.sort(key=lambda pair: pair[0].shard_index)
        return Pass(
            gradients={name: (gradient / divisor).numpy() for name, gradient in total.items()},
            missing=missing,
            forwards=[forward for micro_batch, forward in forwards if micro_batch.num_real],
        )

    def loss_of_cut(self, step: int, processes: int, accumulation: int) -> float | None:
        """The loss of the parts of a global batch, if each part is cut from the whole batch.

        None if what holds the samples is more than tensors with a row for each.
        """
        ((whole,),) = self.micro_batches(step, 1, 1)
        (batch,) = self.load([whole])
        for tensor in tensors(batch.data):
            if not tensor.ndim or len(tensor) != len(whole.indices):
                return None
        row_of = {int(number): row for row, number in enumerate(whole.indices)}
        loss = 0.0
        for rank, parts in enumerate(self.micro_batches(step, processes, accumulation)):
            with self._as_rank(rank, step):
                for part in parts:
                    if part.num_real:
                        rows = torch.tensor([row_of[int(number)] for number in part.indices])
                        data = map_tensors(lambda tensor, rows=rows: tensor[rows], batch.data)
                        loss += self._forward_backward(Batch(data, part), True, trace=False).loss
        return loss

    def buffers_that_decide(self, step: int, tolerance: float) -> list[str]:
        """The buffers that a forward pass changes, if the next one gives another loss by them.

        Of the same samples, with the same draws. Empty if the loss stays what it is.
        """
        ((whole,),) = self.micro_batches(step, 1, 1)
        (batch,) = self.load([whole])
        losses = []
        with self._as_rank(0, step):
            before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
            for _ in range(2):
                StepSeed(self.plan.seed, 0, "cpu")(step)
                losses.append(self._forward_backward(batch, False, trace=False).loss)
            changed = [
                name.removeprefix("model.")
                for name, buffer in self.module.named_buffers()
                if not _is_same(buffer, before.get(name))
            ]
        first, second = losses
        if abs(second - first) > tolerance * abs(first):
            return changed
        return []  # of a loss that is no number too: the buffers need not be its cause

    @contextmanager
    def _as_rank(self, rank: int, step: int) -> Iterator[None]:
        """Inside, generators are as a process has them in a step. Afterwards generators and buffers
        are as before."""
        model = self.module
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        torch_state = torch.get_rng_state()
        numpy_state = np.random.get_state()
        python_state = random.getstate()
        StepSeed(self.plan.seed, rank, "cpu")(step)
        model.zero_grad(set_to_none=True)
        try:
            yield
        finally:
            model.zero_grad(set_to_none=True)
            torch.set_rng_state(torch_state)
            np.random.set_state(numpy_state)
            random.setstate(python_state)
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in buffers and buffers[name].shape == buffer.shape:
                        buffer.copy_(buffers[name])

    def _forward_backward(self, batch: Batch, is_divided: bool, trace: bool) -> Trace:
        micro_batch = batch.micro_batch
        model = self.module.model
        forward = Trace()
        refusal = GATHERS if is_divided else ""
        generator = torch.get_rng_state()
        marks = CURRENT.marks
        with TrainingStep(True, True, refusal, micro_batch):
            try:
                with fixed_draws(model) as draws, recording(model, forward, keeps_calls=trace):
                    loss, units = self.module(batch.data)
            except ConfigError as error:
                if GATHERS in str(error):
                    raise GathersError from None
                raise
            self.met |= draws.met
            after = torch.get_rng_state()
            self.unfixed |= not moved_by_marks_alone(generator, after, CURRENT.marks - marks)
            torch.autograd.backward((loss,), (torch.full_like(loss, micro_batch.scale),))
        forward.loss = float(loss.detach())
        forward.units = float(micro_batch.num_real if units is None else units)
        return forward

    def _gradients(self) -> dict[str, Tensor | None]:
        """The gradients of the parameters that train; None for one without."""
        gradients: dict[str, Tensor | None] = {}
        for name, parameter in self.module.model.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad
                gradients[name] = None if gradient is None else gradient.detach().double()
        return gradients


def _is_same(buffer: Tensor, before: Tensor | None) -> bool:
    if before is None or before.shape != buffer.shape:
        return False
    return bool(((buffer == before) | (buffer != buffer)).all())
