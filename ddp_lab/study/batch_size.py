"""`study=batch_size`: the largest micro-batch that fits into memory on every rank, and the fastest
one."""

from __future__ import annotations

import contextlib
import math
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ddp_lab.study.provenance import load_at_start, provenance
from ddp_lab.study.request import Request, bind_settings, raise_problems
from ddp_lab.study.results import interval_samples_per_second
from ddp_lab.study.trials import TRAIN_ONLY, Outcome, Trial, recorded_outcome, run, trial_session
from ddp_train.options.key import key
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
    """The end of a search."""

    largest: int
    """The largest batch that fits, 0 if none does."""
    limited: bool
    """A larger batch did not fit."""


def search_largest(
    fits: Callable[[int], bool | None], start: int, most: int, resolution: float
) -> SearchResult:
    """Double a batch until it does not fit, then bisect.

    fits: tries a batch. True if it fits, None if it fits and a larger one is pointless, since it
        holds the whole data set.
    """
    good = 0
    bad = min(start, most)
    while (answer := fits(bad)) is not False:
        good = bad
        if answer is None or good == most:
            return SearchResult(good, limited=False)
        bad = min(2 * good, most)
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
    """Tell whether a run shows that its batch fits, or that it does not."""
    return outcome.completed or outcome.reason.startswith(OUT_OF_MEMORY)


def epoch_is_one_step(outcome: Outcome) -> bool:
    """Tell whether the global batch of a completed run is at least as large as its data set."""
    last = outcome.train_lines[-1]
    return last["epoch"] == last["step"]


@contextlib.contextmanager
def limited_memory(gigabytes: float | None) -> Iterator[None]:
    """Inside, limit the private memory of each process that is started (RLIMIT_DATA: heaps and
    stacks, not the code of libraries). An allocation beyond it fails as on a machine without more
    memory.

    gigabytes: None for no limit.
    """
    if gigabytes is None:
        yield
        return
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 1e9), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def study(request: Request) -> tuple[Report, int]:
    """Run the search. Returns the report and the exit code. Raises ConfigError before anything
    runs."""
    search = Search(request, bind_settings(BatchSizeConfig, request.settings))
    load = load_at_start()
    search.run()
    found = search.result
    return search.report(load), request.exit_code(found is not None and found.largest > 0)


class _UnknownFitError(Exception):
    """The study was stopped, or a run failed for another reason than memory."""


class Search:
    """Runs of batches of different sizes, in samples per process, and what they show."""

    def __init__(self, request: Request, config: BatchSizeConfig) -> None:
        """Raises ConfigError."""
        self.request = request
        self.config = config
        self.outcomes: dict[int, Outcome] = {}
        self.result: SearchResult | None = None
        """None as long as the search is not complete."""
        run = request.resolve(request.overrides)
        self.base = run.config
        problems = run.problems
        if self.base.device == "cpu" and config.memory_gb is None:
            problems.append(
                "study.memory_gb=null: without GPUs the limit would be the memory of the whole"
                " host; give a limit for each process, for example study.memory_gb=2"
            )
        if self.base.strategy.name == "ordered":
            problems.append(
                "strategy=ordered: its micro-batches are virtual shards; use strategy=ddp"
            )
        raise_problems(problems or request.resolve(self.trial(config.start).overrides).problems)

    def global_batch(self, size: int) -> int:
        micro_batches = self.base.train.accumulation_steps * int(self.base.launch.nproc_per_node)
        return size * micro_batches

    def trial(self, size: int) -> Trial:
        """The run with batches of a size."""
        overrides = [
            *self.request.overrides,
            f"train.global_batch_size={self.global_batch(size)}",
            f"train.max_steps={self.config.steps}",
            f"train.log_every_steps={max(1, self.config.steps // 10)}",
            *TRAIN_ONLY,
        ]
        folder = f"{size}_samples"
        if self.config.memory_gb:  # a batch may fit with another limit
            folder += f"_in_{self.config.memory_gb:g}_gb"
        return Trial(overrides, self.request.run_dir / "trials" / folder / "0")

    def run(self) -> None:
        """Search until the end, a stop or a failure for another reason than memory."""
        config = self.config
        with (
            trial_session(self.request),
            limited_memory(config.memory_gb),
            contextlib.suppress(_UnknownFitError),
        ):
            self.result = search_largest(self.fits, config.start, config.most, config.resolution)

    def fits(self, size: int) -> bool | None:
        """Try a batch, unless it was tried before. Returns what `search_largest` wants.

        Raises _UnknownFitError if the study was stopped, or the run says neither.
        """
        trial = self.trial(size)
        outcome = recorded_outcome(trial)
        if outcome is None or not is_conclusive(outcome):  # other failures may not repeat
            outcome = run(trial, self.request.program, self.request.stop)
        if outcome is None:
            raise _UnknownFitError
        self.outcomes[size] = outcome
        result = outcome.reason or f"{interval_samples_per_second(outcome):,.0f} samples/s"
        print(f"{size} samples per process: {result}", flush=True)
        if not is_conclusive(outcome):
            raise _UnknownFitError
        if not outcome.completed:
            return False
        if epoch_is_one_step(outcome):
            return None
        return True

    def report(self, load: float) -> Report:
        """load: load average before the first run."""
        outcomes = dict(sorted(self.outcomes.items()))
        speeds = {
            size: interval_samples_per_second(outcome)
            for size, outcome in outcomes.items()
            if outcome.completed
        }
        fastest = max(speeds, key=lambda size: speeds[size], default=None)
        rows: list[list[Any]] = []
        for size, outcome in outcomes.items():
            verdict = self._verdict(size, outcome, fastest)
            batch = self.global_batch(size)
            speed = speeds.get(size)
            rows.append([size, batch, speed, 1e3 * batch / speed if speed else None, verdict])
        columns = ["micro-batch", "global batch", "samples/s", "step, ms", "verdict"]
        overrides = self.trial(fastest or self.config.start).overrides
        line = Curve("samples/s", list(speeds), list(speeds.values()))
        plot = curves([line], Axis("micro-batch", log=True), Axis("samples/s"))
        return Report(
            "Batch size",
            "The largest batch that fits, found by doubling and bisection, and the fastest of those"
            " tried.",
            [Table("Batches", columns, rows, self._note()), Plot("Speed", plot)],
            provenance(load),
            [self.request.command, self.request.program.command(overrides)],
        )

    def _verdict(self, size: int, outcome: Outcome, fastest: int | None) -> str:
        verdict = outcome.reason or "fits"
        if verdict.startswith(OUT_OF_MEMORY):
            verdict = "out of memory"
        if size == fastest:
            verdict += ", fastest" if self.result else ", fastest so far"
        if self.result and size == self.result.largest:
            verdict += ", largest"
        return verdict

    def _note(self) -> str:
        limit = "the memory of the GPUs"
        if self.config.memory_gb:
            limit = f"{self.config.memory_gb:g} GB of private memory per process"
        note = (
            f"Each run has {self.config.steps} steps, in new processes. micro-batch: samples per"
            f" process and pass. The limit is {limit}; a run ends when one rank exceeds the"
            " limit. The learning rate stays the same for all batches unless"
            " optimizer.lr_scaling is set."
        )
        if not self.result:
            note += " The search is not complete: run the same command again to continue it."
        elif not self.result.limited:
            note += (
                " The search ended before memory ran out: at study.most, or at the size of the data"
                " set."
            )
        return note
