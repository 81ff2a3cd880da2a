"""Tokens: a corpus as one long row of numbers, cut into windows; and the .bin files that hold such
rows.

A sample is a window of `length` tokens, and its targets are the tokens one further on. In training
the windows of an epoch lie end to end, so that every token is seen once, and begin at an offset
that is drawn anew for each epoch, so that no token always stands at the same position or first in
its window. Which tokens a window holds is a function of its number, the seed and the epoch: the
same on any number of processes, and after a resume. What is left out at the ends of the corpus is
less than two windows.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ddp_train.data.device_copy import to_device
from ddp_train.data.rng import hash_key
from ddp_train.errors import DataError
from ddp_train.text import counted

IGNORED = -100
"""As a target: not counted, as in torch's cross entropy."""
HELD_AS = {"uint8": torch.uint8, "uint16": torch.int16, "uint32": torch.int32}
"""torch gathers no uint16 and uint32 on GPUs. The same bits, widened to int64 and masked, are the
number."""
HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""First number of llm.c's files: the version that follows, and the type of the tokens (GPT-2's,
Llama 3's)."""
HEADER_NUMBERS = 256
"""int32 each: magic, version, number of tokens, zeros."""
CHECKED_AT_ONCE = 2**26
"""Tokens that are widened to int64 at a time: 0.5 GB."""


