"""Numbers that code of the user's logs, in lines of metrics.jsonl: their names, and where they are.

Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ddp_train.errors import LogError
from ddp_train.telemetry.rates import SUFFIX
from ddp_train.text import NAME_IS_RESERVED

HOOK = "hook"
"""The kind of a line of metrics.jsonl that has what hooks logged after one step."""
OF_THE_LINE = ("kind", "step", "epoch", "time")
"""Fields that every line has."""
OF_TRAINING = ("loss", "lr", "lrs", "grad_norm", "samples_seen", "figures", "mfu")
"""Fields of a line of training that are not the user's."""
LONGEST_NAME = 100
MOST_NAMES = 500
"""Most names in a run. More of them have a step or a sample in their name."""
_PATTERN = re.compile(r"[\w.-][\w .-]*(/[\w.-][\w .-]*)*")
"""Names that all trackers take: MLflow allows no other sign."""


def check_name(call: str, name: object, taken: Iterable[str] = ()) -> None:
    """Raise LogError for a name that cannot be that of a number, an image, a text or a table.

    call: the function that was called, for the message.
    taken: names of numbers that the house logs.
    """
    found = f"{call}({name!r})"
    if not isinstance(name, str) or not _PATTERN.fullmatch(name):
        raise LogError(
            f"{found}: this name is not allowed",
            "use letters, digits, `_`, `-` and `.`, and a slash between a group and a name: vae/kl",
        )
    if len(name) > LONGEST_NAME:
        raise LogError(
            f"{found}: the name has {len(name)} characters",
            f"use at most {LONGEST_NAME} characters",
        )
    if name.endswith(SUFFIX):
        raise LogError(
            f"{found}: names ending in {SUFFIX} are reserved for the run's own speeds",
            f"use another ending: {name.removesuffix(SUFFIX)}_rate",
        )
    if name in (*OF_THE_LINE, *taken):
        raise LogError(f"{found}: {NAME_IS_RESERVED}", f"use another name: my/{name}")


def own_names(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of the user's numbers in some lines of training or of hooks."""
    names = dict.fromkeys(name for line in lines for name in line)
    not_own = (*OF_THE_LINE, *OF_TRAINING)
    return [name for name in names if name not in not_own and not name.endswith(SUFFIX)]
