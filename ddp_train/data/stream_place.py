"""A place in a stream of samples that has a state of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StreamPlace:
    """A place behind a sample, from which the stream goes on by its own `load_state_dict`."""

    epoch: int
    passes: int
    """Passes that have ended before, where one follows the other."""
    number: int
    """The number of the sample before the place."""
    state: str
    """The stream's `state_dict()` there, as JSON."""
