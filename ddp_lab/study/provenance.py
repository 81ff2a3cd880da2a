"""Provenance of measurements: hardware, versions, other load, digest of the source. Does not import
torch."""

from __future__ import annotations

import datetime
import functools
import hashlib
import os
import platform
import sys

from ddp_train.config.program import Program
from ddp_train.distributed.environment import visible_devices
from ddp_train.hardware import detect_hardware, hardware_description, versions

RUN_INSIDE_TRIALS = ("study/step_times.py", "study/gradient_probe.py")
"""Modules of studies that run inside a trial, and so belong to its conditions."""


def load_average() -> float:
    """Mean number of runnable processes on this machine over the last minute."""
    return os.getloadavg()[0]


def load_at_start() -> float:
    """The load average before the first run. Prints a note if it is high."""
    load = load_average()
    if load >= max(1.0, (os.cpu_count() or 1) / 4):
        print(
            f"note: load average {load:.1f} at the start: other work on this machine makes times"
            " vary",
            file=sys.stderr,
        )
    return load


def provenance(load_before: float | None = None) -> dict[str, str]:
    """Hardware, load, versions and date, for a report. load_before: the load average when the work
    began."""
    known = {"Hardware": hardware_description(detect_hardware(visible_devices()))}
    if load_before is not None:
        known["Other work"] = (
            f"load average {load_before:.1f} at the start, {load_average():.1f} at the end"
        )
    known["Versions"] = ", ".join(f"{name} {version}" for name, version in versions().items())
    known["System"] = f"{platform.system()} {platform.release()}"
    known["Date"] = str(datetime.date.today())
    return known


@functools.cache
def conditions(program: Program) -> dict[str, str]:
    """The conditions that results depend on besides the overrides: runs under different ones cannot
    be compared."""
    return {
        "hardware": hardware_description(detect_hardware(visible_devices())),
        **versions(),
        "source": source_digest(program),
    }


def source_digest(program: Program) -> str:
    """A digest of the code and presets that determine a run, your own presets too.

    Of the laboratory only the hooks of runs are in it: the rest starts runs or reports on them.
    """
    package = program.presets.parent
    laboratory = package.with_name("ddp_lab")
    code = {*package.rglob("*.py"), *(laboratory / name for name in RUN_INSIDE_TRIALS)}
    settings = {
        path
        for folder in program.folders()
        for path in {*folder.rglob("*.yaml")} - {*folder.glob("study/*")}
    }
    digest = hashlib.sha256()
    for path in sorted(code | settings, key=program.shown):
        digest.update(program.shown(path).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
