"""What a step of GPT-2 124M loses from one GPU to all of a host, and to what.

    python benchmarks/gpt2_scaling.py [--batch 64] [--steps 100] [--output PAGE.md] [override ...]

launch.py tuning=max as in benchmarks/gpt2.py: on the first GPU alone; on all at the same time, each
by itself; and on all with DistributedDataParallel, which waits for the slowest. Beside the speed
what nvidia-smi reports twice a second (the median while a GPU is busy), and the milliseconds of a
step by kind of kernel, from five steps that torch's profiler traced. In DDP the kernels of an
exchange wait for the other GPUs too: the shortest of all ranks is the exchange itself.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from gpt2 import WARM_UP_STEPS, corpus_in, ours
from page import conditions, load_average, publish

KINDS = {
    "exchange": r"nccl",
    "gradients into buckets": r"AUnaryFunctor<float.*binary",
    "attention": r"flash|fmha|sdpa|cudnn::fusion",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas",
    "our loss": r"^_(forward|backward)$",
    "the compiler's": r"^triton_",
    "copies and zeros": r"memcpy|memset|copy|fill",
    "optimizer, norm of gradients": r"multi_tensor|lpnorm",
}
"""The first that matches a kernel's name, in any case; what matches none is "others"."""
OTHERS = "others"
GAPS = "nothing runs"
TRACED_STEPS = 5
LOG_EVERY = 10
"""Steps, of launch.py."""
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events."""
BUSY = 90
"""Percent of the time, by nvidia-smi, at which a sample counts."""
READ = "index,power.draw,clocks.sm,utilization.gpu"


def kind_of(kernel: str) -> str:
    return next(
        (kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)),
        OTHERS,
    )


def kinds_in(events: list[dict[str, Any]], steps: int) -> dict[str, float]:
    """Milliseconds of a step by kind of kernel.

    Two kernels at the same time count twice; GAPS is the time between the first kernel and the last
    that no kernel covers. DDP divides a gradient while it writes it into its bucket.
    """
    ran = [event for event in events if event.get("cat") in ON_GPU]
    if not ran:
        raise ValueError("the trace has no kernel: was it made on a GPU?")
    found: dict[str, float] = defaultdict(float)
    covered = gaps = 0.0
    for event in sorted(ran, key=lambda event: event["ts"]):
        found[kind_of(event["name"])] += event["dur"] / 1e3 / steps
        gaps += max(0.0, event["ts"] - covered) if covered else 0.0
        covered = max(covered, event["ts"] + event["dur"])
    return {**found, GAPS: gaps / 1e3 / steps}


def longest(events: list[dict[str, Any]], steps: int, rows: int = 40) -> list[str]:
    """Milliseconds and launches of a step, and the kernel's name."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ON_GPU:
            by_name[event["name"]].append(event["dur"] / 1e3)
    first = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:rows]
    return [
        f"{sum(times) / steps:8.3f} {len(times) / steps:6.1f} {name[:120]}" for name, times in first
    ]


@contextlib.contextmanager
def watched() -> Iterator[dict[int, list[tuple[float, float]]]]:
    """Inside, read watts and megahertz of each busy GPU. Yields them by its index, filled at the
    end."""
    command = ["nvidia-smi", f"--query-gpu={READ}", "--format=csv,noheader,nounits", "-lms", "500"]
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(command, stdout=said) as reader:
        try:
            yield found
        finally:
            reader.terminate()
            reader.wait()
            said.seek(0)
            for line in said:
                with contextlib.suppress(ValueError):  # the last line may be cut off
                    index, watts, megahertz, busy = map(float, line.split(","))
                    if busy >= BUSY:
                        found[int(index)].append((watts, megahertz))


