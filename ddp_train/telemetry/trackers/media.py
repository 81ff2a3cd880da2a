"""Images, texts and tables that code of the user's sends to trackers, from rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ddp_train.errors import LogError
from ddp_train.telemetry.own_numbers import check_name
from ddp_train.telemetry.trackers.tracker import Tracker
from ddp_train.telemetry.trackers.tracking import Tracking

if TYPE_CHECKING:
    from numpy import ndarray

log = logging.getLogger(__name__)


class Media:
    """The way of images, texts and tables to the trackers. Inactive on all ranks but one."""

    def __init__(self, is_held: bool = False) -> None:
        """is_held: send nothing before `release`: lines of earlier steps are still to come."""
        self.is_held = is_held
        self.held: list[Callable[[], None]] = []
        self.tracking: Tracking | None = None
        """Set on rank 0, once the trackers are there."""
        self.warnings: set[str] = set()
        """Warnings that were logged, each once."""

    def image(self, step: int, name: str, image: Any) -> None:
        """Send an image; see `pixels_of`."""
        if self._goes_somewhere("log_image", name):
            self._send("write_image", step, name, pixels_of(name, image))

    def text(self, step: int, name: str, text: str) -> None:
        if self._goes_somewhere("log_text", name):
            self._send("write_text", step, name, str(text))

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        """Send a table. Raises LogError if a row has another length than `columns`."""
        if not self._goes_somewhere("log_table", name):
            return
        for row in rows:
            if len(row) != len(columns):
                raise LogError(
                    f"log_table({name!r}): a row has {len(row)} cells, but there are"
                    f" {len(columns)} columns",
                    "give each row one cell for each column",
                )
        self._send("write_table", step, name, list(columns), [list(row) for row in rows])

    def _goes_somewhere(self, call: str, name: str) -> bool:
        """Tell whether there are trackers here. Raises LogError for a name that cannot be."""
        check_name(call, name)
        if self.tracking is None:
            return False
        if not self.tracking.threads:
            self._warn_once(
                "images, texts and tables are not written, since the run has no tracker; add"
                " tracker=tensorboard, or in a session trackers=['tensorboard']"
            )
        return bool(self.tracking.threads)

    def _send(self, method: str, step: int, name: str, *content: Any) -> None:
        assert self.tracking
        for thread in self.tracking.threads:
            if getattr(type(thread.tracker), method) is getattr(Tracker, method):
                kind = method.removeprefix("write_")
                self._warn_once(f"tracker {thread.name} gets no {kind}: it has no method {method}")
                continue
            show = partial(getattr(thread.tracker, method), step, name, *content)
            if self.is_held:
                self.held.append(partial(thread.show, show))
            else:
                thread.show(show)

    def _warn_once(self, warning: str) -> None:
        if warning not in self.warnings:
            self.warnings.add(warning)
            log.warning("%s", warning)

    def release(self) -> None:
        """Send what was held."""
        for send in self.held:
            send()
        self.held.clear()


def pixels_of(name: str, image: Any) -> ndarray:
    """An image as uint8 [height, width, 3]. Waits for the device.

    image: a tensor or an array, [1 or 3, height, width], [height, width] or [height, width, 3]; of
        bytes, or of numbers from 0 to 1.

    Raises LogError for another shape.
    """
    import numpy as np

    if hasattr(image, "detach"):
        image = image.detach().cpu()
        image = (image.float() if image.is_floating_point() else image).numpy()
    pixels = np.asarray(image)
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        raise LogError(
            f"log_image({name!r}): the image has the shape {list(np.shape(image))}",
            "pass [3, height, width], [1, height, width] or [height, width]; join several images"
            " by torchvision.utils.make_grid",
        )
    if pixels.dtype.kind in "fb":
        pixels = np.nan_to_num(pixels).clip(0, 1) * 255 + 0.5
    return np.repeat(pixels.astype(np.uint8), 3 // pixels.shape[2], axis=2)
