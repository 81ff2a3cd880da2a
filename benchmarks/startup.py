"""How long from the command to the first training step: launch.py against a bare DDP script.

    python benchmarks/startup.py [--ranks 2] [--device cpu] [--trials 7] [--two]
                                 [--limit 0.85] [--output FILE]

Four commands train the same layers on the same digits, batch 96 over all processes, gloo on the CPU
or NCCL on GPUs:

    torchrun benchmarks/bare_ddp.py --data file       reads as ddp_train does: the fair yardstick
    torchrun benchmarks/bare_ddp.py --data sklearn    load_digits(), as people write it
    python launch.py                                  our own launcher
    torchrun launch.py                                the same run under torchrun

What is measured: wall time from just before the command is started, in a parent that has imported
nothing heavy, until the first optimizer step is done. The bare script prints the time itself, after
`optimizer.step()` on rank 0. launch.py runs with train.log_every_steps=1 and is not changed for the
measurement: its first step counts as done when the first line appears in metrics.jsonl, which is
looked for every 5 ms. That includes one reduction of the loss and the writing of the line, and up
to 5 ms of waiting: the comparison leans against launch.py, which also augments its images. All runs
go through to the end, a checkpoint and an evaluation in the case of launch.py, but only the first
step is timed.

Each round runs all commands once, in an order that changes from round to round; the first round
warms the page cache and is thrown away. torchrun gets a free --master_port so that two benchmarks
can run at once.

Exit code 1 if the median of `python launch.py` is more than --limit times that of the fair bare
script. Without --limit it is 0.85 for 2 processes and 0.6 for 4, on two cores: the fork server of
launch.py imports torch once for all, so that its part grows little with their number.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from page import conditions, load_average, publish

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = "torchrun"
LIMITS = {2: 0.85, 4: 0.6}
"""Largest allowed ratio to the fair bare script, by number of processes; others need --limit."""
POLL_SECONDS = 0.005
PATIENCE_SECONDS = 180.0


@dataclass
class Variant:
    """One of the commands that are compared. `words` makes its command line for a run directory."""

    name: str
    words: Callable[[Path], list[str]]
    prints_time: bool
    seconds: list[float] = field(default_factory=list)


def build_variants(ranks: int, device: str) -> list[Variant]:
    """The bare scripts first: everything is compared with the first."""

    def torchrun() -> list[str]:
        beside = Path(sys.executable).with_name(TORCHRUN)
        program = beside if beside.exists() else shutil.which(TORCHRUN)
        return [str(program), f"--nproc_per_node={ranks}", f"--master_port={free_port()}"]

    def bare(data: str) -> Callable[[Path], list[str]]:
        return lambda run_dir: [
            *torchrun(),
            "benchmarks/bare_ddp.py",
            "--data",
            data,
            "--device",
            device,
        ]

    def settings(run_dir: Path) -> list[str]:
        return [
            f"device={device}",
            "train.max_steps=1",
            "train.log_every_steps=1",
            f"run_dir={run_dir}",
        ]

    return [
        Variant("torchrun bare_ddp.py --data file", bare("file"), prints_time=True),
        Variant("torchrun bare_ddp.py --data sklearn", bare("sklearn"), prints_time=True),
        Variant(
            "python launch.py",
            lambda run_dir: [
                sys.executable,
                "launch.py",
                f"launch.nproc_per_node={ranks}",
                *settings(run_dir),
            ],
            prints_time=False,
        ),
        Variant(
            "torchrun launch.py",
            lambda run_dir: [*torchrun(), "launch.py", *settings(run_dir)],
            prints_time=False,
        ),
    ]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def time_to_first_step(variant: Variant, run_dir: Path) -> float:
    """Runs the command to its end; returns the seconds until its first step was done."""
    words = variant.words(run_dir)
    output = run_dir.with_suffix(".txt")
    metrics = run_dir / "metrics.jsonl"
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE")
    }
    done: float | None = None
    with output.open("w") as stream:
        began = time.time()
        process = subprocess.Popen(
            words, cwd=ROOT, env=env, stdout=stream, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            if not variant.prints_time and done is None and size_of(metrics) > 0:
                done = time.time()
            if time.time() - began > PATIENCE_SECONDS:
                process.terminate()
                process.wait()
                raise SystemExit(f"{variant.name}: not finished after {PATIENCE_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)
    text = output.read_text()
    has_begun = (
        variant.prints_time and "FIRST_STEP" in text
    )  # a bare script may abort as it ends: gloo's teardown
    if process.returncode != 0 and not has_begun:
        raise SystemExit(f"{variant.name}: exit code {process.returncode}\n{text[-2000:]}")
    if variant.prints_time:
        done = next(
            float(line.split()[1]) for line in text.splitlines() if line.startswith("FIRST_STEP")
        )
    if done is None:
        raise SystemExit(f"{variant.name}: no line in {metrics}\n{text[-2000:]}")
    return done - began


def size_of(path: Path) -> int:
    """The size of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def measure(variants: list[Variant], trials: int) -> None:
    """Fills in the seconds of every variant: one round to warm up, then `trials` rounds."""
    with tempfile.TemporaryDirectory(prefix="startup_") as folder:
        for number in range(trials + 1):
            start = number % len(variants)
            order = variants[start:] + variants[:start]
            for variant in order if number % 2 else reversed(order):
                seconds = time_to_first_step(
                    variant, Path(folder, f"{variants.index(variant)}_{number}")
                )
                label = f"round {number} of {trials}" if number else "warm-up"
                print(f"{label}: {variant.name}: {seconds:.2f} s", file=sys.stderr)
                if number:
                    variant.seconds.append(seconds)


