"""Keeps the state of a session outside its processes, where a checkpoint could be saved.

It is what a checkpoint would have: the tensors of what `run.resume` got, and packed beside them the
rest. Processes exchange only the states of streams of which each reads its own part, and, every
few hundred steps, how long keeping takes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_train.distributed.process_group import from_all_ranks
from ddp_train.distributed.replicas import norms_of
from ddp_train.errors import LaunchError
from ddp_train.plain_state import plain_state
from ddp_train.recovery.kept_layout import Layout
from ddp_train.recovery.pace import SHARE, SessionPace
from ddp_train.recovery.packing import StatePacker
from ddp_train.recovery.state_keeper import StateKeeper
from ddp_train.resilience import run_lock
from ddp_train.sessions.gradients import GradientWatch, as_saved
from ddp_train.sessions.model_parts import ModelParts, state_of
from ddp_train.sessions.models import Models
from ddp_train.sessions.numbers import NumbersNow
from ddp_train.sessions.session_checkpoints import SessionCheckpoints
from ddp_train.tensor_tree import tensors

SHARE_ON_CPU = 0.1
"""The part of the time of training that keeping may take on the CPU, if it takes FREE_SECONDS."""
FREE_SECONDS = 0.002
"""What keeping may take in each step on the CPU, however short that is."""
WORTH_TELLING_SECONDS = 1.0
"""The seconds of training that a failure may cost on a GPU without a note at the start."""
WORTH_TELLING_SECONDS_ON_CPU = 0.1
"""The same on the CPU, where else each step is kept."""
LARGE_BYTES = 2**20
"""Bytes of an object beside its tensors from which on the note names it."""


class SessionTensors:
    """The tensors of a session's state, as a `StateKeeper` copies them."""

    tree = None

    def __init__(self, packer: StatePacker) -> None:
        self.common = packer.common
        self.of_leader = packer.of_leader
        self.own_now = packer.own
        self.shapes = _shapes([*packer.common, *packer.own])

    def own(self) -> list[Tensor]:
        return self.own_now

    def layout(self, ranks: int) -> Layout:
        return Layout.of(self.own_now, self.common, ranks, self.of_leader)

    def take(self, packer: StatePacker) -> bool:
        """Take the tensors after another step. Returns False if they need another layout."""
        counts = (len(packer.common), packer.of_leader)
        if counts != (len(self.common), self.of_leader):
            return False
        if self.shapes != _shapes([*packer.common, *packer.own]):
            return False
        self.common = packer.common
        self.own_now = packer.own
        return True


