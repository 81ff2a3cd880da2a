"""Checkpoints copied to another place, an object store above all, and taken from there by a run that has none.

A checkpoint counts there once its manifest is there, which is copied last: an upload that was cut off is none.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ddp_train.errors import DataError, WriteError
from ddp_train.resilience.checkpoint_files import MANIFEST, place_of, places, read_manifest
from ddp_train.text import first_line
from ddp_train.training.saved import best_of, defect_of
from ddp_train.training.selection import Selection

log = logging.getLogger(__name__)


class Mirror:
    """The folder of one run in a file system of fsspec's: s3://BUCKET/RUN, gs://BUCKET/RUN, file:///PATH."""

    def __init__(self, url: str) -> None:
        """Raises DataError if there is no such file system, or it does not let us in."""
        import fsspec  # few runs need it

        self.url = url.rstrip("/")
        try:
            self.files, root = fsspec.url_to_fs(self.url, use_listings_cache=False)
        except Exception as error:
            raise self._unreachable(error) from error
        self.root = f"{root}/checkpoints"

    def steps(self) -> list[int]:
        """Of the checkpoints that are complete there, the newest first. Raises DataError."""
        try:
            found = self.files.glob(f"{self.root}/step_*/{MANIFEST}")
        except Exception as error:
            raise self._unreachable(error) from error
        names = [re.fullmatch(r"step_(\d{8})", str(path).split("/")[-2]) for path in found]
        return sorted((int(name[1]) for name in names if name), reverse=True)

    def check_writable(self) -> None:
        """Better before the first step than after the last. Raises DataError."""
        probe = f"{self.root}/probe-{os.getpid()}"
        try:
            self.files.makedirs(self.root, exist_ok=True)
            self.files.pipe_file(probe, b"")
            self.files.rm_file(probe)
        except Exception as error:
            raise self._unreachable(error, "written") from error

    def push(self, place: Path) -> None:
        """Copies a checkpoint. One of the same step that was there counts no more from the first file on."""
        there = f"{self.root}/{place.name}"
        if self.files.exists(f"{there}/{MANIFEST}"):
            self.files.rm_file(f"{there}/{MANIFEST}")
        self.files.makedirs(there, exist_ok=True)
        names = sorted(path.name for path in place.iterdir() if path.name != MANIFEST)
        for name in (*names, MANIFEST):
            self.files.put_file(str(place / name), f"{there}/{name}")

    def remove_all_but(self, kept: set[int]) -> None:
        for step in set(self.steps()) - kept:
            there = f"{self.root}/{place_of(Path(), step).name}"
            self.files.rm_file(f"{there}/{MANIFEST}")
            self.files.rm(there, recursive=True)

    def fetch(self, run_dir: Path, with_best: bool) -> int | None:
        """Copies the newest valid checkpoint that is newer than those of `run_dir` into it; with_best: and the best.
        Returns the step of the newest, None if there is none. Raises DataError."""
        newest = next((read_manifest(place)["step"] for place in places(run_dir) if not defect_of(place)), -1)
        steps = [step for step in self.steps() if step > newest]
        fetched = next((step for step in steps if self._pull(step, run_dir)), None)
        if fetched is None or not with_best:
            return fetched
        selection = Selection(**read_manifest(place_of(run_dir, fetched))["best_by"])
        with tempfile.TemporaryDirectory() as folder:
            best = best_of([self._manifest_alone(step, Path(folder)) for step in self.steps()], selection)
        if best and not place_of(run_dir, step := int(best.name[-8:])).exists():
            self._pull(step, run_dir)
        return fetched

    def _pull(self, step: int, run_dir: Path) -> bool:
        """Whether the checkpoint is in `run_dir` now, verified."""
        place = place_of(run_dir, step)
        part = place.with_name(f"{place.name}.part-{os.getpid()}")
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
        except Exception as error:  # noqa: BLE001
            shutil.rmtree(part, ignore_errors=True)
            log.warning("%s/checkpoints/%s is passed over: %s", self.url, place.name, first_line(error))
            return False
        return True

    def _manifest_alone(self, step: int, run_dir: Path) -> Path:
        """The place of a checkpoint with its manifest, and nothing else."""
        place = place_of(run_dir, step)
        place.mkdir(parents=True)
        self._get(step, MANIFEST, place)
        return place

    def _get(self, step: int, name: str, folder: Path) -> None:
        self.files.get_file(f"{self.root}/{place_of(Path(), step).name}/{name}", str(folder / name))

    def _unreachable(self, error: Exception, verb: str = "read") -> DataError:
        what = f"checkpoint.mirror={self.url} cannot be {verb}: {type(error).__name__}: {first_line(error)}"
        return DataError(what, "check the URL, the network, and the credentials in the environment")


def fetch(url: str, run_dir: Path, resume: str, with_best: bool) -> str:
    """What a run that begins takes from its mirror, in words; "" if nothing newer is there. For one process. Raises
    DataError, also if the mirror holds another run's checkpoints."""
    mirror = Mirror(url)
    mirror.check_writable()
    if resume == "auto":
        step = mirror.fetch(run_dir, with_best)
        return "" if step is None else f"the checkpoint of step {step} was copied from checkpoint.mirror={url}"
    if steps := mirror.steps():
        rule = "a run that does not resume would mix its own with them; name another folder, or empty that one"
        raise DataError(f"checkpoint.mirror={url} holds checkpoints, the newest of step {steps[0]}", rule)
    return ""


class Mirroring:
    """Copies checkpoints in a thread of its own: the newest one whenever the one before is done. For one process."""

    def __init__(self, mirror: Mirror, run_dir: Path) -> None:
        self.mirror, self.run_dir = mirror, run_dir
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self.newest: Path | None = None
        self.done: Path | None = None
        self.error: Exception | None = None
        self.last: Future[Any] | None = None

    def submit(self, place: Path) -> None:
        """After a checkpoint is written and verified. Does not wait."""
        self.newest = place
        self.last = self.pool.submit(self._copy_newest)

    def finish(self) -> None:
        """Waits for the newest one. Raises WriteError if it could not be copied."""
        if self.last:
            self.last.result()
        self.pool.shutdown()
        if self.error:
            raise WriteError(
                f"the newest checkpoint could not be copied to checkpoint.mirror={self.mirror.url}: {self.error}",
                f"it is in {self.newest}; check the store, and start the same command again",
            ) from self.error

    def _copy_newest(self) -> None:
        place = self.newest
        assert place is not None
        if place == self.done:  # it was newer than the one for which this was asked
            return
        try:
            self.mirror.push(place)
            kept, there = {int(one.name[-8:]) for one in places(self.run_dir)}, self.mirror.steps()
            for step in kept - {*there}:  # passed over while an older one was copied: the best, for one
                self.mirror.push(place_of(self.run_dir, step))
            self.mirror.remove_all_but(kept)
            self.done, self.error = place, None
        except Exception as error:  # noqa: BLE001  `finish` raises it if no later one succeeds
            if place != self.newest:  # it is superseded, and was removed meanwhile
                return
            self.error = error
            log.warning("%s cannot be copied to %s: %s; the next checkpoint is tried", place, self.mirror.url, error)
