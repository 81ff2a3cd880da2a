"""One global batch, divided as N processes and A accumulation steps would divide it, computed in
this process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_lab.prove.fixed_draws import fixed_draws
from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import BatchPlan, MicroBatch
from ddp_train.data.datasets import BatchSource
from ddp_train.data.loader import Loader, LoaderOptions
from ddp_train.data.mix import Mix
from ddp_train.data.rng import StepSeed, global_states
from ddp_train.distributed.training_step import TrainingStep
from ddp_train.errors import ConfigError
from ddp_train.tasks.task import ModelWithTask
from ddp_train.tensor_tree import map_tensors, tensors

GATHERS = "prove: rows of several processes are wanted, and there is one"
MOST_BYTES = 2**28
"""Of the outputs of layers that are kept to find the first one that differs."""
GENERATORS = ("torch's", "numpy's (numpy.random)", "Python's (random)")


class GathersError(Exception):
    """The loss asks for the rows of all processes: only several processes can compute it."""


@dataclass
class Pass:
    """What the optimizer would get for one global batch."""

    gradients: dict[str, np.ndarray]
    """Of the mean over its units, by the names of the model's parameters."""
    missing: list[set[str]]
    """Of each process, the parameters without a gradient."""
    loss: float
    """Sum over the global batch."""
    units: float
    forwards: list[Trace] = field(default_factory=list)
    """Of each micro-batch, in the order of the global batch."""


@dataclass
class Trace:
    """What went into the layers of a model in one forward pass, and what came out, in the order in
    which they ended."""

    calls: list[tuple[str, list[Tensor], list[Tensor]]] = field(default_factory=list)
    samples: int = 0
    loss: float = 0.0
    units: float = 0.0
    drew: dict[str, str] = field(default_factory=dict)
    """The generators of numpy and Python that moved, and where: the name of a layer, or "" outside
    of the model."""
    complete: bool = True


class Division:
    """Computes global batches of a job. Its module is in train mode; weights and buffers stay as
    they were."""

    def __init__(
        self,
        module: ModelWithTask,
        source: BatchSource,
        plan: BatchPlan,
        options: LoaderOptions,
        mix: Mix | None,
    ) -> None:
        """plan: that of one process."""
        self.module = module
        self.source = source
        self.plan = plan
        self.options = options
        self.mix = mix
        self.met: set[str] = set()
        """What drew random numbers in the model, and was fixed."""
        self.unfixed = False
        """Whether something else drew from torch's generator."""

    def micro_batches(self, step: int, processes: int, accumulation: int) -> list[list[MicroBatch]]:
        """Those of each process."""
        plan = replace(
            self.plan, world_size=processes, accumulation_steps=accumulation, steps=step + 1
        )
        return [list(replace(plan, rank=rank).micro_batches(step)) for rank in range(processes)]

    def fetched(self, micro_batches: Sequence[MicroBatch]) -> list[Batch]:
        return list(Loader(self.source, micro_batches, "cpu", self.options, self.mix))

    def compute(
        self, step: int, processes: int = 1, accumulation: int = 1, trace: bool = False
    ) -> Pass:
        """Forward and backward of each micro-batch; gradients and units are summed as a strategy
        does it.

        Raises GathersError.
        """
        parts = self.micro_batches(step, processes, accumulation)
        total = {}
        scaled = 0.0
        missing = []
        forwards = []
        counts_units = not self.module.task.units_are_samples
        for rank, micro_batches in enumerate(parts):
            with self._alone(rank, step):
                for batch in self.fetched(micro_batches):
                    forward, units = self._forward_backward(
                        batch, processes > 1 or accumulation > 1, trace
                    )
                    scaled += units * batch.micro_batch.scale if counts_units else 0.0
                    forwards.append((batch.micro_batch, forward))
                mine = self._taken()
            missing.append({name for name, gradient in mine.items() if gradient is None})
            for name, gradient in mine.items():
                if gradient is not None:
                    total[name] = total.get(name, 0.0) + gradient / processes
        divisor = scaled / processes if counts_units else 1.0
        found = {name: (gradient / divisor).numpy() for name, gradient in total.items()}
        counted = [
            forward
            for one, forward in sorted(forwards, key=lambda pair: pair[0].shard_index)
            if one.num_real
        ]
        loss = sum(one.loss for one in counted)
        units = sum(one.units for one in counted)
        return Pass(found, missing, loss, units, counted)

    def loss_of_cut(self, step: int, processes: int, accumulation: int) -> float | None:
        """The loss of the parts of a global batch, if each part is cut from the whole batch. None
        if what holds the samples is more than tensors with a row for each."""
        ((whole,),) = self.micro_batches(step, 1, 1)
        (batch,) = self.fetched([whole])
        if not all(one.ndim and len(one) == len(whole.indices) for one in tensors(batch.data)):
            return None
        rows = {int(number): row for row, number in enumerate(whole.indices)}
        loss = 0.0
        for rank, parts in enumerate(self.micro_batches(step, processes, accumulation)):
            with self._alone(rank, step):
                for part in parts:
                    if part.num_real:
                        places = torch.tensor([rows[int(number)] for number in part.indices])
                        cut = Batch(
                            map_tensors(lambda one, places=places: one[places], batch.data), part
                        )
                        loss += self._forward_backward(cut, True, trace=False)[0].loss
        return loss

    @contextmanager
    def _alone(self, rank: int, step: int) -> Iterator[None]:
        """As one process finds the world in a step: buffers and generators. Afterwards they are as
        before."""
        model = self.module
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        StepSeed(self.plan.seed, rank, "cpu")(step)
        model.zero_grad(set_to_none=True)
        try:
            yield
        finally:
            model.zero_grad(set_to_none=True)
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in before and before[name].shape == buffer.shape:
                        buffer.copy_(before[name])

    def _forward_backward(self, batch: Batch, divided: bool, trace: bool) -> tuple[Trace, float]:
        micro_batch = batch.micro_batch
        found = Trace(samples=len(batch.micro_batch.indices))
        refused = GATHERS if divided else ""
        generator = torch.get_rng_state()
        try:
            with (
                fixed_draws(self.module.model) as draws,
                TrainingStep(True, True, refused),
                _watched(self, found, trace),
            ):
                loss, units = self.module(batch.data)
        except ConfigError as error:
            if GATHERS in str(error):
                raise GathersError from None
            raise
        self.met |= draws.met
        self.unfixed |= not torch.equal(generator, torch.get_rng_state())
        torch.autograd.backward((loss,), (torch.full_like(loss, micro_batch.scale),))
        found.loss = float(loss.detach())
        found.units = float(micro_batch.num_real) if units is None else float(units)
        return found, found.units

    def _taken(self) -> dict[str, Tensor | None]:
        """The gradients of what trains."""
        return {
            name: None if parameter.grad is None else parameter.grad.detach().double().clone()
            for name, parameter in self.module.model.named_parameters()
            if parameter.requires_grad
        }