def table(
    variants: list[Variant],
    ranks: int,
    device: str,
    trials: int,
    limit: float,
    ratio: float,
    load: str,
) -> list[str]:
    """The table in Markdown, with what one needs to measure it again."""
    fair = statistics.median(variants[0].seconds)
    where = "NCCL on GPUs" if device == "cuda" else "gloo on the CPU"
    lines = [
        "# From the command to the first training step",
        "",
        (
            f"{ranks} processes, {where}; the default cnn on the digits, "
            f"batch 96. Median of {trials} trials after one to warm up, interleaved."
        ),
        "",
        "| command | median [s] | min [s] | max [s] | of bare, file |",
        "|---|---:|---:|---:|---:|",
    ]
    for variant in variants:
        median = statistics.median(variant.seconds)
        low = min(variant.seconds)
        high = max(variant.seconds)
        lines.append(
            f"| `{variant.name}` | {median:.2f} | {low:.2f} | {high:.2f} | {median / fair:.2f} |"
        )
    return [
        *lines,
        "",
        (
            "`python launch.py` against the bare script that reads the digits in the same way:"
            f" {ratio:.2f}; the limit is {limit:g}."
        ),
        "",
        *conditions(
            f"startup.py --ranks {ranks} --device {device} --trials {trials}", load, ("hydra-core",)
        ),
        "- What is measured, and from when to when: the head of `benchmarks/startup.py`.",
    ]


def main() -> int:
    """Measures, prints, judges."""
    parser = argparse.ArgumentParser(
        description="Command to first training step: launch.py against bare DDP."
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--trials", type=int, default=7, help="timed runs of each command (default 7)"
    )
    parser.add_argument("--limit", type=float, help="largest allowed ratio to the fair bare script")
    parser.add_argument(
        "--two", action="store_true", help="only the two commands that the limit compares"
    )
    parser.add_argument("--output", type=Path, help="write the table to this file too")
    arguments = parser.parse_args()
    limit = arguments.limit or LIMITS.get(arguments.ranks)
    if not limit:
        parser.error(f"--ranks {arguments.ranks} has no limit of its own: give --limit")

    load = f"{load_average()} at the start"
    variants = build_variants(arguments.ranks, arguments.device)
    bare = variants[0]
    own = variants[2]
    if arguments.two:
        variants = [bare, own]
    measure(variants, arguments.trials)
    ratio = statistics.median(own.seconds) / statistics.median(bare.seconds)
    load += f", {load_average()} at the end (this benchmark alone makes it 2)"
    publish(
        table(variants, arguments.ranks, arguments.device, arguments.trials, limit, ratio, load),
        arguments.output,
    )
    if ratio > limit:
        print(f"FAILED: {ratio:.2f} is more than {limit:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
