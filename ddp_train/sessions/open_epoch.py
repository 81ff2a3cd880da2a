"""An epoch of the user's loop that has begun."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class OpenEpoch:
    """An epoch between its begin in `run.epochs` and the next one's."""

    first_batch: int
    """Batches of it that were done before it began here: it was resumed."""
    is_complete: bool = False
    """The loader that began the last step has no more batches."""
