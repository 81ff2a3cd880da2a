"""Looks, before each checkpoint, for state that it would lose or have of one process alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from ddp_train.distributed.buffers_of_ranks import (
    BufferOfRanks,
    buffers_apart,
    is_batch_norm_apart,
    is_statistic,
    whole_numbers_apart,
)
from ddp_train.distributed.exchange import texts_from_all_ranks
from ddp_train.distributed.replicas import weight_with_nan
from ddp_train.models.python_state import attribute_of, changed, state_of
from ddp_train.sessions.session_objects import Stateful, beside_states, copies_on
from ddp_train.sessions.watches.states_of_ranks import numbers_apart

log = logging.getLogger(__name__)
NOT_THE_SAME = (
    "not the same on all processes, since each process fills it from its own samples. So the"
    " result depends on the number of processes. Fill it from the samples of all processes, by"
    " ddp_train.all_gather or run.sum"
)
BATCH_NORM_APART = (
    "not the same on all processes. A batch norm in train mode that run.wrap did not get uses"
    " each process's own samples, so the result depends on the number of processes"
)
ADDED = (
    "%s: added to the model after run.resume. A resumed run calls run.resume without it, so its"
    " value is lost, or the checkpoint is refused. Add it before run.resume (a buffer of zeros,"
    " which the loop sets later)"
)
MOST_NAMES = 3
"""The most names of state that a warning lists: a list has one for each item."""


class CheckpointWatch:
    """Warns once of each kind of state that a resumed run would not have as it was."""

    def __init__(
        self, module: nn.Module, objects: Mapping[str, Stateful], device: str, keep: int
    ) -> None:
        """
        module: all models that are saved.
        objects: the others that are, by the names that `run.resume` got.
        keep: the number of checkpoints that are kept.
        """
        self.module = module
        self.objects = objects
        self.device = device
        self.keep = keep
        self.names = set(module.state_dict())
        """Weights and buffers of the models at start, and those that were named."""
        self.state_at_start = unsaved_state(module, objects)
        self.state_before: dict[str, str] | None = self.state_at_start
        """The state with which the first batch of an epoch began: in the first epoch that at start.
        None between an epoch's end and the next one's first batch."""
        self.told: set[str] = set()
        """Attributes that were named."""
        self.has_warned_of_ranks = False
        """State was named that is not the same on all processes."""
        self.may_differ_in_batch_norm = False
        """Batch norm's statistics are not compared between processes: the user chose that they
        differ, or they were named."""
        self.has_warned_of_nan = False

    def see_buffers(self, buffers: Tensor, buffers_of_copies: Tensor) -> None:
        """Name once the buffers, and numbers, that differ between processes. A collective.

        buffers, buffers_of_copies: of all processes, [ranks, n].
        """
        differing = self._buffers_apart(buffers, buffers_of_copies)
        self._warn_of_ranks(differing)
        self._warn_of_batch_norm(differing)

    def warn_of_nan(self, step: int) -> None:
        """Name once a weight that is NaN: the loop trains on, and fills all checkpoints with it."""
        if self.has_warned_of_nan:
            return
        name = weight_with_nan(self.module)
        if name:
            self.has_warned_of_nan = True
            log.warning(
                "%s holds a NaN after step %d, and the loop trains on. Stop the run: only the"
                " newest %d checkpoints are kept, and soon all of them will hold the NaN. To"
                " skip such a step, write before backward(): if not"
                " math.isfinite(run.sum(loss.item())): continue",
                name,
                step,
                self.keep,
            )

    def begin_epoch(self) -> None:
        """Note what no checkpoint holds, before the first batch of an epoch.

        What the loop sets earlier in each epoch is no loss: a resumed run sets it again.
        """
        if self.state_before is None:
            self.state_before = unsaved_state(self.module, self.objects)

    def end_epoch(self) -> None:
        """Name what an epoch has added or changed and a resumed run loses. A collective."""
        added = sorted(self.module.state_dict().keys() - self.names)
        if added:
            self.names.update(added)
            log.warning(ADDED, ", ".join(added[:MOST_NAMES]))
        self.warn_of_unsaved_state()
        self.state_before = None

    def warn_of_unsaved_state(self) -> None:
        """Name once what models and optimizers have changed in the epoch and no checkpoint holds.

        A collective.
        """
        now: dict[str, str] = {}
        names: list[str] = []
        if self.state_before is not None:
            now = unsaved_state(self.module, self.objects)
            names = self._not_told(changed(self.state_before, now))
        self.told |= set(map(attribute_of, names))
        digests = {name: now.get(name) for name in sorted(names)[:MOST_NAMES]}
        of_ranks = texts_from_all_ranks(json.dumps(digests), self.device)
        if names:
            log.warning(
                "%s changed during training but is in no checkpoint, so a resumed run loses the"
                " change. Keep it in %s%s",
                ", ".join(digests),
                _places_of(digests),
                f". It is also {NOT_THE_SAME}" if len(set(of_ranks)) > 1 else "",
            )

    def _not_told(self, paths: list[str]) -> list[str]:
        """The paths that were not told before, without those of caches that were filled."""
        return [
            path
            for path in paths
            if self.state_at_start.get(path, "None") != "None"
            and attribute_of(path) not in self.told
        ]

    def _buffers_apart(self, buffers: Tensor, buffers_of_copies: Tensor) -> list[BufferOfRanks]:
        """The floating-point buffers of models and copies that differ between processes."""
        differing = buffers_apart(self.module, buffers)
        copies = copies_on(self.device, self.objects)
        together = nn.ModuleList(copies.values())
        names = list(copies)
        for buffer in buffers_apart(together, buffers_of_copies):
            place, _, name = buffer.name.partition(".")
            differing.append(replace(buffer, name=f"{names[int(place)]}.{name}"))
        return differing

    def _warn_of_ranks(self, differing: list[BufferOfRanks]) -> None:
        """Name once what each process fills by its own samples. A collective.

        differing: the floating-point buffers of models and copies that are not the same.
        """
        if self.has_warned_of_ranks:
            return
        names = [buffer.name for buffer in differing if not is_statistic(buffer)]
        names += whole_numbers_apart(self.module, self.device)
        names += numbers_apart(self.objects, self.device)
        if names:
            self.has_warned_of_ranks = True
            log.warning(
                "%s: %s. A checkpoint has the mean over all processes for a model's buffers, and"
                " the value of rank 0 for all else",
                ", ".join(names[:MOST_NAMES]),
                NOT_THE_SAME,
            )

    def _warn_of_batch_norm(self, differing: list[BufferOfRanks]) -> None:
        """Name once the statistics of each process's samples that the user did not choose."""
        if self.may_differ_in_batch_norm:
            return
        names = [buffer.name for buffer in differing if is_batch_norm_apart(buffer)]
        if names:
            self.may_differ_in_batch_norm = True
            holder = names[0].partition(".")[0]
            remedy = "Call run.wrap after the last layer was added to the model"
            if isinstance(self.objects.get(holder), nn.Module):
                remedy = (
                    f"To compute its statistics over all processes, call {holder} ="
                    f" run.wrap({holder}) before run.resume. To leave them unchanged, call"
                    f" {holder}.eval()"
                )
            listed = ", ".join(names[:MOST_NAMES])
            log.warning("%s: %s. %s", listed, BATCH_NORM_APART, remedy)


def _places_of(names: Iterable[str]) -> str:
    """Where state is saved."""
    if all(map(_is_of_models, names)):
        return "a buffer (register_buffer), or in the result of get_extra_state"
    return "the state_dict of an object that run.resume gets"


def _is_of_models(name: str) -> bool:
    return name.startswith("model.") and "'s hook " not in name


def unsaved_state(module: nn.Module, objects: Mapping[str, Stateful]) -> dict[str, str]:
    """Digests of what models and optimizers keep and no state_dict has, by names.

    objects: those that are saved beside the models, by names.
    """
    saved = module.state_dict().keys()
    beside = {
        f"model.{name}": buffer for name, buffer in module.named_buffers() if name not in saved
    }
    roots = beside_states(objects)
    if not any(name.endswith("_extra_state") for name in saved):  # it may hold the attributes
        roots = {"model": module} | roots
    of_model = {f"model.{name}": one for name, one in module.state_dict(keep_vars=True).items()}
    found = state_of(roots, known={**of_model, **objects})
    return state_of(beside) | {
        path: digest for path, digest in found.items() if path.startswith(tuple(roots))
    }
