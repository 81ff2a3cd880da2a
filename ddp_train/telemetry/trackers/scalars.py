"""Lines of metrics.jsonl and nested values as what trackers store: names and plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ddp_train.telemetry.figures import RULES, combined
from ddp_train.telemetry.trackers.tracker import Scalars
from ddp_train.text import dotted, shown

NOT_SCALARS = ("kind", "step", "time", "figures")


def scalars_of(line: Mapping[str, Any]) -> Scalars:
    """Finite numbers of a line of metrics.jsonl: `train/loss`, `figures/gpu_utilisation`.

    Figures of the hardware, one for each process or GPU, are combined to one number.
    """
    values = {
        f"{line['kind']}/{name}": value for name, value in line.items() if name not in NOT_SCALARS
    }
    for name, of_ranks in line.get("figures", {}).items():
        values[f"figures/{name}"] = combined(RULES[name], of_ranks)
    return {name: float(value) for name, value in values.items() if is_finite_number(value)}


def is_finite_number(value: object) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) and math.isfinite(value)


def plain_values(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Nested values by dotted names; all but numbers and texts as one would type them."""
    plain = {}
    for name, value in dotted(values).items():
        if isinstance(value, bool | int | float | str):
            plain[name] = value
        elif value != {}:
            plain[name] = shown(value)
    return plain
