"""The largest batch that fits: the search, and real runs that die for want of memory."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_lab.study import batch_size
from ddp_lab.study.batch_size import limited_memory, search_largest
from ddp_lab.study.trials import Outcome, Trial
from ddp_lab.study.trials import run as run_trial
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.resilience.whole_files import write_json
from tests.support.commands import run
from tests.support.studies import asked, leave, value


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 200), st.sampled_from([0.02, 0.1, 0.5]))
def test_the_search_ends_just_below_the_limit(limit: int, start: int, resolution: float) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        assert size not in tried, "a run is made once"
        tried.append(size)
        return size <= limit

    found = search_largest(fits, start, 1 << 24, resolution)
    assert (
        found.largest == max([size for size in tried if size <= limit], default=0) and found.limited
    )
    next_one = min(size for size in tried if size > limit)
    assert next_one - found.largest <= max(1, resolution * found.largest)
    assert len(tried) < 45


def test_the_search_ends_where_there_is_nothing_more_to_try() -> None:
    assert vars(search_largest(lambda size: True, 8, 100, 0.1)) == {
        "largest": 100,
        "limited": False,
    }
    assert vars(search_largest(lambda size: True if size < 64 else None, 8, 10**6, 0.1)) == {
        "largest": 64,
        "limited": False,
    }


WORDS = ("study=batch_size", "study.memory_gb=2", "data=digits")


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


class Runs:
    """In place of processes: what runs of 20 steps would leave, where `most` samples a process fit.
    Two processes."""

    def __init__(self, most: int, samples: int = 1433, real: tuple[int, ...] = ()) -> None:
        """real: sizes whose runs are real ones."""
        self.most = most
        self.samples = samples
        self.real = real
        self.sizes: list[int] = []

    def __call__(self, trial: Trial, script: Path, stop: StopRequests) -> Outcome | None:
        batch = int(value(trial, "train.global_batch_size"))
        self.sizes.append(batch // 2)
        if batch // 2 in self.real:
            return run_trial(trial, script, stop)
        lines = [
            {
                "kind": "train",
                "step": step,
                "epoch": 1 + (step - 1) // -(-self.samples // batch),
                "samples_per_second": 1e3 * batch,
            }
            for step in range(2, 21, 2)
        ]
        if batch // 2 > self.most:
            failure = {"kind": "oom", "detail": "can't allocate memory"}
        else:
            failure = None
        return leave(trial, script, lines, failure=failure)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "sizes"), [(10**9, [2**power for power in range(3, 11)]), (100, [8, 16, 32, 64, 128])]
)
def test_an_epoch_that_ends_within_a_run_does_not_end_the_search(
    most: int, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1,433 samples: two processes have all of them in one step with 1,024 each."""
    runs = Runs(most)
    monkeypatch.setattr(batch_size, "run", runs)
    report, code = batch_size.study(asked(*WORDS, f"run_dir={tmp_path}"))
    assert code == 0 and runs.sizes[: len(sizes)] == sizes
    marked = [row for row in report.tables[0].rows if "largest" in row[4]]
    assert [row[0] for row in marked] == [1024 if most > 1024 else 96]
    assert ("search ended before memory ran out" in report.tables[0].note) == (most > 1024)


@pytest.mark.slow
def test_only_conclusive_runs_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(100)
    monkeypatch.setattr(batch_size, "run", runs)
    before, code = batch_size.study(asked(*WORDS, f"run_dir={tmp_path}"))
    assert code == 0 and runs.sizes == [8, 16, 32, 64, 128, 96, 112, 104], (
        "104 is within a tenth of 96"
    )
    (summary,) = tmp_path.glob("trials/32_samples*/0/summary.json")
    write_json(summary, {"status": "failed"})
    write_json(
        summary.with_name("failure.json"), {"kind": "peer", "detail": "another process is gone"}
    )
    runs.sizes.clear()
    after, code = batch_size.study(asked(*WORDS, f"run_dir={tmp_path}"))
    assert code == 0 and runs.sizes == [32] and after.tables == before.tables
    runs.sizes.clear()
    batch_size.study(asked(*WORDS, "study.memory_gb=4", f"run_dir={tmp_path}"))
    assert len(runs.sizes) == 8, "with more memory all is to be tried again"


def test_stopped_search_is_reported_as_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(100)
    request = asked(*WORDS, f"run_dir={tmp_path}")

    def run_until_32(trial: Trial, script: Path, stop: StopRequests) -> Outcome | None:
        if len(runs.sizes) == 2:
            stop.received.append(signal.SIGTERM)
            return None
        return runs(trial, script, stop)

    monkeypatch.setattr(batch_size, "run", run_until_32)
    report, code = batch_size.study(request)
    assert code == 143 and [row[4] for row in report.tables[0].rows] == [
        "fits",
        "fits, fastest so far",
    ]
    assert "not complete" in report.tables[0].note


def test_memory_limit_is_restored() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    with limited_memory(100.0):
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == 100_000_000_000
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.slow
def test_without_a_gpu_a_limit_must_be_given() -> None:
    ran = run("mode=study", "study=batch_size")
    assert ran.returncode == 2 and "study.memory_gb=null" in ran.stderr


@pytest.mark.slow
def test_a_real_run_dies_for_want_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes with 1.6 GB each, of a network with one wide layer, whose output takes 512 MiB.
    The smaller batches are no runs here."""
    size = 131072
    hidden = 1024
    data = [
        "data=synthetic",
        "data.samples=262144",
        "data.image_size=2",
        "data.channels=1",
        "data.test_samples=16",
    ]
    model = ["model=mlp", f"model.hidden={hidden}", "model.layers=1"]
    words = [
        "study=batch_size",
        "study.memory_gb=1.6",
        f"study.start={size // 2}",
        "study.resolution=0.9",
    ]
    monkeypatch.setattr(batch_size, "run", Runs(10**9, samples=262144, real=(size,)))
    report, code = batch_size.study(asked(*words, *model, *data, f"run_dir={tmp_path}"))
    rows = report.tables[0].rows
    assert code == 0 and [row[0] for row in rows] == [size // 2, 3 * size // 4, size]
    assert rows[2][2] is None and rows[2][4] == "out of memory", rows[2]
    assert "largest" in rows[1][4] and rows[0][4] == "fits"
    (failure,) = tmp_path.glob(f"trials/{size}_samples*/0/failure.json")
    assert f"you tried to allocate {4 * size * hidden} bytes" in failure.read_text(), (
        "for the batch, and no earlier"
    )
