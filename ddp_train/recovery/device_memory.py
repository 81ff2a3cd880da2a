"""Memory on a GPU that outlives its process: an allocation that others import by a file descriptor.

It is free once the last descriptor of it is closed and no process maps it. The launcher holds the
descriptor and needs neither torch nor a CUDA context for that. See the driver API, "Virtual Memory
Management".
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
from torch import Tensor

from ddp_train.errors import LaunchError

OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""
FREE_SHARE = 0.1
"""The part of a GPU's memory that stays free: a later step may need more than the first one."""
PINNED = 1
"""CU_MEM_ALLOCATION_TYPE_PINNED."""
FILE_DESCRIPTOR = 1
"""CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR."""
ON_DEVICE = 1
"""CU_MEM_LOCATION_TYPE_DEVICE."""
READ_AND_WRITE = 3
"""CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression_type", ctypes.c_ubyte),
        ("rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows_metadata", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Bytes:
    """Memory of a GPU as torch takes it over."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class NoRoomError(LaunchError):
    """A GPU has too little memory left for what is to be kept."""

    kind = "oom"


class DeviceMemory:
    """An allocation on a GPU that this process maps."""

    def __init__(self, handle: ctypes.c_ulonglong, device: int, size: int) -> None:
        """Map an allocation. Raises LaunchError."""
        self.handle = handle
        self.size = size
        """In bytes, a multiple of the driver's granularity."""
        self.address = ctypes.c_ulonglong()
        _call(
            "cuMemAddressReserve",
            ctypes.byref(self.address),
            _size(size),
            _size(0),
            _int(0),
            _int(0),
        )
        _call("cuMemMap", self.address, _size(size), _size(0), handle, _int(0))
        access = _Access(_Location(ON_DEVICE, device), READ_AND_WRITE)
        _call("cuMemSetAccess", self.address, _size(size), ctypes.byref(access), _size(1))
        content = _Bytes(int(self.address.value), size)
        self.bytes: Tensor = torch.as_tensor(content, device=f"cuda:{device}")

    @classmethod
    def create(cls, device: int, least_bytes: int) -> DeviceMemory:
        """A new allocation. Raises NoRoomError, or LaunchError."""
        free, total = torch.cuda.mem_get_info(device)
        if free - least_bytes < FREE_SHARE * total:
            needed, left = (size / 2**30 for size in (least_bytes, free))
            raise NoRoomError(
                f"a copy of the state takes {needed:.1f} GiB; the GPU has {left:.1f} GiB left, of"
                f" which training may still need {FREE_SHARE * total / 2**30:.1f} GiB"
            )
        properties = _Properties(
            PINNED, FILE_DESCRIPTOR, _Location(ON_DEVICE, device), None, _Flags()
        )
        granularity = ctypes.c_size_t()
        _call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granularity),
            ctypes.byref(properties),
            ctypes.c_int(0),
        )
        size = -(-least_bytes // granularity.value) * granularity.value
        handle = ctypes.c_ulonglong()
        _call("cuMemCreate", ctypes.byref(handle), _size(size), ctypes.byref(properties), _int(0))
        return cls(handle, device, size)

    @classmethod
    def from_descriptor(cls, descriptor: int, device: int, size: int) -> DeviceMemory:
        """The allocation of another process. Raises LaunchError."""
        handle = ctypes.c_ulonglong()
        _call(
            "cuMemImportFromShareableHandle",
            ctypes.byref(handle),
            ctypes.c_void_p(descriptor),
            ctypes.c_int(FILE_DESCRIPTOR),
        )
        return cls(handle, device, size)

    def descriptor(self) -> int:
        """A new file descriptor of the allocation, which the caller closes."""
        descriptor = ctypes.c_int()
        _call(
            "cuMemExportToShareableHandle",
            ctypes.byref(descriptor),
            self.handle,
            ctypes.c_int(FILE_DESCRIPTOR),
            _int(0),
        )
        os.set_inheritable(descriptor.value, False)
        return descriptor.value

    def release(self) -> None:
        """Unmap it. No kernel may use it any more."""
        _call("cuMemUnmap", self.address, _size(self.size))
        _call("cuMemAddressFree", self.address, _size(self.size))
        _call("cuMemRelease", self.handle)


def _size(value: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(value)


def _int(value: int) -> ctypes.c_ulonglong:
    return ctypes.c_ulonglong(value)


def _call(function: str, *arguments: Any) -> None:
    """Call the driver. Raises LaunchError if it refuses."""
    code = getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments)
    if code == OUT_OF_MEMORY:
        raise NoRoomError(f"{function}: the GPU has no memory left")
    if code:
        raise LaunchError(f"{function}: CUDA error {code}")
