"""Write checkpoints: a directory per step, written aside and renamed. They are read by reader.py.

step_00000150/
    model.safetensors    the weights under the model's own names, whatever strategy trained them
    ema.safetensors      their average, under the same names, with train.ema_decay
    training.pt          what training continues with (training_state.py): plain data that loads
                         with weights_only=True
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
    readable_manifests,
    reason_of,
    step_of,
)
from ddp_train.checkpoints.mirroring import Mirroring
from ddp_train.checkpoints.reader import (
    AVERAGE,
    BEST,
    EXTRA_STATE,
    MODEL,
    TRAINING,
    best_step,
    defect_of_files,
    defect_of_state,
    sha256_of,
)
from ddp_train.engine.selection import Selection
from ddp_train.errors import OwnershipLostError, StateError, WriteError
from ddp_train.plain_state import PLAIN_DATA, plain_extra_state, plain_state
from ddp_train.resilience import run_lock
from ddp_train.resilience.whole_files import RAISE_LIMIT, is_over_limit, shown_limit, size_limit
from ddp_train.tensor_tree import map_tensors, tensors

SUPERSEDED = ".part-old"
"""End of the name of a checkpoint that is about to be removed: never half of one under its name."""
CORRUPT = ".part-corrupt"
"""In the name of one that another of the same step replaces."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint after `step` optimizer steps."""

    step: int
    model: dict[str, Any]
    """A state_dict. What it has beside tensors goes to training.pt."""
    training: dict[str, Any]
    """Contents of training.pt."""
    manifest: dict[str, Any]
    """Further entries of the manifest: plain data. `validation` or `test`, the score of this step,
    decides which one is the best."""
    average: dict[str, Tensor] | None = None
    """Average of the weights, under the names of `model`."""

    @property
    def nbytes(self) -> int:
        state = [self.model, self.training, self.average or {}]
        return sum(tensor.nbytes for tensor in tensors(state))


class Writer:
    """Writes the checkpoints of a run in a thread, one at a time. For one process only, rank 0."""

    def __init__(
        self,
        run_dir: Path,
        keep: int,
        selection: Selection | None = None,
        on_saving: Callable[[bool], None] = lambda _: None,
        mirroring: Mirroring | None = None,
    ) -> None:
        """
        keep: number of the newest checkpoints that are kept.
        selection: what the best checkpoint is selected by, which is kept and linked; None: there
            is none.
        on_saving: called with True before a checkpoint is written, and with False after.
        mirroring: copies checkpoints elsewhere.
        """
        self.run_dir = run_dir
        self.keep = keep
        self.selection = selection
        self.on_saving = on_saving
        self.mirroring = mirroring
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None
        self.owner = run_lock.owner(run_dir / run_lock.FILE)
        self.not_removed: set[Path] = set()
        """Paths that could not be removed, and were warned of."""
        self.last_reason = ""
        """Why the last checkpoint could not be written: the same reason is warned of once."""
        self._remove_leftovers()
        check_writable(run_dir / "checkpoints")

    def submit(self, take_snapshot: Callable[[], Snapshot]) -> None:
        """Wait until the checkpoint before is written, take a snapshot and begin to write it."""
        self.wait()
        self.on_saving(True)
        try:
            snapshot = take_snapshot()
            self.thread = threading.Thread(target=self._save, args=(snapshot,), name="checkpoint")
            self.thread.start()
        except BaseException:
            self.on_saving(False)
            raise

    def finish(self) -> None:
        """Wait until all is written. Raises WriteError if the last one could not be."""
        self.wait()
        if self.error:
            raise self.error

    def wait(self) -> None:
        """Wait until the previous checkpoint is written."""
        if self.thread:
            self.thread.join()
        if self.error and not isinstance(self.error, WriteError):
            raise self.error

    def _save(self, snapshot: Snapshot) -> None:
        try:
            self.error = None
            path = write_checkpoint(self.run_dir, snapshot, self.owner)
            self.last_reason = ""
            for old in _superseded(self.run_dir, snapshot.step, self.keep, self.selection):
                with self._warning_once(old):
                    old.rename(old.with_name(old.name + SUPERSEDED))
            self._remove_leftovers()
            if self.mirroring:
                self.mirroring.submit(path)
        except StateError as error:
            self.error = error  # the next one would have the same
        except Exception as error:  # noqa: BLE001  `submit` and `finish` raise it in the training thread
            # A WriteError counts if it is the last word: until then training continues.
            self.error = error
            reason = reason_of(error)
            level = logging.INFO if reason == self.last_reason else logging.WARNING
            log.log(
                level,
                "%s; training continues, and saving is tried again at the next checkpoint",
                error,
            )
            self.last_reason = reason
        finally:
            self.on_saving(False)

    def _remove_leftovers(self) -> None:
        """Remove what a killed process had half written or removed, and what could not be removed
        before."""
        folder = self.run_dir / "checkpoints"
        for part in [*folder.glob("step_*.part-*"), *folder.glob(f"{BEST}.part-*")]:
            whole = part.with_name(part.name.partition(".")[0])
            with self._warning_once(part):
                if CORRUPT in part.name and not whole.exists():
                    # The process was killed between the two renames of `_put_in_place`.
                    part.rename(whole)
                elif part.is_dir() and not part.is_symlink():
                    shutil.rmtree(part)
                else:
                    part.unlink()

    @contextlib.contextmanager
    def _warning_once(self, path: Path) -> Iterator[None]:
        """Inside, an error of the file system is a warning, one for each path."""
        try:
            yield
        except OSError as error:
            if path not in self.not_removed:
                log.warning(
                    "%s cannot be removed: %s; removing is tried again at the next checkpoint",
                    path,
                    error,
                )
            self.not_removed.add(path)


