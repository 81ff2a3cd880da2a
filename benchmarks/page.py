"""What every benchmark says of the machine that it ran on, and how its table is shown and kept."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

import torch


def load_average() -> str:
    """The mean number of processes that ran or wanted to, over the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def hardware() -> str:
    """GPUs, if there are any; cores, processor and memory."""
    info = Path("/proc/cpuinfo")
    model = platform.processor() or platform.machine()
    if info.exists():
        found = [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if "model name" in line
        ]
        model = found[0] if found else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    host = f"{os.cpu_count()} cores {model}, {int(memory)} GiB"
    gpus = torch.cuda.device_count()
    if gpus:
        return f"{gpus} x {torch.cuda.get_device_name(0)}; {host}"
    return host


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def conditions(
    command: str, load: str = "", packages: tuple[str, ...] = (), start: str = "python"
) -> list[str]:
    """The lines under a table that say where it comes from.

    load: the load average before and after, in words. packages: those whose versions matter, beside
    torch. start: what stands before the program.
    """
    versions = "".join(f", {name} {_version(name)}" for name in ("torch", *packages))
    return [
        f"- Hardware: {hardware()}",
        *([f"- Other work: load average {load}"] if load else []),
        f"- Versions: python {platform.python_version()}{versions}",
        f"- Date: {datetime.date.today()}",
        f"- Command: `{start} benchmarks/{command}`",
    ]


def publish(lines: list[str], output: Path | None) -> None:
    """Prints a page of Markdown, and writes it to a file if one is named."""
    text = "\n".join(lines)
    print(text)
    if output:
        output.write_text(text + "\n")
