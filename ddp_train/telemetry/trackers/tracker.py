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
    """A place outside of the run directory that receives what a run measures.

    Derive from this class and name yours: `tracker=[{_target_: my_package.MyTracker, key: 1}]`.
    docs/operate/tracking.md has an example. Its arguments must not hold secrets, since the config
    is written to files: `key: '${oc.env:NAME}'` is looked up when the object is made.

    Rank 0 alone makes the object, in its main thread before training begins, with the arguments
    beside `_target_`. All methods are then called from one thread that belongs to this tracker:
    `open`, `last_step` if the run was open before, `write` for each line of metrics.jsonl, `close`.
    Training waits for none of them. An exception of theirs never ends training: it is reported
    once, and the call is repeated with the next line.
    """

    package: ClassVar[str | None] = None
    """Python package that must be installed. Import it in `open`, not at the top of the module."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables of that package. Set before `open`, unless the user has set them."""
    left_by_runs: ClassVar[tuple[str, ...]] = ()
    """Files and folders of the run directory that are renamed before a new run begins there.
    Only for the trackers of ddp_train; in `open` of yours `run_id` is None then."""

    @abstractmethod
    def open(self, run: TrackedRun, run_id: str | None) -> str:
        """Start or continue the run in the tracker. Returns its id there.

        run: facts of the run.
        run_id: the id that an earlier process of this run was given; None at first.

        If that run is gone, start another and return its id: all lines are then sent again. After
        an exception `open` is called again with the next line.
        """

    def last_step(self) -> float:
        """Last step that the tracker has stored. Lines of later steps are sent again.

        Called after `open`, in a process that continues a run. By default nothing that was
        written is sent again.
        """
        return math.inf

    @abstractmethod
    def write(self, step: int, scalars: Scalars) -> None:
        """Store numbers.

        step: optimizer steps done when they were measured; never less than in the call before.
        scalars: finite numbers by their names.
        """

    def write_image(self, step: int, name: str, image: ndarray) -> None:
        """Store an image.

        step: optimizer steps done.
        image: uint8 [height, width, 3].

        Override this, `write_text` and `write_table` if the tracker can store them. Those that it
        cannot store are not sent to it, and one warning says so. A call that fails is not repeated.
        """
        raise NotImplementedError

    def write_text(self, step: int, name: str, text: str) -> None:
        """Store a text. step: optimizer steps done."""
        raise NotImplementedError

    def write_table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Store a table.

        step: optimizer steps done.
        rows: numbers and texts, as many in each as there are columns.
        """
        raise NotImplementedError

    @abstractmethod
    def close(self, status: str, summary: dict[str, Any]) -> None:
        """End the run, or its part until it was stopped.

        status: completed, preempted or failed.
        summary: the values of summary.json, flat; empty if there is none.
        """


def new_id() -> str:
    """A random id of a run, for trackers that give none."""
    return uuid.uuid4().hex[:ID_LETTERS]
