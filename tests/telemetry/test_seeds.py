"""Settings of a sweep over seeds: what is noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_train.telemetry.pages.page import as_page
from ddp_train.telemetry.pages.seeds import SeedGroups
from tests.support.pages import BOUND, page_of_sweep, sweep_rows


def seeded(**losses: list[float]) -> list[dict[str, Any]]:
    """Rows of a sweep over settings and seeds."""
    runs = [
        (name, seed, loss) for name, values in losses.items() for seed, loss in enumerate(values)
    ]
    return [
        {"trial": trial, "overrides": [f"optimizer.name={name}", f"seed={seed}"], "objective": loss}
        for trial, (name, seed, loss) in enumerate(runs)
    ]


def test_seeds_are_grouped_and_noise_is_told_from_effect(tmp_path: Path) -> None:
    rows = sweep_rows(tmp_path, optimizer__lr=[0.1, 0.2], model__hidden=[8, 16], seed=[0, 1, 2])
    report = page_of_sweep(tmp_path, rows)
    seeds = next(table for table in report.tables if "over seeds" in table.title)
    assert [row[0] for row in seeds.rows[:2]] == [
        "optimizer.lr=0.2 model.hidden=8",
        "optimizer.lr=0.2 model.hidden=16",
    ]
    assert (
        seeds.rows[0][1:6] == pytest.approx([61.0, 1.0, 60.0, 62.0, 3])
        and seeds.rows[2][6] < 0.01 < seeds.rows[1][6]
    )
    assert "1.00%" in report.findings[0] and "12 runs" in report.findings[0]
    assert (
        "its difference from optimizer.lr=0.2 model.hidden=16 is within the noise."
        in report.findings[1]
    )
    assert [plot.chart["kind"] for plot in report.plots if plot.chart] == ["curves", "parallel"]
    assert len(as_page(report).encode()) < BOUND


def test_trial_that_repeats_a_seed_is_no_measure_of_noise() -> None:
    rows = seeded(sgd=[0.5, 0.5])
    for seed in ("0", "00", "+0"):
        rows[1]["overrides"][1] = f"seed={seed}"
        assert SeedGroups(rows, "test.loss", "min").findings() == []
    rows = seeded(sgd=[0.5, 0.5, 0.7], adam=[0.6])
    rows[1]["overrides"][1] = "seed=0"
    groups = SeedGroups(rows, "test.loss", "min")
    assert groups.values == {"optimizer.name=sgd": [0.5, 0.7], "optimizer.name=adam": [0.6]}
    without_seed = [row | {"overrides": row["overrides"][:1]} for row in seeded(sgd=[0.5, 0.5])]
    assert SeedGroups(without_seed, "test.loss", "min").findings() == [], "lr=0.1,0.1"


def test_seed_that_changes_more_is_no_measure_of_noise() -> None:
    """As with `train.epochs='${seed}'`."""
    rows = [row | {"tied_to_seed": ["train.epochs"]} for row in seeded(sgd=[0.5, 0.7])]
    groups = SeedGroups(rows, "test.loss", "min")
    assert groups.repeated == [] and len(groups.values) == 2


def test_settings_that_ran_once_are_not_said_to_be_worse(tmp_path: Path) -> None:
    rows = sweep_rows(tmp_path, optimizer__lr=[0.1, 0.2, 0.3], seed=[0, 1, 2])
    assert (
        page_of_sweep(tmp_path, rows)
        .findings[1]
        .startswith("optimizer.lr=0.3 is better than all others by more")
    )
    found = page_of_sweep(tmp_path, [row for row in rows if row["trial"] not in (1, 2)]).findings[1]
    assert "is better than optimizer.lr=0.2 by more than noise" in found, found
    assert found.endswith(" 1 other ran once and cannot be compared.") and "all others" not in found


def test_diverging_setting_is_no_noise_of_the_others() -> None:
    rows = seeded(sgd=[0.51, 0.57], adam=[0.5, 0.6], lars=[2.4, 4.6])
    spread, close, apart = SeedGroups(rows, "test.loss", "min").findings()
    assert "differ by 0.0424 to 1.5556 (" in spread and "3 settings, 6 runs" in spread
    assert close.endswith("its difference from optimizer.name=adam is within the noise.")
    assert apart.startswith(
        "Each run of optimizer.name=sgd is better than each of optimizer.name=lars."
    )
    spread, apart = SeedGroups(
        seeded(sgd=[0.9, 0.91], adam=[0.1, 0.5]), "test.accuracy", "max"
    ).findings()
    assert "each of optimizer.name=adam" in apart and "noise" not in apart, "higher is better"


def test_each_repeated_setting_is_in_a_sentence() -> None:
    rows = seeded(sgd=[0.50, 0.51, 0.52], adam=[0.51, 0.52, 0.53], lars=[0.9, 0.91, 0.92])
    _, close, worse = SeedGroups(rows, "test.loss", "min").findings()
    assert worse.startswith("optimizer.name=sgd is better than optimizer.name=lars by more than")
    assert close.endswith("its difference from optimizer.name=adam is within the noise.")
