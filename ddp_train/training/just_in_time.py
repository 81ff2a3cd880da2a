"""What a worker does for the case that another one dies: it publishes what it alone knows, stops, and saves.

A rank's own are its buffers (batch norm's statistics) and its running loss: they would die with it. So each rank writes
those that step s+1 will have into shared memory after its last forward pass of that step and before it contributes its
gradients: whoever has completed s+1 had everybody's contribution, and so everybody's numbers are there.

The one that saves takes all ranks' from there, its own too: buffers have moved on when a collective fails in the next
step. Weights and moments have not, they change in the optimizer step alone, which exchanges nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ddp_train.distributed.connections import break_connections
from ddp_train.distributed.process_group import set_buffers
from ddp_train.errors import DataError
from ddp_train.resilience import run_lock
from ddp_train.resilience.checkpoint_files import place_of, places, read_manifest
from ddp_train.resilience.failure_report import is_peer_error
from ddp_train.resilience.heartbeat import (
    NO_ORDER,
    NOT_SAVED,
    ROW_BYTES,
    SAVE,
    SAVED,
    STARTING,
    STOP,
    STOPPED,
    TRAINING,
    StatusBoard,
)
from ddp_train.tasks.mean_loss import Mean
from ddp_train.text import first_line
from ddp_train.training import averaging, checkpoint
from ddp_train.training.checkpoint import Snapshot
from ddp_train.training.checkpoint_hook import CheckpointHook, with_unreported
from ddp_train.training.hooks import MetricsHook
from ddp_train.training.loop import Job

SLOTS = 3
"""Steps that a row holds in turns. Two are not enough: a rank may publish two steps beyond the one that a survivor has
completed."""
ALIGNMENT = 64
ORDER_SECONDS = 3.0
"""How long a worker with a peer's error waits for the launcher to say that a rank is dead. It sees that in 20 ms."""
OTHER_SECONDS = 0.2
"""The same with an error that is not known as one: gloo may word it in yet another way."""
END_SECONDS = 600.0
"""The longest wait for the next order, or for the end."""
MARK = "just_in_time"
"""The entry of the manifest that tells these checkpoints from others."""
log = logging.getLogger(__name__)


class Row:
    """A rank's row of the board: for three steps in turns the step, a mean loss, and some tensors."""

    head, mark = struct.Struct("=qdd"), struct.Struct("=q")

    def __init__(self, memory: mmap.mmap, like: list[Tensor]) -> None:
        """memory: of `size(like)` bytes. like: tensors of the shapes and dtypes that are held."""
        self.memory = memory
        self.begins = [slot * self.size(like) // SLOTS for slot in range(SLOTS)]
        self.slots: list[list[Tensor]] = []
        for begin in self.begins:
            views, place = [], begin + ALIGNMENT
            for tensor in like:
                flat = torch.empty(0, dtype=tensor.dtype)
                if tensor.numel():
                    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=place)
                views.append(flat.view(tensor.shape))
                place += _aligned(tensor.nbytes)
            self.slots.append(views)

    @staticmethod
    def size(like: list[Tensor]) -> int:
        return SLOTS * (ALIGNMENT + sum(_aligned(tensor.nbytes) for tensor in like))

    def write(self, step: int, loss: Mean, tensors: list[Tensor]) -> None:
        """The step comes last: what a killed process has half written has the step of three steps ago."""
        slot = step % SLOTS
        if tensors:
            torch._foreach_copy_(self.slots[slot], tensors)  # pyright: ignore[reportPrivateImportUsage]
        begin = self.begins[slot]
        self.head.pack_into(self.memory, begin, 0, loss.sum, loss.units)
        self.mark.pack_into(self.memory, begin, step + 1)  # 0: nothing was ever written

    def read(self, step: int) -> tuple[Mean, list[Tensor]] | None:
        """What was written of a step; None if it is not there."""
        mark, total, units = self.head.unpack_from(self.memory, self.begins[step % SLOTS])
        return (Mean(total, units), self.slots[step % SLOTS]) if mark == step + 1 else None


def buffer_places(module: nn.Module) -> list[tuple[dict[str, Tensor | None], str]]:
    """Where each buffer is kept, in the order of `module.buffers()`."""
    names = [name.rpartition(".") for name, _ in module.named_buffers()]
    return [(module.get_submodule(parent)._buffers, name) for parent, _, name in names]


