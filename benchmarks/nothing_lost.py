"""Nothing lost, on the hardware at hand: kills, stops and hangs against the run that nobody
disturbed.

    python benchmarks/nothing_lost.py [--processes N] [--out runs/nothing_lost]

For 1 process, 2, 3 ... up to N (default: the GPUs, or 3 on a host without), digits with batch norm
and dropout, AdamW, deterministic: an undisturbed run; the same with a random rank killed by SIGKILL
and started again by the launcher; the same stopped by SIGTERM, which must leave 75, and continued.
All three must end in the same bytes. Then one rank is stopped by SIGSTOP: the run must end with 71
and name that rank. Prints a markdown table; exit code 1 if a row fails.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = (
    "model.norm=batch",
    "model.dropout=0.2",
    "optimizer=adamw",
    "deterministic=true",
    "train.epochs=40",
    "checkpoint.every_steps=20",
    "train.log_every_steps=10",
    "train.evaluate_every_epochs=10",
)


def start(run_dir: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "launch.py"), f"run_dir={run_dir}", *WORDS, *words]
    log = run_dir.with_suffix(".log").open("a")
    return subprocess.Popen(command, stdout=log, stderr=log, text=True)


def workers(run_dir: Path) -> dict[int, int]:
    """The process id of each rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"ddp_train.runs.worker\0{run_dir}".encode() in (folder / "cmdline").read_bytes():
                variables = dict(
                    part.partition(b"=")[::2]
                    for part in (folder / "environ").read_bytes().split(b"\0")
                )
                found[int(variables[b"RANK"])] = int(folder.name)
    return found


def wait_for_step(run_dir: Path, process: subprocess.Popen[str], step: int) -> None:
    path = run_dir / "metrics.jsonl"
    while process.poll() is None:
        if path.exists():
            steps = [
                json.loads(line)["step"]
                for line in path.read_text().splitlines()
                if line.endswith("}")
            ]
            if steps and max(steps) >= step:
                return
        time.sleep(0.01)


def hash_of(run_dir: Path) -> str:
    newest = max((run_dir / "checkpoints").glob("step_????????"))
    return hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest()[:16]


def rows(processes: int, out: Path, draw: random.Random) -> list[tuple[str, str, str, bool]]:
    """(what, what was seen, seconds, right)."""
    size = f"launch.nproc_per_node={processes}"
    found = []
    expected = ""
    for what in ("undisturbed", "SIGKILL", "SIGTERM", "SIGSTOP"):
        if what == "SIGSTOP" and processes == 1:
            continue
        run_dir = out / f"{what}_{processes}"
        began = time.monotonic()
        rank = draw.randrange(processes)
        step = draw.randrange(50, 250, 10)
        more = {"SIGKILL": ["launch.max_restarts=1"], "SIGSTOP": ["launch.timeout_seconds=15"]}.get(
            what, []
        )
        process = start(run_dir, size, *more)
        seen = ""
        if what != "undisturbed":
            wait_for_step(run_dir, process, step)
            if what == "SIGTERM":
                process.terminate()
                seen = f"at step {step}: exit {process.wait()}, "
                process = start(run_dir, size)
            else:
                os.kill(workers(run_dir)[rank], getattr(signal, what))
                seen = f"rank {rank} at step {step}: "
        code = process.wait()
        seconds = time.monotonic() - began
        if what == "SIGSTOP":
            failure = json.loads((run_dir / "failure.json").read_text())
            seen += f"exit {code}, {failure['kind']}, rank {failure['rank']}, {failure['phase']}"
            right = (code, failure["kind"], failure["rank"]) == (71, "hang", rank)
        else:
            seen += f"exit {code}, {hash_of(run_dir)}"
            expected = expected or hash_of(run_dir)
            right = (
                code == 0
                and hash_of(run_dir) == expected
                and (what != "SIGTERM" or "exit 75" in seen)
            )
        found.append((what, seen, f"{seconds:.1f}", right))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills, stops and hangs on the hardware at hand.")
    parser.add_argument(
        "--processes", type=int, help="the largest number (default: the GPUs, else 3)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/nothing_lost"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    import torch

    most = arguments.processes or torch.cuda.device_count() or 3
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    draw = random.Random(arguments.seed)
    wrong = 0
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{torch.cuda.device_count()} x {name}, torch {torch.__version__}, seed {arguments.seed}\n"
    )
    print("| processes | fault | what was seen | seconds | right |\n|---:|---|---|---:|---|")
    for processes in range(1, most + 1):
        for what, seen, seconds, right in rows(processes, arguments.out.resolve(), draw):
            print(
                f"| {processes} | {what} | {seen} | {seconds} | {'yes' if right else '**no**'} |",
                flush=True,
            )
            wrong += not right
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
