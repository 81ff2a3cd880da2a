"""A digest of all that the samples of a data set may follow from, to see whether it was changed."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import pickle
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ddp_train.resilience.failure_report import is_foreign
from ddp_train.tensor_tree import map_tensors

LIMIT_SECONDS = 0.05
LIMIT_BYTES = 2**25
"""The most time of the CPU and memory of a digest: new loader processes start in about that time.
A busy host changes nothing about what is read."""


LARGE_BYTES = 2**20
"""Bytes from which on a tensor or an array is told by what it is."""
LOOKED_AT = 4096
"""Elements of such a one that are read all the same."""


class LargeData:
    """Tells whether large tensors and arrays were changed without reading all of them.

    torch counts what changes a tensor in place. It does not know of changes through memory that
    numpy shares: such tensors are read, and so are small ones. A change by `tensor.data` or DLPack
    is seen only where it meets one of LOOKED_AT elements.

    numpy counts nothing: arrays are read, but for those that it lets nobody write to.
    """

    def __init__(self) -> None:
        self.numbers = WeakIdKeyDictionary()
        """A number for each of them that no other ever has: another one may use its memory
        again."""
        self.next_number = itertools.count()

    def identity(self, data: Any) -> tuple[Any, ...] | None:
        """Values that are others once the tensor or array was changed; None if it must be read."""
        if type(data) is Tensor:
            return self._identity_of_tensor(data)
        if isinstance(data, np.ndarray):
            return self._identity_of_array(data)
        return None

    def _number_of(self, data: Any) -> int:
        if data not in self.numbers:
            self.numbers[data] = next(self.next_number)
        return self.numbers[data]

    def _identity_of_array(self, array: np.ndarray) -> tuple[Any, ...] | None:
        if array.nbytes < LARGE_BYTES or array.dtype.hasobject or may_be_written(array):
            return None
        step = max(1, array.size // LOOKED_AT)
        return (
            self._number_of(array),
            array.ctypes.data,
            array.shape,
            array.strides,
            array.dtype.str,
            array.flat[::step].tobytes(),
        )

    def _identity_of_tensor(self, tensor: Tensor) -> tuple[Any, ...] | None:
        is_plain = tensor.layout is torch.strided and tensor.is_cpu and tensor.is_contiguous()
        if not is_plain or tensor.nbytes < LARGE_BYTES:
            return None
        # torch forbids to resize what numpy has a view of, or has made.
        if tensor.is_inference() or not tensor.untyped_storage().resizable():
            return None
        step = max(1, tensor.numel() // LOOKED_AT)
        some = tensor.detach().view(-1)[::step].contiguous().view(torch.uint8)
        return (
            self._number_of(tensor),
            tensor.data_ptr(),
            tensor._version,
            tuple(tensor.shape),
            str(tensor.dtype),
            bytes(some.tolist()),
        )


def may_be_written(array: np.ndarray) -> bool:
    """True unless an array, and each array that it is a view of, is read-only: a memory map that
    was opened for reading, or one after `setflags(write=False)`."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return True
        owner = owner.base
    # The memory is the array's own, a file that the processes share, or that of something else.
    return not (owner is None or isinstance(owner, mmap.mmap | bytes))


def content_of(dataset: Any, large_data: LargeData | None = None) -> str:
    """sha256 of what a data set holds, and of the global variables that its code reads.

    large_data: tensors and arrays of earlier calls; None: all are read.

    Returns "" if that cannot be told: it is large, or is not to be pickled, as open files are.
    """
    reader = _Reader(large_data)
    try:
        reader.dump(dataset)
        for code in reader.code:  # grows meanwhile
            for value in _globals_of(code):
                reader.dump(value)
    except Exception:  # noqa: BLE001  code of the user's own may raise anything when it is pickled
        return ""
    return reader.digest.hexdigest()


def bytes_of(tensor: Tensor) -> bytes:
    """The numbers of a tensor on the CPU."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def content_of_sample(sample: Any) -> bytes:
    """Bytes that are the same for equal samples; those of a pickled tensor are not."""
    return pickle.dumps(map_tensors(bytes_of, sample))


class _TooMuchError(Exception):
    """A data set takes longer to read than new processes take to start."""


class _Reader(pickle.Pickler):
    """Reads objects as pickle does, and notes the classes and functions that it comes upon."""

    def __init__(self, large_data: LargeData | None) -> None:
        super().__init__(self, pickle.HIGHEST_PROTOCOL, buffer_callback=self._read_buffer)
        self.large_data = large_data
        self.digest = hashlib.sha256()
        self.bytes = 0
        self.end = time.thread_time() + LIMIT_SECONDS
        self.code: list[Any] = []
        """Classes and functions of the user's own, each once."""

    def write(self, content: Any) -> None:
        """Called by pickle with each piece."""
        self.bytes += len(content)
        if self.bytes > LIMIT_BYTES or time.thread_time() > self.end:
            raise _TooMuchError
        self.digest.update(content)

    def reducer_override(self, obj: Any) -> Any:
        """Called by pickle with each object that is not of Python's own types."""
        if self.large_data is not None:
            identity = self.large_data.identity(obj)
            if identity is not None:
                return str, (repr(identity),)
        is_code = isinstance(obj, type | types.FunctionType)
        if not is_code or not _is_of_the_user(obj):
            return NotImplemented
        if obj not in self.code:
            self.code.append(obj)
        # In place of the object, which has no name that pickle takes inside of a function.
        return str, (obj.__qualname__,)

    def _read_buffer(self, buffer: pickle.PickleBuffer) -> None:
        self.write(buffer.raw())


def _is_of_the_user(code: Any) -> bool:
    """True for classes, functions and modules that are not of Python or an installed package."""
    module = code
    if not isinstance(code, types.ModuleType):
        module = sys.modules.get(code.__module__)
    file = getattr(module, "__file__", None)
    if file is None:  # a module in C, or a prompt
        return module is sys.modules["__main__"]
    return not is_foreign(file)


def _globals_of(code: Any) -> Iterator[Any]:
    """The values that the code of a class or of a function refers to."""
    if isinstance(code, type):
        yield from code.__bases__
        for name, value in vars(code).items():
            function = getattr(value, "fget", getattr(value, "__func__", value))
            if isinstance(function, types.FunctionType):
                yield function
            elif not name.startswith(("__", "_abc_")) and not callable(value):
                yield name, value  # a variable of the class
        return
    for cell in code.__closure__ or ():
        yield cell.cell_contents
    constants = [item for item in code.__code__.co_consts if not isinstance(item, types.CodeType)]
    yield code.__code__.co_code, constants, code.__defaults__, code.__kwdefaults__
    names = list(_names_in(code.__code__))
    for name in names:
        value = code.__globals__.get(name)
        if not isinstance(value, types.ModuleType):
            yield name, value
        elif _is_of_the_user(value):  # `settings.level`, whose parts are names too
            for part in names:
                part_value = vars(value).get(part)
                if not isinstance(part_value, types.ModuleType):
                    yield part, part_value


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names that a function uses, those of functions inside of it among them."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
