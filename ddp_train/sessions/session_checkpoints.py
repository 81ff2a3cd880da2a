"""Checkpoints of a session: as those of a run, with any objects that the user names."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.checkpoints import reader
from ddp_train.checkpoints.layout import read_manifest
from ddp_train.checkpoints.training_state import (
    TrainingState,
    apply_buffers,
    copies_of,
)
from ddp_train.checkpoints.writer import Snapshot, Writer
from ddp_train.distributed.exchange import texts_from_all_ranks
from ddp_train.distributed.process_group import averaged_buffers, same_everywhere
from ddp_train.distributed.replicas import check_same_weights, weight_with_nan
from ddp_train.distributed.world import World
from ddp_train.errors import DataError
from ddp_train.models.python_state import changed, state_of
from ddp_train.plain_state import plain_state
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.sessions.gradients import GradientWatch, as_saved, exchanged, put_back
from ddp_train.sessions.models import as_one
from ddp_train.sessions.parameter_groups import (
    Groups,
    has_rates_by_place,
    places_of_groups,
    problem_of,
    reordered,
)
from ddp_train.sessions.position import Position
from ddp_train.sessions.session_objects import Stateful
from ddp_train.sessions.settings import Settings
from ddp_train.sessions.states_of_ranks import (
    BufferOfRanks,
    buffers_apart,
    is_batch_norm_apart,
    is_statistic,
    numbers_apart,
)
from ddp_train.sessions.wrapped import Wrapped

log = logging.getLogger(__name__)
SAME_OBJECTS = "give run.resume what it got when that was saved, or start over in another run_dir"
NOT_THE_SAME = (
    "not the same on all processes: each fills it by its own samples, and another number of them"
    " has another result; fill it by those of all, which ddp_train.all_gather or run.sum give"
)
BATCH_NORM_APART = (
    "not the same on all processes: a batch norm in train mode that run.wrap did not get is over"
    " each process's own samples, and another number of them has another result"
)
MOST_NAMES = 3
"""The most names of state that a warning lists: a list has one for each item."""


class SessionCheckpoints:
    """Saves and restores a session: the model, the user's objects, and where the loop is."""

    def __init__(
        self,
        settings: Settings,
        world: World,
        models: Mapping[str, Wrapped],
        objects: Mapping[str, Stateful],
        status: RankStatus,
    ) -> None:
        """
        models: those of `run.wrap`, by the names that `run.resume` got.
        objects: the others, by those names.
        """
        self.settings = settings
        self.world = world
        self.models = list(models)
        self.module = as_one(models)
        self.objects = objects
        self.copies = {name: item for name, item in objects.items() if isinstance(item, nn.Module)}
        """The modules among the objects: averages, teachers, losses with buffers."""
        self.status = status
        self.writer: Writer | None = None
        self.saved: Position | None = None
        """The position that was saved last, or resumed from."""
        self.numbers: dict[str, Any] = {}
        """State of the numbers that were logged, of the checkpoint that the run resumed from."""
        self.resumed_from: Path | None = None
        self.state_at_start: dict[str, str] | None = unsaved_state(self.module)
        """None once it was compared."""
        self.has_warned_of_ranks = False
        """State was named that is not the same on all processes."""
        self.may_differ_in_batch_norm = False
        """Batch norm's statistics are not compared between processes: the user chose that they
        differ, or they were named."""
        self.has_warned_of_nan = False
        self.earlier_batches: dict[str, Any] = {}
        """Facts that identify the batches of the checkpoint that the run resumed from."""
        self.saved_loaders: list[dict[str, Any]] = []
        """States of the training loaders in that checkpoint, in the order in which they were
        made."""

    def check_batches(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        """Refuse other batches inside of a pass; at its beginning others may follow.

        before, now: facts that identify them, in the checkpoint and here.

        Raises DataError if they differ.
        """
        for name, value in now.items():
            earlier = before.get(name, value)
            if earlier == value:
                continue
            change = f"{name} was {earlier} and is {value}"
            if name.startswith("data"):
                change = "its samples are others"
            elif name.startswith("drawn"):
                change = "its samples come in another order than before"
            raise DataError(
                f"{self.resumed_from} lies inside of an epoch, and run.loader changed since:"
                f" {change}",
                "finish the epoch with what it began with, or start over in another run_dir",
            )

    def restore(self, device: str, watch: GradientWatch) -> Position:
        """Load the newest checkpoint that is whole, and return its position.

        watch: gets what is known of the gradients in it.

        Without one, the beginning. Raises DataError if it is of other objects.
        """
        path = reader.find("auto", self.settings.run_dir)
        step = read_manifest(path)["step"] if path else -1
        same_everywhere(step, device, "the step of the newest checkpoint")
        if path is None:
            return Position()
        state = TrainingState.load(path)
        if state.session is None:
            raise DataError(
                f"{path} was not saved by a session: it says no epoch and no batch to resume at",
                "name another run_dir",
            )
        if "loaders" not in state.session:
            raise DataError(
                f"{path} was saved by an earlier version, without the states of the loaders: nobody"
                " knows its next batch",
                "finish it with the version that began it, or name another run_dir and load its"
                " weights: load_file('model.safetensors')",
            )
        self._check_models(path, state.session.get("models", self.models))
        self._check_names(path, state.objects)
        states = self._in_order(path, state.objects, state.session.get("groups", {}))
        module = self.module
        state.apply_weights(path, module, module, self.world.rank)
        for name, holder in self.objects.items():
            holder.load_state_dict(states[name])
        buffers_of_copies = state.session.get("buffers_of_copies")
        if buffers_of_copies is not None:
            apply_buffers(self.copies_here(device), buffers_of_copies, self.world.rank)
        put_back(module, state.session.get("gradients", {}))
        watch.windows.put_back(self.objects, state.session.get("windows", {}), device)
        position = Position(**state.session["position"])
        self.saved = replace(position)
        self.numbers = state.session.get("numbers", {})
        self.resumed_from = path
        self.earlier_batches = state.session["batches"]
        self.saved_loaders = state.session["loaders"]
        print(f"resumed from step {position.step} ({position}): {path}", file=sys.stderr)
        return position

    def copies_here(self, device: str) -> nn.Module:
        """The copies whose buffers are on this process's device, as one module.

        Batch norm's statistics in them differ between processes, where they are not synchronised.
        """
        return nn.ModuleList(self._named_copies_here(device).values())

    def _named_copies_here(self, device: str) -> dict[str, nn.Module]:
        place = torch.device(device)
        return {
            name: copy
            for name, copy in self.copies.items()
            if all(buffer.device == place for buffer in copy.buffers())
        }

    def _buffers_apart(
        self, buffers: Tensor, buffers_of_copies: Tensor, device: str
    ) -> list[BufferOfRanks]:
        """The floating-point buffers of models and copies that differ between processes.

        buffers, buffers_of_copies: of all processes, [ranks, n].
        """
        differing = buffers_apart(self.module, buffers)
        names = list(self._named_copies_here(device))
        for buffer in buffers_apart(self.copies_here(device), buffers_of_copies):
            place, _, name = buffer.name.partition(".")
            differing.append(replace(buffer, name=f"{names[int(place)]}.{name}"))
        return differing

    def _check_models(self, path: Path, saved: list[str]) -> None:
        # A single model is saved by its own names.
        if sorted(saved) == sorted(self.models) or len(saved) == len(self.models) == 1:
            return
        raise DataError(
            f"{path} has the models {', '.join(saved)}, and run.resume got"
            f" {', '.join(self.models)}",
            SAME_OBJECTS,
        )

    def _check_names(self, path: Path, saved: dict[str, Any]) -> None:
        differing = sorted({*saved} ^ {*self.objects})
        if differing:
            raise DataError(
                f"{path} has {_listed(saved)} beside the model, and run.resume got"
                f" {_listed(self.objects)}; they differ in {', '.join(differing)}",
                SAME_OBJECTS,
            )

    def _groups(self) -> dict[str, Groups]:
        """The names of the parameters in each group of each optimizer, by the optimizer's name."""
        names = {id(weight): name for name, weight in self.module.named_parameters()}
        return {
            name: [
                [names.get(id(weight), "") for weight in group["params"]]
                for group in holder.param_groups
            ]
            for name, holder in self.objects.items()
            if isinstance(holder, Optimizer)
        }

    def _in_order(
        self, path: Path, objects: dict[str, Any], saved: dict[str, Groups]
    ) -> dict[str, Any]:
        """The saved states of the objects, those of optimizers in the order of their groups now.

        Raises DataError for an optimizer of other parameters, or with groups divided in another
        way; and if a schedule knows the groups by their places, and these have changed.
        """
        states = dict(objects)
        for name, groups in self._groups().items():
            before = saved.get(name, groups)
            if before == groups:
                continue
            what = problem_of(before, groups)
            if not what and places_of_groups(before, groups) != list(range(len(groups))):
                rated = [other for other in states if has_rates_by_place(states[other])]
                if rated:
                    what = f"its groups come in another order, and {rated[0]} has rates by place"
            if what:
                raise DataError(
                    f"{path}: the parameters of {name} are others, or in another order: {what}",
                    "build it with the groups and the order that it had when that was saved (prune,"
                    " freeze or add adapters before run.resume), or start over in another run_dir",
                )
            states[name] = reordered(states[name], before, groups)
        return states

    def save(
        self,
        position: Position,
        loading: dict[str, Any],
        watch: GradientWatch,
        numbers: dict[str, Any],
        device: str,
    ) -> None:
        """Save the state after this step. A collective: every process must call it.

        Training continues while rank 0 writes.

        loading: `batches`, facts that identify them, and `loaders`, the states of the loaders.
        watch: knows which gradients the next step needs.
        numbers: state of those that were logged.
        """
        self.saved = replace(position)
        module = self.module
        check_same_weights(module)
        self._warn_of_nan(position.step)
        gradients = exchanged(module, watch.wanted(module.named_parameters()))
        self._warn_of_unsaved_state(device)
        with (
            averaged_buffers(module, keep_if_alike=True) as buffers,
            averaged_buffers(self.copies_here(device), keep_if_alike=True) as buffers_of_copies,
        ):
            differing = self._buffers_apart(buffers, buffers_of_copies, device)
            self._warn_of_ranks(differing, device)
            self._warn_of_batch_norm(differing)
            if self.world.is_leader:
                if self.writer is None:
                    keep = self.settings.keep
                    on_saving = self.status.set_saving
                    self.writer = Writer(self.settings.run_dir, keep, on_saving=on_saving)
                session = {
                    **self.session_state(position, loading, watch),
                    **self.lasting_state(),
                    "gradients": {name: as_saved(one) for name, one in gradients.items()},
                    "numbers": numbers,
                    "buffers_of_copies": buffers_of_copies,
                }
                self.writer.submit(partial(self._snapshot, position.step, session, buffers))

    def session_state(
        self, position: Position, loading: dict[str, Any], watch: GradientWatch
    ) -> dict[str, Any]:
        """The part of the state after a step that all processes know without an exchange."""
        return {
            "position": dict(vars(position)),
            **loading,
            "windows": watch.windows.state(self.objects),
        }

    def lasting_state(self) -> dict[str, Any]:
        """The part that stays as long as the parameters are in the same groups."""
        return {"groups": self._groups(), "models": self.models}

    def manifest(self) -> dict[str, Any]:
        """Entries of each checkpoint's manifest."""
        return {
            "world_size": self.world.size,
            "torch": str(torch.__version__),  # a class of its own
            "trained": [
                name
                for name, parameter in self.module.named_parameters()
                if parameter.requires_grad
            ],
        }

    def _warn_of_nan(self, step: int) -> None:
        """Name once a weight that is NaN: the loop trains on, and fills all checkpoints with it."""
        if self.has_warned_of_nan:
            return
        name = weight_with_nan(self.module)
        if name:
            self.has_warned_of_nan = True
            log.warning(
                "%s holds a NaN after step %d, and the loop trains on: stop it, since the newest %d"
                " checkpoints alone are kept; to leave such a step out write, before backward(),"
                " `if not math.isfinite(run.sum(loss.item())): continue`",
                name,
                step,
                self.settings.keep,
            )

    def _warn_of_unsaved_state(self, device: str) -> None:
        """Name once what the model has changed and no checkpoint holds. A collective."""
        before = self.state_at_start
        if before is None:
            return
        self.state_at_start = None
        now = unsaved_state(self.module)
        names = [
            path
            for path in changed(before, now)
            if before.get(path, "None") != "None"  # a cache that was filled
        ]
        digests = {name: now.get(name) for name in sorted(names)[:MOST_NAMES]}
        of_ranks = texts_from_all_ranks(json.dumps(digests), device)
        if names:
            log.warning(
                "%s changed in training and is in no checkpoint: a resumed run begins it anew; keep"
                " it in a buffer (register_buffer), or in what get_extra_state returns%s",
                ", ".join(digests),
                f". And it is {NOT_THE_SAME}" if len(set(of_ranks)) > 1 else "",
            )

    def _warn_of_ranks(self, differing: list[BufferOfRanks], device: str) -> None:
        """Name once what each process fills by its own samples. A collective.

        differing: the floating-point buffers of models and copies that are not the same.
        """
        if self.has_warned_of_ranks:
            return
        names = [buffer.name for buffer in differing if not is_statistic(buffer)]
        names += numbers_apart(self.module, self.objects, device)
        if names:
            self.has_warned_of_ranks = True
            log.warning(
                "%s: %s (checkpoints have the mean of a model's buffers, of all else that of rank"
                " 0)",
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
            remedy = "call run.wrap when the model has all its layers"
            if holder in self.copies:
                remedy = (
                    f"{holder} = run.wrap({holder}) before run.resume takes it over all samples,"
                    f" {holder}.eval() leaves its statistics as they are"
                )
            listed = ", ".join(names[:MOST_NAMES])
            log.warning("%s: %s; %s", listed, BATCH_NORM_APART, remedy)

    def _snapshot(self, step: int, session: dict[str, Any], buffers: Tensor) -> Snapshot:
        module = self.module
        state = TrainingState(
            objects={
                name: plain_state(holder.state_dict(), f"the state_dict of {name}")
                for name, holder in self.objects.items()
            },
            buffers=buffers,
            session=session,
        )
        return Snapshot(step, copies_of(module.state_dict()), state.as_dict(), self.manifest())

    def finish(self) -> None:
        """Wait until all is written. Raises WriteError if the last one could not be."""
        if self.writer:
            self.writer.finish()


def unsaved_state(module: nn.Module) -> dict[str, str]:
    """Digests of what a model keeps and its state_dict has not, by names."""
    saved = module.state_dict().keys()
    beside = {
        f"model.{name}": buffer for name, buffer in module.named_buffers() if name not in saved
    }
    if any(name.endswith("_extra_state") for name in saved):
        return state_of(beside)  # it may hold the attributes
    attributes = state_of({"model": module})
    return state_of(beside) | {
        path: digest for path, digest in attributes.items() if path.startswith("model")
    }


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names)) or "nothing"
