"""May a step be captured as a CUDA graph, does it pay, and does it fit? Two steps kernel by kernel
show it."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.data.rng import global_states
from ddp_train.distributed.process_group import from_all_ranks
from ddp_train.distributed.training_step import CURRENT
from ddp_train.errors import LaunchError
from ddp_train.models.python_state import State, changed, look_through, replaced

log = logging.getLogger(__name__)

HOST_SHARE = 0.5
"""Least part of a step's time in which the host launches it. Above, the GPU waits for the host, at
least after each line of metrics.jsonl: VGG-16 at 79 % is 4.7 % faster captured
(docs/inside/benchmarks/models.md). Below, the host gets ahead."""
ROOM = 0.9
"""Part of a GPU's memory that may be needed. The rest is for workspaces, and lost between
blocks."""
GENERATORS = ("torch's generator on the host", "numpy's generator", "Python's generator")
"""The generators whose states `global_states` returns."""
SYNC_WARNING = "called a synchronizing CUDA operation"
"""Begin of the warning of `torch.cuda.set_sync_debug_mode` about an operation."""
MODE_WARNING = "Synchronization debug mode"
"""Begin of its warning about the mode itself."""


class CaptureTrial:
    """Looks at what Python does in the forward pass of one step (`watched`), and measures another:
    `begin` before its forward pass, `end` after its update."""

    def __init__(
        self, device: str, roots: Mapping[str, Any], asked: bool = False, if_it_pays: bool = True
    ) -> None:
        """
        roots: what a forward pass may change, by their names.
        asked: the user set tuning.cuda_graph=true.
        if_it_pays: False captures wherever a step may be captured.
        """
        self.device = device
        self.roots = roots
        self.asked = asked
        self.if_it_pays = if_it_pays
        self.host_share = 0.0
        """Part of the step's time in which the host launched it."""
        self.memory_share = 0.0
        """Part of the GPU's memory that steps and an evaluation might need."""
        self.in_python = ""
        """The effect in Python of a forward pass, which a captured step would not have."""
        self.replaced = ""
        """A tensor on the device that each forward pass replaces."""
        self.waits = ""
        """The line at which the forward pass waits for the GPU."""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """A context around a forward pass."""
        before = PythonState.of(self.roots)
        with places_that_wait() as places:
            yield
        if places:
            self.waits = (
                f"the forward pass waits for the GPU at {places[0]} (as .item() does, and a mask"
                " as an index)"
            )
        after = PythonState.of(self.roots)
        self.in_python = effect_in_python(before, after, self.device)
        if not self.in_python:
            self.replaced = replaced_tensor(before, after)

    def begin(self) -> None:
        torch.cuda.synchronize(self.device)
        self.began = time.perf_counter()

    def end(self) -> None:
        """Measure the shares. A graph keeps the memory of a step for itself, and a short batch or
        an evaluation may need as much again."""
        launch_seconds = time.perf_counter() - self.began
        torch.cuda.synchronize(self.device)
        self.host_share = launch_seconds / (time.perf_counter() - self.began)
        allocated = torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]
        free, _ = torch.cuda.mem_get_info(self.device)
        usable = free + torch.cuda.memory_reserved(self.device)
        self.memory_share = (2 * allocated["peak"] - allocated["current"]) / usable

    def why_not(self) -> str:
        """Why no rank captures; "" if all do. A collective: every process must call it after the
        same step.

        Raises LaunchError if the user asked for a capture that would give wrong results.
        """
        if self.in_python and self.asked:
            raise LaunchError(
                f"{self.in_python}, but a captured step (tuning.cuda_graph=true) runs no Python"
                " and would repeat the values of the capture",
                "keep numbers in buffers and change these in place, draw random numbers on the"
                " GPU, or use tuning.cuda_graph=false",
            )
        flags = [float(bool(self.in_python)), float(bool(self.waits))]
        measured = torch.tensor([self.host_share, self.memory_share, *flags], device=self.device)
        # The largest over all ranks: one that waits for its host holds up the others.
        largest = from_all_ranks(measured).amax(0).tolist()
        host_share, memory_share, any_in_python, any_waits = largest
        if any_in_python:
            effect = self.in_python or "another rank's forward pass has state"
            return f"{effect}; a captured step runs no Python"
        if any_waits and not self.asked:  # else the capture itself says so
            wait = self.waits or "another rank's forward pass waits for its GPU"
            return f"{wait}; a captured step cannot"
        reason = ""
        if self.if_it_pays:
            reason = reason_against(host_share, memory_share)
        if self.replaced and not reason:
            log.warning(
                "each forward pass replaces the tensor %s, but steps are captured as a CUDA"
                " graph: code that reads this tensor later finds the one of the capture. Write"
                " into a buffer in place: buffer.copy_(tensor)",
                self.replaced,
            )
        return reason


