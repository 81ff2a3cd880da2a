"""What a worker does for the case that another host is lost: it saves the state of the last
completed step, and leaves.

torchrun's agents then start the workers of all hosts that are left, which resume there. No process
tells the others what to do: see resilience/lost_hosts.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from ddp_train.checkpoints import reader
from ddp_train.checkpoints.checkpoint_hook import CheckpointHook
from ddp_train.checkpoints.layout import places, read_manifest
from ddp_train.distributed.connections import break_connections
from ddp_train.distributed.world import World
from ddp_train.engine.loop import Job
from ddp_train.engine.step_observers import LossPublisher
from ddp_train.errors import DataError
from ddp_train.recovery.exchanged_state import ExchangedState
from ddp_train.recovery.just_in_time import JustInTime
from ddp_train.recovery.rank_state import PublishedState, RankState, StateOnDevice
from ddp_train.recovery.survivor import MARK, Survivor
from ddp_train.resilience import lost_hosts
from ddp_train.resilience.failure import is_peer_error
from ddp_train.resilience.heartbeat import SAVED, RankStatus, StatusBoard
from ddp_train.text import first_line

log = logging.getLogger(__name__)


def saver_of(
    job: Job,
    checkpoint_hook: CheckpointHook,
    run_dir: Path,
    world: World,
    status: RankStatus,
    board: StatusBoard | None,
    host_range: str | None,
) -> JustInTime | LostHost | None:
    """What saves the state of a survivor; None where there is none, or nobody starts others in its
    place.

    board: of our own launcher; None under torchrun.
    host_range: of torchrun's agents; None for a fixed number.
    """
    if world.size == 1 or not job.strategy.replicates or not (board or host_range):
        return None
    rank = world.rank
    on_cpu = job.stepper.device == "cpu"
    if board and not on_cpu:
        device_state = StateOnDevice(board, rank, job.stepper.device)
        return JustInTime(board, rank, run_dir, checkpoint_hook, device_state)
    rank_state = PublishedState(board, rank) if board else ExchangedState()
    if on_cpu:
        publisher = LossPublisher(job.stepper.losses, rank_state.publish)
        # First: what it waits for before an update counts to the backward pass.
        job.stepper.observers.insert(0, publisher)
    if board:
        return JustInTime(board, rank, run_dir, checkpoint_hook, rank_state)
    return LostHost(rank, run_dir, checkpoint_hook, rank_state, status)


class LostHost:
    """Saves the state of a completed step if a peer is lost."""

    def __init__(
        self,
        rank: int,
        run_dir: Path,
        checkpoint_hook: CheckpointHook,
        rank_state: RankState,
        status: RankStatus,
    ) -> None:
        """The parameters are those of `Survivor`."""
        self.run_dir = run_dir
        self.rank_state = rank_state
        self.status = status
        self.survivor = Survivor(rank, run_dir, checkpoint_hook, rank_state, status)

    @contextlib.contextmanager
    def saving_on_loss(self, job: Job, hooks_owed: bool) -> Iterator[None]:
        """A context in which the loss of a peer makes this process save; the error is raised.

        hooks_owed: those of `job.step` have not acted yet.
        """
        reason = self.rank_state.reason_unavailable(job)
        if reason:
            log.info("if a host is lost, the run restarts from its last checkpoint: %s", reason)
        else:
            self.rank_state.begin(job)
            self.survivor.surround_hooks(job)
        try:
            yield
        except RuntimeError as error:
            if is_peer_error(error):
                break_connections()  # peers that wait for this rank learn of it
                # torchrun's agent asks the workers of all hosts to stop once that of the dead rank
                # wants to join again: if rank 0, which serves the store, obeyed, the others would
                # take it for the lost one.
                job.stop.leave_after_report()
                with lost_hosts.one_at_a_time(self.run_dir):
                    lost_hosts.note_loss(self.run_dir, job.step)
                    if not reason:
                        self._save(job, error)
            raise

    def _save(self, job: Job, error: RuntimeError) -> None:
        if not self.rank_state.is_intact(job, self.status.phase, of_peer=True):
            return
        for parameter in job.module.parameters():
            parameter.grad = None  # partial sums
        try:
            if self._is_saved(job.step) or self.survivor.save(job):
                log.info("a host is lost: step %d is saved (%s)", job.step, first_line(error))
                self.status.recovery.state = SAVED
        except Exception as failure:  # noqa: BLE001  whatever it is, another survivor may be able to
            log.warning("step %d could not be saved: %s", job.step, failure)

    def _is_saved(self, step: int) -> bool:
        """Whether another survivor was here before, and had done as many steps."""
        for place in places(self.run_dir):
            with contextlib.suppress(DataError, OSError, ValueError):
                manifest = read_manifest(place)
                if (
                    manifest["step"] >= step
                    and manifest.get(MARK)
                    and reader.find(str(place), place)
                ):
                    return True
        return False
