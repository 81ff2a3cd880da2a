"""Checkpoints copied to another place, an object store above all, and taken from there by a run
that has none.

A checkpoint counts there once its manifest is there, which is copied last: an upload that was cut
off is none. What cannot be read now may be whole: only what has arrived and is corrupt is passed
over, and nothing that is newer than the run's own checkpoints is removed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ddp_train.checkpoints.layout import MANIFEST, place_of, places, read_manifest, step_of
from ddp_train.checkpoints.reader import defect_of
from ddp_train.engine.selection import Selection
from ddp_train.errors import DataError, WriteError
from ddp_train.resilience import run_lock
from ddp_train.resilience.preemption import StopController
from ddp_train.text import first_line

OWNER = "owner.json"
"""Which run copies its checkpoints there."""
COPIED = "copied"
COPYING = "copying"
FAILED = "failed"
LEFT = "left"
log = logging.getLogger(__name__)


class UnreachableError(DataError):
    """The store does not answer, or does not let us in."""


class NotOursError(Exception):
    """Another run copies its checkpoints there now."""


class Mirror:
    """The folder of one run in a file system of fsspec's: s3://BUCKET/RUN, gs://BUCKET/RUN,
    file:///PATH.

    Names are listed and compared, never matched as patterns: a URL may have brackets.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.moved_at = time.monotonic()
        """When a file, or a part of one, was last on its way."""

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """The file system, and the folder of the checkpoints in it."""
        import fsspec  # few runs need it

        files, root = fsspec.url_to_fs(self.url, use_listings_cache=False)
        return files, f"{root}/checkpoints"

    @property
    def files(self) -> Any:
        return self._opened[0]

    @property
    def root(self) -> str:
        return self._opened[1]

    @contextlib.contextmanager
    def reached(self, verb: str) -> Iterator[None]:
        """Inside, whatever the store says is an UnreachableError. verb: read or written."""
        try:
            yield
        except (DataError, WriteError):
            raise
        except Exception as error:  # its own kinds, and those of the libraries below it
            what = (
                f"checkpoint.mirror={self.url} cannot be {verb}: {type(error).__name__}:"
                f" {first_line(error)}"
            )
            remedy = "check the URL, the network, and the credentials in the environment"
            raise UnreachableError(what, remedy) from error

    # --- what is there ----------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Of the checkpoints that are complete there, the newest first."""
        return sorted(
            (step for step in self._begun() if MANIFEST in self._names(self._there(step))),
            reverse=True,
        )

    def manifests(self) -> dict[int, dict[str, Any]]:
        """Of the checkpoints that are complete there, the newest first. One that is corrupt is
        passed over."""
        found = {}
        with tempfile.TemporaryDirectory() as folder:
            for step in self.steps():
                try:
                    self._get(step, MANIFEST, Path(folder))
                    found[step] = read_manifest(Path(folder))
                except (FileNotFoundError, ValueError) as error:
                    self._passed_over(step, error)
        return found

    def _begun(self) -> list[int]:
        names = [re.fullmatch(r"step_(\d{8})", name) for name in self._names(self.root)]
        return [int(name[1]) for name in names if name]

    def _names(self, folder: str) -> set[str]:
        try:
            return {
                str(path).rstrip("/").rpartition("/")[2]
                for path in self.files.ls(folder, detail=False)
            }
        except FileNotFoundError:
            return set()

    def _there(self, step: int) -> str:
        return f"{self.root}/{place_of(Path(), step).name}"

    # --- to there ---------------------------------------------------------------------------------

    def take(self, owner: dict[str, Any]) -> None:
        """From now on this run copies there, and no other. Shows that the store can be written
        before the first step, not after the last."""
        self.files.makedirs(self.root, exist_ok=True)
        self.files.pipe_file(f"{self.root}/{OWNER}", json.dumps(owner).encode())

    def owner(self) -> dict[str, Any] | None:
        """What `take` was given last; None if nobody has taken it, empty if it cannot be
        understood."""
        try:
            found = json.loads(self.files.cat_file(f"{self.root}/{OWNER}"))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def check_free(self, owner: dict[str, Any]) -> None:
        """Raises DataError if another run has it that is alive, as far as that is to be seen from
        here: by the lock of its run directory."""
        now = self.owner() or {}
        lock = Path(str(now.get("run_dir")), run_lock.FILE)
        if (
            now != owner
            and run_lock.is_held(lock)
            and run_lock.owner(lock).get("id") == now.get("id")
        ):
            what = f"checkpoint.mirror={self.url} belongs to {_described(now)}, which is going on"
            raise DataError(what, "wait for its end, or name another folder")

    def check_owner(self, owner: dict[str, Any]) -> None:
        """Raises NotOursError if another run has taken it since."""
        now = self.owner()
        if now is None:  # somebody has emptied it
            self.take(owner)
        elif now != owner:
            raise NotOursError(
                f"{_described(now)} copies its checkpoints there now; this one does no longer"
            )

    def push(self, place: Path) -> None:
        """Copies a checkpoint. One of the same step that was there counts no more from the first
        file on."""
        there = self._there(step_of(place))
        with contextlib.suppress(FileNotFoundError):
            self.files.rm_file(f"{there}/{MANIFEST}")
        self.files.makedirs(there, exist_ok=True)
        names = sorted(path.name for path in place.iterdir() if path.name != MANIFEST)
        for name in (*names, MANIFEST):
            self._move("put_file", str(place / name), f"{there}/{name}")

    def remove_all_but(self, kept: set[int]) -> None:
        """What is newer than all of these stays: this run has not seen it, or could not use it."""
        for step in self._begun():
            if step not in kept and step < max(kept, default=0):
                there = self._there(step)
                for name in sorted(self._names(there), key=lambda name: name != MANIFEST):
                    self.files.rm_file(f"{there}/{name}")
                with contextlib.suppress(
                    OSError, NotImplementedError
                ):  # an object store has no folders
                    self.files.rmdir(there)

    # --- from there -------------------------------------------------------------------------------

    def fetch(
        self, run_dir: Path, known: dict[int, dict[str, Any]], newer_than: int, with_best: bool
    ) -> int | None:
        """Copies the newest valid checkpoint after a step into `run_dir`; with_best: and the best.
        known: as `manifests` gives them. Returns its step, None if there is none. Raises WriteError
        if the disk is full."""
        steps = [step for step in known if step > newer_than]
        if (
            steps and with_best
        ):  # first: a process that dies in between must not leave the newest alone
            best = best_step(known, known[steps[0]].get("best_by", {}))
            if best is not None and best != steps[0] and not place_of(run_dir, best).exists():
                self._pull(best, run_dir)
        return next((step for step in steps if self._pull(step, run_dir)), None)

    def _pull(self, step: int, run_dir: Path) -> bool:
        """Whether the checkpoint is in `run_dir` now, verified."""
        place = place_of(run_dir, step)
        part = place.with_name(f"{place.name}.part-fetched")
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        try:
            part.mkdir(parents=True)
            self._get(step, MANIFEST, part)
            for name in read_manifest(part)["files"]:
                if Path(name).name != name:
                    raise ValueError(f"{MANIFEST} names a file outside of its folder: {name}")
                self._get(step, name, part)
            if defect := defect_of(part):
                raise ValueError(defect)
            if place.exists():  # a corrupt one
                shutil.rmtree(place)
            part.rename(place)
        except (FileNotFoundError, ValueError) as error:
            self._passed_over(step, error)
            return False
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            what = (
                f"the checkpoint of step {step} cannot be copied from checkpoint.mirror={self.url}:"
                f" {error.strerror}"
            )
            raise WriteError(what, f"free some space for {place.parent}") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return True

    def _get(self, step: int, name: str, folder: Path) -> None:
        self._move("get_file", f"{self._there(step)}/{name}", str(folder / name))

    def _passed_over(self, step: int, error: Exception) -> None:
        log.warning(
            "%s/checkpoints/%s is passed over: %s",
            self.url,
            place_of(Path(), step).name,
            first_line(error),
        )

    def _move(self, how: str, source: str, target: str) -> None:
        """how: put_file or get_file. Notes each part of the file that is copied, where the file
        system tells of it."""
        from fsspec.callbacks import Callback
        from fsspec.implementations.local import LocalFileSystem
        from fsspec.spec import AbstractFileSystem

        move = getattr(self.files, how)
        if isinstance(self.files, LocalFileSystem):  # its own says nothing before the end
            move = partial(getattr(AbstractFileSystem, how), self.files)
        move(source, target, callback=Callback(hooks={"moved": lambda *_, **__: self._moved()}))
        self._moved()

    def _moved(self) -> None:
        self.moved_at = time.monotonic()


