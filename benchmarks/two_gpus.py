"""The launcher on real GPUs: every strategy on digits and MNIST, what must agree, and what must be
refused.

    python benchmarks/two_gpus.py [--data data] [--out runs/two_gpus] [--only 'exact .*' 'mnist dp']

Runs launch.py some twenty times, one after the other, and prints a markdown table of what each run
reported in its summary.json, then the comparisons: weights on one GPU against two, with and without
SyncBatchNorm, and repeatability. Exits with 1 if a run ends with another code than expected, or a
comparison fails; with 2, at once, without two GPUs.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
EXACT = [
    "tuning.precision=fp64",
    "deterministic=true",
    "train.max_steps=20",
    "data.augment=false",
    "optimizer.lr=0.01",
]
BATCH_NORM = ["model.norm=batch"]
SYNC_BN = [*BATCH_NORM, "strategy.sync_bn=true"]
ONE = ["launch.nproc_per_node=1"]


def runs(mnist: list[str]) -> dict[str, tuple[int, list[str]]]:
    """Name -> expected exit code and overrides."""
    quick = ["train.max_steps=40"]
    return {
        "digits ddp": (0, []),
        "digits ddp sync_bn": (0, SYNC_BN),
        "digits dp": (0, ["strategy=dp"]),
        "digits single": (0, ["strategy=single"]),
        "mnist ddp": (0, mnist),
        "mnist ddp sync_bn": (0, [*mnist, *SYNC_BN]),
        "mnist dp": (0, [*mnist, "strategy=dp"]),
        "mnist single": (0, [*mnist, "strategy=single"]),
        "torchrun digits": (0, []),
        "hook fp16": (0, [*quick, "strategy.comm_hook=fp16"]),
        "hook bf16": (0, [*quick, "strategy.comm_hook=bf16"]),
        "hook powersgd": (0, [*quick, "strategy.comm_hook=powersgd"]),
        "ddp options": (
            0,
            [
                *quick,
                "strategy.static_graph=true",
                "strategy.bucket_cap_mb=1",
                "strategy.broadcast_buffers=false",
            ],
        ),
        "precision fp16": (0, [*quick, "tuning.precision=fp16"]),
        "exact ddp 2": (0, EXACT),
        "exact ddp 1": (0, [*EXACT, *ONE]),
        "exact dp": (0, [*EXACT, "strategy=dp"]),
        "exact sync_bn 2": (0, [*EXACT, *SYNC_BN]),
        "exact sync_bn 1": (0, [*EXACT, *SYNC_BN, *ONE]),
        "repeat bf16 a": (0, [*quick, "deterministic=true"]),
        "repeat bf16 b": (0, [*quick, "deterministic=true"]),
        "gloo on GPUs": (0, [*quick, "launch.backend=gloo"]),
        "one process too many": (2, ["launch.nproc_per_node=99"]),
        "NaN": (70, ["train.max_steps=40", "optimizer.lr=1e30", "model.norm=none"]),
    }


def launch(name: str, overrides: list[str], run_dir: Path) -> tuple[int, float]:
    """Runs one command. Returns its exit code and its wall time in seconds."""
    if name.startswith("torchrun"):
        start = ["torchrun", "--nproc_per_node=2"]
    else:
        start = [sys.executable]
    command = [*start, str(ROOT / "launch.py"), f"run_dir={run_dir}", *overrides]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    seconds = time.perf_counter() - began
    print(f"\n$ {' '.join(command[1:])}\n{done.stdout[-1500:]}{done.stderr[-1500:]}", flush=True)
    return done.returncode, seconds


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """The weights at the end of a run."""
    return load_file(sorted((run_dir / "checkpoints").glob("step_*"))[-1] / "model.safetensors")


def largest_difference(one: Path, other: Path) -> float:
    """The largest absolute difference between the weights of two runs."""
    a = weights(one)
    b = weights(other)
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data")
    parser.add_argument("--out", type=Path, default=Path("runs/two_gpus"))
    parser.add_argument(
        "--only", nargs="+", help="runs whose whole names match these regular expressions"
    )
    arguments = parser.parse_args()
    if torch.cuda.device_count() < 2:
        parser.error(f"two GPUs are needed, {torch.cuda.device_count()} visible")
    rows = []
    failures = []
    chosen = {
        name: run
        for name, run in runs(["experiment=mnist", f"data.root={arguments.data}"]).items()
        if not arguments.only or any(re.fullmatch(pattern, name) for pattern in arguments.only)
    }
    for name, (expected, overrides) in chosen.items():
        run_dir = arguments.out / name.replace(" ", "_")
        code, wall = launch(name, overrides, run_dir)
        if code != expected:
            failures.append(f"{name}: exit code {code}, expected {expected}")
        if code == 0 == expected:
            summary = json.loads((run_dir / "summary.json").read_text())
        else:
            summary = None
        rows.append((name, code, wall, summary))
    print(
        f"\n{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, torch"
        f" {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, one run"
        " each\n"
    )
    print(
        "| run | exit | processes | back end | accuracy | loss | samples/s | epoch s (last) |"
        " command s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, code, wall, s in rows:
        if s:
            score = f"{s['test']['accuracy']:.2%} | {s['test']['loss']:.4f}"
            print(
                f"| {name} | {code} | {s['world_size']} | {s['backend']} | {score} |"
                f" {s['samples_per_second']:,.0f} | {s['epoch_seconds'][-1]:.2f} | {wall:.1f} |"
            )
        else:
            print(f"| {name} | {code} | - | - | - | - | - | - | {wall:.1f} |")
    comparisons = [
        ("ddp: 2 GPUs against 1, fp64", "exact_ddp_2", "exact_ddp_1", 1e-10),
        ("dp on 2 GPUs against ddp on 1, fp64", "exact_dp", "exact_ddp_1", 1e-10),
        ("sync_bn: 2 GPUs against 1, fp64", "exact_sync_bn_2", "exact_sync_bn_1", 1e-10),
        ("ddp on 2 GPUs twice, bf16, deterministic", "repeat_bf16_a", "repeat_bf16_b", 0.0),
    ]
    print(
        "\n| weights after 20 steps (40: the last) | largest difference | allowed |\n|---|---|---|"
    )
    for name, one, other, allowed in comparisons:
        if not {one, other} <= {chosen_name.replace(" ", "_") for chosen_name in chosen}:
            continue
        try:
            difference = largest_difference(arguments.out / one, arguments.out / other)
        except (OSError, IndexError) as error:
            difference = float("inf")
            failures.append(f"{name}: {error}")
        print(f"| {name} | {difference:.3g} | {allowed:g} |")
        if not difference <= allowed:
            failures.append(f"{name}: {difference}")
    print("\n" + ("all as expected" if not failures else "FAILED: " + "; ".join(failures)))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
