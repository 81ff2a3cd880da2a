"""Overrides of a sweep: their keys, those of a trial, those that identify a sweep. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

OF_ALL_TRIALS = ("sweep.", "hydra.", "hydra/", "run_dir")
"""Beginnings of the keys that are about all trials."""


def key_of(override: str) -> str:
    """The key, without the `+` that adds it."""
    return override.lstrip("+").partition("=")[0]


def last_value(overrides: list[str], key: str) -> str:
    """The value that a key was given last; empty if it was not."""
    for override in reversed(overrides):
        if key_of(override) == key:
            return override.partition("=")[2]
    return ""


def parsed(override: str) -> Override:
    """An override as Hydra reads it. Raises HydraException."""
    return OverridesParser.create().parse_override(override)


def is_of_hydra(override: str) -> bool:
    return f"{key_of(override)}.".startswith(("hydra.", "hydra/"))


def trial_overrides(overrides: Iterable[object]) -> list[str]:
    """The overrides that a trial would have as a run by itself."""
    texts = [str(override) for override in overrides]
    return [text for text in texts if not key_of(text).startswith(OF_ALL_TRIALS)]


def identifying(overrides: Iterable[object], swept: Collection[str]) -> frozenset[str]:
    """The overrides that distinguish one sweep from another, as Hydra writes them.

    They are those that are not swept. How the trials run makes no other sweep.
    """
    identity = set()
    for text in trial_overrides(overrides):
        override = parsed(text)
        key = key_of(override.get_key_element())
        if key not in swept and not key.startswith("launch."):
            identity.add(f"{key}={override.get_value_element_as_str()}")
    return frozenset(identity)