@contextmanager
def _watched(division: Division, found: Trace, trace: bool) -> Iterator[None]:
    """Notes where the generators of numpy and Python move; with `trace` what goes through each
    layer."""
    model = division.module.model
    kept = 0
    inside: list[tuple[bytes, ...]] = []

    def enter(layer: nn.Module, given: Any) -> None:
        inside.append(global_states())

    def note(before: tuple[bytes, ...], name: str) -> None:
        for generator, one, other in zip(
            GENERATORS[1:], before[1:], global_states()[1:], strict=True
        ):
            if one != other:
                found.drew.setdefault(generator, name)

    def leave(name: str) -> Any:
        def left(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            nonlocal kept
            note(inside.pop(), name)
            if not trace:
                return
            given = list(tensors((args, kwargs)))
            made = list(tensors(_plain(output)))
            kept += sum(one.numel() * one.element_size() for one in (*given, *made))
            found.complete &= kept <= MOST_BYTES
            if found.complete:
                found.calls.append(
                    (name, [one.detach() for one in given], [one.detach().clone() for one in made])
                )

        return left

    handles = [layer.register_forward_pre_hook(enter) for layer in model.modules()]
    handles += [
        layer.register_forward_hook(leave(name), with_kwargs=True)
        for name, layer in model.named_modules()
    ]
    outside = global_states()
    try:
        yield
        note(outside, "")
    finally:
        for handle in handles:
            handle.remove()


def _plain(output: Any) -> Any:
    """What a model gives, as a tree of tensors: objects of transformers are mappings."""
    return dict(output) if hasattr(output, "items") else output


@dataclass(frozen=True)
class Culprit:
    """The first layer whose output for a sample depends on the others of its micro-batch."""

    name: str
    layer: nn.Module
    difference: float

    @property
    def is_batch_norm(self) -> bool:
        return isinstance(self.layer, _BatchNorm)


def first_mixing(
    model: nn.Module, whole: Trace, parts: Sequence[Trace], tolerance: float
) -> Culprit | None:
    """The first layer that gives rows of a part something else than the same rows of the whole
    batch. None if there is none, or it cannot be seen: in batches that are padded anew, rows have
    other lengths."""
    layers = dict(model.named_modules())
    taken = {name: given for name, given, _ in reversed(whole.calls)}
    of_parts = [{name: given for name, given, _ in reversed(part.calls)} for part in parts]
    for place, (name, given, made) in enumerate(whole.calls):
        theirs = [part.calls[place] for part in parts if place < len(part.calls)]
        if len(theirs) < len(parts) or any(call[0] != name for call in theirs):
            return None
        difference = _rows_differ(made, [call[2] for call in theirs])
        if difference <= tolerance:
            continue
        if (
            _rows_differ(given, [call[1] for call in theirs]) > tolerance
        ):  # it only passes on what a caller mixed
            name = name.rpartition(".")[0]
            while (
                name
                and _rows_differ(taken.get(name, []), [part.get(name, []) for part in of_parts])
                > tolerance
            ):
                name = name.rpartition(".")[0]
        return Culprit(name, layers[name], difference)
    return None


def _rows_differ(whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> float:
    """The largest relative difference of rows, of what can be compared."""
    worst = 0.0
    for number, output in enumerate(whole):
        rows = [part[number] for part in parts if number < len(part)]
        fits = (
            len(rows) == len(parts)
            and output.is_floating_point()
            and output.ndim > 0
            and output.numel() > 0
        )
        if not fits or any(
            one.ndim != output.ndim or one.shape[1:] != output.shape[1:] for one in rows
        ):
            continue
        together = torch.cat(rows)
        if together.shape == output.shape:
            difference = float((together - output).norm() / max(float(output.norm()), 1e-30))
            worst = max(worst, difference if difference == difference else 0.0)
    return worst