def _shapes(tensors: list[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


class SessionKeeper:
    """Keeps the state of a session on one process."""

    def __init__(
        self,
        keeper: StateKeeper,
        checkpoints: SessionCheckpoints,
        models: Models,
        device: str,
        is_leader: bool,
    ) -> None:
        self.keeper = keeper
        self.checkpoints = checkpoints
        self.models = models
        self.parts: ModelParts | None = None
        self.device = device
        self.is_leader = is_leader
        self.pace = SessionPace(SHARE_ON_CPU, FREE_SECONDS)
        if keeper.device:
            self.pace = SessionPace(SHARE)
        self.lasting = b""
        self.lasting_since: Any = None
        """What it depends on, as it was when that was packed."""
        self.tensors: SessionTensors | None = None
        self.last_mark = -1
        """The mark of the state that was kept last."""
        self.largest = ("", 0)
        """The object with most data beside tensors on the device, and their bytes."""
        self.has_told = False

    def begin(self) -> None:
        """Keep states from now on."""
        run_dir = self.checkpoints.settings.run_dir
        facts = {"is_session": True, "owner": run_lock.owner(run_dir / run_lock.FILE)}
        try:
            self.keeper.begin(facts)
        except LaunchError as error:
            self.keeper.give_up(error)

    def comes_to_keep(self, mark: int) -> bool:
        """Whether the state is kept now: on all processes alike.

        mark: see `state_mark`.
        """
        return mark != self.last_mark and self.pace.comes_to_keep()

    def keep(
        self,
        mark: int,
        take_session: Callable[[], dict[str, Any]],
        take_numbers: Callable[[], NumbersNow],
        watch: GradientWatch,
    ) -> None:
        """Keep a state. All processes must call it: a stream's state may be exchanged.

        take_session: see `SessionCheckpoints.session_state`.
        take_numbers: see `SessionNumbers.not_in_lines`.
        watch: knows which gradients the next step needs.
        """
        self.last_mark = mark
        if self.keeper.device:
            torch.cuda.current_stream().synchronize()
        began = time.perf_counter()
        session = take_session()
        numbers = take_numbers()
        if self.keeper.is_over:
            return
        packer = StatePacker(self.device)
        with self.keeper.turn() as kept:
            beside = self._packed(packer, session, numbers, watch)
            if self.tensors is None or not self.tensors.take(packer):
                self.tensors = SessionTensors(packer)
            kept.write(mark, self.tensors, beside=beside)
        self.pace.took(time.perf_counter() - began)

    def take_back(self, mark: int) -> None:
        """Go back to the state before, if the one with this mark was kept last."""
        if mark == self.last_mark and not self.keeper.is_over:
            self.keeper.take_back()

    def agree(self) -> None:
        """Agree how often a step is kept. A collective."""
        here = torch.tensor(self.pace.collect(), dtype=torch.float64, device=self.device)
        self.pace.deliver(from_all_ranks(here).tolist())
        seconds = self.pace.every * self.pace.step_seconds
        limit = WORTH_TELLING_SECONDS if self.keeper.device else WORTH_TELLING_SECONDS_ON_CPU
        _, bytes_of_largest = self.largest
        is_worth_telling = seconds > limit or bytes_of_largest > LARGE_BYTES
        if self.pace.every == 1 or not is_worth_telling or self.has_told:
            return
        self.has_told = True
        if self.is_leader and not self.keeper.is_over:
            print(self._note(), file=sys.stderr)

    def _note(self) -> str:
        name, size = self.largest
        cause = ""
        if size > LARGE_BYTES:
            cause = f" ({name} has {size / 2**20:,.0f} MiB that are not tensors)"
        return (
            "note: ddp_train.session: copying a step into memory, for a restart after a failure,"
            f" takes {self.pace.cost_seconds:.2g} s{cause}. So only one step in {self.pace.every}"
            " is copied, and a failure loses the steps after that one"
        )

    def _packed(
        self,
        packer: StatePacker,
        session: dict[str, Any],
        numbers: NumbersNow,
        watch: GradientWatch,
    ) -> bytes:
        """The state beside its tensors, which are listed. See `recovery.kept_session.RankState`."""
        parts = self._model_parts()
        parts.add_to(packer)
        norms = norms_of(parts.measured.values()).to(self.device)
        packer.add_own(norms)
        gradients = {name: as_saved(one) for name, one in watch.wanted(parts.named).items()}
        for gradient in tensors(gradients):
            packer.add_own(gradient)
        objects = {
            name: packer.packed(
                plain_state(state_of(holder), f"the state_dict of {name}"),
                is_same=isinstance(holder, Optimizer),
            )
            for name, holder in self.checkpoints.objects.items()
        }
        name = max(objects, key=lambda name: len(objects[name]), default="")
        self.largest = (name, len(objects.get(name, b"")))
        of_all = {
            "model": parts.packed_state(packer),
            "objects": objects,
            "session": session,
            "numbers": numbers.of_all,
        }
        rank_state = {
            "of_all": packer.packed(of_all, is_same=False),
            "lasting": self._lasting(parts, packer),
            "buffers": len(parts.places),
            "buffers_of_copies": len(parts.places_of_copies),
            "gradients": gradients,
            "norms": norms,
            "logged": numbers.logged,
            "samples": numbers.samples,
        }
        return packer.packed(rank_state, is_same=False)

    def _lasting(self, parts: ModelParts, packer: StatePacker) -> bytes:
        """What stays as long as the same parameters train, in the same groups."""
        trains = [parameter.requires_grad for _, parameter in parts.named]
        optimizers = [
            holder for holder in self.checkpoints.objects.values() if isinstance(holder, Optimizer)
        ]
        groups = [len(group["params"]) for one in optimizers for group in one.param_groups]
        reason = (parts.registrations, trains, groups)
        if reason != self.lasting_since:
            self.lasting_since = reason
            lasting = {
                "session": self.checkpoints.lasting_state(),
                "manifest": self.checkpoints.manifest(),
                "names": [*parts.measured],
            }
            self.lasting = packer.packed(lasting, is_same=False)
        return self.lasting

    def _model_parts(self) -> ModelParts:
        registrations = self.models.registrations
        if self.parts is None or self.parts.registrations != registrations:
            copies = self.checkpoints.copies_here()
            # A new ModuleList counts too.
            self.parts = ModelParts(self.checkpoints.module, copies, self.models.registrations)
        return self.parts
