"""Charts as data: what is drawn of a curve."""

from __future__ import annotations

from ddp_train.telemetry.pages.charts import Axis, Curve, curves, thinned


def test_a_long_curve_keeps_its_ends_and_its_spikes() -> None:
    values = [1.0] * 100_000
    values[77_777], values[5] = 50.0, -3.0
    kept = thinned(range(100_000), values)
    assert len(kept) <= 602 and {0, 5, 77_777, 99_999} <= {*kept} and kept == sorted(kept)
    assert curves([Curve("a", [1, 2], [None, float("nan")])], Axis("x"), Axis("y")) is None, (
        "nothing to draw"
    )


def test_a_curve_that_is_nearly_flat_has_no_steps_of_rounding() -> None:
    rates = [0.05 - 1e-8 * step for step in range(300)]
    (curve,) = curves([Curve("lr", range(300), rates)], Axis("step"), Axis("lr"))["curves"]  # type: ignore
    assert len({y for _, y in curve["points"]}) == 300
    (curve,) = curves([Curve("loss", range(2), [2.0, 1 / 3])], Axis("step"), Axis("loss"))["curves"]  # type: ignore
    assert curve["points"] == [[0, 2.0], [1, 0.333333]]
