"""May a step be captured as a CUDA graph, does it pay, and does it fit? Two steps kernel by kernel
show it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_train.data.rng import global_states
from ddp_train.distributed.process_group import from_all_ranks
from ddp_train.errors import LaunchError
from ddp_train.models.python_state import State, changed, look_through

log = logging.getLogger(__name__)

HOST_SHARE = 0.5
"""Of the time of a step, in which the host launches it. Above, the GPU waits for the host, at least
after each line of metrics.jsonl: VGG-16 at 79 % is 4.7 % faster captured
(docs/benchmarks/models.md). Below, the host gets ahead."""
ROOM = 0.9
"""Part of a GPU's memory that may be needed. The rest is for workspaces, and lost between
blocks."""
GENERATORS = ("torch's generator on the host", "numpy's generator", "Python's generator")
"""Of `global_states`."""
OF_SYNC_DEBUG_MODE = "called a synchronizing CUDA operation", "Synchronization debug mode"
"""How its warnings begin: that of an operation, and one about the mode itself."""


class CaptureTrial:
    """Looks at what Python does in the forward pass of one step (`watched`), and measures another:
    `begin` before its forward pass, `end` after its update."""

    def __init__(
        self, device: str, roots: Mapping[str, Any], asked: bool = False, if_it_pays: bool = True
    ) -> None:
        """roots: what a forward pass may change, by their names. asked: the user set
        tuning.cuda_graph=true. if_it_pays: or else wherever a step may be captured."""
        self.device = device
        self.roots = roots
        self.asked = asked
        self.if_it_pays = if_it_pays
        self.host_share = self.memory_share = 0.0
        self.in_python = self.replaced = self.waits = ""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Around a forward pass."""
        state = look_through(self.roots)
        kept = self._parameters_and_buffers()
        draws = global_states()
        with places_that_wait() as places:
            yield
        if places:
            self.waits = (
                f"the forward pass waits for the GPU at {places[0]} (as .item() does, and a mask as"
                " an index)"
            )
        drawn = [
            name
            for name, old, new in zip(GENERATORS, draws, global_states(), strict=True)
            if old != new
        ]
        others = self._parameters_and_buffers()
        exchanged = [
            name for name in sorted({*kept, *others}) if kept.get(name) is not others.get(name)
        ]
        self._note(state, look_through(self.roots), drawn, exchanged)

    def _note(self, before: State, now: State, drawn: list[str], exchanged: list[str]) -> None:
        """drawn: generators. exchanged: parameters and buffers that are other tensors now."""
        changes = [
            *changed(before.found, now.found),
            *(path for path in before.found if path not in now.found),
        ]
        of_device = {
            path: place
            for path, (kind, place) in now.tensors.items()
            if self.device.startswith(kind)
        }
        kept = [path for path in changes if path not in of_device]
        if drawn:
            self.in_python = f"the forward pass draws from {drawn[0]}"
        elif exchanged:
            self.in_python = f"the forward pass puts another tensor in the place of {exchanged[0]}"
        elif kept:
            self.in_python = f"the forward pass changes {kept[0]}"
        else:  # what is changed in its place, a captured step changes, too
            moved = (
                path for path in changes if before.tensors.get(path, ("", 0))[1] != of_device[path]
            )
            self.replaced = next(moved, "")

    def _parameters_and_buffers(self) -> dict[str, torch.Tensor]:
        return {
            f"{root}.{name}": tensor
            for root, module in self.roots.items()
            if isinstance(module, nn.Module)
            for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers())
        }

    def begin(self) -> None:
        torch.cuda.synchronize(self.device)
        self.began = time.perf_counter()

    def end(self) -> None:
        """A graph keeps the memory of a step for itself, and a short batch or an evaluation may
        need as much again."""
        launched = time.perf_counter()
        torch.cuda.synchronize(self.device)
        self.host_share = (launched - self.began) / (time.perf_counter() - self.began)
        allocated = torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]
        has = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        self.memory_share = (2 * allocated["peak"] - allocated["current"]) / has

    def why_not(self) -> str:
        """Why no rank captures; "" if all do. An exchange: to be asked on all ranks after the same
        step.

        Raises LaunchError if the user asked for a capture that would give wrong results.
        """
        if self.in_python and self.asked:
            raise LaunchError(
                f"{self.in_python}, and a captured step runs no Python: it would repeat what it did"
                " in the capture",
                "change numbers that are kept in place, in buffers, draw on the GPU, or use"
                " tuning.cuda_graph=false",
            )
        measured = [
            self.host_share,
            self.memory_share,
            *(float(bool(one)) for one in (self.in_python, self.waits)),
        ]
        seen = from_all_ranks(torch.tensor(measured, device=self.device)).view(-1, len(measured))
        host, memory, in_python, waits = seen.amax(0).tolist()
        if in_python:
            here = self.in_python or "another rank's forward pass has state"
            return f"{here}; a captured step runs no Python"
        if waits and not self.asked:  # or else the capture itself says so
            waiting = self.waits or "another rank's forward pass waits for its GPU"
            return f"{waiting}; a captured step cannot"
        why_not = reason_against(host, memory) if self.if_it_pays else ""
        if self.replaced and not why_not:
            log.warning(
                "%s is a tensor that each forward pass replaces, and steps are captured as a CUDA"
                " graph: if the next step reads it, it finds what was there in the capture; then"
                " write into a buffer, in place",
                self.replaced,
            )
        return why_not


@contextlib.contextmanager
def places_that_wait() -> Iterator[list[str]]:
    """Where Python inside waited for a GPU, by `torch.cuda.set_sync_debug_mode`; known
    afterwards."""
    places: list[str] = []
    if not torch.cuda.is_initialized():
        yield places
        return
    mode = torch.cuda.get_sync_debug_mode()
    show = warnings.showwarning

    def note(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *others: Any
    ) -> None:
        if str(message).startswith(OF_SYNC_DEBUG_MODE[0]):
            places.append(f"{Path(filename).name}, line {lineno}")
        elif not str(message).startswith(OF_SYNC_DEBUG_MODE[1]):
            show(message, category, filename, lineno, *others)

    with warnings.catch_warnings():
        warnings.showwarning = note
        for begin in OF_SYNC_DEBUG_MODE:
            warnings.filterwarnings("always", begin)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def kept_in_python(before: State, now: State) -> str:
    """What steps have changed for good. Not what was None or not there: caches are filled in a
    first step."""
    paths = [
        path
        for path in changed(before.found, now.found)
        if before.found.get(path, "None") != "None"
    ]
    return f"the forward pass changes {paths[0]}" if paths else ""


def reason_against(host_share: float, memory_share: float) -> str:
    """The largest shares over all ranks: one rank that waits for its host holds up the others."""
    if host_share < HOST_SHARE:
        return f"the host launches a step in {host_share:.0%} of the time that it takes"
    if memory_share > ROOM:
        return f"steps and an evaluation might need {memory_share:.0%} of a GPU's memory"
    return ""
