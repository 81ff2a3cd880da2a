"""Values that the processes bring into `run.sum` and `run.gather`, compared before they are joined.

Each describes its value and the line that it calls from. All processes read all descriptions, so
that what does not fit together is refused on all of them at once, and nobody waits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_train.distributed.exchange import bytes_of, from_bytes, texts_from_all_ranks
from ddp_train.distributed.process_group import ranks, total
from ddp_train.sessions.settings import UsageError, calling_line
from ddp_train.text import by_rank

NUMBERS_OR_TENSORS = (
    "pass a number, or a tensor of the same shape, on every process. Start a sum over batches"
    " with 0, since a process may have no batch"
)
ROWS = (
    "pass a tensor [n, ...] of which only n differs between processes. Or pass a list of such"
    " tensors, which may be empty: run.gather(parts)"
)
SAME_CALLS = (
    "every process must make the same calls in the same order. Do not call inside of `if"
    " run.rank == 0`, nor inside of a loop over run.test_loader, whose number of batches differs"
    " between processes"
)


class Kind(StrEnum):
    """Kinds of values."""

    INTEGER = "int"
    FLOAT = "float"
    TENSOR = "tensor"
    NO_ROWS = "an empty list"
    UNFIT = "unfit"
    PLACE = "place"
    """No value: only the place is compared."""


@dataclass(frozen=True)
class Part:
    """The description of what one process brings."""

    place: str
    """The call with its line: `run.sum (train.py:31)`."""
    kind: Kind
    number: float = 0
    """The value itself, of an INTEGER with all its digits or a FLOAT."""
    dtype: str = ""
    """Name of the type of a TENSOR, without `torch.`."""
    shape: tuple[int, ...] = ()
    found: str = ""
    """The type of what is UNFIT."""

    def __str__(self) -> str:
        if self.kind is Kind.TENSOR:
            return f"a tensor {list(self.shape)} of {self.dtype}"
        if self.kind is Kind.UNFIT:
            return f"a value of the type {self.found}"
        if self.is_number:
            return f"the {self.kind} {self.number}"
        return str(self.kind)

    @property
    def is_number(self) -> bool:
        return self.kind in (Kind.INTEGER, Kind.FLOAT)

    @property
    def has_rows(self) -> bool:
        return self.kind is Kind.TENSOR and self.shape[:1] != (0,)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of the numbers, of a tensor or not."""
        if self.kind is Kind.TENSOR:
            return getattr(torch, self.dtype)
        if self.kind is Kind.FLOAT:
            return torch.float64
        return torch.int64

    def encoded(self) -> str:
        # Not asdict, which copies deeply and takes longer than the exchange.
        return json.dumps(vars(self))

    @staticmethod
    def decoded(text: str) -> Part:
        fields = json.loads(text)
        fields["kind"] = Kind(fields["kind"])
        fields["shape"] = tuple(fields["shape"])
        return Part(**fields)


