"""Makes a checkpoint of the last step that all ranks of a host have kept.

Rank 0 of the next attempt does it before it looks for a checkpoint. Where none follows, the
launcher starts `python -m ddp_train.recovery.kept_checkpoint RUN_DIR`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ddp_train.checkpoints.checkpoint_hook import HookStates, add_unreported_loss
from ddp_train.checkpoints.training_state import METRICS, STEPPER
from ddp_train.checkpoints.writer import Snapshot, write_checkpoint
from ddp_train.distributed.environment import descriptor_named, saving_task
from ddp_train.distributed.process_group import barrier
from ddp_train.errors import LaunchError, WriteError
from ddp_train.recovery import live_state
from ddp_train.recovery.device_memory import DeviceMemory
from ddp_train.recovery.kept_hooks import KeptHooks, Logged
from ddp_train.recovery.kept_layout import (
    KeptNorm,
    KeptPlace,
    KeptTensor,
    Layout,
    Views,
    filled,
    unpacked,
)
from ddp_train.recovery.kept_session import KeptSession
from ddp_train.recovery.live_state import (
    AVERAGE,
    BUFFERS,
    GATHERED,
    MODEL,
    OWN_HEAD,
    SKIPPED,
)
from ddp_train.resilience.held_devices import held_name
from ddp_train.resilience.kept_memory import KeptMemory, Place, marked_step
from ddp_train.tasks.logged_numbers import LoggedNumbers
from ddp_train.tasks.mean_loss import Mean
from ddp_train.tensor_tree import tensors

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptLoss:
    """Losses and logged numbers that are in no line of metrics yet."""

    loss: Mean
    logged: Logged


@dataclass(frozen=True)
class KeptRank:
    """The step as one rank has kept it."""

    tree: dict[str, Any]
    layout: Layout
    views: Views
    manifest: dict[str, Any]
    """Entries of each checkpoint's manifest."""
    buffers_differ: bool
    """Whether each rank has buffers of its own."""
    left: KeptLoss
    """What is in no line yet, if hooks have not acted after the step."""
    at: float
    """When the step was kept, by `time.monotonic`; 0 on a GPU."""
    norm: float
    """Of the gradients of the step."""
    begun: int
    """The last step that was kept and after which hooks act."""
    before: KeptHooks
    """The hooks before they acted after this step."""
    after: KeptHooks | None
    """The hooks after they acted; None if they have not."""

    @classmethod
    def read(
        cls, memory: KeptMemory, held: Mapping[tuple[int, int], Tensor], rank: int, mark: int
    ) -> KeptRank:
        """held: the memory on GPUs by rank and place, as bytes; empty on CPUs."""
        place = KeptPlace(memory, held, rank, mark)
        places = place.places
        logged_at = memory.record(rank, places.beside)
        logged: Logged = ([], [])
        if logged_at.mark == mark:
            logged = unpacked(logged_at.text)
        total, units, at, norm = place.record.numbers
        facts = memory.record(rank, Place.FACTS)
        facts_of_run = json.loads(facts.text)
        before = KeptHooks.read(memory.record(rank, places.before))
        assert before, "they are kept before the step"
        after = KeptHooks.read(memory.record(rank, places.after))
        return cls(
            tree=place.tree,
            layout=place.layout,
            views=place.views,
            manifest=facts_of_run["manifest"],
            buffers_differ=facts_of_run["buffers_differ"],
            left=KeptLoss(Mean(total, units), logged),
            at=at,
            norm=norm,
            begun=int(facts.numbers[0]),
            before=before,
            after=after,
        )


