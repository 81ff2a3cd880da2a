"""What one rank alone knows, its buffers and its running loss, kept so that it does not die with
the rank.

On the CPU each rank writes those that step s+1 will have into shared memory after its last forward
pass of that step and before it contributes its gradients: a rank that has completed s+1 had
everybody's contribution, and so everybody's numbers are there.

On GPUs nothing is written, since the host runs ahead of the device and would have to wait: a model
must have no buffers that training changes, and the loss that is logged next lacks the dead rank's
part.
"""

from __future__ import annotations

import logging
import math
import mmap
import struct
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ddp_train.distributed.connections import break_connections, watch_for_losses
from ddp_train.distributed.environment import nccl_handles_errors
from ddp_train.distributed.process_group import backend, buffer_places
from ddp_train.engine.loop import Job
from ddp_train.errors import LaunchError
from ddp_train.optim.nan_guard import DeviceNonFiniteCheck
from ddp_train.resilience.heartbeat import ROW_BYTES, STARTING, StatusBoard
from ddp_train.tasks.mean_loss import ForwardPass, Mean, is_finite
from ddp_train.text import first_line

SLOTS = 3
"""Steps that a row holds in turns. Two are not enough: a rank may publish two steps beyond the one
that a survivor has completed."""
ALIGNMENT = 64
AVERAGE_OF_ONE = (
    "the average of each rank's own buffers (train.ema_decay) is known to that rank alone"
)
log = logging.getLogger(__name__)


