"""How long training stands still for a checkpoint, against the length of a step.

    python benchmarks/checkpoint_stall.py [--model resnet18] [--batch 32] [--saves 5] [--output
    FILE]

One process, on the GPU if there is one. Trains a torchvision model on synthetic images as the
worker does, with the CheckpointHook. The stall is the time inside the hook, the device being idle
before and after, once the checkpoint before is written; `while writing` are the steps that began
while the thread wrote. Exit code 1 if the median stall is a step or more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from page import conditions, publish

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ddp_train.assembly.data_sets import open_datasets
from ddp_train.assembly.job import JobBuilder
from ddp_train.assembly.model import build_module
from ddp_train.assembly.strategy import build_strategy
from ddp_train.checkpoints.checkpoint_hook import CheckpointHook, SaveTimes
from ddp_train.checkpoints.writer import Writer
from ddp_train.config.auto import resolve
from ddp_train.config.bind import bind
from ddp_train.distributed.world import World
from ddp_train.engine.loop import Job, fit
from ddp_train.engine.metrics_hook import Intervals, MetricsHook
from ddp_train.hardware import Hardware
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.telemetry.console import Display
from ddp_train.telemetry.hardware_monitor import HardwareMonitor
from ddp_train.telemetry.metrics_log import MetricsFile


class Clock:
    """Times every step, and the hook in between. Waits for the device around each, so that nothing
    hides."""

    def __init__(self, save: CheckpointHook, writer: Writer) -> None:
        self.save = save
        self.writer = writer
        self.writing = False
        self.stalls: list[float] = []
        self.steps: dict[bool, list[float]] = {True: [], False: []}
        """Seconds of the steps during which the writer wrote, and of the others."""
        self.began = time.perf_counter()

    def due(self, job: Job) -> int:
        return job.step + 1

    def act(self, job: Job) -> None:
        wait()
        now = time.perf_counter()
        if job.step > 3:  # the first ones choose algorithms and allocate
            self.steps[self.writing].append(now - self.began)
        if job.step % (self.save.times.every_steps or 1) == 0:
            self.writer.finish()
            now = time.perf_counter()
            self.save.act(job)
            wait()
            self.stalls.append(time.perf_counter() - now)
        self.writing = self.writer.thread is not None and self.writer.thread.is_alive()
        self.began = time.perf_counter()


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def job_and_clock(arguments: argparse.Namespace, run_dir: Path) -> tuple[Job, Clock]:
    cuda = torch.cuda.is_available()
    device = "cuda:0" if cuda else "cpu"
    steps = arguments.saves * arguments.every
    config, problems = bind(
        {
            "strategy": {"name": "single"},
            "model": {"name": "torchvision", "arch": arguments.model},
            "data": {
                "name": "synthetic",
                "samples": arguments.batch * 2,
                "image_size": 224,
                "classes": 1000,
            },
            "train": {"global_batch_size": arguments.batch, "epochs": steps},
        }
    )
    assert not problems, problems
    if cuda:
        machine = Hardware(cpus=2, gpus=1, gpu_name="GPU", compute_capability=(9, 0))
    else:
        machine = Hardware(cpus=2)
    config = resolve(config, machine, World())
    sources = open_datasets(config)
    strategy = build_strategy(config, World(), device)
    module = build_module(config, sources[0], strategy, device)
    builder = JobBuilder(config, World(), device, module, strategy, RankStatus())
    job = builder.build_job(sources)
    job.plan.__dict__["steps"] = steps
    metrics = MetricsFile(run_dir, False, 0)
    record = MetricsHook(
        Display(False), metrics, HardwareMonitor(), Intervals(1, steps + 1, steps + 1)
    )
    writer = Writer(run_dir, keep=2)
    save = CheckpointHook(writer, record, {}, SaveTimes(every_steps=arguments.every))
    clock = Clock(save, writer)
    job.hooks = [clock]
    return job, clock


def main() -> int:
    parser = argparse.ArgumentParser(description="How long training stands still for a checkpoint.")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--every", type=int, default=8, help="steps between two saves")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stall_") as folder:
        job, clock = job_and_clock(arguments, Path(folder))
        fit(job)
        clock.writer.finish()
        size = sum(
            path.stat().st_size for path in next(Path(folder, "checkpoints").iterdir()).iterdir()
        )

    def cell(values: list[float]) -> str:
        ms = [1000 * value for value in values]
        if ms:
            return f"{statistics.median(ms):.2f} ({min(ms):.2f} - {max(ms):.2f}, {len(ms)})"
        return "none"

    command = f"checkpoint_stall.py --model {arguments.model} --batch {arguments.batch} "
    publish(
        [
            "# How long training stands still for a checkpoint",
            "",
            "Milliseconds: median (min - max, how many).",
            "",
            "| model | checkpoint | step | step while writing | stall |",
            "|---|---:|---:|---:|---:|",
            (
                f"| {arguments.model}, batch {arguments.batch} | {size / 2**20:.0f} MiB |"
                f" {cell(clock.steps[False])} | {cell(clock.steps[True])} | {cell(clock.stalls)} |"
            ),
            "",
            *conditions(command + f"--saves {arguments.saves} --every {arguments.every}"),
        ],
        arguments.output,
    )
    if not clock.steps[False]:
        sys.exit(
            "a checkpoint was being written in every step, so there is nothing to compare with;"
            " raise --every"
        )
    return int(statistics.median(clock.stalls) >= statistics.median(clock.steps[False]))


if __name__ == "__main__":
    sys.exit(main())
