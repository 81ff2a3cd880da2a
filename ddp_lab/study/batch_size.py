"""`study=batch_size`: the largest micro-batch that fits into memory on every rank, and the fastest
one."""

from __future__ import annotations

import contextlib
import math
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ddp_lab.study.provenance import load_at_start, provenance
from ddp_lab.study.request import Request, bind_settings, resolve_run, this_hardware
from ddp_lab.study.results import interval_samples_per_second
from ddp_lab.study.trials import TRAIN_ONLY, Outcome, Trial, recorded_outcome, run, trial_session
from ddp_train.errors import ConfigError, LaunchError
from ddp_train.hardware import Hardware
from ddp_train.options.key import key
from ddp_train.options.schema import Config
from ddp_train.resilience.preemption import UNSAVED
from ddp_train.telemetry.pages.charts import Axis, Curve, curves
from ddp_train.telemetry.pages.report import Plot, Report
from ddp_train.telemetry.pages.tables import Table

OUT_OF_MEMORY = "oom:"
"""Prefix of `Outcome.reason` if memory ran out: the kind in failure.json."""


@dataclass
class BatchSizeConfig:
    """conf/study/batch_size.yaml."""

    kind: str = key("batch_size", "the kind of study", choices=("batch_size",))
    start: int = key(8, "first micro-batch to try, in samples per process", at_least=1)
    most: int = key(1 << 20, "largest micro-batch to try, in samples per process", at_least=1)
    resolution: float = key(
        0.1,
        "end the search when the smallest batch that fails is at most this fraction larger than the"
        " largest that fits",
        above=0,
        below=1,
    )
    steps: int = key(20, "optimizer steps of each run", at_least=10)
    memory_gb: float | None = key(
        None,
        "memory limit of each process on the host, in 10^9 bytes; required without GPUs",
        above=0,
    )


@dataclass(frozen=True)
class SearchResult:
    """largest: the largest batch that fits, 0 if none does. limited: a larger batch did not fit."""

    largest: int
    limited: bool


def search_largest(
    fits: Callable[[int], bool | None], start: int, most: int, resolution: float
) -> SearchResult:
    """Doubles a batch until it does not fit, then bisects.

    fits: whether a batch fits; None: it fits, and a larger one is pointless (it holds the whole
    data set).
    """
    good = 0
    bad = 0
    size = min(start, most)
    while True:
        answer = fits(size)
        if answer is False:
            bad = size
            break
        good = size
        if answer is None or size == most:
            return SearchResult(good, limited=False)
        size = min(2 * size, most)
    while bad - good > max(1, math.floor(resolution * good)):
        middle = (good + bad) // 2
        if middle >= 64:
            middle -= middle % 8  # kernels are faster with multiples of 8
        middle = max(middle, good + 1)
        if fits(middle) is False:
            bad = middle
        else:
            good = middle
    return SearchResult(good, limited=True)


def is_conclusive(outcome: Outcome) -> bool:
    """Whether a run shows that its batch fits, or that it does not."""
    return outcome.completed or outcome.reason.startswith(OUT_OF_MEMORY)


def epoch_is_one_step(outcome: Outcome) -> bool:
    """Whether the global batch of a completed run is at least as large as its data set."""
    last = [line for line in outcome.metrics if line["kind"] == "train"][-1]
    return last["epoch"] == last["step"]


def study(request: Request) -> tuple[Report, int]:
    """Runs the search. Returns the report and the exit code. Raises ConfigError before anything
    runs."""
    config: BatchSizeConfig = bind_settings(BatchSizeConfig, request.settings)
    machine = this_hardware()
    load = load_at_start()
    base = _check(request, config, machine)
    outcomes: dict[int, Outcome] = {}

    def fits(size: int) -> bool | None:
        trial = _trial(request, config, base, size)
        outcome = recorded_outcome(trial)
        if not (outcome and is_conclusive(outcome)):  # other failures may not repeat
            outcome = run(trial, request.program, request.stop)
        if outcome is None:
            raise _StoppedError
        outcomes[size] = outcome
        if outcome.completed:
            result = f"{interval_samples_per_second(outcome):,.0f} samples/s"
        else:
            result = outcome.reason
        print(f"{size} samples per process: {result}", flush=True)
        if not outcome.completed:
            if not is_conclusive(outcome):
                raise _OtherFailureError
            return False
        return None if epoch_is_one_step(outcome) else True

    found = None
    code = 0
    with trial_session(request), limited_memory(config.memory_gb):
        try:
            found = search_largest(fits, config.start, config.most, config.resolution)
        except _StoppedError:
            code = request.stop.exit_code(UNSAVED)
        except _OtherFailureError:
            code = LaunchError.exit_code
    if found and not found.largest:
        code = LaunchError.exit_code
    return _report(request, config, base, outcomes, found, load), code


