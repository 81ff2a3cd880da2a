"""How fast a run is: samples, tokens or pixels, and operations per second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Rates:
    """What the speeds of a run are derived from; see `performance.flops`."""

    unit: str | None = None
    """What the loss is a mean of, where that is not the samples: token, pixel."""
    flops_per_sample: float | None = None
    """Operations of a forward and a backward pass; None: not counted."""
    peak_flops: float | None = None
    """Of all GPUs of the run, per second; None: unknown."""

    def of(self, samples: float, units: float, seconds: float) -> dict[str, float]:
        """The speeds in which so many samples and units were computed: samples_per_second,
        tokens_per_second, flops_per_second, mfu (model-FLOP utilisation, from 0 to 1), those that
        are known."""
        if not seconds:
            return {}
        found = {"samples_per_second": samples / seconds}
        if self.unit:
            found[f"{self.unit}s_per_second"] = units / seconds
        if self.flops_per_sample:
            found["flops_per_second"] = self.flops_per_sample * samples / seconds
            if self.peak_flops:
                found["mfu"] = found["flops_per_second"] / self.peak_flops
        return found


def in_words(rates: dict[str, Any]) -> str:
    """`58 samples/s  7,424 tokens/s  16.6 GFLOP/s  MFU 47.4%`: the speeds among some numbers."""
    parts = [
        f"{value:,.0f} {name.removesuffix('_per_second')}/s"
        for name, value in rates.items()
        if name.endswith("_per_second") and name != "flops_per_second" and value is not None
    ]
    parts += (
        [f"{shown_flops(rates['flops_per_second'])}/s"] if rates.get("flops_per_second") else []
    )
    parts += [f"MFU {rates['mfu']:.1%}"] if rates.get("mfu") else []
    return "  ".join(parts)


def shown_flops(flops: float) -> str:
    """`16.6 GFLOP`."""
    scale, prefix = next(
        ((scale, prefix) for scale, prefix in PREFIXES if flops >= scale), (1.0, "")
    )
    return f"{flops / scale:.3g} {prefix}FLOP"
