"""What a run does with its mirror: what it takes from there at its start, and that it waits for the
last copy."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ddp_train.checkpoints.layout import place_of, places, step_of
from ddp_train.checkpoints.mirror import (
    COPIED,
    COPYING,
    FAILED,
    Mirror,
    Mirroring,
    UnreachableError,
    best_step,
    owner_of,
)
from ddp_train.checkpoints.reader import defect_of
from ddp_train.checkpoints.writer import link_best
from ddp_train.config.external_checks import changed, of_another_run
from ddp_train.config.migrate import bind_frozen
from ddp_train.distributed.process_group import from_leader
from ddp_train.distributed.world import World
from ddp_train.errors import DataError, WriteError
from ddp_train.options.schema import Config
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.resilience.preemption import StopController

LOOK_SECONDS = 0.1
log = logging.getLogger(__name__)


def fetch(config: Config, world: World, device: str, status: RankStatus) -> str:
    """What a run that begins takes from its mirror, in words; "" if nothing newer is there. Rank 0
    does it, the others wait for it, however long it takes. Raises DataError, also if the mirror
    holds another run's checkpoints."""
    if not config.checkpoint.mirror:
        return ""
    with ThreadPoolExecutor(1, thread_name_prefix="mirror") as pool:
        future = pool.submit(fetch_alone, config, world.attempt) if world.is_leader else None
        while not from_leader(future and future.done(), device):
            _wait(status)
        return future.result() if future else ""


def fetch_alone(config: Config, attempt: int) -> str:
    """As `fetch`, on one process. attempt: above 0 what is in the mirror is this run's own."""
    section = config.checkpoint
    run_dir = Path(str(config.run_dir))
    here = next((step_of(place) for place in places(run_dir) if not defect_of(place)), -1)
    mirror = Mirror(str(section.mirror))
    resumes = section.resume == "auto" or attempt > 0
    try:
        with mirror.reached("read"):
            known = mirror.manifests()
        where = f"checkpoint.mirror={mirror.url}"
        if known and not resumes:
            rule = (
                "a run that does not resume would mix its own with them; name another folder, or"
                " empty that one"
            )
            raise DataError(f"{where} holds checkpoints, the newest of step {max(known)}", rule)
        then = next(iter(known.values()), {}).get("config")
        before = bind_frozen(then)[0] if then else None
        if before and (
            problems := of_another_run(
                before, config, where, "name another folder as checkpoint.mirror"
            )
        ):
            raise DataError("; ".join(problems), "one folder is for one run")
        with mirror.reached("read"):
            mirror.check_free(owner_of(run_dir))
        with mirror.reached("written"):
            mirror.take(owner_of(run_dir))
        with mirror.reached("read"):
            step = mirror.fetch(run_dir, known, here, section.best)
    except UnreachableError as error:
        if here < 0 or not resumes:
            raise
        log.warning(
            "%s; the run goes on from its own checkpoint of step %d, and tries again with each one",
            error,
            here,
        )
        return ""
    if (
        step is not None
        and section.best
        and (best := best_step(known, known[step].get("best_by", {}))) is not None
    ):
        link_best(place_of(run_dir, best))
    differs = "".join(f", {word}" for word in changed(before, config)) if before else ""
    if step is None:
        return ""
    return f"the checkpoint of step {step} was copied from {where}{differs}"


def finish(
    mirroring: Mirroring | None,
    config: Config,
    stop: StopController,
    status: RankStatus,
    device: str,
) -> bool:
    """Waits for the last copy, however long it takes, as long as it moves. All ranks do, in short
    exchanges: nobody is taken for hung. mirroring: on rank 0. Returns whether nothing is left to do
    for the next start.

    After a stop it waits for half of launch.grace_seconds at most. Raises WriteError if the newest
    checkpoint of a completed run could not be copied.
    """
    if not config.checkpoint.mirror:
        return True
    launch = config.launch
    state = COPYING
    while state == COPYING:
        found = mirroring and mirroring.state(
            stop, launch.grace_seconds / 2, launch.timeout_seconds
        )
        state = from_leader(found, device)
        if state == COPYING:
            _wait(status)
    if state == COPIED:
        return True
    if mirroring:
        what = (
            f"the newest checkpoint could not be copied to checkpoint.mirror={mirroring.mirror.url}"
        )
        remedy = f"it is in {mirroring.newest}; check the store, and start the same command again"
        if state == FAILED and not stop.requested.is_set():
            raise WriteError(f"{what}: {mirroring.error}", remedy) from mirroring.error
        if not stop.goes_on:
            log.warning(
                "%s%s; the same command does it",
                what,
                f": {mirroring.error}" if mirroring.error else " yet",
            )
    return not stop.requested.is_set()


def _wait(status: RankStatus) -> None:
    """For another look; the launcher sees that the run is alive."""
    time.sleep(LOOK_SECONDS)
    status.batches += 1
