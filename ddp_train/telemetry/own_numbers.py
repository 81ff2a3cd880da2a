"""Numbers that code of the user's logs, in lines of metrics.jsonl: their names, and where they are.

Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ddp_train.telemetry.rates import SUFFIX

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


def problem_of_name(name: object, taken: Iterable[str] = OF_TRAINING) -> str:
    """Why a number cannot have this name, then `; ` and a remedy; "" if it can.

    taken: names of numbers that the house logs.
    """
    if not isinstance(name, str) or not _PATTERN.fullmatch(name):
        return "it is no name; use letters, digits, `_`, `-` and `.`, a slash for groups: vae/kl"
    if len(name) > LONGEST_NAME:
        return f"the name has {len(name)} letters; use at most {LONGEST_NAME}"
    if name in (*OF_THE_LINE, *taken) or name.endswith(SUFFIX):
        return f"lines of metrics.jsonl have a {name} already; use another name: my/{name}"
    return ""


def own_names(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of the user's numbers in some lines of training or of hooks."""
    names: dict[str, None] = {}
    for line in lines:
        for name in line:
            if is_own(name):
                names[name] = None
    return list(names)


def is_own(name: str) -> bool:
    """Tell whether a field of a line of training or of hooks is a number of the user's."""
    return name not in OF_THE_LINE and name not in OF_TRAINING and not name.endswith(SUFFIX)
