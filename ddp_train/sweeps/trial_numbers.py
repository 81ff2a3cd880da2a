"""The number of a trial, and with it its folder, through all starts of its sweep.

Hydra numbers the trials of each start anew. With another grid in the same directory number 2 is
another trial, which would resume in the folder of the first, or show its results.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_train.config.folders import SWEEP_TRIALS as FILE
from ddp_train.sweeps.line_file import add_line, locked
from ddp_train.sweeps.results import read_rows
from ddp_train.telemetry.json_files import read_objects


@dataclass
class TrialNumbers:
    """The numbers of one start of a sweep.

    A copy in another process, on another host too, gives the same ones.
    """

    sweep_dir: Path
    total: int
    """Trials in this start; 0: unknown. New numbers come after those that Hydra gives."""
    start: str
    """The name of this start."""
    unwritten: list[dict[str, Any]] = field(default_factory=list)
    """Entries for which the file had no room."""

    def number_of(self, asked: int, overrides: list[str]) -> int:
        """The number of the trial with these overrides. Overrides that come twice are two trials.

        asked: the number that Hydra gives it in this start.
        """
        entry = {"asked": asked, "words": sorted(overrides), "start": self.start}
        path = self.sweep_dir / FILE
        try:
            with locked(path) as file:
                number = self._choose(entry, read_objects(path))
                add_line(file, {"trial": number} | entry)
        except OSError:  # the disk is full, which the rows report
            number = self._choose(entry, read_objects(path))
            self.unwritten.append({"trial": number} | entry)
        return number

    def _choose(self, wanted: dict[str, Any], entries: list[dict[str, Any]]) -> int:
        """The number of a trial.

        wanted: the entry of the trial, without its number.
        entries: those of the file.
        """
        # A row tells the overrides of a trial whose entry found no room.
        latest = {row["trial"]: row for row in read_rows(self.sweep_dir)}
        latest |= {entry["trial"]: entry for entry in [*entries, *self.unwritten]}
        same_trials = []
        for number, entry in latest.items():
            is_same_number = entry.get("asked") == wanted["asked"]
            is_this_start = entry.get("start") == self.start
            if is_same_number and is_this_start:
                return number  # a job of SLURM that was requeued
            if entry.get("words") == wanted["words"] and not is_this_start:
                same_trials.append((not is_same_number, number))
        if same_trials:
            # The one for which Hydra asked by the same number, else the first.
            _, number = min(same_trials)
            return number
        folders = [path for path in self.sweep_dir.glob("[0-9]*") if path.name.isdigit()]
        used = {*latest, *(int(path.name) for path in folders if _has_content(path))}
        if wanted["asked"] not in used:
            return wanted["asked"]
        return max(self.total, 1 + max(used))


def _has_content(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(folder.iterdir())
    return False
