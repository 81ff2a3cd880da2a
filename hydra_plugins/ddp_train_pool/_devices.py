"""Devices that jobs of several sweeps, and of several users, share: a lock for each, which dies with its holder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

FOLDERS = (Path("/run/lock"), Path("/tmp"))
"""Where the folder of locks lies: in the first into which everybody may write. /run/lock is never swept by age."""
FOLDER = "hydra_pool"
EVERYBODY = stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO | stat.S_ISVTX
"""Permissions of that folder, as those of /tmp: all may add files, and remove only their own."""


class PoolError(Exception):
    """What is wrong with devices, locks or settings, in words for the user."""


def visible_gpus(visible_devices: str | None) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES allows, by UUID where NVML knows it, so that all sweeps mean the same one."""
    try:
        import pynvml
    except ImportError:
        return [] if visible_devices is None else _entries(visible_devices)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        present = [
            str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)))
            for index in range(pynvml.nvmlDeviceGetCount())
        ]
    except pynvml.NVMLError as error:
        raise PoolError(f"the driver cannot list its GPUs: {error}; name them: hydra.launcher.devices=[0,1]") from None
    finally:
        pynvml.nvmlShutdown()
    return named(visible_devices, present)


def named(visible_devices: str | None, present: list[str]) -> list[str]:
    """Those of `present`, UUIDs in the driver's order, that CUDA_VISIBLE_DEVICES names. As CUDA does, it stops at the
    first number that is none of a GPU, and takes the beginning of a UUID for the whole."""
    if visible_devices is None:
        return present
    found: list[str] = []
    for entry in _entries(visible_devices):
        if entry.lstrip("-").isdigit():
            if not 0 <= int(entry) < len(present):
                break
            entry = present[int(entry)]
        else:
            entry = next((uuid for uuid in present if uuid.startswith(entry)), entry)
        if entry not in found:
            found.append(entry)
    return found


def _entries(visible_devices: str) -> list[str]:
    return [entry for entry in (entry.strip() for entry in visible_devices.split(",")) if entry]


def default_folder() -> Path:
    """The folder of locks that all users of this host share."""
    for parent in FOLDERS:
        with contextlib.suppress(OSError):
            if parent.stat().st_mode & EVERYBODY == EVERYBODY:
                return parent / FOLDER
    return Path(tempfile.gettempdir()) / FOLDER


class Locks:
    """A folder with a file for each device; who has flocked the file has the device.

    Nothing is ever written into a file, so a link or a file that somebody else has put there can do no harm: links are
    refused, and files are opened for reading. The kernel's fs.protected_regular forbids O_CREAT on others' files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._make_folder()
        try:
            self.descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise PoolError(self._unusable(error.strerror or str(error))) from None
        facts = os.fstat(self.descriptor)
        others_write = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if others_write and not facts.st_mode & stat.S_ISVTX:
            self.close()
            raise PoolError(self._unusable("others may remove files in it; it needs the sticky bit (chmod +t)"))

    def _make_folder(self) -> None:
        """With the permissions from its first moment on: it is made beside its place, and moved there."""
        if os.path.lexists(self.folder):
            return
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}_", dir=self.folder.parent))
        except OSError as error:
            raise PoolError(self._unusable(error.strerror or str(error))) from None
        made.chmod(EVERYBODY)
        try:
            made.rename(self.folder)
        except OSError:  # another sweep was faster
            made.rmdir()

    def _unusable(self, why: str) -> str:
        return f"hydra.launcher.lock_folder={self.folder}: {why}; name another: hydra.launcher.lock_folder=FOLDER"

    def take(self, device: str) -> int | None:
        """A descriptor that holds the lock until it is closed by all who inherited it; None if somebody else has it."""
        name = re.sub(r"[^\w.-]", "_", device) + ".lock"
        descriptor = self._open(name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)  # the file was removed meanwhile: a lock on it says nothing
        return None

    def _open(self, name: str) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        for _ in range(10):
            try:
                try:
                    descriptor = os.open(name, flags, dir_fd=self.descriptor)
                except FileNotFoundError:
                    descriptor = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=self.descriptor)
                    os.fchmod(descriptor, 0o644)  # whatever the umask: others must be able to read
            except FileExistsError:  # another sweep was faster
                continue
            except OSError as error:
                raise PoolError(self._unusable(f"{name}: {error.strerror}")) from None
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise PoolError(self._unusable(f"{name} is no file"))
            return descriptor
        raise PoolError(self._unusable(f"{name} comes and goes"))

    def close(self) -> None:
        os.close(self.descriptor)


class Devices:
    """What jobs are given: devices under locks that all sweeps share, or without devices slots of this sweep alone."""

    def __init__(self, names: list[str], per_job: int, slots: int, folder: Path | None) -> None:
        """names: the devices; none: `slots` jobs at a time. folder: of the locks; None: the one that all share."""
        if len(names) < per_job:
            raise PoolError(
                f"hydra.launcher.gpus_per_trial={per_job}: there are {len(names)} devices; use at most that many"
            )
        self.names, self.per_job = names, per_job
        self.at_once = len(names) // per_job if per_job else slots
        self.locks = Locks(folder or default_folder()) if per_job else None

    @contextlib.contextmanager
    def offered(self, taken: set[str]) -> Iterator[tuple[list[str], list[int]] | None]:
        """As many free devices as a job needs, with their locks; None while there are not enough.

        taken: those that jobs of this sweep have. This process lets go of the locks at the end: a job that was forked
        meanwhile holds them.
        """
        found: list[str] = []
        held: list[int] = []
        try:
            for name in self.names:
                if not self.locks or len(found) == self.per_job or name in taken:
                    continue
                if (lock := self.locks.take(name)) is not None:
                    found.append(name)
                    held.append(lock)
            yield (found, held) if len(found) == self.per_job else None
        finally:
            for lock in held:
                os.close(lock)

    def close(self) -> None:
        if self.locks:
            self.locks.close()
