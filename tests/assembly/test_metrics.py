"""Names of metrics."""

from __future__ import annotations

from ddp_train.assembly.metrics import reserved_names


def test_a_metric_must_not_be_another_field_of_its_line() -> None:
    (problem,) = reserved_names("my.Task", ["loss", "step", "correct", "distance"])
    assert problem == (
        "task._target_=my.Task: score() returns a metric step, but metrics.jsonl has a step of its"
        " own; give it another name"
    )