class Words(Protocol):
    """What tokens stand for."""

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class TokenSource:
    """Windows of a row of tokens. A batch is (ids, targets), int64 [n, length] each.

    The row may consist of several parts, files for example; no window spans two. It lies in memory,
    in mapped files, or on a GPU.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        length: int,
        vocabulary: int,
        seed: int | None = None,
        bytes_per_token: float | None = None,
        words: Words | None = None,
        where: str = "data",
    ) -> None:
        """parts: of one type of `HELD_AS`, [tokens] each. seed: of the offsets; None, for a test
        split: windows begin at the start, the last one ends with its part, and what it has in
        common with the one before is not counted twice. words: what the tokens stand for, where
        that is known. where: key and value, for messages.

        Raises DataError if there is no whole window.
        """
        self.parts = list(parts)
        self.length = length
        self.vocabulary = vocabulary
        self.seed = seed
        self.bytes_per_token = bytes_per_token
        self.words = words
        self.where = where
        self.whole = self.parts[0] if len(self.parts) == 1 else None
        """All parts as one tensor, where there is one."""
        sizes = np.array([len(part) for part in self.parts], dtype=np.int64)
        self.part_begins = sizes.cumsum() - sizes
        self.last_starts = sizes - length - 1
        # An offset is below `length`: as many windows fit behind the largest as behind any other.
        counts = sizes // length - 1 if seed is not None else -(-(sizes - 1) // length)
        self.counts = np.where(sizes > length, counts, 0)
        self.window_ends = self.counts.cumsum()
        self.windows = int(self.counts.sum())
        self.numbers: np.ndarray | None = None
        """Of the windows that were selected; None: all."""
        if not self.windows:
            split, needed = ("test", length + 1) if seed is None else ("training", 2 * length)
            raise DataError(
                f"{where}: the {split} split has {counted(int(sizes.sum()), 'token')}, and"
                f" data.length={length} needs {needed:,}",
                "use a smaller data.length, or more text",
            )

    @property
    def outputs(self) -> int:
        return self.vocabulary

    @property
    def tokens(self) -> int:
        return sum(map(len, self.parts))

    @property
    def last_token(self) -> int:
        """Of the row. Mostly the end of a document: what is written behind it begins anew."""
        last = self.parts[-1][-1:]
        return int(last.long() & _mask(last))

    @property
    def sample_bytes(self) -> int:
        """Of a window and its targets in a batch."""
        return 16 * self.length

    def __len__(self) -> int:
        return self.windows

    def select(self, numbers: np.ndarray) -> TokenSource:
        """Some of the windows. In training they overlap, of one epoch and another, those that are
        left out."""
        other = copy.copy(self)
        other.numbers = numbers if self.numbers is None else self.numbers[numbers]
        other.windows = len(numbers)
        return other

    def to(self, device: torch.device, channels_last: bool = False) -> TokenSource:
        """The same split on a device; on the CPU it stays where it is, in mapped files perhaps.
        channels_last: has no meaning here.

        Raises DataError if a token is out of the vocabulary, which a GPU would only report as a
        failed assertion.
        """
        if device.type == "cpu":
            return self
        held = torch.empty(self.tokens, dtype=self.parts[0].dtype, device=device)
        for part, begin in zip(self.parts, self.part_begins.tolist(), strict=True):
            held[begin : begin + len(part)].copy_(part)
        if self.vocabulary <= _mask(held):
            for piece in held.split(CHECKED_AT_ONCE):
                self._check(piece.long() & _mask(held))
        other = copy.copy(self)
        other.whole = held
        return other

    def get_batch(self, indices: np.ndarray, epoch: int | None) -> tuple[Tensor, Tensor]:
        if self.numbers is not None:
            indices = self.numbers[indices]
        part = np.searchsorted(self.window_ends, indices, side="right")
        begins = (indices - (self.window_ends - self.counts)[part]) * self.length
        offset = 0
        if self.seed is not None and epoch is not None:
            offset = hash_key(self.seed, "windows", epoch) % self.length
        starts = np.minimum(begins + offset, self.last_starts[part])
        rows = self._rows(part, starts)
        ids = rows[:, :-1].contiguous()
        targets = rows[:, 1:].contiguous()
        repeated = begins - starts
        if self.seed is None and (repeated > 0).any():
            seen = to_device(torch.from_numpy(repeated), targets.device)
            targets.masked_fill_(
                torch.arange(self.length, device=targets.device) < seen[:, None], IGNORED
            )
        return ids, targets

    def _rows(self, part: np.ndarray, starts: np.ndarray) -> Tensor:
        """int64 [n, length + 1]. part, starts: the part of each window, and where it begins in
        there."""
        size = self.length + 1
        if self.whole is not None:
            index = torch.from_numpy(self.part_begins[part] + starts)
            rows = self.whole.unfold(0, size, 1).index_select(
                0, to_device(index, self.whole.device)
            )
        else:
            rows = torch.empty(len(starts), size, dtype=self.parts[0].dtype)
            for number in np.unique(part).tolist():
                of_part = np.flatnonzero(part == number)
                windows = self.parts[number].unfold(0, size, 1)
                rows[torch.from_numpy(of_part)] = windows.index_select(
                    0, torch.from_numpy(starts[of_part])
                )
        wide = rows.long() if rows.dtype == torch.uint8 else rows.long() & _mask(rows)
        if wide.is_cpu and self.vocabulary <= _mask(rows):
            self._check(wide)
        return wide

    def _check(self, tokens: Tensor) -> None:
        largest = int(tokens.max())
        if largest >= self.vocabulary:
            raise DataError(
                f"{self.where}: holds the token {largest:,}, and the vocabulary ends with"
                f" {self.vocabulary - 1:,}",
                f"use data.vocabulary={largest + 1} or the tokenizer's own size; if the number"
                " makes no sense, data.dtype is another",
            )


def _mask(tokens: Tensor) -> int:
    """The largest number that the type of these tokens can hold."""
    return (1 << 8 * tokens.itemsize) - 1


def mapped(path: Path, dtype: str, skip_bytes: int = 0) -> Tensor:
    """A file as a tensor of the type that holds `dtype` (`HELD_AS`), [tokens], mapped into memory:
    nothing is read before it is used, and all processes of a host share the pages.

    Raises DataError if the file is empty or cannot be opened.
    """
    try:
        content = np.memmap(
            path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r", offset=skip_bytes
        )
    except (OSError, ValueError) as error:
        raise DataError(
            f"data.path: {path} cannot be mapped: {error}", "see that it is a file with tokens"
        ) from error
    with warnings.catch_warnings():  # torch warns that the memory is read-only; nobody writes there
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(
            content.view(content.dtype.str.replace("u", "i")) if dtype != "uint8" else content
        )


def read_bin(path: Path, dtype: str) -> Tensor:
    """The tokens of a .bin file, mapped. With llm.c's header its type is known; without one, as
    nanoGPT writes it, the file is a plain array of `dtype` (uint16 or uint32), little-endian.

    Raises DataError if header and size contradict each other.
    """
    size = path.stat().st_size
    header = np.fromfile(path, dtype="<i4", count=HEADER_NUMBERS)
    if len(header) < HEADER_NUMBERS or int(header[0]) not in HEADERS:
        if size % np.dtype(dtype).itemsize:
            what = (
                f"{path} has {size:,} bytes, which is no whole number of tokens of"
                f" data.dtype={dtype}"
            )
            raise DataError(what, "use the type that it was written with, or write it again")
        return mapped(path, dtype)
    version, dtype = HEADERS[int(header[0])]
    if header[1] != version:
        raise DataError(
            f"{path} has llm.c's header, version {header[1]}, not {version}",
            "write it with a newer llm.c",
        )
    tokens = int(header[2])
    there = (size - 4 * HEADER_NUMBERS) // np.dtype(dtype).itemsize
    if tokens != there:
        raise DataError(
            f"{path} holds {there:,} tokens, and its header says {tokens:,}",
            "fetch or write the file again",
        )
    return mapped(path, dtype, 4 * HEADER_NUMBERS)
