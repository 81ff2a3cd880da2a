"""Measurements of a study's runs, and when a difference is called one."""

from __future__ import annotations

import itertools

import pytest

from ddp_lab.study import results
from ddp_lab.study.results import METRICS, metric_named, verdict
from tests.support.studies import outcome


def test_a_verdict_needs_every_run_to_be_better() -> None:
    time = METRICS["epoch_seconds"]
    score = METRICS["test.accuracy"]
    assert verdict(time, [3.0, 3.1, 3.2], [2.0, 2.9, 1.0]) == "faster"
    assert verdict(time, [3.0, 3.1, 3.2], [3.3, 4.0, 9.0]) == "slower"
    assert verdict(time, [3.0, 3.1, 3.2], [1.0, 1.0, 3.0]) == "no effect within the noise"
    assert verdict(score, [90.0, 91.0, 92.0], [93.0, 94.0, 95.0]) == "better"
    assert verdict(score, [90.0, 91.0, 92.0], [89.0, 88.0, 87.0]) == "worse"
    assert verdict(time, [3.0, 3.1], [1.0, 1.0, 1.0]) == "too few runs"
    assert verdict(time, [], [1.0]) == ""


def test_a_metric_of_the_users_is_one_of_a_study() -> None:
    run = outcome([9.0])
    run.summary.update({"validation": {"f1": 0.5, "f1_macro": 0.25}, "better": {"f1": "max"}})
    run.metrics.append({"kind": "hook", "step": 2, "vae/kl": 3.0})
    run.metrics.append({"kind": "train", "step": 3, "vae/kl": float("nan")})
    f1 = metric_named("validation.f1", [run])
    assert (f1.label, f1.values([run]), f1.better) == ("validation f1", [0.5], "max")
    macro = metric_named("validation.f1_macro", [outcome([9.0]), run])
    assert (macro.label, macro.values([run]), macro.better) == (
        "validation f1_macro %",
        [25],
        "max",
    )
    kl = metric_named("vae/kl", [run])
    assert (kl.label, kl.values([run]), kl.better) == ("hook vae/kl", [3.0], None)
    assert kl.gain(3.0, 5.0) == 2.0 and verdict(kl, [3.0] * 3, [5.0] * 3) == "higher"
    assert {"validation.f1", "hook.vae/kl", "test.loss"} < {*results.files_of(run).numbers}
    assert metric_named("test.f1", [run]).values([run]) == []


@pytest.mark.parametrize(("runs", "others"), [(3, 3), (3, 4), (2, 2)])
def test_how_often_chance_alone_looks_like_an_effect(runs: int, others: int) -> None:
    """Counted: every way to deal ranks to two variants."""
    ranks = range(runs + others)
    deals = list(itertools.combinations(ranks, runs))
    apart = [
        d for d in deals if max(d) < min(set(ranks) - set(d)) or min(d) > max(set(ranks) - set(d))
    ]
    assert results.false_positive_rate(runs, others) == pytest.approx(len(apart) / len(deals))


def test_the_first_epoch_counts_only_where_it_is_the_only_one() -> None:
    assert (
        results.epoch_seconds(outcome([9.0, 2.0, 4.0])) == 3.0
        and results.first_epoch(outcome([9.0, 2.0])) == 9.0
    )
    assert (
        results.epoch_seconds(outcome([9.0])) == 9.0 and results.first_epoch(outcome([9.0])) is None
    )
    assert results.samples_per_second(outcome([9.0, 2.0, 2.0])) == 50.0