def sum_over_ranks(value: Any, device: str) -> Any:
    """The sum of the values of all processes; see `Run.sum`."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.ndarray):
        value = torch.as_tensor(value)
    parts = _parts_of_ranks("run.sum", _described(value), device)
    remedy = problem_of_sum(parts)
    if remedy:
        findings = by_rank(map(str, parts))
        raise UsageError(
            f"run.sum: the values of the processes cannot be added up: {findings}", remedy
        )
    tensors = [part for part in parts if part.kind is Kind.TENSOR]
    if not tensors:
        return sum_of_numbers([part.number for part in parts])
    here = value
    if not isinstance(here, Tensor):
        here = torch.full(tensors[0].shape, value, dtype=_widest(parts), device=device)
    return total(here.detach().to(device, _widest(parts), copy=True))


def gather_over_ranks(rows: Any, device: str) -> Tensor:
    """The rows of all processes; see `Run.gather`."""
    is_list = isinstance(rows, list | tuple) and all(isinstance(row, Tensor) for row in rows)
    if is_list and rows:
        rows = torch.cat([row.detach() for row in rows])
    described = _described(rows)
    if is_list and not len(rows):
        described = Part("", Kind.NO_ROWS)
    parts = _parts_of_ranks("run.gather", described, device)
    remedy = problem_of_rows(parts)
    if remedy:
        findings = by_rank(map(str, parts))
        raise UsageError(
            f"run.gather: the rows of the processes do not fit together: {findings}", remedy
        )
    typed = [part for part in parts if part.kind is Kind.TENSOR]
    with_rows = [part for part in parts if part.has_rows] or typed
    if not with_rows:
        return torch.empty(0, device=device)
    dtype = _promoted(with_rows)
    row_shape = with_rows[0].shape[1:]
    here = torch.empty(0, *row_shape, dtype=dtype, device=device)
    if isinstance(rows, Tensor) and len(rows):
        here = rows.detach().to(device, dtype)
    if ranks() == 1:
        return here
    row_bytes = math.prod(row_shape) * dtype.itemsize
    counts = [part.shape[0] if part.has_rows else 0 for part in parts]
    contents = from_bytes(bytes_of(here), [count * row_bytes for count in counts])
    gathered = [
        content.view(dtype).view(count, *row_shape)
        for content, count in zip(contents, counts, strict=True)
        if count
    ]
    return torch.cat(gathered) if gathered else here


def meet(place: str, device: str) -> None:
    """Raise UsageError, on all processes, unless all of them are here."""
    if ranks() > 1:
        _parts_of_ranks(place, Part("", Kind.PLACE), device, line="")


def problem_of_sum(parts: Sequence[Part]) -> str:
    """The remedy if values of these descriptions cannot be added up; "" if they can.

    A zero is neutral beside a tensor of any shape, and a number is a tensor of one element.
    """
    shapes = {part.shape for part in parts if part.kind is Kind.TENSOR}
    numbers = [part.number for part in parts if part.is_number]
    is_unfit = any(part.kind is Kind.UNFIT for part in parts)
    has_other_shape = len(shapes) > 1 or (
        any(math.prod(shape) != 1 for shape in shapes) and any(numbers)
    )
    if is_unfit or has_other_shape:
        return NUMBERS_OR_TENSORS
    return ""


def problem_of_rows(parts: Sequence[Part]) -> str:
    """The remedy if rows of these descriptions cannot be put together; "" if they can.

    No rows are neutral, whatever their type.
    """
    if any(part.kind not in (Kind.TENSOR, Kind.NO_ROWS) for part in parts):
        return ROWS
    if any(part.kind is Kind.TENSOR and not part.shape for part in parts):
        return ROWS
    with_rows = [part for part in parts if part.has_rows]
    shapes = {part.shape[1:] for part in with_rows}
    # An int64 would be rounded in float32.
    families = {_family(part.torch_dtype) for part in with_rows}
    return ROWS if len(shapes) > 1 or len(families) > 1 else ""


def sum_of_numbers(numbers: Sequence[float]) -> float:
    """The sum, of integers with all digits, of fractions rounded once."""
    if all(isinstance(number, int) for number in numbers):
        return sum(numbers)
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # too large; infinite on both sides
        return float(sum(numbers))


def _described(value: Any) -> Part:
    """The description of a value, without its place."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return Part("", Kind.TENSOR, dtype=dtype, shape=tuple(value.shape))
    if isinstance(value, Integral):
        return Part("", Kind.INTEGER, number=int(value))
    if isinstance(value, Real):
        return Part("", Kind.FLOAT, number=float(value))
    return Part("", Kind.UNFIT, found=type(value).__name__)


def _parts_of_ranks(call: str, described: Part, device: str, line: str | None = None) -> list[Part]:
    """The descriptions of rank 0, 1, ... Raises UsageError if they are in different places.

    line: of the call; None for the user's present one.
    """
    line = calling_line() if line is None else line
    place = f"{call} ({line})" if line else call
    mine = replace(described, place=place)
    if ranks() == 1:
        return [mine]
    parts = [Part.decoded(text) for text in texts_from_all_ranks(mine.encoded(), device)]
    places = [part.place for part in parts]
    if len(set(places)) > 1:
        raise UsageError(f"the processes are in different places: {by_rank(places)}", SAME_CALLS)
    return parts


def _family(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "fractions" if dtype.is_floating_point else "integers"


def _promoted(parts: Sequence[Part]) -> torch.dtype:
    dtype = parts[0].torch_dtype
    for part in parts:
        dtype = torch.promote_types(dtype, part.torch_dtype)
    return dtype


def _widest(parts: Sequence[Part]) -> torch.dtype:
    """The type in which numbers of these are added up: int64, float64 or complex128."""
    families = {_family(part.torch_dtype) for part in parts}
    if "complex" in families:
        return torch.complex128
    return torch.float64 if "fractions" in families else torch.int64
