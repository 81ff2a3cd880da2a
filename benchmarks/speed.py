"""launch.py against plain PyTorch, Lightning and Accelerate on the same work, in one go.

    python benchmarks/speed.py resnet50 [--processes 1] [--rounds 1] [--only NAME ...]
                                        [--output PAGE.md]
    python benchmarks/speed.py mnist --data data [...]

Each contender is run as a fresh command, in rounds whose order alternates; a peer that is not
installed, or fails, keeps its row with the reason. What the peers do is in benchmarks/peers.py.

resnet50   training steps of ResNet-50 at 224 x 224, batch 256 a process (another number where a row
           says so). launch.py keeps uint8 images on the device, and shuffles and normalises them
           for every step; the peers read ready batches. Images per second over all processes: for
           launch.py the median logging interval of 25 steps after the first four, for the peers
           100 steps after 30.
mnist      one epoch of batch 64 (over all processes) with its test, LeNet-5 unless a row says
           otherwise. Seconds: the median epoch but the first, which stands beside it. Accuracy:
           after the last epoch, and after the first.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from page import conditions, load_average, publish

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 240
EPOCHS = 5


@dataclass
class Contender:
    """One way to train.

    command: makes its command line for a run directory.
    read: its numbers from that directory or its output.
    """

    name: str
    command: Callable[[Path], list[str]]
    read: Callable[[Path, str], dict[str, float]]
    results: list[dict[str, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failure: str = ""


def ours(
    name: str, processes: int, read: Callable[[Path, str], dict[str, float]], *words: str
) -> Contender:
    """launch.py with these words."""
    return Contender(
        f"launch.py {name}".strip(),
        lambda run_dir: [
            sys.executable,
            "launch.py",
            f"run_dir={run_dir}",
            "strategy=ddp",
            f"launch.nproc_per_node={processes}",
            "checkpoint.every_steps=1000000000",
            *words,
        ],
        read,
    )


def peer(name: str, work: str, processes: int, *words: str) -> Contender:
    """A function of benchmarks/peers.py."""
    many = 1 if name == "DataParallel" else processes
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={many}",
    ]
    shown = name + (f", {words[-1]}".replace("_", " ") if "--network" in words else "")
    return Contender(
        shown,
        lambda _: [*launcher, "benchmarks/peers.py", name, work, *words],
        lambda _, text: said(text),
    )


def said(text: str) -> dict[str, float]:
    """The numbers that a peer printed."""
    result = json.loads(
        next(line for line in text.splitlines() if line.startswith("RESULT ")).removeprefix(
            "RESULT "
        )
    )
    if "samples_per_second" in result:
        return {"speed": result["samples_per_second"]}
    return of_epochs(**result)


def of_epochs(
    epoch_seconds: list[float], accuracy: float, first_accuracy: float = float("nan")
) -> dict[str, float]:
    return {
        "epoch": statistics.median(epoch_seconds[1:] or [math.nan]),
        "first epoch": epoch_seconds[0],
        "accuracy": accuracy,
        "accuracy after one": first_accuracy,
    }


def read_speed(run_dir: Path, _: str) -> dict[str, float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {
        "speed": statistics.median(
            [line["samples_per_second"] for line in lines if line["kind"] == "train"][4:]
        )
    }


def read_epochs(run_dir: Path, _: str) -> dict[str, float]:
    summary = json.loads((run_dir / "summary.json").read_text())
    tests = [
        json.loads(line)
        for line in (run_dir / "metrics.jsonl").read_text().splitlines()
        if '"test"' in line
    ]
    return of_epochs(summary["epoch_seconds"], summary["test"]["accuracy"], tests[0]["accuracy"])


def contenders(arguments: argparse.Namespace) -> list[Contender]:
    if arguments.work == "mnist":
        return mnist_contenders(arguments)
    return resnet_contenders(arguments)


def common_words(device: str) -> list[str]:
    """Words of every run of launch.py."""
    threads = "auto" if device == "cpu" else 4
    return [f"device={device}", f"launch.threads_per_process={threads}"]


LENET = ("model._target_=benchmarks.peers.lenet", "trusted_modules=[benchmarks]")
ONE_CONVOLUTION = (
    *LENET,
    "model._target_=benchmarks.peers.one_convolution",
    "tuning=max",
    "tuning.precision=fp32",
    "strategy=single",
)
MNIST_RUNS = {
    "max": (*LENET, "tuning=max"),
    "max, strategy=single": (*LENET, "tuning=max", "strategy=single"),
    "max, fp32 (tf32), single": (
        *LENET,
        "tuning=max",
        "tuning.precision=fp32",
        "strategy=single",
    ),
    "none": (*LENET, "tuning=none", "train.epochs=3"),
    "its own cnn": ("model=cnn", "model.channels=16", "model.norm=none"),
    "max, fp32 (tf32), single, one convolution": ONE_CONVOLUTION,
    "the same, one epoch, one_cycle": (
        *ONE_CONVOLUTION,
        "train.epochs=1",
        "schedule=one_cycle",
    ),
}
"""Words of the runs of launch.py on MNIST, by the name of the row."""


def mnist_contenders(arguments: argparse.Namespace) -> list[Contender]:
    device = arguments.device
    processes = arguments.processes
    words = [
        *common_words(device),
        "data=mnist",
        f"data.root={arguments.data}",
        "train.global_batch_size=64",
        f"train.epochs={EPOCHS}",
        "train.evaluate_batch_size=1000",
        "train.log_every_steps=1000",
        "optimizer=adamw",
        "optimizer.lr=3e-3",
        "schedule=constant",
    ]
    of_peers = ["--device", device, "--data", arguments.data, "--epochs", "3"]
    if arguments.limit:
        words.append(f"data.limit={arguments.limit}")
        of_peers += ["--limit", str(arguments.limit)]
    graph = ["tuning.cuda_graph=true"] if device == "cuda" else []
    runs = {"recommended, cuda_graph": (*LENET, *graph), **MNIST_RUNS}
    on_device = "plain DDP, images on the device"
    return [
        *(ours(name, processes, read_epochs, *words, *more) for name, more in runs.items()),
        peer("plain DDP, DataLoader", "mnist", processes, *of_peers),
        peer("plain DDP, DataLoader tuned", "mnist", processes, *of_peers),
        peer(on_device, "mnist", processes, *of_peers),
        peer(on_device, "mnist", processes, *of_peers, "--network", "one_convolution"),
    ]


BROADCAST = "strategy.broadcast_buffers=false"
MAX_FP16 = ("tuning=max", "tuning.precision=fp16", BROADCAST)
RESNET_RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "eager": (1, ("tuning.compile=false",)),
    "recommended": (1, ("tuning.compile=true", BROADCAST)),
    "tuning=max": (1, ("tuning=max", BROADCAST)),
    "tuning=max, fp16, batch 512": (2, MAX_FP16),
    "tuning=max, fp16, batch 1024": (4, MAX_FP16),
    "tuning=max, fp16, batch 1024, torch's own kernels": (
        4,
        (*MAX_FP16, "tuning.triton_kernels=false"),
    ),
    "tuning=max, fp16, batch 1024, conv_sums": (4, (*MAX_FP16, "tuning.conv_sums=true")),
}
"""Runs of launch.py with ResNet-50, by the name of the row: the factor of the batch, and words."""
RESNET_PEERS = (
    "plain DDP",
    "plain DDP, compiled",
    "DataParallel",
    "Accelerate",
    "Lightning Fabric",
    "Lightning Trainer",
)


def resnet_contenders(arguments: argparse.Namespace) -> list[Contender]:
    processes = arguments.processes
    words = [
        *common_words(arguments.device),
        "model=resnet50",
        "data=synthetic",
        f"data.image_size={arguments.side}",
        f"data.samples={16 * arguments.batch * processes}",
        "data.classes=1000",
        f"train.max_steps={arguments.steps + 100}",
        "train.epochs=1000",
        "train.log_every_steps=25",
        "train.evaluate_every_epochs=1000",
        "optimizer.weight_decay=5e-5",
    ]
    found = []
    for name, (factor, more) in RESNET_RUNS.items():
        batch = factor * arguments.batch
        sizes = (
            f"data.test_samples={batch}",
            f"train.global_batch_size={batch * processes}",
            f"train.evaluate_batch_size={batch}",
        )
        found.append(ours(name, processes, read_speed, *words, *sizes, *more))
    of_peers = [f"--{name}={getattr(arguments, name)}" for name in ("device", "batch", "steps")]
    of_peers.append(f"--side={arguments.side}")
    return found + [peer(name, "images", processes, *of_peers) for name in RESNET_PEERS]


def run(contender: Contender, folder: Path) -> None:
    """Run a contender once. A failure is kept."""
    folder.mkdir()
    began = time.perf_counter()
    try:
        done = subprocess.run(
            contender.command(folder / "run"),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        lines = (done.stdout + done.stderr).strip().splitlines()
        if done.returncode:
            errors = [
                line
                for line in lines
                if "Error" in line or "FATAL" in line or line.startswith("  - ")
            ]
            contender.failure = f"exit code {done.returncode}: {(errors or lines)[-1][:200]}"
        else:
            contender.results.append(contender.read(folder / "run", done.stdout))
            contender.seconds.append(time.perf_counter() - began)
    except subprocess.TimeoutExpired:
        contender.failure = f"not finished after {LIMIT_SECONDS} s"
    except (LookupError, StopIteration, OSError) as error:
        contender.failure = f"no result: {error!r}"
    print(
        contender.name,
        contender.results[-1:] or contender.failure,
        f"{time.perf_counter() - began:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def table(work: str, found: list[Contender]) -> list[str]:
    """A row for each contender, the failed ones with their reason."""

    def cell(contender: Contender, key: str, spec: str) -> str:
        values = [result[key] for result in contender.results if result[key] == result[key]]
        if not values:
            return "-"
        spread = f" ({min(values):{spec}} - {max(values):{spec}})" if len(values) > 1 else ""
        return f"{statistics.median(values):{spec}}{spread}"

    columns = {
        "resnet50": {"images/s": ("speed", ",.0f")},
        "mnist": {
            "s an epoch, with test": ("epoch", ".3f"),
            "first epoch": ("first epoch", ".2f"),
            "accuracy": ("accuracy", ".2%"),
            "after one epoch": ("accuracy after one", ".2%"),
        },
    }[work]
    lines: list[str] = [
        f"| | {' | '.join(columns)} | whole command, s |",
        f"|---|{'---:|' * (len(columns) + 1)}",
    ]
    for contender in found:
        if contender.results:
            cells = [cell(contender, key, spec) for key, spec in columns.values()]
            lines.append(
                f"| {contender.name} | {' | '.join(cells)} |"
                f" {statistics.median(contender.seconds):.0f} |"
            )
        else:
            lines.append(f"| {contender.name} | {contender.failure} |{' |' * len(columns)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", choices=["resnet50", "mnist"])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", default="data", help="the folder that holds MNIST")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--limit", type=int, help="mnist: use only so many samples of each split")
    parser.add_argument(
        "--only", nargs="+", help="contenders whose whole names match these regular expressions"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    load = f"{load_average()} at the start"
    found = [
        c
        for c in contenders(arguments)
        if not arguments.only or any(re.fullmatch(name, c.name) for name in arguments.only)
    ]
    with tempfile.TemporaryDirectory(prefix="speed_") as folder:
        for number in range(arguments.rounds):
            for contender in found if number % 2 == 0 else reversed(found):
                run(contender, Path(folder, f"{found.index(contender)}_{number}"))
    hidden = ("work", "output", "data", "only")
    given: dict[str, Any] = {
        name: value for name, value in vars(arguments).items() if name not in hidden and value
    }
    shown = " ".join(f"--{name} {value}" for name, value in given.items())
    command = f"speed.py {arguments.work} {shown}"
    head = {
        "resnet50": f"ResNet-50, {arguments.side} px, batch {arguments.batch} a process",
        "mnist": "MNIST, batch 64",
    }
    publish(
        [
            f"# Speed: {head[arguments.work]}, {arguments.processes} x {arguments.device}",
            "",
            (
                f"Median (min - max) of {arguments.rounds}. What the peers do is in"
                " `benchmarks/peers.py`, what is measured in the head of `benchmarks/speed.py`."
            ),
            "",
            *table(arguments.work, found),
            "",
            *conditions(command, f"{load}, {load_average()} at the end"),
        ],
        arguments.output,
    )


if __name__ == "__main__":
    main()