class _StoppedError(Exception):
    """The study was asked to stop."""


class _OtherFailureError(Exception):
    """A run failed for another reason than memory, so it is unknown whether its batch fits."""


@contextlib.contextmanager
def limited_memory(gigabytes: float | None) -> Iterator[None]:
    """Limits the private memory of each process that is started inside (RLIMIT_DATA: heaps and
    stacks, not the code of libraries). An allocation beyond it fails as on a machine without more
    memory. None: no limit."""
    if gigabytes is None:
        yield
        return
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 1e9), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def _check(request: Request, config: BatchSizeConfig, machine: Hardware) -> Config:
    base_run = resolve_run(request.program, request.overrides, machine)
    base = base_run.config
    problems = base_run.problems
    if base.device == "cpu" and config.memory_gb is None:
        problems.append(
            "study.memory_gb=null: without GPUs the limit would be the memory of the whole host;"
            " give a limit for each process, for example study.memory_gb=2"
        )
    if base.strategy.name == "ordered":
        problems.append("strategy=ordered: its micro-batches are virtual shards; use strategy=ddp")
    if not problems:
        problems = resolve_run(
            request.program, _trial(request, config, base, config.start).overrides, machine
        ).problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return base


def _global_batch(base: Config, size: int) -> int:
    return size * int(base.launch.nproc_per_node) * base.train.accumulation_steps


def _trial(request: Request, config: BatchSizeConfig, base: Config, size: int) -> Trial:
    overrides = [*request.overrides, f"train.global_batch_size={_global_batch(base, size)}"]
    overrides += [
        f"train.max_steps={config.steps}",
        f"train.log_every_steps={max(1, config.steps // 10)}",
        *TRAIN_ONLY,
    ]
    within = (
        f"_in_{config.memory_gb:g}_gb" if config.memory_gb else ""
    )  # a batch may fit with another limit
    return Trial(overrides, request.run_dir / "trials" / f"{size}_samples{within}" / "0")


def _report(
    request: Request,
    config: BatchSizeConfig,
    base: Config,
    outcomes: dict[int, Outcome],
    found: SearchResult | None,
    load: float,
) -> Report:
    rows = []
    speeds = {
        size: interval_samples_per_second(outcome)
        for size, outcome in sorted(outcomes.items())
        if outcome.completed
    }
    fastest = max(speeds, key=lambda size: speeds[size], default=None)
    for size, outcome in sorted(outcomes.items()):
        verdict = "fits" if outcome.completed else outcome.reason
        if outcome.reason.startswith(OUT_OF_MEMORY):
            verdict = "out of memory"
        marks = ["fastest" if found else "fastest so far"] * (size == fastest)
        marks += ["largest"] * (found is not None and size == found.largest)
        verdict = ", ".join([verdict, *marks])
        rate = speeds.get(size)
        step = 1e3 * _global_batch(base, size) / rate if rate else None
        rows.append([size, _global_batch(base, size), rate, step, verdict])
    columns = ["micro-batch", "global batch", "samples/s", "step, ms", "verdict"]
    if config.memory_gb:
        limit = f"{config.memory_gb:g} GB of private memory per process"
    else:
        limit = "the memory of the GPUs"
    note = (
        f"{config.steps} steps each, in new processes. micro-batch: samples per process and pass."
        " The limit is "
    )
    note += (
        f"{limit}; one rank that exceeds it ends a run. The learning rate stays the same for all"
        " batches unless "
    )
    note += "optimizer.lr_scaling is set."
    if not found:
        note += " The search is not complete: run the same command again to continue it."
    elif not found.limited:
        note += (
            " The search ended before memory ran out: at study.most, or at the size of the data"
            " set."
        )
    overrides = _trial(request, config, base, fastest or config.start).overrides
    line = Curve("samples/s", list(speeds), list(speeds.values()))
    plot = curves([line], Axis("micro-batch", log=True), Axis("samples/s"))
    return Report(
        "Batch size",
        "The largest batch that fits, found by doubling and bisection, and the fastest of those"
        " tried.",
        [Table("Batches", columns, rows, note), Plot("Speed", plot)],
        provenance(load),
        [request.command, request.program.command(overrides)],
    )