@dataclass(frozen=True)
class PythonState:
    """All that Python keeps around a forward pass, at one moment."""

    objects: State
    weights: dict[str, Tensor]
    """Parameters and buffers, by their names."""
    draws: tuple[bytes, ...]
    """States of GENERATORS."""
    keyed_draws: int
    """Number of calls of `noise_like` and its like."""

    @classmethod
    def of(cls, roots: Mapping[str, Any]) -> PythonState:
        weights = {}
        for root, module in roots.items():
            if isinstance(module, nn.Module):
                named = [*module.named_parameters(), *module.named_buffers()]
                weights |= {f"{root}.{name}": tensor for name, tensor in named}
        return cls(look_through(roots), weights, global_states(), CURRENT.marks)


def _changes(before: State, after: State) -> list[str]:
    """The paths whose value has changed, is new or is gone."""
    gone = [path for path in before.found if path not in after.found]
    return changed(before.found, after.found) + gone


def effect_in_python(before: PythonState, after: PythonState, device: str) -> str:
    """An effect of a forward pass that a captured step would not have; "" if there is none.

    A tensor on the device that is changed in its place, a captured step changes too.
    """
    if before.keyed_draws != after.keyed_draws:
        return "the forward pass calls ddp_train.noise_like or a function like it"
    for name, old, new in zip(GENERATORS, before.draws, after.draws, strict=True):
        if old != new:
            return f"the forward pass draws from {name}"
    for name in sorted({*before.weights, *after.weights}):
        if before.weights.get(name) is not after.weights.get(name):
            return f"the forward pass puts another tensor in the place of {name}"
    for path in _changes(before.objects, after.objects):
        kind, _ = after.objects.tensors.get(path, ("none", 0))
        if not device.startswith(kind):
            return f"the forward pass changes {path}"
    return ""


def replaced_tensor(before: PythonState, after: PythonState) -> str:
    """The first changed tensor that is in another place now; "" if there is none."""
    for path in _changes(before.objects, after.objects):
        if before.objects.tensors.get(path) != after.objects.tensors[path]:
            return path
    return ""


@contextlib.contextmanager
def places_that_wait() -> Iterator[list[str]]:
    """A context that notes where Python waits for a GPU, by `torch.cuda.set_sync_debug_mode`.

    Yields the places, known afterwards.
    """
    places: list[str] = []
    if not torch.cuda.is_initialized():
        yield places
        return
    mode = torch.cuda.get_sync_debug_mode()
    show = warnings.showwarning

    def note(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *others: Any
    ) -> None:
        if str(message).startswith(SYNC_WARNING):
            places.append(f"{Path(filename).name}, line {lineno}")
        elif not str(message).startswith(MODE_WARNING):
            show(message, category, filename, lineno, *others)

    with warnings.catch_warnings():
        warnings.showwarning = note
        for begin in (SYNC_WARNING, MODE_WARNING):
            warnings.filterwarnings("always", begin)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def kept_in_python(before: State, after: State) -> str:
    """Names of Python state that steps have changed for good; "" if none.

    What was None or not there does not count: caches are filled in a first step.
    """
    for path in replaced(before.found, after.found):
        return f"the forward pass changes {path}"
    return ""


def reason_against(host_share: float, memory_share: float) -> str:
    """Why steps are not worth capturing; "" if they are.

    host_share: of a step's time, in which the host launches it.
    memory_share: of the GPU's memory, that would be needed.
    """
    if host_share < HOST_SHARE:
        return f"the host needs only {host_share:.0%} of the time of a step to launch it"
    if memory_share > ROOM:
        return f"steps and an evaluation might need {memory_share:.0%} of a GPU's memory"
    return ""
