"""The mirror of a run: checkpoints are fetched at its start; its end waits for the last copy."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ddp_train.checkpoints.layout import place_of, places, step_of
from ddp_train.checkpoints.mirror import (
    Manifests,
    Mirror,
    UnreachableError,
    best_there,
    owner_of,
)
from ddp_train.checkpoints.mirroring import CopyState, Mirroring
from ddp_train.checkpoints.reader import defect_of
from ddp_train.checkpoints.writer import link_best
from ddp_train.config.checkpoint_checks import changed_keys, differences_of_runs
from ddp_train.config.freeze import bind_frozen
from ddp_train.distributed.process_group import from_leader
from ddp_train.distributed.world import World
from ddp_train.errors import DataError, WriteError
from ddp_train.options.schema import Config
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.resilience.preemption import StopController

LOOK_SECONDS = 0.1
log = logging.getLogger(__name__)


def fetch(config: Config, world: World, device: str, status: RankStatus) -> str:
    """Fetch what a run that begins needs from its mirror.

    Rank 0 does it, the others wait for it, however long it takes.

    Returns a note for the user, "" if nothing newer is there. Raises DataError, also if the mirror
    holds another run's checkpoints.
    """
    if not config.checkpoint.mirror:
        return ""
    with ThreadPoolExecutor(1, thread_name_prefix="mirror") as pool:
        future = None
        if world.is_leader:
            future = pool.submit(fetch_alone, config, world.attempt)
        while not from_leader(future and future.done(), device):
            _wait(status)
        return future.result() if future else ""


def fetch_alone(config: Config, attempt: int) -> str:
    """Do what `fetch` does, on one process.

    attempt: number of the restart; above 0 the checkpoints in the mirror are this run's own.
    """
    run_dir = Path(str(config.run_dir))
    mirror = Mirror(str(config.checkpoint.mirror))
    newest_here = next((step_of(path) for path in places(run_dir) if not defect_of(path)), -1)
    resumes = config.checkpoint.resume == "auto" or attempt > 0
    try:
        with mirror.reached("read"):
            manifests = mirror.manifests()
        earlier = _checked_config(mirror, manifests, config, resumes)
        owner = owner_of(run_dir)
        with mirror.reached("read"):
            mirror.check_free(owner)
        with mirror.reached("written"):
            mirror.claim(owner)
        with mirror.reached("read"):
            step = mirror.fetch(run_dir, manifests, newest_here, config.checkpoint.best)
    except UnreachableError as error:
        if newest_here < 0 or not resumes:
            raise
        log.warning(
            "%s; the run continues from the checkpoint of step %d in run_dir, and copying is"
            " tried again with the next checkpoint",
            error,
            newest_here,
        )
        return ""
    if step is None:
        return ""
    if config.checkpoint.best:
        best = best_there(manifests)
        if best is not None:
            link_best(place_of(run_dir, best))
    differences = ""
    if earlier:
        differences = "".join(f", {text}" for text in changed_keys(earlier, config))
    return (
        f"the checkpoint of step {step} was copied from checkpoint.mirror={mirror.url}{differences}"
    )


def _checked_config(
    mirror: Mirror, manifests: Manifests, config: Config, resumes: bool
) -> Config | None:
    """The config of the mirror's newest checkpoint; None if it has none.

    Raises DataError if they are not checkpoints of this run.
    """
    place = f"checkpoint.mirror={mirror.url}"
    if manifests and not resumes:
        raise DataError(
            f"{place} already holds checkpoints, the newest of step {max(manifests)}, and a new"
            " run would mix its own with them",
            "use another folder for checkpoint.mirror, or empty this one",
        )
    newest = next(iter(manifests.values()), {})
    if not newest.get("config"):
        return None
    earlier, _ = bind_frozen(newest["config"])
    if earlier is None:
        return None
    elsewhere = "another folder for checkpoint.mirror"
    problems = list(differences_of_runs(earlier, config, place, elsewhere))
    if problems:
        raise DataError(
            "; ".join(f"{problem.key}: {problem.rule}" for problem in problems),
            f"use the values of that run, or for a new run {elsewhere}",
        )
    return earlier


def finish(
    mirroring: Mirroring | None,
    config: Config,
    stop: StopController,
    status: RankStatus,
    device: str,
) -> bool:
    """Wait for the last copy, however long it takes, as long as it moves.

    All ranks do, in short exchanges: none is taken for hung. After a stop it waits for half of
    launch.grace_seconds at most.

    mirroring: on rank 0; None on the others.

    Returns whether nothing is left to do for the next start. Raises WriteError if the newest
    checkpoint of a completed run could not be copied.
    """
    if not config.checkpoint.mirror:
        return True
    state = _final_state(mirroring, config, stop, status, device)
    if state == CopyState.COPIED:
        return True
    is_stopped = stop.requested.is_set()
    if mirroring:
        mirror = f"checkpoint.mirror={mirroring.mirror.url}"
        problem = f"the newest checkpoint could not be copied to {mirror}: {mirroring.error}"
        if state == CopyState.FAILED and not is_stopped:
            raise WriteError(
                problem,
                f"the checkpoint itself is in {mirroring.newest}. Check the store, then start the"
                " same command again, which copies it",
            ) from mirroring.error
        if not stop.goes_on:
            if not mirroring.error:
                problem = f"the newest checkpoint has not been copied to {mirror} yet"
            log.warning("%s; run the same command again to copy it", problem)
    return not is_stopped


def _final_state(
    mirroring: Mirroring | None,
    config: Config,
    stop: StopController,
    status: RankStatus,
    device: str,
) -> str:
    """Wait until the last copy has ended or is given up. The same on all ranks."""
    patience_seconds = config.launch.grace_seconds / 2
    while True:
        state = None
        if mirroring:
            state = mirroring.state(stop, patience_seconds, config.launch.timeout_seconds)
        agreed = from_leader(state, device)
        if agreed != CopyState.COPYING:
            return agreed
        _wait(status)


def _wait(status: RankStatus) -> None:
    """Wait until the next look, and show the launcher that the run is alive."""
    time.sleep(LOOK_SECONDS)
    status.batches += 1
