"""Checkpoints of a session: as those of a run, with any objects that the user names."""

from __future__ import annotations

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
from ddp_train.distributed.process_group import averaged_buffers, same_everywhere
from ddp_train.distributed.replicas import check_same_weights
from ddp_train.distributed.world import World
from ddp_train.errors import DataError
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
from ddp_train.sessions.session_objects import Stateful, copies_on
from ddp_train.sessions.settings import Settings
from ddp_train.sessions.watches.checkpoint_watch import CheckpointWatch
from ddp_train.sessions.wrapped import Wrapped

log = logging.getLogger(__name__)
SAME_OBJECTS = (
    "pass run.resume the same objects as when the checkpoint was saved. To start over, use a new"
    " folder: ddp_train.session('runs/new')"
)


class SessionCheckpoints:
    """Saves and restores a session: the model, the user's objects, and where the loop is."""

    def __init__(
        self,
        settings: Settings,
        world: World,
        models: Mapping[str, Wrapped],
        objects: Mapping[str, Stateful],
        status: RankStatus,
        device: str,
    ) -> None:
        """
        models: those of `run.wrap`, by the names that `run.resume` got.
        objects: the others, by those names.
        """
        self.settings = settings
        self.world = world
        self.device = device
        self.models = list(models)
        self.modules = {name: model.module for name, model in models.items()}
        self.module = as_one(models)
        self.objects = objects
        self.status = status
        self.writer: Writer | None = None
        self.saved: Position | None = None
        """The position that was saved last, or resumed from."""
        self.numbers: dict[str, Any] = {}
        """State of the numbers that were logged, of the checkpoint that the run resumed from."""
        self.resumed_from: Path | None = None
        self.checkpoint_watch = CheckpointWatch(self.module, objects, device, settings.keep)
        self.earlier_batches: dict[str, Any] = {}
        """Facts that identify the batches of the checkpoint that the run resumed from."""
        self.saved_loaders: list[dict[str, Any]] = []
        """States of the training loaders in that checkpoint, in the order in which they were
        made."""

    def restore(self, watch: GradientWatch) -> Position:
        """Load the newest checkpoint that is whole, and return its position.

        watch: gets what is known of the gradients in it.

        Without one, the beginning. Raises DataError if it is of other objects.
        """
        path = reader.find("auto", self.settings.run_dir)
        step = read_manifest(path)["step"] if path else -1
        same_everywhere(step, self.device, "the step of the newest checkpoint")
        if path is None:
            return Position()
        state = TrainingState.load(path)
        if state.session is None:
            raise DataError(
                f"{path} was not saved by ddp_train.session, so it does not say at which epoch"
                " and batch to resume",
                "use a new folder: ddp_train.session('runs/new')",
            )
        if "loaders" not in state.session:
            raise DataError(
                f"{path} was saved by an earlier version of ddp_train, without the states of the"
                " loaders, so the next batch is not known",
                "finish the run with the version of ddp_train that began it. Or use a new"
                " folder, and load the weights there:"
                f" safetensors.torch.load_file('{path}/model.safetensors')",
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
            apply_buffers(self.copies_here(), buffers_of_copies, self.world.rank)
        put_back(module, state.session.get("gradients", {}))
        watch.windows.put_back(self.objects, state.session.get("windows", {}), self.device)
        position = Position(**state.session["position"])
        self.saved = replace(position)
        self.numbers = state.session.get("numbers", {})
        self.resumed_from = path
        self.earlier_batches = state.session["batches"]
        self.saved_loaders = state.session["loaders"]
        print(f"resumed from step {position.step} ({position}): {path}", file=sys.stderr)
        return position

    def copies_here(self) -> nn.Module:
        """The copies whose buffers are on this process's device, as one module.

        Batch norm's statistics in them differ between processes, where they are not synchronised.
        """
        return nn.ModuleList(copies_on(self.device, self.objects).values())

    def _check_models(self, path: Path, saved: list[str]) -> None:
        # A single model is saved by its own names.
        if sorted(saved) == sorted(self.models) or len(saved) == len(self.models) == 1:
            return
        raise DataError(
            f"{path} has the models {', '.join(saved)}, but run.resume got"
            f" {', '.join(self.models)}",
            SAME_OBJECTS,
        )

    def _check_names(self, path: Path, saved: dict[str, Any]) -> None:
        differing = sorted({*saved} ^ {*self.objects})
        if differing:
            raise DataError(
                f"{path} has {_listed(saved)} besides the model, but run.resume got"
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
                    what = (
                        f"its groups are in another order, and {rated[0]} has a learning rate for"
                        " each group by its place"
                    )
            if what:
                raise DataError(
                    f"{path}: the parameters of {name}, or their order, have changed: {what}",
                    f"build {name} with the same groups in the same order as when it was saved"
                    " (prune, freeze or add adapters before run.resume). To start over, use a"
                    " new folder: ddp_train.session('runs/new')",
                )
            states[name] = reordered(states[name], before, groups)
        return states

    def save(
        self,
        position: Position,
        loading: dict[str, Any],
        watch: GradientWatch,
        numbers: dict[str, Any],
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
        self.checkpoint_watch.warn_of_nan(position.step)
        gradients = exchanged(module, watch.wanted(module.named_parameters()))
        if position.batch:
            self.checkpoint_watch.warn_of_unsaved_state()
        with (
            averaged_buffers(module, keep_if_alike=True) as buffers,
            averaged_buffers(self.copies_here(), keep_if_alike=True) as buffers_of_copies,
        ):
            self.checkpoint_watch.see_buffers(buffers, buffers_of_copies)
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


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names)) or "nothing"