def write_checkpoint(
    run_dir: Path, snapshot: Snapshot, owner: dict[str, str] | None = None
) -> Path:
    """Write a checkpoint, atomically, and return its path.

    owner: who held the lock of run_dir when this run began; None if nobody did.

    Raises WriteError, with all others intact, if it cannot be written, and OwnershipLostError if
    somebody else holds the lock now.
    """
    path = place_of(run_dir, snapshot.step)
    # Hosts may have the same process ids.
    part = path.with_name(f"{path.name}.part-{os.getpid()}-{socket.gethostname()}")
    try:
        part.mkdir(parents=True)
        _write_files(part, snapshot)
        # Just before the renames: what is written aside disturbs nobody.
        run_lock.check_owner(run_dir, owner or {})
        _put_in_place(part, path)
    except (OwnershipLostError, StateError):
        shutil.rmtree(part, ignore_errors=True)
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        # A full disk is an OSError, or a RuntimeError of torch's.
        shutil.rmtree(part, ignore_errors=True)
        raise _not_written(run_dir, path, snapshot, error) from error
    return path


def _write_files(part: Path, snapshot: Snapshot) -> None:
    """Write all files, the manifest last, and flush them to the disk."""
    training = part / TRAINING
    content = dict(snapshot.training)
    extra_state = {
        name: plain_extra_state(name, value)
        for name, value in snapshot.model.items()
        if not isinstance(value, Tensor)
    }
    if extra_state:
        content[EXTRA_STATE] = extra_state
    torch.save(map_tensors(Tensor.cpu, content), training)
    for name, weights in ((MODEL, snapshot.model), (AVERAGE, snapshot.average)):
        if weights is None:
            continue
        save_file(_on_host(weights), part / name)
        # save_file makes it readable for its owner alone.
        (part / name).chmod(training.stat().st_mode)
    names = sorted(path.name for path in part.iterdir())
    files = {
        name: {"bytes": (part / name).stat().st_size, "sha256": sha256_of(part / name)}
        for name in names
    }
    manifest = {"step": snapshot.step, **snapshot.manifest, "files": files}
    text = json.dumps({**manifest, "sha256": digest_of(manifest)}, indent=1)
    (part / MANIFEST).write_text(text)
    for name in [*names, MANIFEST]:
        _flush(part / name)
    _flush(part)


