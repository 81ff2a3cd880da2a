"""The figures of GPUs: whether they are of the right one, what a look costs, and what a run tells.

    python benchmarks/figures_gpu.py [--gib 4]

1. For each way of naming GPUs in CUDA_VISIBLE_DEVICES (none, an index, UUIDs, the reverse order) a
process of its own
   takes `--gib` GiB on each GPU that it sees, and computes for some seconds. NVML must see that
   memory on that GPU, by
   the UUID that CUDA names, with it in use.
2. One look at NVML, in microseconds: of its thread, and of that Python's lock is held for. And what
a logging interval
   pays on the training thread.
3. A short run of launch.py: the figures in the last line of metrics.jsonl, and in summary.json.

Without a GPU only the cost of a logging interval is measured. Exit code 1 if a figure is missing or
of another GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ddp_train.distributed.environment import visible_devices
from ddp_train.telemetry.figures import GIB, GPU_METRICS
from ddp_train.telemetry.gpu_sampler import GpuSampler
from ddp_train.telemetry.hardware_monitor import HardwareMonitor

ROOT = Path(__file__).resolve().parent.parent
REQUIRED = (
    "gpu_utilisation",
    "gpu_memory_gib",
    "power_watts",
    "temperature_celsius",
    "energy_wh",
    "torch_memory_gib",
)
SECONDS = 3.0


def look(gib: float) -> int:
    """Read one GPU after the other, in a process of its own. Returns the number of wrong values."""
    wrong = 0
    for number in range(torch.cuda.device_count()):
        torch.empty(1, device=f"cuda:{number}")
        gpus = GpuSampler([number], visible_devices())
        gpus.sample()
        before = dict(zip(GPU_METRICS, gpus.take(), strict=True))
        held = torch.empty(int(gib * GIB), dtype=torch.uint8, device=f"cuda:{number}")
        square = torch.randn(8192, 8192, device=f"cuda:{number}", dtype=torch.bfloat16)
        gpus.start()
        began = time.perf_counter()
        while time.perf_counter() - began < SECONDS:
            for _ in range(50):
                square @ square
            torch.cuda.synchronize(number)
        found = dict(zip(GPU_METRICS, gpus.take(), strict=True))
        grown = found["gpu_memory_gib"] - before["gpu_memory_gib"]
        missing = [name for name in REQUIRED if not found[name] > 0]
        right = (
            not missing
            and grown >= gib
            and found["torch_memory_gib"] >= gib
            and found["gpu_utilisation"] > 30
        )
        wrong += not right
        told = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
        print(
            f"  cuda:{number} {'right' if right else 'WRONG'}: {grown:.1f} GiB more; {told}",
            flush=True,
        )
        del held, square
        torch.cuda.empty_cache()
    return wrong


def ways() -> list[str | None]:
    """Values of CUDA_VISIBLE_DEVICES; None: not set."""
    uuids = [
        f"GPU-{torch.cuda.get_device_properties(number).uuid}"
        for number in range(torch.cuda.device_count())
    ]
    return [None, str(len(uuids) - 1), ",".join(reversed(uuids)), uuids[-1][:12]]


def cost(figures: HardwareMonitor, rounds: int = 200) -> tuple[float, float]:
    """Microseconds of a logging interval on the training thread, and of it in CPU time."""
    wall = time.perf_counter()
    cpu = time.thread_time()
    for _ in range(rounds):
        figures.deliver([figures.collect()])
        figures.take_interval(1.0)
        figures.bar_text()
    return (time.perf_counter() - wall) / rounds * 1e6, (time.thread_time() - cpu) / rounds * 1e6


def main() -> int:
    """Looks, measures, runs."""
    parser = argparse.ArgumentParser(description="The figures of GPUs.")
    parser.add_argument(
        "--gib", type=float, default=4.0, help="memory to take on each GPU (default 4)"
    )
    parser.add_argument("--look", action="store_true", help="what the processes of this script do")
    arguments = parser.parse_args()
    if arguments.look:
        return min(look(arguments.gib), 1)

    failed = 0
    for visible in ways() if torch.cuda.is_available() else []:
        print(f"CUDA_VISIBLE_DEVICES {'not set' if visible is None else visible}", flush=True)
        env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        env |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        failed += subprocess.run(
            [sys.executable, __file__, "--look", f"--gib={arguments.gib}"], env=env
        ).returncode

    gpus = None
    if torch.cuda.is_available():
        torch.empty(1, device="cuda")
        gpus = GpuSampler([0], visible_devices())
        wall = time.perf_counter()
        cpu = time.thread_time()
        for _ in range(100):
            gpus.sample()
        wall = (time.perf_counter() - wall) * 1e4
        cpu = (time.thread_time() - cpu) * 1e4
        print(f"a look at NVML: {wall:.0f} us, {cpu:.0f} us of it on a processor")
    wall, cpu = cost(HardwareMonitor(gpus))
    print(f"a logging interval: {wall:.1f} us on the training thread, {cpu:.1f} us of CPU time")

    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"run_dir={folder}/run",
            "data=synthetic",
            "model=resnet18",
            "data.image_size=64",
            "data.samples=20000",
        ]
        words += ["train.epochs=4", "train.global_batch_size=256", "tuning.compile=false"]
        if not torch.cuda.is_available():
            words = [f"run_dir={folder}/run", "train.epochs=2"]
        subprocess.run([sys.executable, str(ROOT / "launch.py"), *words], check=True)
        lines = [
            json.loads(line)
            for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        ]
        print(json.dumps([line["figures"] for line in lines if line["kind"] == "train"][-1]))
        figures = json.loads(Path(folder, "run", "summary.json").read_text())["figures"]
        print(json.dumps(figures, indent=1))
    failed += gpus is not None and any(name not in figures for name in REQUIRED)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
