"""The largest batch that fits: the search, and real runs that die for want of memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_train.study.batch_size import largest, limited_memory
from tests.commands import run


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
