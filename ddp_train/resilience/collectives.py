"""Which collective a hanging run is stuck in, and which rank has not called it: from the flight
records of its ranks.

Torch-free: the launcher reads what the workers have written (distributed/flight_record.py).
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ddp_train.text import named_ranks

SHOWN_TENSORS = 2
"""Tensors of a call that are named."""


class Call(NamedTuple):
    """A collective as one rank has called it."""

    name: str
    tensors: str

    def __str__(self) -> str:
        if self.tensors:
            return f"{self.name} of {self.tensors}"
        return self.name


Calls = Mapping[str, Mapping[int, Call]]
"""The calls of one rank: process group -> number of the call in it -> call."""


def record_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank_{rank}.collectives.json"


def calls_of(run_dir: Path, rank: int) -> Calls | None:
    """The calls in a rank's record; None if it has written no record, or one that cannot be read:
    torch promises nothing of its format."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        record = json.loads(record_file(run_dir, rank).read_text())
        return _calls(record.get("entries", []))
    return None


def _calls(entries: Sequence[dict[str, Any]]) -> Calls:
    calls: defaultdict[str, dict[int, Call]] = defaultdict(dict)
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        group = str(entry["process_group"][0])
        whole_name = str(entry["profiling_name"])
        name = whole_name.partition(":")[2] or whole_name
        number = int(entry["collective_seq_id"])
        calls[group][number] = Call(name, _tensors(entry))
    return calls


def _tensors(entry: dict[str, Any]) -> str:
    """`Float [3, 4], Float [4] and 2 more`."""
    shapes = entry.get("input_sizes") or []
    dtypes = entry.get("input_dtypes") or []
    tensors = [f"{dtype} {shape}" for dtype, shape in zip(dtypes, shapes, strict=False)]
    text = ", ".join(tensors[:SHOWN_TENSORS])
    left_out = len(tensors) - SHOWN_TENSORS
    if left_out > 0:
        text += f" and {left_out} more"
    return text


def compare(ranks: Mapping[int, Calls]) -> str:
    """The first collective at which the calls of the ranks differ, in words.

    Empty if they do not, or fewer than two ranks are known.
    """
    groups = {group for calls in ranks.values() for group in calls}
    texts = []
    for group in sorted(groups):
        calls_of_group = {rank: calls.get(group, {}) for rank, calls in ranks.items()}
        texts.append(_describe_parting(calls_of_group))
    return "; ".join(text for text in texts if text)


def _describe_parting(ranks: Mapping[int, Mapping[int, Call]]) -> str:
    """The first call of one process group that is not the same on all ranks, in words.

    Only what all records still hold is compared: old calls are overwritten.
    """
    calls_of_rank = {rank: calls for rank, calls in ranks.items() if calls}
    if not calls_of_rank:
        return ""
    first = max(min(calls) for calls in calls_of_rank.values())
    last = max(max(calls) for calls in calls_of_rank.values())
    for number in range(first, last + 1):
        made = {rank: calls[number] for rank, calls in calls_of_rank.items() if number in calls}
        missing = sorted(ranks.keys() - made.keys())
        is_alike = len(set(made.values())) == 1 and not missing
        if made and not is_alike:
            return _describe(number, made, missing)
    return ""


def _describe(number: int, made: Mapping[int, Call], missing: Sequence[int]) -> str:
    """The calls in one place and the ranks that made each, in words.

    missing: the ranks that made none.
    """
    usual, _ = Counter(made.values()).most_common(1)[0]
    callers = sorted(rank for rank, call in made.items() if call == usual)
    text = f"{named_ranks(callers)} called {usual} (collective {number})"
    if missing:
        text += f", {named_ranks(missing)} did not"
    for rank, call in sorted(made.items()):
        if call != usual:
            text += f"; rank {rank} called {call} instead"
    return text
