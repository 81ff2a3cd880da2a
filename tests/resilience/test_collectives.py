"""Where the collectives of ranks part, from their records."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_train.resilience import collectives


def record(*calls: str, begin: int = 1, group: str = "0") -> collectives.Calls:
    return {group: {begin + i: collectives.Call(name, "Float [3]") for i, name in enumerate(calls)}}


GAP: collectives.Calls = {"0": {**record("a")["0"], **record("b", begin=4)["0"]}}


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ({0: record("all_reduce", "all_reduce"), 1: record("all_reduce", "all_reduce")}, ""),
        ({0: record("all_reduce")}, ""),
        ({}, ""),
        (
            {
                0: record("all_reduce", "broadcast"),
                1: record("all_reduce"),
                2: record("all_reduce", "broadcast"),
            },
            "ranks 0, 2 called broadcast of Float [3] (collective 2), rank 1 did not",
        ),
        (
            {
                0: record("barrier", "broadcast"),
                1: record("barrier", "gather"),
                2: record("barrier", "gather"),
            },
            (
                "ranks 1, 2 called gather of Float [3] (collective 2); rank 0 called broadcast of"
                " Float [3] instead"
            ),
        ),
        # Old calls are overwritten: the first that both have is the fifth.
        (
            {0: record("a", "b", "c", begin=4), 1: record("b", begin=5)},
            "rank 0 called c of Float [3] (collective 6), rank 1 did not",
        ),
        ({0: GAP, 1: GAP}, ""),
        ({0: GAP, 1: record("a")}, "rank 0 called b of Float [3] (collective 4), rank 1 did not"),
        (
            {0: record("a") | record("x", group="1"), 1: record("a")},
            "rank 0 called x of Float [3] (collective 1), rank 1 did not",
        ),
    ],
)
def test_where_the_collectives_of_ranks_part_is_told(
    ranks: dict[int, collectives.Calls], said: str
) -> None:
    assert collectives.compare(ranks) == said


def test_a_record_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    assert collectives.calls_of(tmp_path, 0) is None
    for text in ('{"entries": [{"profiling_name": 1}]}', "[]", '{"entr', '{"entries": 3}'):
        collectives.record_file(tmp_path, 0).write_text(text)
        assert collectives.calls_of(tmp_path, 0) is None, text
    collectives.record_file(tmp_path, 0).write_text("{}")
    assert collectives.calls_of(tmp_path, 0) == {}
