"""`study=batch_size`: the largest batch that fits into memory, on every rank, and the fastest one."""

from __future__ import annotations

import contextlib
import math
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ddp_train.config.hardware import Hardware, detect_hardware
from ddp_train.config.schema import Config, key
from ddp_train.distributed.environment import visible_devices
from ddp_train.errors import ConfigError, LaunchError
from ddp_train.resilience.preemption import UNSAVED
from ddp_train.study.plots import Axis, Curve, curves
from ddp_train.study.provenance import load_at_start, provenance
from ddp_train.study.report import Plot, Report, Table
from ddp_train.study.request import Request, bind_settings, shell_command
from ddp_train.study.scaling import TRAIN_ONLY, resolved, speed
from ddp_train.study.trials import Outcome, Trial, recorded_outcome, run, trial_session

OUT_OF_MEMORY = "oom:"
"""How the reason of such a run begins: a kind of failure.json."""


@dataclass
class BatchSizeConfig:
    """conf/study/batch_size.yaml."""

    kind: str = key("batch_size", "what makes this study", choices=("batch_size",))
    start: int = key(8, "samples of a process in one pass, to begin with", at_least=1)
    most: int = key(1 << 20, "samples of a process in one pass, at most", at_least=1)
    resolution: float = key(0.1, "the search ends where the next larger batch is larger by this part", above=0, below=1)
    steps: int = key(20, "of each run", at_least=10)
    memory_gb: float | None = key(
        None, "of each process on the host, in 10^9 bytes; without GPUs it must be given", above=0
    )


@dataclass(frozen=True)
class SearchResult:
    """largest: that fits, 0 if none does; it ended at the limit of memory, or else at what there is to try."""

    largest: int
    limited: bool


def search_largest(fits: Callable[[int], bool | None], start: int, most: int, resolution: float) -> SearchResult:
    """Doubles a batch until it does not fit, then halves the interval.

    fits: whether a batch does; None: there is no use in going on upwards (the data set is no larger).
    """
    good, bad, size = 0, 0, min(start, most)
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
            middle -= middle % 8  # kernels prefer them
        middle = max(middle, good + 1)
        if fits(middle) is False:
            bad = middle
        else:
            good = middle
    return SearchResult(good, limited=True)


def is_conclusive(outcome: Outcome) -> bool:
    """Whether a batch is known to fit, or not to."""
    return outcome.completed or outcome.reason.startswith(OUT_OF_MEMORY)


def epoch_is_one_step(outcome: Outcome) -> bool:
    """Whether the global batch of a completed run is at least as large as its data set."""
    last = [line for line in outcome.metrics if line["kind"] == "train"][-1]
    return last["epoch"] == last["step"]


def study(request: Request) -> tuple[Report, int]:
    """Raises ConfigError before anything runs."""
    config: BatchSizeConfig = bind_settings(BatchSizeConfig, request.settings)
    machine, load = detect_hardware(visible_devices()), load_at_start()
    asked = _check(request, config, machine)
    made: dict[int, Outcome] = {}

    def fits(size: int) -> bool | None:
        trial = _trial(request, config, asked, size)
        outcome = recorded_outcome(trial)
        if not (outcome and is_conclusive(outcome)):  # what failed for another reason may do better now
            outcome = run(trial, request.script, request.stop)
        if outcome is None:
            raise _StoppedError
        made[size] = outcome
        said = f"{speed(outcome):,.0f} samples/s" if outcome.completed else outcome.reason
        print(f"{size} samples a process: {said}", flush=True)
        if not outcome.completed:
            if not is_conclusive(outcome):
                raise _OtherFailureError
            return False
        return None if epoch_is_one_step(outcome) else True

    found, code = None, 0
    with trial_session(request), limited_memory(config.memory_gb):
        try:
            found = search_largest(fits, config.start, config.most, config.resolution)
        except _StoppedError:
            code = request.stop.exit_code(UNSAVED)
        except _OtherFailureError:
            code = LaunchError.exit_code
    if found and not found.largest:
        code = LaunchError.exit_code
    return _report(request, config, asked, made, found, load), code


