"""The methods by which code of the user's sends images, texts and tables to trackers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ddp_train.telemetry.trackers.media import Media


class MediaCalls(ABC):
    """`log_image`, `log_text` and `log_table`, of a run in a session and of a hook's job."""

    @abstractmethod
    def _media_of(self, method: str) -> tuple[Media, int]:
        """The collector for what a method is given, and the step that it belongs to."""

    def log_image(self, name: str, image: Any) -> None:
        """Send an image to the trackers. It waits for the device. Only rank 0's image is used.

        name: name of the image; slashes make groups.
        image: a tensor or an array, [1 or 3, height, width], [height, width] or [height, width, 3];
            uint8, or floats from 0 to 1.

        Raises LogError for another shape.
        """
        media, step = self._media_of("log_image")
        media.image(step, name, image)

    def log_text(self, name: str, text: str) -> None:
        """Send a text to the trackers. Only rank 0's text is used.

        name: name of the text; slashes make groups.
        text: a str.
        """
        media, step = self._media_of("log_text")
        media.text(step, name, text)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Send a table to the trackers. Only rank 0's table is used.

        name: name of the table; slashes make groups.
        columns: names of the columns.
        rows: lists of numbers and texts, each as long as `columns`.

        Raises LogError for a row of another length.
        """
        media, step = self._media_of("log_table")
        media.table(step, name, columns, rows)
