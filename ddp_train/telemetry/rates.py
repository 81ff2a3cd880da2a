"""Speeds of a run: samples, tokens or pixels, and operations per second. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
SUFFIX = "_per_second"


@dataclass(frozen=True)
class Rates:
    """Constants of a run from which its speeds are derived; see `performance.flops`."""

    unit: str | None = None
    """Unit that the loss is a mean over, where that is not the sample: token, pixel."""
    flops_per_sample: float | None = None
    """Operations of a forward and a backward pass; None: not counted."""
    peak_flops: float | None = None
    """Most operations per second of all GPUs of the run together; None: unknown."""

    def of(self, samples: float, units: float, seconds: float) -> dict[str, float]:
        """Speeds over some seconds, as far as they are known.

        The keys: samples_per_second, tokens_per_second, flops_per_second, and mfu, the model-FLOP
        utilisation from 0 to 1.
        """
        if not seconds:
            return {}
        speeds = {"samples_per_second": samples / seconds}
        if self.unit:
            speeds[f"{self.unit}s_per_second"] = units / seconds
        if self.flops_per_sample:
            speeds["flops_per_second"] = self.flops_per_sample * samples / seconds
            if self.peak_flops:
                speeds["mfu"] = speeds["flops_per_second"] / self.peak_flops
        return speeds


def in_words(values: Mapping[str, Any]) -> str:
    """The speeds among some numbers: `58 samples/s  7,424 tokens/s  16.6 GFLOP/s  MFU 47.4%`."""
    parts = []
    for name, value in values.items():
        if name.endswith(SUFFIX) and name != "flops_per_second" and value is not None:
            parts.append(f"{value:,.0f} {name.removesuffix(SUFFIX)}/s")
    if values.get("flops_per_second"):
        parts.append(f"{shown_flops(values['flops_per_second'])}/s")
    if values.get("mfu"):
        parts.append(f"MFU {values['mfu']:.1%}")
    return "  ".join(parts)


def shown_flops(flops: float) -> str:
    """`16.6 GFLOP`."""
    for scale, prefix in PREFIXES:
        if flops >= scale:
            return f"{flops / scale:.3g} {prefix}FLOP"
    return f"{flops:.3g} FLOP"
