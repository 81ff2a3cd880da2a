"""Turns states of any objects into bytes beside their tensors, which are kept by themselves."""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddp_train.errors import LaunchError
from ddp_train.recovery.kept_layout import KeptTensor

PLAIN = {
    (__name__, "_tensor_of"),
    ("collections", "OrderedDict"),
    ("collections", "Counter"),
    ("builtins", "bytearray"),
    ("builtins", "complex"),
    ("builtins", "dict"),
    ("builtins", "set"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch", "strided"),
    ("torch.serialization", "_get_layout"),
}
"""The names that a pickled state may have, beside dtypes and what rebuilds tensors."""


class StatePacker:
    """Packs the parts of a state, and lists their tensors, each one once."""

    def __init__(self, device: str) -> None:
        """device: where tensors are listed; those elsewhere are packed with the rest."""
        self.device = torch.device(device)
        self.own: list[Tensor] = []
        """Tensors that each rank keeps by itself."""
        self.common: list[Tensor] = []
        """Tensors that ranks share out among each other."""
        self.of_leader: set[int] = set()
        """Positions in `common` of tensors that may differ between ranks: rank 0 keeps its own."""
        self.known: dict[int, KeptTensor] = {}
        """By the ids of tensors, which live as long as they are listed."""

    def add_own(self, tensor: Tensor) -> KeptTensor:
        """List a tensor that each rank keeps by itself.

        Raises LaunchError for a tensor on another device, or one that is not strided.
        """
        if not self._is_plain(tensor):
            kind = str(tensor.layout).removeprefix("torch.")
            raise LaunchError(
                f"a buffer or gradient is a {kind} tensor on {tensor.device}; only strided ones on"
                f" {self.device} can be copied"
            )
        kept = KeptTensor(True, len(self.own))
        self.own.append(tensor)
        self.known[id(tensor)] = kept
        return kept

    def packed(self, value: Any, is_same: bool) -> bytes:
        """Pickle a part of the state. Tensors that `add` can list are listed in place of this.

        is_same: whether these tensors are the same on all ranks.
        """
        stream = io.BytesIO()
        _Pickler(stream, self, is_same).dump(value)
        return stream.getvalue()

    def add(self, tensor: Tensor, is_same: bool) -> KeptTensor | None:
        """List a tensor in `common`, once.

        is_same: whether it is the same on all ranks.

        Returns what stands for the tensor in the pickled state; None, without listing it, for a
        tensor on another device, or one that is not strided.
        """
        kept = self.known.get(id(tensor))
        if kept is not None:
            return kept
        if not self._is_plain(tensor):
            return None
        kept = KeptTensor(False, len(self.common))
        if not is_same:
            self.of_leader.add(kept.number)
        self.common.append(tensor)
        self.known[id(tensor)] = kept
        return kept

    def _is_plain(self, tensor: Tensor) -> bool:
        return tensor.device == self.device and tensor.layout == torch.strided


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, packer: StatePacker, is_same: bool) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.packer = packer
        self.is_same = is_same

    def reducer_override(self, value: Any) -> Any:
        """Called for what is no plain data: what it is made of again, as `__reduce__` has it."""
        if not isinstance(value, Tensor):
            return NotImplemented
        kept = self.packer.add(value, self.is_same)
        if kept is not None:
            return KeptTensor, tuple(kept)
        if value.layout == torch.strided:
            # torch's own way takes 0.1 ms for each, and Adam has one for each parameter.
            whole = value.detach().cpu().contiguous()
            content = ctypes.string_at(whole.data_ptr(), whole.nbytes)
            return _tensor_of, (whole.dtype, tuple(whole.shape), content)
        return NotImplemented


def _tensor_of(dtype: torch.dtype, shape: tuple[int, ...], content: bytes) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


def unpacked(content: bytes, tensor_of: Callable[[KeptTensor], Tensor]) -> Any:
    """Unpickle what `StatePacker.packed` returned.

    tensor_of: returns a tensor that was listed.

    No code runs but PLAIN and torch's that rebuilds tensors. Raises LaunchError for other code.
    """
    return _Unpickler(content, tensor_of).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, tensor_of: Callable[[KeptTensor], Tensor]) -> None:
        super().__init__(io.BytesIO(content))
        self.tensor_of = tensor_of

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) == (KeptTensor.__module__, KeptTensor.__name__):
            return self._find
        is_rebuilding = module == "torch._utils" and name.startswith("_rebuild_")
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in PLAIN or is_rebuilding or is_dtype:
            return super().find_class(module, name)
        raise LaunchError(f"a state has {module}.{name}, which is not plain data")

    def _find(self, own: bool, number: int) -> Tensor:
        return self.tensor_of(KeptTensor(own, number))
