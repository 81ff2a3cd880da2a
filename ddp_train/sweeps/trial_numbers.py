"""Which number, and so which folder, a trial has: the one of its words, through all starts of its
sweep.

Hydra numbers the trials of each start anew. With another grid in the same directory number 2 is
another trial, which would go on in the folder of the first, or show its results.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_train.sweeps import rows as sweep_rows

FILE = "trials.jsonl"
"""In the directory of the sweep: a line each time that a start of the sweep takes up a trial."""


@dataclass
class Numbers:
    """The numbers of one start of a sweep. A copy in another process, on another host too, gives
    the same."""

    sweep_dir: Path
    total: int
    """Of trials in this start; 0: unknown. New numbers come after those that Hydra gives."""
    start: str
    """Names this start."""
    entries: list[dict[str, Any]] = field(default_factory=list)
    """What this process alone knows, because the file could not be written."""

    def of(self, asked: int, words: list[str]) -> int:
        """The number of the trial with these words. asked: the one that Hydra gives it in this
        start.

        Words that come twice in one start are two trials.
        """
        own = {"asked": asked, "words": sorted(words), "start": self.start}
        try:
            with sweep_rows.locked(self.sweep_dir / FILE) as file:
                number = self._choose(own, sweep_rows.lines_of(file))
                sweep_rows.add_line(file, {"trial": number} | own)
        except OSError:  # the disk is full: the rows say so
            number = self._choose(own, sweep_rows.read_lines(self.sweep_dir / FILE))
            self.entries.append({"trial": number} | own)
        return number

    def _choose(self, own: dict[str, Any], entries: list[dict[str, Any]]) -> int:
        rows = {
            row["trial"]: row for row in sweep_rows.read(self.sweep_dir)
        }  # what an older version has left
        latest = rows | {entry["trial"]: entry for entry in [*entries, *self.entries]}
        for number, entry in latest.items():
            if (entry.get("start"), entry.get("asked")) == (self.start, own["asked"]):
                return number  # a job of SLURM that was put back into the queue
        same = [
            (entry.get("asked") != own["asked"], number)
            for number, entry in latest.items()
            if entry.get("words") == own["words"] and entry.get("start") != self.start
        ]
        if same:
            return min(same)[1]
        folders = [path for path in self.sweep_dir.glob("[0-9]*") if path.name.isdigit()]
        taken = {*latest, *(int(path.name) for path in folders if _is_used(path))}
        if own["asked"] not in taken:
            return own["asked"]
        return max(self.total, 1 + max(taken))


def _is_used(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(folder.iterdir())
    return False