def middle(samples: list[tuple[float, float]]) -> str:
    if not samples:
        return "- | -"
    watts, megahertz = (statistics.median(values) for values in zip(*samples, strict=True))
    return f"{watts:.0f} | {megahertz:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="of one more run on all GPUs")
    parser.add_argument("--batch", type=int, default=64, help="windows on each process")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    count = torch.cuda.device_count()
    if count < 2:
        sys.exit(f"torch.cuda.device_count() is {count}: this compares one GPU with several")
    if arguments.steps % LOG_EVERY or arguments.steps < 2 * LOG_EVERY:
        sys.exit(
            f"--steps {arguments.steps}: use a multiple of {LOG_EVERY}, at least {2 * LOG_EVERY}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if re.search(r"[^\d,]", visible):
        sys.exit(
            f"CUDA_VISIBLE_DEVICES={visible}: use indices, by which nvidia-smi's watts and clocks"
            " are found"
        )
    everyone = [int(gpu) for gpu in visible.split(",") if gpu] or [*range(count)]
    last = WARM_UP_STEPS + arguments.steps - 1
    # in an interval of its own: the median drops it
    profiled = f"train.profile_steps={last - TRACED_STEPS + 1}:{last}"
    load = f"{load_average()} at the start"
    rows = []
    kinds: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="gpt2_scaling_") as folder:
        corpus = corpus_in(Path(folder), count)

        def run(name: str, gpus: list[int], *overrides: str) -> float:
            run_dir = Path(folder, re.sub(r"\W+", "_", name))
            chosen = ("tuning=max", profiled, *overrides)
            visible = ",".join(map(str, gpus))
            found = ours(
                corpus, arguments.batch, arguments.steps, len(gpus), run_dir, *chosen, gpus=visible
            )
            for rank in range(len(gpus)):
                with gzip.open(run_dir / "profile" / f"rank_{rank}.json.gz", "rt") as file:
                    events = json.load(file)["traceEvents"]
                key = f"{name}, rank {rank}" if len(gpus) > 1 else name
                kinds[key] = kinds_in(events, TRACED_STEPS)
                print(key, *longest(events, TRACED_STEPS), sep="\n", file=sys.stderr, flush=True)
            return found["tokens_per_second"]

        def row(name: str, speed: float, gpus: int, samples: list[tuple[float, float]]) -> None:
            milliseconds = arguments.batch * 1024 * gpus / speed * 1e3
            rows.append(f"| {name} | {speed:,.0f} | {milliseconds:.2f} | {middle(samples)} |")
            print(rows[-1], file=sys.stderr, flush=True)

        first = everyone[0]
        with watched() as samples:
            speed = run(f"GPU {first} alone", [first])
        row(f"GPU {first} alone", speed, 1, samples[first])
        names = [f"GPU {gpu}, all at once" for gpu in everyone]
        with watched() as samples, ThreadPoolExecutor(count) as threads:
            speeds = list(threads.map(run, names, [[gpu] for gpu in everyone]))
        for name, speed, gpu in zip(names, speeds, everyone, strict=True):
            row(name, speed, 1, samples[gpu])
        for overrides in ([], arguments.overrides)[: 1 + bool(arguments.overrides)]:
            name = " ".join(["DDP", *overrides])
            with watched() as samples:
                speed = run(name, everyone, *overrides)
            row(name, speed, count, [])
            rows += [f"| of it GPU {gpu} | | | {middle(samples[gpu])} |" for gpu in everyone]
    order = [*KINDS, OTHERS, GAPS]
    table = [
        f"| {name} | " + " | ".join(f"{kinds[name].get(kind, 0):.2f}" for kind in order) + " |"
        for name in kinds
    ]
    publish(
        [
            f"# GPT-2 124M from one GPU to {count}",
            "",
            "What is measured stands in the head of `benchmarks/gpt2_scaling.py`. One run each.",
            "",
            "| | tokens/s | ms a step | W | MHz |",
            "|---|---:|---:|---:|---:|",
            *rows,
            "",
            f"| ms of a step | {' | '.join(order)} |",
            f"|---|{'---:|' * len(order)}",
            *table,
            "",
            *conditions(
                f"gpt2_scaling.py --batch {arguments.batch} --steps {arguments.steps}"
                f" {' '.join(arguments.overrides)}",
                f"{load}, {load_average()} at the end",
            ),
        ],
        arguments.output,
    )


if __name__ == "__main__":
    main()