class _StoppedError(Exception):
    """Somebody asked the study to stop."""


class _OtherFailureError(Exception):
    """A run failed for another reason than memory: of larger and smaller ones nothing can be said."""


@contextlib.contextmanager
def limited_memory(gigabytes: float | None) -> Iterator[None]:
    """Processes that are started inside may have so much private memory each (RLIMIT_DATA: heaps and stacks, not the
    code of libraries). A request for more fails as on a machine that has no more. None changes nothing."""
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
    asked, problems = resolved(request, request.overrides, machine)
    if asked.device == "cpu" and config.memory_gb is None:
        problems.append(
            "study.memory_gb=null: without GPUs the whole machine would be the limit; give each process's share, as "
            "study.memory_gb=2"
        )
    if asked.train.reduction == "ordered":
        problems.append("train.reduction=ordered: passes are virtual shards there; use train.reduction=all_reduce")
    if not problems:
        problems = resolved(request, _trial(request, config, asked, config.start).overrides, machine)[1]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return asked


def _global_batch(asked: Config, size: int) -> int:
    return size * int(asked.launch.nproc_per_node) * asked.train.accumulation_steps


def _trial(request: Request, config: BatchSizeConfig, asked: Config, size: int) -> Trial:
    overrides = [*request.overrides, f"train.global_batch_size={_global_batch(asked, size)}"]
    overrides += [f"train.max_steps={config.steps}", f"train.log_every_steps={max(1, config.steps // 10)}", *TRAIN_ONLY]
    within = f"_in_{config.memory_gb:g}_gb" if config.memory_gb else ""  # what does not fit there may fit into more
    return Trial(overrides, request.run_dir / "trials" / f"{size}_samples{within}" / "0")


def _report(
    request: Request,
    config: BatchSizeConfig,
    asked: Config,
    made: dict[int, Outcome],
    found: SearchResult | None,
    load: float,
) -> Report:
    rows = []
    speeds = {size: speed(outcome) for size, outcome in sorted(made.items()) if outcome.completed}
    fastest = max(speeds, key=lambda size: speeds[size], default=None)
    for size, outcome in sorted(made.items()):
        said = "fits" if outcome.completed else outcome.reason
        if outcome.reason.startswith(OUT_OF_MEMORY):
            said = "out of memory"
        marks = ["fastest" if found else "fastest so far"] * (size == fastest)
        marks += ["largest"] * (found is not None and size == found.largest)
        said = ", ".join([said, *marks])
        rate = speeds.get(size)
        step = 1e3 * _global_batch(asked, size) / rate if rate else None
        rows.append([size, _global_batch(asked, size), rate, step, said])
    columns = ["batch of a process", "global batch", "samples/s", "step, ms", "verdict"]
    limit = f"{config.memory_gb:g} GB of private memory a process" if config.memory_gb else "the memory of the GPUs"
    note = f"{config.steps} steps each, in fresh processes; the limit is {limit}, on whichever rank it is met first. "
    note += "The rate does not follow the batch: optimizer.lr_scaling makes it."
    if not found:
        note += " The search did not come to its end: the same command goes on."
    elif not found.limited:
        note += " The search ended before memory did: at study.most, or at the size of the data set."
    overrides = _trial(request, config, asked, fastest or config.start).overrides
    plot = curves([Curve("samples/s", list(speeds), list(speeds.values()))],
                  Axis("batch of a process", log=True), Axis("samples/s")) if speeds else ""  # fmt: skip
    return Report(
        "Batch size",
        "The largest batch that fits, by doubling and then halving the interval, and the fastest of those tried.",
        [Table("Batches", columns, rows, note), Plot("Speed", plot)],
        provenance(load),
        [request.command, shell_command(overrides)],
    )