def _on_host(weights: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state_dict on the CPU, contiguous, of which no two share memory.

    safetensors refuses shared memory. Tied weights share it, so all names but the first get a copy.
    Entries that are no tensors are left out.
    """
    on_host: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor):
            continue
        own = tensor.detach().cpu().contiguous()
        place = own.untyped_storage().data_ptr()
        if place in memory:
            own = own.clone()
        memory.add(place)
        on_host[name] = own
    return on_host


def _put_in_place(part: Path, path: Path) -> None:
    if path.exists():
        # The same step once more: the run resumed from an older one, for this one is corrupt. It
        # goes with the leftovers.
        path.rename(path.with_name(f"{path.name}{CORRUPT}-{os.getpid()}"))
    part.rename(path)
    _flush(path.parent)


def _not_written(run_dir: Path, path: Path, snapshot: Snapshot, error: Exception) -> WriteError:
    """The error for the user.

    error: what was raised as the checkpoint was written.
    """
    needed = snapshot.nbytes
    free = 0
    reason = reason_of(error)
    if run_dir.exists():
        free = shutil.disk_usage(run_dir).free
    limit = size_limit()
    if is_over_limit(error) or (limit is not None and limit < needed <= free):
        return WriteError(
            f"the checkpoint of step {snapshot.step} cannot be written to {path}: {shown_limit()},"
            f" and about {needed:,} are needed",
            RAISE_LIMIT,
        )
    if run_dir.exists() and isinstance(error, RuntimeError) and free < needed:
        # torch says "unexpected pos".
        reason = os.strerror(errno.ENOSPC)
    return WriteError(
        f"the checkpoint of step {snapshot.step} cannot be written to {path}: {reason} ({free:,}"
        f" bytes free, about {needed:,} needed)",
        "free some space, or make the folder writable; then start the same command again",
    )


def _superseded(run_dir: Path, newest: int, keep: int, selection: Selection | None) -> list[Path]:
    """Verify the checkpoint of step `newest`, link the best one, and say which may be removed.

    keep: how many checkpoints stay: that of step `newest`, and the newest of earlier steps. The
        best one stays too. Those of later steps, which a resumed run has passed over, are removed
        before any other.

    Returns the paths of the checkpoints to remove. Raises WriteError if the checkpoint of step
    `newest` is corrupt when it is read back, and StateError if no run could resume from it.
    """
    path = place_of(run_dir, newest)
    defect = defect_of_files(path)
    if defect:
        raise WriteError(
            f"the checkpoint {path} was corrupt when it was read back after writing: {defect}",
            "check the disk",
        )
    defect = defect_of_state(path)
    if defect:
        raise StateError(f"the checkpoint {path} cannot be resumed from: {defect}", PLAIN_DATA)
    best = None
    if selection:
        best = best_step(readable_manifests(run_dir), selection)
    if best is not None:
        link_best(place_of(run_dir, best))
    # Those of later steps first.
    steps = sorted(step_of(other) for other in places(run_dir) if other != path)
    steps.sort(key=lambda step: step < newest)
    count = max(0, len(steps) - (keep - 1))
    return [place_of(run_dir, step) for step in steps[:count] if step != best]


def link_best(best: Path) -> None:
    """Let checkpoints/best point to a checkpoint beside it, atomically: there is always the old
    one or the new one."""
    link = best.with_name(BEST)
    part = best.with_name(f"{BEST}.part-{os.getpid()}")
    try:
        if not link.is_symlink() or link.readlink() != Path(best.name):
            part.unlink(missing_ok=True)
            part.symlink_to(best.name)
            part.replace(link)
            _flush(best.parent)
    except OSError as error:
        # A file system without links: the checkpoint itself is there all the same.
        log.warning("%s cannot be linked: %s; the best checkpoint is %s", link, error, best.name)


def save_checkpoint(
    folder: str | PathLike[str],
    step: int,
    model: dict[str, Any],
    training: dict[str, Any],
    keep: int = 2,
) -> Path:
    """Write a checkpoint of your own training loop into FOLDER/checkpoints.

    Call it on one process. The checkpoint is written atomically and is on the disk when this
    returns. It is read back and verified before older ones are deleted.

    folder: created if it does not exist.
    step: number of steps done; it names the checkpoint.
    model: a state_dict; its tensors are saved as safetensors. Tied weights are allowed.
    training: everything else that a resume needs (an optimizer's or a scheduler's state_dict, the
        epoch): tensors, numbers and texts, in dicts and lists.
    keep: number of newest checkpoints that are kept.

    Returns the path of the checkpoint. Raises WriteError if it cannot be written, StateError if
    something in it is not plain data; older ones are then unchanged.
    """
    writer = Writer(Path(folder), keep)
    plain = plain_state(training, "training")
    writer.submit(lambda: Snapshot(step, model, plain, {}))
    writer.finish()
    return place_of(Path(folder), step)


def _flush(path: Path) -> None:
    """Flush to the disk, so that the rename that follows never outruns the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
