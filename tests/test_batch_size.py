"""The largest batch that fits: the search, and real runs that die for want of memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_train.health import write_json
from ddp_train.study import batch_size
from ddp_train.study.batch_size import largest, limited_memory
from ddp_train.study.facts import conditions
from ddp_train.study.request import Request, read_request
from ddp_train.study.trials import Outcome, Trial, outcome_of
from tests.commands import ROOT, run


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 200), st.sampled_from([0.02, 0.1, 0.5]))
def test_the_search_ends_just_below_the_limit(limit: int, start: int, resolution: float) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        assert size not in tried, "a run is made once"
        tried.append(size)
        return size <= limit

    found = largest(fits, start, 1 << 24, resolution)
    assert found.largest == max([size for size in tried if size <= limit], default=0) and found.limited
    next_one = min(size for size in tried if size > limit)
    assert next_one - found.largest <= max(1, resolution * found.largest)
    assert len(tried) < 45


def test_the_search_ends_where_there_is_nothing_more_to_try() -> None:
    assert vars(largest(lambda size: True, 8, 100, 0.1)) == {"largest": 100, "limited": False}
    assert vars(largest(lambda size: True if size < 64 else None, 8, 10**6, 0.1)) == {"largest": 64, "limited": False}


class Runs:
    """In place of processes: what runs of 20 steps on 1,433 samples would leave, of which `most` a process fit."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.sizes: list[int] = []

    def __call__(self, trial: Trial, script: Path, stop: object) -> Outcome | None:
        batch = int(next(word for word in trial.words if word.startswith("train.global_batch_size=")).partition("=")[2])
        self.sizes.append(batch // 2)
        fits = batch // 2 <= self.most
        shutil.rmtree(trial.run_dir, ignore_errors=True)
        trial.run_dir.mkdir(parents=True)
        (trial.run_dir / "metrics.jsonl").write_text("".join(
            json.dumps({"kind": "train", "step": step, "epoch": 1 + (step - 1) // -(-1433 // batch),
                        "samples_per_second": 1e3 * batch}) + "\n"
            for step in range(2, 21, 2)
        ))  # fmt: skip
        ended = {"status": "completed"} if fits else {"status": "failed"}
        write_json(trial.run_dir / "summary.json", ended)
        if not fits:
            write_json(trial.run_dir / "failure.json", {"kind": "oom", "detail": "can't allocate memory"})
        record = {"words": trial.words, "exit_code": 0 if fits else 70, "seconds": 1.0}
        write_json(trial.record, {**record, "conditions": conditions(script)})
        return outcome_of(trial)


def asked(folder: Path, *words: str) -> Request:
    given = ["mode=study", "study=batch_size", "study.memory_gb=2", "data=digits", f"run_dir={folder}", *words]
    return read_request(ROOT / "launch.py", ROOT / "conf", given)


@pytest.mark.parametrize(
    ("most", "sizes"), [(10**9, [2**power for power in range(3, 11)]), (100, [8, 16, 32, 64, 128])]
)
def test_an_epoch_that_ends_within_a_run_does_not_end_the_search(
    most: int, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1,433 samples: two processes have all of them in one step with 1,024 each."""
    runs = Runs(most)
    monkeypatch.setattr(batch_size, "run", runs)
    report, code = batch_size.study(asked(tmp_path))
    assert code == 0 and runs.sizes[: len(sizes)] == sizes
    marked = [row for row in report.tables[0].rows if "largest" in row[4]]
    assert [row[0] for row in marked] == [1024 if most > 1024 else 96]
    assert ("search ended before memory did" in report.tables[0].note) == (most > 1024)


def test_only_what_tells_of_memory_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(100)
    monkeypatch.setattr(batch_size, "run", runs)
    before, code = batch_size.study(asked(tmp_path))
    assert code == 0 and runs.sizes == [8, 16, 32, 64, 128, 96, 112, 104], "104 is within a tenth of 96"
    (summary,) = tmp_path.glob("trials/32_samples*/0/summary.json")
    write_json(summary, {"status": "failed"})
    write_json(summary.with_name("failure.json"), {"kind": "peer", "detail": "another process is gone"})
    runs.sizes.clear()
    after, code = batch_size.study(asked(tmp_path))
    assert code == 0 and runs.sizes == [32] and after.tables == before.tables
    runs.sizes.clear()
    batch_size.study(asked(tmp_path, "study.memory_gb=4"))
    assert len(runs.sizes) == 8, "with more memory all is to be tried again"


def test_a_limit_of_memory_is_taken_back() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    with limited_memory(100.0):
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == 100_000_000_000
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_without_a_gpu_a_limit_must_be_given() -> None:
    ran = run("mode=study", "study=batch_size")
    assert ran.returncode == 2 and "study.memory_gb=null" in ran.stderr


@pytest.mark.slow
def test_real_runs_die_for_want_of_memory(tmp_path: Path) -> None:
    """Two processes of a network with one wide layer: 32,768 samples fit into 1.6 GB each, 65,536 do not."""
    data = ["data=synthetic", "data.samples=262144", "data.image_size=2", "data.channels=1", "data.test_samples=16"]
    model = ["model=mlp", "model.hidden=1024", "model.layers=1"]
    words = ["study.memory_gb=1.6", "study.start=32768", "study.steps=10", "study.resolution=0.9"]
    ran = run("mode=study", "study=batch_size", *words, *model, *data, f"run_dir={tmp_path}")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = json.loads((tmp_path / "report.json").read_text())["tables"][0]["rows"]
    assert [row[0] for row in rows] == [32768, 49152, 65536]
    assert rows[0][2] > 0 and rows[2][2] is None and rows[2][4] == "out of memory"
    assert [row[0] for row in rows if "largest" in row[4]] == [32768 if rows[1][2] is None else 49152]