class Row:
    """A rank's row of the board: for three steps in turns the step, a mean loss, and some
    tensors."""

    head = struct.Struct("=qdd")
    mark = struct.Struct("=q")

    def __init__(self, memory: mmap.mmap, like: list[Tensor]) -> None:
        """
        memory: `size(like)` bytes.
        like: tensors of the shapes and dtypes that are held.
        """
        self.memory = memory
        self.begins = [slot * self.size(like) // SLOTS for slot in range(SLOTS)]
        self.slots: list[list[Tensor]] = []
        for begin in self.begins:
            views = []
            place = begin + ALIGNMENT
            for tensor in like:
                flat = torch.empty(0, dtype=tensor.dtype)
                if tensor.numel():
                    flat = torch.frombuffer(
                        memory, dtype=tensor.dtype, count=tensor.numel(), offset=place
                    )
                views.append(flat.view(tensor.shape))
                place += _aligned(tensor.nbytes)
            self.slots.append(views)

    @staticmethod
    def size(like: list[Tensor]) -> int:
        return SLOTS * (ALIGNMENT + sum(_aligned(tensor.nbytes) for tensor in like))

    def write(self, step: int, loss: Mean, tensors: list[Tensor]) -> None:
        """Write the state after a step; the step comes last, so that what a killed process has half
        written has the step of three steps ago."""
        slot = step % SLOTS
        if tensors:
            torch._foreach_copy_(self.slots[slot], tensors)  # pyright: ignore[reportPrivateImportUsage]
        begin = self.begins[slot]
        self.head.pack_into(self.memory, begin, 0, loss.sum, loss.units)
        self.mark.pack_into(self.memory, begin, step + 1)  # 0: nothing was ever written

    def read(self, step: int) -> KnownState | None:
        """The state after a step; None if it is not there."""
        mark, total, units = self.head.unpack_from(self.memory, self.begins[step % SLOTS])
        if mark == step + 1:
            return KnownState(Mean(total, units), self.slots[step % SLOTS])
        return None


class KnownState(NamedTuple):
    """What is known of one rank after a step."""

    loss: Mean
    """The part that no hook has taken yet."""
    buffers: list[Tensor]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class RankState(Protocol):
    """What this rank alone knows, and how the survivors come to know it."""

    def reason_unavailable(self, job: Job) -> str:
        """Why a survivor cannot save in this run; empty if it can."""
        ...

    def begin(self, job: Job) -> None:
        """Prepare to publish. To be called before the first step."""
        ...

    def is_intact(self, job: Job, phase: str, of_peer: bool) -> bool:
        """Whether weights and moments are those of a completed step although an error was
        raised."""
        ...

    def roll_back(self, job: Job) -> None:
        """Make `job.step` the last completed step, after such an error.

        Raises LaunchError if something of its state is unknown.
        """
        ...

    def keep_losses(self, job: Job) -> None:
        """Keep the losses, before hooks act after `job.step`, which may take them."""
        ...

    def states_of_ranks(self, step: int) -> list[KnownState | None]:
        """What is known of each rank after a step; None where nothing is: the step cannot be
        saved."""
        ...


class PublishedState:
    """The state on the CPU, written to the board with each step."""

    def __init__(self, board: StatusBoard, rank: int) -> None:
        self.board = board
        self.rank = rank
        self.places: list[tuple[dict[str, Tensor | None], str]] = []
        """Where the buffers are: a model may put new tensors in their place."""
        self.row: Row | None = None

    @property
    def buffers(self) -> list[Tensor]:
        return [cast(Tensor, holder[name]) for holder, name in self.places]

    def reason_unavailable(self, job: Job) -> str:
        if job.strategy.buffers_differ:
            self.places = buffer_places(job.module)
        if Row.size(self.buffers) > ROW_BYTES:
            return "its buffers are too large to be published with each step"
        if not self.board.has_rows():
            return "the size of files is limited (ulimit -f)"
        if any(buffer.layout != torch.strided or buffer.is_quantized for buffer in self.buffers):
            return "a buffer of its model is no plain tensor"
        if job.stepper.average and any(buffer.is_floating_point() for buffer in self.buffers):
            return AVERAGE_OF_ONE
        return ""

    def begin(self, job: Job) -> None:
        self.row = Row(self.board.row(self.rank, Row.size(self.buffers)), self.buffers)
        self.publish(job.step, Mean())

    def publish(self, step: int, loss: Mean) -> Callable[[], None]:
        """Write what this rank alone knows of the step that is being computed. To be called before
        its gradients are exchanged."""
        try:
            if self.row:
                self.row.write(step, loss, self.buffers)
        except RuntimeError as error:  # a buffer has another shape now
            self.row = None
            self.board.ranks[self.rank].recovery.state = STARTING
            log.warning(
                "if a rank dies, the run restarts from its last checkpoint: %s", first_line(error)
            )
        return lambda: None

    def is_intact(self, job: Job, phase: str, of_peer: bool) -> bool:
        return is_intact_after_exchange(job, phase, of_peer)

    def roll_back(self, job: Job) -> None:
        """Nothing to do: weights and moments change in the optimizer step alone, which exchanges
        nothing, so `job.step` is right. Buffers have moved on when a collective fails in the next
        step: the row has them."""

    def keep_losses(self, job: Job) -> None:
        """Nothing to do: the row has them."""

    def states_of_ranks(self, step: int) -> list[KnownState | None]:
        ranks = range(len(self.board.ranks))
        return [
            Row(self.board.row(rank, Row.size(self.buffers)), self.buffers).read(step)
            for rank in ranks
        ]


def is_intact_after_exchange(job: Job, phase: str, of_peer: bool) -> bool:
    """Whether weights and moments on the CPU are those of a completed step.

    A peer's error comes out of an exchange. In the optimizer step there is one before the update,
    if the optimizer is torch's or ours; `strategy=ordered` has set the buffers of the next step by
    then. Any other error, a signal handler's above all, may come out of anything: it is believed
    where nothing changes.
    """
    if not of_peer:
        return phase in ("data", "forward", "backward")
    known = type(job.stepper.optimizer).__module__.startswith(("torch.optim.", "ddp_train."))
    return phase != "optimizer step" or (known and job.strategy.buffers_differ)


class StateOnDevice:
    """The state on GPUs, where nothing can be written with each step.

    An update reads a flag on the device after its exchange, and does nothing once peers are lost.
    Steps that were queued behind the lost one change nothing then, however many they are, also in
    captured graphs.
    """

    def __init__(self, board: StatusBoard, rank: int, device: str) -> None:
        self.board = board
        self.rank = rank
        self.device = device
        self.before: list[Tensor] = []
        """The buffers as they were before the first step."""
        self.kept: tuple[int, list[ForwardPass]] = -1, []
        """The last step after which hooks acted, and the losses before they did."""

    def reason_unavailable(self, job: Job) -> str:
        check = job.stepper.check_finite
        for module in job.module.modules():
            if getattr(module, "track_running_stats", False):
                name = type(module).__name__
                return f"batch norm's statistics on a GPU ({name}) die with their rank"
        if not job.strategy.buffers_differ:
            return "strategy=ordered has nothing to offer on GPUs"
        if len(self.board.ranks) > 2:
            # One that aborts may pass garbage on to another that has not set its flag yet: all
            # would have to first.
            return "on GPUs this is done with two processes only"
        if backend() != "nccl":
            return "launch.backend=gloo on GPUs"
        if nccl_handles_errors():
            return (
                "TORCH_NCCL_ASYNC_ERROR_HANDLING is set: NCCL may end a collective before it is"
                " known to be lost"
            )
        if getattr(job.stepper.optimizer, "is_collective", False):
            return "the optimizer exchanges its updates after the device has judged the step"
        if job.stepper.scaled:
            return "the loss scaler of tuning.precision=fp16 moves with steps that are skipped"
        if isinstance(check, DeviceNonFiniteCheck) and job.stepper.average:
            return "the average of the weights (train.ema_decay) moves with steps that are skipped"
        if watch_for_losses(self.device):
            return ""
        return "kernels cannot read this host's memory"

    def begin(self, job: Job) -> None:
        job.stepper.check_finite.peers = watch_for_losses(self.device)
        self.before = [buffer.cpu() for buffer in job.module.buffers()]

    def is_intact(self, job: Job, phase: str, of_peer: bool) -> bool:
        """As in RankState: after a peer's error wherever the host is, for it runs ahead.

        An optimizer of the user's own may have failed in the middle of an update. Any other error,
        a signal handler's above all, may come out of anything.
        """
        if not of_peer:
            return phase == "data"
        known = type(job.stepper.optimizer).__module__.startswith(("torch.optim.", "ddp_train."))
        return known or phase != "optimizer step"

    def roll_back(self, job: Job) -> None:
        break_connections()  # what is queued must come to an end
        torch.cuda.synchronize()
        stepper = job.stepper
        status = self.board.ranks[self.rank]
        job.step = stepper.steps_done = status.step = stepper.check_finite.steps_taken(
            stepper.steps_done
        )
        stepper.norm = None  # of a step that was skipped
        buffers = [buffer.cpu() for buffer in job.module.buffers()]
        names = [name for name, _ in job.module.named_buffers()]
        for name, now, before in zip(names, buffers, self.before, strict=True):
            if not now.allclose(before, rtol=0, atol=0, equal_nan=True):
                raise LaunchError(
                    f"the buffer {name} changes in training, and that of the dead rank died with it"
                )
        kept_at, passes = self.kept
        if kept_at != job.step:
            passes = stepper.losses.passes
        losses = []
        units = []
        for loss, count, micro_batch in passes:
            is_done = micro_batch.step < job.step and micro_batch.num_real
            if is_done and is_finite(loss):
                losses.append(float(loss))
                units.append(float(count))
        self._row(self.rank).write(job.step, Mean(math.fsum(losses), math.fsum(units)), [])

    def _row(self, rank: int) -> Row:
        """A row of the loss alone."""
        return Row(self.board.row(rank, Row.size([])), [])

    def keep_losses(self, job: Job) -> None:
        self.kept = job.step, list(job.stepper.losses.passes)

    def states_of_ranks(self, step: int) -> list[KnownState | None]:
        states: list[KnownState | None] = []
        for rank in range(len(self.board.ranks)):
            state = self._row(rank).read(step)
            # Survivors that are a step behind have written another step.
            loss = state.loss if state else Mean()
            states.append(KnownState(loss, self.before))
        return states
