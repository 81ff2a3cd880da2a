"""The protocol of a tracker. Torch-free."""

from __future__ import annotations

import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from numpy import ndarray

Scalars = dict[str, float]
"""Numbers by their names: `train/loss`, `test/accuracy`, `figures/cpu_cores`."""
ID_LETTERS = 12


@dataclass(frozen=True)
class TrackedRun:
    """Facts of a run that a tracker is opened with."""

    run_dir: Path
    name: str
    project: str
    hyperparameters: dict[str, bool | int | float | str]
    """The frozen config, flat: `optimizer.lr`."""
    first_step: int
    """Optimizer steps that are done; not 0 in a resumed run."""


class Tracker(ABC):
    """A base class for trackers, which receive the metrics of a run: a server, a database.

    Derive from it and name your class: `tracker=[{_target_: my_package.MyTracker, key: 1}]`.
    docs/operate/tracking.md has an example. The keys beside `_target_` are the arguments of your
    class. Do not write secrets there, because the config is written to files: write
    `key: '${oc.env:NAME}'`, which is read when the object is made.

    In a run by config only rank 0 makes the object, in its main thread before training begins. A
    thread of its own then calls the tracker's methods in this order: `open`; `last_step` if an
    earlier process had opened this run; `write` for each line of metrics.jsonl; `close`. Training
    never waits for these methods. If one raises an exception, training continues: the exception is
    reported once, and the call is repeated with the next line.
    """

    package: ClassVar[str | None] = None
    """The Python package that the tracker needs; None for none. If it is not installed, a run is
    refused before it starts. Import it in `open`, not at the top of the module."""
    environment: ClassVar[Mapping[str, str]] = {}
    """{variable: value} to set in the environment before `open`, unless it is set already."""
    left_by_runs: ClassVar[tuple[str, ...]] = ()
    """Files and folders in the run directory that are renamed before a new run begins there. Only
    for built-in trackers; a tracker of yours knows a new run by `run_id=None` in `open`."""

    @abstractmethod
    def open(self, run: TrackedRun, run_id: str | None) -> str:
        """Start the run in the tracker, or continue it.

        run: facts of the run: `run_dir`, `name`, `project`, `hyperparameters` (the config as a flat
            dict), `first_step` (optimizer steps already done, above 0 in a resumed run).
        run_id: the id that `open` returned in an earlier process of this run; None for a new run.

        Returns the id of the run in the tracker. If the run of `run_id` no longer exists, start
        another and return its id: all lines are then sent again. After an exception, `open` is
        called again when the next line comes.
        """

    def last_step(self) -> float:
        """Return the last step that the tracker has stored.

        It is called after `open` in a process that continues a run, and lines of later steps are
        then sent again. By default none is.
        """
        return math.inf

    @abstractmethod
    def write(self, step: int, scalars: Scalars) -> None:
        """Store the numbers of one line of metrics.jsonl.

        step: number of optimizer steps done when the numbers were measured; it never decreases.
        scalars: {name: finite number}, with names such as `train/loss`.
        """

    def write_image(self, step: int, name: str, image: ndarray) -> None:
        """Store an image. Optional: a tracker without this method gets no images, with one warning.

        The same is true of `write_text` and `write_table`. A call that fails is not repeated.

        step: number of optimizer steps done.
        name: as in `log_image`.
        image: numpy array, uint8 [height, width, 3].
        """
        raise NotImplementedError

    def write_text(self, step: int, name: str, text: str) -> None:
        """Store a text. Optional, as `write_image` is.

        step: number of optimizer steps done.
        name: as in `log_text`.
        text: a str.
        """
        raise NotImplementedError

    def write_table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Store a table. Optional, as `write_image` is.

        step: number of optimizer steps done.
        name: as in `log_table`.
        columns: names of the columns.
        rows: lists of numbers and texts, each as long as `columns`.
        """
        raise NotImplementedError

    @abstractmethod
    def close(self, status: str, summary: dict[str, Any]) -> None:
        """End the run in the tracker. Called once, when the processes of the run end.

        status: completed; failed; or preempted: stopped, and may be resumed.
        summary: the values of summary.json as a flat dict; empty if there are none.
        """


def new_id() -> str:
    """A random id of a run, for trackers that give none."""
    return uuid.uuid4().hex[:ID_LETTERS]
