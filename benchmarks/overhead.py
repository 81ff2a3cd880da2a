"""What a training step costs beyond a raw PyTorch loop: engine.loop.fit against one by hand.

    python benchmarks/overhead.py [--rounds 15] [--steps 2000] [--limit 15] [--output PAGE.md]

One process, one thread, on the CPU. The model is tiny (64 -> 32 -> 10, batch 32), so that the
arithmetic does not hide the overhead; a step of it takes some 360 us. Both sides have the same
layers, weights, foreach SGD with momentum and number of steps. The raw loop is

    for inputs, targets in batches:
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

and neither looks at its loss nor logs. ddp_train's side is the whole of `fit` with what a run has:
seeding of each step, a cosine schedule, the check for losses that are not finite, the Record hook
that writes a line of metrics.jsonl every 50 steps, the Save hook, and a display that is active. Not
counted: building, and one checkpoint per epoch. There is one epoch per run, with an evaluation of a
single batch at its end.

    step              the batches are made before the clock starts; no terminal, so no progress bar
    step, bar drawn   the same with a progress bar, drawn into a file: a terminal's escape codes
    data and step     ddp_train's Loader over the digits against DataLoader(shuffle=True)
    DDP               as `step`, both models in DistributedDataParallel, gloo, world size 1: what
                      one of several processes does (a run with one process has no DDP)

Each round times both sides of every row, in an order that changes from round to round. A row's
overhead is the median over the rounds of the difference within a round, which other work on the
machine disturbs least; its spread is the interquartile range of these differences. The last column
is the same in CPU time of the training thread, which leaves out what the thread waited for a core
(or, under DDP, for gloo's thread): on a busy machine it is the one to look at.

Exit code 1 if the overhead of the first row is --limit microseconds or more.

--profile prints where the time of ddp_train's side goes, by cProfile, in place of the table.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from page import conditions, load_average, publish
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ddp_train.checkpoints.checkpoint_hook import CheckpointHook
from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import BatchPlan, evaluation_batches
from ddp_train.data.datasets import ArraySource
from ddp_train.data.loader import Loader, LoaderOptions
from ddp_train.data.rng import StepSeed
from ddp_train.data.small_datasets import open_digits
from ddp_train.engine.loop import Evaluation, Job, fit
from ddp_train.engine.metrics_hook import Intervals, MetricsHook
from ddp_train.engine.step_observers import PhaseReports, ReportedBatches, ReportedHook
from ddp_train.optim.optimizers import build_optimizer
from ddp_train.optim.schedules.factors import build_schedule
from ddp_train.optim.schedules.schedule import FactorSchedule
from ddp_train.optim.stepper import Stepper
from ddp_train.parallel.strategy import DistributedDataParallel as Ddp
from ddp_train.parallel.strategy import Single
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.tasks.builtin import Classification
from ddp_train.tasks.score import Scorer
from ddp_train.tasks.task import ModelWithTask
from ddp_train.telemetry.console import Display
from ddp_train.telemetry.hardware_monitor import HardwareMonitor
from ddp_train.telemetry.metrics_log import MetricsFile

BATCH_SIZE = 32
LOG_EVERY_STEPS = 50
SEED = 0
DIFFERENT_BATCHES = 40


class Clock:
    """Wall time and CPU time of this thread since it was made, in seconds."""

    def __init__(self) -> None:
        self.wall = time.perf_counter()
        self.cpu = time.thread_time()

    def read(self) -> Times:
        return Times(time.perf_counter() - self.wall, time.thread_time() - self.cpu)


class Times(NamedTuple):
    """Seconds of a run, or microseconds of a step."""

    wall: float
    cpu: float


Run = Callable[[], Times]
"""Trains once, newly built; returns the seconds of the loop alone."""


@dataclass
class Row:
    """Two loops over the same work, and the microseconds per step of each round."""

    name: str
    raw: Run
    ours: Run
    raw_times: list[Times] = field(default_factory=list)
    our_times: list[Times] = field(default_factory=list)

    @property
    def wall(self) -> list[float]:
        """ddp_train's time beyond the raw loop's in each round."""
        return [
            ours.wall - raw.wall for raw, ours in zip(self.raw_times, self.our_times, strict=True)
        ]

    @property
    def cpu(self) -> list[float]:
        """The same in CPU time."""
        return [
            ours.cpu - raw.cpu for raw, ours in zip(self.raw_times, self.our_times, strict=True)
        ]


class Scene:
    """Sizes, data and a folder for files, which both sides of every row share."""

    def __init__(self, steps: int, folder: Path) -> None:
        self.steps = steps
        self.folder = folder
        self.runs = 0
        self.source, self.test_source = open_digits(augment=False, seed=SEED)

    def new_model(self) -> nn.Module:
        """The same weights on each call."""
        torch.manual_seed(SEED)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.ReLU(inplace=True), nn.Linear(32, 10)
        )

    def plan(self, samples: int) -> BatchPlan:
        return BatchPlan(samples, BATCH_SIZE, accumulation_steps=1, steps=self.steps, seed=SEED)

    def made_batches(self) -> list[Batch]:
        """A batch for each step; they share a few tensors, which the caches may hold for both sides
        alike."""
        plan = self.plan(self.steps * BATCH_SIZE)
        batches = []
        for micro_batch in plan.micro_batches():
            indices = micro_batch.indices % (DIFFERENT_BATCHES * BATCH_SIZE)
            batches.append(Batch(self.source.get_batch(indices, None), micro_batch))
        return batches


def time_raw(
    scene: Scene, passes: Iterable[Iterable[tuple[Tensor, Tensor]]], ddp: bool = False
) -> Times:
    """The raw loop. passes: of the whole run; each is iterated once."""
    model: nn.Module = scene.new_model()
    if ddp:
        model = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
    model.train()
    done = 0
    clock = Clock()
    for batches in passes:
        for inputs, targets in batches:
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done += 1
            if done == scene.steps:
                return clock.read()
    raise AssertionError("too few batches")


def time_ours(
    scene: Scene,
    plan: BatchPlan,
    batches: Iterable[Batch],
    status: RankStatus,
    ddp: bool = False,
    bar: bool = False,
) -> Times:
    """Time `fit` over a job that is put together as ddp_train.assembly.job and
    ddp_train.runs.worker do it."""
    scene.runs += 1
    run_dir = scene.folder / f"run_{scene.runs}"
    run_dir.mkdir()
    strategy = Ddp("cpu") if ddp else Single("cpu")
    module = strategy.place(ModelWithTask(scene.new_model(), Classification(10), "cpu", None))
    arguments = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.0, "nesterov": False}
    optimizer = build_optimizer(
        module.parameters(), torch.optim.SGD, implementation="foreach", **arguments
    )
    factor = build_schedule("cosine", plan.steps, final_factor=0.0)
    schedule = FactorSchedule(factor, optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    evaluation = Evaluation(
        module=module,
        strategy=strategy,
        batches=Loader(scene.test_source, evaluation_batches(32, 32, 0, 1), "cpu", LoaderOptions()),
        new_scorer=lambda: Scorer(1, "cpu"),
    )
    job = Job(
        plan=plan,
        module=module,
        wrapped=strategy.wrap(module),
        strategy=strategy,
        stepper=Stepper(optimizer, schedule, scaler, observers=[PhaseReports(status)]),
        batches=batches,
        evaluations={"test": evaluation},
        seed_step=StepSeed(SEED, 0, "cpu"),
    )
    with (run_dir / "console.txt").open("w") as stream:
        display = Display(active=True)
        display.console = Console(
            file=stream,
            force_terminal=bar,
            width=100,
            highlight=False,
            soft_wrap=True,
            legacy_windows=False,
        )
        never = plan.steps + 1  # but at the end of the run
        metrics = MetricsFile(run_dir, active=True, first_step=0)
        intervals = Intervals(1, LOG_EVERY_STEPS, evaluate_every_epochs=never)
        record = MetricsHook(display, metrics, HardwareMonitor(), intervals)
        save = CheckpointHook(None, record, {})
        job.hooks = [
            ReportedHook(record, status, "record"),
            ReportedHook(save, status, "checkpoint"),
        ]
        display.start(plan.steps, lambda: job.step)
        record.start_clocks(job.step)
        clock = Clock()
        fit(job)
        times = clock.read()
        display.stop()
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert len(lines) > plan.steps // LOG_EVERY_STEPS, "the logging was on"
    return times


@contextlib.contextmanager
def group() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # DDP objects sit in reference cycles, and must be gone before the group is
    dist.destroy_process_group()


def build_rows(scene: Scene) -> list[Row]:
    """The rows of the table."""
    batches = scene.made_batches()
    pairs = [(batch.inputs, batch.targets) for batch in batches]
    one_epoch = scene.plan(scene.steps * BATCH_SIZE)

    def ours(ddp: bool = False, bar: bool = False) -> Times:
        return time_ours(scene, one_epoch, batches, RankStatus(), ddp, bar)

    def raw_ddp() -> Times:
        with group():
            return time_raw(scene, [pairs], ddp=True)

    def our_ddp() -> Times:
        with group():
            return ours(ddp=True)

    assert isinstance(scene.source, ArraySource)
    data = TensorDataset(scene.source.inputs, scene.source.targets)
    many_epochs = scene.plan(len(data))

    def raw_with_data() -> Times:
        loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
        return time_raw(scene, (loader for _ in range(scene.steps)))

    def ours_with_data() -> Times:
        status = RankStatus()
        loader = Loader(scene.source, list(many_epochs.micro_batches()), "cpu", LoaderOptions())
        return time_ours(scene, many_epochs, ReportedBatches(loader, status), status)

    return [
        Row("step", lambda: time_raw(scene, [pairs]), ours),
        Row("step, bar drawn", lambda: time_raw(scene, [pairs]), lambda: ours(bar=True)),
        Row("data and step", raw_with_data, ours_with_data),
        Row("DDP", raw_ddp, our_ddp),
    ]


def measure(rows: list[Row], rounds: int, steps: int) -> None:
    """Fills in the times: one round to warm up, then `rounds`."""
    for number in range(rounds + 1):
        for row in rows if number % 2 else reversed(rows):
            sides = [(row.raw, row.raw_times), (row.ours, row.our_times)]
            for run, times in sides if number % 4 < 2 else reversed(sides):
                seconds = run()
                if number:
                    times.append(Times(seconds.wall / steps * 1e6, seconds.cpu / steps * 1e6))


def table(rows: list[Row], rounds: int, steps: int, limit: float, load: str) -> list[str]:
    """The table in Markdown, with what one needs to measure it again."""
    lines = [
        "# Overhead of a training step over a raw loop",
        "",
        (
            f"Microseconds per step: median of {rounds} interleaved rounds of {steps:,} steps. One"
            f" process, one thread; 64 -> 32 -> 10 perceptron, batch {BATCH_SIZE}, foreach SGD;"
            f" ddp_train writes metrics.jsonl every {LOG_EVERY_STEPS} steps. The overhead is the"
            " median of the differences within a round."
        ),
        "",
        (
            "| row | raw loop (min - max) | ddp_train (min - max) | overhead (quartiles) | in CPU"
            " time (quartiles) |"
        ),
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [
            f"{statistics.median(wall):.1f} ({min(wall):.1f} - {max(wall):.1f})"
            for wall in ([times.wall for times in side] for side in (row.raw_times, row.our_times))
        ]
        for differences in (row.wall, row.cpu):
            low, middle, high = statistics.quantiles(differences, n=4)
            cells.append(f"**{middle:+.1f}** ({low:+.1f} to {high:+.1f})")
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return [
        *lines,
        "",
        f"The limit for the first row is {limit:g} us.",
        "",
        *conditions(f"overhead.py --rounds {rounds} --steps {steps}", load),
        "- What is measured, and what the rows are: the head of `benchmarks/overhead.py`.",
    ]


def profile(row: Row) -> None:
    """Print where ddp_train's side of a row spends its time."""
    row.ours()
    profiler = cProfile.Profile()
    profiler.runcall(row.ours)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def main() -> int:
    """Measures, prints, judges."""
    parser = argparse.ArgumentParser(
        description="Overhead per training step over a raw PyTorch loop."
    )
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (default 15)")
    parser.add_argument(
        "--steps", type=int, default=2000, help="training steps per run (default 2000)"
    )
    parser.add_argument(
        "--limit", type=float, default=15.0, help="the first row's overhead must be below this [us]"
    )
    parser.add_argument("--output", type=Path, help="write the table to this file too")
    parser.add_argument("--profile", action="store_true", help="profile the first row instead")
    arguments = parser.parse_args()

    load = f"{load_average()} at the start"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="overhead_") as folder:
        rows = build_rows(Scene(arguments.steps, Path(folder)))
        if arguments.profile:
            profile(rows[0])
            return 0
        measure(rows, arguments.rounds, arguments.steps)
    load += f", {load_average()} at the end (this benchmark alone makes it 1)"
    publish(table(rows, arguments.rounds, arguments.steps, arguments.limit, load), arguments.output)
    overhead = statistics.median(rows[0].wall)
    if overhead >= arguments.limit:
        print(f"FAILED: {overhead:.1f} us is not below {arguments.limit:g} us", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
