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

SHAPES = 2
"""Of a call that takes several tensors, so many are named."""


class Call(NamedTuple):
    """A collective as one rank has called it."""

    name: str
    tensors: str

    def __str__(self) -> str:
        if self.tensors:
            return f"{self.name} of {self.tensors}"
        return self.name


Calls = Mapping[str, Mapping[int, Call]]
"""Of one rank: process group -> number of the call in it -> call."""


def record_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank_{rank}.collectives.json"


def unfinished(record: Path) -> Path:
    """The file of a record while it is written; a process that is killed then leaves it."""
    return record.with_suffix(".part")


def calls_of(run_dir: Path, rank: int) -> Calls | None:
    """None if the rank has written no record, or one that cannot be read: torch promises nothing of
    its format."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        record = json.loads(record_file(run_dir, rank).read_text())
        return _calls(record.get("entries", []))
    return None


def _calls(entries: Sequence[dict[str, Any]]) -> Calls:
    calls: defaultdict[str, dict[int, Call]] = defaultdict(dict)
    for entry in entries:
        if not entry.get("is_p2p"):
            group = str(entry["process_group"][0])
            name = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
            calls[group][int(entry["collective_seq_id"])] = Call(name, _tensors(entry))
    return calls


def _tensors(entry: dict[str, Any]) -> str:
    shapes = entry.get("input_sizes") or []
    kinds = entry.get("input_dtypes") or []
    words = [f"{kind} {shape}" for kind, shape in zip(kinds, shapes, strict=False)]
    return ", ".join(words[:SHAPES]) + f" and {len(words) - SHAPES} more" * (len(words) > SHAPES)


def compare(ranks: Mapping[int, Calls]) -> str:
    """Where the calls of the ranks part, in words; "" if they do not, or fewer than two ranks are
    known."""
    groups = {group for calls in ranks.values() for group in calls}
    found = [
        _parting({rank: calls.get(group, {}) for rank, calls in ranks.items()})
        for group in sorted(groups)
    ]
    return "; ".join(words for words in found if words)


def _parting(ranks: Mapping[int, Mapping[int, Call]]) -> str:
    """Of one process group. Only what all records still hold is compared: old calls are
    overwritten."""
    known = {rank: calls for rank, calls in ranks.items() if calls}
    absent = [rank for rank in ranks if rank not in known]
    begin = max((min(calls) for calls in known.values()), default=0)
    for number in range(begin, max((max(calls) for calls in known.values()), default=-1) + 1):
        made = {rank: calls[number] for rank, calls in known.items() if number in calls}
        counted = Counter(made.values()).most_common()
        missing = sorted([*absent, *(known.keys() - made.keys())])
        if not made or (len(counted) == 1 and not missing):
            continue
        usual = counted[0][0]
        callers = sorted(rank for rank, call in made.items() if call == usual)
        words = f"{_ranks(callers)} called {usual} (collective {number})"
        words += f", {_ranks(missing)} did not" if missing else ""
        others = [
            f"rank {rank} called {call} there"
            for rank, call in sorted(made.items())
            if call != usual
        ]
        return "; ".join([words, *others])
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
