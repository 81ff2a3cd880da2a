"""A copy of a run's checkpoints in another place, an object store above all.

A checkpoint counts there once its manifest is there, which is copied last: an upload that was cut
off does not count. What cannot be read now may be whole: only what has arrived and is corrupt is
passed over, and nothing that is newer than the run's own checkpoints is removed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import re
import shutil
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from ddp_train.checkpoints.layout import MANIFEST, parse_manifest, place_of, read_manifest, step_of
from ddp_train.checkpoints.reader import best_step, defect_of
from ddp_train.engine.selection import Selection
from ddp_train.errors import DataError, WriteError
from ddp_train.resilience import run_lock
from ddp_train.text import first_line

OWNER = "owner.json"
"""Which run copies its checkpoints there."""
Manifests = dict[int, dict[str, Any]]
"""Manifests by step, the newest first."""
log = logging.getLogger(__name__)


class UnreachableError(DataError):
    """The store does not answer, or refuses access."""


class NotOwnedError(Exception):
    """Another run copies its checkpoints there now."""


class Mirror:
    """The folder of a run in a file system of fsspec's: s3://BUCKET/RUN, gs://BUCKET/RUN,
    file:///PATH.

    Names are listed and compared, never matched as patterns: a URL may have brackets.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.moved_at = time.monotonic()
        """When a file, or a part of one, was last copied."""

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
        """Inside, whatever the store raises is an UnreachableError.

        verb: read or written.
        """
        try:
            yield
        except (DataError, WriteError):
            raise
        except Exception as error:  # its own kinds, and those of the libraries below it
            raise UnreachableError(
                f"checkpoint.mirror={self.url} cannot be {verb}: {type(error).__name__}:"
                f" {first_line(error)}",
                "check the URL, the network, and the credentials in the environment",
            ) from error

    # --- what is there ----------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, the newest first."""
        complete = [
            step for step in self.steps_listed() if MANIFEST in self._names(self._folder(step))
        ]
        return sorted(complete, reverse=True)

    def steps_listed(self) -> list[int]:
        """Steps of all checkpoints, complete or not, in any order."""
        matches = [re.fullmatch(r"step_(\d{8})", name) for name in self._names(self.root)]
        return [int(match[1]) for match in matches if match]

    def manifests(self) -> Manifests:
        """Manifests of the complete checkpoints. A corrupt one is left out."""
        manifests = {}
        for step in self.steps():
            try:
                content = self.files.cat_file(f"{self._folder(step)}/{MANIFEST}")
                manifests[step] = parse_manifest(content)
            except (FileNotFoundError, ValueError) as error:
                self._warn_passed_over(step, error)
        return manifests

    def _names(self, folder: str) -> set[str]:
        try:
            paths = self.files.ls(folder, detail=False)
        except FileNotFoundError:
            return set()
        return {str(path).rstrip("/").rpartition("/")[2] for path in paths}

    def _folder(self, step: int) -> str:
        return f"{self.root}/{place_of(Path(), step).name}"

    # --- ownership --------------------------------------------------------------------------------

    def claim(self, owner: dict[str, Any]) -> None:
        """Claim the mirror: from now on this run copies there, and no other.

        It shows before the first step, not after the last, whether the store can be written.

        owner: see `owner_of`.
        """
        self.files.makedirs(self.root, exist_ok=True)
        self.files.pipe_file(f"{self.root}/{OWNER}", json.dumps(owner).encode())

    def owner(self) -> dict[str, Any] | None:
        """The last claim; None if there is none, empty if it cannot be read."""
        try:
            owner = json.loads(self.files.cat_file(f"{self.root}/{OWNER}"))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return owner if isinstance(owner, dict) else {}

    def check_free(self, owner: dict[str, Any]) -> None:
        """Raise DataError if a run that is alive owns the mirror, and it is not this one.

        Whether it is alive shows in the lock of its run directory, where that is seen from here.
        """
        current = self.owner() or {}
        if current == owner:
            return
        lock = Path(str(current.get("run_dir")), run_lock.FILE)
        if run_lock.is_held(lock) and run_lock.owner(lock).get("id") == current.get("id"):
            raise DataError(
                f"checkpoint.mirror={self.url} belongs to {_description(current)}, which is still"
                " running",
                "wait until that run ends, or use another folder for checkpoint.mirror",
            )

    def check_owner(self, owner: dict[str, Any]) -> None:
        """Raise NotOwnedError if another run has claimed the mirror since."""
        current = self.owner()
        if current is None:  # somebody has emptied it
            self.claim(owner)
        elif current != owner:
            raise NotOwnedError(
                f"{_description(current)} copies its checkpoints there now, so this run no longer"
                " does"
            )

    # --- to there ---------------------------------------------------------------------------------

    def push(self, path: Path) -> None:
        """Copy a checkpoint. One of the same step does not count from the first file on."""
        folder = self._folder(step_of(path))
        with contextlib.suppress(FileNotFoundError):
            self.files.rm_file(f"{folder}/{MANIFEST}")
        self.files.makedirs(folder, exist_ok=True)
        names = sorted(file.name for file in path.iterdir() if file.name != MANIFEST)
        for name in [*names, MANIFEST]:
            self._copy("put_file", str(path / name), f"{folder}/{name}")

    def remove_all_but(self, kept: set[int]) -> None:
        """Remove the checkpoints of other steps.

        What is newer than all of these stays: this run has not seen it, or could not use it.
        """
        newest = max(kept, default=0)
        for step in self.steps_listed():
            if step in kept or step >= newest:
                continue
            folder = self._folder(step)
            manifest_first = sorted(self._names(folder), key=lambda name: name != MANIFEST)
            for name in manifest_first:
                self.files.rm_file(f"{folder}/{name}")
            # An object store has no folders.
            with contextlib.suppress(OSError, NotImplementedError):
                self.files.rmdir(folder)

    # --- from there -------------------------------------------------------------------------------

    def fetch(
        self, run_dir: Path, manifests: Manifests, newer_than: int, with_best: bool
    ) -> int | None:
        """Copy the newest valid checkpoint after a step into `run_dir`.

        manifests: as `manifests` returns them.
        with_best: the best one is copied too.

        Returns its step, None if there is none. Raises WriteError if the disk is full.
        """
        steps = [step for step in manifests if step > newer_than]
        if steps and with_best:
            # First: a process that dies in between must not leave the newest alone.
            best = best_there(manifests)
            if best not in (None, steps[0]) and not place_of(run_dir, best).exists():
                self.pull(best, run_dir)
        return next((step for step in steps if self.pull(step, run_dir)), None)

    def pull(self, step: int, run_dir: Path) -> bool:
        """Copy a checkpoint into `run_dir`. Returns whether it is there now, verified."""
        path = place_of(run_dir, step)
        part = path.with_name(f"{path.name}.part-fetched")
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        try:
            part.mkdir(parents=True)
            self._get_files(step, part)
            defect = defect_of(part)
            if defect:
                raise ValueError(defect)
            if path.exists():  # a corrupt one
                shutil.rmtree(path)
            part.rename(path)
        except (FileNotFoundError, ValueError) as error:
            self._warn_passed_over(step, error)
            return False
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise WriteError(
                f"the checkpoint of step {step} cannot be copied from checkpoint.mirror={self.url}:"
                f" {error.strerror}",
                f"free some space in {path.parent}, or make that folder writable",
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return True

    def _get_files(self, step: int, part: Path) -> None:
        self._get(step, MANIFEST, part)
        for name in read_manifest(part)["files"]:
            if Path(name).name != name:
                raise ValueError(f"{MANIFEST} names a file outside of its folder: {name}")
            self._get(step, name, part)

    def _get(self, step: int, name: str, folder: Path) -> None:
        self._copy("get_file", f"{self._folder(step)}/{name}", str(folder / name))

    def _warn_passed_over(self, step: int, error: Exception) -> None:
        name = place_of(Path(), step).name
        log.warning("%s/checkpoints/%s is skipped: %s", self.url, name, first_line(error))

    def _copy(self, method: str, source: str, target: str) -> None:
        """Copy a file, and note each part of it, where the file system reports them.

        method: put_file or get_file.
        """
        from fsspec.callbacks import Callback
        from fsspec.implementations.local import LocalFileSystem
        from fsspec.spec import AbstractFileSystem

        parts = Callback(hooks={"moved": lambda *_, **__: self.note_progress()})
        if isinstance(self.files, LocalFileSystem):  # its own reports nothing before the end
            copy = getattr(AbstractFileSystem, method)
            copy(self.files, source, target, callback=parts)
        else:
            copy = getattr(self.files, method)
            copy(source, target, callback=parts)
        self.note_progress()

    def note_progress(self) -> None:
        self.moved_at = time.monotonic()


def _description(owner: dict[str, Any]) -> str:
    return (
        f"the run in {owner.get('run_dir')} on {owner.get('host')}, started {owner.get('since')},"
    )


def best_there(manifests: Manifests) -> int | None:
    """The step of the best of these checkpoints; None if none has a finite score, or if the newest
    does not say by what, as those of `save_checkpoint`."""
    newest = next(iter(manifests.values()), {})
    best_by = newest.get("best_by")
    return best_step(manifests, Selection(**best_by)) if best_by else None


def owner_of(run_dir: Path) -> dict[str, Any]:
    """The claim of a run to its mirror: the run directory, and who has its lock."""
    return {"run_dir": str(run_dir.absolute()), **run_lock.owner(run_dir / run_lock.FILE)}
