"""What bit-identical training costs: step times with strategy=ordered against torch's own DDP.

    python benchmarks/ordered.py [--rounds 3] [--processes 1 2 4] [--output FILE]

Whole runs by the launcher, one thread per process: the digits, global batch 96, 15 steps per epoch.
A step time is that of an interval of metrics.jsonl, which leaves out starting, evaluations and
checkpoints; the first interval of a run is dropped. Each round runs both strategies at each number
of processes, in an order that changes from round to round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from page import conditions, load_average, publish

ROOT = Path(__file__).resolve().parent.parent
BATCH = 96
STEPS = 105
INTERVAL = 5
WORDS = [
    f"train.global_batch_size={BATCH}",
    f"train.max_steps={STEPS}",
    f"train.log_every_steps={INTERVAL}",
]
WORDS += [
    "train.evaluate_every_epochs=1000",
    "checkpoint.every_steps=1000",
    "launch.threads_per_process=1",
    "device=cpu",
]
MODELS = ["cnn", "mlp"]
STRATEGIES = ["ddp", "ordered"]


def step_times(model: str, processes: int, strategy: str) -> list[float]:
    """Milliseconds per step, of each interval of a run."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"model={model}",
            f"launch.nproc_per_node={processes}",
            f"strategy={strategy}",
            *WORDS,
        ]
        command = [sys.executable, str(ROOT / "launch.py"), f"run_dir={folder}/run", *words]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
        lines = [
            json.loads(line)
            for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        ]
    return [1000 * BATCH / line["samples_per_second"] for line in lines if line["kind"] == "train"][
        1:
    ]


def shown(times: list[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.2f} ({low:.2f} - {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    variants = [(m, p, r) for m in MODELS for p in arguments.processes for r in STRATEGIES]
    times: dict[tuple[str, int, str], list[float]] = {variant: [] for variant in variants}
    load = f"{load_average()} at the start"
    for number in range(arguments.rounds):
        for variant in variants if number % 2 == 0 else reversed(variants):
            times[variant] += step_times(*variant)
            print(*variant, shown(times[variant]), file=sys.stderr)
    rows = [
        "| model | processes | DDP, ms | ordered, ms | ratio of medians |",
        "|---|---:|---:|---:|---:|",
    ]
    for model in MODELS:
        for processes in arguments.processes:
            theirs, ours = (times[model, processes, strategy] for strategy in STRATEGIES)
            ratio = statistics.median(ours) / statistics.median(theirs)
            rows.append(
                f"| {model} | {processes} | {shown(theirs)} | {shown(ours)} | {ratio:.2f} |"
            )
    processes = " ".join(map(str, arguments.processes))
    report = [
        "# The price of the same bits on any number of processes",
        "",
        (
            f"Milliseconds per optimizer step: median (quartiles) of intervals of {INTERVAL} steps,"
            f" {arguments.rounds} runs of {STEPS} steps each, interleaved. Digits, global batch"
            f" {BATCH}, 8 virtual shards, one thread each."
        ),
        "",
        *rows,
        "",
        *conditions(
            f"ordered.py --rounds {arguments.rounds} --processes {processes}",
            f"{load}, {load_average()} at the end",
        ),
    ]
    publish(report, arguments.output)


if __name__ == "__main__":
    main()