class KeptRun:
    """The step as all ranks of a host have kept it."""

    def __init__(
        self,
        memory: KeptMemory,
        held: Mapping[tuple[int, int], Tensor],
        ranks: int,
        mark: int,
    ) -> None:
        """mark: see `KeptMemory.newest_state`."""
        self.step = marked_step(mark)
        self.ranks = [KeptRank.read(memory, held, rank, mark) for rank in range(ranks)]
        """Those of the host."""
        first = self.ranks[0]
        gathered = first.tree.get(GATHERED)
        self.gathered = first.views.own(gathered.number) if gathered else None
        """See `lost_host.OwnNumbers`; None where all ranks are on this host."""
        self.world_size = ranks if self.gathered is None else len(self.gathered)

    def snapshot(self, is_saving: bool) -> Snapshot:
        """The checkpoint of the step. is_saving: one was being written as the processes ended."""
        first = self.ranks[0]
        hooks_owed, states, left = self._hooks(is_saving)
        states = add_unreported_loss(states, self._unreported(left))
        stepper = self._filled(first.tree[live_state.STEPPER])
        logged = LoggedNumbers("cpu")
        logged.load_state(left[0].logged[0])
        logged.add_kept([of_rank.logged[1] for of_rank in left])
        stepper["logged"] = logged.state()
        average = first.tree[AVERAGE]
        average_state = None
        if average:
            average_state = {
                "updates": self._tensor(average["updates"]),
                "buffers": self._of_ranks(average[BUFFERS]),
            }
        training = {
            "objects": {STEPPER: stepper, **states},
            "buffers": self._of_ranks(first.tree[BUFFERS]),
            "average": average_state,
            "session": None,
        }
        # Where hooks only make up for an evaluation, their state says so, and the lines of this
        # step stay.
        hooks_owed = hooks_owed and not states[METRICS]["owes_score"]
        manifest = {"hooks_owed": hooks_owed, "test": None}
        return Snapshot(
            step=self.step,
            model=self._filled(first.tree[MODEL]),
            training=training,
            manifest={**first.manifest, **manifest},
            average=self._filled(average[MODEL]) if average else None,
        )

    def _hooks(self, is_saving: bool) -> tuple[bool, HookStates, list[KeptLoss]]:
        """Whether hooks must act again after this step, their states, and what each rank has that
        they have not reported."""
        acted = [rank.after for rank in self.ranks if rank.after]
        have_begun = any(rank.begun == self.step for rank in self.ranks)
        if len(acted) == len(self.ranks) and not (have_begun and is_saving):
            left = [
                KeptLoss(Mean() if kept.took_losses else rank.left.loss, kept.logged)
                for kept, rank in zip(acted, self.ranks, strict=True)
            ]
            return False, acted[0].states, left
        before = self.ranks[0].before
        seconds = max(0.0, self.ranks[0].at - before.at)
        states = with_seconds(before.states, seconds)
        return have_begun, states, [rank.left for rank in self.ranks]

    def _unreported(self, left: list[KeptLoss]) -> Mean:
        """The losses of all ranks that hooks have not reported. left: of those of this host."""
        losses = [of_rank.loss for of_rank in left]
        if self.gathered is not None and any(loss.units for loss in losses):
            losses = [Mean(*row) for row in self.gathered[:, :OWN_HEAD].tolist()]
        total = math.fsum(loss.sum for loss in losses)
        return Mean(total, math.fsum(loss.units for loss in losses))

    def _of_ranks(self, places: list[KeptTensor]) -> Tensor:
        """The floating-point buffers of each rank: [ranks, n], float64."""
        if not self.ranks[0].buffers_differ:
            return torch.empty(1, 0)
        columns = [self._own(place.number) for place in places if place.own]
        floating = [column for column in columns if column[0].is_floating_point()]
        rows = []
        for rank in range(self.world_size):
            parts = [column[rank].double().flatten() for column in floating]
            rows.append(torch.cat(parts) if parts else torch.empty(0))
        return torch.stack(rows)

    def _own(self, number: int) -> list[Tensor]:
        """A tensor that each rank has of its own, by rank; of whole numbers those of this host."""
        of_host = [rank.views.own(number) for rank in self.ranks]
        if self.gathered is None or not of_host[0].is_floating_point():
            return of_host
        begin = OWN_HEAD
        for kept in self.ranks[0].layout.own[:number]:
            if kept.dtype.is_floating_point:
                begin += kept.shape.numel()
        numbers = self.gathered[:, begin : begin + of_host[0].numel()]
        return [row.to(of_host[0].dtype).view(of_host[0].shape) for row in numbers]

    def _filled(self, tree: Any) -> Any:
        return filled(tree, self._tensor)

    def _tensor(self, place: KeptTensor | KeptNorm) -> Tensor:
        """A tensor. Of buffers that differ between ranks it is the mean, of whole numbers rank
        0's."""
        if isinstance(place, KeptNorm):
            return torch.tensor(self.ranks[0].norm, dtype=place.dtype)
        if not place.own:
            layout = self.ranks[0].layout
            # A copy: torch saves no views of the same memory as different types.
            return self.ranks[layout.owners[place.number]].views.common(place.number).clone()
        of_ranks = self._own(place.number)
        if not of_ranks[0].is_floating_point() or not self.ranks[0].buffers_differ:
            return of_ranks[0].clone()
        mean = torch.stack([view.double() for view in of_ranks]).mean(0)
        return mean.to(of_ranks[0].dtype)


