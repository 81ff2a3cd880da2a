"""A rank that an attempt has lost. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Loss:
    """A rank that was lost, by its death, a hang or an error of its own, for the attempt that
    follows."""

    rank: int
    step: int
    """The last step that all ranks had completed."""
    at: float
    """When, by `time.monotonic`, which all processes of a host share."""
    kind: str = "died"
    """The kind of the failure."""
    before: tuple[Loss, ...] = ()
    """Earlier losses that no checkpoint knows of: the attempt that followed each of them left
    none."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def after(self, earlier: Loss | None) -> Loss:
        """This loss in an attempt that followed an earlier one and has left no checkpoint."""
        if earlier is None:
            return self
        return replace(self, before=(*earlier.before, replace(earlier, before=())))