def _is_intact(job: Job, phase: str, of_peer: bool) -> bool:
    """Whether weights and moments are those of `job.step` although an error was raised.

    A peer's error comes out of an exchange. In the optimizer step there is one before the update, if the optimizer is
    torch's or ours; `strategy=ordered` has set the buffers of the next step by then. Any other error, a signal
    handler's above all, may come out of anything: it is believed where nothing changes.
    """
    if not of_peer:
        return phase in ("data", "forward", "backward")
    known = type(job.stepper.optimizer).__module__.startswith(("torch.optim.", "ddp_train."))
    return phase != "optimizer step" or (known and job.strategy.buffers_differ)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class EveryHook:
    """Acts whenever another hook is due."""

    call: Callable[[Job], None]

    def due(self, job: Job) -> int:
        return sys.maxsize

    def act(self, job: Job) -> None:
        self.call(job)


class RecoveryHook:
    """Notes, with the first step that is done after a rank was lost, what that has cost."""

    def __init__(self, record: MetricsHook, lost: dict[str, float], first_step: int) -> None:
        self.at, self.first_step = lost["at"], first_step
        redone = max(0, int(lost["step"]) - first_step)  # 0 too where it was lost before it had resumed
        facts = {"rank": int(lost["rank"]), "step": first_step, "steps_redone": redone}
        self.cost: dict[str, Any] = {**facts, "seconds": None}
        record.recoveries.append(self.cost)

    def due(self, job: Job) -> int:
        return sys.maxsize if self.cost["seconds"] else self.first_step + 1

    def act(self, job: Job) -> None:
        if self.cost["seconds"] is None and job.step > self.first_step:
            self.cost["seconds"] = time.monotonic() - self.at


