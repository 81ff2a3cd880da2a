"""The position of training in a stream that has a state of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from ddp_train.data.batch import Batch
from ddp_train.data.numbered_stream import NumberedStream
from ddp_train.data.stream_place import StreamPlace


class StreamPosition:
    """The batches of training, and the places of the stream behind those of the last two steps.

    Two: the last step that all processes have kept may be the one before that whose batch this one
    has. Each process knows a place of its own, up to a global batch ahead of the others; any of
    them is saved, since a resumed run reads from there up to its first sample.
    """

    def __init__(self, batches: Iterable[Batch], stream: NumberedStream) -> None:
        self.batches = batches
        self.stream = stream
        self.places: dict[int, StreamPlace] = {}
        """The place behind the last batch of each step."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            if batch.stream_place:
                self._note(batch.micro_batch.step, batch.stream_place)
            yield batch

    def _note(self, step: int, place: StreamPlace) -> None:
        self.places[step] = place
        for earlier in [known for known in self.places if known < step - 1]:
            del self.places[earlier]

    def state(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(place) for place in self.places.values()]

    def load_state(self, state: list[dict[str, Any]]) -> None:
        """Let the stream be read from these places. To be called before the first batch."""
        self.stream.known_places = [StreamPlace(**place) for place in state]
