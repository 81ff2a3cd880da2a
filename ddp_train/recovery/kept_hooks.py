"""The states of hooks after a step, in a place of a rank: how they are written, and read again."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_train.checkpoints.checkpoint_hook import HookStates
from ddp_train.optim.stepper import Stepper
from ddp_train.recovery.kept_layout import KeptTensor, Layout, Views, filled, packed, unpacked
from ddp_train.resilience.kept_memory import KeptMemory, Record, StepPlaces

Logged = tuple[list[list[Any]], list[list[Any]]]
"""Numbers that the user's code has logged: those that all ranks know of, and those of one rank."""


class HooksPlace:
    """A place in which a rank keeps the states of hooks.

    Tensors are copied each time: on a CPU to compare them takes as long (100 MB: 5 ms).
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.layout: Layout | None = None
        self.targets: list[Tensor] = []
        """The places of the tensors, by that layout."""

    @property
    def step(self) -> int | None:
        """The step after which hooks have changed the states last; None if nothing is kept."""
        return self.record.mark

    def drop(self) -> None:
        self.record.open()

    def write(self, step: int, states: HookStates, stepper: Stepper) -> None:
        """Keep states, and what of the logged numbers is in no line yet.

        step: after which the states have changed last.
        states: with the tensors that the hooks have.
        """
        self.record.open()
        sources: list[Tensor] = []
        tree = _listed(states, sources)
        layout = Layout.of(sources, [], ranks=1)
        logged = (stepper.logged.state(), stepper.logged.kept())
        self.record.text = packed((tree, logged, layout))
        if layout != self.layout:
            views = Views.on_host(self.record, layout, rank=0)
            self.targets = [views.own(number) for number in range(len(sources))]
            self.layout = layout
        with torch.no_grad():
            for target, source in zip(self.targets, sources, strict=True):
                target.copy_(source)
        took_losses = not stepper.losses.passes
        self.record.set_numbers(float(took_losses), time.monotonic())
        self.record.complete(step)


class HooksPlaces:
    """Where a rank keeps the states of hooks that belong to a step."""

    def __init__(self, memory: KeptMemory, rank: int, places: StepPlaces) -> None:
        self.before = HooksPlace(memory.record(rank, places.before))
        self.after = HooksPlace(memory.record(rank, places.after))

    def drop(self) -> None:
        self.before.drop()
        self.after.drop()


def _listed(value: Any, sources: list[Tensor]) -> Any:
    """A state with a `KeptTensor` in the place of each tensor that can be copied by itself.

    sources: these tensors are added to it.
    """
    kind = type(value)
    if kind is Tensor and _is_dense(value):
        sources.append(value)
        return KeptTensor(True, len(sources) - 1)
    if kind is dict:
        return {key: _listed(item, sources) for key, item in value.items()}
    if kind in (list, tuple):
        return kind([_listed(item, sources) for item in value])
    return value


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


@dataclass(frozen=True)
class KeptHooks:
    """The states of hooks at a time."""

    states: HookStates
    """On rank 0 of the host; empty on the others."""
    logged: Logged
    """Numbers that hooks have logged and no line of metrics.jsonl has yet."""
    took_losses: bool
    """Whether they have reported all losses."""
    at: float
    """When, by `time.monotonic`."""

    @classmethod
    def read(cls, record: Record) -> KeptHooks | None:
        """Read the states that a place holds; None if they are not whole."""
        if record.mark is None:
            return None
        tree, logged, layout = unpacked(record.text)
        views = Views.on_host(record, layout, rank=0)
        states = filled(tree, lambda kept: views.own(kept.number).clone())
        took_losses, at, *_ = record.numbers
        return cls(states, logged, bool(took_losses), at)