class JustInTime:
    """Publishes a rank's own numbers with each step, and saves the state of a step if a peer dies."""

    def __init__(self, board: StatusBoard, rank: int, run_dir: Path, checkpoints: CheckpointHook) -> None:
        """checkpoints: makes the snapshots of this run."""
        self.board, self.rank, self.run_dir, self.checkpoints = board, rank, run_dir, checkpoints
        self.status = board.ranks[rank]
        self.owner = run_lock.owner(run_dir / run_lock.FILE)
        self.places: list[tuple[dict[str, Tensor | None], str]] = []
        """Where the buffers are: a model may put new tensors in their place."""
        self.row: Row | None = None
        self.before_hooks: tuple[int, dict[str, Any]] = -1, {}
        """The last step after which hooks acted, and their state before they did."""
        self.reported = -1
        """The last step whose losses hooks have taken, and those of the steps before it."""

    @property
    def buffers(self) -> list[Tensor]:
        return [cast(Tensor, holder[name]) for holder, name in self.places]

    def publish(self, step: int, loss: Mean) -> None:
        """What this rank alone knows of the step that is being computed. Before its gradients are exchanged."""
        if self.row is None:
            return
        try:
            self.row.write(step, loss, self.buffers)
        except RuntimeError as error:  # a buffer has another shape now
            self.row, self.status.state = None, STARTING
            log.warning("if a rank dies, the run restarts from its last checkpoint: %s", first_line(error))

    def _around_hooks(self, job: Job) -> None:
        """Notes where the hooks are: those of users too, which have been added by now."""

        def before(job: Job) -> None:
            self.before_hooks = job.step, self.checkpoints.state()

        def after(job: Job) -> None:
            if not job.stepper.losses.seen:
                self.reported = job.step
            self.status.acted = job.step

        job.hooks = [EveryHook(before), *job.hooks, EveryHook(after)]

    @contextlib.contextmanager
    def offered(self, job: Job, hooks_owed: bool) -> Iterator[None]:
        """Inside, the death of a peer makes this process stop and, if the launcher asks for it, save. The error goes on
        its way if the launcher knows of no death. hooks_owed: those of `job.step` have not acted yet."""
        if job.strategy.buffers_differ:
            self.places = buffer_places(job.module)
        if reason := self._why_not(job):
            log.info("if a rank dies, the run restarts from its last checkpoint: %s", reason)
            yield
            return
        self.row = Row(self.board.row(self.rank, Row.size(self.buffers)), self.buffers)
        self.publish(job.step, Mean())
        self.status.acted = job.step - hooks_owed
        self._around_hooks(job)
        self.status.on_stop = break_connections
        self.status.state = TRAINING
        try:
            yield
        except RuntimeError as error:
            self._stop(job, error)
            raise
        finally:
            self.status.state = STARTING

    def _why_not(self, job: Job) -> str:
        """Why this run has nothing to offer; empty if it has."""
        if Row.size(self.buffers) > ROW_BYTES:
            return "its buffers are too large to be published with each step"
        if not self.board.has_rows():
            return "the size of files is limited (ulimit -f)"
        if any(buffer.layout != torch.strided or buffer.is_quantized for buffer in self.buffers):
            return "a buffer of its model is no plain tensor"
        if job.stepper.average and any(buffer.is_floating_point() for buffer in self.buffers):
            return "the average of each rank's own buffers (train.ema_decay) is known to that rank alone"
        return ""

    def _stop(self, job: Job, error: RuntimeError) -> None:
        """Returns if the launcher knows of no death, or the state may be that of no step; else it ends with the
        process."""
        of_peer = is_peer_error(error)
        if of_peer:
            break_connections()  # peers that wait for this rank learn of it
        if not _is_intact(job, self.status.phase, of_peer):
            return
        deadline = time.monotonic() + (ORDER_SECONDS if of_peer else OTHER_SECONDS)
        while self.status.order == NO_ORDER and time.monotonic() < deadline:
            time.sleep(0.001)
        if self.status.order == NO_ORDER:
            return
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises, anywhere, if a loader process dies now
        log.info("a rank is lost: stopped after step %d (%s)", job.step, first_line(error))
        job.stop.is_over.set()  # what a stop request would do now is the launcher's business
        for parameter in job.module.parameters():
            parameter.grad = None  # partial sums
        self.status.state = STOPPED
        self._wait(STOP)
        if self.status.order != SAVE:
            return
        try:
            saved = self._save(job)
        except Exception as failure:  # noqa: BLE001  whatever it is, another survivor may be able to
            log.warning("step %d could not be saved: %s", job.step, failure)
            saved = False
        self.status.state = SAVED if saved else NOT_SAVED
        self._wait(SAVE)

    def _wait(self, while_it_is: int) -> None:
        deadline = time.monotonic() + END_SECONDS
        while self.status.order == while_it_is and time.monotonic() < deadline:
            time.sleep(0.001)

    def _save(self, job: Job) -> bool:
        """Whether the step is saved now. Raises NonFiniteLossError if a weight is not finite: nobody saves such."""
        snapshot = self.snapshot(job)
        if snapshot is None:
            return False
        if not snapshot.manifest["hooks_owed"] and self._is_saved(job.step):
            return True
        job.stepper.check_finite.check_weights(job.step)
        new = checkpoint.write(self.run_dir, snapshot, self.owner)
        for place in places(self.run_dir):  # of the deaths before, which no hook has removed yet
            with contextlib.suppress(OSError, ValueError):  # what cannot be read was not written here
                if place < new and read_manifest(place).get(MARK):
                    place.rename(place.with_name(f"{place.name}.part-old"))  # the next writer removes it
        return True

    def _is_saved(self, step: int) -> bool:
        """Whether the ordinary checkpoint of this step is there, which knows its score."""
        place = place_of(self.run_dir, step)
        with contextlib.suppress(DataError, OSError, ValueError):
            return place.is_dir() and not read_manifest(place).get(MARK) and bool(checkpoint.find(str(place), place))
        return False

    def snapshot(self, job: Job) -> Snapshot | None:
        """The state after `job.step`, of all ranks; None if that of one is missing."""
        rows = [
            Row(self.board.row(rank, Row.size(self.buffers)), self.buffers).read(job.step)
            for rank in range(len(self.board.ranks))
        ]
        published = [row for row in rows if row]
        if len(published) < len(rows):
            missing = [str(rank) for rank, row in enumerate(rows) if row is None]
            log.warning("step %d cannot be saved: rank %s had not begun to train", job.step, ", ".join(missing))
            return None
        due = self.before_hooks[0] == job.step
        # Who died among the hooks, or before it wrote the checkpoint that they asked for, did not end them. Where they
        # only make up for an evaluation, the state says so, and the lines of this step stay.
        owed = due and any(status.acted < job.step or status.saving for status in self.board.ranks)
        state = self.before_hooks[1] if owed else self.checkpoints.state()
        if owed or self.reported != job.step:
            losses = [loss for loss, _ in published]
            unreported = Mean(math.fsum(loss.sum for loss in losses), math.fsum(loss.units for loss in losses))
            state = with_unreported(state, unreported)
        floating = [number for number, buffer in enumerate(self.buffers) if buffer.is_floating_point()]
        gathered = torch.empty(len(rows) if job.strategy.buffers_differ else 1, 0)
        if self.buffers:
            with torch.no_grad():
                for buffer, own in zip(self.buffers, published[self.rank][1], strict=True):
                    buffer.copy_(own)
        if floating:
            gathered = torch.stack(
                [torch.cat([tensors[number].double().flatten() for number in floating]) for _, tensors in published]
            )
            set_buffers(job.module, gathered.mean(0))
        average = job.stepper.average  # buffers are the same on all ranks then: no collective is needed
        taken = average and averaging.taken(average, job.strategy, job.module, copies=True)
        again = owed and not state["record"]["owes_score"]
        return self.checkpoints.snapshot(job, gathered, taken, state, {MARK: True, "hooks_owed": again, "test": None})