def with_seconds(states: HookStates, seconds: float) -> HookStates:
    """States of hooks as if they had been taken so many seconds later."""
    metrics = dict(states[METRICS])
    for name in ("seconds", "this_epoch_seconds"):
        metrics[name] += seconds
    return {**states, METRICS: metrics}


def save_kept_step(
    memory: KeptMemory,
    held: Mapping[tuple[int, int], Tensor],
    run_dir: Path,
    ranks: int,
    is_saving: bool,
) -> int | None:
    """Write a checkpoint of the last step that all ranks have kept. Returns the step.

    None if there is none, or if one of its weights is not finite: nobody saves such.
    """
    mark = memory.newest_state(ranks)
    if mark is None:
        return None
    facts = json.loads(memory.record(0, Place.FACTS).text)
    if facts["is_session"]:
        snapshot = KeptSession(memory, held, ranks, mark).snapshot()
    else:
        snapshot = KeptRun(memory, held, ranks, mark).snapshot(is_saving)
        if snapshot.training["objects"][STEPPER].pop(SKIPPED, 0):
            return None  # its last steps changed nothing, since a loss was not finite
    trained = [snapshot.model.get(name) for name in snapshot.manifest["trained"]]
    if not all(bool(tensor.isfinite().all()) for tensor in tensors(trained)):
        return None
    write_checkpoint(run_dir, snapshot, facts["owner"])
    return snapshot.step


def save_step_of_last_attempt(
    memory: KeptMemory | None, run_dir: Path, is_leader: bool, device: str
) -> None:
    """Make a checkpoint of what the attempt before has kept, if it has. A collective then.

    Raises WriteError if it cannot be written: the run would go on some steps earlier.
    """
    task = saving_task()
    if task is None:
        return
    if is_leader:
        try:
            if _do(task, memory, run_dir) is None:
                log.warning("the last step is not saved: a loss or a weight is not finite")
        except WriteError:
            raise
        except LaunchError as error:
            log.warning("the last step cannot be saved: %s", error)
    barrier(device)


def _do(task: dict[str, Any], memory: KeptMemory | None, run_dir: Path) -> int | None:
    """Save what the launcher hands on. Returns the step, see `save_kept_step`.

    task: `environment.saving_task`.
    """
    assert memory, "the launcher hands its memory on"
    held: dict[tuple[int, int], Tensor] = {}
    with contextlib.ExitStack() as mapped:
        for rank, place, device, size in task["held"]:
            descriptor = descriptor_named(held_name(rank, place))
            on_device = DeviceMemory.from_descriptor(descriptor, device, size)
            mapped.callback(on_device.release)
            held[rank, place] = on_device.bytes
        return save_kept_step(memory, held, run_dir, task["ranks"], task["is_saving"])


def main() -> NoReturn:
    task = saving_task()
    assert task is not None, "the launcher sets it"
    if task["held"]:
        torch.cuda.init()
    try:
        step = _do(task, KeptMemory.inherited(), Path(sys.argv[1]))
    except LaunchError as error:
        sys.exit(f"the last step cannot be saved: {error}")
    sys.exit(0 if step is not None else 1)


if __name__ == "__main__":
    main()
