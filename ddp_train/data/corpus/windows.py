"""Windows of tokens: a corpus as one long row of numbers, cut into samples.

A sample is a window of `length` tokens, and its targets are the tokens one further on. In training
the windows of an epoch lie end to end, so that every token is seen once, and begin at an offset
that is drawn anew for each epoch, so that no token always stands at the same position or first in
its window. Which tokens a window holds is a function of its number, the seed and the epoch: the
same on any number of processes, and after a resume. What is left out at the ends of the corpus is
less than two windows.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddp_train.data.corpus.codec import Codec
from ddp_train.data.corpus.token_files import largest_number
from ddp_train.data.device_copy import to_device
from ddp_train.data.rng import hash_key
from ddp_train.errors import DataError
from ddp_train.text import counted

IGNORED = -100
"""As a target: not counted, as in torch's cross entropy."""
CHECKED_AT_ONCE = 2**26
"""Tokens that are widened to int64 at a time: 0.5 GB."""


@dataclass(frozen=True)
class TokenFacts:
    """Facts about the tokens of a corpus."""

    codec: Codec | None = None
    """The texts that the tokens stand for; None: unknown."""
    bytes_per_token: float | None = None
    """Bytes of text for each token, on average; None: unknown."""
    where: str = "data"
    """Key and value that name the corpus, for messages."""


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
        facts: TokenFacts | None = None,
    ) -> None:
        """Divides the parts into windows.

        parts: [tokens] each, of one type of `HELD_AS`.
        length: tokens of a window.
        vocabulary: the number of tokens that there are.
        seed: of the offsets. None, for a test split: windows begin at the start, the last one ends
            with its part, and what it has in common with the one before is not counted twice.

        Raises DataError if there is no whole window.
        """
        self.parts = list(parts)
        self.length = length
        self.vocabulary = vocabulary
        self.seed = seed
        self.facts = facts or TokenFacts()
        self.codec = self.facts.codec
        self.bytes_per_token = self.facts.bytes_per_token
        self.row = self.parts[0] if len(self.parts) == 1 else None
        """All parts as one tensor, where there is one."""
        sizes = np.array([len(part) for part in self.parts], dtype=np.int64)
        self.part_begins = sizes.cumsum() - sizes
        self.last_starts = sizes - length - 1
        if seed is None:
            counts = -(-(sizes - 1) // length)
        else:
            # An offset is below `length`: as many windows fit behind the largest as behind any.
            counts = sizes // length - 1
        self.counts = np.where(sizes > length, counts, 0)
        """Windows of each part, int64 [parts]."""
        self.window_ends = self.counts.cumsum()
        self.windows = int(self.counts.sum())
        self.numbers: np.ndarray | None = None
        """Windows that were selected, int64 [n]; None: all."""
        self._check_windows()

    @property
    def outputs(self) -> int:
        return self.vocabulary

    @property
    def tokens(self) -> int:
        """Tokens of all parts."""
        return sum(len(part) for part in self.parts)

    @property
    def last_token(self) -> int:
        """The last token of the row.

        It is mostly the end of a document, so that what is written behind it begins anew.
        """
        last = self.parts[-1][-1:]
        return int(last.long() & largest_number(last))

    @property
    def sample_bytes(self) -> int:
        """Bytes of a window and its targets in a batch."""
        return 16 * self.length

    def __len__(self) -> int:
        return self.windows

    def select(self, numbers: np.ndarray) -> TokenSource:
        """Some of the windows as a split of their own.

        In training those of one epoch overlap the ones that are left out in another.
        """
        selection = copy.copy(self)
        selection.numbers = numbers if self.numbers is None else self.numbers[numbers]
        selection.windows = len(numbers)
        return selection

    def to(self, device: torch.device, channels_last: bool = False) -> TokenSource:
        """The same split with its tokens on a device.

        On the CPU this split itself is returned, whose tokens may be in mapped files. Tokens out of
        the vocabulary are then found by `get_batch`.

        channels_last: has no meaning here.

        Raises DataError, not on the CPU, if a token is out of the vocabulary: a GPU would only
        report it as a failed assertion.
        """
        if device.type == "cpu":
            return self
        row = torch.empty(self.tokens, dtype=self.parts[0].dtype, device=device)
        for part, begin in zip(self.parts, self.part_begins.tolist(), strict=True):
            row[begin : begin + len(part)].copy_(part)
        if self.vocabulary <= largest_number(row):
            for piece in row.split(CHECKED_AT_ONCE):
                self._check_vocabulary(piece.long() & largest_number(row))
        held = copy.copy(self)
        held.row = row
        return held

    def get_batch(self, indices: np.ndarray, epoch: int | None) -> tuple[Tensor, Tensor]:
        if self.numbers is not None:
            indices = self.numbers[indices]
        part = np.searchsorted(self.window_ends, indices, side="right")
        first_windows = (self.window_ends - self.counts)[part]
        begins = (indices - first_windows) * self.length
        offset = 0
        if self.seed is not None and epoch is not None:
            offset = hash_key(self.seed, "windows", epoch) % self.length
        starts = np.minimum(begins + offset, self.last_starts[part])
        rows = self._rows(part, starts)
        ids = rows[:, :-1].contiguous()
        targets = rows[:, 1:].contiguous()
        if self.seed is None:
            self._ignore_repeated(targets, begins - starts)
        return ids, targets

    def _check_windows(self) -> None:
        """Raise DataError if there is no whole window."""
        if self.windows:
            return
        split = "training"
        needed = 2 * self.length
        if self.seed is None:
            split = "test"
            needed = self.length + 1
        raise DataError(
            f"{self.facts.where}: the {split} split has {counted(self.tokens, 'token')}, and"
            f" data.length={self.length} needs {needed:,}",
            "use a smaller data.length, or more text",
        )

    def _ignore_repeated(self, targets: Tensor, repeated: np.ndarray) -> None:
        """Marks the targets that the window before counted, in place.

        repeated: of each window, int64 [n].
        """
        if not (repeated > 0).any():
            return
        counts = to_device(torch.from_numpy(repeated), targets.device)
        places = torch.arange(self.length, device=targets.device)
        targets.masked_fill_(places < counts[:, None], IGNORED)

    def _rows(self, part: np.ndarray, starts: np.ndarray) -> Tensor:
        """The tokens of windows, and one more each: int64 [n, length + 1].

        part: the part of each window.
        starts: where each window begins in its part.
        """
        size = self.length + 1
        if self.row is not None:
            index = torch.from_numpy(self.part_begins[part] + starts)
            windows = self.row.unfold(0, size, 1)
            rows = windows.index_select(0, to_device(index, self.row.device))
        else:
            rows = torch.empty(len(starts), size, dtype=self.parts[0].dtype)
            for number in np.unique(part).tolist():
                places = np.flatnonzero(part == number)
                windows = self.parts[number].unfold(0, size, 1)
                index = torch.from_numpy(starts[places])
                rows[torch.from_numpy(places)] = windows.index_select(0, index)
        wide = rows.long()
        if rows.dtype != torch.uint8:
            wide = wide & largest_number(rows)
        if wide.is_cpu and self.vocabulary <= largest_number(rows):
            self._check_vocabulary(wide)
        return wide

    def _check_vocabulary(self, tokens: Tensor) -> None:
        """Raises DataError if a token is out of the vocabulary."""
        largest = int(tokens.max())
        if largest >= self.vocabulary:
            raise DataError(
                f"{self.facts.where}: has the token id {largest:,}, but the largest id of the"
                f" vocabulary is {self.vocabulary - 1:,}",
                f"use data.vocabulary={largest + 1}, or the size of the tokenizer. If the"
                " tokenizer has no such id, data.dtype is wrong",
            )
