"""Another host is lost: each host that is left makes a checkpoint of what its ranks have kept.

torchrun's agents then start the workers of all hosts that are left, which resume there. No process
tells the others what to do: see resilience/lost_hosts.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ddp_train.checkpoints.layout import newest_step
from ddp_train.data.batch_plan import MicroBatch
from ddp_train.distributed.process_group import Store, buffer_places, gather_later
from ddp_train.distributed.world import World
from ddp_train.engine.loop import Job
from ddp_train.errors import LaunchError
from ddp_train.optim.stepper import StepObserver, Stepper
from ddp_train.recovery.kept_checkpoint import save_kept_step
from ddp_train.recovery.live_state import buffers_at
from ddp_train.resilience import lost_hosts
from ddp_train.resilience.failure import is_peer_error
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.resilience.kept_memory import KeptMemory
from ddp_train.tasks.mean_loss import RunningLoss

log = logging.getLogger(__name__)


def reason_not_kept(job: Job, hooks_change_it: bool) -> str:
    """Why the loss of a host costs the steps since the last checkpoint; empty if it does not.

    hooks_change_it: hooks may change buffers, which were sent to the other hosts before.
    """
    has_buffers = any(buffer.is_floating_point() for buffer in job.module.buffers())
    if job.stepper.device != "cpu":
        return "on GPUs memory is kept on one host only"
    if hooks_change_it and has_buffers:
        return "your hooks may change the buffers of each rank"
    if job.stepper.average and has_buffers:
        return "only the rank itself has the average of its buffers (train.ema_decay)"
    if job.stepper.check_finite.most_skipped is not None:
        return "train.on_non_finite=skip may undo a step that was sent already"
    return ""


def memory_of_host(world: World, store: Store) -> KeptMemory | None:
    """Memory that the ranks of a host share, and that lasts as long as one of them.

    None where there can be none.
    """
    key = f"kept_memory/{world.attempt}/{world.rank - world.local_rank}"
    if world.is_local_leader:
        memory = KeptMemory.create(world.local_size)
        store.set(key, f"{os.getpid()} {memory.descriptor}" if memory else "")
        return memory
    place = store.get(key).decode()
    if not place:
        return None
    pid, number = place.split()
    return KeptMemory(os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC))


class OwnNumbers(StepObserver):
    """Sends with each step what each rank alone has, its buffers and its losses, to all ranks.

    Numbers of step s+1 are sent after its last forward pass, beside its gradients, and have arrived
    before its update: who has completed s+1 has those of all ranks after s+1.
    """

    def __init__(self, job: Job) -> None:
        self.losses: RunningLoss = job.stepper.losses
        self.places = buffer_places(job.module)
        self.finish: Callable[[], Tensor] | None = None
        self.of_ranks = torch.empty(0)
        """[ranks, OWN_HEAD + n], float64."""

    def before_backward(self, loss: Tensor, units: Tensor | None, micro_batch: MicroBatch) -> None:
        if not micro_batch.is_last:
            return
        known = self.losses.known_with(
            loss.item(), Stepper.units_seen(units, micro_batch), micro_batch
        )
        buffers = [b for b in buffers_at(self.places) if b.is_floating_point()]
        head = torch.tensor([known.sum, known.units], dtype=torch.float64)
        self.finish = gather_later(torch.cat([head, *(b.double().flatten() for b in buffers)]))

    def before_update(self) -> None:
        assert self.finish
        self.of_ranks = self.finish()


@contextlib.contextmanager
def saving_on_loss(
    job: Job, memory: KeptMemory | None, run_dir: Path, world: World, status: RankStatus
) -> Iterator[None]:
    """A context in which the loss of a peer makes the ranks of a host save what they have kept.

    The error is raised.

    memory: None if nothing is kept.
    """
    try:
        yield
    except RuntimeError as error:
        if is_peer_error(error):
            # torchrun's agent asks the workers of all hosts to stop once that of the dead rank
            # wants to join again: if rank 0, which serves the store, obeyed, the others would take
            # it for the lost one.
            job.stop.leave_after_report()
            with lost_hosts.one_at_a_time(run_dir):
                lost_hosts.note_loss(run_dir, job.step)
                if memory and _save(memory, run_dir, world.local_size, bool(status.saving)):
                    status.has_saved = 1
        raise


def _save(memory: KeptMemory, run_dir: Path, ranks: int, is_saving: bool) -> bool:
    """Make a checkpoint of what the ranks of this host have kept, unless there is one of that step.

    Returns whether there is one now.
    """
    step = memory.newest_step(ranks)
    try:
        if step is not None and step > newest_step(run_dir):
            step = save_kept_step(memory, {}, run_dir, ranks, is_saving)
    except LaunchError as failure:  # another host may be able to
        log.warning("the last step could not be saved: %s", failure)
        return False
    return step is not None
