"""Devices that jobs of several sweeps, and of several users, share.

Each device has a lock, which dies with its holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.errors import CompactHydraException

FOLDERS = (Path("/run/lock"), Path("/tmp"))
"""Where the folder of locks lies: in the first into which everybody may write. /run/lock is never
swept by age."""
FOLDER = "hydra_pool"
EVERYBODY = stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO | stat.S_ISVTX
"""Permissions of that folder, as those of /tmp: all may add files, and remove only their own."""


class PoolError(CompactHydraException):
    """Devices, locks or settings cannot be used. Hydra prints the message without a traceback."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver lists it."""

    uuid: str
    model: str = ""
    parts: tuple[str, ...] = ()
    """UUIDs of the MIG devices into which it is divided; a process can use one of these, and not
    the whole."""

    @property
    def names(self) -> tuple[str, ...]:
        """The devices of it that jobs can be given."""
        return self.parts or (self.uuid,)


def visible_gpus(visible_devices: str | None) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES allows.

    They are named by UUID where NVML knows it, so that all sweeps mean the same one.
    """
    present = present_gpus()
    if present is None:
        return _entries(visible_devices or "")
    return selected_gpus(visible_devices, present, _gpus_by_number(visible_devices, present))


def asked_gpus(devices: list[str]) -> list[str]:
    """The devices of `hydra.launcher.devices`, by UUID. Raises PoolError.

    A name that the driver does not know stays as it is.
    """
    present = present_gpus()
    if not present:
        return list(dict.fromkeys(devices))
    order = _gpus_by_number(",".join(devices), present)
    for device in devices:
        if device.isdigit() and int(device) >= len(order):
            raise PoolError(
                f"hydra.launcher.devices: there is no GPU {device}; this host has {len(order)},"
                " numbered from 0"
            )
    return selected_gpus(",".join(devices), present, order)


def present_gpus() -> list[Gpu] | None:
    """All GPUs of this host, in the order of their places on the bus; None without NVML."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        raise PoolError(
            f"the NVIDIA driver cannot list the GPUs of this host: {error}; reset the broken GPU"
            " (nvidia-smi --gpu-reset), or take it out"
        ) from None
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    uuid = str(pynvml.nvmlDeviceGetUUID(handle))
    model = str(pynvml.nvmlDeviceGetName(handle))
    return Gpu(uuid, model, _parts(pynvml, handle))


def _parts(pynvml: Any, gpu: Any) -> tuple[str, ...]:
    """UUIDs of the MIG devices of a GPU; none where it is not divided."""
    uuids: list[str] = []
    with contextlib.suppress(pynvml.NVMLError):  # not supported
        if pynvml.nvmlDeviceGetMigMode(gpu)[0]:
            for place in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
                with contextlib.suppress(pynvml.NVMLError):  # nothing in this place
                    part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, place)
                    uuids.append(str(pynvml.nvmlDeviceGetUUID(part)))
    return tuple(uuids)


def selected_gpus(
    visible_devices: str | None, present: list[Gpu], order: list[str] | None = None
) -> list[str]:
    """Those of `present` that CUDA_VISIBLE_DEVICES selects, by UUID.

    As CUDA does, it stops at the first number that no GPU has, takes the beginning of a UUID for
    the whole, and a divided GPU for its first part.

    order: the devices that the numbers 0, 1, ... stand for; None: the driver's order.
    """
    all_names = [name for gpu in present for name in gpu.names]
    if visible_devices is None:
        return all_names
    order = [gpu.names[0] for gpu in present] if order is None else order
    known = {gpu.uuid: gpu.names[0] for gpu in present} | {name: name for name in all_names}
    found: list[str] = []
    for entry in _entries(visible_devices):
        if entry.lstrip("-").isdigit():
            if not 0 <= int(entry) < len(order):
                break
            entry = order[int(entry)]
        else:
            entry = next((name for uuid, name in known.items() if uuid.startswith(entry)), entry)
        if entry not in found:
            found.append(entry)
    return found


def _gpus_by_number(visible_devices: str | None, present: list[Gpu]) -> list[str]:
    """The devices that the numbers 0, 1, ... stand for in CUDA, by UUID. Raises PoolError.

    CUDA_DEVICE_ORDER=PCI_BUS_ID is the driver's order. CUDA's default puts faster GPUs first, by a
    rule that nobody has written down: where GPUs differ, or are divided, CUDA itself is asked.
    """
    drivers_order = [gpu.names[0] for gpu in present]
    has_numbers = any(entry.isdigit() for entry in _entries(visible_devices or ""))
    are_alike = len({gpu.model for gpu in present}) <= 1 and not any(gpu.parts for gpu in present)
    if not has_numbers or are_alike or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return drivers_order
    order = cuda_order()
    if not order:
        raise PoolError(
            "this host has GPUs of several kinds. CUDA decides how they are numbered, and it did"
            " not answer; export CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the GPUs by their UUIDs"
            " (nvidia-smi -L)"
        )
    return order


