"""Writes checkpoints: a directory per step, written aside and renamed. They are read in
reader.py.

step_00000150/
    model.safetensors    the weights under the model's own names, whatever strategy trained them
    ema.safetensors      their average, under the same names, with train.ema_decay
    training.pt          optimizer and scaler state and counters: plain data that loads with
                         weights_only=True
    manifest.json        the step, the config, what else is known, and size and sha256 of each file
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ddp_train.checkpoints.layout import (
    MANIFEST,
    check_writable,
    digest_of,
    place_of,
    places,
    reason_of,
)
from ddp_train.checkpoints.mirror import Mirroring
from ddp_train.checkpoints.reader import (
    AVERAGE,
    BEST,
    MODEL,
    TRAINING,
    best_of,
    defect_of,
    sha256_of,
)
from ddp_train.engine.selection import Selection
from ddp_train.errors import OwnershipLostError, WriteError
from ddp_train.resilience import run_lock
from ddp_train.tensor_tree import map_tensors, tensors

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """The state after `step` optimizer steps, apart from what training continues with."""

    step: int
    model: dict[str, Tensor]
    training: dict[str, Any]
    manifest: dict[str, Any]
    """Further entries of the manifest: plain data. `validation` or `test`, the score of this step,
    decides which one is the best."""
    average: dict[str, Tensor] | None = None
    """Of the weights, as `model`."""


def copy_of(tensor: Tensor) -> Tensor:
    """A copy on the same device, so that training waits for no transfer; on the host, if the GPU's
    memory is full."""
    try:
        return tensor.detach().clone()
    except torch.OutOfMemoryError:
        return tensor.detach().cpu()


class Writer:
    """Writes checkpoints into `run_dir` in a thread of its own, one at a time. For one process
    only, rank 0."""

    def __init__(
        self,
        run_dir: Path,
        keep: int,
        selection: Selection | None = None,
        on_saving: Callable[[bool], None] = lambda _: None,
        mirroring: Mirroring | None = None,
    ) -> None:
        """selection: of the best checkpoint, which is kept and linked; None: there is none.
        on_saving: is called with True before a checkpoint is written, and with False after.
        mirroring: copies them elsewhere."""
        self.run_dir = run_dir
        self.keep = keep
        self.selection = selection
        self.on_saving = on_saving
        self.mirroring = mirroring
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None
        self.owner = run_lock.owner(run_dir / run_lock.FILE)
        self.told: set[Path] = set()
        """What could not be removed, and was warned of."""
        self.warned_of = ""
        """Why the last checkpoint could not be written: that is warned of once."""
        self._remove_leftovers()
        check_writable(run_dir / "checkpoints")

    def submit(self, take: Callable[[], Snapshot]) -> None:
        """Waits until the one before is written, takes a snapshot and begins to write it."""
        self.wait()
        self.on_saving(True)
        try:
            self.thread = threading.Thread(target=self._write, args=(take(),), name="checkpoint")
            self.thread.start()
        except BaseException:
            self.on_saving(False)
            raise

    def finish(self) -> None:
        """Waits until all is written. Raises WriteError if the last one could not be."""
        self.wait()
        if self.error:
            raise self.error

    def wait(self) -> None:
        """Until the one before is written."""
        if self.thread:
            self.thread.join()
        if self.error and not isinstance(self.error, WriteError):
            raise self.error

    def _write(self, snapshot: Snapshot) -> None:
        try:
            self.error = None
            place = write(self.run_dir, snapshot, self.owner)
            self.warned_of = ""
            for old in _superseded(self.run_dir, snapshot.step, self.keep, self.selection):
                with self._removing(old):
                    old.rename(
                        old.with_name(f"{old.name}.part-old")
                    )  # never half a checkpoint under its name
            self._remove_leftovers()
            if self.mirroring:
                self.mirroring.submit(place)
        except Exception as error:  # noqa: BLE001  `submit` and `finish` raise it in the training thread
            self.error = (
                error  # a WriteError counts if it is the last word: until then training continues
            )
            level = logging.INFO if reason_of(error) == self.warned_of else logging.WARNING
            log.log(level, "%s; training continues, and each later checkpoint is tried", error)
            self.warned_of = reason_of(error)
        finally:
            self.on_saving(False)

    def _remove_leftovers(self) -> None:
        """What a killed process had half written or removed, and what could not be removed
        before."""
        folder = self.run_dir / "checkpoints"
        for part in [*folder.glob("step_*.part-*"), *folder.glob(f"{BEST}.part-*")]:
            whole = part.with_name(part.name.partition(".")[0])
            with self._removing(part):
                if (
                    ".part-corrupt-" in part.name and not whole.exists()
                ):  # killed between the two renames of `write`
                    part.rename(whole)
                else:
                    shutil.rmtree(
                        part
                    ) if part.is_dir() and not part.is_symlink() else part.unlink()

    @contextlib.contextmanager
    def _removing(self, path: Path) -> Iterator[None]:
        """Inside, an error of the file system is a warning, one for each path."""
        try:
            yield
        except OSError as error:
            if path not in self.told:
                log.warning(
                    "%s cannot be removed: %s; each later checkpoint tries again", path, error
                )
            self.told.add(path)


def write(run_dir: Path, snapshot: Snapshot, owner: dict[str, str] | None = None) -> Path:
    """Writes a checkpoint, atomically. Raises WriteError, with all others intact, if it cannot be
    written.

    owner: who held the lock of run_dir when this run began, None if nobody did. Raises
    OwnershipLostError if somebody else does now.
    """
    step = snapshot.step
    final = place_of(run_dir, step)
    part = final.with_name(
        f"{final.name}.part-{os.getpid()}-{socket.gethostname()}"
    )  # hosts may have the same ids
    try:
        part.mkdir(parents=True)
        torch.save(map_tensors(Tensor.cpu, snapshot.training), part / TRAINING)
        for name, weights in ((MODEL, snapshot.model), (AVERAGE, snapshot.average)):
            if weights is not None:
                save_file(
                    {key: tensor.cpu().contiguous() for key, tensor in weights.items()}, part / name
                )
                (part / name).chmod(
                    (part / TRAINING).stat().st_mode
                )  # save_file makes it readable for its owner alone
        names = sorted(path.name for path in part.iterdir())
        files = {
            name: {"bytes": (part / name).stat().st_size, "sha256": sha256_of(part / name)}
            for name in names
        }
        manifest = {"step": step, **snapshot.manifest, "files": files}
        (part / MANIFEST).write_text(
            json.dumps({**manifest, "sha256": digest_of(manifest)}, indent=1)
        )
        for path in (*(part / name for name in names), part / MANIFEST, part):
            _flush(path)
        run_lock.check_owner(
            run_dir, owner or {}
        )  # just before the renames: what is written aside disturbs nobody
        if (
            final.exists()
        ):  # the same step once more: the run resumed from an older one, for this one is corrupt
            final.rename(
                final.with_name(f"{final.name}.part-corrupt-{os.getpid()}")
            )  # goes with the leftovers
        part.rename(final)
        _flush(final.parent)
    except OwnershipLostError:
        shutil.rmtree(part, ignore_errors=True)
        raise
    except (
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:  # a full disk is an OSError, or a RuntimeError of torch's
        shutil.rmtree(part, ignore_errors=True)
        needed = sum(
            tensor.nbytes
            for tensor in tensors([snapshot.model, snapshot.training, snapshot.average or {}])
        )
        free = shutil.disk_usage(run_dir).free if run_dir.exists() else 0
        is_full = (
            isinstance(error, RuntimeError) and run_dir.exists() and free < needed
        )  # torch says "unexpected pos"
        raise WriteError(
            f"the checkpoint of step {step} cannot be written to {final}: "
            f"{os.strerror(errno.ENOSPC) if is_full else reason_of(error)} "
            f"({free:,} bytes free, some {needed:,} needed)",
            "free some space, or continue in another run_dir with checkpoint.resume=PATH",
        ) from error
    return final


def _superseded(run_dir: Path, newest: int, keep: int, selection: Selection | None) -> list[Path]:
    """All but the newest `keep` checkpoints and the best one, which is linked. Verifies that of
    step `newest` first."""
    final = place_of(run_dir, newest)
    defect = defect_of(final)
    if defect:
        raise WriteError(
            f"the checkpoint {final} is corrupt as soon as it is written: {defect}",
            "check the disk",
        )
    # A later step than this one's was passed over when the run resumed: it goes before any that can
    # be trusted.
    others = sorted(path for path in places(run_dir) if path != final)
    others.sort(key=lambda path: path < final)
    best = best_of([*others, final], selection) if selection else None
    if best:
        link_best(best)
    return [old for old in others[: max(0, len(others) - (keep - 1))] if old != best]


def link_best(best: Path) -> None:
    """Lets checkpoints/best point to a checkpoint beside it, atomically: there is always the old
    one or the new one."""
    link = best.with_name(BEST)
    part = best.with_name(f"{BEST}.part-{os.getpid()}")
    try:
        if not link.is_symlink() or link.readlink() != Path(best.name):
            part.unlink(missing_ok=True)
            part.symlink_to(best.name)
            part.replace(link)
            _flush(best.parent)
    except (
        OSError
    ) as error:  # a file system without links: the checkpoint itself is there all the same
        log.warning("%s cannot be linked: %s; the best checkpoint is %s", link, error, best.name)


def save_checkpoint(
    folder: str | PathLike[str],
    step: int,
    model: dict[str, Tensor],
    training: dict[str, Any],
    keep: int = 2,
) -> Path:
    """Writes the state of a loop of the user's own into FOLDER/checkpoints, as the launcher writes
    its own: atomically, on the disk when this returns, read again and verified before older ones
    go. To be called on one process. Returns the path of the checkpoint.

    model: a state_dict of tensors, saved as safetensors. training: all else to resume with (an
    optimizer's state_dict, a scheduler's, the epoch): tensors, numbers and texts, in dicts and
    lists. keep: how many of the newest are kept. Raises WriteError, with all older ones intact.
    """
    writer = Writer(Path(folder), keep)
    writer.submit(lambda: Snapshot(step, model, training, {}))
    writer.finish()
    return place_of(Path(folder), step)


def _flush(path: Path) -> None:
    """To the disk, so that the rename that follows never outruns the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