def _described(owner: dict[str, Any]) -> str:
    return (
        f"the run in {owner.get('run_dir')} on {owner.get('host')}, started {owner.get('since')},"
    )


def best_step(known: dict[int, dict[str, Any]], best_by: dict[str, Any]) -> int | None:
    """The step of the best of these; None where nothing says which it is, as in checkpoints of
    older versions."""
    try:
        selection = Selection(**best_by)
    except TypeError:
        return None
    scored = {
        step: manifest
        for step, manifest in known.items()
        if isinstance(manifest.get(selection.split), dict)
    }
    ranks = {step: selection.rank(manifest[selection.split]) for step, manifest in scored.items()}
    finite = [step for step in ranks if math.isfinite(ranks[step][0])]
    return min(finite, key=lambda step: (ranks[step], step), default=None)


def owner_of(run_dir: Path) -> dict[str, Any]:
    """Of a mirror: the run directory, and who has its lock."""
    return {"run_dir": str(run_dir.absolute()), **run_lock.owner(run_dir / run_lock.FILE)}


class Mirroring:
    """Copies checkpoints in a thread of its own: the newest one whenever the one before is done.
    For one process."""

    def __init__(self, mirror: Mirror, run_dir: Path) -> None:
        """What lies in `run_dir` and not there is copied at once: an earlier process was ended
        before it could."""
        self.mirror = mirror
        self.run_dir = run_dir
        self.owner = owner_of(run_dir)
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self.newest = next(iter(places(run_dir)), None)
        self.written: set[Path] = set()
        """Since they were last copied."""
        self.error: Exception | None = None
        self.last: Future[Any] | None = self.pool.submit(self._copy) if self.newest else None
        self.stopped_at: float | None = None

    def submit(self, place: Path) -> None:
        """After a checkpoint is written and verified. Does not wait."""
        self.newest = place
        self.written.add(place)
        self.last = self.pool.submit(self._copy)

    def state(self, stop: StopController, patience_seconds: float, timeout_seconds: float) -> str:
        """COPIED, COPYING, FAILED, or LEFT to the next start: after a stop, or before others take
        over."""
        if self.last is None or self.last.done():
            return FAILED if self.error else COPIED
        now = time.monotonic()
        if stop.requested.is_set():
            self.stopped_at = self.stopped_at or now
            if stop.goes_on or now - self.stopped_at > patience_seconds:
                return LEFT
            return COPYING
        if now - self.mirror.moved_at > timeout_seconds:
            self.error = TimeoutError(
                f"no part of a file has moved for {timeout_seconds:g} s (launch.timeout_seconds)"
            )
            return FAILED
        return COPYING

    def _copy(self) -> None:
        place = self.newest
        self.mirror.moved_at = time.monotonic()
        before = {*self.written}
        kept = {step_of(one): one for one in places(self.run_dir)}
        try:
            self.mirror.check_owner(self.owner)
            there = {*self.mirror.steps()}
            for step in sorted(
                kept, reverse=True
            ):  # an older one was passed over if the store is slow: the best, say
                if kept[step] in self.written or step not in there:
                    self.mirror.push(kept[step])
                    self.written.discard(kept[step])
            self.mirror.remove_all_but({*kept})
            self.written -= before - {*kept.values()}  # not what is written meanwhile
            self.error = None
        except Exception as error:  # noqa: BLE001  `finish` raises it if no later one succeeds
            if place != self.newest:  # it is superseded, and was removed meanwhile
                return
            self.error = error
            how = "" if isinstance(error, NotOursError) else "; the next checkpoint is tried"
            log.warning(
                "%s cannot be copied to checkpoint.mirror=%s: %s%s",
                place,
                self.mirror.url,
                error,
                how,
            )