ASK_CUDA = """
import ctypes, uuid
cuda = ctypes.CDLL("libcuda.so.1")
count, device, part = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
whole = (ctypes.c_ubyte * 16)()
for number in range(count.value):
    assert cuda.cuDeviceGet(ctypes.byref(device), number) == 0
    assert cuda.cuDeviceGetUuid(ctypes.byref(whole), device) == 0
    known = hasattr(cuda, "cuDeviceGetUuid_v2")
    known = known and cuda.cuDeviceGetUuid_v2(ctypes.byref(part), device) == 0
    divided = known and bytes(part) != bytes(whole)
    print(("MIG-" if divided else "GPU-") + str(uuid.UUID(bytes=bytes(part if divided else whole))))
"""


def cuda_order() -> list[str]:
    """All GPUs in CUDA's order, by UUID; empty if CUDA cannot be asked.

    Another process asks: after cuInit no child of this one could use CUDA.
    """
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        answer = subprocess.run(
            [sys.executable, "-c", ASK_CUDA], env=env, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if answer.returncode != 0:
        return []
    return answer.stdout.split()


def _entries(visible_devices: str) -> list[str]:
    entries = [entry.strip() for entry in visible_devices.split(",")]
    return [entry for entry in entries if entry]


def default_folder() -> Path:
    """The folder of locks that all users of this host share."""
    for parent in FOLDERS:
        with contextlib.suppress(OSError):
            if parent.stat().st_mode & EVERYBODY == EVERYBODY:
                return parent / FOLDER
    return Path(tempfile.gettempdir()) / FOLDER


class Locks:
    """A folder with a file for each device; who has flocked the file has the device.

    Nothing is ever written into a file, so a link or a file that somebody else has put there can do
    no harm: links are refused, and files are opened for reading. The kernel's fs.protected_regular
    forbids O_CREAT on others' files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._make_folder()
        try:
            self.descriptor = os.open(
                folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            )
        except OSError as error:
            raise PoolError(self._unusable(error.strerror or str(error))) from None
        mode = os.fstat(self.descriptor).st_mode
        others_may_write = mode & (stat.S_IWGRP | stat.S_IWOTH)
        if others_may_write and not mode & stat.S_ISVTX:
            self.close()
            raise PoolError(
                self._unusable(
                    "other users may remove files in it, since its sticky bit is not set (chmod +t)"
                )
            )

    def _make_folder(self) -> None:
        """Make the folder, open to all from its first moment.

        The first sweep makes it, and none replaces that of another, as rename(2) would do while the
        folder is empty.
        """
        if os.path.lexists(self.folder):
            return
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            mask = os.umask(0)
            try:
                self.folder.mkdir(EVERYBODY)
            finally:
                os.umask(mask)
        except FileExistsError:  # another sweep was faster
            return
        except OSError as error:
            raise PoolError(self._unusable(error.strerror or str(error))) from None

    def _unusable(self, why: str) -> str:
        return (
            f"hydra.launcher.lock_folder={self.folder}: {why}; use another folder:"
            " hydra.launcher.lock_folder=FOLDER"
        )

    def take(self, device: str) -> int | None:
        """A descriptor that holds the lock until all processes that inherited it have closed it.

        None if another process has it.
        """
        name = re.sub(r"[^\w.-]", "_", device) + ".lock"
        descriptor = self._open(name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        with contextlib.suppress(FileNotFoundError):
            present = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            if present.st_ino == os.fstat(descriptor).st_ino:
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
                    descriptor = os.open(
                        name, flags | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=self.descriptor
                    )
                    os.fchmod(descriptor, 0o644)  # whatever the umask: others must be able to read
            except FileExistsError:  # another sweep was faster
                continue
            except OSError as error:
                raise PoolError(self._unusable(f"{name}: {error.strerror}")) from None
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise PoolError(self._unusable(f"{name} in it is not a regular file"))
            return descriptor
        raise PoolError(
            self._unusable(f"another process creates {name} in it and removes it again")
        )

    def close(self) -> None:
        os.close(self.descriptor)


@dataclass
class Grant:
    """Devices that a job may use, with the descriptors that hold their locks."""

    names: list[str]
    locks: list[int]

    def release(self) -> None:
        """Give the devices back, unless a process that was forked holds the locks too."""
        while self.locks:
            os.close(self.locks.pop())


class Devices:
    """The devices of a sweep, under locks that all sweeps share; without any, a number of slots."""

    def __init__(self, names: list[str], per_job: int, slots: int, folder: Path | None) -> None:
        """Open the folder of locks. Raises PoolError.

        names: the devices.
        per_job: devices of each job; 0: none, and `slots` jobs run at a time.
        folder: of the locks; None: the one that all share.
        """
        if len(names) < per_job:
            raise PoolError(
                f"hydra.launcher.gpus_per_trial={per_job}: the number of devices is {len(names)};"
                f" use hydra.launcher.gpus_per_trial={len(names)}"
            )
        self.names = names
        self.per_job = per_job
        self.at_once = len(names) // per_job if per_job else slots
        self.locks = Locks(folder or default_folder()) if per_job else None

    def take(self, in_use: set[str]) -> Grant | None:
        """As many free devices as a job needs; None while there are not enough.

        in_use: those that jobs of this sweep have.
        """
        grant = Grant([], [])
        if self.locks is None:
            return grant
        for name in self.names:
            if len(grant.names) == self.per_job:
                break
            lock = None if name in in_use else self.locks.take(name)
            if lock is not None:
                grant.names.append(name)
                grant.locks.append(lock)
        if len(grant.names) < self.per_job:
            grant.release()
            return None
        return grant

    def close(self) -> None:
        if self.locks:
            self.locks.close()
